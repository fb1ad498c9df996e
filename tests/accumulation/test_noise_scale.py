"""The gradient noise scale against a problem whose true value is known."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation.internals import weighted_sum
from pipeline.accumulation.noise_scale import NoiseScale
from pipeline.accumulation.update import Update
from tests.accumulation import reference
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

DIMENSIONS = 8
SIGMA = 3.0
BATCH = 64
UPDATES = 600
WEIGHTS = np.resize([10, 0.1], BATCH)  # of examples, whatever they are


class Linear(NamedTuple):
    """The data of effective batches of a linear problem.

    Attributes:
        x: (updates, batch, dimensions).
        y: (updates, batch).
        squared: |δ|², the squared distance to the true weights.
    """

    x: np.ndarray
    y: np.ndarray
    squared: float

    def first(self, updates: int) -> Linear:
        return Linear(self.x[:updates], self.y[:updates], self.squared)


@pytest.fixture(scope="module")
def linear():
    """y = x·w* + ε with x ~ N(0, I), ε ~ N(0, σ²), seen from w = w* + δ."""
    random = np.random.default_rng(0)
    delta = random.normal(size=DIMENSIONS)
    x = random.normal(size=(UPDATES, BATCH, DIMENSIONS))
    y = -x @ delta + SIGMA * random.normal(size=(UPDATES, BATCH))
    return Linear(x, y, float(delta @ delta))


def _estimates(
    linear, micro_batch_size, devices=1, sizes=(BATCH,), every=1, weights=None
):
    """Return the estimates of each update, (updates, 2): tr(Σ) and |G|².

    Args:
        sizes: of the effective batches, in turn.
        every: updates from one measurement to the next.
        weights: of the examples of each batch.
    """
    reduction = "sum_over_batch_size"
    if weights is not None:
        reduction = "mean_with_sample_weight"
    loss = keras.losses.MeanSquaredError(reduction, dtype="float64")
    update = _update(loss, micro_batch_size, devices, every)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, DIMENSIONS], "float64"),
            tf.TensorSpec([None, 1], "float64"),
        ]
    )
    def step(x, y):
        batch = (x, y)
        if weights is not None:
            sample_weight = tf.constant(weights, "float64")[: tf.shape(x)[0]]
            batch = (x, y, sample_weight)
        results = update(batch)
        return results["gradient_variance"], results["gradient_square"]

    estimates = []
    for i in range(len(linear.x)):
        size = sizes[i % len(sizes)]
        variance, square = step(linear.x[i, :size], linear.y[i, :size, None])
        estimates.append([float(variance), float(square)])
    return np.array(estimates)


def _update(loss, micro_batch_size, devices, every):
    """Return an update of a model that stays at weights of 0."""
    strategy = strategy_on(devices)
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, dtype="float64")
        model = keras.Sequential([keras.Input((DIMENSIONS,)), dense])
        dense.kernel.assign(np.zeros((DIMENSIONS, 1)))
        # So small a rate that the weights stay where the true value is known.
        optimizer = keras.optimizers.SGD(1e-30)
        optimizer.build(model.trainable_variables)
    return Update(
        model, loss, optimizer, micro_batch_size, strategy=strategy, noise_every=every
    )


def test_whether_it_is_measured_may_be_known_during_tracing():
    update = _update(keras.losses.MeanSquaredError(dtype="float64"), 2, 1, 0)
    random = np.random.default_rng(0)
    batch = (random.normal(size=(6, DIMENSIONS)), random.normal(size=(6, 1)))
    at_run_time, during_tracing = (
        tf.function(
            lambda measure=measure: update.sums(batch, measure).gradient_noise,
            autograph=False,
        )
        for measure in (tf.constant(True), True)
    )
    expected = [float(value) for value in at_run_time()]
    assert [float(value) for value in during_tracing()] == expected
    assert expected[0] > 0


@pytest.mark.parametrize(
    ("micro", "sizes", "weights"),
    [
        pytest.param(16, [64], None, marks=pytest.mark.slow),
        pytest.param(24, [64], None, marks=pytest.mark.slow),
        pytest.param(8, [64, 13], None, marks=pytest.mark.slow),
        (8, [64], WEIGHTS),
    ],
    ids=["even", "uneven", "tails", "weights"],
)
def test_it_is_unbiased_on_a_linear_gaussian_problem(linear, micro, sizes, weights):
    estimates = _estimates(linear, micro, sizes=sizes, weights=weights)

    # The loss (x·δ − ε)² has the gradient 2x(x·δ − ε): G = 2δ and, as E|x|²(x·δ)² =
    # (d + 2)|δ|² for a normal x of d dimensions, tr(Σ) = 4((d + 2)|δ|² + dσ²) − 4|δ|².
    variance = 4 * ((DIMENSIONS + 1) * linear.squared + DIMENSIONS * SIGMA**2)
    square = 4 * linear.squared
    truth = np.array([variance, square])
    error = estimates.std(axis=0, ddof=1) / math.sqrt(len(estimates))
    # Four standard errors: 1 in 16 000.
    assert np.all(np.abs(estimates.mean(axis=0) - truth) < 4 * error)
    assert np.all(error < 0.06 * truth)  # and they are small enough to mean something

    # A negative control: what treats the update's own gradient as the true one, and so
    # forgets tr(Σ)/B, where B is the number of examples that count.
    examples = np.resize(sizes, len(estimates))
    if weights is not None:
        examples = weights.sum() ** 2 / (weights**2).sum()
    biased = estimates[:, 1] + estimates[:, 0] / examples
    assert abs(biased.mean() - square) > 8 * error[1]


def test_it_is_measured_once_in_so_many_updates(linear):
    few = linear.first(7)
    measured = _estimates(few, 8, every=3)
    np.testing.assert_array_equal(
        np.isnan(measured).all(axis=1), [False, True, True, False, True, True, False]
    )
    np.testing.assert_allclose(measured[::3], _estimates(few, 8)[::3], rtol=1e-12)


@pytest.mark.slow
def test_replicas_add_up_to_one_device(linear):
    few = linear.first(60)
    on_two = _estimates(few, 8, devices=2)
    np.testing.assert_allclose(on_two, _estimates(few, 8), rtol=1e-9)


@pytest.mark.parametrize(
    ("reduction", "devices"),
    mostly_slow(
        itertools.product(["sum_over_batch_size", "sum"], [1, 2]),
        [("sum_over_batch_size", 1)],
    ),
)
def test_the_gradients_are_those_that_are_applied(float64, linear, reduction, devices):
    examples = 13
    x = linear.x[0, :examples]
    y = linear.y[0, :examples, None]
    strategy = strategy_on(devices)
    with strategy.scope():
        penalty = keras.regularizers.L2(0.7)
        dense = keras.layers.Dense(1, kernel_regularizer=penalty)
        model = keras.Sequential([keras.Input((DIMENSIONS,)), dense])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
    # A sum is the mean times the number of examples.
    scale = examples if reduction == "sum" else 1

    def squared_norm(start, stop):
        """Return |g|² of the gradient over these examples, as the update has it.

        It is that of the mean over them, times the scale, and of what the model adds.
        """
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(tf.square(model(x[start:stop]) - y[start:stop]))
            value = scale * mean + sum(model.losses)
        gradients = reference.gradients_of(tape, value, model)
        return sum(float(np.sum(np.square(gradient))) for gradient in gradients)

    # 13 examples in fives; on two devices 7 + 6 in fives.
    cuts = [(0, 5), (5, 10), (10, 13)]
    if devices == 2:
        cuts = [(0, 5), (5, 7), (7, 12), (12, 13)]
    of_parts = sum((stop - start) * squared_norm(start, stop) for start, stop in cuts)
    of_mean = squared_norm(0, examples)
    variance = (of_parts - examples * of_mean) / (len(cuts) - 1)

    loss = keras.losses.MeanSquaredError(reduction=reduction)
    update = Update(model, loss, optimizer, 5, strategy=strategy, noise_every=1)
    results = tf.function(lambda: update((x, y)))()
    assert float(results["gradient_variance"]) == pytest.approx(variance, rel=1e-12)
    square = of_mean - variance / examples
    assert float(results["gradient_square"]) == pytest.approx(square, rel=1e-12)


@pytest.mark.parametrize(
    ("masked", "weights", "expected"),
    [
        (None, [2, 2, 2], 3),
        (None, [4, 1, 1], 36 / 18),
        ([[1, 1], [1, 0], [0, 0]], None, 9 / 5),  # two tokens and one
        ([[1, 1], [1, 0], [0, 0]], [1, 2, 5], 16 / 8),
    ],
)
def test_how_many_examples_count(masked, weights, expected):
    """(Σw)² / Σw² for weights w, by hand."""
    outputs = tf.ones([3, 2, 1])
    if masked is not None:
        outputs._keras_mask = tf.constant(masked) == 1
    if weights is not None:
        weights = tf.constant(weights, tf.float32)[:, None]
    loss = keras.losses.MeanSquaredError("mean_with_sample_weight", dtype="float32")
    total = weighted_sum(loss, tf.zeros_like(outputs), outputs, weights)
    assert float(total.effective_examples) == pytest.approx(expected)


def test_smoothing_divides_last():
    scale = NoiseScale()
    assert scale.value is None
    scale.add(8.0, 2.0)
    assert scale.value == pytest.approx(4.0)
    scale.add(math.nan, math.nan)  # an update that was not measured changes nothing
    assert scale.value == pytest.approx(4.0)
    scale.add(8.0, 0.5)
    # Two updates later, with a time constant of 0.3 updates; not a mean of 4 and 16.
    kept = math.exp(-2 / 0.3)
    assert scale.value == pytest.approx((kept * 8 + 8) / (kept * 2 + 0.5))


def test_one_micro_batch_measures_nothing(linear):
    assert np.all(np.isnan(_estimates(linear.first(2), BATCH)))


@pytest.mark.slow
def test_what_regularises_weights_is_not_measured(precision):
    """An L2 that is rounded away changes no gradient.

    Of masked tokens only their loss has a weight to itself.
    """
    precision("float32")
    lengths = np.array([[4], [1], [1], [1], [1], [1], [1], [1]])
    x = (np.arange(4) < lengths).astype("float32")
    y = np.random.default_rng(0).normal(size=(8, 4, 1)).astype("float32")

    def variance(regularizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Reshape((4, 1)),
                keras.layers.Masking(),
                keras.layers.Dense(1, kernel_regularizer=regularizer),
            ]
        )
        optimizer = keras.optimizers.SGD(0.0)
        optimizer.build(model.trainable_variables)
        loss = keras.losses.MeanSquaredError()
        update = Update(model, loss, optimizer, 2, noise_every=1)
        results = tf.function(update, autograph=False)((x, y))
        return float(results["gradient_variance"])

    regularized = variance(keras.regularizers.L2(1e-30))
    assert variance(None) == pytest.approx(regularized, rel=1e-6)
