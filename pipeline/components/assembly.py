"""What a run is made of, built from its config in the order in which data flows; creates nothing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from omegaconf import DictConfig

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
from pipeline.components.devices import Hardware
from pipeline.components.objective import Objective
from pipeline.config import sizes
from pipeline.config.cluster import Cluster
from pipeline.config.sizes import Batching, Plan
from pipeline.dataset import batches as batching
from pipeline.dataset import load, residency
from pipeline.dataset.bad_example import located
from pipeline.dataset.batches import Reader
from pipeline.dataset.checksums import Files
from pipeline.dataset.splits import Data
from pipeline.tracking import provenance
from pipeline.training.best_evaluation import Best
from pipeline.training.evaluator import evaluator


@dataclass(frozen=True)
class Parts:
    """All that a run is made of."""

    config: DictConfig
    machine: Hardware
    data: Data
    recorded_data: dict[str, Any]  # what `provenance.dataset` says of `data`
    plan: Plan
    batches: tf.data.Dataset  # of the updates that are to come; of several workers the share of this one
    model: keras.Model  # compiled with its built optimizer
    objective: Objective
    files: Files  # of `data`, as they were before they were read
    best: Best | None = None  # where one is to be kept
    said: Sequence[str] = ()  # of the data, a line each, once the run begins
    reader: Reader | None = None  # of several workers

    def update(self) -> Update:
        """Return what applies one effective batch."""
        cut, goal = self.plan.batching, self.objective
        return Update(
            self.model,
            goal.loss,
            self.model.optimizer,
            cut.micro_batch_size,
            loss_weights=goal.loss_weights,
            metrics=goal.metrics,
            weighted_metrics=goal.weighted_metrics,
            layer_metrics=goal.layer_metrics,
            strategy=self.machine.strategy,
            noise_every=self.config.tracking.noise_every if cut.factor * cut.replicas > 1 else 0,
            same_noise=self.same_noise,
            hold_statistics=self.config.accumulation.moving_statistics.name == "effective",
            jit_compile=self.config.hardware.xla,
            arrived=self.machine.arrived,
        )

    @property
    def same_noise(self) -> bool:
        """Whether the layers that can draw noise which does not depend on the cut do so."""
        return self.config.accumulation.same_noise is not False

    def evaluation(self) -> Evaluation:
        """Return what evaluates one batch."""
        goal = self.objective
        return Evaluation(
            self.model,
            goal.loss,
            self.plan.batching.micro_batch_size,
            loss_weights=goal.loss_weights,
            **goal.validation_metrics,
            layer_metrics=goal.layer_metrics,
            strategy=self.machine.strategy,
            arrived=self.machine.arrived,
        )

    def whole_batches(self) -> tf.data.Dataset:
        """Return effective batches from the first one on, also where this process reads a share of them."""
        return self.batches if self.reader is None else _batches(self.config, self.data, self.plan)

    def evaluation_batches(self, name: str = "validation", reader: Reader | None = None) -> tf.data.Dataset | None:
        """Return a split in effective batches, in its order, or a reader's share; None where there is no such split."""
        split, size = self.data.splits.get(name), self.plan.batching.effective_batch_size
        if split is None:
            return None
        return batching.in_order(split, size, self.config.dataset.get("pad"), reader, self.data.made_of(name))

    def _in_order(self, split: tf.data.Dataset, size: int) -> tf.data.Dataset:
        return batching.in_order(split, size, self.config.dataset.get("pad"))

    def evaluate(
        self,
        name: str,
        tell: Callable[[str, int], None] = lambda name, size: None,
        changed: Sequence[tf.Variable] = (),
    ) -> Callable[..., dict[str, float]] | None:
        """Return what evaluates a split, as `pipeline.training.evaluator` says; None where there is no such split."""
        batches = self.evaluation_batches(name, self.reader)
        if batches is None:
            return None
        return evaluator(self.evaluation(), batches, name, tell, changed, tries=self.machine.workers == 1)

    def batch_dependent_layers(self) -> list[str]:
        """Return the names of the layers whose state depends on how an effective batch is cut."""
        return batch_dependent_layers(self.model, self._forward)

    def normalising(self) -> list[str]:
        """Return the names of the layers that normalise by the micro-batch and have moving statistics."""
        return [layer.name for layer in normalising_layers(self.model) if layer.trainable]

    def cut_dependent_noise(self) -> list[str]:
        """Return the names of what draws its noise for each micro-batch anew."""
        return self._forward.cut_dependent_noise

    def of_the_cut(self) -> list[str]:
        """Return of which layers an update is not that of the large batch, a line for each reason."""
        if self.plan.batching.factor * self.plan.batching.replicas == 1:
            return []
        lines = []
        if layers := self.normalising():
            moved = {"effective": "once an update", "micro": "with every micro-batch"}
            when = moved[self.config.accumulation.moving_statistics.name]
            lines.append(f"normalised by each micro-batch, moving statistics {when}: {', '.join(layers)}")
        if self.config.accumulation.same_noise == "auto" and (layers := self.cut_dependent_noise()):
            lines.append(f"noise of each micro-batch, not of the effective batch: {', '.join(layers)}")
        return lines

    def placed(self) -> list[keras.Layer]:
        """Return the layers whose noise does not depend on the cut."""
        return self._forward.placed

    def changed(self) -> list[tf.Variable]:
        """Return the variables that a forward pass in training changes, each copy of them."""
        local = self.machine.strategy.experimental_local_results
        seen = self._forward.assigned
        seed = global_seed()  # made by the first draw from it, as in the line above
        of_keras = [variable.value for variable in (*seen, *([] if seed is None else [seed]))]
        others = [variable for _, variable in unknown_to_keras(self.model)]
        return [copy for variable in (*of_keras, *others) for copy in local(variable)]

    @cached_property  # one reading and one trace: data or a layer may draw while they are
    def _forward(self) -> Forward:
        return trace_forward(self.model, next(iter(self._in_order(self.data.train, 2)))[0], self.same_noise)

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
    config: DictConfig,
    cut: Batching,
    check_dataset: Callable[[dict[str, Any]], None] | None = None,
    first_update: int = 0,
    workers: Cluster | None = None,
) -> Parts:
    """Build everything that can still refuse the config.

    Args:
        config: checked.
        cut: how its effective batch is cut, as its check returned it.
        check_dataset: takes what `provenance.dataset` says of the data, checksums included, and may refuse it.
            Without it the checksums of files are left for later.
        first_update: completed updates, whose batches are left out.
        workers: that train together, of which this process is one; None for one alone.

    Raises:
        ConfigError: the config is wrong.
    """
    machine = devices.setup(config.hardware, config.seed, workers)
    data = load.load(config.dataset)
    files = Files(data.files)
    # TensorFlow traces what the config names, and runs it to read the data.
    with refused("dataset", "must give examples", config.dataset._target_), located(data, files):
        said = [
            residency.settle(config.dataset, data, machine.agree, 1 if workers is None else workers.on_machine),
            batching.one_class(config.dataset, data, config.seed),
        ]
        checksum = config.dataset.get("checksum", "full")
        recorded_data = provenance.dataset(data, checksum, files=files, of_files=check_dataset is not None)
    if data.shards:  # what is kept in memory is read once
        held = ("train",) if config.dataset.get("in_memory", True) else ()
        files.again = tuple({s.path for name, shards in data.shards.items() if name not in held for s in shards})
    if check_dataset is not None:
        check_dataset(recorded_data)
    plan = sizes.plan(cut, data.examples, *sizes.settle_horizon(config.training))
    size, node, augment = cut.effective_batch_size, config.dataset, config.dataset.get("augment")
    key = "dataset" if augment is None else "dataset.augment"
    here = config.hardware.replicas
    reader = None if workers is None else Reader(workers.index * here, here, cut.replicas)
    with refused(key, "must give examples", (augment or node)._target_), located(data, files):
        batches = _batches(config, data, plan, first_update, reader)
    # Once more: TFDS draws while it prepares a dataset, and the run that does would start from other weights.
    keras.utils.set_random_seed(config.seed)
    with machine.strategy.scope():
        network = model.build(config.model, data)
        goal = objective.build(config.training)
        stepping = optimizer.build(config, plan.updates, size)
        with refused("dataset", "must give examples", node._target_), located(data, files):
            first = next(iter(batching.in_order(data.train, min(cut.micro_batch_size, 32), node.get("pad"))))
            if workers is not None and not machine.same(_digest(first, data)):
                raise ConfigError(
                    "dataset", "must be the same for all workers, whose first examples are not", data.name
                )
        padded = node.get("pad") is not None
        seen = objective_checks.check(goal, network, data, first, config.training.class_weight, padded=padded)
        objective.compile(goal, network, stepping, *seen)
        stepping.build(network.trainable_variables)
    optimizer.check(stepping, network.trainable_variables)  # outside of the scope, as an update applies
    best = _best(config.training.keep_best, goal, data, list(by_name(network, seen[1])))
    said = [*filter(None, said)]
    parts = Parts(config, machine, data, recorded_data, plan, batches, network, goal, files, best, said, reader)
    if config.accumulation.same_noise is True and (layers := parts.cut_dependent_noise()):
        rule = "must be auto, which names them, or false: some layers can only draw for each micro-batch"
        raise ConfigError("accumulation.same_noise", rule, ", ".join(layers))
    return parts


def _batches(
    config: DictConfig, data: Data, plan: Plan, first_update: int = 0, reader: Reader | None = None
) -> tf.data.Dataset:
    return batching.effective_batches(
        config.dataset,
        data,
        seed=config.seed,
        effective_batch_size=plan.batching.effective_batch_size,
        epochs=plan.epochs,
        first_update=first_update,
        class_weight=config.training.class_weight,
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


def _best(keep: DictConfig | None, goal: Objective, data: Data, outputs: list[str]) -> Best | None:
    """Return what takes the best evaluation; refuse a metric that the evaluations will not have."""
    if keep is None or keep.metric is None:
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
