"""What the replicas of a strategy, and the processes that it joins, tell each other."""

from __future__ import annotations

import tensorflow as tf

from .outputs import Losses
from .slicing import Nest, Share, share_of
from .sums import Known, known_of


def reduce(strategy: tf.distribute.Strategy, sums: Nest, arrived: tf.Variable | None = None) -> Nest:
    """Sum over replicas; every replica gets the result. `arrived` counts the calls, each once its sums are there."""
    if arrived is not None:
        scalar, *_ = tf.nest.flatten(sums)  # the others come with it
        with tf.control_dependencies(tf.nest.flatten(strategy.experimental_local_results(scalar))):
            arrived.assign_add(1)
    return tf.nest.map_structure(lambda value: strategy.reduce("SUM", value, axis=None), sums)


def known_of_all(
    strategy: tf.distribute.Strategy, batch: Nest | Share, loss: Losses, arrived: tf.Variable | None = None
) -> Known:
    """Return what is known of an effective batch.

    The sample weights of a `Share` are summed over those who have read the others, where a loss divides by them.
    """
    known = known_of(batch)
    if not isinstance(batch, Share):
        return known
    if all(getattr(one, "reduction", None) != "mean_with_sample_weight" for one in tf.nest.flatten(loss)):
        return known._replace(weights=None)

    def here() -> tuple[tf.Tensor, ...]:
        weights = known_of(share_of(batch, strategy.num_replicas_in_sync)[0]).weights
        return tuple(weight for weight in tf.nest.flatten(weights) if weight is not None)

    totals = iter(reduce(strategy, strategy.run(here), arrived))
    return known._replace(
        weights=tf.nest.map_structure(lambda weight: None if weight is None else next(totals), known.weights)
    )
