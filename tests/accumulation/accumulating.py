"""Optimizers, strategies and a classifier for the tests of `AccumulatingOptimizer`."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.accumulation.matrix import OPTIMIZERS

# Of how far the weights have gone: sums of 28 terms in another order, 28 · 2⁻⁵³ =
# 3e-15, three times.
CLOSE = 1e-12


def optimizer(name: str, **more: object) -> keras.optimizers.Optimizer:
    options = {**OPTIMIZERS[name], **more}
    return getattr(keras.optimizers, name)(**options)


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def strategy_of(replicas: int) -> tf.distribute.Strategy:
    """Return a strategy of so many CPUs, which shares no collectives with others.

    Two strategies in one process would share the keys of their collectives.
    """
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )


def per_replica(
    strategy: tf.distribute.Strategy, value_of: Callable[[int], object]
) -> object:
    """Return one value for each replica, that of its index."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: value_of(context.replica_id_in_sync_group)
    )


def values(model: keras.Model) -> np.ndarray:
    """Return all weights in one vector."""
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


def classifier(optimizer: keras.optimizers.Optimizer, **more: object) -> keras.Model:
    """Return a compiled model that begins with the same weights each time."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    model.compile(optimizer, loss(), **more)
    return model


def examples_of_classifier(count: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(count, 5))
    return x, np.arange(count) % 3
