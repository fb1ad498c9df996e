"""The learning rate of an `Update`: the one that it reports is the one that it used."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import Update
from pipeline.components import optimizer as optimizers
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from tests.accumulation.one_weight import Outputs, one_weight
from tests.accumulation.replicas import strategy_on

HORIZON = 40  # updates


@pytest.mark.parametrize(
    "schedule",
    [
        "cosine",
        pytest.param("constant", marks=pytest.mark.slow),
        pytest.param("exponential", marks=pytest.mark.slow),
        pytest.param("inverse_sqrt", marks=pytest.mark.slow),
        pytest.param("piecewise", marks=pytest.mark.slow),
        pytest.param("wsd", marks=pytest.mark.slow),
    ],
)
def test_the_learning_rate_is_the_one_used(precision, schedule):
    precision("float32")
    config = composed([f"schedule={schedule}", "optimizer=sgd"])
    model = one_weight()
    optimizer, *_ = optimizers.build(resolve(config), HORIZON)
    optimizer.build(model.trainable_variables)
    update = tf.function(Update(model, Outputs(), optimizer, 2).__call__)

    rate_of_schedule = optimizers.build_schedule(config.schedule, HORIZON)
    ones = tf.ones((4, 1))
    before = np.float32(0)
    for number in range(1, HORIZON + 1):
        rate = np.float32(update((ones, ones))["learning_rate"])
        expected = rate_of_schedule
        if callable(rate_of_schedule):
            expected = rate_of_schedule(number - 1)
        expected = np.float32(expected)

        # One unit in the last place; tests/components/test_optimizer.py has the reason
        # for the exponential.
        units = 1
        if schedule == "exponential":
            log_ratio = np.log(expected / config.optimizer.learning_rate)
            units = 2 + 1.5 * abs(log_ratio)
        assert abs(rate - expected) <= units * np.spacing(expected)

        after = model.get_weights()[0][0, 0]
        assert after == before - rate  # the gradient is 1
        before = after


def with_decay(rate):
    return keras.optimizers.AdamW(rate, weight_decay=0.1)


def with_a_loss_scale(rate):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate))


@pytest.mark.parametrize(
    ("make", "devices"),
    [
        (with_decay, 1),
        pytest.param(with_a_loss_scale, 2, marks=pytest.mark.slow),
    ],
)
def test_a_rate_that_counts_its_calls_is_computed_once_an_update(
    float64, make, devices
):
    strategy = strategy_on(devices)
    with strategy.scope():
        calls = tf.Variable(0.0, dtype=tf.float64)
        model = one_weight()
        optimizer = make(lambda: 0.5 / calls.assign_add(1.0))
        optimizer.build(model.trainable_variables)
    ones = tf.ones((4, 1), tf.float64)
    update = tf.function(
        Update(model, Outputs(), optimizer, 2, strategy=strategy).__call__
    )
    # `check` does not move what it cannot set back, either.
    optimizers.check(optimizer, model.trainable_variables)
    rates = [float(update((ones, ones))["learning_rate"]) for _ in range(3)]
    assert rates == [0.5, 0.25, 0.5 / 3]

    # Plain Keras with the same rates, one after the other.
    expected = make(0.5)
    plain = getattr(expected, "inner_optimizer", expected)
    weight = keras.Variable([[0.0]], dtype="float64")
    for rate in rates:
        plain.learning_rate = rate
        plain.apply([tf.ones((1, 1), tf.float64)], [weight])
    # A rate is in float32.
    np.testing.assert_allclose(model.get_weights()[0], weight, rtol=1e-7)
