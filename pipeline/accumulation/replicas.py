"""What the replicas of a strategy, and the processes that it joins, tell each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from .batch import Nest, Share, examples_in, parts_of, share_of
from .objective import Losses


class BatchTotals(NamedTuple):
    """What is known of a whole effective batch before any forward pass.

    Attributes:
        examples: their number, scalar.
        weights: Σ wᵢ, scalar, of the sample weights of each output, as `fit` takes them; None where there are none.
    """

    examples: tf.Tensor
    weights: Nest


def batch_totals(batch: Nest | Share) -> BatchTotals:
    """Return the totals of an effective batch, computed on the host, so that no device receives all of it.

    The weights of a `Share` are of its own examples alone.
    """
    x, _, weights = parts_of(batch)

    def total(leaf: Any) -> tf.Tensor | None:
        if leaf is None:
            return None
        if not leaf.dtype.is_floating:
            return tf.reduce_sum(tf.cast(leaf, tf.float64))
        return tf.reduce_sum(tf.cast(leaf, tf.float32) if leaf.dtype.size < 4 else leaf)

    with tf.device("CPU:0"):
        examples = batch.examples if isinstance(batch, Share) else examples_in(x)
        return BatchTotals(examples, tf.nest.map_structure(total, weights))


def global_batch_totals(
    strategy: tf.distribute.Strategy, batch: Nest | Share, loss: Losses, reductions_ready: tf.Variable | None = None
) -> BatchTotals:
    """Return the totals of an effective batch.

    The sample weights of a `Share` are summed over the processes that read the others, where a loss divides by them.
    """
    totals = batch_totals(batch)
    if not isinstance(batch, Share):
        return totals
    if all(getattr(each, "reduction", None) != "mean_with_sample_weight" for each in tf.nest.flatten(loss)):
        return totals._replace(weights=None)

    def of_replica() -> tuple[tf.Tensor, ...]:
        weights = batch_totals(share_of(batch, strategy.num_replicas_in_sync)[0]).weights
        return tuple(weight for weight in tf.nest.flatten(weights) if weight is not None)

    sums = iter(reduce(strategy, strategy.run(of_replica), reductions_ready))
    return totals._replace(
        weights=tf.nest.map_structure(lambda weight: None if weight is None else next(sums), totals.weights)
    )


def reduce(strategy: tf.distribute.Strategy, sums: Nest, reductions_ready: tf.Variable | None = None) -> Nest:
    """Sum over replicas; every replica gets the result.

    `reductions_ready` counts the calls, each one once this process has its sums.
    """
    if reductions_ready is not None:
        scalar, *_ = tf.nest.flatten(sums)  # the others come with it
        with tf.control_dependencies(tf.nest.flatten(strategy.experimental_local_results(scalar))):
            reductions_ready.assign_add(1)
    return tf.nest.map_structure(lambda value: strategy.reduce("SUM", value, axis=None), sums)
