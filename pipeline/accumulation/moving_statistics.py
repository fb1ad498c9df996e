"""The moving statistics of BatchNormalization, moved once per update by the statistics of the effective batch.

Each micro-batch k is normalised by its own mean μₖ and variance σₖ². Moved by each of them, the moving statistics would
follow K times as fast, and miss the variance between the μₖ. With wₖ values in micro-batch k, the effective batch has

    μ = Σ wₖμₖ / Σ wₖ        σ² = Σ wₖσₖ² / Σ wₖ + Σ wₖ(μₖ − μ)² / Σ wₖ

The sums, in float64, are over the steps that each micro-batch alone would have made, dₖ = (1 − m)(μₖ − old). The
variance of the means is Σ wₖdₖ² / Σ wₖ − (Σ wₖdₖ / Σ wₖ)², divided by (1 − m)²: before the statistics have converged,
all dₖ are nearly equal, and in float32 their difference would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .keras_internals import calling, graph, keeps_call_of, layers_of


class Moved(NamedTuple):
    """The steps that calls of a layer would have moved its statistics by, each alone; float64 of shape (channels,)."""

    weight: tf.Tensor  # Σ wₖ, the number of values that each mean is taken of; a scalar where all have as many
    mean: tf.Tensor  # Σ wₖdₖ
    square: tf.Tensor  # Σ wₖdₖ²
    variance: tf.Tensor  # Σ wₖ(1 − m)(σₖ² − old)


Moves = tuple[
    tuple[Moved, ...], ...
]  # for each of `normalising_layers`, one for each of its calls in a forward pass


def normalising_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Return the layers whose moving statistics can be those of the effective batch."""
    kind = keras.layers.BatchNormalization
    return [
        layer
        for layer in layers_of(model)
        if keeps_call_of(layer, kind) and not layer.renorm
    ]


@contextmanager
def observed(
    layers: Sequence[keras.layers.BatchNormalization],
) -> Iterator[Callable[[], Moves]]:
    """Keep calls of the layers from moving statistics; yield a function that returns the steps they would have made."""
    seen: list[list[Moved]] = [[] for _ in layers]
    with calling(
        (layer, _call(layer, moved)) for layer, moved in zip(layers, seen, strict=True)
    ):
        yield lambda: tuple(map(tuple, seen))


def assign_moving_statistics(model: keras.Model, moves: Moves) -> None:
    """Move the statistics once, by the sums over an effective batch. Call it in the cross-replica context."""
    for layer, calls in zip(normalising_layers(model), moves, strict=True):
        means, variances = layer.moving_mean, layer.moving_variance
        mean = old_mean = tf.cast(tf.convert_to_tensor(means.value), tf.float64)
        variance = old_variance = tf.cast(
            tf.convert_to_tensor(variances.value), tf.float64
        )
        rest = 1 - layer.momentum
        for index, moved in enumerate(calls):
            weight = tf.where(
                moved.weight == 0, tf.ones_like(moved.weight), moved.weight
            )
            by = moved.mean / weight
            apart = (
                tf.maximum(moved.square / weight - tf.square(by), 0) / rest
                if rest
                else tf.zeros_like(by)
            )
            if index:  # from where the previous call has moved them to
                mean += rest * (old_mean - mean)
                variance += rest * (old_variance - variance)
            mean += by
            variance += moved.variance / weight + apart
        if calls:
            means.assign(tf.cast(mean, means.dtype))
            variances.assign(tf.cast(variance, variances.dtype))


def _call(
    layer: keras.layers.BatchNormalization, seen: list[Moved]
) -> Callable[..., tf.Tensor]:
    here = graph()

    def call(
        inputs: tf.Tensor, training: Any = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        plain = keras.layers.BatchNormalization.call
        # In a layer's own loop nothing can be returned from a call: Keras moves them.
        if not training or not layer.trainable or graph() is not here:
            return plain(layer, inputs, training=training, mask=mask)
        state: Sequence[keras.Variable] = (layer.moving_mean, layer.moving_variance)
        before = list(map(tf.convert_to_tensor, state))
        outputs = plain(layer, inputs, training=training, mask=mask)
        after = list(map(tf.convert_to_tensor, state))
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)
        pairs = zip(after, before, strict=True)
        mean, variance = (
            tf.cast(new, tf.float64) - tf.cast(old, tf.float64) for new, old in pairs
        )
        weight = tf.cast(_values(layer, inputs, mask), tf.float64)
        seen.append(
            Moved(weight, weight * mean, weight * tf.square(mean), weight * variance)
        )
        return outputs

    return call


def _values(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tf.Tensor:
    channels = layer.axis % inputs.shape.rank
    if mask is None:
        return tf.size(inputs) // inputs.shape[channels]
    spread = tf.broadcast_to(
        tf.cast(mask, tf.bool)[..., None], tf.shape(inputs)
    )  # as Keras does
    return tf.math.count_nonzero(
        spread, [axis for axis in range(inputs.shape.rank) if axis != channels]
    )
