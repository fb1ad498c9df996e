"""The tokens of an effective batch: the positions of its sequences that are no padding."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipeline.accumulation.internals import Share, parts_of


def counter(
    inputs: Any, padding: Any = None, masked: bool = False
) -> Callable[[Any], tf.Tensor] | None:
    """Return what counts the tokens of all workers' effective batch; None if examples have no sequence axis.

    The first part of the `inputs`, the spec of an example's, whose first axis alone has no fixed size or that is a
    vector of integers has it. What `dataset.pad` fills with `padding` does not count, nor zeros if the model has
    `masked` them.
    """
    leaves = tf.nest.flatten(inputs)
    place = next(
        (place for place, leaf in enumerate(leaves) if _is_sequence(leaf)), None
    )
    if place is None:
        return None
    varies = (
        isinstance(leaves[place], tf.RaggedTensorSpec) or leaves[place].shape[0] is None
    )
    value = padding if varies else 0 if masked else None

    def tokens(batch: Any) -> tf.Tensor:
        leaf = tf.nest.flatten(parts_of(batch)[0])[place]
        with tf.device("CPU:0"):  # where the batch is
            if isinstance(leaf, tf.RaggedTensor):
                return tf.reduce_sum(leaf.row_lengths())
            if value is None:  # the examples of a share are those of one worker
                examples = (
                    batch.examples if isinstance(batch, Share) else tf.shape(leaf)[0]
                )
                return tf.cast(examples, tf.int64) * tf.shape(leaf, tf.int64)[1]
            counts = tf.not_equal(
                leaf, "" if leaf.dtype == tf.string else tf.cast(value, leaf.dtype)
            )
            return tf.math.count_nonzero(
                tf.reduce_any(counts, axis=[*range(2, leaf.shape.rank)])
            )

    return tokens


def _is_sequence(spec: Any) -> bool:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        first, *rest = spec.shape.as_list()
        return None not in rest and (
            first is None or (spec.dtype.is_integer and first > 1 and not rest)
        )
    return isinstance(spec, tf.RaggedTensorSpec)
