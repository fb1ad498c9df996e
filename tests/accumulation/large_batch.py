"""Small models and batches, and what one Keras call on a large batch gives for them."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from pipeline.accumulation import accumulate_gradients
from tests.accumulation import reference

# Two orders of the same sum of n doubles differ by up to n · 2⁻⁵³ of Σ|terms|: 1e-13
# for the n < 1000 here. The terms cancel in part, so the result is smaller than
# Σ|terms|; ten times for that.
EXACT = 1e-12

EXAMPLES = 11
FEATURES = 5
CLASSES = 4
TIME = 6


def deviation(values, expected_values) -> float:
    """Return the largest difference ÷ the largest expected entry, over all arrays."""
    differences = []
    sizes = []
    for value, expected in zip(values, expected_values, strict=True):
        value = np.asarray(value)
        expected = np.asarray(expected)
        assert value.shape == expected.shape
        differences.append(np.abs(value - expected).max())
        sizes.append(np.abs(expected).max())
    return max(differences) / max(sizes)


def large_batch(model, loss, batch):
    """Return the loss and the gradients of one Keras call on all of `batch`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True), sample_weight) + sum(model.losses)
    return value, reference.gradients_of(tape, value, model)


def assert_equals_large_batch(model, loss, batch, micro_batch_size, tolerance=EXACT):
    """Check that sums over micro-batches are the large batch's; return the gradients.

    The loss and all gradients are compared, relative to the largest one.
    """
    sums = accumulate_gradients(model, loss, batch, micro_batch_size)
    gradients = sums.gradients()
    value, expected_gradients = large_batch(model, loss, batch)
    assert deviation([sums.mean_loss()], [value]) < tolerance

    ours = []
    theirs = []
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert (gradient is None) == (expected is None)
        if gradient is not None:
            ours.append(tf.convert_to_tensor(gradient))
            theirs.append(tf.convert_to_tensor(expected))
    # A gradient of nothing would equal anything.
    assert max(np.abs(expected).max() for expected in theirs) > 1e-4
    assert deviation(ours, theirs) < tolerance
    return gradients


def random(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


def labels(*shape):
    return np.random.default_rng(1).integers(0, CLASSES, size=shape)


def one_hot(*shape):
    return np.eye(CLASSES)[labels(*shape)]


def positive(*shape):
    values = np.abs(random(*shape)) + 0.1
    return values / values.sum(-1, keepdims=True)


def dense(activation=None, units=CLASSES, **arguments):
    hidden = layers.Dense(7, activation="tanh")
    output = layers.Dense(units, activation, **arguments)
    return keras.Sequential([keras.Input((FEATURES,)), hidden, output])


def sequence(activation=None, units=CLASSES):
    hidden = layers.Dense(7, activation="tanh")
    output = layers.Dense(units, activation)
    return keras.Sequential([keras.Input((TIME, FEATURES)), hidden, output])


def masked(units=CLASSES):
    """Return tokens → (batch, time, units), with the mask of tokens that are not 0."""
    hidden = layers.Dense(5, "tanh")
    embedding = layers.Embedding(9, 3, mask_zero=True)
    return keras.Sequential(
        [keras.Input((TIME,)), embedding, hidden, layers.Dense(units)]
    )


def tokens():
    """Return (batch, time), with 0 to 5 of the last tokens masked.

    Every micro-batch has another number of them.
    """
    values = np.random.default_rng(2).integers(1, 9, size=(EXAMPLES, TIME))
    lengths = TIME - np.arange(EXAMPLES)[:, None] % TIME
    return np.where(np.arange(TIME) < lengths, values, 0)
