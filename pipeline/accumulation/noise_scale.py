"""The gradient noise scale: how large a batch is before more examples stop helping.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: the simple noise scale is B = tr(Σ)/|G|², Σ the covariance
of one example's gradient, G the true gradient. Two batch sizes give two equations; accumulation has both, the
gradients gₖ of the K micro-batches and g = Σ ωₖgₖ of their union, where ωₖ is the share of micro-batch k in its weight:

    E|gₖ|² = |G|² + tr(Σ)/nₖ        E|g|² = |G|² + tr(Σ)/n

nₖ is the number of examples that count: all where they weigh the same, (Σw)²/Σw² with weights w, which are those of the
samples or numbers of unmasked tokens. So 1/n = Σ ωₖ²/nₖ. Weighing the first by ωₖ and solving gives estimates that
are unbiased for unequal micro-batches too,

    tr(Σ) ≈ (Σₖ ωₖ|gₖ|² − |g|²) / (Σₖ ωₖ/nₖ − 1/n)        |G|² ≈ |g|² − tr(Σ)/n

whose ratio is not unbiased: numerator and denominator are smoothed apart, and divided last. The gradients are those
that are applied: what the model adds to the loss (regularisation, `add_loss`) moves |G|². With several outputs, ωₖ and
nₖ are the first one's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from .gradient_sums import Gradients, GradientSums, means, rows_once
from .loss_sums import Part

DECAY = 0.9  # of the moving averages, per measured update
ALONE = (
    1e-5  # Σ ωₖ/nₖ and 1/n are equal where there is one micro-batch, but for rounding
)


def square(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | tuple[()] | None],
) -> tf.Tensor:
    """Return the sum of the squares of all entries, scalar; `()` or None stands for a missing gradient."""
    # In one pass over each: materialized squares cost three times as much.
    halves = []
    for gradient in filter(tf.is_tensor, gradients):
        if isinstance(gradient, tf.IndexedSlices):  # each row once, summed
            gradient, _ = rows_once(gradient.values, gradient.indices)
        halves.append(tf.nn.l2_loss(gradient))
    return 2 * tf.add_n([tf.cast(half, halves[0].dtype) for half in halves])


def of_micro_batch(
    measure: tf.Tensor | bool, sums: Sequence[Gradients], minimised: Sequence[Part]
) -> tuple[tf.Tensor, ...]:
    """Return ω|g|², ω/n, ω²/n and ω of one micro-batch; zeros if it is not wanted or weighs nothing, `()` if never."""
    if measure is False:
        return ()
    share = minimised[0].share

    def measure_now() -> tuple[tf.Tensor, ...]:
        if len(sums) == 1:  # saves a pass over the gradient
            squares = tf.math.divide_no_nan(
                tf.cast(square(sums[0]), share.dtype), share
            )
        else:
            squares = share * tf.cast(
                square(means(sums, [part.share for part in minimised])), share.dtype
            )
        each = tf.math.divide_no_nan(share, tf.cast(minimised[0].examples, share.dtype))
        return squares, each, share * each, share

    return tf.cond(measure, measure_now, lambda: (tf.zeros_like(share),) * 4)


def estimates(
    sums: GradientSums, of_mean: tf.Tensor, scale: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Estimate tr(Σ), per example, and |G|² from one update; NaN with fewer than two micro-batches.

    `of_mean` is |g|². The squares of the gradients in `sums` are multiplied by `scale`, the square of the loss scale.
    """
    squares, each, of_whole, weight = sums.noise
    squares, of_whole = (
        squares / (weight * tf.cast(scale, squares.dtype)),
        of_whole / tf.square(weight),
    )
    of_mean, each = tf.cast(of_mean, squares.dtype), each / weight
    apart = tf.where(
        each - of_whole > ALONE * each,
        each - of_whole,
        tf.constant(math.nan, squares.dtype),
    )
    variance = (squares - of_mean) / apart
    return {
        "gradient_variance": variance,
        "gradient_square": of_mean - variance * of_whole,
    }


class NoiseScale:
    """tr(Σ)/|G|² in examples, smoothed over the updates that were measured."""

    def __init__(self) -> None:
        self._variance = self._square = 0.0

    def add(self, variance: float, square: float) -> None:
        """Add one update's estimates; a pair that is not finite is ignored."""
        if math.isfinite(variance) and math.isfinite(square):
            self._variance = DECAY * self._variance + (1 - DECAY) * variance
            self._square = DECAY * self._square + (1 - DECAY) * square

    @property
    def value(self) -> float | None:
        """The noise scale in examples; None while nothing was measured, or |G|² is not positive."""
        return self._variance / self._square if self._square > 0 else None

    def get_state(self) -> dict[str, float]:
        """Return the averages, for `set_state`."""
        return dict(vars(self))

    def set_state(self, state: Mapping[str, float]) -> None:
        vars(self).update(state)
