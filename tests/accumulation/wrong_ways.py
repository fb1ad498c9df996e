"""Mistakes in accumulation, in the plain loop of `matrix.py`: its tests must see them.

Each function takes the micro-batches of an effective batch, and returns the loss that
is minimized by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tests.accumulation.matrix import (
    CUTS,
    DEVICES,
    EXAMPLES,
    Case,
    Kind,
    Minimized,
    Run,
    Weights,
    by_keras,
    loss_of,
    pieces,
)


def mean_of_means(parts: Sequence[slice]) -> Minimized:
    """Each micro-batch has the same weight, whatever it holds."""

    def minimized(kind: Kind, model: keras.Model, batch: tuple) -> tf.Tensor:
        means = [loss_of(kind, model, _part(batch, part)) for part in parts]
        return sum(means) / len(means)

    return minimized


def last_one_dropped(parts: Sequence[slice]) -> Minimized:
    """The last micro-batch is lost, as the end of an epoch is if a loop counts to K."""
    kept = slice(parts[-1].start)
    return lambda kind, model, batch: loss_of(kind, model, _part(batch, kept))


def regularized_in_each(parts: Sequence[slice]) -> Minimized:
    """Regularization is added in every one of K micro-batches, so K times."""

    def minimized(kind: Kind, model: keras.Model, batch: tuple) -> tf.Tensor:
        right = loss_of(kind, model, batch)
        return right + (len(parts) - 1) * sum(model.losses)

    return minimized


def half_left_out(parts: Sequence[slice]) -> Minimized:
    """Half of the examples are not used; for cuts into one micro-batch alone."""
    kept = slice(EXAMPLES // 2)
    return lambda kind, model, batch: loss_of(kind, model, _part(batch, kept))


def unregularized(parts: Sequence[slice]) -> Minimized:
    """Regularization is forgotten; for cuts into one micro-batch alone."""
    return lambda kind, model, batch: loss_of(kind, model, batch) - sum(model.losses)


def _part(batch: tuple, part: slice) -> tuple:
    return tf.nest.map_structure(lambda leaf: leaf[part], batch)


def wrong_way(case: Case) -> Callable[[Sequence[slice]], Minimized]:
    """Return a mistake that shows in this case."""
    regularized = case.kind == "regularised"
    if case.cut == "factor 1" and DEVICES[case.devices].replicas == 1:
        if regularized:
            return unregularized
        return half_left_out
    if regularized:
        return regularized_in_each
    # Where all micro-batches weigh the same, the mean of their means is right.
    equal_weights = case.kind not in ("masked tokens", "sample weights")
    if CUTS[case.cut] is not None and equal_weights:
        return last_one_dropped
    return mean_of_means


def after_a_wrong_update(case: Case, run: Run) -> Weights:
    """Return the weights after one update of the plain loop with `wrong_way` in it."""
    mistake = wrong_way(case)

    def minimized(kind: Kind, model: keras.Model, batch: tuple) -> tf.Tensor:
        examples = tf.nest.flatten(batch)[0].shape[0]
        return mistake(pieces(case, examples))(kind, model, batch)

    _, after = by_keras(case, run._replace(updates=1), minimized)
    return after
