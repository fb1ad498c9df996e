"""The parts of a run, built from its spec in the order in which data flows; nothing is written."""

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
from pipeline.common.errors import ConfigError, refused
from pipeline.components import (
    adascale,
    added_losses,
    devices,
    model,
    objective,
    objective_checks,
    optimizer,
)
from pipeline.components.devices import Devices
from pipeline.components.objective import Objective
from pipeline.config import sizes
from pipeline.config.plan import Plan, plan_of, stream_plan
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import KeepBestConfig
from pipeline.dataset import cache, load, tokens
from pipeline.dataset.bad_example import located
from pipeline.dataset.batches import (
    Reader,
    effective_batches,
    evaluated,
    first_examples,
    of_stream,
    one_class,
)
from pipeline.dataset.checksums import Files
from pipeline.dataset.class_weights import weigher
from pipeline.dataset.splits import Data
from pipeline.dataset.stream import Stream, digest
from pipeline.tracking import provenance
from pipeline.training.evaluator import Best, Evaluator


@dataclass(frozen=True)
class Parts:
    """The parts of a run."""

    spec: RunSpec  # with the decision where the data is kept
    devices: Devices
    data: Data
    recorded_data: dict[
        str, Any
    ]  # the record of `data`, as `provenance.dataset` returns it
    plan: Plan
    batches: (
        tf.data.Dataset
    )  # of the updates to come; with several workers the share of this one
    model: keras.Model  # compiled with its built optimizer
    objective: Objective
    files: Files  # of `data`, with their states before they were read
    inputs: Any  # of the first four training examples at most, on the host
    best: Best | None = (
        None  # tracks the best evaluation, where its checkpoint is to be kept
    )
    notes: Sequence[
        str
    ] = ()  # lines about the data that are printed when the run begins
    reader: Reader | None = (
        None  # with several workers the replicas that this one reads for
    )
    scaled: str = ""  # what `scaling` changed

    def update(self) -> accumulation.Update:
        """Return the update, which applies one effective batch."""
        cut, config = self.spec.largest, self.spec.config
        several, over_batch = (
            cut.factor * cut.replicas > 1,
            self.objective.training.over_batch,
        )
        kind = (
            accumulation.Update
            if adascale.of(self.model.optimizer) is None
            else adascale.Update
        )
        return kind(
            *(
                self.model,
                self.objective.training,
                self.model.optimizer,
                self.plan.micro_batch_size,
            ),
            noise_every=config.tracking.noise_every
            if several and not over_batch
            else 0,
            same_noise=self.spec.same_noise and "auto",  # `assemble` refuses
            hold_statistics=config.accumulation.moving_statistics.name == "effective",
            **self._on_devices,
        )

    def evaluation(self) -> accumulation.Evaluation:
        """Return the evaluation of one batch."""
        of_batch = self.objective.evaluation, self.plan.batching.micro_batch_size
        return accumulation.Evaluation(self.model, *of_batch, **self._on_devices)

    @property
    def _on_devices(self) -> dict[str, Any]:
        used, xla = self.devices, self.spec.config.hardware.xla
        return {
            "strategy": used.strategy,
            "reductions_ready": used.reductions_ready,
            "jit_compile": xla,
        }

    def effective_batches(self, done: int = 0) -> tf.data.Dataset:
        """Return the effective batches after `done` updates, undivided also with several workers."""
        return (
            self.batches
            if self.reader is None and not done
            else _batches(self.spec, self.data, self.plan, done)
        )

    def evaluation_batches(
        self, name: str = "validation", reader: Reader | None = None
    ) -> tf.data.Dataset | None:
        """Return the batches of a split, in its order, or a reader's share of each; None without such a split."""
        if name not in self.data.splits:
            return None
        size, node = self.plan.batching.effective_batch_size, self.spec.dataset
        keep = name == "validation" and cache.keeps_validation(
            node, self.data, self.spec.workers_on_machine
        )
        return evaluated(self.data, name, size, node.get("pad"), reader, keep)

    def evaluate(self, name: str, **fields: Any) -> Evaluator | None:
        """Return the evaluator of a split, with these other `fields` of it; None without such a split."""
        if (batches := self.evaluation_batches(name, self.reader)) is None:
            return None
        return Evaluator(
            self.evaluation(), batches, name, retry=self.devices.workers == 1, **fields
        )

    def tags(self) -> dict[str, str]:
        """Return the tags of a run about the layers that depend on how an effective batch is cut, and its scaling."""
        state, noise = (
            internals.batch_dependent_layers(self.model, self.forward),
            self.forward.cut_dependent_noise,
        )
        layers = {
            "model.batch_dependent_layers": state,
            "model.cut_dependent_noise": noise,
        }
        scaled = {"scaling": self.scaled} if self.scaled else {}
        return {
            tag: ", ".join(names) or "none" for tag, names in layers.items()
        } | scaled

    def differences_from_large_batch(self) -> list[str]:
        """Return a line for each reason for which an update differs from that of the large batch, with its layers."""
        if self.spec.largest.factor * self.plan.batching.replicas == 1:
            return []
        asked, held = (
            self.spec.config.accumulation,
            internals.normalising_layers(self.model),
        )
        when = (
            "once an update"
            if asked.moving_statistics.name == "effective"
            else "with every micro-batch"
        )
        moved = internals.batch_dependent_layers(self.model, self.forward, held)
        noise = self.forward.cut_dependent_noise if asked.same_noise == "auto" else []
        layers = {
            f"normalised by each micro-batch, moving statistics {when}": [
                each.name for each in held if each.trainable
            ],
            "state that moves with every micro-batch": moved,
            "noise of each micro-batch, not of the effective batch": noise,
        }
        return [
            f"{what}: {', '.join(names)}" for what, names in layers.items() if names
        ]

    def assigned_by_forward(self) -> list[tf.Variable]:
        """Return every replica's copy of the variables that a forward pass in training assigns."""
        seen, seed = (
            self.forward.assigned,
            internals.global_seed(),
        )  # made by the first draw from it, as in a trace
        of_keras = [
            variable.value for variable in (*seen, *([] if seed is None else [seed]))
        ]
        found = [
            *of_keras,
            *(variable for _, variable in internals.unknown_to_keras(self.model)),
        ]
        return [
            copy
            for each in found
            for copy in self.devices.strategy.experimental_local_results(each)
        ]

    def tokens(self) -> Callable[[Any], tf.Tensor] | None:
        """Return what counts the tokens of an effective batch; None if there are none, or workers see theirs alone."""
        pad, layers = self.spec.dataset.get("pad"), internals.layers_of(self.model)
        masked = any(getattr(layer, "mask_zero", False) for layer in layers)
        if masked and self.reader is not None:
            return None
        return tokens.counter(
            self.data.train.element_spec[0],
            None if pad is None else pad["value"],
            masked,
        )

    @cached_property  # one trace: a layer may draw while it is traced
    def forward(self) -> internals.Forward:
        """Return what a forward pass in training draws and assigns."""
        return internals.trace_forward(self.model, self.inputs, self.spec.same_noise)

    def example(self) -> Any:
        """Return the inputs as NumPy arrays; raise a TypeError for those that have no signature."""
        if not all(map(tf.is_tensor, tf.nest.flatten(self.inputs))) or not isinstance(
            self.inputs, tf.Tensor | dict
        ):
            raise TypeError(
                "an input that is neither a dense tensor nor a dict of them has no signature"
            )
        return tf.nest.map_structure(lambda leaf: leaf.numpy(), self.inputs)


def assemble(
    spec: RunSpec,
    check_dataset: Callable[[dict[str, Any]], None] | None = None,
    first_update: int = 0,
) -> Parts:
    """Build everything that can still refuse the config; the batches of updates before `first_update` are left out.

    `check_dataset` takes the record of the data, checksums included, and may refuse it; without it the checksums of
    files are computed later.
    """
    workers, seed = spec.workers, spec.config.seed
    used = devices.setup(spec.config.hardware, seed, workers)
    data = load.load(spec.dataset)
    files = Files(data.files)
    with _reading(spec.dataset, data, files):
        decided, kept = cache.resolve(
            spec.dataset, data, used.agree, spec.workers_on_machine
        )
        spec = spec.changed({f"dataset.{key}": value for key, value in decided.items()})
        notes = [*filter(None, [kept, one_class(spec.dataset, data, seed)])]
        checksum = spec.dataset.get("checksum", "full")
        recorded = provenance.dataset(
            data, checksum, files=files, of_files=check_dataset is not None
        )
    node, cut, stream = spec.dataset, spec.batching, None
    if data.shards:  # the training split in memory is read once, here; others as the run trains, kept or not
        held = ("train",) if node.get("in_memory", True) else ()
        files.reread = tuple(
            {
                s.path
                for name, shards in data.shards.items()
                if name not in held
                for s in shards
            }
        )
    if check_dataset is not None:
        check_dataset(recorded)
    if data.loaders:
        stream, spec, plan = _of_stream(spec, data)
    else:
        plan = plan_of(
            cut, data.examples, spec.horizon, optimizer.stages(spec, data.examples)
        )
    here = spec.config.hardware.replicas
    reader = (
        None if workers is None else Reader(workers.index * here, here, cut.replicas)
    )
    augment = node.get("augment")
    with _reading(
        augment or node,
        data,
        files,
        "dataset" if augment is None else "dataset.augment",
    ):
        batches = _batches(spec, data, plan, first_update, reader, stream)
    # Once more: TFDS draws while it prepares a dataset, and the run that does would start from other weights.
    keras.utils.set_random_seed(seed)
    with used.strategy.scope():
        network = model.build(spec.node("model"), data)
        goal = objective.build(spec.node("training"))
        stepping, scaled = optimizer.build(
            spec, plan.updates, None if data.loaders else plan
        )
        if (gain := adascale.of(stepping)) is not None:
            plan = adascale.EstimatedPlan(
                plan.batching, plan.examples, plan.updates, gain=gain
            )
        first = _first_batch(spec, data, files, used)
        labels, outputs, goal = objective_checks.check(goal, network, data, first, spec)
        notes += added_losses.check(network, first[0], goal.training.added_losses)
        objective.compile(goal, network, stepping, labels, outputs)
        stepping.build(network.trainable_variables)
    optimizer.check(
        stepping, network.trainable_variables
    )  # outside of the scope, as an update applies
    best = _best(
        spec.config.training.keep_best,
        goal.evaluation,
        data,
        list(internals.by_name(network, outputs)),
    )
    with tf.device("CPU:0"):
        inputs = internals.slice_of(first[0], 0, 4)
    parts = Parts(
        spec,
        used,
        data,
        recorded,
        plan,
        batches,
        network,
        goal,
        files,
        inputs,
        best,
        notes,
        reader,
        scaled,
    )
    if spec.config.accumulation.same_noise is True and (
        layers := parts.forward.cut_dependent_noise
    ):
        rule = "must be auto, which names them, or false: some layers can only draw for each micro-batch"
        raise ConfigError("accumulation.same_noise", rule, ", ".join(layers))
    for rule, received in (
        internals.not_supported(network, parts.forward)
        if goal.training.over_batch
        else ()
    ):
        key, _, must = rule.partition(" ")
        raise ConfigError(
            f"{'training' if key == 'loss_over' else 'accumulation'}.{key}",
            must,
            received,
        )
    return parts


def _first_batch(spec: RunSpec, data: Data, files: Files, used: Devices) -> tuple:
    """Return a few examples with the weights of their classes; refuse those that differ between workers."""
    with _reading(spec.dataset, data, files):
        count = min(max(2, spec.batching.micro_batch_size), 32)
        first = first_examples(data, "train", count, spec.dataset.get("pad"))
        lengths = repr(
            [(name, int(split.cardinality())) for name, split in data.splits.items()]
        )
        if spec.workers is not None and not used.same(
            digest(first, zlib.crc32(lengths.encode())) & 0xFFFFFF
        ):
            raise ConfigError(
                "dataset",
                "must be the same for all workers, whose first examples are not",
                data.name,
            )
    weigh = weigher(spec.config.training, data)
    return first if weigh is None else weigh(*first)


@contextmanager
def _reading(
    node: DictConfig, data: Data, files: Files, key: str = "dataset"
) -> Iterator[None]:
    """Name what fails while TensorFlow traces and runs what the config names, to read the data."""
    with refused(key, "must give examples", node._target_), located(data, files):
        yield


def _of_stream(spec: RunSpec, data: Data) -> tuple[Stream, RunSpec, Plan]:
    """Return the stream of the training split, the spec with the sizes of its first batch, and the plan."""
    loader, asked, factor = (
        data.loaders["train"],
        spec.config.accumulation.micro_batch_size,
        spec.batching.factor,
    )
    first = int(internals.examples_in(loader.first))
    stream, cut = (
        Stream(loader, factor),
        sizes.Batching(first * factor, asked or first, factor),
    )
    plan = stream_plan(
        cut, spec.horizon, stream.windows, stream.per_epoch, asked is not None
    )
    return stream, replace(spec, batching=cut), plan


def _batches(
    spec: RunSpec,
    data: Data,
    plan: Plan,
    first_update: int,
    reader: Reader | None = None,
    stream: Stream | None = None,
) -> tf.data.Dataset:
    weigh = weigher(spec.config.training, data)
    if stream is not None:
        return of_stream(stream, first_update, weigh)
    return effective_batches(
        spec.dataset, data, plan.slices(first_update), spec.config.seed, weigh, reader
    )


def _best(
    keep: KeepBestConfig | None,
    goal: internals.Objective,
    data: Data,
    outputs: list[str],
) -> Best | None:
    """Return the tracker of the best evaluation; refuse a metric that the evaluations do not return."""
    if keep is None or keep.metric is None or keep.mode is None:
        return None
    key = "training.keep_best.metric"
    if data.validation is None:
        raise ConfigError(
            key, "must be null: the dataset has no validation split", keep.metric
        )
    losses = [
        name
        for name, loss in internals.spread(goal.loss, outputs, to_all=True).items()
        if loss is not None
    ]
    of_outputs = [f"{name}_loss" for name in losses] if len(losses) > 1 else []
    choices = [f"val/{name}" for name in ("loss", *of_outputs, *goal.measured())]
    if keep.metric not in choices:
        raise ConfigError(
            key, "must be a metric of the validation split", keep.metric, choices
        )
    return Best(keep.metric.removeprefix("val/"), keep.mode.name)
