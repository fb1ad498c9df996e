"""Sequences of unequal length, models that mask their padding, and whole batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses

# No order: lengths repeat, and the longest example stands in the middle.
LENGTHS = (4, 9, 1, 3, 7, 2, 2, 8, 5, 1, 4)
VOCABULARY = 7
CLASSES = 3


class Case(NamedTuple):
    """What is trained on sequences.

    Attributes:
        model: makes the model, whose sequences have any length.
        batch: `(x, y, sample_weight)`, with ragged sequences.
        loss: the loss, or the losses by output.
    """

    model: Callable[[], keras.Model]
    batch: tuple
    loss: Any


def tokens(numbers, lengths, low=1, high=VOCABULARY):
    """Return ragged integers from `low` up to, but not including, `high`."""
    values = numbers.integers(low, high, sum(lengths))
    return tf.RaggedTensor.from_row_lengths(values, lengths)


def cross_entropy(reduction="mean_with_sample_weight"):
    return losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def attention():
    """Attention under a padding mask, then one row an example."""
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 4, mask_zero=True)(inputs)
    hidden = layers.MultiHeadAttention(2, 4)(hidden, hidden)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    outputs = layers.Dense(CLASSES, kernel_regularizer="l2")(hidden)
    return keras.Model(inputs, outputs)


def recurrent(mask_zero=True):
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 4, mask_zero=mask_zero)(inputs)
    hidden = layers.LSTM(5, return_sequences=True)(hidden)
    return keras.Model(inputs, layers.Dense(CLASSES)(hidden))


def causal():
    """A position sees those before it, so that padding at the end needs no mask."""
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 4)(inputs)
    hidden = layers.Conv1D(5, 3, padding="causal", activation="tanh")(hidden)
    return keras.Model(inputs, layers.Dense(CLASSES)(hidden))


def translator():
    """Sources give a state, from which targets of other lengths go on."""
    source = keras.Input((None,), dtype="int64", name="source")
    target = keras.Input((None,), dtype="int64", name="target")
    embedding = layers.Embedding(VOCABULARY, 4, mask_zero=True)
    state = layers.GRU(5)(embedding(source))
    hidden = layers.GRU(5, return_sequences=True)(
        embedding(target), initial_state=state
    )
    outputs = layers.Dense(CLASSES)(hidden)
    return keras.Model({"source": source, "target": target}, outputs)


def two_outputs():
    """One output for each position, and one an example."""
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(VOCABULARY, 4, mask_zero=True)(inputs)
    hidden = layers.Dense(5, "tanh")(hidden)
    tag = layers.Dense(CLASSES)(hidden)
    topic = layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(inputs, {"tag": tag, "topic": topic})


def cases() -> dict[str, Case]:
    numbers = np.random.default_rng(0)
    lengths = list(LENGTHS)
    count = len(lengths)
    x = tokens(numbers, lengths)
    tags = tokens(numbers, lengths, 0, CLASSES)
    topics = tf.constant(numbers.integers(0, CLASSES, count))
    target = tokens(numbers, lengths[::-1])
    target_tags = tokens(numbers, lengths[::-1], 0, CLASSES)
    weights = tf.constant(numbers.uniform(0.2, 3, count))
    weights_of_tags = tf.RaggedTensor.from_row_lengths(
        numbers.uniform(0, 3, sum(lengths)), lengths
    )
    two_losses = {"tag": cross_entropy(), "topic": cross_entropy("sum_over_batch_size")}
    two_labels = {"tag": tags, "topic": topics}
    summed = cross_entropy("sum")
    return {
        "attention": Case(
            attention, (x, topics, weights), cross_entropy("sum_over_batch_size")
        ),
        "LSTM": Case(recurrent, (x, tags, weights_of_tags), cross_entropy()),
        "masked": Case(recurrent, (x, tags), cross_entropy("sum_over_batch_size")),
        "causal": Case(causal, (x, tags, weights), cross_entropy()),
        "sum": Case(lambda: recurrent(mask_zero=False), (x, tags), summed),
        "two sequences": Case(
            translator,
            ({"source": x, "target": target}, target_tags, weights),
            cross_entropy(),
        ),
        "two outputs": Case(two_outputs, (x, two_labels, weights), two_losses),
    }


def build(case: Case) -> keras.Model:
    """Return the model, with the same weights each time."""
    keras.utils.set_random_seed(0)
    return case.model()


def dense(batch: tuple) -> tuple:
    """Return the whole batch, padded, with weights of positions; by NumPy."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    labels = tf.nest.flatten(y)
    weights = [_weights(leaf, sample_weight) for leaf in labels]
    parts = (x, y, tf.nest.pack_sequence_as(y, weights))
    return tf.nest.map_structure(_padded, parts)


def _weights(labels, sample_weight):
    if isinstance(sample_weight, tf.RaggedTensor):
        return sample_weight
    if sample_weight is None:
        sample_weight = np.ones(labels.shape[0])
    if not isinstance(labels, tf.RaggedTensor):
        return sample_weight
    lengths = labels.row_lengths().numpy()
    weights = np.repeat(np.asarray(sample_weight), lengths)
    return tf.RaggedTensor.from_row_lengths(weights, lengths)


def _padded(leaf):
    return leaf.to_tensor() if isinstance(leaf, tf.RaggedTensor) else leaf


def loss_of(model: keras.Model, loss: Any, batch: tuple) -> tf.Tensor:
    """Return the loss that Keras computes for a padded batch."""
    x, y, weights = batch
    outputs = model(x, training=True)
    if isinstance(loss, dict):
        total = sum(loss[name](y[name], outputs[name], weights[name]) for name in loss)
    else:
        total = loss(y, outputs, weights)
    return total + sum(model.losses)


class Whole(NamedTuple):
    """The loss and the gradient of a whole padded batch."""

    loss: float
    gradient: list[np.ndarray]


def whole(model: keras.Model, loss: Any, batch: tuple) -> Whole:
    variables = [variable.value for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        value = loss_of(model, loss, batch)
    gradients = tape.gradient(value, variables)
    arrays = [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]
    return Whole(float(value), arrays)


def difference(sums, expected: Whole) -> float:
    """Return the largest difference of loss and gradient, relative to the largest."""
    differences = [abs(float(sums.mean_loss()) - expected.loss) / abs(expected.loss)]
    largest = max(np.abs(gradient).max() for gradient in expected.gradient)
    for value, gradient in zip(sums.gradients(), expected.gradient, strict=True):
        value = tf.convert_to_tensor(value).numpy()
        differences.append(np.abs(value - gradient).max() / largest)
    return max(differences)
