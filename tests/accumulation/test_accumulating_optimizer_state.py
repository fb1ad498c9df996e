"""What an `AccumulatingOptimizer` is made of, and how it is saved and loaded."""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import AccumulatingOptimizer
from tests.accumulation.accumulating import (
    classifier,
    examples_of_classifier,
    per_replica,
    strategy_of,
    values,
)


def accumulating_adam(factor: int) -> AccumulatingOptimizer:
    return AccumulatingOptimizer(keras.optimizers.Adam(0.1), factor)


@pytest.mark.slow
def test_a_model_that_is_saved_between_two_steps_goes_on_from_there(float64, tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 4, 5))
    y = np.arange(24).reshape(6, 4) % 3
    uninterrupted = classifier(accumulating_adam(3))
    for number in range(6):
        uninterrupted.train_on_batch(x[number], y[number])

    begun = classifier(accumulating_adam(3))
    for number in range(2):
        begun.train_on_batch(x[number], y[number])
    begun.save(tmp_path / "begun.keras")
    loaded = keras.saving.load_model(tmp_path / "begun.keras")
    assert loaded.optimizer.factor == 3
    for number in range(2, 6):
        loaded.train_on_batch(x[number], y[number])
    assert values(loaded).tolist() == values(uninterrupted).tolist()


@pytest.mark.slow
def test_a_checkpoint_of_tensorflow_between_two_steps_has_the_sums(float64, tmp_path):
    x, y = examples_of_classifier(16)

    def train(model: keras.Model, parts: range) -> None:
        for number in parts:
            part = slice(4 * number, 4 * number + 4)
            model.train_on_batch(x[part], y[part])

    def checkpoint_of(model: keras.Model) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    uninterrupted = classifier(accumulating_adam(2))
    train(uninterrupted, range(4))

    begun = classifier(accumulating_adam(2))
    train(begun, range(3))
    path = checkpoint_of(begun).save(tmp_path / "begun")
    restored = classifier(accumulating_adam(2))
    restored.optimizer.build(restored.trainable_variables)
    checkpoint_of(restored).restore(path).assert_consumed()
    train(restored, range(3, 4))
    assert values(restored).tolist() == values(uninterrupted).tolist()


def test_a_step_right_after_loading_takes_the_saved_sums(float64, tmp_path):
    x, y = examples_of_classifier(8)
    model = classifier(accumulating_adam(3))
    model.train_on_batch(x, y)
    model.save(tmp_path / "begun.keras")
    loaded = keras.saving.load_model(tmp_path / "begun.keras")
    before = values(model)
    model.optimizer.flush()
    loaded.optimizer.flush()
    assert values(loaded).tolist() == values(model).tolist()
    assert values(model).tolist() != before.tolist()


class Training(NamedTuple):
    """A variable that is trained on some replicas."""

    strategy: tf.distribute.Strategy
    variable: keras.Variable
    optimizer: AccumulatingOptimizer


def training_on(replicas: int) -> Training:
    strategy = strategy_of(replicas)
    with strategy.scope():
        variable = keras.Variable(np.zeros(2))
        accumulating = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 3)
        accumulating.build([variable])
    return Training(strategy, variable, accumulating)


def add_part(training: Training, part: np.ndarray, weighted: bool) -> None:
    """Add the mean of a part of 8 rows; a replica adds that of its share."""
    replicas = training.strategy.num_replicas_in_sync
    options = {}
    if weighted:
        options = {"weight": 8 / replicas}

    def apply(rows: tf.Tensor) -> None:
        gradient = tf.reduce_mean(rows, 0) / replicas
        training.optimizer.apply([gradient], [training.variable], **options)

    shares = np.split(part, replicas)
    share = per_replica(training.strategy, lambda replica: tf.constant(shares[replica]))
    training.strategy.run(apply, (share,))


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_two_replicas_go_on_without_them(float64, tmp_path, weighted):
    """What is saved does not depend on the number of replicas, in either direction."""
    first, second, third = np.random.default_rng(0).normal(size=(3, 8, 2))
    mean = np.mean([first, second, third], axis=(0, 1))
    for replicas_before, replicas_after in ((1, 2), (2, 1)):
        begun = training_on(replicas_before)
        loaded = training_on(replicas_after)
        add_part(begun, first, weighted)
        add_part(begun, second, weighted)
        saved = tf.train.Checkpoint(optimizer=begun.optimizer).save(tmp_path / "begun")
        checkpoint = tf.train.Checkpoint(optimizer=loaded.optimizer)
        checkpoint.restore(saved).assert_consumed()
        add_part(loaded, third, weighted)
        np.testing.assert_allclose(loaded.variable.numpy(), -mean, rtol=1e-12)


def test_it_comes_back_from_its_config():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    accumulating = AccumulatingOptimizer(keras.optimizers.AdamW(rate, clipnorm=1.0), 3)
    config = accumulating.get_config()
    serialized = keras.optimizers.serialize(accumulating)
    assert keras.optimizers.deserialize(serialized).get_config() == config
    rebuilt = AccumulatingOptimizer.from_config(accumulating.get_config())
    assert rebuilt.get_config() == config


def test_what_is_excluded_from_decay_is_so_for_the_inner_optimizer(float64):
    kernel = keras.Variable(np.ones(2), name="kernel")
    bias = keras.Variable(np.ones(2), name="bias")
    adam = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    accumulating = AccumulatingOptimizer(adam, 1)
    accumulating.exclude_from_weight_decay(var_names=["bias"])
    accumulating.apply([tf.zeros(2, "float64")] * 2, iter([kernel, bias]))
    assert kernel.numpy() == pytest.approx([0.95, 0.95])
    assert bias.numpy().tolist() == [1.0, 1.0]


def test_what_it_cannot_be_made_of():
    sgd = keras.optimizers.SGD()
    for factor in (0, True, 2.0, None):
        with pytest.raises(
            ValueError, match=r"factor must be an integer of at least 1\. Received: "
        ):
            AccumulatingOptimizer(sgd, factor)
    for inner in (
        AccumulatingOptimizer(sgd, 2),
        keras.optimizers.SGD(gradient_accumulation_steps=2),
    ):
        with pytest.raises(ValueError, match="inner must not accumulate gradients"):
            AccumulatingOptimizer(inner, 2)

    one = keras.Variable(np.zeros(2))
    other = keras.Variable(np.zeros(2))
    accumulating = AccumulatingOptimizer(sgd, 2)
    accumulating.build([one])
    with pytest.raises(
        ValueError,
        match=r"trainable_variables must be the .* that the optimizer was built for",
    ):
        accumulating.apply([tf.zeros(2)], [other])
