"""The typed schema of a run: every key with its type, and as its default what runs did before there was the key.

Hydra composes a config by these classes, and `RunSpec.config` is made of instances of them. The comment of a field, on
its line or above it, is its line in the config reference (docs/reference.py).
"""

from dataclasses import FrozenInstanceError, dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from pipeline.common.errors import ConfigError

Rule = Enum(
    "Rule",
    ["none", "linear", "sqrt", "sde", "half_life", "timescale", "surge"],
)
Device = Enum("Device", ["auto", "cpu", "gpu"])
Resume = Enum("Resume", ["auto"])
Mode = Enum("Mode", ["min", "max"])
Unreachable = Enum("Unreachable", ["refuse", "wait", "offline"])
Precision = Enum("Precision", ["float32", "float64", "mixed_bfloat16", "mixed_float16"])
Statistics = Enum("Statistics", ["effective", "micro"])
Added = Enum("Added", ["mean", "sum"])
LossOver = Enum("LossOver", ["example", "effective_batch"])
SCHEMA = 2  # of the config; pipeline.rerun.recorded_run says what older records need


class _SetOnce:
    """Frozen once it is made. With `dataclass(frozen=True)` OmegaConf would compose read-only nodes."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


@dataclass
class ScalingConfig(_SetOnce):
    # how the learning rate and the optimizer's other arguments follow the effective
    # batch
    rule: Rule = Rule.none
    # the effective batch size that `optimizer.learning_rate` is for
    reference_batch_size: int = 128
    # (int | share) updates until the scaled rate is reached, or a share of the horizon
    # such as `5%`
    warmup: Any = 0
    # (sqrt | null) of `half_life` and `timescale`: the rate × √κ too; null: it is kept
    rate: Any = None
    # of `surge`: the batch of the largest rate, not the gradient noise scale
    peak_batch_size: int | None = None
    # (true | false) the optimizer's weight averaging follows too: its momentum to the
    # power of κ
    ema: Any = False


@dataclass
class AccumulationConfig(_SetOnce):
    # examples per optimizer update, over all replicas
    effective_batch_size: int | None = None
    # micro-batches per update on each replica
    factor: int | None = None
    # (int | auto | auto_fastest | null) examples per forward and backward on one
    # replica
    micro_batch_size: Any = None
    # (true | false | auto) noise that does not depend on the cut; auto: of layers that
    # can
    same_noise: Any = False
    # (stages | null) effective batches of other sizes later; see docs/accumulation.md
    schedule: Any = None
    # BatchNormalization's move once per update or per micro-batch
    moving_statistics: Statistics = Statistics.micro


@dataclass
class KeepBestConfig(_SetOnce):
    # a metric of the validation split, such as `val/loss`; null keeps no best
    # checkpoint
    metric: str | None = None
    # whether the smallest or the largest value is best
    mode: Mode | None = None


@dataclass
class TrainingConfig(_SetOnce):
    # the horizon in epochs; exactly one of `epochs`, `updates` and `examples` is set
    epochs: int | None = None
    # the horizon in updates
    updates: int | None = None
    # the horizon in examples
    examples: int | None = None
    # (int | epoch) updates from one evaluation to the next
    evaluate_every: Any = "epoch"
    # (int | epoch | auto | null) updates from one checkpoint to the next; auto: by time
    checkpoint_every: Any = None
    # (node | mapping | list | null) minimized; one, or one per output; set by
    # `objective`
    loss: Any = MISSING
    # (mapping | list | null) a number for each output
    loss_weights: Any = None
    # what a scalar that a layer adds to the loss is of what its examples add
    added_losses: Added = Added.mean
    # what a loss needs at once; effective_batch: a second forward pass
    loss_over: LossOver = LossOver.example
    # (mapping | null) class: weight of its examples; 1 for a class that is not listed
    class_weight: Any = None
    # name: node, or output: {name: node}; set by `objective`
    metrics: dict[str, Any] = field(default_factory=dict)
    # the same, with the sample weights applied
    weighted_metrics: dict[str, Any] = field(default_factory=dict)
    # name: node of a Keras callback; a batch is an update
    callbacks: dict[str, Any] = field(default_factory=dict)
    # `auto`: start the run in `hydra.run.dir`, or resume it if it exists
    resume: Resume | None = None
    keep_best: KeepBestConfig | None = field(default_factory=KeepBestConfig)


@dataclass
class StartConfig(_SetOnce):
    # RUN or RUN@UPDATE: start from that checkpoint; a run directory or the start of a
    # run ID
    run: str | None = None
    # (true | false) true: load only the model's weights and count updates from 0
    weights_only: Any = False


@dataclass
class HardwareConfig(_SetOnce):
    # `auto` uses a GPU if there is one
    device: Device = Device.auto
    # GPUs to use, or logical CPU devices if there is no GPU
    replicas: int = 1
    # processes that train this run; null reads `TF_CONFIG` or the Slurm step
    workers: int | None = 1
    # several workers may open TensorFlow's ports, without password, to other machines
    open_ports: bool = False
    # every worker has it, of mode 0600; `PIPELINE_SECRET` outranks it; never recorded
    secret_file: str | None = None
    # mixed precision keeps the variables in float32
    precision: Precision = Precision.float32
    # jobs of a sweep at once on this machine; null: one per GPU, or one
    parallel_jobs: int | None = None
    # GPUs for each job of a sweep
    gpus_per_job: int = 1
    # jobs of a sweep on each GPU at once; give each its share with `gpu_memory`
    jobs_per_gpu: int = 1
    # (int | list | null) the GPUs of a run that is no job, counted from 0; null: the
    # first ones
    gpu: Any = None
    # (bytes | text | null) what TensorFlow takes of each GPU, such as `8GiB`; null: as
    # it needs
    gpu_memory: Any = None
    # (bytes | text | null) what `auto` may fill on a CPU, such as `8GiB`; null: what is
    # available
    memory: Any = None
    # (auto | true | false) compile each micro-step with XLA; auto: on one GPU, as
    # Keras' `fit` does
    xla: Any = False
    # (true | false) GPUs since Ampere multiply float32 with 10 bits of mantissa; see
    # docs/exact.md
    tf32: Any = True
    # (true | false) two runs on the same machine are bit-identical
    deterministic: Any = False
    # (mapping | null) `{start: 10, updates: 5}`: log a trace of 5 updates, from the
    # 10th on
    profile: Any = None


@dataclass
class TrackingConfig(_SetOnce):
    # MLflow tracking URI: SQLite, another SQL database, or an HTTP server
    uri: str = MISSING
    # name of the MLflow experiment
    experiment: str = MISSING
    # null: composed of the experiment or the dataset and of what was overridden
    run_name: str | None = None
    # name: text; of the run, whose own tags come first
    tags: dict[str, str] = field(default_factory=dict)
    # of the run, in Markdown
    description: str | None = None
    # log every Nth update
    log_every: int = 1
    # updates between two measurements of the gradient noise scale
    noise_every: int = 10
    # (true | false) log the trained model with its signature
    log_model: Any = True
    # paths logged with the model; null: its local modules
    code: list[str] | None = field(default_factory=list)
    # (true | false) log MLflow's system metrics
    system_metrics: Any = True
    # set by a sweep for its jobs: the run ID of the parent run
    sweep: str | None = None
    # set by a sweep for its jobs: the job's name
    job: str | None = None
    # set by `--again`: artifacts must lie with the store, or where `trust.allow`
    # permits
    confined: bool = False
    # seconds to wait for an answer of the store, at the start and at the end of a run
    patience: float = 60.0
    # what to do if the store does not answer at the start
    when_unreachable: Unreachable = Unreachable.refuse


@dataclass
class TrustConfig(_SetOnce):
    # dotted code and places of artifacts that records may name
    allow: list[str] = field(default_factory=list)


@dataclass
class Config(_SetOnce):
    dataset: Any = MISSING
    model: Any = MISSING
    optimizer: Any = MISSING
    schedule: Any = MISSING
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    start: StartConfig = field(default_factory=StartConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    # seed of the initial weights, the order of the examples, augmentation and noise
    seed: int = 0
    # version of this schema; do not set it
    schema: int = SCHEMA


def register() -> None:
    """Make the schema and the resolvers known to Hydra. Safe to call again."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("times", _times, replace=True)


def _times(a: Any, b: Any) -> int | float:
    """Return the product of two numbers; text times a number, or digits without end, would fill the memory."""
    for factor in (a, b):
        integer = isinstance(factor, int) and not isinstance(factor, bool)
        if not (isinstance(factor, float) or (integer and abs(factor) < 2**63)):
            raise ConfigError("${times:…}", "must be given numbers", factor)
    return a * b
