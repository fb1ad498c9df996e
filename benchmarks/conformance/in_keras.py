"""The network of the cases in Keras, and the large batch by a plain loop that knows nothing of micro-batches."""

from __future__ import annotations

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


def prepare() -> None:
    """Let Keras compute in float64, on two logical devices."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )


def strategy(case: Case) -> tf.distribute.Strategy:
    return (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        if case.devices == 2
        else tf.distribute.get_strategy()
    )


def network(case: Case) -> keras.Model:
    penalty = keras.regularizers.L2(case.penalty) if case.penalty else None
    regularised = {"kernel_regularizer": penalty, "bias_regularizer": penalty}
    inputs = keras.Input((TIME, FEATURES) if case.tokens else (FEATURES,))
    hidden = keras.layers.Dense(HIDDEN, "tanh", **regularised)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, **regularised)(hidden))
    model.set_weights(initial_weights())
    return model


def loss(case: Case) -> keras.losses.Loss:
    reduction = (
        "mean_with_sample_weight"
        if case.divided_by == "weights"
        else "sum_over_batch_size"
    )
    ignored = IGNORED if case.tokens else None
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignored, reduction=reduction
    )


def optimizer(case: Case, factor: int | None = None) -> keras.optimizers.Optimizer:
    rate = (
        RATE
        if case.decay == 1
        else keras.optimizers.schedules.ExponentialDecay(RATE, 1, case.decay)
    )
    return keras.optimizers.SGD(
        rate, global_clipnorm=case.clip, gradient_accumulation_steps=factor
    )


def large(case: Case, batches: list[Arrays]) -> tuple[Arrays, list[float]]:
    """Return the weights after the last update, and the loss of each."""
    model, value_of, sgd = network(case), loss(case), optimizer(case)
    sgd.build(model.trainable_variables)
    values = []
    for x, y, *weight in batches:
        with tf.GradientTape() as tape:
            value = value_of(y, model(x, training=True), *weight) + sum(model.losses)
        gradients = tape.gradient(
            value, [variable.value for variable in model.trainable_variables]
        )
        sgd.apply(gradients, model.trainable_variables)
        values.append(float(value))
    return tuple(model.get_weights()), values
