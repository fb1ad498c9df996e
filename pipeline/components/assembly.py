"""Builds the parts of a run from its spec, in this order.

devices ─► data ─► plan ─► batches ─► model, objective, optimizer ─► Parts
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig

from pipeline import accumulation
from pipeline.accumulation import internals
from pipeline.common.errors import ConfigError, as_config_error
from pipeline.components import (
    added_losses,
    attention,
    devices,
    kept_best,
    model,
    monitored_names,
    objective,
    objective_checks,
    optimizer,
    showing,
    token_cut,
    xla_lengths,
)
from pipeline.components.devices import Devices
from pipeline.components.objective import RunObjective
from pipeline.config import sizes, stages, validation_sets
from pipeline.config.plan import Plan, RunPlan, plan_of, stream_plan
from pipeline.config.resolve import RunSpec
from pipeline.config.validation_sets import ValidationSet
from pipeline.dataset import cache, load, single_examples
from pipeline.dataset.bad_example import errors_located
from pipeline.dataset.batches import (
    effective_batches,
    evaluation_batches,
    first_examples,
    one_class,
    stream_batches,
)
from pipeline.dataset.checksums import DataFiles
from pipeline.dataset.class_weights import weigher
from pipeline.dataset.source import ShareReader
from pipeline.dataset.splits import Data
from pipeline.dataset.stream import Stream, digest
from pipeline.shown.observer import Observer
from pipeline.shown.plan import ShownPlan
from pipeline.tracking import provenance
from pipeline.training.evaluator import Best

# Receives the record of the data (see `provenance.dataset`), and raises an error to
# reject the data.
CheckDataset = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class PartsRecord:
    """Facts about the parts of a run that its config does not contain."""

    dataset: dict[str, Any]  # see `provenance.dataset`
    scaling: str  # the changes by the scaling rule; empty if there are none
    notes: Sequence[str]  # lines about the data and the model for the user


@dataclass(frozen=True)
class Parts:
    """The parts of a run, ready for training."""

    # `dataset.in_memory` is decided. So are `hardware.fused_attention` and
    # `hardware.xla_lengths`, unless `hardware.xla` is `fastest`: then `with_xla`
    # decides.
    spec: RunSpec
    devices: Devices
    data: Data
    files: DataFiles  # the files of `data`, with their state before they were read
    plan: RunPlan
    batches: tf.data.Dataset  # remaining effective batches, or this worker's shares
    model: keras.Model  # compiled with its built optimizer
    objective: RunObjective
    inputs: Any  # the inputs of up to four training examples, on the host
    reader: ShareReader | None  # reads this worker's share; None without other workers
    validation_sets: Sequence[ValidationSet]  # of `dataset.validations`
    best: Best | None  # tracks the best evaluation; None if its checkpoint is not kept
    record: PartsRecord
    shown: ShownPlan | None  # None if nothing is shown at evaluations

    def update(self) -> accumulation.Update:
        """Return a new `Update`, which applies one effective batch per call."""
        config = self.spec.config
        training = self.objective.training
        cut = self.spec.largest
        # The noise scale compares the gradients of several micro-batches. A loss over
        # the effective batch has no gradient per micro-batch.
        # Micro-batches of a cut by tokens are sorted, so they are not random samples.
        noise_every = 0
        has_samples = cut.is_cut and not self.spec.cuts_by_tokens
        if has_samples and not training.over_batch:
            noise_every = config.accumulation.noise_scale_every
        # `assemble` rejects `same_noise=true` if a layer does not allow it, so `auto`
        # covers both values here.
        same_noise = "auto" if self.spec.same_noise else False
        return accumulation.Update(
            self.model,
            training,
            self.model.optimizer,
            **self._limits(self.plan.micro_batch_size),
            strategy=self.devices.strategy,
            noise_every=noise_every,
            same_noise=same_noise,
            hold_statistics=config.accumulation.moving_statistics.name == "effective",
            jit_compile=config.hardware.xla,
            fused_attention=config.hardware.fused_attention is True,
            xla_scope=config.hardware.xla_scope.name,
            reductions_ready=self.devices.reductions_ready,
        )

    def with_xla(self, compiles: bool, line: str = "") -> "Parts":
        """Return the parts with XLA on or off, in place of `hardware.xla=fastest`.

        Args:
            compiles: whether XLA compiles the micro-steps.
            line: text to add to the description of the devices.
        """
        spec, run_devices = attention.decide(
            self.spec.with_xla(compiles),
            replace(self.devices, description=self.devices.description + line),
            self.model,
            self.batches.element_spec,
            self.plan.micro_batch_size,
        )
        spec, run_devices = xla_lengths.decide(
            spec, run_devices, self.data, self.model, self.batches.element_spec
        )
        parts = replace(self, spec=spec, devices=run_devices)
        if "forward" in vars(self):
            # Keep the trace: another one may draw other seeds.
            vars(parts)["forward"] = self.forward
        return parts

    def evaluation(self, observer: Observer | None = None) -> accumulation.Evaluation:
        """Return a new `Evaluation`, which evaluates one batch per call.

        Args:
            observer: observes the examples, or None.
        """
        hardware = self.spec.config.hardware
        return accumulation.Evaluation(
            self.model,
            self.objective.evaluation,
            **self._limits(self.plan.batching.micro_batch_size),
            strategy=self.devices.strategy,
            jit_compile=hardware.xla,
            fused_attention=hardware.fused_attention is True,
            reductions_ready=self.devices.reductions_ready,
            observe=observer,
        )

    def _limits(self, micro_batch_size: int) -> dict[str, Any]:
        """Return the limits of a micro-batch, as arguments of an `Update`.

        `micro_batch_size` is the limit if batches are not cut by tokens.
        """
        if not self.spec.cuts_by_tokens:
            return {"micro_batch_size": micro_batch_size}
        return {
            "micro_batch_size": self.spec.config.accumulation.micro_batch_size,
            "micro_batch_tokens": self.plan.batching.micro_batch_tokens,
            "pad_multiple": self.spec.dataset.pad["multiple"],
            "xla_lengths": self.spec.config.hardware.xla_lengths or (),
        }

    def prediction(self) -> internals.Prediction:
        """Return a new `Prediction`, which predicts one batch per call."""
        hardware = self.spec.config.hardware
        # Each batch of sequences may have another length, for which XLA would compile.
        jit_compile = False if self.spec.cuts_by_tokens else hardware.xla
        return internals.Prediction(
            self.model,
            self.objective.evaluation,
            self.plan.batching.micro_batch_size,
            jit_compile=jit_compile,
            fused_attention=hardware.fused_attention is True,
        )

    def effective_batches(self, done: int = 0) -> tf.data.Dataset:
        """Return the effective batches that follow the first `done` updates.

        Each element is a whole effective batch, even if there are several workers. With
        `done=0`, the parts must have been assembled with `first_update=0`.
        """
        if self.reader is None and not done:
            return self.batches
        return _batches(self.spec, self.data, self.plan, done)

    def evaluation_batches(
        self,
        name: str = "validation",
        reader: ShareReader | None = None,
        padded: bool | None = None,
    ) -> tf.data.Dataset | None:
        """Return the unshuffled batches of a split, or None if the split is missing.

        Args:
            name: `train`, `validation`, `test`, or the name of a set among the splits,
                such as `validations.late`.
            reader: a worker's reader, to get only its share of each batch, or None for
                whole batches.
            padded: whether `dataset.pad` makes the batches dense. By default, it does
                unless batches are cut by tokens.
        """
        if padded is None:
            padded = not self.spec.cuts_by_tokens
        if name not in self.data.splits:
            return None
        node = self.spec.dataset
        keep = cache.keeps_validation(
            node, self.data, self.spec.workers_on_machine, name
        )
        size = self.plan.batching.effective_batch_size
        return evaluation_batches(
            self.data, name, size, node.get("pad"), reader, keep, padded
        )

    @cached_property  # Trace only once: each trace may draw another seed.
    def forward(self) -> internals.Forward:
        """The side effects of a forward pass in training; see `Forward`."""
        return internals.trace_forward(
            self.model, self.inputs, self.spec.same_noise, self.spec.cuts_by_tokens
        )

    def assigned_by_forward(self) -> list[tf.Variable]:
        """Return every replica's copy of variables that a forward pass may assign."""
        variables = [variable.value for variable in self.forward.assigned]
        # If a layer draws from Keras' global seed, the trace above has created it.
        seed = internals.global_seed()
        if seed is not None:
            variables.append(seed.value)
        for _, variable in internals.untracked_variables(self.model):
            variables.append(variable)

        copies: list[tf.Variable] = []
        for variable in variables:
            copies += self.devices.strategy.experimental_local_results(variable)
        return copies


def assemble(
    spec: RunSpec,
    check_dataset: CheckDataset | None = None,
    first_update: int = 0,
    *,
    trains: bool = True,
    labels_needed: bool = True,
) -> Parts:
    """Build the parts of a run and check that they fit each other.

    Args:
        spec: the spec of the run.
        check_dataset: called with the record of the data, which then includes the
            checksums of the files. Without `check_dataset`, the checksums are computed
            later.
        first_update: number of completed updates; their batches are skipped.
        trains: whether the parts are for a training. If not, the training split may
            have fewer examples than an effective batch.
        labels_needed: whether the loss is computed. If not, the data may have no
            labels.

    Raises:
        ConfigError: a part cannot be built, or does not fit the others.
    """
    seed = spec.config.seed
    run_devices = devices.setup(spec.config.hardware, seed, spec.workers)
    attention.check(spec)
    source = _open_dataset(spec, run_devices, check_dataset)
    data = source.data
    token_cut.check_data(spec, data)
    spec = source.spec
    if not trains:
        spec = _with_smaller_batches(spec, data)
    planned = _planned(spec, data)
    spec = planned.spec
    reader = _reader(source.spec)
    with _reading_for_training(spec, source):
        batches = _batches(
            spec, data, planned.plan, first_update, reader, planned.stream
        )

    # Seed again: TFDS draws random numbers while it prepares a dataset. A run that
    # prepares the dataset would otherwise start from other weights than later runs.
    keras.utils.set_random_seed(seed)
    network = _build_network(spec, source, planned.plan, run_devices, labels_needed)
    sets = _validation_sets(spec)
    validation_sets.check_results(sets, network.results)
    best = kept_best.build(spec.config.training.keep_best, data, sets, network.results)
    spec, run_devices = attention.decide(
        spec,
        run_devices,
        network.model,
        batches.element_spec,
        planned.plan.micro_batch_size,
    )
    spec, run_devices = xla_lengths.decide(
        spec, run_devices, data, network.model, batches.element_spec
    )
    shown = showing.make_plan(
        spec,
        data,
        network.objective,
        network.labels,
        internals.by_name(network.model, network.outputs),
    )
    notes = [*source.notes, *network.notes]
    if shown is not None:
        notes += shown.notes
    with tf.device("CPU:0"):
        inputs = internals.slice_of(network.first_inputs, 0, 4)
    parts = Parts(
        spec=spec,
        devices=run_devices,
        data=data,
        files=source.files,
        plan=planned.plan,
        batches=batches,
        model=network.model,
        objective=network.objective,
        inputs=inputs,
        reader=reader,
        validation_sets=sets,
        best=best,
        record=PartsRecord(source.record, network.scaling, notes),
        shown=shown,
    )
    _check_cut(parts)
    if spec.cuts_by_tokens:
        evaluation = parts.with_xla(False).evaluation()  # is traced, not computed
        token_cut.check_update(spec, evaluation, batches.element_spec)
    return parts


@dataclass(frozen=True)
class _Source:
    """The data of a run, before they are cut into batches."""

    spec: RunSpec  # `dataset.in_memory` is decided
    data: Data
    files: DataFiles
    record: dict[str, Any]
    notes: list[str]


def _open_dataset(
    spec: RunSpec, run_devices: Devices, check_dataset: CheckDataset | None
) -> _Source:
    """Load and record the dataset; decide whether its examples are kept in memory."""
    data = load.load(spec.dataset)
    files = DataFiles(data.all_files)
    with _reading(spec.dataset, data, files):
        values, line = cache.decide_in_memory(
            spec.dataset, data, run_devices.agree, spec.workers_on_machine
        )
        spec = spec.changed({f"dataset.{key}": value for key, value in values.items()})
        notes = [f"{name}: {note}" for name, note in data.notes.items()]
        notes += [line, one_class(spec.dataset, data, spec.config.seed)]
        record = provenance.dataset(
            data,
            spec.dataset.get("checksum", "full"),
            files=files,
            of_files=check_dataset is not None,
        )
    files.reread = _read_again(spec.dataset, data)
    if check_dataset is not None:
        check_dataset(record)
    return _Source(spec, data, files, record, [note for note in notes if note])


def _read_again(node: DictConfig, data: Data) -> tuple[Any, ...]:
    """Return the files that are read during training.

    A training split in memory is read before training, so its files are left out. The
    files of other splits are included: even a split that is then kept in memory is
    first read during training. If it is unknown which files a split is read from, all
    files of its dataset are included.
    """
    paths: set[Any] = set()
    for name in data.splits:
        shards = data.shards.get(name)
        if shards is None:
            paths.update(data.files_of(name))
        elif name != "train" or not node.get("in_memory", True):
            paths.update(shard.path for shard in shards)
    return tuple(paths)


@dataclass(frozen=True)
class _Planned:
    """The plan of a run: how its training data are cut into updates."""

    spec: RunSpec  # with a user's loader, its batching follows from the first batch
    plan: RunPlan
    stream: Stream | None  # effective batches of a user's loader, if there is one


def _with_smaller_batches(spec: RunSpec, data: Data) -> RunSpec:
    """Return a spec whose effective batch is not larger than the training split."""
    if data.loaders or spec.batching.effective_batch_size <= data.examples:
        return spec
    batching = spec.batching.with_effective_batch_size(data.examples)
    return replace(spec, batching=batching)


def _planned(spec: RunSpec, data: Data) -> _Planned:
    if data.loaders:
        return _planned_stream(spec, data)
    batch_schedule = stages.parse_schedule(spec.config.accumulation.batch_schedule)
    plan = plan_of(spec.batching, data.examples, spec.horizon, batch_schedule)
    return _Planned(spec, plan, None)


def _planned_stream(spec: RunSpec, data: Data) -> _Planned:
    """Plan the updates of a user's loader, based on the size of its first batch."""
    loader = data.loaders["train"]
    factor = spec.batching.factor
    stream = Stream(loader, factor)
    examples = int(internals.examples_in(loader.first))
    micro_batch_size = spec.config.accumulation.micro_batch_size
    cut = sizes.Batching(examples * factor, micro_batch_size or examples, factor)
    plan = stream_plan(
        cut,
        spec.horizon,
        stream.windows,
        stream.per_epoch,
        micro_batch_size is not None,
    )
    return _Planned(replace(spec, batching=cut), plan, stream)


def _reader(spec: RunSpec) -> ShareReader | None:
    """Return the reader of this worker's share, or None if there is only one worker."""
    if spec.workers is None:
        return None
    replicas = spec.config.hardware.replicas
    first = spec.workers.index * replicas
    return ShareReader(first, replicas, spec.batching.replicas)


def _batches(
    spec: RunSpec,
    data: Data,
    plan: RunPlan,
    first_update: int,
    reader: ShareReader | None = None,
    stream: Stream | None = None,
) -> tf.data.Dataset:
    weigh = weigher(spec.config.training, data)
    if stream is not None:
        return stream_batches(stream, first_update, weigh)
    if not isinstance(plan, Plan):
        raise ValueError("a user's loader is read only by its stream")
    return effective_batches(
        spec.dataset,
        data,
        plan.slices(first_update),
        spec.config.seed,
        weigh,
        reader,
        padded=not spec.cuts_by_tokens,
    )


@contextmanager
def _reading(
    node: DictConfig, data: Data, files: DataFiles, key: str = "dataset"
) -> Iterator[None]:
    """Replace an error in reading or tracing the data by one that names its cause.

    Args:
        node: the config node whose code runs in the block.
        data: the loaded dataset.
        files: the files of the dataset.
        key: the config key that the error names.
    """
    with (
        as_config_error(key, "must give examples", node._target_),
        errors_located(data, files),
    ):
        yield


@contextmanager
def _reading_for_training(spec: RunSpec, source: _Source) -> Iterator[None]:
    """Apply `_reading` to the training split; errors also name an augmentation."""
    augment = spec.dataset.get("augment")
    node = augment or spec.dataset
    key = "dataset" if augment is None else "dataset.augment"
    with _reading(node, source.data, source.files, key):
        yield


@dataclass(frozen=True)
class _Network:
    """A compiled model with its objective, and notes about both."""

    model: keras.Model
    objective: RunObjective
    labels: Any  # the labels of a few examples
    outputs: Any  # the model's outputs for `first_inputs`
    results: Sequence[str]  # the names of the loss and the metrics of an evaluation
    first_inputs: Any  # the inputs of these examples
    scaling: str  # the changes by the scaling rule; empty if there are none
    notes: list[str]  # lines for the user


def _build_network(
    spec: RunSpec,
    source: _Source,
    plan: RunPlan,
    run_devices: Devices,
    labels_needed: bool,
) -> _Network:
    """Build the model, the objective and the optimizer; check them on a batch."""
    data = source.data
    with run_devices.strategy.scope():
        network = model.build(spec.node("model"), data)
        single_examples.check_single_examples(data, network)
        goal = objective.build(spec.node("training"))
        # The batches of a user's loader have no stages.
        stages_known = plan if isinstance(plan, Plan) else None
        built_optimizer, scaling = optimizer.build(spec, plan.updates, stages_known)
        batch = _first_batch(spec, data, source.files, run_devices)
        checked = objective_checks.check(
            goal, network, data, batch, spec, labels_needed=labels_needed
        )
        _check_validation_sets(spec, source, network)
        goal = checked.objective
        notes = added_losses.check(network, batch[0], goal.training.added_losses)
        notes += objective.notes_on_files(goal.callbacks)
        results = kept_best.result_names(network, goal.evaluation, checked.outputs)
        sets = _validation_sets(spec)
        notes += monitored_names.check(goal.callbacks, data, sets, results)
        objective.compile(
            goal, network, built_optimizer, checked.labels, checked.outputs
        )
        optimizer.build_variables(built_optimizer, spec, network.trainable_variables)
    # Updates run outside the strategy's scope, so this check does too.
    optimizer.check(built_optimizer, network.trainable_variables)
    return _Network(
        model=network,
        objective=goal,
        labels=checked.labels,
        outputs=checked.outputs,
        results=results,
        first_inputs=batch[0],
        scaling=scaling,
        notes=notes,
    )


def _validation_sets(spec: RunSpec) -> Sequence[ValidationSet]:
    return validation_sets.parse(spec.resolved["dataset"].get("validations"))


def _first_batch(
    spec: RunSpec, data: Data, files: DataFiles, run_devices: Devices
) -> tuple[Any, ...]:
    """Return a batch of 2 to 32 examples, with class weights if the config has any.

    Raises:
        ConfigError: the workers have different first examples or split sizes.
    """
    with _reading(spec.dataset, data, files):
        count = min(max(2, spec.batching.micro_batch_size), 32)
        batch = first_examples(data, "train", count, spec.dataset.get("pad"))
        if spec.workers is not None:
            _check_same_data(data, batch, run_devices)
    weigh = weigher(spec.config.training, data)
    return batch if weigh is None else weigh(*batch)


def _check_same_data(data: Data, batch: Any, run_devices: Devices) -> None:
    lengths = [(name, int(split.cardinality())) for name, split in data.splits.items()]
    checksum = digest(batch, zlib.crc32(repr(lengths).encode()))
    if not run_devices.same(checksum & 0xFFFFFF):
        rule = "must be the same for all workers, but their first examples differ"
        raise ConfigError("dataset", rule, data.name)


def _check_validation_sets(spec: RunSpec, source: _Source, model: keras.Model) -> None:
    """Raise a ConfigError if the model does not take the inputs of a validation set."""
    data = source.data
    for name in data.validations:
        with _reading(spec.dataset, data, source.files, f"dataset.{name}"):
            batch = first_examples(data, name, 2, spec.dataset.get("pad"))
        rule = f"must give inputs that {model.name} accepts"
        received = str(data.splits[name].element_spec[0])
        with as_config_error(f"dataset.{name}", rule, received):
            model(batch[0], training=False)


def _check_cut(parts: Parts) -> None:
    """Raise a ConfigError if the model rules out a setting of the config.

    The settings are `accumulation.same_noise=true` and, with a loss over the effective
    batch, those that `internals.not_supported` names.
    """
    if parts.spec.config.accumulation.same_noise is True:
        layers = parts.forward.cut_dependent_noise
        if layers:
            rule = (
                "must be false or auto: some layers can only draw noise per micro-batch"
            )
            raise ConfigError("accumulation.same_noise", rule, ", ".join(layers))
    if not parts.objective.training.over_batch:
        return
    for text, received in internals.not_supported(parts.model, parts.forward):
        name, _, rule = text.partition(" ")
        group = "training" if name == "loss_over" else "accumulation"
        raise ConfigError(f"{group}.{name}", rule, received)
