"""An optimizer that accumulates, in loops and in `fit`.

The weights are those of plain Keras on whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import AccumulatingOptimizer
from tests.accumulation import reference
from tests.accumulation.accumulating import (
    CLOSE,
    loss,
    optimizer,
    per_replica,
    strategy_of,
    values,
)
from tests.accumulation.matrix import OPTIMIZERS
from tests.parameters import mostly_slow

WORDS = 7
# Sizes of the parts of each update; the last update has fewer, and is flushed.
UNEQUAL = ((16, 3, 9), (5, 1, 2), (7,))

QUICK = ("SGD", "AdamW")
# The sums do not depend on the optimizer that they are for.
EACH = mostly_slow(OPTIMIZERS, QUICK, ["Lion", "Muon", "Adafactor"])


def all_at_once() -> keras.optimizers.Optimizer:
    """Schedule, average, decay and clipping: each would show if it ran once a part."""
    return keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
        weight_decay=0.1,
        use_ema=True,
        ema_momentum=0.5,
        clipnorm=0.05,
    )


def network(rows: bool = True) -> keras.Model:
    """Return a model with a layer that the loss does not depend on.

    With rows it has an embedding, whose gradient is rows.
    """
    keras.utils.set_random_seed(0)
    tokens = keras.Input((4,), dtype="int64")
    if rows:
        table = layers.Embedding(WORDS, 3)
    else:
        table = layers.CategoryEncoding(WORDS, "one_hot")
    hidden = layers.Flatten()(table(tokens))
    hidden = layers.Dense(8, "tanh")(hidden)
    used = layers.Dense(3)(hidden)
    unused = layers.Dense(2)(hidden)
    return keras.Model(tokens, {"used": used, "unused": unused})


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, WORDS, (count, 4)), random.integers(0, 3, count)


def gradients_of(model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> list:
    with tf.GradientTape() as tape:
        value = loss()(y, model(x)["used"])
    return reference.gradients_of(tape, value, model)


def parts_of_updates(sizes: Sequence[Sequence[int]]) -> Iterator[list[tuple]]:
    """Yield the parts of each update, pairs of inputs and labels."""
    x, y = examples(sum(map(sum, sizes)))
    start = 0
    for sizes_of_update in sizes:
        parts = []
        for size in sizes_of_update:
            part = slice(start, start + size)
            parts.append((x[part], y[part]))
            start += size
        yield parts


class Trained(NamedTuple):
    """Trained weights, and how far they have gone."""

    weights: np.ndarray
    way: float


def by_whole_batches(plain: keras.optimizers.Optimizer) -> Trained:
    """Train by dense updates of plain Keras."""
    model = network()
    start = values(model)
    plain.build(model.trainable_variables)
    for parts in parts_of_updates(UNEQUAL):
        x, y = map(np.concatenate, zip(*parts, strict=True))
        gradients = gradients_of(model, tf.constant(x), tf.constant(y))
        plain.apply(reference.dense(gradients), model.trainable_variables)
    weights = values(model)
    return Trained(weights, float(np.linalg.norm(weights - start)))


def by_parts(
    inner: keras.optimizers.Optimizer, *, weighted: bool = True, traced: bool = True
) -> tuple[np.ndarray, AccumulatingOptimizer]:
    """Train in parts; return the weights and the optimizer."""
    model = network()
    accumulating = AccumulatingOptimizer(inner, 3)
    accumulating.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        options = {}
        if weighted:
            options = {"weight": tf.shape(y)[0]}
        pairs = zip(gradients_of(model, x, y), model.trainable_variables, strict=True)
        accumulating.apply_gradients(pairs, **options)

    if traced:
        signature = [tf.TensorSpec([None, 4], "int64"), tf.TensorSpec([None], "int64")]
        step = tf.function(step, input_signature=signature, autograph=False)
    for parts in parts_of_updates(UNEQUAL):
        for x, y in parts:
            step(tf.constant(x), tf.constant(y))
    accumulating.flush()
    return values(model), accumulating


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("name", EACH)
def test_parts_of_any_size_in_a_loop(float64, name):
    expected = by_whole_batches(optimizer(name))
    weights, accumulating = by_parts(optimizer(name))
    assert np.linalg.norm(weights - expected.weights) < CLOSE * expected.way
    assert int(accumulating.iterations.numpy()) == len(UNEQUAL)

    # The control: where all parts count alike, the update is another one.
    unweighted, _ = by_parts(optimizer(name), weighted=False)
    distance = np.linalg.norm(unweighted - expected.weights)
    assert distance > 1e6 * CLOSE * expected.way


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("traced", mostly_slow([True, False], [True]))
def test_schedule_average_decay_and_clipping_are_once_an_update(float64, traced):
    expected = by_whole_batches(all_at_once())
    weights, accumulating = by_parts(all_at_once(), traced=traced)
    assert np.linalg.norm(weights - expected.weights) < CLOSE * expected.way
    # The rate is a float32.
    rate = float(accumulating.learning_rate)
    assert rate == pytest.approx(0.1 / 2**3, rel=2**-23)


def in_fit(
    optimizer_of: Callable[[], keras.optimizers.Optimizer],
    batch: int,
    strategy: tf.distribute.Strategy,
) -> keras.Model:
    """Train two epochs of 40 examples."""
    with strategy.scope():
        # From rows plain Keras takes another step than from the dense gradient.
        model = network(rows=False)
        model.compile(optimizer_of(), {"used": loss()})
    x, y = examples(40)
    data = tf.data.Dataset.from_tensor_slices((x, {"used": y})).batch(batch)
    callbacks = []
    if isinstance(model.optimizer, AccumulatingOptimizer):
        callbacks.append(model.optimizer.flush_at_epoch_end())
    model.fit(data, epochs=2, verbose=0, callbacks=callbacks, validation_data=data)
    return model


# In `make test`, test_windows.py has a fit.
IN_FIT = mostly_slow([(name, 1) for name in OPTIMIZERS], [], [("SGD", 1), ("Muon", 1)])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("name", "replicas"), [*IN_FIT, pytest.param("AdamW", 2, marks=pytest.mark.slow)]
)
def test_equal_batches_in_fit(float64, name, replicas):
    """3 batches of 8 are an update, and the 2 that remain of each epoch another one."""
    start = values(network(rows=False))
    # On the same devices: under a strategy Keras' ScheduleFreeAdamW is another one.
    expected = values(in_fit(lambda: optimizer(name), 24, strategy_of(replicas)))
    way = np.linalg.norm(expected - start)
    model = in_fit(
        lambda: AccumulatingOptimizer(optimizer(name), 3), 8, strategy_of(replicas)
    )
    assert int(model.optimizer.iterations.numpy()) == 4
    assert np.linalg.norm(values(model) - expected) < CLOSE * way

    # Keras' own accumulation: the rest of an epoch leaks into the next one.
    if name in QUICK and replicas == 1:
        of_keras = in_fit(
            lambda: optimizer(name, gradient_accumulation_steps=3), 8, strategy_of(1)
        )
        assert np.linalg.norm(values(of_keras) - expected) > 1e6 * CLOSE * way


def on_replicas(
    optimizer_of: Callable[[], keras.optimizers.Optimizer],
    strategy: tf.distribute.Strategy,
    calls: Sequence[Sequence[np.ndarray]],
) -> np.ndarray:
    """Return a kernel and a bias after `calls` of an optimizer.

    The gradients of a call are (replicas, …) of each variable.
    """
    with strategy.scope():
        kernel = keras.Variable(np.linspace(-1, 1, 24).reshape(8, 3))
        bias = keras.Variable(np.ones(3))
        built = optimizer_of()
        built.build([kernel, bias])

    def apply(*gradients: tf.Tensor) -> None:
        built.apply(list(gradients), [kernel, bias])

    def distributed(call: Sequence[np.ndarray]) -> object:
        return per_replica(
            strategy,
            lambda replica: tuple(tf.constant(gradient[replica]) for gradient in call),
        )

    step = tf.function(
        lambda gradients: strategy.run(apply, gradients), autograph=False
    )
    for call in calls:
        step(distributed(call))
    if isinstance(built, AccumulatingOptimizer):
        built.flush()
    return np.concatenate([np.ravel(kernel), np.ravel(bias)])


@pytest.mark.soak
def test_every_optimizer_on_two_replicas(float64):
    """3 gradients are an update, and the 2 that remain another one.

    They are gradients alone, without a model.
    """
    strategy = strategy_of(2)
    random = np.random.default_rng(0)
    parts = []
    for _ in range(8):
        parts.append((random.normal(size=(2, 8, 3)), random.normal(size=(2, 3))))
    means = []
    for parts_of_update in (parts[:3], parts[3:6], parts[6:]):
        of_kernel, of_bias = zip(*parts_of_update, strict=True)
        means.append((np.mean(of_kernel, 0), np.mean(of_bias, 0)))

    def accumulating(name: str) -> AccumulatingOptimizer:
        return AccumulatingOptimizer(optimizer(name), 3)

    start = on_replicas(lambda: optimizer("SGD"), strategy, [])
    for name in OPTIMIZERS:
        expected = on_replicas(lambda name=name: optimizer(name), strategy, means)
        weights = on_replicas(lambda name=name: accumulating(name), strategy, parts)
        way = np.linalg.norm(expected - start)
        assert np.linalg.norm(weights - expected) < CLOSE * way, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
        lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    ],
    ids=["mirrored", "one device"],
)
def test_a_strategy_of_one_replica(float64, strategy):
    start = values(network(rows=False))
    expected = values(in_fit(lambda: optimizer("SGD"), 24, strategy_of(1)))
    model = in_fit(lambda: AccumulatingOptimizer(optimizer("SGD"), 3), 8, strategy())
    way = np.linalg.norm(expected - start)
    assert np.linalg.norm(values(model) - expected) < CLOSE * way


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_not_finite_in_one_part_skips_the_whole_update(replicas):
    strategy = strategy_of(replicas)
    with strategy.scope():
        weight = keras.Variable(np.ones(2, "float32"))
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=64.0
        )
        accumulating = AccumulatingOptimizer(scaled, 4)
        accumulating.build([weight])

    def part(gradient: tf.Tensor) -> None:
        accumulating.apply([accumulating.scale_loss(gradient) / replicas], [weight])

    step = tf.function(
        lambda gradient: strategy.run(part, (gradient,)), autograph=False
    )
    for value in (1.0, 1.0, np.inf, 1.0):
        step(tf.fill([2], value))
    assert weight.numpy().tolist() == [1.0, 1.0]
    assert float(scaled.dynamic_scale.numpy()) == 32.0
    assert int(accumulating.iterations.numpy()) == 0

    for value in (1.0, 2.0, 3.0, 2.0):
        step(tf.fill([2], value))
    assert weight.numpy().tolist() == [-1.0, -1.0]
    assert int(accumulating.iterations.numpy()) == 1


def test_a_loss_scale_around_it_is_refused_by_a_line(precision):
    precision("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with pytest.raises(
        ValueError,
        match=(
            r"AccumulatingOptimizer\(LossScaleOptimizer\(…\)\), "
            r"with compile\(auto_scale"
        ),
    ):
        model.compile(AccumulatingOptimizer(keras.optimizers.SGD(), 2), "mse")
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0
    )
    model.compile(AccumulatingOptimizer(scaled, 2), "mse", auto_scale_loss=False)
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 2
