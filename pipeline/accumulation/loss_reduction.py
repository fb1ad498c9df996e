"""The reduction of a loss: its weighted sum over a part of a batch, and the weight that divides it."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .batch import Nest
from .keras_internals import mask_of


class WeightedSum(NamedTuple):
    """The numerator and the denominator of a mean, over a part of a batch; scalars, in float32 at least.

    Sums of each over disjoint parts of a batch, divided once, are the loss of the batch.

    Attributes:
        total: Σ wᵢ·lossᵢ.
        weight: Σ wᵢ; 0 for the reduction `sum`, to be read as 1.
        batch_weight: `weight` of the whole batch, where it is known before a forward pass; else None.
    """

    total: tf.Tensor
    weight: tf.Tensor
    batch_weight: tf.Tensor | None


def weighted_sum(
    loss: keras.losses.Loss,
    y_true: Nest,
    outputs: Nest,
    sample_weight: tf.Tensor | None = None,
    totals: tuple[tf.Tensor, tf.Tensor | None] | None = None,
) -> WeightedSum:
    """Return the numerator and the denominator of the mean `loss(y_true, outputs, sample_weight)`.

    Follows `keras.losses.Loss.__call__` of Keras 3.15: the reductions `mean` and `sum_over_batch_size` divide by
    the number of loss elements, or of unmasked ones; `mean_with_sample_weight` by the sum of the weights; `sum`
    by nothing.

    Args:
        loss: its `call` gives one value per example, or per element of an example.
        y_true, outputs: as `loss` takes them, with the examples on axis 0.
        sample_weight: (examples,) or of the values' shape.
        totals: the number of examples and the sum of the sample weights of the batch that these are a part of, where
            `batch_weight` is wanted.

    Raises:
        ValueError: the loss reduces nothing, or has already reduced its values to a scalar, or the sample weights do
            not fit its values.
    """
    if loss.reduction in (None, "none"):
        raise ValueError(f"The loss must have a reduction. Received: {loss.name} with reduction={loss.reduction!r}")
    dtype = tf.as_dtype(loss.dtype)
    mask = mask_of(outputs)
    outputs, y_true = _cast(outputs, dtype), _cast(y_true, dtype)
    values = loss.call(y_true, outputs)
    mask = _both(mask, mask_of(values))
    dtype = tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype  # a bfloat16 that counts stops at 256
    values = _dense(values, dtype)
    if values.shape.rank == 0:
        raise ValueError(f"The loss must give one value per example, not a scalar. Received: {loss.name}")
    weights, count = None, tf.cast(tf.size(values), dtype)
    if mask is not None:
        weights = tf.cast(mask, dtype)
        count *= tf.math.divide_no_nan(tf.reduce_sum(weights), tf.cast(tf.size(weights), dtype))
    weights = _product(weights, None if sample_weight is None else _dense(sample_weight, dtype))
    if weights is not None:
        weights = _fitted(weights, values)
        values *= weights
    total = tf.reduce_sum(values)
    if loss.reduction == "sum":
        return WeightedSum(total, tf.zeros((), dtype), tf.zeros((), dtype))
    by_weights, ahead = loss.reduction == "mean_with_sample_weight" and weights is not None, None
    if totals is not None and mask is None:
        if by_weights:
            ahead = tf.cast(totals[1], dtype)
        elif (per_example := _values_per_example(loss, y_true, outputs)) is not None:
            ahead = tf.cast(totals[0], dtype) * per_example
    return WeightedSum(total, tf.reduce_sum(weights) if by_weights else count, ahead)


def nonzero(weight: tf.Tensor) -> tf.Tensor:
    """Return the weight, 1 where it is 0."""
    return tf.where(weight == 0, tf.ones_like(weight), weight)


def divide(value: Any, weight: tf.Tensor) -> Any:
    """Return a tensor or `tf.IndexedSlices` divided by a weight, of which 0 divides by nothing."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(divide(value.values, weight), value.indices, value.dense_shape)
    return value / tf.cast(nonzero(weight), value.dtype)


def _values_per_example(loss: keras.losses.Loss, y_true: Nest, outputs: Nest) -> int | None:
    """Return how many values the loss has for an example, as its shapes for three show; None where it depends."""

    def three(leaf: Any) -> tf.TensorSpec:
        return tf.TensorSpec([3, *leaf.shape[1:]], leaf.dtype)

    specs = tf.nest.flatten((y_true, outputs))
    if any(isinstance(leaf, tf.RaggedTensor) or leaf.shape.rank is None for leaf in specs):
        return None
    made = tf.function(loss.call, autograph=False).get_concrete_function(three(y_true), three(outputs))
    count = tf.TensorShape(made.structured_outputs.shape).num_elements()
    return None if count is None or count % 3 else count // 3


def _cast(nest: Nest, dtype: tf.DType) -> Nest:
    return tf.nest.map_structure(lambda leaf: tf.cast(leaf, dtype), nest)


def _both(first: tf.Tensor | None, second: tf.Tensor | None) -> tf.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return tf.logical_and(first, second)


def _dense(values: Any, dtype: tf.DType) -> tf.Tensor:
    values = tf.cast(values, dtype)
    return values.flat_values if isinstance(values, tf.RaggedTensor) else values


def _product(mask: tf.Tensor | None, weights: tf.Tensor | None) -> tf.Tensor | None:
    if mask is None or weights is None:
        return weights if mask is None else mask
    rank = max(mask.shape.rank, weights.shape.rank)
    return _aligned(mask, rank) * _aligned(weights, rank)


def _fitted(weights: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    weights = _aligned(weights, values.shape.rank)
    pairs = zip(weights.shape[1:], values.shape[1:], strict=False)
    if weights.shape.rank > values.shape.rank or any(size not in (1, None, of or size) for size, of in pairs):
        raise ValueError(f"sample weights of shape {weights.shape} do not fit values of shape {values.shape}")
    return weights


def _aligned(weights: tf.Tensor, rank: int) -> tf.Tensor:
    """Add or remove last axes of size 1 until `weights` has `rank` axes: (examples,) weighs every element."""
    while weights.shape.rank < rank:
        weights = tf.expand_dims(weights, -1)
    while weights.shape.rank > rank and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    return weights
