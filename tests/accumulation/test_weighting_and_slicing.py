"""The update against what one large Keras batch gives, in double precision; and what one update must keep to."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import Update, accumulate_gradients
from pipeline.accumulation.internals import Objective
from tests.parameters import mostly_slow

# Two orders of the same sum of n doubles differ by up to n · 2⁻⁵³ of Σ|terms|: 1e-13 for the n < 1000 here. The
# terms cancel in part, so the result is smaller than Σ|terms|; ten times for that.
EXACT = 1e-12

EXAMPLES, FEATURES, CLASSES, TIME = 11, 5, 4, 6


def deviation(got, expected) -> float:
    """The largest difference over all the arrays, relative to the largest entry of the expected ones."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(got, expected, strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(np.abs(a - b).max() for a, b in pairs) / max(
        np.abs(b).max() for _, b in pairs
    )


def large_batch(model, loss, batch):
    """The loss and the gradients of one Keras call on all of `batch`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True), sample_weight) + sum(model.losses)
    return value, tape.gradient(
        value, [variable.value for variable in model.trainable_variables]
    )


def assert_equals_large_batch(model, loss, batch, micro_batch_size, tolerance=EXACT):
    """Returns the gradients."""
    sums = accumulate_gradients(model, loss, batch, micro_batch_size)
    value, expected = large_batch(model, loss, batch)
    gradients = sums.gradients()
    assert [gradient is None for gradient in gradients] == [
        gradient is None for gradient in expected
    ]
    assert deviation([sums.mean_loss()], [value]) < tolerance
    expected = [
        tf.convert_to_tensor(gradient) for gradient in expected if gradient is not None
    ]
    assert (
        max(np.abs(gradient).max() for gradient in expected) > 1e-4
    )  # a gradient of nothing would equal anything
    found = [
        tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None
    ]
    assert deviation(found, expected) < tolerance
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
    return keras.Sequential(
        [keras.Input((FEATURES,)), hidden, layers.Dense(units, activation, **arguments)]
    )


def sequence(activation=None, units=CLASSES):
    hidden = layers.Dense(7, activation="tanh")
    return keras.Sequential(
        [keras.Input((TIME, FEATURES)), hidden, layers.Dense(units, activation)]
    )


def masked(units=CLASSES):
    """Tokens → (batch, time, units), with the mask of the tokens that are not 0."""
    hidden = layers.Dense(5, "tanh")
    return keras.Sequential(
        [
            keras.Input((TIME,)),
            layers.Embedding(9, 3, mask_zero=True),
            hidden,
            layers.Dense(units),
        ]
    )


def tokens():
    """(batch, time) with 0 to 5 of the last tokens masked: every micro-batch has another count."""
    values = np.random.default_rng(2).integers(1, 9, size=(EXAMPLES, TIME))
    return np.where(
        np.arange(TIME) < TIME - np.arange(EXAMPLES)[:, None] % TIME, values, 0
    )


WEIGHTS = np.linspace(0, 3, EXAMPLES)
TOKEN_WEIGHTS = np.linspace(0, 3, EXAMPLES * TIME).reshape(EXAMPLES, TIME)
SIGNS = np.sign(random(EXAMPLES, CLASSES))

LOSSES = {
    "sparse": (
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True),
        None,
        labels(EXAMPLES),
    ),
    "sparse_ignored": (
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2),
        None,
        labels(EXAMPLES),
    ),
    "sparse_softmax": (
        losses.SparseCategoricalCrossentropy,
        "softmax",
        labels(EXAMPLES),
    ),
    "binary_sigmoid": (losses.BinaryCrossentropy, "sigmoid", one_hot(EXAMPLES)),
    "categorical": (
        lambda: losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        None,
        one_hot(EXAMPLES),
    ),
    "categorical_focal": (
        losses.CategoricalFocalCrossentropy,
        "softmax",
        one_hot(EXAMPLES),
    ),
    "generalized": (
        losses.CategoricalGeneralizedCrossEntropy,
        "softmax",
        labels(EXAMPLES),
    ),
    "binary": (
        lambda: losses.BinaryCrossentropy(from_logits=True),
        None,
        one_hot(EXAMPLES),
    ),
    "binary_focal": (losses.BinaryFocalCrossentropy, "sigmoid", one_hot(EXAMPLES)),
    "kl": (losses.KLDivergence, "softmax", positive(EXAMPLES, CLASSES)),
    "poisson": (losses.Poisson, "softplus", positive(EXAMPLES, CLASSES)),
    "categorical_hinge": (losses.CategoricalHinge, None, one_hot(EXAMPLES)),
    "hinge": (losses.Hinge, "tanh", SIGNS),
    "squared_hinge": (losses.SquaredHinge, "tanh", SIGNS),
    "squared": (losses.MeanSquaredError, None, random(EXAMPLES, CLASSES)),
    "absolute": (losses.MeanAbsoluteError, None, random(EXAMPLES, CLASSES)),
    "percentage": (
        losses.MeanAbsolutePercentageError,
        None,
        positive(EXAMPLES, CLASSES),
    ),
    "logarithmic": (
        losses.MeanSquaredLogarithmicError,
        "softplus",
        positive(EXAMPLES, CLASSES),
    ),
    "huber": (losses.Huber, None, random(EXAMPLES, CLASSES)),
    "log_cosh": (losses.LogCosh, None, random(EXAMPLES, CLASSES)),
    "cosine": (losses.CosineSimilarity, None, random(EXAMPLES, CLASSES)),
    "dice": (lambda: losses.Dice(axis=-1), "sigmoid", one_hot(EXAMPLES)),
    "tversky": (lambda: losses.Tversky(axis=-1), "sigmoid", one_hot(EXAMPLES)),
}


# The same in `accumulation` as another one: an element's value, that Keras averages over the last axis.
ALIKE = (
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
    make, activation, y = LOSSES[name]
    assert_equals_large_batch(
        dense(activation), make(), (random(EXAMPLES, FEATURES), y), 4
    )  # 4 + 4 + 3


SEQUENCE_LOSSES = {
    "sparse": (
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True),
        labels(EXAMPLES, TIME),
    ),
    "categorical": (
        lambda: losses.CategoricalCrossentropy(from_logits=True),
        one_hot(EXAMPLES, TIME),
    ),
    "squared": (losses.MeanSquaredError, random(EXAMPLES, TIME, CLASSES)),
    "cosine": (losses.CosineSimilarity, random(EXAMPLES, TIME, CLASSES)),
    "ctc": (losses.CTC, labels(EXAMPLES, 2) % (CLASSES - 1) + 1),
}


@pytest.mark.parametrize("name", mostly_slow(SEQUENCE_LOSSES, ["sparse", "cosine"]))
def test_every_sequence_loss_equals_the_large_batch(float64, name):
    make, y = SEQUENCE_LOSSES[name]
    # Keras computes CTC in single precision: a few roundings of 2⁻²⁴ = 6e-8.
    tolerance = 1e-6 if name == "ctc" else EXACT
    assert_equals_large_batch(
        sequence(), make(), (random(EXAMPLES, TIME, FEATURES), y), 4, tolerance
    )


# What is weighted, per reduction: model, x, y, sample weight. (batch,) weights of (batch, time) values are no case
# of Keras, (batch, 1) ones are.
WEIGHTED = {
    "examples": (dense, random(EXAMPLES, FEATURES), labels(EXAMPLES), WEIGHTS),
    "column": (dense, random(EXAMPLES, FEATURES), labels(EXAMPLES), WEIGHTS[:, None]),
    "tokens": (
        sequence,
        random(EXAMPLES, TIME, FEATURES),
        labels(EXAMPLES, TIME),
        TOKEN_WEIGHTS,
    ),
    "token_rows": (
        sequence,
        random(EXAMPLES, TIME, FEATURES),
        labels(EXAMPLES, TIME),
        WEIGHTS[:, None],
    ),
    "mask": (masked, tokens(), labels(EXAMPLES, TIME), None),
    "mask_tokens": (masked, tokens(), labels(EXAMPLES, TIME), TOKEN_WEIGHTS),
    "mask_rows": (masked, tokens(), labels(EXAMPLES, TIME), WEIGHTS[:, None]),
}
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")


QUICK = [
    *(
        (weighted, "mean_with_sample_weight") for weighted in WEIGHTED
    ),  # the only one that divides by the weights
    *(
        ("tokens", "sum_over_batch_size"),
        ("mask", "sum_over_batch_size"),
        ("mask_tokens", "mean"),
        ("examples", "sum"),
    ),
]


@pytest.mark.parametrize(
    ("weighted", "reduction"),
    mostly_slow(itertools.product(WEIGHTED, REDUCTIONS), QUICK),
)
def test_every_weight_and_reduction_equals_the_large_batch(
    float64, weighted, reduction
):
    make, x, y, sample_weight = WEIGHTED[weighted]
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    assert_equals_large_batch(make(), loss, (x, y, sample_weight), 4)


@pytest.mark.parametrize("micro_batch_size", [1, 5, 10, 11, 1000])
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
    model = dense(kernel_regularizer=regulariser)
    model = keras.Sequential(
        [*model.layers[:1], layers.Lambda(clipped), *model.layers[1:]]
    )
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    batch = (random(EXAMPLES, FEATURES), labels(EXAMPLES), WEIGHTS)
    with tf.GradientTape() as tape:
        tape.watch(hidden := model.layers[0](batch[0]))
        value = loss(batch[1], model.layers[2](hidden), batch[2])
    assert 0.1 < np.mean(np.abs(tape.gradient(value, hidden)) > 0.01) < 0.9
    assert_equals_large_batch(model, loss, batch, micro_batch_size)


def softened(y_true, y_pred):
    return tf.reduce_mean(tf.math.softplus(y_pred - y_true), -1)


@pytest.mark.parametrize("loss", ["mse", "crossentropy", softened, keras.losses.huber])
def test_a_loss_is_given_as_compile_takes_it(float64, loss):
    model, (x, y) = dense(), (random(EXAMPLES, FEATURES), one_hot(EXAMPLES))
    model.add(layers.Softmax())
    model.compile(loss=loss)
    with tf.GradientTape() as tape:
        value = model.compute_loss(x, y, model(x))
    expected = tape.gradient(
        value, [variable.value for variable in model.trainable_variables]
    )
    sums = accumulate_gradients(model, loss, (x, y), 4)
    assert float(sums.mean_loss()) == pytest.approx(float(value), rel=EXACT)
    assert deviation(sums.gradients(), expected) < EXACT


@pytest.mark.parametrize("weighted", [False, True])
def test_any_function_of_a_micro_batch(float64, weighted):
    """A penalty of a critic's slope, by its weights alone; or the mean over those tokens that count."""
    critic, x, y = dense(units=1), random(EXAMPLES, FEATURES), random(EXAMPLES, 1)

    def loss(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = critic(x)
        slope = tf.reduce_sum(tape.gradient(found, x) ** 2, -1)
        counting = tf.cast(y[:, 0] > 0, slope.dtype)
        total = tf.reduce_sum(counting * slope)
        return (
            (total / tf.reduce_sum(counting), tf.reduce_sum(counting))
            if weighted
            else tf.reduce_mean(slope + y**2)
        )

    variables = critic.trainable_variables[:2]
    with tf.GradientTape() as tape:
        made = loss(tf.constant(x), tf.constant(y))
        value = made[0] if weighted else made
    expected = tape.gradient(value, [variable.value for variable in variables])
    sums = accumulate_gradients(None, loss, (x, y), 4, variables=variables)
    assert float(sums.mean_loss()) == pytest.approx(float(value), rel=EXACT)
    assert deviation(sums.gradients(), expected) < EXACT


class Penalised(layers.Layer):
    """Adds a loss of its inputs, normalised by the batch as `add_loss` is meant to be used."""

    def call(self, x):
        self.add_loss(0.3 * tf.reduce_mean(tf.square(x)))
        return x


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_the_model_adds_counts_once(float64, reduction):
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(
                7,
                "tanh",
                kernel_regularizer=keras.regularizers.L2(0.1),
                activity_regularizer="l2",
            ),
            Penalised(),
            layers.Dense(CLASSES, bias_regularizer=keras.regularizers.L1(0.2)),
        ]
    )
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    assert_equals_large_batch(
        model, loss, (random(EXAMPLES, FEATURES), labels(EXAMPLES), WEIGHTS), 4
    )


class PerExample(layers.Layer):
    """Adds a loss for each example, which Keras sums over the batch."""

    def call(self, x):
        self.add_loss(0.3 * tf.reduce_sum(tf.square(x), -1))
        return x


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("float64", EXACT), ("mixed_bfloat16", 2e-2)]
)
def test_what_the_model_adds_is_what_keras_adds(precision, policy, tolerance):
    precision(policy)
    penalties = {
        "kernel_regularizer": keras.regularizers.L2(0.1),
        "activity_regularizer": "l2",
    }  # of two dtypes
    hidden = layers.Dense(7, "tanh", **penalties)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            hidden,
            PerExample(),
            layers.Dense(CLASSES, dtype="float64"),
        ]
    )
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = random(EXAMPLES, FEATURES), labels(EXAMPLES)
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        added = sum(tf.reduce_sum(tf.cast(value, tf.float64)) for value in model.losses)
        value = tf.cast(loss(y, outputs), tf.float64) + added
    if policy == "float64":  # Keras adds up no two dtypes outside of `fit`
        model.compile(loss=loss)
        assert float(value) == pytest.approx(
            float(model.compute_loss(x, y, outputs)), rel=tolerance
        )
    expected = tape.gradient(
        value, [variable.value for variable in model.trainable_variables]
    )
    sums = accumulate_gradients(model, loss, (x, y), 4)
    assert float(sums.mean_loss()) == pytest.approx(float(value), rel=tolerance)
    assert (
        deviation(
            [tf.cast(gradient, tf.float64) for gradient in sums.gradients()], expected
        )
        < tolerance
    )


class BagOfTokens(keras.Model):
    """Ragged tokens → the mean of their embeddings → one output; one of its layers is never used."""

    def __init__(self):
        super().__init__()
        self.unused, self.embedding, self.head = (
            layers.Dense(2),
            layers.Embedding(9, 3),
            layers.Dense(1),
        )
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
    x = tf.ragged.constant([[1 + i % 8] * (1 + i % 3) + [2] for i in range(EXAMPLES)])
    model = BagOfTokens()
    model.build(None)
    gradients = assert_equals_large_batch(
        model, losses.MeanSquaredError(), (x, random(EXAMPLES, 1)), 4
    )
    unused = [
        variable.path
        for layer in (model.unused, model.last)
        for variable in layer.variables
    ]
    names = [variable.path for variable in model.trainable_variables]
    assert {
        name
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is None
    } == set(unused)


class RaggedSquares(losses.Loss):
    def call(self, y_true, y_pred):
        return tf.ragged.map_flat_values(tf.square, y_pred - y_true)


def test_ragged_labels_are_averaged_over_their_elements(float64):
    class Scale(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return x * self.scale.value

    x = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0]], dtype=tf.float64)
    sums = accumulate_gradients(Scale(), RaggedSquares(), (x, tf.zeros_like(x)), 2)
    # (1 + 4 + 9 + 16) / 4 elements, and its gradient by the scale: twice that.
    assert float(sums.mean_loss()) == 7.5
    assert [float(gradient) for gradient in sums.gradients()] == [15.0]


def line():
    """y = w·x from w = 0, on x = y = 1 … 5: ∂/∂w mean (w·x - y)² = -2 · mean x² = -2 · 55/5."""
    model = keras.Sequential(
        [keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    x = np.arange(1.0, 6.0)[:, None]
    return model, losses.MeanSquaredError(), (x, x)


def test_a_literal_to_check_by_hand(float64):
    model, loss, batch = line()
    sums = accumulate_gradients(model, loss, batch, 2)
    ((total, _, weight),) = sums.losses.values()
    assert (float(total), float(weight), float(sums.mean_loss())) == (55, 5, 11)
    assert np.asarray(sums.gradients()).tolist() == [[[-22.0]]]


def test_the_mean_of_micro_batch_means_is_another_gradient(float64):
    model, loss, (x, y) = line()
    means = [
        large_batch(model, loss, (x[i : i + 2], y[i : i + 2]))[1][0] for i in (0, 2, 4)
    ]
    wrong = float(sum(means)[0, 0]) / 3  # (-5 - 25 - 50) / 3 = -26.7 in place of -22
    assert abs(wrong / -22 - 1) > 1000 * EXACT
    # The same by the large model, where the micro-batches differ by their masks alone: 5 + 5 of 10 examples.
    model, loss = masked(), losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = tokens()[:10], labels(10, TIME)
    halves = [large_batch(model, loss, (x[i : i + 5], y[i : i + 5]))[1] for i in (0, 5)]
    wrong = [
        (tf.convert_to_tensor(a) + tf.convert_to_tensor(b)) / 2
        for a, b in zip(*halves, strict=True)
    ]
    expected = [
        tf.convert_to_tensor(gradient)
        for gradient in large_batch(model, loss, (x, y))[1]
    ]
    assert deviation(wrong, expected) > 1000 * EXACT


def test_every_micro_batch_drops_out_others(float64):
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dropout(0.5), layers.Dense(1, use_bias=False)]
    )
    ones = tf.ones((8, 64))
    (gradient,) = accumulate_gradients(model, Outputs(), (ones, ones), 1).gradients()
    # The mean over the examples of masks of 0 and 2: one mask for all of them would leave only 0 and 2.
    assert len(set(np.asarray(gradient).ravel())) > 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loss_of_half_precision_is_counted_in_float32(precision, dtype):
    """8192 ones: a sum in bfloat16 stops at 256, one in float16 at 2048."""
    precision("float32")
    model = keras.Sequential(
        [keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    ones = tf.ones((8192, 1))
    sums = accumulate_gradients(
        model, losses.MeanSquaredError(dtype=dtype), (ones, ones), 1000
    )
    ((total, _, weight),) = sums.losses.values()
    assert [float(value) for value in (total, weight, sums.examples)] == [
        8192,
        8192,
        8192,
    ]
    assert float(sums.mean_loss()) == 1
    assert float(sums.gradients()[0][0, 0]) == -2


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_sums_are_float32(precision, policy):
    precision(policy)
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False)])
    ones = tf.ones((512, 1))
    sums = accumulate_gradients(model, Outputs(), (ones, ones), 1)
    # A sum of ones in bfloat16, of 8 bits, stays at 256: the mean would be 256/512.
    assert {value.dtype for value in tf.nest.flatten(sums)} == {tf.float32}
    assert np.asarray(sums.gradients()).tolist() == [[[1.0]]]


class Outputs(losses.Loss):
    """The outputs themselves: its gradient is the mean input, whatever the weights."""

    def call(self, y_true, y_pred):
        return y_pred[:, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1. Received: 0"),
        ({"loss": losses.MeanSquaredError(reduction=None)}, "must have a reduction"),
        ({"loss": losses.Dice()}, "must give one value per example"),
        ({"batch": (np.ones((3, 1)), None, np.ones(3))}, "there must be labels for"),
        (
            {"batch": lambda: (tf.sparse.from_dense(np.eye(3)), np.ones((3, 1)))},
            "must be of dense or ragged tensors",
        ),
        ({"model": None}, "without a model there must be variables"),
        (
            {"model": None, "loss": lambda x, y: x - y, "variables": []},
            "loss must return a scalar",
        ),
    ],
)
def test_what_cannot_be_accumulated_is_refused(change, message):
    model, loss, batch = line()
    change = {
        name: value() if name == "batch" and callable(value) else value
        for name, value in change.items()
    }
    with pytest.raises(ValueError) as refused:
        accumulate_gradients(
            **(
                {"model": model, "loss": loss, "batch": batch, "micro_batch_size": 2}
                | change
            )
        )
    assert message in str(refused.value)


class Keeping(keras.losses.MeanSquaredError):
    """Keeps its values, which a metric may read, and takes no batch of a known size."""

    def call(self, y_true, y_pred):
        assert y_true.shape[0] is None
        self.values = super().call(y_true, y_pred)
        return self.values


def test_a_loss_may_keep_a_tensor_of_its_call(float64):
    loss = Keeping()

    class Kept(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            return super().update_state(loss.values)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    update = Update(model, Objective(loss, metrics=[Kept(name="kept")]), optimizer, 2)
    results = tf.function(update, autograph=False)((np.ones((5, 3)), np.ones((5, 2))))
    assert float(results["kept"]) == pytest.approx(float(results["loss"]), rel=1e-12)
