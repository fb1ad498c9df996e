"""The typed schema of the config: the type, kind and legacy default of every key.

Hydra composes a config with these classes, and `RunSpec.config` consists of their
instances. The default of a field reproduces the behavior before the key existed, for
old records that lack the key. The defaults for new runs are in `conf/`, and may differ.
The comment above a field is its description in help texts and in the config reference;
`key_guide` reads the comments, and has the group of each key.
"""

from collections.abc import Iterator
from dataclasses import (
    Field,
    FrozenInstanceError,
    dataclass,
    field,
    fields,
    is_dataclass,
    make_dataclass,
)
from enum import Enum
from functools import cache
from typing import Any, get_args, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from pipeline.common.errors import ConfigError

# The value of each choice is its word. If it were a number, a config could choose by
# that number.


class Rule(Enum):
    none = "none"
    linear = "linear"
    sqrt = "sqrt"
    sde = "sde"
    half_life = "half_life"
    timescale = "timescale"
    surge = "surge"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


class Resume(Enum):
    auto = "auto"


class Mode(Enum):
    min = "min"
    max = "max"


class Unreachable(Enum):
    refuse = "refuse"
    wait = "wait"
    offline = "offline"


class Precision(Enum):
    float32 = "float32"
    float64 = "float64"
    mixed_bfloat16 = "mixed_bfloat16"
    mixed_float16 = "mixed_float16"


class XlaScope(Enum):
    step = "step"
    apply = "apply"
    update = "update"


class Statistics(Enum):
    effective = "effective"
    micro = "micro"


class Added(Enum):
    mean = "mean"
    sum = "sum"


class LossOver(Enum):
    example = "example"
    effective_batch = "effective_batch"


# The version of this schema. `former_names.migrated` and `pipeline.rerun.recorded_run`
# handle older records.
SCHEMA = 3
# Type of a key that holds text → the same type with any value instead of text; see
# `as_written`.
TEXTS: dict[Any, Any] = {
    str: Any,
    str | None: Any,
    list[str]: list[Any],
    list[str] | None: list[Any] | None,
    dict[str, str]: dict[str, Any],
}


class Kind(Enum):
    """The kind of a config key: the part of a run that the key affects.

    Two runs count as the same run if they agree in all keys of the first three kinds.
    """

    TRAINING = "training"  # the computation: another value gives other results
    CUT = "cut"  # how an effective batch is cut into micro-batches and over replicas
    NUMERICS = "numerics"  # the precision and the kernels of the computation
    PLACE = "place"  # how and when the run is carried out
    LOG = "log"  # the logged values and their names
    MACHINE = "machine"  # settings of one machine, and secrets


@dataclass(frozen=True)
class KeyFacts:
    """The properties of a config key; `pipeline.config.key_kinds` looks them up.

    Attributes:
        kind: the part of a run that the key affects.
        fixed: whether a resumed run must keep the value that the run began with. True
            by default for the kind `TRAINING`.
        each_workers_own: whether each worker keeps its own value instead of getting the
            chief's. True by default for the kinds `LOG` and `MACHINE`.
        of_one_call: whether the value applies to one call of the command only: places
            that it reads and writes, or ports that it opens. Such a value is never
            taken from the record of a sweep.
        set_by_a_sweep: whether only a sweep sets the key, for its jobs. Help texts do
            not show such a key.
        same_data: whether another value changes only the place of the data or the way
            of reading it, and not the data itself.
        sets_rate: whether the learning rate depends on the key.
        path: whether the value is a path or a list of paths, in which a leading `~` is
            the home directory.
    """

    kind: Kind
    fixed: bool
    each_workers_own: bool
    of_one_call: bool = False
    set_by_a_sweep: bool = False
    same_data: bool = False
    sets_rate: bool = False
    path: bool = False


def facts(
    kind: Kind,
    *,
    fixed: bool | None = None,
    each_workers_own: bool | None = None,
    **others: bool,
) -> KeyFacts:
    """Return the facts of a key. Facts that are not given follow from its kind."""
    if fixed is None:
        fixed = kind == Kind.TRAINING
    if each_workers_own is None:
        each_workers_own = kind in (Kind.LOG, Kind.MACHINE)
    return KeyFacts(kind, fixed, each_workers_own, **others)


def about(
    kind: Kind, *, exceptions: dict[str, KeyFacts] | None = None, **named: bool
) -> dict[str, Any]:
    """Return the metadata for the dataclass field of a key.

    Args:
        kind: the kind of the key.
        exceptions: facts of single names below the key, by name. All other names below
            it, such as the arguments of a `_target_`, have the facts of the key.
        named: the facts of the key that differ from the defaults of its kind.
    """
    return {"facts": facts(kind, **named), "exceptions": exceptions or {}}


class _SetOnce:
    """A base class whose attributes can be set only once.

    Frozen dataclasses are not used, as OmegaConf converts them to read-only nodes.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


@dataclass
class ScalingConfig(_SetOnce):
    # how the learning rate and the optimizer's other arguments follow the effective
    # batch size
    rule: Rule = field(default=Rule.none, metadata=about(Kind.TRAINING, sets_rate=True))
    # the effective batch size for which `optimizer.learning_rate` was chosen
    reference_batch_size: int = field(
        default=128, metadata=about(Kind.TRAINING, sets_rate=True)
    )
    # (int | share) updates until the scaled rate is reached, or a share of the horizon
    # such as `5%`
    warmup: Any = field(default=0, metadata=about(Kind.TRAINING, sets_rate=True))
    # (sqrt | null) for `half_life` and `timescale`: sqrt also scales the rate by √κ;
    # null keeps it
    rate: Any = field(default=None, metadata=about(Kind.TRAINING, sets_rate=True))
    # for `surge`: the effective batch size at which the learning rate is largest; this
    # size is not the gradient noise scale
    peak_batch_size: int | None = field(
        default=None, metadata=about(Kind.TRAINING, sets_rate=True)
    )
    # (true | false) whether the momentum of the optimizer's weight averaging is raised
    # to the power of κ
    ema: Any = field(default=False, metadata=about(Kind.TRAINING, sets_rate=True))


@dataclass
class AccumulationConfig(_SetOnce):
    """The effective batch size, and how the effective batch is cut.

    Three keys of the kind `TRAINING` are not `fixed`. Instead of
    `effective_batch_size`, a resumed run compares the size that is derived from all
    keys. For `same_noise` and `moving_statistics`, the defaults for new runs differ
    from those for old records, whose runs must remain resumable.
    """

    # examples per optimizer update, over all replicas
    effective_batch_size: int | None = field(
        default=None, metadata=about(Kind.TRAINING, fixed=False)
    )
    # micro-batches per update on each replica
    factor: int | None = field(default=None, metadata=about(Kind.CUT))
    # (int | auto | auto_fastest | null) examples per forward and backward pass on one
    # replica; null: derived from `effective_batch_size` and `factor`; auto: the
    # largest that fits; auto_fastest: the smallest with 98% of the best speed
    micro_batch_size: Any = field(default=None, metadata=about(Kind.CUT))
    # tokens per forward and backward pass on one replica, padding included; set instead
    # of `factor`; see docs/accumulation.md
    micro_batch_tokens: int | None = field(default=None, metadata=about(Kind.CUT))
    # (true | false | auto) whether dropout and noise stay the same however an update is
    # cut into micro-batches; auto: in layers that support it
    same_noise: Any = field(default=False, metadata=about(Kind.TRAINING, fixed=False))
    # (stages | null) other effective batch sizes later in the run; see
    # docs/batch_schedules.md
    batch_schedule: Any = field(default=None, metadata=about(Kind.TRAINING))
    # whether BatchNormalization's statistics move once per update or per micro-batch
    moving_statistics: Statistics = field(
        default=Statistics.micro, metadata=about(Kind.TRAINING, fixed=False)
    )
    # updates between two measurements of the gradient noise scale
    noise_scale_every: int = field(default=10, metadata=about(Kind.NUMERICS))


@dataclass
class KeepBestConfig(_SetOnce):
    # the metric that decides which checkpoint is kept as the best, such as `val/loss`;
    # null: no best checkpoint is kept
    metric: str | None = field(default=None, metadata=about(Kind.TRAINING, fixed=False))
    # whether the smallest or the largest value of this metric is best
    mode: Mode | None = field(default=None, metadata=about(Kind.TRAINING, fixed=False))


@dataclass
class TrainingConfig(_SetOnce):
    # the horizon in epochs; exactly one of `epochs`, `updates` and `examples` is set
    epochs: int | None = field(default=None, metadata=about(Kind.TRAINING, fixed=False))
    # the horizon in updates
    updates: int | None = field(
        default=None, metadata=about(Kind.TRAINING, fixed=False)
    )
    # the horizon in examples
    examples: int | None = field(
        default=None, metadata=about(Kind.TRAINING, fixed=False)
    )
    # (int | epoch | epoch/N) updates from one evaluation to the next
    evaluate_every: Any = field(
        default="epoch", metadata=about(Kind.TRAINING, fixed=False)
    )
    # (true | false) also evaluate before the first update, and log the results at step 0
    evaluate_at_start: Any = field(
        default=False, metadata=about(Kind.TRAINING, fixed=False)
    )
    # (int | epoch | auto | null) updates from one checkpoint to the next; auto: by time
    checkpoint_every: Any = field(default=None, metadata=about(Kind.PLACE))
    # (node | mapping | list | null) the loss to minimize, or one per output; set by
    # `objective`
    loss: Any = field(default=MISSING, metadata=about(Kind.TRAINING))
    # (mapping | list | null) the weight of each output's loss
    loss_weights: Any = field(default=None, metadata=about(Kind.TRAINING))
    # whether a scalar that a layer adds to the loss is a mean or a sum over the
    # examples
    added_losses: Added = field(default=Added.mean, metadata=about(Kind.TRAINING))
    # whether the loss is computed for each example by itself or for the whole effective
    # batch at once; the latter takes a second forward pass
    loss_over: LossOver = field(default=LossOver.example, metadata=about(Kind.TRAINING))
    # (mapping | null) the weight of the examples in each class; 1 for a class that is
    # not listed
    class_weight: Any = field(default=None, metadata=about(Kind.TRAINING))
    # metrics, as {name: node} or, by output, {output: {name: node}}; set by
    # `objective`
    metrics: dict[str, Any] = field(default_factory=dict, metadata=about(Kind.TRAINING))
    # metrics to which the sample weights are applied, given as in `metrics`
    weighted_metrics: dict[str, Any] = field(
        default_factory=dict, metadata=about(Kind.TRAINING)
    )
    # Keras callbacks, as {name: node}; to a callback, each update is one batch
    callbacks: dict[str, Any] = field(
        default_factory=dict, metadata=about(Kind.TRAINING, fixed=False)
    )
    # functions of (x, y, outputs) that return a picture, a figure or a table to log at
    # each evaluation, as {name: node}
    shown: dict[str, Any] = field(default_factory=dict, metadata=about(Kind.LOG))
    # `auto`: start the run in `hydra.run.dir`, or resume it if it exists
    resume: Resume | None = field(default=None, metadata=about(Kind.MACHINE))
    # (true | false) whether a run may be resumed although your own code has changed
    accept_changed_code: Any = field(default=False, metadata=about(Kind.PLACE))
    keep_best: KeepBestConfig | None = field(default_factory=KeepBestConfig)


@dataclass
class StartConfig(_SetOnce):
    """The checkpoint that a run starts from.

    Each worker keeps its own values, as a run directory may have another path on
    another machine.
    """

    # RUN, a run directory or the start of a run ID: start from its newest checkpoint;
    # RUN@UPDATE: from the checkpoint after that update; models:/NAME@ALIAS: from the
    # weights of that registered model
    run: str | None = field(
        default=None, metadata=about(Kind.TRAINING, each_workers_own=True, path=True)
    )
    # (true | false) true: load only the model's weights and count updates from 0
    weights_only: Any = field(
        default=False, metadata=about(Kind.TRAINING, each_workers_own=True)
    )


@dataclass
class HardwareConfig(_SetOnce):
    # `auto` uses a GPU if there is one
    device: Device = field(default=Device.auto, metadata=about(Kind.NUMERICS))
    # GPUs to use, or logical CPU devices if there is no GPU
    replicas: int = field(default=1, metadata=about(Kind.CUT))
    # processes that train this run; null: as many as `TF_CONFIG` or the Slurm step has
    workers: int | None = field(default=1, metadata=about(Kind.CUT))
    # (true | false) whether several workers may open TensorFlow's ports, without a
    # password, to other machines
    open_ports: Any = field(
        default=False, metadata=about(Kind.MACHINE, of_one_call=True)
    )
    # file of mode 0600 with the workers' secret, on each worker's machine; its path is
    # never recorded, and `PIPELINE_SECRET` takes precedence over it
    secret_file: str | None = field(
        default=None, metadata=about(Kind.MACHINE, of_one_call=True, path=True)
    )
    # (float32 | float64 | mixed_bfloat16 | mixed_float16) format of the numbers; mixed:
    # 16 bits in the layers, with the variables in float32
    precision: Precision = field(
        default=Precision.float32, metadata=about(Kind.NUMERICS, fixed=True)
    )
    # number of sweep jobs that run at once on this machine; null: as many as its GPUs
    # allow, or one without a GPU
    parallel_jobs: int | None = field(default=None, metadata=about(Kind.PLACE))
    # GPUs for each job of a sweep
    gpus_per_job: int = field(default=1, metadata=about(Kind.PLACE))
    # number of sweep jobs that run at once on each GPU; give each its share with
    # `gpu_memory`
    jobs_per_gpu: int = field(default=1, metadata=about(Kind.PLACE))
    # (int | list | null) the GPUs of a run outside a sweep, by index from 0; null: the
    # first ones
    gpu: Any = field(default=None, metadata=about(Kind.MACHINE))
    # (bytes | text | null) the memory that TensorFlow reserves on each GPU, such as
    # `8GiB`; null: TensorFlow allocates memory as needed
    gpu_memory: Any = field(default=None, metadata=about(Kind.MACHINE))
    # (bytes | text | null) the memory of which a search for the micro-batch size may
    # fill 90% on a CPU, such as `8GiB`; null: the memory of the machine, or the limit
    # of its control group
    memory: Any = field(default=None, metadata=about(Kind.MACHINE))
    # (auto | fastest | true | false) compile with XLA; auto: on one GPU, as Keras' `fit`
    # does; fastest: if timed updates are faster with it; the decision is recorded
    xla: Any = field(default=False, metadata=about(Kind.NUMERICS))
    # (auto | list | null) with `micro_batch_tokens`, the lengths to which micro-batches
    # are padded for XLA; auto: at most 4 lengths on a GPU and 16 on a CPU, chosen for
    # the least padding; null: XLA does not compile
    xla_lengths: Any = field(default=None, metadata=about(Kind.NUMERICS))
    # what XLA compiles; step: each micro-step by itself; apply: on one device, also the
    # optimizer's step; update: a whole update of a small batch, as one program
    xla_scope: XlaScope = field(default=XlaScope.step, metadata=about(Kind.NUMERICS))
    # (auto | true | false) compute attention with one cuDNN kernel where XLA compiles,
    # on GPUs of NVIDIA's Hopper generation; auto: wherever possible
    fused_attention: Any = field(default=False, metadata=about(Kind.NUMERICS))
    # (true | false) whether GPUs of NVIDIA's Ampere and later generations multiply
    # float32 numbers with 10 bits of mantissa; see docs/exact.md
    tf32: Any = field(default=True, metadata=about(Kind.NUMERICS))
    # (true | false) whether two runs of a config on the same machine are bit-identical
    deterministic: Any = field(default=False, metadata=about(Kind.NUMERICS))
    # (mapping | null) `{start: 10, updates: 5}`: log a trace of 5 updates, from the
    # 10th on
    profile: Any = field(default=None, metadata=about(Kind.LOG))


@dataclass
class ShownTrackingConfig(_SetOnce):
    """The keys of `tracking` that users set."""

    # MLflow tracking URI: SQLite, another SQL database, or an HTTP server
    uri: str = field(
        default=MISSING, metadata=about(Kind.MACHINE, of_one_call=True, path=True)
    )
    # name of the MLflow experiment
    experiment: str = field(default=MISSING, metadata=about(Kind.LOG))
    # name of the run; null: composed of the name of the experiment or dataset, and the
    # overrides
    run_name: str | None = field(default=None, metadata=about(Kind.LOG))
    # tags of the run, as {name: text}; tags that the program sets take precedence
    tags: dict[str, str] = field(default_factory=dict, metadata=about(Kind.LOG))
    # description of the run, in Markdown
    description: str | None = field(default=None, metadata=about(Kind.LOG))
    # log every Nth update
    log_every: int = field(default=1, metadata=about(Kind.LOG))
    # (mapping | null) log examples, a confusion matrix and a reliability curve at each
    # evaluation; `{}` means `{examples: 16, confusion: true, reliability: true}`
    show: Any = field(default=None, metadata=about(Kind.LOG))
    # (true | false) log the trained model with its signature
    log_model: Any = field(default=True, metadata=about(Kind.LOG))
    # name in MLflow's registry under which the logged model is registered, as a new
    # version; null: none
    register: str | None = field(default=None, metadata=about(Kind.LOG))
    # paths logged with the model; null: the local modules that the model uses
    code: list[str] | None = field(
        default_factory=list, metadata=about(Kind.LOG, path=True)
    )
    # (true | false) log MLflow's system metrics
    system_metrics: Any = field(default=True, metadata=about(Kind.LOG))
    # seconds to wait for an answer from the store, at the start and at the end of a run
    patience: float = field(default=60.0, metadata=about(Kind.LOG))
    # what to do if the store does not answer at the start
    when_unreachable: Unreachable = field(
        default=Unreachable.refuse, metadata=about(Kind.LOG)
    )


@dataclass
class TrackingConfig(ShownTrackingConfig):
    """All keys of `tracking`, including those that only a sweep sets, for its jobs."""

    # the run ID of the parent run
    sweep: str | None = field(
        default=None, metadata=about(Kind.LOG, of_one_call=True, set_by_a_sweep=True)
    )
    # the job's name
    job: str | None = field(
        default=None, metadata=about(Kind.LOG, of_one_call=True, set_by_a_sweep=True)
    )
    # (true | false) set by `--again`: artifacts must lie with the store, or where
    # `trust.allow` permits
    confined: Any = field(
        default=False, metadata=about(Kind.LOG, of_one_call=True, set_by_a_sweep=True)
    )


@dataclass
class TrustConfig(_SetOnce):
    # what records in a store may name in addition to what is always allowed: prefixes
    # of dotted names, and locations of artifacts
    allow: list[str] = field(
        default_factory=list, metadata=about(Kind.MACHINE, path=True)
    )


# Keys of `dataset` that do not depend on its `_target_`; all others are arguments of
# the target. `in_memory` and the keys for shuffling are of the kind `TRAINING`, as they
# affect the order of the examples.
_DATASET_KEYS = {
    "data_dir": facts(Kind.MACHINE, same_data=True, path=True),
    "download": facts(Kind.MACHINE, same_data=True),
    "token_cache": facts(Kind.MACHINE, same_data=True, path=True),
    "checksum": facts(Kind.PLACE, same_data=True),
    "in_memory": facts(Kind.TRAINING, same_data=True),
    "shuffle_buffer": facts(Kind.TRAINING, same_data=True),
    "shuffle_files": facts(Kind.TRAINING, same_data=True),
    "augment": facts(Kind.TRAINING, same_data=True),
    "lengths": facts(Kind.TRAINING, same_data=True),
    "pad": facts(Kind.TRAINING, same_data=True),
}
_OPTIMIZER_KEYS = {"learning_rate": facts(Kind.TRAINING, sets_rate=True)}


@dataclass
class Config(_SetOnce):
    # (node) the data; `dataset=CHOICE` selects a config of the group
    dataset: Any = field(
        default=MISSING, metadata=about(Kind.TRAINING, exceptions=_DATASET_KEYS)
    )
    # (node) the Keras model; `model=CHOICE` selects a config of the group
    model: Any = field(default=MISSING, metadata=about(Kind.TRAINING))
    # (node) the Keras optimizer; `optimizer=CHOICE` selects a config of the group
    optimizer: Any = field(
        default=MISSING, metadata=about(Kind.TRAINING, exceptions=_OPTIMIZER_KEYS)
    )
    # (node) the learning rate at each update; `schedule=CHOICE` selects a config of the
    # group
    schedule: Any = field(
        default=MISSING, metadata=about(Kind.TRAINING, sets_rate=True)
    )
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    start: StartConfig = field(default_factory=StartConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    # seed of the initial weights, the order of the examples, augmentation and noise
    seed: int = field(default=0, metadata=about(Kind.TRAINING))
    # version of this schema; do not set it
    schema: int = field(default=SCHEMA, metadata=about(Kind.TRAINING))


@dataclass
class ShownConfig(Config):
    """The config as help texts and `--cfg` show it."""

    tracking: ShownTrackingConfig = field(  # type: ignore[assignment]
        default_factory=ShownTrackingConfig
    )


def register(*, hide_sweep_keys: bool = False) -> None:
    """Register the schema and the resolver `times` with Hydra.

    The function may be called repeatedly.

    Args:
        hide_sweep_keys: whether to leave out the keys that only a sweep sets, for help
            texts and `--cfg`.
    """
    config = ShownConfig if hide_sweep_keys else Config
    ConfigStore.instance().store(name="schema", node=as_written(config))
    OmegaConf.register_new_resolver("times", _times, replace=True)


@cache
def as_written(config: type) -> type:
    """Return a variant of the schema in which a key that holds text accepts any value.

    OmegaConf would convert a number to text, but not always to the text that was
    written: `2024_01_02` becomes `20240102`. So Hydra composes a config with this
    variant, and `text_keys.check` rejects a value that is not text.

    Args:
        config: a dataclass of the schema.
    """
    hints = get_type_hints(config)
    loose_fields = []
    for key in fields(config):
        hint = hints[key.name]
        group = group_in(hint)
        if group is not None:
            loose = as_written(group)
            hint = loose if hint is group else loose | None
            loose_fields.append((key.name, hint, field(default_factory=loose)))
        elif hint in TEXTS:
            default = field(default=key.default, default_factory=key.default_factory)
            loose_fields.append((key.name, TEXTS[hint], default))
    loose_config = make_dataclass(config.__name__, loose_fields, bases=(config,))
    # Other processes find the class under this name, so that pickles refer to it.
    loose_config.__module__ = __name__
    loose_config.__qualname__ = f"{config.__name__}AsWritten"
    globals()[loose_config.__qualname__] = loose_config
    return loose_config


@dataclass(frozen=True)
class Key:
    """A key of the config, as the schema describes it.

    Attributes:
        name: the dotted name, such as `hardware.precision`.
        field: the field of the dataclass that holds the key.
        hint: the type hint of that field.
    """

    name: str
    field: Field
    hint: Any


def keys_in(schema: type, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass, with those of the groups in it.

    Args:
        schema: a dataclass of the schema.
        prefix: text before the name of each key, such as `hardware.`.
    """
    hints = get_type_hints(schema)
    for key_field in fields(schema):
        name = f"{prefix}{key_field.name}"
        hint = hints[key_field.name]
        group = group_in(hint)
        if group is None:
            yield Key(name, key_field, hint)
        else:
            yield from keys_in(group, f"{name}.")


def group_in(hint: Any) -> type | None:
    """Return the dataclass in a type hint such as `X` or `X | None`.

    Return None if the hint has no dataclass.
    """
    for part in (hint, *get_args(hint)):
        if is_dataclass(part) and isinstance(part, type):
            return part
    return None


def _times(left: Any, right: Any) -> int | float:
    """Return the product of two numbers.

    Raises:
        ConfigError: an operand is not a number, or is an integer of more than 63 bits.
            Text times a number, or huge integers, could fill the memory.
    """
    for factor in (left, right):
        integer = isinstance(factor, int) and not isinstance(factor, bool)
        if not (isinstance(factor, float) or (integer and abs(factor) < 2**63)):
            raise ConfigError("${times:…}", "must be given numbers", factor)
    return left * right


for _config in (Config, ShownConfig):
    as_written(_config)
