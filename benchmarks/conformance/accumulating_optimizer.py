"""Ours around an optimizer: batches of one micro-batch, in `fit` and in a loop that says how much each one counts."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from benchmarks.conformance import in_keras
from benchmarks.conformance.cases import (
    FACTOR,
    IGNORED,
    MICRO,
    Arrays,
    Case,
    effective_batches,
    examples,
)
from benchmarks.conformance.cases import micro_batches as cut
from benchmarks.conformance.outcome import Outcome, Way, by_weights
from pipeline.accumulation import AccumulatingOptimizer

prepare = in_keras.prepare


def in_fit(case: Case) -> Outcome:
    if case.logged:
        return Outcome(note="an optimizer logs nothing")
    with in_keras.strategy(case).scope():
        model = in_keras.network(case)
        model.compile(
            AccumulatingOptimizer(in_keras.optimizer(case), FACTOR), in_keras.loss(case)
        )
    x, y, *weight = examples(case)
    model.fit(
        x,
        y,
        sample_weight=weight[0] if weight else None,
        batch_size=MICRO,
        epochs=case.epochs,
        shuffle=False,  # the order of the large batches
        callbacks=[model.optimizer.flush_at_epoch_end()],
        verbose=0,
    )
    return by_weights(model.get_weights(), _large(case))


def in_a_loop(case: Case) -> Outcome:
    if case.logged:
        return Outcome(note="an optimizer logs nothing")
    strategy, value_of = in_keras.strategy(case), in_keras.loss(case)
    with strategy.scope():
        model = in_keras.network(case)
        optimizer = AccumulatingOptimizer(in_keras.optimizer(case), FACTOR)
        optimizer.build(model.trainable_variables)

    def part(x: tf.Tensor, y: tf.Tensor, *weight: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = (
                value_of(y, model(x, training=True), *weight)
                + sum(model.losses) / case.devices
            )
        gradients = tape.gradient(
            value, [variable.value for variable in model.trainable_variables]
        )
        counts = (
            tf.reduce_sum(weight[0])
            if case.divided_by == "weights"
            else tf.math.count_nonzero(y != IGNORED)
        )
        optimizer.apply(gradients, model.trainable_variables, weight=counts)

    step = tf.function(
        lambda parts: strategy.run(part, parts), autograph=False, reduce_retracing=True
    )
    per_epoch = -(-sum(case.sizes) // MICRO)
    for number, batch in enumerate(cut(case), 1):
        step(_shares(strategy, batch))
        if number % per_epoch == 0:
            optimizer.flush()
    return by_weights(model.get_weights(), _large(case))


def _large(case: Case) -> Arrays:
    return in_keras.large(case, list(effective_batches(case)))[0]


def _shares(strategy: tf.distribute.Strategy, batch: Arrays) -> tuple:
    """Return each array of a batch with a piece of it on each replica."""
    replicas = strategy.num_replicas_in_sync

    def share(context: tf.distribute.ValueContext) -> tuple:
        return tuple(
            tf.constant(
                np.array_split(each, replicas)[context.replica_id_in_sync_group]
            )
            for each in batch
        )

    return strategy.experimental_distribute_values_from_function(share)


WAYS: dict[str, Way] = {"in_fit": in_fit, "in_a_loop": in_a_loop}
