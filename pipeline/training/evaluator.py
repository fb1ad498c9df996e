"""The loss and the metrics over a split: when they are computed, how, with which weights, and which were the best."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import Evaluation
from pipeline.config.plan import Plan
from pipeline.training.oom_retry import assign_all, halve

Check = Callable[
    [], None
]  # called between two batches; what it raises ends the evaluation
Evaluate = Callable[[Check], dict[str, float]]


@dataclass
class Best:
    """The best evaluation so far, by one metric, for `training.keep_best`; of two equal ones, the first."""

    metric: str  # its name, without `val/`
    mode: str  # `min` or `max`
    value: float | None = (
        None  # of the metric; None before the first evaluation that gives a number
    )
    update: int = 0  # completed updates before that evaluation

    def take(self, update: int, results: Mapping[str, float]) -> bool:
        """Return whether the evaluation after `update` updates is the best so far; if so, keep it as that."""
        value, better = (
            results[self.metric],
            operator.lt if self.mode == "min" else operator.gt,
        )
        if math.isnan(value) or not (self.value is None or better(value, self.value)):
            return False
        self.value, self.update = value, update
        return True

    def row(self) -> dict[str, float]:
        """Return what is logged of it: the metric and the update; empty if there was none."""
        return (
            {}
            if self.value is None
            else {f"best/val/{self.metric}": self.value, "best/update": self.update}
        )

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from another one, given as a dict, unless that is of another metric or mode."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value, self.update = state["value"], state["update"]


@dataclass(frozen=True)
class Evaluations:
    """What a run evaluates, and when."""

    validation: Evaluate | None = (
        None  # returns the loss and the metrics over the validation split
    )
    test: Evaluate | None = (
        None  # returns them over the test split; called once, when the training has ended
    )
    every: int | str = (
        "epoch"  # or updates between two evaluations; the last update is always followed by one
    )
    best: Best | None = (
        None  # the checkpoint of the best one is kept, and `test` uses its weights
    )

    def due(self, update: int, plan: Plan, *, last: bool) -> bool:
        """Return whether the validation split is evaluated after `update` updates, if there is one."""
        if self.validation is None:
            return False
        return last or (
            plan.ends_epoch(update)
            if isinstance(self.every, str)
            else update % self.every == 0
        )


@dataclass
class Evaluator:
    """Computes the loss and the metrics over all of a split, each example exactly once."""

    evaluation: Evaluation  # of one batch
    batches: tf.data.Dataset
    name: str = "validation"  # of the split
    # Called with that and the new size when micro-batches do not fit into memory and are halved.
    on_halved: Callable[[str, int], None] = lambda name, size: None
    changed: Sequence[
        tf.Variable
    ] = ()  # those that a forward pass may change, put back before a second try
    retry: bool = True  # in smaller micro-batches; one of several workers cannot, as the others go on

    def __call__(self, check: Check = lambda: None) -> dict[str, float]:
        """Return the loss and the metrics; raise a ResourceExhaustedError if a batch cannot be read into memory."""
        before = [tf.identity(variable) for variable in self.changed]
        while (results := self._evaluate(check)) is None:
            assign_all(self.changed, before)
        return results

    @cached_property  # once it is traced, it keeps the size of its micro-batches
    def _evaluate_batch(self) -> Callable[[Any], Any]:
        return tf.function(
            lambda batch: self.evaluation(batch),
            [self.batches.element_spec],
            autograph=False,
        )

    def _evaluate(self, check: Check) -> dict[str, float] | None:
        """Return the results; None if a batch did not fit into memory, after which micro-batches are halved."""
        metrics, sums = self.evaluation.measured, None
        for metric in metrics.values():
            metric.reset_state()
        for batch in self.batches:
            if sums is not None:
                check()
            try:
                found = self._evaluate_batch(batch)
            except tf.errors.ResourceExhaustedError as error:
                if not self.retry:
                    raise
                self.on_halved(
                    self.name, halve(self.evaluation, f"the {self.name} split", error)
                )
                del self._evaluate_batch
                return None
            sums = found if sums is None else tf.nest.map_structure(tf.add, sums, found)
            del batch  # before the next one is read
        assert sums is not None
        return {name: float(value) for name, value in sums.results(metrics).items()}


@contextmanager
def averaged_weights(
    optimizer: keras.optimizers.Optimizer, model: keras.Model
) -> Iterator[None]:
    """With `use_ema`, give the model its averaged weights meanwhile, so that all rows of a curve are of the same."""
    variables = (
        model.trainable_variables
        if getattr(optimizer, "inner_optimizer", optimizer).use_ema
        else []
    )
    raw = [tf.identity(variable.value) for variable in variables]
    optimizer.finalize_variable_values(variables)
    try:
        yield
    finally:
        assign_all(variables, raw)
