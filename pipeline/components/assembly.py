"""The parts of a run, built from its spec in the order in which data flows; nothing is written."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline import accumulation
from pipeline.accumulation import (
    Evaluation,
    Forward,
    Update,
    batch_dependent_layers,
    by_name,
    global_seed,
    measured,
    normalising_layers,
    spread,
    trace_forward,
    unknown_to_keras,
)
from pipeline.common.errors import ConfigError, refused
from pipeline.components import devices, model, objective, objective_checks, optimizer
from pipeline.components.devices import Devices
from pipeline.components.objective import Objective
from pipeline.config import sizes
from pipeline.config.resolve import RunSpec
from pipeline.config.schema import KeepBestConfig
from pipeline.config.sizes import Plan
from pipeline.dataset import cache, load
from pipeline.dataset.bad_example import located
from pipeline.dataset.batches import Reader, effective_batches, in_order, one_class
from pipeline.dataset.checksums import Files
from pipeline.dataset.splits import Data
from pipeline.tracking import provenance
from pipeline.training.evaluator import Best, Evaluator


@dataclass(frozen=True)
class Parts:
    """The parts of a run.

    Attributes:
        spec: of the run, with the decision where the data is kept.
        devices: that it computes on.
        data: its splits.
        recorded_data: the record of `data`, as `provenance.dataset` returns it.
        plan: the run counted in updates.
        batches: of the updates to come; with several workers the share of this one.
        model: compiled with its built optimizer.
        objective: losses, metrics and callbacks.
        files: of `data`, with their states before they were read.
        best: tracks the best evaluation, where its checkpoint is to be kept.
        notes: lines about the data that are printed when the run begins.
        reader: with several workers the replicas that this one reads for.
    """

    spec: RunSpec
    devices: Devices
    data: Data
    recorded_data: dict[str, Any]
    plan: Plan
    batches: tf.data.Dataset
    model: keras.Model
    objective: Objective
    files: Files
    best: Best | None = None
    notes: Sequence[str] = ()
    reader: Reader | None = None

    def update(self) -> Update:
        """Return the update, which applies one effective batch."""
        cut, goal = self.plan.batching, self.objective
        return Update(
            self.model,
            accumulation.Objective(
                goal.loss, goal.loss_weights, goal.metrics, goal.weighted_metrics, goal.layer_metrics
            ),
            self.model.optimizer,
            cut.micro_batch_size,
            strategy=self.devices.strategy,
            noise_every=self.spec.config.tracking.noise_every if cut.factor * cut.replicas > 1 else 0,
            same_noise=self.spec.same_noise,
            hold_statistics=self.spec.config.accumulation.moving_statistics.name == "effective",
            jit_compile=self.spec.config.hardware.xla,
            reductions_ready=self.devices.reductions_ready,
        )

    def evaluation(self) -> Evaluation:
        """Return the evaluation of one batch."""
        goal = self.objective
        return Evaluation(
            self.model,
            accumulation.Objective(
                goal.loss, goal.loss_weights, **goal.validation_metrics, layer_metrics=goal.layer_metrics
            ),
            self.plan.batching.micro_batch_size,
            strategy=self.devices.strategy,
            reductions_ready=self.devices.reductions_ready,
        )

    def effective_batches(self) -> tf.data.Dataset:
        """Return the effective batches from the first update on, undivided also with several workers."""
        return self.batches if self.reader is None else _batches(self.spec, self.data, self.plan)

    def evaluation_batches(self, name: str = "validation", reader: Reader | None = None) -> tf.data.Dataset | None:
        """Return the batches of a split, in its order, or a reader's share of each; None without such a split."""
        split, size = self.data.splits.get(name), self.plan.batching.effective_batch_size
        if split is None:
            return None
        return in_order(split, size, self.spec.dataset.get("pad"), reader, self.data.made_of(name))

    def _in_order(self, split: tf.data.Dataset, size: int) -> tf.data.Dataset:
        return in_order(split, size, self.spec.dataset.get("pad"))

    def evaluate(
        self,
        name: str,
        tell: Callable[[str, int], None] = lambda name, size: None,
        changed: Sequence[tf.Variable] = (),
    ) -> Callable[..., dict[str, float]] | None:
        """Return the evaluator of a split, see `pipeline.training.evaluator`; None without such a split."""
        batches = self.evaluation_batches(name, self.reader)
        if batches is None:
            return None
        return Evaluator(self.evaluation(), batches, name, tell, changed, retry=self.devices.workers == 1)

    def batch_dependent_layers(self) -> list[str]:
        """Return the names of the layers whose state depends on how an effective batch is cut."""
        return batch_dependent_layers(self.model, self._forward)

    def normalising(self) -> list[str]:
        """Return the names of the layers that normalise by the micro-batch and have moving statistics."""
        return [layer.name for layer in normalising_layers(self.model) if layer.trainable]

    def cut_dependent_noise(self) -> list[str]:
        """Return the names of the layers that draw new noise for each micro-batch."""
        return self._forward.cut_dependent_noise

    def differences_from_large_batch(self) -> list[str]:
        """Return a line for each reason for which an update differs from that of the large batch, with its layers."""
        if self.plan.batching.factor * self.plan.batching.replicas == 1:
            return []
        lines = []
        if layers := self.normalising():
            moved = {"effective": "once an update", "micro": "with every micro-batch"}
            when = moved[self.spec.config.accumulation.moving_statistics.name]
            lines.append(f"normalised by each micro-batch, moving statistics {when}: {', '.join(layers)}")
        if self.spec.config.accumulation.same_noise == "auto" and (layers := self.cut_dependent_noise()):
            lines.append(f"noise of each micro-batch, not of the effective batch: {', '.join(layers)}")
        return lines

    def placed(self) -> list[keras.Layer]:
        """Return the layers whose noise is the same for every cut."""
        return self._forward.placed

    def assigned_by_forward(self) -> list[tf.Variable]:
        """Return every replica's copy of the variables that a forward pass in training assigns."""
        local = self.devices.strategy.experimental_local_results
        seen = self._forward.assigned
        seed = global_seed()  # made by the first draw from it, as in the line above
        of_keras = [variable.value for variable in (*seen, *([] if seed is None else [seed]))]
        others = [variable for _, variable in unknown_to_keras(self.model)]
        return [copy for variable in (*of_keras, *others) for copy in local(variable)]

    @cached_property  # one reading and one trace: data or a layer may draw while they are
    def _forward(self) -> Forward:
        return trace_forward(self.model, next(iter(self._in_order(self.data.train, 2)))[0], self.spec.same_noise)

    def example(self) -> Any:
        """Return the inputs of four examples, as NumPy arrays.

        Raises:
            TypeError: an input is neither a dense tensor nor a dict of them, so a model has no signature for it.
        """
        split = self.data.train if self.data.validation is None else self.data.validation
        inputs = next(iter(self._in_order(split, 4)))[0]
        if not all(map(tf.is_tensor, tf.nest.flatten(inputs))) or not isinstance(inputs, tf.Tensor | dict):
            raise TypeError("an input that is neither a dense tensor nor a dict of them has no signature")
        return tf.nest.map_structure(lambda leaf: leaf.numpy(), inputs)


def assemble(
    spec: RunSpec,
    check_dataset: Callable[[dict[str, Any]], None] | None = None,
    first_update: int = 0,
) -> Parts:
    """Build everything that can still refuse the config.

    Args:
        spec: of the run.
        check_dataset: takes the record of the data, checksums included, and may refuse it. Without it the checksums
            of files are computed later.
        first_update: completed updates, whose batches are left out.

    Raises:
        ConfigError: the config is wrong.
    """
    workers, seed = spec.workers, spec.config.seed
    used = devices.setup(spec.config.hardware, seed, workers)
    data = load.load(spec.dataset)
    files = Files(data.files)
    # TensorFlow traces what the config names, and runs it to read the data.
    with refused("dataset", "must give examples", spec.dataset._target_), located(data, files):
        decided, kept = cache.resolve(spec.dataset, data, used.agree, spec.workers_on_machine)
        spec = spec.changed({f"dataset.{key}": value for key, value in decided.items()})
        notes = [kept, one_class(spec.dataset, data, seed)]
        checksum = spec.dataset.get("checksum", "full")
        recorded_data = provenance.dataset(data, checksum, files=files, of_files=check_dataset is not None)
    node, cut = spec.dataset, spec.batching
    if data.shards:  # what is kept in memory is read once
        held = ("train",) if node.get("in_memory", True) else ()
        files.reread = tuple({s.path for name, shards in data.shards.items() if name not in held for s in shards})
    if check_dataset is not None:
        check_dataset(recorded_data)
    plan = sizes.plan(cut, data.examples, spec.horizon)
    augment = node.get("augment")
    key = "dataset" if augment is None else "dataset.augment"
    here = spec.config.hardware.replicas
    reader = None if workers is None else Reader(workers.index * here, here, cut.replicas)
    with refused(key, "must give examples", (augment or node)._target_), located(data, files):
        batches = _batches(spec, data, plan, first_update, reader)
    # Once more: TFDS draws while it prepares a dataset, and the run that does would start from other weights.
    keras.utils.set_random_seed(seed)
    with used.strategy.scope():
        network = model.build(spec.node("model"), data)
        goal = objective.build(spec.node("training"))
        stepping = optimizer.build(spec, plan.updates)
        with refused("dataset", "must give examples", node._target_), located(data, files):
            first = next(iter(in_order(data.train, min(cut.micro_batch_size, 32), node.get("pad"))))
            if workers is not None and not used.same(_digest(first, data)):
                raise ConfigError(
                    "dataset", "must be the same for all workers, whose first examples are not", data.name
                )
        padded = node.get("pad") is not None
        labels, outputs, layer_metrics = objective_checks.check(
            goal, network, data, first, spec.config.training.class_weight, padded=padded
        )
        goal = replace(goal, layer_metrics=layer_metrics)
        objective.compile(goal, network, stepping, labels, outputs)
        stepping.build(network.trainable_variables)
    optimizer.check(stepping, network.trainable_variables)  # outside of the scope, as an update applies
    best = _best(spec.config.training.keep_best, goal, data, list(by_name(network, outputs)))
    notes = [*filter(None, notes)]
    parts = Parts(spec, used, data, recorded_data, plan, batches, network, goal, files, best, notes, reader)
    if spec.config.accumulation.same_noise is True and (layers := parts.cut_dependent_noise()):
        rule = "must be auto, which names them, or false: some layers can only draw for each micro-batch"
        raise ConfigError("accumulation.same_noise", rule, ", ".join(layers))
    return parts


def _batches(
    spec: RunSpec, data: Data, plan: Plan, first_update: int = 0, reader: Reader | None = None
) -> tf.data.Dataset:
    return effective_batches(
        spec.dataset,
        data,
        seed=spec.config.seed,
        effective_batch_size=plan.batching.effective_batch_size,
        epochs=plan.epochs,
        first_update=first_update,
        class_weight=spec.config.training.class_weight,
        reader=reader,
    )


def _digest(first: Any, data: Data) -> int:
    """Return 24 bits of the first examples, and of how many there are."""
    leaves = tf.nest.flatten(first, expand_composites=True)
    found = zlib.crc32(repr([(name, int(split.cardinality())) for name, split in data.splits.items()]).encode())
    for leaf in leaves:
        array = np.asarray(leaf)
        found = zlib.crc32(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes(), found)
    return found & 0xFFFFFF


def _best(keep: KeepBestConfig | None, goal: Objective, data: Data, outputs: list[str]) -> Best | None:
    """Return the tracker of the best evaluation; refuse a metric that the evaluations do not return."""
    if keep is None or keep.metric is None or keep.mode is None:
        return None
    key = "training.keep_best.metric"
    if data.validation is None:
        raise ConfigError(key, "must be null: the dataset has no validation split", keep.metric)
    losses = [name for name, loss in spread(goal.loss, outputs, to_all=True).items() if loss is not None]
    of_outputs = [f"{name}_loss" for name in losses] if len(losses) > 1 else []
    names = ["loss", *of_outputs, *measured(*goal.validation_metrics.values(), goal.layer_metrics)]
    choices = [f"val/{name}" for name in names]
    if keep.metric not in choices:
        raise ConfigError(key, "must be a metric of the validation split", keep.metric, choices)
    return Best(keep.metric.removeprefix("val/"), keep.mode.name)
