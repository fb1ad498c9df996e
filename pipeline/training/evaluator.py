"""The loss and the metrics over a split: when they are computed, and how.

The best evaluation so far is kept here, too.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import Evaluation
from pipeline.common.errors import say
from pipeline.config.plan import Plan
from pipeline.dataset import non_finite
from pipeline.training.oom_retry import assign_all, halve

# Called between two batches. What it raises ends the evaluation.
Check = Callable[[], None]
Evaluate = Callable[[Check], dict[str, float]]


@dataclass
class Best:
    """The best evaluation so far, for `training.keep_best`; a tie keeps the first one.

    Attributes:
        metric: name of the metric, without `val/`.
        mode: `min` or `max`.
        value: its best value; None before the first evaluation that gives a number.
        update: completed updates before that evaluation.
    """

    metric: str
    mode: str
    value: float | None = None
    update: int = 0

    def take(self, update: int, results: Mapping[str, float]) -> bool:
        """Keep these results if they are the best so far; return whether they are."""
        value = results[self.metric]
        if math.isnan(value) or not self._improves(value):
            return False
        self.value = value
        self.update = update
        return True

    def _improves(self, value: float) -> bool:
        if self.value is None:
            return True
        return value < self.value if self.mode == "min" else value > self.value

    def row(self) -> dict[str, float]:
        """Return the metrics to log; there are none before the first evaluation."""
        if self.value is None:
            return {}
        return {f"best/val/{self.metric}": self.value, "best/update": self.update}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state, as a dict, if it has the same metric and mode."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value = state["value"]
            self.update = state["update"]


@dataclass(frozen=True)
class Evaluations:
    """What a run evaluates, and when.

    Attributes:
        validation: returns the loss and the metrics over the validation split.
        test: returns them over the test split. It is called once, after the training.
        every: updates between two evaluations, `epoch`, or a part of an epoch such as
            `epoch/4`, which is as many examples for every batch size. The last update
            is always followed by an evaluation.
        best: the best evaluation so far, whose checkpoint is kept and whose weights
            `test` uses. None if no checkpoint is kept for it.
    """

    validation: Evaluate | None = None
    test: Evaluate | None = None
    every: int | str = "epoch"
    best: Best | None = None

    def due(self, update: int, plan: Plan, *, last: bool) -> bool:
        """Return whether the validation split is evaluated after `update` updates."""
        if self.validation is None:
            return False
        if last:
            return True
        if isinstance(self.every, int):
            return update % self.every == 0
        if self.every == "epoch":
            return plan.ends_epoch(update)
        parts = int(self.every.removeprefix("epoch/"))
        return _parts_done(plan, update, parts) > _parts_done(plan, update - 1, parts)


def _parts_done(plan: Plan, update: int, parts: int) -> int:
    """Return how many of the `parts` of each epoch are over after `update` updates."""
    # A part that is over but for rounding is over.
    return math.floor(plan.epoch(update) * parts + 1e-9)


def _ignore_halved(split: str, micro_batch_size: int) -> None:
    pass


@dataclass
class SplitEvaluator:
    """Computes the loss and the metrics over a split, each example exactly once.

    Attributes:
        evaluation: evaluates one batch.
        batches: the batches of the split.
        name: the name of the split.
        on_halved: called with the split's name and the new size when micro-batches do
            not fit into memory and are halved.
        changed: variables that a forward pass may change. They are restored before a
            second try.
        retry: whether a batch that does not fit is evaluated in smaller micro-batches.
            One of several workers cannot do that, as the others go on.
    """

    evaluation: Evaluation
    batches: tf.data.Dataset
    name: str = "validation"
    on_halved: Callable[[str, int], None] = _ignore_halved
    changed: Sequence[tf.Variable] = ()
    retry: bool = True
    _warned: bool = field(default=False, init=False)

    def __call__(self, check: Check = lambda: None) -> dict[str, float]:
        """Return the loss and the metrics over the split.

        Raises:
            tf.errors.ResourceExhaustedError: a batch cannot be read into memory.
            OutOfMemoryError: not even a micro-batch of one example fits.
        """
        before = [tf.identity(variable) for variable in self.changed]
        results = self._evaluate(check)
        while results is None:
            assign_all(self.changed, before)
            results = self._evaluate(check)
        self._warn_once(results)
        return results

    def _warn_once(self, results: dict[str, float]) -> None:
        """Print a warning, only once, if a result is not finite.

        The warning says so if the data themselves are not finite.
        """
        if self._warned:
            return
        line = non_finite.warning_of_evaluation(self.name, results, self.batches)
        if line:
            say(line)
            self._warned = True

    @cached_property
    def _evaluate_batch(self) -> Callable[[Any], Any]:
        """A function that evaluates a batch; tracing fixes its micro-batch size."""
        return tf.function(
            lambda batch: self.evaluation(batch),
            [self.batches.element_spec],
            autograph=False,
        )

    def _evaluate(self, check: Check) -> dict[str, float] | None:
        """Return the results, or None if a batch did not fit into memory.

        The micro-batches have then been halved.
        """
        metrics = self.evaluation.measured
        for metric in metrics.values():
            metric.reset_state()

        sums: Any = None
        for batch in self.batches:
            if sums is not None:
                check()
            try:
                batch_sums = self._evaluate_batch(batch)
            except tf.errors.ResourceExhaustedError as error:
                if not self.retry:
                    raise
                size = halve(self.evaluation, f"the {self.name} split", error)
                self.on_halved(self.name, size)
                del self._evaluate_batch
                return None
            if sums is None:
                sums = batch_sums
            else:
                sums = tf.nest.map_structure(tf.add, sums, batch_sums)
            del batch  # It is freed before the next one is read.
        assert sums is not None
        results = {}
        for name, value in sums.results(metrics).items():
            results[name] = float(value)
        return results


@contextmanager
def averaged_weights(
    optimizer: keras.optimizers.Optimizer, model: keras.Model
) -> Iterator[None]:
    """With `use_ema`, give the model its averaged weights within the block.

    Every evaluation of a run, including the last one, then uses averaged weights.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    variables = model.trainable_variables if inner.use_ema else []
    raw_values = [tf.identity(variable.value) for variable in variables]
    optimizer.finalize_variable_values(variables)
    try:
        yield
    finally:
        assign_all(variables, raw_values)
