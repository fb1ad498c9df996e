"""The loss and the metrics over a split: when they are computed, how, with which weights, and which were the best."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import Evaluation, GradientSums
from pipeline.config.sizes import Plan
from pipeline.training.oom_retry import assign_all, halve

Check = Callable[[], None]  # called between two batches; what it raises ends the evaluation
Evaluate = Callable[[Check], dict[str, float]]


@dataclass
class Best:
    """The best evaluation so far, by one metric, for `training.keep_best`; of two equal ones, the first."""

    metric: str  # its name, without `val/`
    mode: str  # `min` or `max`
    value: float | None = None  # of the metric; None before the first evaluation that gives a number
    update: int = 0  # completed updates before that evaluation

    def take(self, update: int, results: Mapping[str, float]) -> bool:
        """Return whether the evaluation after `update` updates is the best so far; if so, keep it as that."""
        value = results[self.metric]
        if math.isnan(value):
            return False
        if self.value is not None and not (value < self.value if self.mode == "min" else value > self.value):
            return False
        self.value, self.update = value, update
        return True

    def row(self) -> dict[str, float]:
        """Return what is logged of it: the metric and the update; empty if there was none."""
        return {} if self.value is None else {f"best/val/{self.metric}": self.value, "best/update": self.update}

    def get_state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON."""
        return dict(vars(self))

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `get_state` returned, unless that is of another metric or mode."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value, self.update = state["value"], state["update"]


@dataclass(frozen=True)
class Evaluations:
    """What a run evaluates, and when."""

    validation: Evaluate | None = None  # returns the loss and the metrics over the validation split
    test: Evaluate | None = None  # returns them over the test split; called once, when the training has ended
    every: int | str = "epoch"  # or updates between two evaluations; the last update is always followed by one
    best: Best | None = None  # the checkpoint of the best one is kept, and `test` uses its weights

    def due(self, update: int, plan: Plan, *, last: bool) -> bool:
        """Return whether the validation split is evaluated after `update` updates, if there is one."""
        if self.validation is None:
            return False
        return last or (plan.ends_epoch(update) if isinstance(self.every, str) else update % self.every == 0)


class Evaluator:
    """Computes the loss and the metrics over all of a split, each example exactly once.

    Args:
        evaluation: of one batch.
        batches, name: of the split.
        on_halved: called with the name and the new size when micro-batches do not fit into memory and are halved.
        changed: variables that a forward pass may change; they are put back before the evaluation is repeated.
        retry: whether it is repeated with smaller micro-batches. One of several workers cannot, as the others go on.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        batches: tf.data.Dataset,
        name: str = "validation",
        on_halved: Callable[[str, int], None] = lambda name, size: None,
        changed: Sequence[tf.Variable] = (),
        retry: bool = True,
    ):
        self._evaluation, self._batches, self._name = evaluation, batches, name
        self._on_halved, self._changed, self._retry = on_halved, changed, retry
        self._count = int(batches.cardinality())  # negative where only reading them shows it
        self._evaluate_next = tf.function(lambda iterator: evaluation(next(iterator)), autograph=False)
        # Used in its place once memory has run out: it shows whether reading a batch or evaluating it takes too much.
        self._evaluate_batch: Any = None

    def __call__(self, check: Check = lambda: None) -> dict[str, float]:
        """Return the loss and the metrics; raise a ResourceExhaustedError if a batch cannot be read into memory."""
        evaluation, spec = self._evaluation, self._batches.element_spec
        before = [tf.identity(variable) for variable in self._changed]
        while True:
            try:
                return self._evaluate(check)
            except _DoesNotFit as error:
                self._on_halved(self._name, halve(evaluation, f"the {self._name} split", error.args[0]))
            except tf.errors.ResourceExhaustedError:
                if self._evaluate_batch is not None or not self._retry:
                    raise
            # Traced anew: a traced function keeps the size of its micro-batches.
            self._evaluate_batch = tf.function(lambda batch: evaluation(batch), autograph=False, input_signature=[spec])
            assign_all(self._changed, before)

    def _evaluate(self, check: Check) -> dict[str, float]:
        metrics = self._evaluation.measured
        for metric in metrics.values():
            metric.reset_state()
        iterator = iter(self._batches)
        sums = self._next_sums(iterator)
        for place in itertools.count(1):
            if place == self._count:
                break
            check()
            try:
                found = self._next_sums(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if self._count >= 0:
                    raise
                break
            sums = tf.nest.map_structure(tf.add, sums, found)
        return {name: float(value) for name, value in sums.results(metrics).items()}

    def _next_sums(self, iterator: Any) -> GradientSums:
        if self._evaluate_batch is None:
            return self._evaluate_next(iterator)
        batch = next(iterator)
        try:
            return self._evaluate_batch(batch)
        except tf.errors.ResourceExhaustedError as error:
            raise _DoesNotFit(error) from error


class _DoesNotFit(Exception):
    """A batch that was read does not fit into memory as it is evaluated; holds the error."""


@contextmanager
def averaged_weights(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> Iterator[None]:
    """With `use_ema`, give the model its averaged weights meanwhile, so that all rows of a curve are of the same."""
    if not getattr(optimizer, "inner_optimizer", optimizer).use_ema:
        yield
        return
    variables = model.trainable_variables
    raw = [tf.identity(variable.value) for variable in variables]
    optimizer.finalize_variable_values(variables)
    try:
        yield
    finally:
        assign_all(variables, raw)
