"""Embeddings: their gradients stay rows while they are summed, and the update equals that of the dense large batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import Update, accumulate_gradients
from tests.parameters import mostly_slow

ROWS, WIDTH, LENGTH, EXAMPLES = 30, 4, 5, 24
OPTIMIZERS = [
    name
    for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass)
    if issubclass(cls, keras.optimizers.Optimizer)
    and name
    not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")  # which wrap others
]
OPTIONS = {
    "SGD": {"momentum": 0.9, "global_clipnorm": 0.01},
    "Adam": {"clipnorm": 0.01, "weight_decay": 0.01},
    "RMSprop": {"clipvalue": 0.01, "momentum": 0.5},
    "Nadam": {"use_ema": True, "ema_momentum": 0.9},
    "Adamax": {"loss_scale_factor": 8.0},
}
pytestmark = pytest.mark.usefixtures("precision")


def build(*, tied: bool = False) -> keras.Model:
    keras.utils.set_random_seed(0)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedding = keras.layers.Embedding(ROWS, WIDTH)
    hidden = embedding(inputs)
    if tied:  # looked up twice, and once more as a matrix
        hidden = keras.layers.Concatenate()([hidden, embedding(inputs[:, ::-1])])
        hidden = keras.layers.Dense(WIDTH)(keras.layers.Flatten()(hidden))
        return keras.Model(
            inputs,
            keras.layers.Lambda(
                lambda x: x @ keras.ops.transpose(embedding.embeddings)
            )(hidden),
        )
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(hidden)))


def batches(count: int = 3) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Each example looks a few rows up, many of them more than once."""
    numbers = np.random.default_rng(1)
    made = [
        (numbers.integers(0, 9, (EXAMPLES, LENGTH)), numbers.integers(0, 3, EXAMPLES))
        for _ in range(count)
    ]
    return [(tf.constant(x, tf.int32), tf.constant(y)) for x, y in made]


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer_for(name: str, model: keras.Model) -> keras.optimizers.Optimizer:
    made = getattr(keras.optimizers, name)(learning_rate=0.1, **OPTIONS.get(name, {}))
    made.build(model.trainable_variables)
    return made


def large_batch(name: str, model: keras.Model, *, dense: bool) -> list[np.ndarray]:
    """Train on whole effective batches, with gradients as the tape gives them or as dense tensors."""
    optimizer, cross_entropy = optimizer_for(name, model), loss()
    for x, y in batches():
        with tf.GradientTape() as tape:
            value = cross_entropy(y, model(x, training=True)) * (
                optimizer.loss_scale_factor or 1
            )
        gradients = tape.gradient(
            value, [variable.value for variable in model.trainable_variables]
        )
        optimizer.apply(
            [tf.convert_to_tensor(each) if dense else each for each in gradients],
            model.trainable_variables,
        )
    return model.get_weights()


def accumulated(
    name: str, build: Callable[[], keras.Model], micro_batch_size: int, **options: Any
) -> list[np.ndarray]:
    with options.get("strategy", tf.distribute.get_strategy()).scope():
        model = build()
        optimizer = optimizer_for(name, model)
    update = Update(
        model, loss(), optimizer, micro_batch_size, noise_every=1, **options
    )
    step = tf.function(update, autograph=False)
    for batch in batches():
        step(batch)
    return model.get_weights()


def deviation(ones: list[np.ndarray], others: list[np.ndarray]) -> float:
    return max(
        float(np.abs(one - other).max())
        for one, other in zip(ones, others, strict=True)
    )


# Of each way that an optimizer may treat rows: its own state, clipped, averaged, in matrices, and without moments.
QUICK = ("SGD", "Adam", "RMSprop", "Nadam", "Adafactor", "Muon", "ScheduleFreeAdamW")


@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, QUICK))
def test_every_optimizer_takes_the_step_of_the_dense_large_batch(name):
    # Rounding of 1e-16, divided by a root of a second moment that may be 1e-3 of the gradient.
    assert (
        deviation(accumulated(name, build, 7), large_batch(name, build(), dense=True))
        < 1e-12
    )


def test_what_keras_itself_makes_of_rows_that_were_looked_up_twice_is_another_step():
    """The negative control: its optimizers take the square of each of a row's gradients, not of their sum."""
    assert (
        deviation(
            large_batch("Adam", build(), dense=False),
            large_batch("Adam", build(), dense=True),
        )
        > 1e-3
    )
    assert (
        deviation(
            large_batch("SGD", build(), dense=False),
            large_batch("SGD", build(), dense=True),
        )
        < 1e-2
    )


@pytest.mark.slow
def test_a_tied_table_xla_and_replicas():
    dense = large_batch("Adam", build(tied=True), dense=True)
    assert deviation(accumulated("Adam", partial(build, tied=True), 5), dense) < 1e-12
    dense = large_batch("Adam", build(), dense=True)
    assert deviation(accumulated("Adam", build, 5, jit_compile=True), dense) < 1e-12
    strategy = tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
    assert deviation(accumulated("Adam", build, 5, strategy=strategy), dense) < 1e-12


def test_the_sum_has_each_row_once():
    """So it is never larger than the table, however many tokens an effective batch has."""
    model = build()
    (x, y), *_ = batches()
    found, _, _ = tf.function(
        lambda: accumulate_gradients(model, loss(), (x, y), 5).gradients(),
        autograph=False,
    )()
    assert isinstance(found, tf.IndexedSlices)
    rows = found.indices.numpy().tolist()
    assert sorted(rows) == sorted(set(x.numpy().ravel()))
    assert found.values.shape == (len(rows), WIDTH)
    nothing = accumulate_gradients(model, loss(), (x[:0], y[:0]), 5).gradients()[0]
    assert nothing.indices.shape == (0,)
