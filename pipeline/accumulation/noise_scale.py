"""The gradient noise scale: how large a batch is before more examples stop helping.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: the simple noise scale is B =
tr(Σ)/|G|², Σ the covariance of one example's gradient, G the true gradient. Two batch
sizes give two equations; accumulation has both, the gradients gₖ of the K micro-batches
and g = Σ ωₖgₖ of their union, where ωₖ is the share of micro-batch k in its weight:

    E|gₖ|² = |G|² + tr(Σ)/nₖ        E|g|² = |G|² + tr(Σ)/n

nₖ is the number of examples that count: all where they weigh the same, (Σw)²/Σw² with
weights w, which are those of the samples or numbers of unmasked tokens. So 1/n = Σ
ωₖ²/nₖ. Weighing the first by ωₖ and solving gives estimates that are unbiased for
unequal micro-batches too,

    tr(Σ) ≈ (Σₖ ωₖ|gₖ|² − |g|²) / (Σₖ ωₖ/nₖ − 1/n)        |G|² ≈ |g|² − tr(Σ)/n

whose ratio is not unbiased: numerator and denominator are smoothed apart, and divided
last. A measurement that was made Δ updates before another counts exp(−Δ/τ) times as
much, where τ is a tenth of the updates until then, at most 100: |G|² falls fast at
first, by powers of ten, and a longer average would lag behind it by as much.

The gradients are those that are applied: what the model adds to the loss
(regularization, `add_loss`) moves |G|². With several outputs, ωₖ and nₖ are the first
one's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from .batch import ABSENT
from .gradient_sums import GradientNoiseSums, Gradients, means
from .loss_sums import LossPart
from .micro_batches import rows_once

# The time constant of the averages in updates: a share of the updates so far, up to a
# limit. Where |G|² falls as a power p of the updates, the average is too large by
# 1 / (1 − p · SHARE): by a quarter for p = 2.
SHARE = 0.1
LONGEST = 100.0

# With one micro-batch Σ ωₖ/nₖ and 1/n are equal up to rounding.
ALONE = 1e-5


class Estimates(NamedTuple):
    """Estimates from one update, scalars; NaN with fewer than two micro-batches."""

    variance: tf.Tensor  # tr(Σ), per example
    square: tf.Tensor  # |G|²


class Averages(NamedTuple):
    """Averages of estimates over updates."""

    variance: float  # of tr(Σ), per example
    square: float  # of |G|²


def square(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | tuple[()] | None],
) -> tf.Tensor:
    """Return the sum of the squares of all entries, scalar.

    `ABSENT` or None stands for a missing gradient. Without any, the sum is 0.
    """
    # In one pass over each gradient: materialized squares cost three times as much.
    halves = []
    for gradient in filter(tf.is_tensor, gradients):
        if isinstance(gradient, tf.IndexedSlices):  # each row once, summed
            gradient, _ = rows_once(gradient.values, gradient.indices)
        halves.append(tf.nn.l2_loss(gradient))
    if not halves:
        return tf.zeros(())
    return 2 * tf.add_n([tf.cast(half, halves[0].dtype) for half in halves])


def gradient_noise_of_micro_batch(
    measure: tf.Tensor | bool,
    gradients: Sequence[Gradients],
    minimized: Sequence[LossPart],
) -> GradientNoiseSums | tuple[()]:
    """Return what one micro-batch adds to the gradient noise.

    Args:
        measure: whether it is measured. If not, or if the micro-batch weighs nothing,
            the result is zeros; it is `ABSENT` if it is never measured.
        gradients: of each of `minimized`.
        minimized: what is minimized; its first part has the weight of the micro-batch.
    """
    if measure is False:
        return ABSENT
    weight = minimized[0].weight

    def measured() -> GradientNoiseSums:
        if len(gradients) == 1:  # gₖ need not be computed, which saves a pass over it
            square_of_sum = tf.cast(square(gradients[0]), weight.dtype)
            squares = tf.math.divide_no_nan(square_of_sum, weight)
        else:
            weights = [part.weight for part in minimized]
            square_of_mean = square(means(gradients, weights))
            squares = weight * tf.cast(square_of_mean, weight.dtype)
        examples = tf.cast(minimized[0].effective_examples, weight.dtype)
        inverse = tf.math.divide_no_nan(weight, examples)
        return GradientNoiseSums(squares, inverse, weight * inverse, weight)

    def not_measured() -> GradientNoiseSums:
        zero = tf.zeros_like(weight)
        return GradientNoiseSums(zero, zero, zero, zero)

    return tf.cond(measure, measured, not_measured)


def estimates(
    sums: GradientNoiseSums, square_of_mean: tf.Tensor, loss_scale: tf.Tensor
) -> Estimates:
    """Estimate tr(Σ), per example, and |G|² from one update.

    Args:
        sums: over the micro-batches, of gradients that have a loss scale.
        square_of_mean: |g|², without a loss scale.
        loss_scale: by which the gradients of the micro-batches are multiplied.
    """
    dtype = sums.squares.dtype
    scale = tf.cast(tf.square(loss_scale), dtype)
    squares = sums.squares / (sums.weight * scale)
    inverse_of_batch = sums.inverse_of_batch / tf.square(sums.weight)
    square_of_mean = tf.cast(square_of_mean, dtype)
    inverse = sums.inverse / sums.weight

    difference = inverse - inverse_of_batch
    has_several = difference > ALONE * inverse
    divisor = tf.where(has_several, difference, tf.constant(math.nan, dtype))
    variance = (squares - square_of_mean) / divisor
    return Estimates(variance, square_of_mean - variance * inverse_of_batch)


class NoiseScale:
    """tr(Σ)/|G|² in examples, smoothed over the updates that were measured."""

    def __init__(self) -> None:
        self._updates = 0
        self._measured_at = 0  # the last update that was measured
        # Weighted sums over the measurements, and the sum of their weights: averages
        # that begin with the first measurement, not with zero.
        self._weight = 0.0
        self._variance = 0.0
        self._square = 0.0

    def add(self, variance: float, square: float) -> None:
        """Add one update's estimates. Call it once an update.

        A pair that is not finite stands for an update that was not measured.
        """
        self._updates += 1
        if not (math.isfinite(variance) and math.isfinite(square)):
            return
        time_constant = min(SHARE * self._updates, LONGEST)
        kept = math.exp((self._measured_at - self._updates) / time_constant)
        self._weight = kept * self._weight + 1
        self._variance = kept * self._variance + variance
        self._square = kept * self._square + square
        self._measured_at = self._updates

    @property
    def value(self) -> float | None:
        """The gradient noise scale in examples.

        It is None while nothing was measured, or |G|² is not positive.
        """
        if self._square > 0:
            return self._variance / self._square
        return None

    @property
    def averages(self) -> Averages | None:
        """The averages whose ratio is `value`; None while nothing was measured."""
        if not self._weight:
            return None
        return Averages(self._variance / self._weight, self._square / self._weight)

    def get_state(self) -> dict[str, float]:
        """Return the averages, for `set_state`."""
        return dict(vars(self))

    def set_state(self, state: Mapping[str, float]) -> None:
        """Set the averages to those that `get_state` returned.

        They start anew from the state of an earlier version, which averaged otherwise.
        """
        start = NoiseScale().get_state()
        if state.keys() != start.keys():
            state = start
        vars(self).update(state)
