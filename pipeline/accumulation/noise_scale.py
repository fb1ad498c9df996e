"""The gradient noise scale: how large a batch is before more examples stop helping.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: the simple noise scale is B = tr(Σ)/|G|², Σ the covariance
of one example's gradient, G the true gradient. Two batch sizes give two equations; accumulation has both,
the gradients gₖ of the K micro-batches of bₖ examples and the gradient g of their union of B = Σ bₖ:

    E|gₖ|² = |G|² + tr(Σ)/bₖ        E|g|² = |G|² + tr(Σ)/B

Weighing the first by bₖ/B and solving gives estimates that are unbiased for unequal micro-batches too,

    tr(Σ) ≈ (Σₖ bₖ|gₖ|² − B|g|²) / (K − 1)        |G|² ≈ |g|² − tr(Σ)/B

whose ratio is not unbiased: numerator and denominator are smoothed apart, and divided last. The gradients are those
that are applied: what the model adds to the loss (regularisation, `add_loss`) is in all of them, so it moves |G|².
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from .gradient_sums import Gradients, GradientSums, means
from .loss_sums import Part

DECAY = 0.9  # of the moving averages, per measured update


def square(gradients: Sequence[tf.Tensor | tf.IndexedSlices | tuple[()] | None]) -> tf.Tensor:
    """Return the sum of the squares of all entries, scalar; `()` or None stands for a missing gradient."""
    # In one pass over each: materialized squares cost three times as much.
    halves = []
    for gradient in filter(tf.is_tensor, gradients):
        if isinstance(gradient, tf.IndexedSlices):  # each row once, summed
            rows, places = tf.unique(gradient.indices)
            gradient = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
        halves.append(tf.nn.l2_loss(gradient))
    return 2 * tf.add_n([tf.cast(half, halves[0].dtype) for half in halves])


def estimate(
    squares: tf.Tensor, parts: tf.Tensor, of_mean: tf.Tensor, weight: tf.Tensor, examples: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Estimate tr(Σ), per example, and |G|² from one update; NaN with fewer than two micro-batches.

    Args:
        squares: Σₖ Wₖ|gₖ|², where Wₖ is the weight of micro-batch k, by which its sum of losses is divided.
        parts: K, the number of micro-batches; 0 where none was measured.
        of_mean: |g|².
        weight: Σₖ Wₖ.
        examples: Σₖ nₖ, which turns the unit of weight into examples.
    """
    weight = tf.cast(weight, squares.dtype)
    nan = tf.constant(math.nan, squares.dtype)
    per_weight = tf.where(parts > 1, (squares - weight * of_mean) / (parts - 1), nan)
    return per_weight * tf.cast(examples, squares.dtype) / weight, of_mean - per_weight / weight


def of_micro_batch(
    measure: tf.Tensor | bool, sums: Sequence[Gradients], minimised: Sequence[Part]
) -> tuple[tf.Tensor, ...]:
    """Return W|g|², 1 and W of one micro-batch; zeros where they are not wanted or all weights are zero.

    g is the mean gradient of the micro-batch: the mean of all gₖ is the gradient that is applied.
    """
    size = minimised[0].size
    nothing = (tf.zeros_like(size),) * 3
    if measure is False:
        return nothing

    def measure_now() -> tuple[tf.Tensor, ...]:
        if len(sums) == 1:  # saves a pass over the gradient
            weighted = tf.cast(square(sums[0]), size.dtype) / size
            weighted *= 1 if minimised[0].unit is None else tf.square(minimised[0].unit)
        else:
            sizes = [part.size if part.unit is None else part.size / part.unit for part in minimised]
            weighted = tf.cast(square(means(sums, sizes)), size.dtype) * size
        counts = tf.cast(minimised[0].weight > 0 if minimised[0].unit is None else size > 0, size.dtype)
        return weighted * counts, counts, size * counts

    return tf.cond(measure, measure_now, lambda: nothing)


def estimates(sums: GradientSums, of_mean: tf.Tensor, scale: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return what `estimate` does by name, of |g|² and the square of the loss scale of the gradients in `sums`."""
    squares, parts, weight = sums.noise
    squares, of_mean = squares / tf.cast(scale, squares.dtype), tf.cast(of_mean, squares.dtype)
    variance, of_true = estimate(squares, parts, of_mean, weight, sums.examples)
    return {"gradient_variance": variance, "gradient_square": of_true}


class NoiseScale:
    """tr(Σ)/|G|² in examples, smoothed over the updates that were measured."""

    def __init__(self) -> None:
        self._variance = self._square = self._weight = 0.0

    def add(self, variance: float, square: float) -> None:
        """Add one update's estimates; a pair that is not finite is ignored."""
        if math.isfinite(variance) and math.isfinite(square):
            self._variance = DECAY * self._variance + (1 - DECAY) * variance
            self._square = DECAY * self._square + (1 - DECAY) * square
            self._weight = DECAY * self._weight + (1 - DECAY)

    @property
    def value(self) -> float | None:
        """The noise scale in examples; None while nothing was measured, or |G|² is not positive."""
        return self._variance / self._square if self._weight and self._square > 0 else None

    def get_state(self) -> dict[str, float]:
        """Return the averages, for `set_state`."""
        return dict(vars(self))

    def set_state(self, state: Mapping[str, float]) -> None:
        vars(self).update(state)
