"""The moving statistics of BatchNormalization, moved once an update.

They are moved by the statistics of the effective batch. Each micro-batch k is
normalized by its own mean μₖ and variance σₖ². Moved by each of them, the moving
statistics would follow K times as fast, and miss the variance between the μₖ. With wₖ
values in micro-batch k, the effective batch has

    μ = Σ wₖμₖ / Σ wₖ        σ² = Σ wₖσₖ² / Σ wₖ + Σ wₖ(μₖ − μ)² / Σ wₖ

The sums, in float64, are over the steps that each micro-batch alone would have made,
dₖ = (1 − m)(μₖ − old) with the layer's momentum m. The variance of the means is
Σ wₖdₖ² / Σ wₖ − (Σ wₖdₖ / Σ wₖ)², divided by (1 − m)²: before the statistics have
converged, all dₖ are nearly equal, and in float32 their difference would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .keras_internals import calling, graph, keeps_call_of, layers_of
from .loss_sums import nonzero


class Moved(NamedTuple):
    """The steps that calls of a layer, each alone, would have moved its statistics by.

    All are float64 of shape (channels,), but for a weight that all channels share.
    """

    weight: tf.Tensor  # Σ wₖ, the number of values that each mean is taken of
    mean: tf.Tensor  # Σ wₖdₖ
    square: tf.Tensor  # Σ wₖdₖ²
    variance: tf.Tensor  # Σ wₖ(1 − m)(σₖ² − old)


# For each of `normalizing_layers`, one for each of its calls in a forward pass.
Moves = tuple[tuple[Moved, ...], ...]


def normalizing_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Return the layers whose moving statistics can be those of the effective batch."""
    return [layer for layer in layers_of(model) if _is_normalizing(layer)]


def _is_normalizing(layer: keras.Layer) -> bool:
    return keeps_call_of(layer, keras.layers.BatchNormalization) and not layer.renorm


@contextmanager
def observed(
    layers: Sequence[keras.layers.BatchNormalization],
) -> Iterator[Callable[[], Moves]]:
    """Keep calls of the layers inside the `with` block from moving their statistics.

    Yields:
        A function that returns the steps that the calls would have made.
    """
    moved_by_layer: list[list[Moved]] = [[] for _ in layers]
    pairs = zip(layers, moved_by_layer, strict=True)

    def moves() -> Moves:
        return tuple(tuple(moved) for moved in moved_by_layer)

    with calling((layer, _call(layer, moved)) for layer, moved in pairs):
        yield moves


def assign_moving_statistics(model: keras.Model, moves: Moves) -> None:
    """Move the statistics once, by the sums over an effective batch.

    Call it in the cross-replica context.
    """
    for layer, calls in zip(normalizing_layers(model), moves, strict=True):
        if calls:
            _move(layer, calls)


def _move(
    layer: keras.layers.BatchNormalization, moved_by_call: Sequence[Moved]
) -> None:
    means = layer.moving_mean
    variances = layer.moving_variance
    old_mean = tf.cast(tf.convert_to_tensor(means.value), tf.float64)
    old_variance = tf.cast(tf.convert_to_tensor(variances.value), tf.float64)
    mean = old_mean
    variance = old_variance
    rate = 1 - layer.momentum
    for index, moved in enumerate(moved_by_call):
        weight = nonzero(moved.weight)
        step = moved.mean / weight
        if rate:
            square = moved.square / weight - tf.square(step)
            variance_of_means = tf.maximum(square, 0) / rate
        else:
            variance_of_means = tf.zeros_like(step)
        if index:  # a call moves from where the previous call has moved them to
            mean += rate * (old_mean - mean)
            variance += rate * (old_variance - variance)
        mean += step
        variance += moved.variance / weight + variance_of_means
    means.assign(tf.cast(mean, means.dtype))
    variances.assign(tf.cast(variance, variances.dtype))


def _call(
    layer: keras.layers.BatchNormalization, moved: list[Moved]
) -> Callable[..., tf.Tensor]:
    """Return a `call` that appends to `moved` and leaves the statistics as they are."""
    traced_graph = graph()

    def call(
        inputs: tf.Tensor, training: Any = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        keras_call = keras.layers.BatchNormalization.call
        # From a layer's own loop nothing can be returned: there Keras moves them.
        if not training or not layer.trainable or graph() is not traced_graph:
            return keras_call(layer, inputs, training=training, mask=mask)

        statistics: list[keras.Variable] = [layer.moving_mean, layer.moving_variance]
        before = [tf.convert_to_tensor(variable) for variable in statistics]
        outputs = keras_call(layer, inputs, training=training, mask=mask)
        after = [tf.convert_to_tensor(variable) for variable in statistics]
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(value)

        mean, variance = map(_difference, after, before)
        weight = tf.cast(_values(layer, inputs, mask), tf.float64)
        moved.append(
            Moved(
                weight=weight,
                mean=weight * mean,
                square=weight * tf.square(mean),
                variance=weight * variance,
            )
        )
        return outputs

    return call


def _difference(after: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    return tf.cast(after, tf.float64) - tf.cast(before, tf.float64)


def _values(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tf.Tensor:
    """Return the number of values that a channel's statistics are taken of."""
    channels = layer.axis % inputs.shape.rank
    if mask is None:
        return tf.size(inputs) // inputs.shape[channels]
    # A mask is without the last axis, along which Keras repeats it.
    mask_of_values = tf.broadcast_to(
        tf.cast(mask, tf.bool)[..., None], tf.shape(inputs)
    )
    axes = [axis for axis in range(inputs.shape.rank) if axis != channels]
    return tf.math.count_nonzero(mask_of_values, axes)
