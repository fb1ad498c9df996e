"""The moving statistics of BatchNormalization are those of effective batches, whatever the cut."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update
from tests.parameters import mostly_slow

# A moving average of 8 updates: 1e-15 each, of values near 3 and of the squares of deviations, ten times that.
EXACT = 1e-12
MASKED = 1e-7  # Keras adds as much to the number of values, of which a micro-batch has one at least
SIZES = (48, 48, 29, 1)
UPDATES, TIME, WIDTH = 8, 5, 4


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
    """Keras spreads the mask over the last axis, so each time has another number of values."""
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
    """The statistics are of the inputs, so that normalising by a micro-batch does not show in them."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((TIME, WIDTH))
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(kind(inputs))))


def batches():
    random = np.random.default_rng(0)
    x = random.normal(3, size=(sum(SIZES), TIME, WIDTH)) + random.normal(
        3, size=(sum(SIZES), 1, 1)
    )
    masked = (
        random.random((sum(SIZES), TIME)) < 0.3
    )  # where there is a mask; another share in each micro-batch
    x[masked & (np.arange(sum(SIZES)) < sum(SIZES) - 1)[:, None]] = (
        0  # Keras takes 0 for the mean of no values
    )
    y, stops = random.normal(size=(sum(SIZES), 1)), np.cumsum(SIZES)
    for update in range(UPDATES):
        part = slice(stops[update % 4] - SIZES[update % 4], stops[update % 4])
        yield x[part], y[part]


@functools.cache
def of_large_batches(kind):
    """By Keras alone, one call a batch."""
    model = model_of(kind)
    for x, _ in batches():
        model(x, training=True)
    return statistics(model)


def statistics(model):
    layer = next(
        layer for layer in model.layers if isinstance(layer, layers.BatchNormalization)
    )
    return np.asarray(layer.moving_mean), np.asarray(layer.moving_variance)


def accumulated(kind, micro_batch_size, devices=1, **options):
    strategy = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        if devices == 2
        else tf.distribute.get_strategy()
    )
    with strategy.scope():
        model, optimizer = model_of(kind), keras.optimizers.SGD(1e-3)
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
    return model, strategy


@pytest.mark.parametrize(
    ("kind", "micro_batch_size", "devices"),
    [
        *mostly_slow(
            ((kind, 7, 1) for kind in KINDS), [(normalised, 7, 1), (twice, 7, 1)]
        ),
        *mostly_slow(
            ((kind, 5, 2) for kind in KINDS), [(masked_on_the_first_axis, 5, 2)]
        ),
    ],
)
def test_they_are_those_of_effective_batches(kind, micro_batch_size, devices):
    model, strategy = accumulated(kind, micro_batch_size, devices)
    for found, expected in zip(statistics(model), of_large_batches(kind), strict=True):
        np.testing.assert_allclose(
            found, expected, rtol=EXACT if "masked" not in kind.__name__ else MASKED
        )
    for variable in model.non_trainable_variables:
        first, *others = (
            copy.numpy() for copy in strategy.experimental_local_results(variable.value)
        )
        assert all(np.array_equal(first, other) for other in others)
    assert not any(
        "call" in vars(layer) for layer in model.layers
    )  # they are as Keras made them


def test_moved_with_every_micro_batch_they_are_others():
    model, _ = accumulated(normalised, 6, hold_statistics=False)
    mean, variance = (
        np.abs(found / expected - 1).max()
        for found, expected in zip(
            statistics(model), of_large_batches(normalised), strict=True
        )
    )
    assert min(mean, variance) > 1e4 * MASKED


@pytest.mark.slow
@pytest.mark.parametrize("begin", [0.0, 1000.0])
def test_in_float32_they_do_not_cancel(begin, precision):
    """A mean a thousand times the deviation: its square has all the digits there are."""
    precision("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((1,)), layers.BatchNormalization(), layers.Dense(1)]
    )
    norm = model.layers[0]
    norm.moving_mean.assign([begin])
    norm.moving_variance.assign([1.0])
    x = np.random.default_rng(0).normal(1000, 1, (512, 1)).astype(np.float32)
    optimizer = keras.optimizers.SGD(0.0)
    optimizer.build(model.trainable_variables)
    update = tf.function(
        Update(model, keras.losses.MeanSquaredError(), optimizer, 8), autograph=False
    )
    for _ in range(100):
        update((x, x))
    left = 0.99**100  # of where they began
    # A value near 1000 has a step of 6e-5 in float32: what a micro-batch moves the mean by is known to that, a
    # hundredth of it being moved, so its mean to 6e-3, against a deviation of 1.
    np.testing.assert_allclose(
        norm.moving_variance, [(1 - left) * x.var(dtype=np.float64) + left], rtol=2e-2
    )
    np.testing.assert_allclose(
        norm.moving_mean,
        [(1 - left) * x.mean(dtype=np.float64) + left * begin],
        atol=2e-2,
    )


def test_layers_that_do_not_move_stay_as_they_are():
    inputs = keras.Input((TIME, WIDTH))
    x = layers.BatchNormalization(trainable=False, name="frozen")(
        layers.BatchNormalization(name="moving")(inputs)
    )
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))
    still = model.get_layer("frozen").variables
    before = [value.numpy() for value in still]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    tf.function(
        Update(model, keras.losses.MeanSquaredError(), optimizer, 7), autograph=False
    )(next(batches()))
    for value, was in zip(still, before, strict=True):
        np.testing.assert_array_equal(value, was)
    assert np.abs(model.get_layer("moving").moving_mean).min() > 0
