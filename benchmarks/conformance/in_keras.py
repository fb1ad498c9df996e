"""The network of the cases in Keras, and the large batch by a plain loop.

The loop knows nothing of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from benchmarks.conformance.cases import (
    CLASSES,
    FEATURES,
    HIDDEN,
    IGNORED,
    RATE,
    TIME,
    Arrays,
    Case,
    initial_weights,
)
from benchmarks.conformance.outcome import LargeBatches


def prepare() -> None:
    """Let Keras compute in float64, on two logical devices."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [logical, logical])


def strategy(case: Case) -> tf.distribute.Strategy:
    if case.devices == 2:
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return tf.distribute.get_strategy()


def network(case: Case) -> keras.Model:
    penalty = keras.regularizers.L2(case.penalty) if case.penalty else None
    regularizers = {"kernel_regularizer": penalty, "bias_regularizer": penalty}
    shape = (TIME, FEATURES) if case.tokens else (FEATURES,)
    inputs = keras.Input(shape)
    hidden = keras.layers.Dense(HIDDEN, "tanh", **regularizers)(inputs)
    logits = keras.layers.Dense(CLASSES, **regularizers)(hidden)
    model = keras.Model(inputs, logits)
    model.set_weights(initial_weights())
    return model


def loss(case: Case) -> keras.losses.Loss:
    reduction = "sum_over_batch_size"
    if case.divided_by == "weights":
        reduction = "mean_with_sample_weight"
    ignored = IGNORED if case.tokens else None
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignored, reduction=reduction
    )


def optimizer(case: Case, factor: int | None = None) -> keras.optimizers.Optimizer:
    rate = RATE
    if case.decay != 1:
        rate = keras.optimizers.schedules.ExponentialDecay(RATE, 1, case.decay)
    return keras.optimizers.SGD(
        rate, global_clipnorm=case.clip, gradient_accumulation_steps=factor
    )


def fit(
    model: keras.Model,
    examples: Arrays,
    batch_size: int,
    epochs: int,
    callbacks: Sequence[keras.callbacks.Callback],
) -> None:
    """Call `fit` with the examples in the order of the large batches."""
    x, y, *weights = examples
    sample_weight = weights[0] if weights else None
    model.fit(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        callbacks=list(callbacks),
        verbose=0,
    )


def large(case: Case, batches: Sequence[Arrays]) -> LargeBatches:
    """Train on large batches."""
    model = network(case)
    loss_of_batch = loss(case)
    sgd = optimizer(case)
    sgd.build(model.trainable_variables)
    variables = [variable.value for variable in model.trainable_variables]

    losses = []
    for x, y, *weights in batches:
        with tf.GradientTape() as tape:
            value = loss_of_batch(y, model(x, training=True), *weights)
            value += sum(model.losses)
        gradients = tape.gradient(value, variables)
        sgd.apply(gradients, model.trainable_variables)
        losses.append(float(value))
    return LargeBatches(tuple(model.get_weights()), losses)
