"""A `GradientAccumulator` in loops that apply the average themselves."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import GradientAccumulator
from tests.accumulation.accumulating import per_replica, strategy_of


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_accumulator_averages_over_parts_and_replicas(float64, replicas):
    strategy = strategy_of(replicas)
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(2)),
            keras.Variable(np.zeros(1)),
            keras.Variable(np.zeros(2, "float16")),
        ]
        accumulator = GradientAccumulator(variables)

    def add(rows: tf.Tensor) -> None:
        mean = tf.reduce_mean(rows, 0)
        accumulator.add([mean, None, tf.cast(mean, "float16")], weight=len(rows))

    def add_part(part: np.ndarray) -> None:
        shares = [part]
        if replicas == 2:
            shares = np.split(part, [2])
        share = per_replica(strategy, lambda replica: tf.constant(shares[replica]))
        strategy.run(add, (share,))

    rows = np.random.default_rng(0).normal(size=(2 * 14, 2))
    for update in (rows[:14], rows[14:]):
        add_part(update[:6])
        add_part(update[6:])
        first, none, half = accumulator.average()
        np.testing.assert_allclose(first, update.mean(0), rtol=1e-14)
        assert none is None
        assert half.dtype == "float32"
        accumulator.reset()
    assert accumulator.average()[0].numpy().tolist() == [0.0, 0.0]
    with pytest.raises(
        ValueError,
        match=r"there must be 3 gradients, one per variable\. Received: 1",
    ):
        accumulator.add([tf.zeros(2)])


def test_an_empty_share_counts_for_nothing():
    accumulator = GradientAccumulator([keras.Variable(np.zeros(2))])
    accumulator.add([tf.constant([1.0, 2.0])], weight=3)
    accumulator.add([tf.constant([np.nan, np.inf])], weight=0)
    assert accumulator.average()[0].numpy().tolist() == [1.0, 2.0]
