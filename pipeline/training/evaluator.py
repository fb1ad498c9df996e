"""Evaluates the loss and the metrics over a split, and tracks the best evaluation."""

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
from pipeline.config.plan import RunPlan
from pipeline.dataset import non_finite
from pipeline.shown.show import Show
from pipeline.training.oom_retry import assign_all, halve

# Called between two batches of an evaluation. It raises an exception to end the
# evaluation.
Check = Callable[[], None]
# The name of the dataset's own validation split among the validation sets. No set of
# `dataset.validations` can have it.
OWN_SPLIT = ""
# Evaluates a split; returns the loss and the metrics by name.
Evaluate = Callable[[Check], dict[str, float]]


@dataclass
class Best:
    """The best evaluation so far, for `training.keep_best`.

    Of two evaluations with the same value, the first one counts as the best.

    Attributes:
        metric: name of the metric, without `val/`, such as `loss` or `late/loss`.
        mode: `min` or `max`.
        value: best value of the metric so far, or None. NaN is ignored.
        update: number of completed updates at the best evaluation.
    """

    metric: str
    mode: str
    value: float | None = None
    update: int = 0

    def take(self, update: int, results: Mapping[str, float]) -> bool:
        """Store `results` if they are the best so far; return whether they are.

        Results that lack the metric, since only other validation sets were evaluated,
        are never the best.
        """
        value = results.get(self.metric)
        if value is None or math.isnan(value) or not self._improves(value):
            return False
        self.value = value
        self.update = update
        return True

    def _improves(self, value: float) -> bool:
        if self.value is None:
            return True
        return value < self.value if self.mode == "min" else value > self.value

    def row(self) -> dict[str, float]:
        """Return the metrics to log, or an empty dict if there is no best value yet."""
        if self.value is None:
            return {}
        return {f"best/val/{self.metric}": self.value, "best/update": self.update}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the fields from a dict, if it has the same metric and mode."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value = state["value"]
            self.update = state["update"]


def _show_nothing(update: int) -> None:
    pass


@dataclass(frozen=True)
class EvaluatedSet:
    """A set of `dataset.validations`.

    Attributes:
        evaluate: returns the loss and the metrics over the set.
        every: its own interval, in the form of `Evaluations.every`.
    """

    evaluate: Evaluate
    every: int | str


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run, and their schedule.

    Attributes:
        validation: returns the loss and the metrics over the validation split.
        test: returns the loss and the metrics over the test split. Called once, after
            training.
        every: number of updates between two evaluations, `epoch`, or a fraction of an
            epoch such as `epoch/4`. All validation sets are always evaluated after the
            last update.
        best: the best evaluation so far, or None if its checkpoint is not kept. `test`
            uses the weights of this checkpoint.
        sets: further validation sets, by name.
        show: called with the number of completed updates after an evaluation of the
            validation split, once its row is logged.
    """

    validation: Evaluate | None = None
    test: Evaluate | None = None
    every: int | str = "epoch"
    best: Best | None = None
    sets: Mapping[str, EvaluatedSet] = field(default_factory=dict)
    show: Callable[[int], None] = _show_nothing

    def due(self, update: int, plan: RunPlan, *, last: bool) -> list[str]:
        """Return the names of the sets that are evaluated after `update` updates.

        The validation split is named `OWN_SPLIT`. With `last`, all sets are due.
        """
        names = []
        if self.validation is not None and (last or _is_due(self.every, update, plan)):
            names.append(OWN_SPLIT)
        for name, evaluated in self.sets.items():
            if last or _is_due(evaluated.every, update, plan):
                names.append(name)
        return names

    def evaluate(self, names: Sequence[str], check: Check) -> dict[str, float]:
        """Evaluate some sets; return the loss and the metrics of each.

        The results of the set `late` are named `late/loss` and so on. The results of
        the validation split have no prefix: `loss` and so on.

        Args:
            names: the names of the sets, as `due` returns them.
            check: called between two sets, and between two batches.
        """
        results: dict[str, float] = {}
        for name in names:
            if results:
                check()
            if name == OWN_SPLIT:
                assert self.validation is not None
                results |= self.validation(check)
                continue
            for metric, value in self.sets[name].evaluate(check).items():
                results[f"{name}/{metric}"] = value
        return results

    def log_name(self, result: str) -> str:
        """Return the name of a result in the logs of callbacks.

        It is `val_loss` for `loss`, and `val_late_loss` for `late/loss`.
        """
        name, _, metric = result.partition("/")
        if name in self.sets:
            return f"val_{name}_{metric}"
        return f"val_{result}"


def _is_due(every: int | str, update: int, plan: RunPlan) -> bool:
    """Return whether an evaluation with this interval follows `update` updates."""
    if isinstance(every, int):
        return update % every == 0
    if every == "epoch":
        return plan.ends_epoch(update)
    parts = int(every.removeprefix("epoch/"))
    return _parts_done(plan, update, parts) > _parts_done(plan, update - 1, parts)


def _parts_done(plan: RunPlan, update: int, parts: int) -> int:
    """Return the number of completed parts after `update` updates, over all epochs.

    Each epoch has `parts` parts.
    """
    # Tolerate rounding errors at the end of a part.
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
        on_halved: called with the split's name and the new micro-batch size when
            micro-batches do not fit into memory and are halved.
        changed: variables that a forward pass may change. They are restored before an
            evaluation is repeated.
        retry: whether to repeat an evaluation with smaller micro-batches if a batch
            does not fit into memory. It has to be False with several workers, since the
            other workers would not repeat the evaluation.
        show: sees each batch with what `evaluation` has observed of it. None if nothing
            is shown.
    """

    evaluation: Evaluation
    batches: tf.data.Dataset
    name: str = "validation"
    on_halved: Callable[[str, int], None] = _ignore_halved
    changed: Sequence[tf.Variable] = ()
    retry: bool = True
    show: Show | None = None
    _warned: bool = field(default=False, init=False)

    def __call__(self, check: Check = lambda: None) -> dict[str, float]:
        """Return the loss and the metrics over the split.

        Raises:
            tf.errors.ResourceExhaustedError: reading a batch exceeds the memory, or a
                batch does not fit and `retry` is False.
            OutOfMemoryError: not even a micro-batch of one example fits into memory.
        """
        before = [tf.identity(variable) for variable in self.changed]
        results = self._evaluate(check)
        while results is None:
            assign_all(self.changed, before)
            results = self._evaluate(check)
        if self.show is not None:
            self.show.finish()
        self._warn_once(results)
        return results

    def _warn_once(self, results: dict[str, float]) -> None:
        """Print a warning if a result is not finite, but only once per split.

        If the data contain a non-finite value, the warning names the part of the batch
        that contains it, such as the labels.
        """
        if self._warned:
            return
        line = non_finite.warning_of_evaluation(self.name, results, self.batches)
        if line:
            say(line)
            self._warned = True

    @cached_property
    def _evaluate_batch(self) -> Callable[[Any], Any]:
        """A function that evaluates a batch, traced for one micro-batch size."""
        return tf.function(
            lambda batch: self.evaluation.observed(batch),
            [self.batches.element_spec],
            autograph=False,
        )

    def _evaluate(self, check: Check) -> dict[str, float] | None:
        """Return the results over the split.

        If a batch does not fit into memory, raise the error, or with `retry`, halve the
        micro-batches and return None.
        """
        metrics = self.evaluation.measured
        for metric in metrics.values():
            metric.reset_state()
        if self.show is not None:
            self.show.start()

        sums: Any = None
        for batch in self.batches:
            if sums is not None:
                check()
            try:
                batch_sums, observation = self._evaluate_batch(batch)
            except tf.errors.ResourceExhaustedError as error:
                if not self.retry:
                    raise
                name = f"the evaluation of the {self.name} split"
                size = halve(self.evaluation, name, error)
                self.on_halved(self.name, size)
                del self._evaluate_batch
                return None
            if sums is None:
                sums = batch_sums
            else:
                sums = tf.nest.map_structure(tf.add, sums, batch_sums)
            if self.show is not None:
                self.show.add(batch, observation)
            del batch  # Free the batch before the next one is read.
        assert sums is not None
        results = {}
        for name, value in sums.results(metrics).items():
            results[name] = float(value)
        return results


def averaged_variables(
    optimizer: keras.optimizers.Optimizer, model: keras.Model
) -> list[keras.Variable]:
    """Return the model's trainable variables if the optimizer averages any of them.

    Without `use_ema`, the list is empty.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Check each optimizer of a `MultiOptimizer`, which splits the weights among them.
    for part in getattr(inner, "optimizers", [inner]):
        if part.use_ema:
            return list(model.trainable_variables)
    return []


@contextmanager
def averaged_weights(
    optimizer: keras.optimizers.Optimizer, model: keras.Model
) -> Iterator[None]:
    """Within the block, replace the model's weights by their moving averages.

    If the optimizer has no moving averages (`use_ema`), the weights are unchanged.
    """
    variables = averaged_variables(optimizer, model)
    raw_values = _copies(variables)
    optimizer.finalize_variable_values(variables)
    try:
        yield
    finally:
        assign_all(variables, raw_values)


@contextmanager
def averaged_weights_for_callbacks(
    optimizer: keras.optimizers.Optimizer, model: keras.Model
) -> Iterator[None]:
    """Use the averages as `averaged_weights` does, but let callbacks change weights.

    A variable that a callback has changed keeps its new value after the block, and a
    message says so.
    """
    variables = averaged_variables(optimizer, model)
    raw_values = _copies(variables)
    optimizer.finalize_variable_values(variables)
    averages = _copies(variables)
    try:
        yield
    finally:
        changed = []
        values = zip(variables, raw_values, averages, strict=True)
        for variable, raw_value, average in values:
            if bool(tf.reduce_all(tf.equal(variable.value, average))):
                variable.assign(raw_value)
            else:
                changed.append(variable.path)
        if changed:
            say(
                f"a callback has changed {changed[0]} in on_epoch_end, during which "
                "use_ema replaces the weights by their averages; training continues "
                "from the changed value"
            )


def _copies(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    return [tf.identity(variable.value) for variable in variables]
