"""The moving statistics of BatchNormalization, updated once per effective batch.

They are updated with the mean and the variance of the effective batch. Each micro-batch
k is normalized with its own mean μₖ and variance σₖ². If each of the K micro-batches
updated the moving statistics, these would change K times as fast and miss the variance
between the μₖ. With wₖ values in micro-batch k, the effective batch has

    μ = Σ wₖμₖ / Σ wₖ        σ² = Σ wₖσₖ² / Σ wₖ + Σ wₖ(μₖ − μ)² / Σ wₖ

Both are computed from the steps that each micro-batch alone would have made,
dₖ = (1 − m)(μₖ − old) for the moving mean, where m is the layer's momentum. The
variance of the μₖ is (Σ wₖdₖ² / Σ wₖ − (Σ wₖdₖ / Σ wₖ)²) / (1 − m)². The moving
variance changes by 1 − m times this variance. The sums are in float64: before the
statistics have converged, all dₖ are nearly equal, and float32 would lose their
differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .keras_internals import calling, graph, keeps_call_of, layers_of
from .loss_sums import nonzero


class StatisticsStep(NamedTuple):
    """Sums over the steps by which single micro-batches would move the statistics.

    All are float64 of shape (channels,). If all channels have the same weight, `weight`
    is a scalar.
    """

    weight: tf.Tensor  # Σ wₖ, the number of values in each mean
    weighted_mean_step: tf.Tensor  # Σ wₖdₖ
    weighted_square_of_mean_step: tf.Tensor  # Σ wₖdₖ²
    weighted_variance_step: tf.Tensor  # Σ wₖ(1 − m)(σₖ² − old)


# Per layer of `normalizing_layers`, one step per call in a forward pass.
StatisticsSteps = tuple[tuple[StatisticsStep, ...], ...]


def normalizing_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Return the layers whose statistics can be updated once per effective batch."""
    return [layer for layer in layers_of(model) if _is_normalizing(layer)]


def _is_normalizing(layer: keras.Layer) -> bool:
    return keeps_call_of(layer, keras.layers.BatchNormalization) and not layer.renorm


@contextmanager
def statistics_held(
    layers: Sequence[keras.layers.BatchNormalization],
) -> Iterator[Callable[[], StatisticsSteps]]:
    """Prevent calls of the layers in the `with` block from moving the statistics.

    Yields:
        A function that returns the steps that the calls would have made.
    """
    steps_by_layer: list[list[StatisticsStep]] = [[] for _ in layers]
    pairs = zip(layers, steps_by_layer, strict=True)

    def steps() -> StatisticsSteps:
        return tuple(map(tuple, steps_by_layer))

    with calling((layer, _call(layer, its_steps)) for layer, its_steps in pairs):
        yield steps


def assign_moving_statistics(model: keras.Model, steps: StatisticsSteps) -> None:
    """Update the moving statistics once, from the sums of steps over a batch.

    Call this in the cross-replica context.
    """
    for layer, steps_of_layer in zip(normalizing_layers(model), steps, strict=True):
        if steps_of_layer:
            _assign_statistics(layer, steps_of_layer)


def _assign_statistics(
    layer: keras.layers.BatchNormalization, steps: Sequence[StatisticsStep]
) -> None:
    means = layer.moving_mean
    variances = layer.moving_variance
    old_mean = tf.cast(tf.convert_to_tensor(means.value), tf.float64)
    old_variance = tf.cast(tf.convert_to_tensor(variances.value), tf.float64)
    mean = old_mean
    variance = old_variance
    rate = 1 - layer.momentum
    for index, step in enumerate(steps):
        weight = nonzero(step.weight)
        mean_step = step.weighted_mean_step / weight
        variance_step = step.weighted_variance_step / weight
        if rate:
            mean_square = step.weighted_square_of_mean_step / weight
            variance_of_steps = mean_square - tf.square(mean_step)
            # The variance of the means is `variance_of_steps` / rate². The moving
            # variance changes by `rate` times this variance.
            step_by_means = tf.maximum(variance_of_steps, 0) / rate
        else:
            step_by_means = tf.zeros_like(mean_step)
        if index:  # the previous call has moved the statistics: start from there
            mean += rate * (old_mean - mean)
            variance += rate * (old_variance - variance)
        mean += mean_step
        variance += variance_step + step_by_means
    means.assign(tf.cast(mean, means.dtype))
    variances.assign(tf.cast(variance, variances.dtype))


def _call(
    layer: keras.layers.BatchNormalization, steps: list[StatisticsStep]
) -> Callable[..., tf.Tensor]:
    """Return a `call` that appends to `steps` and leaves the statistics as they are."""
    traced_graph = graph()

    def call(
        inputs: tf.Tensor, training: Any = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        keras_call = keras.layers.BatchNormalization.call
        # In a layer's own loop, let Keras update the statistics: the steps could not be
        # returned from the loop.
        if not training or not layer.trainable or graph() is not traced_graph:
            return keras_call(layer, inputs, training=training, mask=mask)

        statistics: list[keras.Variable] = [layer.moving_mean, layer.moving_variance]
        before = [tf.convert_to_tensor(variable) for variable in statistics]
        outputs = keras_call(layer, inputs, training=training, mask=mask)
        after = [tf.convert_to_tensor(variable) for variable in statistics]
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(value)

        mean_step, variance_step = map(_difference, after, before)
        weight = tf.cast(_values(layer, inputs, mask), tf.float64)
        steps.append(
            StatisticsStep(
                weight=weight,
                weighted_mean_step=weight * mean_step,
                weighted_square_of_mean_step=weight * tf.square(mean_step),
                weighted_variance_step=weight * variance_step,
            )
        )
        return outputs

    return call


def _difference(after: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    return tf.cast(after, tf.float64) - tf.cast(before, tf.float64)


def _values(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tf.Tensor:
    """Return the number of values per channel from which statistics are computed."""
    channels = layer.axis % inputs.shape.rank
    if mask is None:
        return tf.size(inputs) // inputs.shape[channels]
    # A mask lacks the last axis, along which Keras broadcasts it.
    mask_of_values = tf.broadcast_to(
        tf.cast(mask, tf.bool)[..., None], tf.shape(inputs)
    )
    axes = [axis for axis in range(inputs.shape.rank) if axis != channels]
    return tf.math.count_nonzero(mask_of_values, axes)
