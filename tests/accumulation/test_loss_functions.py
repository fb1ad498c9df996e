"""What users may give as a loss, what is rejected, and the precision of its sums."""

from __future__ import annotations

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import Update, accumulate_gradients
from pipeline.accumulation.internals import Objective
from tests.accumulation import reference
from tests.accumulation.large_batch import (
    EXACT,
    EXAMPLES,
    FEATURES,
    dense,
    deviation,
    one_hot,
    random,
)
from tests.accumulation.one_weight import Outputs, one_weight
from tests.accumulation.tables import table


def mean_of(x, y):
    return tf.reduce_mean(x + y)


class Halved(losses.MeanSquaredError):
    """Computes something in `__call__`, which is not called."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return 0.5 * super().__call__(y_true, y_pred, sample_weight)


def one_row(y_true, y_pred):
    return tf.reshape(tf.reduce_mean(y_pred - y_true), [1])


def softened(y_true, y_pred):
    return tf.reduce_mean(tf.math.softplus(y_pred - y_true), -1)


@pytest.mark.parametrize("loss", ["mse", "crossentropy", softened, keras.losses.huber])
def test_a_loss_is_given_as_compile_takes_it(float64, loss):
    model = dense()
    model.add(layers.Softmax())
    model.compile(loss=loss)
    x = random(EXAMPLES, FEATURES)
    y = one_hot(EXAMPLES)
    with tf.GradientTape() as tape:
        value = model.compute_loss(x, y, model(x))
    expected = reference.gradients_of(tape, value, model)

    sums = accumulate_gradients(model, loss, (x, y), 4)
    assert float(sums.mean_loss()) == pytest.approx(float(value), rel=EXACT)
    assert deviation(sums.gradients(), expected) < EXACT


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({"added_losses": "sums"}, "must be mean or sum. Received: 'sums'"),
        (
            {"loss_over": "batch"},
            "must be example or effective_batch. Received: 'batch'",
        ),
    ],
)
def test_a_mode_of_an_objective_is_one_of_its_choices(modes, message):
    (name,) = modes
    with pytest.raises(ValueError, match=f"^{name} {message}"):
        Objective("mse", **modes)


@pytest.mark.parametrize("weighted", [False, True])
def test_any_function_of_a_micro_batch(float64, weighted):
    """A penalty of a critic's slope, by its weights alone.

    Or the mean over those examples that count, with their number.
    """
    critic = dense(units=1)
    x = random(EXAMPLES, FEATURES)
    y = random(EXAMPLES, 1)

    def slopes(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = critic(x)
        return tf.reduce_sum(tape.gradient(outputs, x) ** 2, -1)

    def mean(x, y):
        return tf.reduce_mean(slopes(x) + y**2)

    def weighted_mean(x, y):
        slope = slopes(x)
        counting = tf.cast(y[:, 0] > 0, slope.dtype)
        weight = tf.reduce_sum(counting)
        return tf.reduce_sum(counting * slope) / weight, weight

    variables = critic.trainable_variables[:2]
    with tf.GradientTape() as tape:
        if weighted:
            value, _ = weighted_mean(tf.constant(x), tf.constant(y))
        else:
            value = mean(tf.constant(x), tf.constant(y))
    expected = reference.gradients_of(tape, value, variables)

    loss = weighted_mean if weighted else mean
    sums = accumulate_gradients(None, loss, (x, y), 4, variables=variables)
    assert float(sums.mean_loss()) == pytest.approx(float(value), rel=EXACT)
    assert deviation(sums.gradients(), expected) < EXACT


@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_micro_batch_without_weight_does_not_count(float64, scale):
    """The function divides by the weight, so its loss and gradient are NaN there."""
    model = dense(units=1)
    x = random(10, FEATURES)
    y = random(10, 1)
    weights = np.array([0, 0, 0, 1, 2, 3, 1, 1, 1, 1.0])

    def weighted_mean(x, y, weights):
        errors = tf.square(y - model(x))[:, 0]
        weight = tf.reduce_sum(weights)
        return tf.reduce_sum(weights * errors) / weight, weight

    with tf.GradientTape() as tape:
        value, _ = weighted_mean(*map(tf.constant, (x, y, weights)))
    expected = reference.gradients_of(tape, value, model)

    scale_loss = None
    if scale is not None:
        expected = [scale * gradient for gradient in expected]
        scale_loss = functools.partial(tf.multiply, tf.constant(scale, "float64"))
    sums = accumulate_gradients(
        None,
        weighted_mean,
        (x, y, weights),
        3,
        variables=model.trainable_variables,
        scale_loss=scale_loss,
    )
    assert float(sums.mean_loss()) == pytest.approx(float(value), rel=EXACT)
    assert deviation(sums.gradients(), expected) < EXACT


def test_a_real_nan_of_a_function_is_not_hidden(float64):
    model = dense(units=1)

    def mean(x, weights):
        return tf.math.log(-tf.reduce_sum(model(x) ** 2)), tf.reduce_sum(weights)

    batch = (random(4, FEATURES), np.array([0.0, 0.0, 1.0, 1.0]))
    variables = model.trainable_variables
    sums = accumulate_gradients(None, mean, batch, 2, variables=variables)
    assert np.isnan(sums.mean_loss())


class Keeping(keras.losses.MeanSquaredError):
    """Keeps its values, which a metric may read, and takes no batch of a known size."""

    def call(self, y_true, y_pred):
        assert y_true.shape[0] is None
        self.values = super().call(y_true, y_pred)
        return self.values


def test_a_loss_may_keep_a_tensor_of_its_call(float64):
    loss = Keeping()

    class OfValues(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            return super().update_state(loss.values)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    objective = Objective(loss, metrics=[OfValues(name="kept")])
    update = Update(model, objective, optimizer, 2)
    results = tf.function(update, autograph=False)((np.ones((5, 3)), np.ones((5, 2))))
    assert float(results["kept"]) == pytest.approx(float(results["loss"]), rel=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loss_of_half_precision_is_counted_in_float32(precision, dtype):
    """8192 ones: a sum in bfloat16 stops at 256, one in float16 at 2048."""
    precision("float32")
    ones = tf.ones((8192, 1))
    loss = losses.MeanSquaredError(dtype=dtype)
    sums = accumulate_gradients(one_weight(), loss, (ones, ones), 1000)
    ((total, _, weight),) = sums.losses.values()
    assert float(total) == 8192
    assert float(weight) == 8192
    assert float(sums.examples) == 8192
    assert float(sums.mean_loss()) == 1
    assert float(sums.gradients()[0][0, 0]) == -2


@pytest.mark.parametrize(
    ("floatx", "examples"), [("bfloat16", 257), ("float16", 65_536)]
)
def test_examples_are_counted_in_float32_whatever_floatx_is(
    precision, floatx, examples
):
    """257 in bfloat16 is 256, and 65,536 in float16 is infinite."""
    precision("float32")
    model = one_weight()
    keras.config.set_floatx(floatx)
    ones = tf.ones((examples, 1))
    sums = accumulate_gradients(model, Outputs(), (ones, ones), 16_384)
    assert float(sums.examples) == examples
    # The gradient goes through the loss, whose dtype rounds by at most 2⁻⁹.
    gradient = float(sums.gradients()[0][0, 0])
    assert gradient == pytest.approx(1, rel=2**-9)


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_sums_are_float32(precision, policy):
    precision(policy)
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False)])
    ones = tf.ones((512, 1))
    accumulate = tf.function(accumulate_gradients, autograph=False)
    sums = accumulate(model, Outputs(), (ones, ones), 1)
    # A sum of ones in bfloat16, of 8 bits, stays at 256: the mean would be 256/512.
    assert {value.dtype for value in tf.nest.flatten(sums)} == {tf.float32}
    assert np.asarray(sums.gradients()).tolist() == [[[1.0]]]


INTEGER = "micro_batch_size must be a whole number of at least 1."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch_size": 0}, f"{INTEGER} Received: 0"),
        ({"micro_batch_size": 2.5}, f"{INTEGER} Received: 2.5"),
        ({"loss": losses.MeanSquaredError(reduction=None)}, "must have a reduction"),
        ({"loss": losses.Dice()}, "must give one value per example"),
        (
            {"loss": losses.CosineSimilarity(axis=0)},
            "must have the examples on axis 0 of its values, unless loss_over is "
            '"effective_batch". Received: cosine_similarity with values of shape (1,)',
        ),
        (
            {"loss": Halved()},
            "loss must compute one value per example in `call`, because `__call__` is "
            "not called. Received: mean_squared_error",
        ),
        ({"loss": one_row}, "must have the examples on axis 0 of its values"),
        ({"model": table}, "must have the examples on axis 0 of its values"),
        ({"batch": (np.ones((3, 1)), None, np.ones(3))}, "there must be labels for"),
        (
            {"batch": lambda: (tf.sparse.from_dense(np.eye(3)), np.ones((3, 1)))},
            "must consist of dense or ragged tensors",
        ),
        ({"model": None}, "without a model, variables must be given"),
        (
            {"model": None, "loss": mean_of, "variables": [], "loss_weights": 2.0},
            "loss_weights must be left out without a model. Received: 2.0",
        ),
        (
            {"model": None, "loss": mean_of, "variables": [], "metrics": ["mae"]},
            "metrics must be left out without a model. Received: ['mae']",
        ),
        (
            {"loss": Objective("mse"), "weighted_metrics": {"dense": ["mae"]}},
            "weighted_metrics must be left out with an Objective, which has its own",
        ),
        (
            {"model": None, "loss": lambda x, y: x - y, "variables": []},
            "loss must return a scalar",
        ),
    ],
)
def test_what_cannot_be_accumulated_is_refused(change, message):
    x = np.arange(1.0, 6.0)[:, None]
    arguments = {
        "model": one_weight(),
        "loss": losses.MeanSquaredError(),
        "batch": (x, x),
        "micro_batch_size": 2,
    }
    arguments |= change
    for name in ("batch", "model"):
        if inspect.isfunction(arguments[name]):
            arguments[name] = arguments[name]()
    with pytest.raises(ValueError) as refused:
        accumulate_gradients(**arguments)
    assert message in str(refused.value)
