"""Embeddings: their gradients stay rows while they are summed.

The update equals that of the dense large batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import Update, accumulate_gradients, internals, micro_batches
from pipeline.accumulation.accumulate import (
    BatchContext,
    MicroBatchSettings,
    accumulate_share,
)
from tests.accumulation import reference
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

ROWS = 30
WIDTH = 4
LENGTH = 5
EXAMPLES = 24


def optimizer_names() -> list[str]:
    """Return the names of Keras' optimizers, without those that wrap others."""
    names = []
    for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass):
        if issubclass(cls, keras.optimizers.Optimizer):
            names.append(name)
    for name in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer"):
        names.remove(name)
    return names


OPTIONS = {
    "SGD": {"momentum": 0.9, "global_clipnorm": 0.01},
    "Adam": {"clipnorm": 0.01, "weight_decay": 0.01},
    "RMSprop": {"clipvalue": 0.01, "momentum": 0.5},
    "Nadam": {"use_ema": True, "ema_momentum": 0.9},
    "Adamax": {"loss_scale_factor": 8.0},
}
pytestmark = pytest.mark.usefixtures("precision")


def build(*, tied: bool = False) -> keras.Model:
    """Return a model with an embedding.

    A tied one looks each token up twice, and takes the table as a matrix once more.
    """
    keras.utils.set_random_seed(0)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedding = keras.layers.Embedding(ROWS, WIDTH)
    hidden = embedding(inputs)
    if not tied:
        outputs = keras.layers.Dense(3)(keras.layers.Flatten()(hidden))
        return keras.Model(inputs, outputs)

    hidden = keras.layers.Concatenate()([hidden, embedding(inputs[:, ::-1])])
    hidden = keras.layers.Dense(WIDTH)(keras.layers.Flatten()(hidden))
    by_table = keras.layers.Lambda(
        lambda x: x @ keras.ops.transpose(embedding.embeddings)
    )
    return keras.Model(inputs, by_table(hidden))


def batches() -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return batches whose examples look a few rows up, many of them more than once."""
    random = np.random.default_rng(1)
    pairs = []
    for _ in range(3):
        x = tf.constant(random.integers(0, 9, (EXAMPLES, LENGTH)), tf.int32)
        y = tf.constant(random.integers(0, 3, EXAMPLES))
        pairs.append((x, y))
    return pairs


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer_for(
    name: str, model: keras.Model, options: Mapping[str, Any]
) -> keras.optimizers.Optimizer:
    optimizer = getattr(keras.optimizers, name)(learning_rate=0.1, **options)
    optimizer.build(model.trainable_variables)
    return optimizer


def large_batch(
    name: str,
    model: keras.Model,
    *,
    dense: bool,
    options: Mapping[str, Any] | None = None,
) -> list[np.ndarray]:
    """Return the weights after training on whole effective batches.

    Gradients are applied as the tape has them, or as dense tensors. The options of the
    optimizer are those of `OPTIONS` by default.
    """
    if options is None:
        options = OPTIONS.get(name, {})
    optimizer = optimizer_for(name, model, options)
    cross_entropy = loss()
    scale = optimizer.loss_scale_factor or 1
    for x, y in batches():
        with tf.GradientTape() as tape:
            value = cross_entropy(y, model(x, training=True)) * scale
        gradients = reference.gradients_of(tape, value, model)
        if dense:
            gradients = reference.dense(gradients)
        optimizer.apply(gradients, model.trainable_variables)
    return model.get_weights()


def accumulated(
    name: str,
    build: Callable[[], keras.Model],
    micro_batch_size: int,
    devices: int = 1,
    **options: Any,
) -> list[np.ndarray]:
    """Return the weights after updates in micro-batches."""
    strategy = strategy_on(devices)
    with strategy.scope():
        model = build()
        optimizer = optimizer_for(name, model, OPTIONS.get(name, {}))
    update = Update(
        model,
        loss(),
        optimizer,
        micro_batch_size,
        noise_every=1,
        strategy=strategy,
        **options,
    )
    step = tf.function(update, autograph=False)
    for batch in batches():
        step(batch)
    return model.get_weights()


def deviation(weights: list[np.ndarray], others: list[np.ndarray]) -> float:
    """Return the largest difference."""
    pairs = zip(weights, others, strict=True)
    return max(float(np.abs(value - other).max()) for value, other in pairs)


# Of the ways that an optimizer may treat rows: clipped with all others, and with
# moments.
QUICK = ("SGD", "Adam")


@pytest.mark.parametrize("name", mostly_slow(optimizer_names(), QUICK))
def test_every_optimizer_takes_the_step_of_the_dense_large_batch(name):
    expected = large_batch(name, build(), dense=True)
    # Rounding of 1e-16, divided by a root of a second moment that may be 1e-3 of the
    # gradient.
    assert deviation(accumulated(name, build, 7), expected) < 1e-12


def distance_of_keras_step(name: str, **options: float) -> float:
    """Return how far Keras' steps with rows end from those with dense gradients."""
    of_rows = large_batch(name, build(), dense=False, options=options)
    expected = large_batch(name, build(), dense=True, options=options)
    return deviation(of_rows, expected)


@pytest.mark.parametrize(
    ("name", "smallest", "largest"),
    mostly_slow(
        [
            ("SGD", 0, 1e-12),
            ("Lion", 0, 1e-12),
            ("Adadelta", 1e-4, 1e-3),
            ("Adam", 0.1, 1),
            ("RMSprop", 0.1, 1),
        ],
        [("SGD", 0, 1e-12), ("Adam", 0.1, 1)],
    ),
)
def test_keras_own_step_differs_if_it_squares_gradients(name, smallest, largest):
    """The negative control.

    For a row that was looked up twice, Keras squares each gradient, not their sum.
    """
    assert smallest <= distance_of_keras_step(name) <= largest


@pytest.mark.parametrize(
    "option",
    mostly_slow(["clipnorm", "global_clipnorm", "clipvalue"], ["global_clipnorm"]),
)
def test_keras_clips_the_gradients_of_a_row_separately(option):
    """The negative control, for an optimizer that does not square gradients."""
    assert distance_of_keras_step("SGD", **{option: 0.01}) > 1e-6


@pytest.mark.slow
def test_a_tied_table_xla_and_replicas():
    dense = large_batch("Adam", build(tied=True), dense=True)
    assert deviation(accumulated("Adam", partial(build, tied=True), 5), dense) < 1e-12
    dense = large_batch("Adam", build(), dense=True)
    assert deviation(accumulated("Adam", build, 5, jit_compile=True), dense) < 1e-12
    assert deviation(accumulated("Adam", build, 5, devices=2), dense) < 1e-12


def test_the_sum_has_each_row_once():
    """It is never larger than the table, however many tokens a batch has."""
    model = build()
    x, y = batches()[0]

    def gradients() -> list:
        return accumulate_gradients(model, loss(), (x, y), 5).gradients()

    of_table, _, _ = tf.function(gradients, autograph=False)()
    assert isinstance(of_table, tf.IndexedSlices)
    rows = of_table.indices.numpy().tolist()
    assert sorted(rows) == sorted(set(x.numpy().ravel()))
    assert of_table.values.shape == (len(rows), WIDTH)

    of_nothing = accumulate_gradients(model, loss(), (x[:0], y[:0]), 5).gradients()
    assert of_nothing[0].indices.shape == (0,)


def traced_sum(
    micro_batch_size: int, *, dense_rows: bool
) -> tf.types.experimental.ConcreteFunction:
    """Return the function that sums the gradient of a table, compiled by XLA."""
    model = build()
    settings = MicroBatchSettings(
        model,
        internals.Objective(loss()),
        micro_batch_size,
        jit_compile=True,
        dense_rows=dense_rows,
    )

    def gradient_of_table(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        context = BatchContext(internals.batch_totals((x, y)))
        sums = accumulate_share(settings, (x, y), context)
        return tf.convert_to_tensor(sums.gradients()[0])

    signature = [tf.TensorSpec([None, LENGTH], tf.int32), tf.TensorSpec([None])]
    function = tf.function(gradient_of_table, signature, autograph=False)
    return function.get_concrete_function()


def counts_rows(function: tf.types.experimental.ConcreteFunction) -> bool:
    """Return whether a loop of the function asks for the number of rows."""
    operations = set()
    for inner in function.graph.as_graph_def().library.function:
        for node in inner.node_def:
            operations.add(node.op)
    assert "StatefulPartitionedCall" in operations  # the compiled step
    return "Unique" in operations


# With a short micro-batch, and without.
@pytest.mark.parametrize("micro_batch_size", mostly_slow([5, 6], [5]))
def test_a_dense_sum_is_that_of_the_rows_and_waits_for_no_count(micro_batch_size):
    """On a GPU the host would wait for the number of rows after each micro-batch."""
    x, y = batches()[0]
    labels = tf.cast(y, tf.float32)
    of_rows = traced_sum(micro_batch_size, dense_rows=False)
    dense = traced_sum(micro_batch_size, dense_rows=True)
    difference = dense(x, labels) - of_rows(x, labels)
    # Sums of at most 24 × 5 gradients below 1, in another order.
    assert np.abs(difference).max() < 1e-14
    assert not counts_rows(dense)

    # The control: the sum of rows.
    assert counts_rows(of_rows)
    assert np.abs(dense(x[1:], labels[1:]) - of_rows(x, labels)).max() > 1e-4


def test_a_large_table_is_not_summed_as_a_dense_tensor(monkeypatch):
    monkeypatch.setattr(micro_batches, "MOST_DENSE_BYTES", ROWS * WIDTH * 8 - 1)
    assert counts_rows(traced_sum(5, dense_rows=True))
