"""The gradient noise scale against a problem whose true value is known."""

from __future__ import annotations

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation.internals import weighted_sum
from pipeline.accumulation.noise_scale import NoiseScale
from pipeline.accumulation.update import Update
from tests.parameters import mostly_slow

DIMENSIONS, SIGMA, BATCH, UPDATES = 8, 3.0, 64, 600
WEIGHTS = np.resize([10, 0.1], BATCH)  # of examples, whatever they are


@pytest.fixture(scope="module")
def linear():
    """y = x·w* + ε with x ~ N(0, I), ε ~ N(0, σ²), seen from w = w* + δ: the data of UPDATES effective batches."""
    rng = np.random.default_rng(0)
    delta = rng.normal(size=DIMENSIONS)
    x = rng.normal(size=(UPDATES, BATCH, DIMENSIONS))
    y = -x @ delta + SIGMA * rng.normal(size=(UPDATES, BATCH))
    return x, y, float(delta @ delta)


def _estimates(
    linear, micro_batch_size, strategy=None, sizes=None, every=1, weights=None
):
    x, y, _ = linear
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((DIMENSIONS,)),
                keras.layers.Dense(1, use_bias=False, dtype="float64"),
            ]
        )
        model.layers[0].kernel.assign(np.zeros((DIMENSIONS, 1)))
        # So small a rate that the weights stay where the true value is known.
        optimizer = keras.optimizers.SGD(1e-30)
        optimizer.build(model.trainable_variables)
    reduction = "sum_over_batch_size" if weights is None else "mean_with_sample_weight"
    loss = keras.losses.MeanSquaredError(reduction, dtype="float64")
    update = Update(
        model, loss, optimizer, micro_batch_size, strategy=strategy, noise_every=every
    )

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, DIMENSIONS], "float64"),
            tf.TensorSpec([None, 1], "float64"),
        ]
    )
    def step(a, b):
        results = update(
            (a, b)
            if weights is None
            else (a, b, tf.constant(weights, "float64")[: tf.shape(a)[0]])
        )
        return results["gradient_variance"], results["gradient_square"]

    sizes = sizes or [BATCH]
    found = [
        step(x[i, : (n := sizes[i % len(sizes)])], y[i, :n, None])
        for i in range(len(x))
    ]
    return np.array([[float(variance), float(square)] for variance, square in found])


@pytest.mark.parametrize(
    ("micro", "sizes", "weights"),
    [
        pytest.param(16, [64], None, marks=pytest.mark.slow),
        (24, [64], None),
        (8, [64, 13], None),
        (8, [64], WEIGHTS),
    ],
    ids=["even", "uneven", "tails", "weights"],
)
def test_it_is_unbiased_on_a_linear_gaussian_problem(linear, micro, sizes, weights):
    found = _estimates(linear, micro, sizes=sizes, weights=weights)
    d, squared = DIMENSIONS, linear[2]
    # The loss (x·δ − ε)² has the gradient 2x(x·δ − ε): G = 2δ and, as E|x|²(x·δ)² = (d + 2)|δ|² for a normal x,
    # tr(Σ) = 4((d + 2)|δ|² + dσ²) − 4|δ|².
    truth = np.array([4 * ((d + 1) * squared + d * SIGMA**2), 4 * squared])
    error = found.std(axis=0, ddof=1) / math.sqrt(len(found))
    assert np.all(
        np.abs(found.mean(axis=0) - truth) < 4 * error
    )  # four standard errors: 1 in 16 000
    assert np.all(error < 0.06 * truth)  # and they are small enough to mean something
    # A negative control: what treats the update's own gradient as the true one, and so forgets tr(Σ)/B.
    examples = (
        np.resize(sizes, len(found))
        if weights is None
        else weights.sum() ** 2 / (weights**2).sum()
    )
    biased = found[:, 1] + found[:, 0] / examples
    assert abs(biased.mean() - truth[1]) > 8 * error[1]


def test_it_is_measured_once_in_so_many_updates(linear):
    x, y, squared = linear
    few = x[:7], y[:7], squared
    measured = _estimates(few, 8, every=3)
    np.testing.assert_array_equal(
        np.isnan(measured).all(axis=1), [False, True, True, False, True, True, False]
    )
    np.testing.assert_allclose(measured[::3], _estimates(few, 8)[::3], rtol=1e-12)


@pytest.mark.slow
def test_replicas_add_up_to_one_device(linear):
    x, y, squared = linear
    few = x[:60], y[:60], squared
    two = _estimates(few, 8, tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    np.testing.assert_allclose(two, _estimates(few, 8), rtol=1e-9)


@pytest.mark.parametrize(
    ("reduction", "devices"),
    mostly_slow(
        itertools.product(["sum_over_batch_size", "sum"], [1, 2]),
        [("sum_over_batch_size", 1), ("sum", 2)],
    ),
)
def test_the_gradients_are_those_that_are_applied(float64, linear, reduction, devices):
    x, y = linear[0][0, :13], linear[1][0, :13, None]
    strategy = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        if devices == 2
        else tf.distribute.get_strategy()
    )
    penalty = keras.regularizers.L2(0.7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((DIMENSIONS,)),
                keras.layers.Dense(1, kernel_regularizer=penalty),
            ]
        )
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    whole = 13 if reduction == "sum" else 1

    def gradient(start, stop):
        """Of the mean over these examples, times all of them for a sum, and of what the model adds."""
        with tf.GradientTape() as tape:
            square = tf.reduce_mean(tf.square(model(x[start:stop]) - y[start:stop]))
            value = whole * square + sum(model.losses)
        return np.concatenate(
            [
                np.ravel(g)
                for g in tape.gradient(
                    value, [v.value for v in model.trainable_variables]
                )
            ]
        )

    cuts = (
        [(0, 5), (5, 10), (10, 13)]
        if devices == 1
        else [(0, 5), (5, 7), (7, 12), (12, 13)]
    )  # 7 + 6, in fives
    of_parts = sum(
        (stop - start) * gradient(start, stop) @ gradient(start, stop)
        for start, stop in cuts
    )
    of_mean = gradient(0, 13) @ gradient(0, 13)
    variance = (of_parts - 13 * of_mean) / (len(cuts) - 1)
    update = Update(model, loss, optimizer, 5, strategy=strategy, noise_every=1)
    results = tf.function(lambda: update((x, y)))()
    assert float(results["gradient_variance"]) == pytest.approx(variance, rel=1e-12)
    assert float(results["gradient_square"]) == pytest.approx(
        of_mean - variance / 13, rel=1e-12
    )


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
    """(Σw)² / Σw², by hand."""
    outputs = tf.ones([3, 2, 1])
    if masked is not None:
        outputs._keras_mask = tf.constant(masked) == 1
    weights = None if weights is None else tf.constant(weights, tf.float32)[:, None]
    loss = keras.losses.MeanSquaredError("mean_with_sample_weight", dtype="float32")
    assert float(
        weighted_sum(loss, tf.zeros_like(outputs), outputs, weights).examples
    ) == pytest.approx(expected)


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
    x, y, squared = linear
    found = _estimates((x[:2], y[:2], squared), BATCH)
    assert np.all(np.isnan(found))


@pytest.mark.slow
def test_what_regularises_weights_is_not_measured(precision):
    """An L2 that is rounded away changes no gradient, and of masked tokens only their loss has a weight to itself."""
    precision("float32")
    x, found = (np.arange(4) < np.array([[4], *[[1]] * 7])).astype("float32"), []
    y = np.random.default_rng(0).normal(size=(8, 4, 1)).astype("float32")
    for regularizer in (None, keras.regularizers.L2(1e-30)):
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(1, kernel_regularizer=regularizer)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Reshape((4, 1)),
                keras.layers.Masking(),
                dense,
            ]
        )
        optimizer = keras.optimizers.SGD(0.0)
        optimizer.build(model.trainable_variables)
        update = Update(
            model, keras.losses.MeanSquaredError(), optimizer, 2, noise_every=1
        )
        found.append(
            float(tf.function(update, autograph=False)((x, y))["gradient_variance"])
        )
    assert found[0] == pytest.approx(found[1], rel=1e-6)
