"""`AccumulatingOptimizer` in `fit`, in all ways crossed in pairs.

Weights and `iterations` are those of plain Keras.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import AccumulatingOptimizer
from tests.accumulation.windows import flat, in_pairs

pytestmark = pytest.mark.filterwarnings(
    "ignore:Gradients do not exist", "ignore:.*gives all batches of fit the same weight"
)
EPOCHS = 3
BATCH = 4
STEPS = 3  # of a sequence
WAYS = {
    "known_length": (True, False),
    "batches": (4, 3),  # of an epoch; 3 leave a tail at each factor
    "flush": (False, True),
    "factor": (2, 8),  # 8 is above an epoch
    "restored": (False, True),  # after the first epoch
    "frozen": (False, True),  # the first layer, in the second epoch
    "mask": (False, True),  # as many elements are masked in each batch
    "replicas": (1, 2),
}
# Of weights of about 1: 48 sequences in another order, 48 · 3 · 2⁻⁵³ = 2e-14.
CLOSE = 2e-13


class Row(NamedTuple):
    """How a model is trained by `fit`."""

    known_length: bool
    batches: int
    flush: bool
    factor: int
    restored: bool
    frozen: bool
    mask: bool
    replicas: int


ROWS = [Row(**row) for row in in_pairs(WAYS)]


def inner_optimizer() -> keras.optimizers.Optimizer:
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    return keras.optimizers.SGD(rate, momentum=0.9, weight_decay=0.1)


def network(row: Row) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((STEPS, 2))])
    if row.mask:
        model.add(layers.Masking())
    model.add(layers.Dense(3, "tanh"))
    model.add(layers.Dense(1, bias_regularizer=keras.regularizers.L2(0.1)))
    return model


def examples(row: Row) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    count = row.batches * BATCH
    x = numbers.normal(size=(count, STEPS, 2))
    if row.mask:
        x[np.arange(count), np.arange(count) % STEPS] = 0
    return x, numbers.normal(size=(count, STEPS, 1))


def first_is_frozen(row: Row, epoch: int) -> bool:
    return row.frozen and epoch == 1


def strategy_of(row: Row) -> tf.distribute.Strategy:
    if row.replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )


class Training:
    """A model that `fit` trains, and its checkpoint."""

    def __init__(self, row: Row):
        self.row = row
        with strategy_of(row).scope():
            self.model = network(row)
            self.optimizer = AccumulatingOptimizer(inner_optimizer(), row.factor)
            self.optimizer.build(self.model.trainable_variables)
        self.checkpoint = tf.train.Checkpoint(
            model=self.model, optimizer=self.optimizer
        )

    def fit(self, epoch: int) -> None:
        self.first_layer().trainable = not first_is_frozen(self.row, epoch)
        with self.model.distribute_strategy.scope():
            self.model.compile(self.optimizer, keras.losses.MeanSquaredError())
        data = tf.data.Dataset.from_tensor_slices(examples(self.row)).batch(BATCH)
        if not self.row.known_length:
            data = data.filter(lambda *_: True)
        callbacks = []
        if self.row.flush:
            callbacks.append(self.optimizer.flush_at_epoch_end())
        self.model.fit(data, verbose=0, callbacks=callbacks)

    def first_layer(self) -> keras.Layer:
        return self.model.layers[-2]


def windows(row: Row) -> Iterator[list[tuple[int, int]]]:
    """Yield the epochs and indices of the batches of each update."""
    window = []
    for epoch in range(EPOCHS):
        for index in range(row.batches):
            window.append((epoch, index))
            if len(window) == row.factor:
                yield window
                window = []
        if row.flush and window:
            yield window
            window = []


def by_plain_keras(row: Row) -> tuple[np.ndarray, int]:
    """Return the weights and the number of updates by the mean gradient of each update."""
    model = network(row)
    optimizer = inner_optimizer()
    variables = model.trainable_variables
    optimizer.build(variables)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    x, y = examples(row)
    for window in windows(row):
        totals: list[Any] = [None] * len(variables)
        for epoch, index in window:
            part = slice(index * BATCH, (index + 1) * BATCH)
            with tf.GradientTape() as tape:
                outputs = model(x[part], training=True)
                loss = model.compute_loss(x[part], y[part], outputs)
            gradients = tape.gradient(loss, [each.value for each in variables])
            for place, gradient in enumerate(gradients):
                if first_is_frozen(row, epoch) and place < 2:
                    continue  # the kernel and the bias of the first layer
                share = gradient / len(window)
                if totals[place] is None:
                    totals[place] = share
                else:
                    totals[place] += share
        optimizer.apply(totals, variables)
    return flat(model.get_weights()), int(optimizer.iterations.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROWS)))
def test_fit_takes_the_steps_of_plain_keras(float64, tmp_path, index):
    row = ROWS[index]
    expected, updates = by_plain_keras(row)
    training = Training(row)
    for epoch in range(EPOCHS):
        training.fit(epoch)
        if row.restored and epoch == 0:
            path = training.checkpoint.save(tmp_path / "begun")
            training = Training(row)
            training.checkpoint.restore(path).expect_partial()
    assert int(training.optimizer.iterations.numpy()) == updates
    found = flat(training.model.get_weights())
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)
