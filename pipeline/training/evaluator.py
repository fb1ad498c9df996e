"""The loss and the metrics over a split, in smaller micro-batches where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipeline.accumulation import Evaluation, GradientSums
from pipeline.dataset.batches import iterating
from pipeline.training.oom_retry import halved

Stop = Callable[[], BaseException | None]


def never() -> None:
    """Return no reason to stop."""
    return None


def evaluator(
    evaluation: Evaluation,
    batches: tf.data.Dataset,
    name: str = "validation",
    tell: Callable[[str, int], None] = lambda name, size: None,
    changed: Sequence[tf.Variable] = (),
    tries: bool = True,
) -> Callable[..., dict[str, float]]:
    """Return a function that evaluates the loss and the metrics over all of `batches`, each example exactly once.

    It takes a function, looked at after each batch: an exception that this gives is raised. Where a micro-batch does
    not fit into memory, and it `tries`, it begins again with smaller ones, and gives the name of the split and their
    size to `tell`. The variables `changed`, which a forward pass may change, are put back then.
    """
    spec = batches.element_spec
    next_batch = tf.function(lambda iterator: evaluation(next(iterator)), autograph=False)
    this_batch: Any = None  # in place of it where memory has run out once: what failed, reading or evaluating, is known
    count = int(batches.cardinality())

    def evaluate(stop: Stop = never) -> dict[str, float]:
        nonlocal this_batch
        before = [tf.identity(variable) for variable in changed]
        while True:
            try:
                return evaluate_once(stop)
            except tf.errors.ResourceExhaustedError as error:
                if this_batch is not None or not tries:
                    raise error  # of reading
            except _DoesNotFit as error:
                tell(name, halved(evaluation, f"the {name} split", error.error))
            this_batch = tf.function(lambda batch: evaluation(batch), autograph=False, input_signature=[spec])
            for kept, now in zip(before, changed, strict=True):
                now.assign(kept)

    def evaluate_next(iterator: Any) -> GradientSums:
        if this_batch is None:
            return next_batch(iterator)
        batch = next(iterator)
        try:
            return this_batch(batch)
        except tf.errors.ResourceExhaustedError as error:
            raise _DoesNotFit(error) from error

    def evaluate_once(stop: Stop) -> dict[str, float]:
        for metric in evaluation.measured.values():
            metric.reset_state()
        with iterating(batches) as iterator:
            sums = evaluate_next(*iterator)
            for _ in range(count - 1):
                if (reason := stop()) is not None:
                    raise reason
                sums = tf.nest.map_structure(tf.add, sums, evaluate_next(*iterator))
        results = {"loss": sums.mean_loss(), **sums.output_losses()}
        results |= {name: metric.result() for name, metric in evaluation.measured.items()}
        return {name: float(value) for name, value in results.items()}

    return evaluate


class _DoesNotFit(Exception):
    def __init__(self, error: tf.errors.ResourceExhaustedError):
        self.error = error
