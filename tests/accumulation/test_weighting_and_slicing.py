"""The sums over micro-batches against what one large Keras batch gives, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import accumulate_gradients
from tests.accumulation import reference
from tests.accumulation.large_batch import (
    CLASSES,
    EXACT,
    EXAMPLES,
    FEATURES,
    TIME,
    assert_equals_large_batch,
    dense,
    deviation,
    labels,
    large_batch,
    masked,
    one_hot,
    positive,
    random,
    sequence,
    tokens,
)
from tests.accumulation.one_weight import Outputs, one_weight
from tests.parameters import mostly_slow

WEIGHTS = np.linspace(0, 3, EXAMPLES)
TOKEN_WEIGHTS = np.linspace(0, 3, EXAMPLES * TIME).reshape(EXAMPLES, TIME)


class LossCase(NamedTuple):
    """A loss, the activation of the model's outputs, and labels."""

    loss: Callable[[], losses.Loss]
    activation: str | None
    labels: np.ndarray


# Labels: a class, a class as one-hot, a distribution, 1 or −1, numbers.
SPARSE = labels(EXAMPLES)
ONE_HOT = one_hot(EXAMPLES)
POSITIVE = positive(EXAMPLES, CLASSES)
SIGNS = np.sign(random(EXAMPLES, CLASSES))
NUMBERS = random(EXAMPLES, CLASSES)

LOSSES = {
    "sparse": LossCase(
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True), None, SPARSE
    ),
    "sparse_ignored": LossCase(
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2),
        None,
        SPARSE,
    ),
    "sparse_softmax": LossCase(losses.SparseCategoricalCrossentropy, "softmax", SPARSE),
    "binary_sigmoid": LossCase(losses.BinaryCrossentropy, "sigmoid", ONE_HOT),
    "categorical": LossCase(
        lambda: losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        None,
        ONE_HOT,
    ),
    "categorical_focal": LossCase(
        losses.CategoricalFocalCrossentropy, "softmax", ONE_HOT
    ),
    "generalized": LossCase(
        losses.CategoricalGeneralizedCrossEntropy, "softmax", SPARSE
    ),
    "binary": LossCase(
        lambda: losses.BinaryCrossentropy(from_logits=True), None, ONE_HOT
    ),
    "binary_focal": LossCase(losses.BinaryFocalCrossentropy, "sigmoid", ONE_HOT),
    "kl": LossCase(losses.KLDivergence, "softmax", POSITIVE),
    "poisson": LossCase(losses.Poisson, "softplus", POSITIVE),
    "categorical_hinge": LossCase(losses.CategoricalHinge, None, ONE_HOT),
    "hinge": LossCase(losses.Hinge, "tanh", SIGNS),
    "squared_hinge": LossCase(losses.SquaredHinge, "tanh", SIGNS),
    "squared": LossCase(losses.MeanSquaredError, None, NUMBERS),
    "absolute": LossCase(losses.MeanAbsoluteError, None, NUMBERS),
    "percentage": LossCase(losses.MeanAbsolutePercentageError, None, POSITIVE),
    "logarithmic": LossCase(losses.MeanSquaredLogarithmicError, "softplus", POSITIVE),
    "huber": LossCase(losses.Huber, None, NUMBERS),
    "log_cosh": LossCase(losses.LogCosh, None, NUMBERS),
    "cosine": LossCase(losses.CosineSimilarity, None, NUMBERS),
    "dice": LossCase(lambda: losses.Dice(axis=-1), "sigmoid", ONE_HOT),
    "tversky": LossCase(lambda: losses.Tversky(axis=-1), "sigmoid", ONE_HOT),
}


# The same in `accumulation` as another one: an element's value, that Keras averages
# over the last axis.
ALIKE = (
    "binary",
    "binary_sigmoid",
    "binary_focal",
    "categorical",
    "generalized",
    "poisson",
    "categorical_hinge",
    "hinge",
    "huber",
    "dice",
    "absolute",
    "percentage",
    "log_cosh",
    "logarithmic",
    "squared_hinge",
    "tversky",
    "categorical_focal",
)


@pytest.mark.parametrize(
    "name", mostly_slow(LOSSES, [name for name in LOSSES if name not in ALIKE])
)
def test_every_loss_equals_the_large_batch(float64, name):
    case = LOSSES[name]
    batch = (random(EXAMPLES, FEATURES), case.labels)
    model = dense(case.activation)
    assert_equals_large_batch(model, case.loss(), batch, 4)  # 4 + 4 + 3


SEQUENCE_LOSSES = {
    "sparse": LossCase(
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True),
        None,
        labels(EXAMPLES, TIME),
    ),
    "categorical": LossCase(
        lambda: losses.CategoricalCrossentropy(from_logits=True),
        None,
        one_hot(EXAMPLES, TIME),
    ),
    "squared": LossCase(losses.MeanSquaredError, None, random(EXAMPLES, TIME, CLASSES)),
    "cosine": LossCase(losses.CosineSimilarity, None, random(EXAMPLES, TIME, CLASSES)),
    "ctc": LossCase(losses.CTC, None, labels(EXAMPLES, 2) % (CLASSES - 1) + 1),
}


@pytest.mark.parametrize("name", mostly_slow(SEQUENCE_LOSSES, ["sparse"]))
def test_every_sequence_loss_equals_the_large_batch(float64, name):
    case = SEQUENCE_LOSSES[name]
    # Keras computes CTC in single precision: a few roundings of 2⁻²⁴ = 6e-8.
    tolerance = 1e-6 if name == "ctc" else EXACT
    batch = (random(EXAMPLES, TIME, FEATURES), case.labels)
    model = sequence(case.activation)
    assert_equals_large_batch(model, case.loss(), batch, 4, tolerance)


class Weighted(NamedTuple):
    """A model and its batch; without sample weights it is weighted by a mask."""

    model: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    sample_weight: Any


# (batch,) weights of (batch, time) values are no case of Keras, (batch, 1) ones are.
FEATURES_OF_EXAMPLES = random(EXAMPLES, FEATURES)
FEATURES_IN_TIME = random(EXAMPLES, TIME, FEATURES)
LABELS_IN_TIME = labels(EXAMPLES, TIME)
COLUMN = WEIGHTS[:, None]
WEIGHTED = {
    "examples": Weighted(dense, FEATURES_OF_EXAMPLES, SPARSE, WEIGHTS),
    "column": Weighted(dense, FEATURES_OF_EXAMPLES, SPARSE, COLUMN),
    "tokens": Weighted(sequence, FEATURES_IN_TIME, LABELS_IN_TIME, TOKEN_WEIGHTS),
    "token_rows": Weighted(sequence, FEATURES_IN_TIME, LABELS_IN_TIME, COLUMN),
    "mask": Weighted(masked, tokens(), LABELS_IN_TIME, None),
    "mask_tokens": Weighted(masked, tokens(), LABELS_IN_TIME, TOKEN_WEIGHTS),
    "mask_rows": Weighted(masked, tokens(), LABELS_IN_TIME, COLUMN),
}
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")


QUICK = [
    # The only reduction that divides by the weights.
    ("column", "mean_with_sample_weight"),
    ("tokens", "mean_with_sample_weight"),
    ("mask_tokens", "mean_with_sample_weight"),
    ("mask_rows", "mean_with_sample_weight"),
    ("mask", "sum_over_batch_size"),
    ("examples", "sum"),
]


@pytest.mark.parametrize(
    ("weighted", "reduction"),
    mostly_slow(itertools.product(WEIGHTED, REDUCTIONS), QUICK),
)
def test_every_weight_and_reduction_equals_the_large_batch(
    float64, weighted, reduction
):
    model, *batch = WEIGHTED[weighted]
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    assert_equals_large_batch(model(), loss, tuple(batch), 4)


@pytest.mark.parametrize(
    "micro_batch_size", mostly_slow([1, 5, 10, 11, 1000], [5, 1000])
)
def test_every_micro_batch_size_equals_the_large_batch(float64, micro_batch_size):
    loss = losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    batch = (tokens(), labels(EXAMPLES, TIME), TOKEN_WEIGHTS)
    assert_equals_large_batch(masked(), loss, batch, micro_batch_size)


@tf.custom_gradient
def clipped(x):
    return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.01, 0.01)


@pytest.mark.parametrize(
    ("reduction", "micro_batch_size", "regulariser"),
    [
        ("sum_over_batch_size", 4, None),
        ("sum_over_batch_size", 11, None),
        ("mean_with_sample_weight", 4, "l2"),
    ],
)
def test_a_layer_that_clips_its_gradient_sees_that_of_the_mean(
    float64, reduction, micro_batch_size, regulariser
):
    first, last = dense(kernel_regularizer=regulariser).layers
    model = keras.Sequential([first, layers.Lambda(clipped), last])
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    x = random(EXAMPLES, FEATURES)
    y = labels(EXAMPLES)

    # It clips some elements and leaves others.
    with tf.GradientTape() as tape:
        hidden = first(x)
        tape.watch(hidden)
        value = loss(y, last(hidden), WEIGHTS)
    elements = np.abs(tape.gradient(value, hidden))
    assert 0.1 < np.mean(elements > 0.01) < 0.9

    assert_equals_large_batch(model, loss, (x, y, WEIGHTS), micro_batch_size)


class Penalized(layers.Layer):
    """Adds a loss of its inputs, divided by the batch as `add_loss` is meant to be."""

    def call(self, x):
        self.add_loss(0.3 * tf.reduce_mean(tf.square(x)))
        return x


@pytest.mark.parametrize(
    "reduction",
    mostly_slow(REDUCTIONS, ["mean_with_sample_weight"]),
)
def test_what_the_model_adds_counts_once(float64, reduction):
    hidden = layers.Dense(
        7,
        "tanh",
        kernel_regularizer=keras.regularizers.L2(0.1),
        activity_regularizer="l2",
    )
    output = layers.Dense(CLASSES, bias_regularizer=keras.regularizers.L1(0.2))
    model = keras.Sequential([keras.Input((FEATURES,)), hidden, Penalized(), output])
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    batch = (random(EXAMPLES, FEATURES), labels(EXAMPLES), WEIGHTS)
    assert_equals_large_batch(model, loss, batch, 4)


class PerExample(layers.Layer):
    """Adds a loss for each example, which Keras sums over the batch."""

    def call(self, x):
        self.add_loss(0.3 * tf.reduce_sum(tf.square(x), -1))
        return x


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    mostly_slow([("float64", EXACT), ("mixed_bfloat16", 2e-2)], [("float64", EXACT)]),
)
def test_what_the_model_adds_is_what_keras_adds(precision, policy, tolerance):
    precision(policy)
    # With mixed_bfloat16 these have two dtypes.
    hidden = layers.Dense(
        7,
        "tanh",
        kernel_regularizer=keras.regularizers.L2(0.1),
        activity_regularizer="l2",
    )
    output = layers.Dense(CLASSES, dtype="float64")
    model = keras.Sequential([keras.Input((FEATURES,)), hidden, PerExample(), output])
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    x = random(EXAMPLES, FEATURES)
    y = labels(EXAMPLES)
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        added = sum(tf.reduce_sum(tf.cast(value, tf.float64)) for value in model.losses)
        value = tf.cast(loss(y, outputs), tf.float64) + added
    expected = reference.gradients_of(tape, value, model)
    if policy == "float64":  # Keras adds two dtypes in `fit` alone
        model.compile(loss=loss)
        of_keras = float(model.compute_loss(x, y, outputs))
        assert float(value) == pytest.approx(of_keras, rel=tolerance)

    sums = accumulate_gradients(model, loss, (x, y), 4)
    assert float(sums.mean_loss()) == pytest.approx(float(value), rel=tolerance)
    gradients = [tf.cast(gradient, tf.float64) for gradient in sums.gradients()]
    assert deviation(gradients, expected) < tolerance


class BagOfTokens(keras.Model):
    """Ragged tokens → the mean of their embeddings → one output.

    Two of its layers are never used.
    """

    def __init__(self):
        super().__init__()
        self.unused = layers.Dense(2)
        self.embedding = layers.Embedding(9, 3)
        self.head = layers.Dense(1)
        self.unused.build((None, 3))
        self.last = layers.Dense(2)
        self.last.build((None, 3))

    def call(self, ragged):
        embedded = tf.gather(self.embedding.embeddings.value, ragged.flat_values)
        return self.head(tf.math.segment_mean(embedded, ragged.value_rowids()))

    def build(self, shape):
        self.embedding.build(None)
        self.head.build((None, 3))


def test_ragged_inputs_and_unused_variables_equal_the_large_batch(float64):
    rows = [[1 + i % 8] * (1 + i % 3) + [2] for i in range(EXAMPLES)]
    batch = (tf.ragged.constant(rows), random(EXAMPLES, 1))
    model = BagOfTokens()
    model.build(None)
    gradients = assert_equals_large_batch(model, losses.MeanSquaredError(), batch, 4)

    without_gradient = []
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        if gradient is None:
            without_gradient.append(variable.path)
    unused = [*model.unused.variables, *model.last.variables]
    assert set(without_gradient) == {variable.path for variable in unused}


class RaggedSquares(losses.Loss):
    def call(self, y_true, y_pred):
        return tf.ragged.map_flat_values(tf.square, y_pred - y_true)


class Scale(keras.Model):
    """Multiplies its inputs by a scalar that begins at 1."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.scale.value


def test_ragged_labels_are_averaged_over_their_elements(float64):
    x = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0]], dtype=tf.float64)
    sums = accumulate_gradients(Scale(), RaggedSquares(), (x, tf.zeros_like(x)), 2)
    # (1 + 4 + 9 + 16) / 4 elements, and its gradient by the scale: twice that.
    assert float(sums.mean_loss()) == 7.5
    assert [float(gradient) for gradient in sums.gradients()] == [15.0]


# y = w·x from w = 0, on x = y = 1 … 5: ∂/∂w mean (w·x - y)² = -2 · mean x² = -2 · 55/5.
LINE = np.arange(1.0, 6.0)[:, None]
SLOPE_OF_LINE = -22.0


def test_a_literal_to_check_by_hand(float64):
    loss = losses.MeanSquaredError()
    sums = accumulate_gradients(one_weight(), loss, (LINE, LINE), 2)
    ((total, _, weight),) = sums.losses.values()
    assert float(total) == 55
    assert float(weight) == 5
    assert float(sums.mean_loss()) == 11
    assert np.asarray(sums.gradients()).tolist() == [[[SLOPE_OF_LINE]]]


@pytest.mark.parametrize("make", [dense, masked])
def test_weights_that_cancel_give_no_gradient(float64, make):
    """As in Keras: advantages may be of both signs, and sum to 0.

    With the mask of a model, the sum is known after the forward pass only.
    """
    loss = losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    if make is dense:
        batch = (random(4, FEATURES), labels(4), np.array([1.0, 1.0, -1.0, -1.0]))
    else:
        signs = np.tile([[1.0], [-1.0]], (2, TIME))
        batch = (np.ones((4, TIME), int), labels(4, TIME), signs)
    model = make()
    assert float(loss(batch[1], model(batch[0]), batch[2])) == 0

    sums = accumulate_gradients(model, loss, batch, 3)
    assert float(sums.mean_loss()) == 0
    for gradient in sums.gradients():
        assert not np.any(tf.convert_to_tensor(gradient))


def test_the_mean_of_micro_batch_means_is_another_gradient(float64):
    model = one_weight()
    means = []
    for start in (0, 2, 4):
        part = LINE[start : start + 2]
        _, (mean,) = large_batch(model, losses.MeanSquaredError(), (part, part))
        means.append(float(mean[0, 0]))
    wrong = sum(means) / 3  # (-5 - 25 - 50) / 3 = -26.7 in place of -22
    assert abs(wrong / SLOPE_OF_LINE - 1) > 1000 * EXACT

    # The same by the large model, where the micro-batches differ by their masks alone:
    # 5 + 5 of 10 examples.
    model = masked()
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    x = tokens()[:10]
    y = labels(10, TIME)

    def gradients_of(part):
        _, gradients = large_batch(model, loss, (x[part], y[part]))
        return reference.dense(gradients)

    halves = zip(gradients_of(slice(0, 5)), gradients_of(slice(5, 10)), strict=True)
    wrong = [(first + second) / 2 for first, second in halves]
    assert deviation(wrong, gradients_of(slice(0, 10))) > 1000 * EXACT


def test_every_micro_batch_drops_out_others(float64):
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dropout(0.5), layers.Dense(1, use_bias=False)]
    )
    ones = tf.ones((8, 64))
    (gradient,) = accumulate_gradients(model, Outputs(), (ones, ones), 1).gradients()
    # The mean over the examples of masks of 0 and 2: one mask for all of them would
    # leave only 0 and 2.
    assert len(set(np.asarray(gradient).ravel())) > 2
