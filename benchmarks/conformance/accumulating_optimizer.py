"""Ours around an optimizer, in `fit` and in a loop, on batches of one micro-batch.

The loop passes how much each micro-batch counts.
"""

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
    micro_batches,
)
from benchmarks.conformance.outcome import Outcome, Way, by_weights
from pipeline.accumulation import AccumulatingOptimizer

prepare = in_keras.prepare
NO_LOG = Outcome(note="an optimizer logs nothing")


def in_fit(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG
    with in_keras.strategy(case).scope():
        model = in_keras.network(case)
        optimizer = AccumulatingOptimizer(in_keras.optimizer(case), FACTOR)
        model.compile(optimizer, in_keras.loss(case))
    flush = model.optimizer.flush_at_epoch_end()
    in_keras.fit(model, examples(case), MICRO, case.epochs, [flush])
    return by_weights(model.get_weights(), _large_batch_weights(case))


def in_a_loop(case: Case) -> Outcome:
    if case.logged:
        return NO_LOG
    strategy = in_keras.strategy(case)
    loss = in_keras.loss(case)
    with strategy.scope():
        model = in_keras.network(case)
        optimizer = AccumulatingOptimizer(in_keras.optimizer(case), FACTOR)
        optimizer.build(model.trainable_variables)

    def replica_step(x: tf.Tensor, y: tf.Tensor, *weights: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True), *weights)
            value += sum(model.losses) / case.devices
        variables = [variable.value for variable in model.trainable_variables]
        gradients = tape.gradient(value, variables)
        if case.divided_by == "weights":
            counts = tf.reduce_sum(weights[0])
        else:
            counts = tf.math.count_nonzero(y != IGNORED)
        optimizer.apply(gradients, model.trainable_variables, weight=counts)

    @tf.function(autograph=False, reduce_retracing=True)
    def step(parts: tuple) -> None:
        strategy.run(replica_step, parts)

    batches_per_epoch = -(-sum(case.sizes) // MICRO)
    for number, batch in enumerate(micro_batches(case), 1):
        step(_shared(strategy, batch))
        if number % batches_per_epoch == 0:
            optimizer.flush()
    return by_weights(model.get_weights(), _large_batch_weights(case))


def _large_batch_weights(case: Case) -> Arrays:
    return in_keras.large(case, list(effective_batches(case))).weights


def _shared(strategy: tf.distribute.Strategy, batch: Arrays) -> tuple:
    """Return each array of a batch with a piece of it on each replica."""
    replicas = strategy.num_replicas_in_sync
    pieces = [np.array_split(array, replicas) for array in batch]

    def piece_of(context: tf.distribute.ValueContext) -> tuple:
        replica = context.replica_id_in_sync_group
        return tuple(tf.constant(split[replica]) for split in pieces)

    return strategy.experimental_distribute_values_from_function(piece_of)


WAYS: dict[str, Way] = {"in_fit": in_fit, "in_a_loop": in_a_loop}
