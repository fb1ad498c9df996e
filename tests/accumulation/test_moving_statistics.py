"""The moving statistics of BatchNormalization are those of effective batches.

So they are whatever the cut.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

# A moving average of 8 updates: 1e-15 each, of values near 3 and of the squares of
# deviations, ten times that.
EXACT = 1e-12
# Keras adds as much to the number of values, of which a micro-batch has one at least.
MASKED = 1e-7
SIZES = (48, 48, 29, 1)
UPDATES = 8
TIME = 5
WIDTH = 4


pytestmark = pytest.mark.usefixtures("float64")


def normalised(x):
    return layers.BatchNormalization(momentum=0.8)(x)


def masked(x):
    return layers.BatchNormalization(momentum=0.8)(layers.Masking(0.0)(x))


def twice(x):
    shared = layers.BatchNormalization(momentum=0.8)
    return shared(x) + shared(2 * x + 1)


def momentum_one(x):
    return layers.BatchNormalization(momentum=1.0)(x)


def momentum_zero(x):
    return layers.BatchNormalization(momentum=0.0)(x)


def on_the_first_axis(x):
    return layers.BatchNormalization(axis=1, momentum=0.8)(x)


def masked_on_the_first_axis(x):
    """Each time has another number of values: Keras masks over the last axis."""
    return layers.BatchNormalization(axis=1, momentum=0.8)(layers.Masking(0.0)(x))


KINDS = [
    masked_on_the_first_axis,
    normalised,
    masked,
    twice,
    momentum_one,
    momentum_zero,
    on_the_first_axis,
]


def model_of(kind):
    """Return a model whose statistics are those of its inputs.

    So normalizing by a micro-batch does not show in them.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((TIME, WIDTH))
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(kind(inputs))))


def batches():
    random = np.random.default_rng(0)
    examples = sum(SIZES)
    x = random.normal(3, size=(examples, TIME, WIDTH))
    x += random.normal(3, size=(examples, 1, 1))
    # Zeros are masked, if there is a mask: another share in each micro-batch, and none
    # of the last example, as Keras takes 0 for the mean of no values.
    masked = random.random((examples, TIME)) < 0.3
    masked[-1] = False
    x[masked] = 0
    y = random.normal(size=(examples, 1))

    stops = np.cumsum(SIZES)
    for update in range(UPDATES):
        stop = stops[update % 4]
        part = slice(stop - SIZES[update % 4], stop)
        yield x[part], y[part]


@functools.cache
def of_large_batches(kind):
    """Return the statistics by Keras alone, after one call a batch."""
    model = model_of(kind)
    for x, _ in batches():
        model(x, training=True)
    return statistics(model)


def statistics(model):
    """Return the mean and the variance of the first layer that has them."""
    for layer in model.layers:
        if isinstance(layer, layers.BatchNormalization):
            return np.asarray(layer.moving_mean), np.asarray(layer.moving_variance)
    raise AssertionError("there is no BatchNormalization")


def accumulated(kind, micro_batch_size, devices=1, **options):
    """Return the model after an update for each batch."""
    strategy = strategy_on(devices)
    with strategy.scope():
        model = model_of(kind)
        optimizer = keras.optimizers.SGD(1e-3)
        optimizer.build(model.trainable_variables)
    update = Update(
        model,
        keras.losses.MeanSquaredError(),
        optimizer,
        micro_batch_size,
        strategy=strategy,
        **options,
    )
    signature = (
        tf.TensorSpec((None, TIME, WIDTH), tf.float64),
        tf.TensorSpec((None, 1), tf.float64),
    )
    step = tf.function(
        lambda x, y: update((x, y)), input_signature=signature, autograph=False
    )
    for batch in batches():
        step(*batch)
    return model


@pytest.mark.parametrize(
    ("kind", "micro_batch_size", "devices"),
    [
        *mostly_slow([(kind, 7, 1) for kind in KINDS], []),
        *mostly_slow([(kind, 5, 2) for kind in KINDS], [(normalised, 5, 2)]),
    ],
)
def test_they_are_those_of_effective_batches(kind, micro_batch_size, devices):
    model = accumulated(kind, micro_batch_size, devices)
    bound = MASKED if "masked" in kind.__name__ else EXACT
    mean, variance = statistics(model)
    expected_mean, expected_variance = of_large_batches(kind)
    np.testing.assert_allclose(mean, expected_mean, rtol=bound)
    np.testing.assert_allclose(variance, expected_variance, rtol=bound)

    strategy = model.distribute_strategy
    for variable in model.non_trainable_variables:
        copies = strategy.experimental_local_results(variable.value)
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())
    # The layers are as Keras made them.
    assert not any("call" in vars(layer) for layer in model.layers)


def test_moved_with_every_micro_batch_they_are_others():
    model = accumulated(normalised, 6, hold_statistics=False)
    mean, variance = statistics(model)
    expected_mean, expected_variance = of_large_batches(normalised)
    assert np.abs(mean / expected_mean - 1).max() > 1e4 * MASKED
    assert np.abs(variance / expected_variance - 1).max() > 1e4 * MASKED


@pytest.mark.slow
@pytest.mark.parametrize("begin", [0.0, 1000.0])
def test_in_float32_they_do_not_cancel(begin, precision):
    """The mean is a thousand times the deviation: its square needs all the digits."""
    precision("float32")
    keras.utils.set_random_seed(0)
    norm = layers.BatchNormalization()
    model = keras.Sequential([keras.Input((1,)), norm, layers.Dense(1)])
    norm.moving_mean.assign([begin])
    norm.moving_variance.assign([1.0])
    optimizer = keras.optimizers.SGD(0.0)
    optimizer.build(model.trainable_variables)
    update = tf.function(
        Update(model, keras.losses.MeanSquaredError(), optimizer, 8), autograph=False
    )
    x = np.random.default_rng(0).normal(1000, 1, (512, 1)).astype(np.float32)
    for _ in range(100):
        update((x, x))

    remaining = 0.99**100  # of where they began
    mean = (1 - remaining) * x.mean(dtype=np.float64) + remaining * begin
    variance = (1 - remaining) * x.var(dtype=np.float64) + remaining
    # A value near 1000 has a step of 6e-5 in float32: what a micro-batch moves the
    # mean by is known to that, a hundredth of it being moved, so its mean to 6e-3,
    # against a deviation of 1.
    np.testing.assert_allclose(norm.moving_variance, [variance], rtol=2e-2)
    np.testing.assert_allclose(norm.moving_mean, [mean], atol=2e-2)


def test_layers_that_do_not_move_stay_as_they_are():
    moving = layers.BatchNormalization()
    frozen = layers.BatchNormalization(trainable=False)
    inputs = keras.Input((TIME, WIDTH))
    hidden = frozen(moving(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))
    before = [variable.numpy() for variable in frozen.variables]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    update = Update(model, keras.losses.MeanSquaredError(), optimizer, 7)
    tf.function(update, autograph=False)(next(batches()))
    for variable, value in zip(frozen.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert np.abs(moving.moving_mean).min() > 0
