"""Counts the tokens in an effective batch: sequence positions that are not padding."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipeline.accumulation.internals import Share, parts_of


def counter(
    inputs: Any, padding: Any = None, masked: bool = False
) -> Callable[[Any], tf.Tensor] | None:
    """Return a function that counts the tokens in an effective batch over all workers.

    Args:
        inputs: spec of the inputs of an example. Tokens are counted in the first part
            that is a sequence: a ragged part, a vector of integers with more than one
            element, or a part whose first axis is the only axis without a fixed size.
        padding: the value with which `dataset.pad` fills sequences of unequal length,
            or None if `dataset.pad` is not set. Positions with this value do not count.
        masked: whether the model masks zeros. Zeros in sequences of fixed length then
            do not count.

    Returns:
        A function from a batch to the number of tokens, scalar of int64, or None if no
        part of the inputs is a sequence. The function raises a ValueError for a `Share`
        if some positions do not count, because a worker does not know the positions of
        other workers.
    """
    specs = tf.nest.flatten(inputs)
    positions = [n for n, spec in enumerate(specs) if _is_sequence(spec)]
    if not positions:
        return None
    position = positions[0]
    not_counted = None
    if _varies(specs[position]):
        not_counted = padding
    elif masked:
        not_counted = 0

    def tokens(batch: Any) -> tf.Tensor:
        sequence = tf.nest.flatten(parts_of(batch)[0])[position]
        with tf.device("CPU:0"):  # Count on the CPU, where the batch is.
            if isinstance(sequence, tf.RaggedTensor):
                return tf.reduce_sum(sequence.row_lengths())
            if not_counted is None:
                length = tf.shape(sequence, tf.int64)[1]
                return tf.cast(_examples(batch, sequence), tf.int64) * length
            if isinstance(batch, Share):
                raise ValueError("padding in the shares of other workers is not known")
            return _count_others(sequence, not_counted)

    return tokens


def is_token_sequence(spec: Any) -> bool:
    """Return whether a part of the inputs is a sequence of integers, by its spec."""
    return _is_sequence(spec) and bool(spec.dtype.is_integer)


def _is_sequence(spec: Any) -> bool:
    if isinstance(spec, tf.RaggedTensorSpec):
        return True
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return False
    length, *other_sizes = spec.shape.as_list()
    if None in other_sizes:
        return False
    if length is None:
        return True
    return bool(spec.dtype.is_integer and length > 1 and not other_sizes)


def _varies(spec: Any) -> bool:
    return isinstance(spec, tf.RaggedTensorSpec) or spec.shape[0] is None


def _examples(batch: Any, sequence: tf.Tensor) -> tf.Tensor:
    """Return the number of examples in the effective batch over all workers."""
    if isinstance(batch, Share):
        return batch.examples
    return tf.shape(sequence)[0]


def _count_others(sequence: tf.Tensor, not_counted: Any) -> tf.Tensor:
    """Return the number of steps in which some element differs from `not_counted`."""
    value: Any = ""
    if sequence.dtype != tf.string:
        value = tf.cast(not_counted, sequence.dtype)
    differs = tf.not_equal(sequence, value)
    axes_of_step = [*range(2, sequence.shape.rank)]
    return tf.math.count_nonzero(tf.reduce_any(differs, axis=axes_of_step))
