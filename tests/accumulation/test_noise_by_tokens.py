"""With `same_noise`, dropout and noise do not depend on a cut by tokens."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update
from pipeline.accumulation import update as update_module
from pipeline.accumulation.batch import positions_for_noise
from pipeline.accumulation.internals import Share, noise_by_position
from pipeline.accumulation.micro_batches import run_micro_batches
from pipeline.accumulation.token_cut import TokenLimit, dealt
from tests.accumulation.replicas import strategy_on
from tests.accumulation.sequences import (
    CLASSES,
    LENGTHS,
    VOCABULARY,
    cross_entropy,
    tokens,
)
from tests.parameters import mostly_slow

EXACT = 1e-12
UPDATES = 2
WHOLE = 10_000  # more tokens than the batch has


def batch():
    numbers = np.random.default_rng(0)
    x = tokens(numbers, list(LENGTHS))
    return x, tokens(numbers, list(LENGTHS), 0, CLASSES)


class TimeSteps(layers.Layer):
    """Dropout on rows that are steps: the first two axes are merged."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.4, seed=3)

    def call(self, x, training=False):
        rows = self.dropout(keras.ops.reshape(x, [-1, x.shape[-1]]), training=training)
        return keras.ops.reshape(rows, keras.ops.shape(x))


def noisy_model():
    """Return a model with each kind of noise, whose sequences have any length."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 5, mask_zero=True)(inputs)
    hidden = layers.Dropout(0.3, seed=1)(hidden)
    hidden = layers.LSTM(6, return_sequences=True)(hidden)
    hidden = TimeSteps()(hidden)
    hidden = layers.SpatialDropout1D(0.3, seed=2)(hidden)
    hidden = layers.GaussianNoise(0.1, seed=4)(hidden)
    return keras.Model(inputs, layers.Dense(CLASSES)(hidden))


def dropping_model():
    """Return a model with dropout alone: of positions, and of rows that are steps."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 5, mask_zero=True)(inputs)
    hidden = layers.Dropout(0.3, seed=1)(hidden)
    return keras.Model(inputs, layers.Dense(CLASSES)(TimeSteps()(hidden)))


def trained(limit, *, same_noise=True, devices=1, shared=False, model=noisy_model):
    """Return the weights after some updates, in one vector."""
    strategy = strategy_on(devices)
    with strategy.scope():
        network = model()
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(network.trainable_variables)
    update = Update(
        network,
        cross_entropy(),
        optimizer,
        micro_batch_tokens=limit,
        strategy=strategy,
        same_noise=same_noise,
    )
    examples = batch()
    if shared:
        examples = Share.for_replicas(examples, 0, devices, devices)
    function = tf.function(update, autograph=False)
    for _ in range(UPDATES):
        function(examples)
    return np.concatenate([weight.ravel() for weight in network.get_weights()])


@pytest.mark.parametrize(
    ("limit", "options"),
    mostly_slow(
        [
            (19, {"model": dropping_model}),
            (1, {}),
            (19, {}),
            (19, {"devices": 2}),
            (10, {"devices": 2, "shared": True}),
        ],
        fast=[(19, {"model": dropping_model})],
        slow=[(10, {"devices": 2, "shared": True})],
    ),
)
def test_the_weights_are_those_of_the_batch_in_one_piece(
    float64, monkeypatch, limit, options
):
    # What it rejects is below.
    monkeypatch.setattr(update_module, "check_noise", lambda *_: None)
    expected = trained(WHOLE, model=options.get("model", noisy_model))
    weights = trained(limit, **options)
    np.testing.assert_allclose(weights, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.slow
def test_without_it_the_weights_depend_on_the_cut(float64):
    distance = trained(19, same_noise=False) - trained(WHOLE, same_noise=False)
    assert np.abs(distance).max() > 0.01


def test_each_example_has_its_position_in_the_batch():
    """Replicas sort their shares alone, so places after sorting would depend on them."""
    x, y = batch()
    positions = run_micro_batches(
        lambda positions, *parts: positions, (x, y, None), TokenLimit(19)
    )
    np.testing.assert_array_equal(positions, np.arange(len(LENGTHS)))


def test_replicas_draw_noise_by_the_places_before_examples_are_dealt():
    x, _ = batch()
    examples = tf.range(len(LENGTHS))
    dealt_batch = dealt((x, examples), 2, pad_multiple=1)
    start = int(dealt_batch.starts[1])
    _, dealt_examples, _ = dealt_batch.batch
    positions = positions_for_noise(dealt_batch, start)
    np.testing.assert_array_equal(positions, dealt_examples[start:])
    assert start < len(LENGTHS)
    assert not np.array_equal(positions, examples[start:])


def noise_at(positions, length):
    """Return the noise of examples at these positions, padded to a length."""
    layer = layers.GaussianNoise(1.0, seed=1)
    seed = tf.constant([1, 2], tf.int64)

    @tf.function(input_signature=[tf.TensorSpec([None, None, 3])], autograph=False)
    def call(x):
        with noise_by_position([layer], [seed], tf.constant(positions), tf.shape(x)[0]):
            return layer(x, training=True)

    return call(tf.zeros([len(positions), length, 3])).numpy()


def test_each_step_of_an_example_has_values_of_its_own():
    noise = noise_at([3, 0, 2**31 - 1], 5)
    assert len(np.unique(noise)) == noise.size
    # Less padding, and other examples beside it: the same values of its first steps.
    np.testing.assert_array_equal(noise_at([0, 1], 2)[0], noise[1, :2])


def reversed_in_time():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 4, mask_zero=True)(inputs)
    hidden = layers.Dense(4, "tanh")(hidden)
    hidden = layers.Dropout(0.4, seed=1)(hidden[:, ::-1])
    return keras.Model(inputs, layers.Dense(CLASSES)(hidden[:, ::-1]))


@pytest.mark.parametrize(
    "same_noise", [True, pytest.param("auto", marks=pytest.mark.slow)]
)
def test_noise_that_begins_with_the_padding_is_rejected(float64, same_noise):
    with pytest.raises(ValueError, match="noise on inputs whose padding is not at"):
        trained(19, same_noise=same_noise, model=reversed_in_time)


@pytest.mark.slow
def test_noise_that_begins_with_the_padding_would_depend_on_the_cut(float64):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_module, "check_noise", lambda *_: None)
        distance = trained(19, model=reversed_in_time) - trained(
            WHOLE, model=reversed_in_time
        )
    assert np.abs(distance).max() > 1e-4


def attentive():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 4, mask_zero=True)(inputs)
    attention = layers.MultiHeadAttention(2, 4, dropout=0.2, name="attention")
    hidden = attention(hidden, hidden)
    return keras.Model(inputs, layers.Dense(CLASSES)(hidden))


@pytest.mark.slow
def test_noise_over_two_sequence_axes_is_rejected():
    with pytest.raises(
        ValueError, match="some layers can only draw noise per micro-ba"
    ):
        trained(19, model=attentive)
    # Keras draws it.
    assert np.isfinite(trained(19, same_noise="auto", model=attentive)).all()
