"""The gradient noise scale: the batch size beyond which more examples help little.

The simple noise scale of McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1) is
B = `tr(Σ)/|G|²`, where Σ is the covariance of the gradient of one example, and G is the
true gradient. Two batch sizes give two equations for tr(Σ) and |G|². Accumulation
provides both: the gradients gₖ of the K micro-batches, and the gradient g = Σ ωₖgₖ of
the effective batch, where ωₖ is the share of micro-batch k in the total weight:

    E|gₖ|² = |G|² + tr(Σ)/nₖ        E|g|² = |G|² + tr(Σ)/n

nₖ is the effective number of examples, (Σd)²/Σd², where d is what an example adds to
the divisor of the mean: its sample weight with the reduction `mean_with_sample_weight`,
else the number of its unmasked elements, whatever its sample weight. If d is the same
for all examples, nₖ is their number. So 1/n = Σ ωₖ²/nₖ. Average the first equation over
k with the weights ωₖ, and solve. The estimates are unbiased, even if the micro-batches
are unequal:

    tr(Σ) ≈ (Σₖ ωₖ|gₖ|² − |g|²) / (Σₖ ωₖ/nₖ − 1/n)        |G|² ≈ |g|² − tr(Σ)/n

Their ratio is biased, so numerator and denominator are averaged separately, and divided
last. In these averages, a measurement counts exp(−Δ/τ) times as much as the next one,
which was made Δ updates later. τ is a tenth of the updates until then, at most 100:
|G|² first falls fast, by powers of ten, and longer averages would lag behind.

The gradients are those that are applied, so losses that the model adds (regularization,
`add_loss`) change |G|². With several outputs, ωₖ and nₖ are those of the first output.
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

# The time constant of the averages, in updates: a share of the updates so far, up to a
# limit. If |G|² falls as 1 / updatesᵖ, the average is too large by the factor
# 1 / (1 − p · SHARE), which is 1.25 for p = 2.
SHARE = 0.1
LONGEST = 100.0

# Maximum relative difference between Σ ωₖ/nₖ and 1/n with a single micro-batch: the two
# are then equal up to rounding.
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
    """Return the sum of the squares of all elements, scalar.

    Missing gradients, `ABSENT` or None, are skipped. Without gradients, the sum is 0.
    """
    # `l2_loss` is one pass over each gradient. Storing the squares would take three
    # times as long.
    halves = []
    for gradient in filter(tf.is_tensor, gradients):
        if isinstance(gradient, tf.IndexedSlices):  # each row once, added up
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
    """Return the summands of one micro-batch in the sums for the gradient noise.

    Args:
        measure: whether to measure the noise in this update. If not, or if the
            micro-batch has no weight, the result is zeros. The Python value False means
            never, and the result is `ABSENT`.
        gradients: the gradients of each part of `minimized`.
        minimized: the losses, in parts with one divisor each. The weight of the first
            part is used as the weight of the micro-batch.
    """
    if measure is False:
        return ABSENT
    weight = minimized[0].weight

    def measured() -> GradientNoiseSums:
        if len(gradients) == 1:  # compute |gₖ|² without gₖ, which saves a pass
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

    if measure is True:  # `tf.cond` takes only tensors
        return measured()
    return tf.cond(measure, measured, not_measured)


def estimates(
    sums: GradientNoiseSums, square_of_mean: tf.Tensor, loss_scale: tf.Tensor
) -> Estimates:
    """Estimate tr(Σ), per example, and |G|² from one update.

    Args:
        sums: sums over the micro-batches, whose gradients include the loss scale.
        square_of_mean: |g|², without the loss scale.
        loss_scale: the factor in the gradients of the micro-batches.
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
    """The gradient noise scale `tr(Σ)/|G|²`, in examples, averaged over updates."""

    def __init__(self) -> None:
        self._updates = 0
        self._measured_at = 0  # the last update that was measured
        # Weighted sums over the measurements, and the sum of the weights. Their ratios
        # are averages that start from the first measurement, not from zero.
        self._weight = 0.0
        self._variance = 0.0
        self._square = 0.0

    def add(self, variance: float, square: float) -> None:
        """Add the estimates of one update. Call this once per update.

        If an estimate is not finite, the update counts as not measured.
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

        It is None before the first measurement, or if `|G|²` is not positive.
        """
        if self._square > 0:
            return self._variance / self._square
        return None

    @property
    def averages(self) -> Averages | None:
        """The averages whose ratio is `value`, or None before the first measurement."""
        if not self._weight:
            return None
        return Averages(self._variance / self._weight, self._square / self._weight)

    def get_state(self) -> dict[str, float]:
        """Return the state of the averages, for `set_state`."""
        return dict(vars(self))

    def set_state(self, state: Mapping[str, float]) -> None:
        """Restore a state that `get_state` returned.

        The state of an earlier version, which averaged in another way, is dropped: the
        averages then start anew.
        """
        start = NoiseScale().get_state()
        if state.keys() != start.keys():
            state = start
        vars(self).update(state)
