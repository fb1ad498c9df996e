"""Rows that cross the ways to accumulate in pairs.

Their weights by plain Keras are those of whole windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import AccumulatingOptimizer

PARTS_IN_EPOCH = 6
BATCH = 4
WAYS = {
    "known_length": (True, False),
    "tail": (False, True),  # the last part of an epoch has 3 examples, not 4
    "flush": (False, True),
    "factor": (3, 4, 16),  # 4 leaves 2 parts of an epoch, 16 is above an epoch
    "saved_after": (None, 1, 3, 6, 8),  # parts
    "none_now_and_then": (False, True),
    "mask": (False, True),
    "replicas": (1, 2),
}


class Row(NamedTuple):
    """How gradients are accumulated in a test."""

    known_length: bool
    tail: bool
    flush: bool
    factor: int
    saved_after: int | None
    none_now_and_then: bool
    mask: bool
    replicas: int


def in_pairs(ways: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows that hold each pair of values of two ways at least once."""
    rows = [dict(zip(ways, values, strict=True)) for values in product(*ways.values())]
    missing = set().union(*map(_pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(row: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    return set(combinations(row.items(), 2))


class Part(NamedTuple):
    """One batch of an epoch."""

    x: np.ndarray  # (examples, 3)
    y: np.ndarray  # (examples,)
    counts: np.ndarray  # (examples,), 0 where an example is masked


def parts_of_epoch(row: Row) -> list[Part]:
    numbers = np.random.default_rng(0)
    parts = []
    for index in range(PARTS_IN_EPOCH):
        size = BATCH
        if row.tail and index == PARTS_IN_EPOCH - 1:
            size -= 2
        counts = np.ones(size)
        if row.mask:
            counts[0] = index % 2  # so the parts weigh differently
        x = numbers.normal(size=(size, 3))
        parts.append(Part(x, numbers.normal(size=size), counts))
    return parts


def windows(row: Row, epochs: int) -> Iterator[list[tuple[int, Part]]]:
    """Yield the parts of each update, each with its index in its epoch."""
    window: list[tuple[int, Part]] = []
    for _ in range(epochs):
        for indexed in enumerate(parts_of_epoch(row)):
            window.append(indexed)
            if len(window) == row.factor:
                yield window
                window = []
        if row.flush and window:
            yield window
            window = []


def kernel_is_left_out(row: Row, index: int) -> bool:
    """Return whether the loss of a part does not depend on the kernel."""
    return row.none_now_and_then and index != 1


def variables() -> list[keras.Variable]:
    return [keras.Variable(np.linspace(-1, 1, 3)), keras.Variable(np.ones(()))]


def inner_optimizer() -> keras.optimizers.Optimizer:
    """Return one whose momentum, decay and schedule show a step too many."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    return keras.optimizers.SGD(rate, momentum=0.9, weight_decay=0.1)


def loss_sum(
    values: Sequence[Any], part: Sequence[Any], without_kernel: bool
) -> tf.Tensor:
    """Return the sum over examples that count of squared errors and a regularizer of the bias."""
    kernel, bias = values
    x, y, counts = part
    outputs = bias
    if not without_kernel:
        outputs = outputs + tf.linalg.matvec(x, kernel)
    return tf.reduce_sum(counts * (tf.square(outputs - y) + tf.square(bias)))


def by_plain_keras(row: Row, epochs: int) -> tuple[np.ndarray, int]:
    """Return the weights and the number of updates after one update for each window."""
    made = variables()
    optimizer = inner_optimizer()
    optimizer.build(made)
    for window in windows(row, epochs):
        values = [variable.value for variable in made]
        with tf.GradientTape() as tape:
            sums = []
            for index, part in window:
                sums.append(loss_sum(values, part, kernel_is_left_out(row, index)))
            weight = sum(part.counts.sum() for _, part in window)
            mean = tf.add_n(sums) / weight
        optimizer.apply(tape.gradient(mean, values), made)
    return flat(made), int(optimizer.iterations.numpy())


class Training:
    """The variables and the optimizer of a loop, under a strategy."""

    def __init__(self, row: Row, strategy: tf.distribute.Strategy):
        self.row = row
        self.strategy = strategy
        with strategy.scope():
            self.variables = variables()
            self.optimizer = AccumulatingOptimizer(inner_optimizer(), row.factor)
            self.optimizer.build(self.variables)
        values = [variable.value for variable in self.variables]
        self.checkpoint = tf.train.Checkpoint(
            variables=values, optimizer=self.optimizer
        )

    def traced_step(self, without_kernel: bool) -> Any:
        """Return a step that reads its batch as `fit` does: in the function around it."""

        def add(x: tf.Tensor, y: tf.Tensor, counts: tf.Tensor) -> None:
            replicas = self.strategy.num_replicas_in_sync
            values = [variable.value for variable in self.variables]
            weight = tf.reduce_sum(counts)
            with tf.GradientTape() as tape:
                total = loss_sum(values, (x, y, counts), without_kernel)
                mean = tf.math.divide_no_nan(total, weight) / replicas
            gradients = tape.gradient(mean, values)
            pairs = zip(gradients, self.variables, strict=True)
            self.optimizer.apply_gradients(pairs, weight)

        def add_share(*part: tf.Tensor) -> None:
            context = tf.distribute.get_replica_context()
            first = context.replica_id_in_sync_group
            shares = [leaf[first :: context.num_replicas_in_sync] for leaf in part]
            add(*shares)

        def add_part(*part: tf.Tensor) -> None:
            self.strategy.run(add_share, part)

        add_traced = tf.function(add_part, autograph=False)
        return tf.function(lambda iterator: add_traced(*next(iterator)))


def by_parts(
    row: Row, epochs: int, strategy: tf.distribute.Strategy, folder: Any
) -> tuple[np.ndarray, int]:
    """Return the weights and `iterations` after a loop over the parts."""
    training = Training(row, strategy)
    steps = {}
    done = 0
    for _ in range(epochs):
        for iterator, index in _epoch(row):
            left_out = kernel_is_left_out(row, index)
            if left_out not in steps:
                steps[left_out] = training.traced_step(left_out)
            try:
                steps[left_out](iterator)
            except tf.errors.OutOfRangeError:
                break
            done += 1
            if done == row.saved_after:
                path = training.checkpoint.save(folder / "begun")
                training = Training(row, strategy)
                training.checkpoint.restore(path).assert_consumed()
                steps = {}
        if row.flush:
            training.optimizer.flush()
    return flat(training.variables), int(training.optimizer.iterations.numpy())


def _epoch(row: Row) -> Iterator[tuple[Any, int]]:
    """Yield an iterator and the index of the part that it gives next.

    Data of an unknown length is asked once more than it has parts, as in `fit`.
    """
    parts = parts_of_epoch(row)
    specs = tuple(
        tf.TensorSpec([None, *leaf.shape[1:]], tf.float64) for leaf in parts[0]
    )
    data = tf.data.Dataset.from_generator(
        lambda: map(tuple, parts), output_signature=specs
    )
    iterator = iter(data)
    asked = len(parts)
    if not row.known_length:
        asked += 1
    for index in range(asked):
        yield iterator, index


def flat(values: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.ravel(value) for value in values])
