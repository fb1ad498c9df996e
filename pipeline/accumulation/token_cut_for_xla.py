"""Cuts an effective batch of sequences by tokens, in few shapes that XLA compiles.

XLA compiles a step for each shape. So lengths are rounded up to a few given ones, and
each micro-batch begins with the longest examples that remain and is full:

    given     8 4                                    at most 24 tokens
    lengths   9 8 | 8 5 4 | 4 4 3 2 2 1 | 1 1 1
    computed  2×9 | 3 × 8 | 6 × 4       | 3×1        69 positions for 53 tokens

XLA compiles the full micro-batches of the given lengths. It compiles neither those of
longer examples, which come first, nor a last micro-batch that is not full.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from .batch import Nest, examples_in
from .padding import padded_length
from .token_cut import (
    CompiledPart,
    CutCounts,
    TokenCut,
    TokenLimit,
    costs_of,
    tokens_in,
)


def cut_for_xla(parts: Nest, limit: TokenLimit) -> TokenCut:
    """Return the cut of a batch whose full micro-batches have few different shapes.

    All ragged parts of such a micro-batch are padded to the same one of
    `limit.xla_lengths`: the smallest that is not below the lengths of its examples.

    Args:
        parts: `(x, y, sample_weight)` of the batch.
        limit: the largest micro-batch.
    """
    costs = costs_of(parts[0], limit.pad_multiple)
    lengths = _rounded_lengths(parts, limit)
    order = _order(lengths, tf.reduce_sum(costs, axis=1))
    costs = tf.gather(costs, order)
    lengths = tf.gather(lengths, order)

    sequences = costs.shape[1]
    full_sizes = _full_sizes(lengths, sequences, limit)
    starts, ends = _full_micro_batches(full_sizes)
    micro_batches = _MicroBatches(
        lengths=tf.gather(lengths, starts),
        sizes=ends - starts,
        full_sizes=tf.gather(full_sizes, starts),
    )
    is_compiled = micro_batches.are_compiled(limit)
    counts = CutCounts(
        micro_batches=tf.cast(examples_in(ends), tf.int64),
        tokens=tokens_in(parts[0]),
        positions=_positions(micro_batches, is_compiled, costs, ends),
        compiled=_compiled_by_length(micro_batches, is_compiled, limit),
    )
    bounds = tf.concat([[0], ends], 0)
    # In this order: examples that are too long, compiled ones, a last micro-batch.
    too_long = tf.cast(micro_batches.lengths > limit.xla_lengths[-1], tf.int32)
    first = tf.reduce_sum(too_long)
    stop = first + tf.reduce_sum(tf.cast(is_compiled, tf.int32))
    minimum_lengths = tf.where(is_compiled, micro_batches.lengths, 0)
    for_xla = CompiledPart(bounds[first], bounds[stop], minimum_lengths)
    return TokenCut(order, ends, counts, for_xla)


class _MicroBatches(NamedTuple):
    """The micro-batches of a cut, in order; one element for each.

    Attributes:
        lengths: the rounded length of its first example, which is the longest; int64.
        sizes: its number of examples, int32.
        full_sizes: the number of examples that it has if it is full, int32.
    """

    lengths: tf.Tensor
    sizes: tf.Tensor
    full_sizes: tf.Tensor

    def are_compiled(self, limit: TokenLimit) -> tf.Tensor:
        """Return which micro-batches XLA compiles, of bool."""
        is_full = self.sizes == self.full_sizes
        return is_full & (self.lengths <= limit.xla_lengths[-1])


def _rounded_lengths(parts: Nest, limit: TokenLimit) -> tf.Tensor:
    """Return the padded length of each example in a micro-batch that XLA compiles.

    It is at least the length of every ragged part. An example that is longer than all
    of `limit.xla_lengths` has its own padded length. (examples,) of int64.
    """
    lengths_of_parts = []
    for leaf in tf.nest.flatten(parts):
        if isinstance(leaf, tf.RaggedTensor):
            lengths_of_parts.append(tf.cast(leaf.row_lengths(), tf.int64))
    longest = tf.reduce_max(tf.stack(lengths_of_parts), axis=0)
    xla_lengths = tf.constant(limit.xla_lengths, tf.int64)
    index = tf.searchsorted(xla_lengths, longest, "left")
    is_too_long = index == len(limit.xla_lengths)
    index = tf.where(is_too_long, 0, index)
    return tf.where(
        is_too_long,
        padded_length(longest, limit.pad_multiple),
        tf.gather(xla_lengths, index),
    )


def _order(lengths: tf.Tensor, costs: tf.Tensor) -> tf.Tensor:
    """Return the order of the examples: by rounded length, then by cost, descending.

    Sorting by cost puts the shortest examples into the last micro-batch, which is
    padded to the longest example in it. (examples,) of int32.
    """
    by_cost = tf.argsort(costs, direction="DESCENDING", stable=True)
    lengths = tf.gather(lengths, by_cost)
    by_length = tf.argsort(lengths, direction="DESCENDING", stable=True)
    return tf.gather(by_cost, by_length)


def _full_sizes(lengths: tf.Tensor, sequences: int, limit: TokenLimit) -> tf.Tensor:
    """Return, for each example, the size of a full micro-batch that starts with it.

    Args:
        lengths: the rounded lengths of the examples.
        sequences: number of ragged inputs, which are all padded to this length.
        limit: the largest micro-batch.

    Returns:
        (examples,) of int32.
    """
    sizes = tf.maximum(limit.tokens // (sequences * lengths), 1)
    if limit.examples is not None:
        sizes = tf.minimum(sizes, limit.examples)
    return tf.cast(sizes, tf.int32)


def _full_micro_batches(full_sizes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return where micro-batches start and end if all but the last are full."""
    examples = examples_in(full_sizes)

    def body(start: tf.Tensor, starts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return start + full_sizes[start], tf.concat([starts, [start]], 0)

    _, starts = tf.while_loop(
        lambda start, _: start < examples,
        body,
        (tf.constant(0), tf.zeros([0], tf.int32)),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
    )
    # An empty batch has no micro-batch, and no end.
    ends = tf.concat([starts, [examples]], 0)[1:]
    return starts, ends


def _positions(
    micro_batches: _MicroBatches,
    is_compiled: tf.Tensor,
    costs: tf.Tensor,
    ends: tf.Tensor,
) -> tf.Tensor:
    """Return the number of positions that the cut computes, scalar of int64.

    A micro-batch that is not compiled is padded to the longest of its own sequences.

    Args:
        micro_batches: the micro-batches.
        is_compiled: which of them XLA compiles.
        costs: the padded lengths of the sequences, (examples, sequences), in order.
        ends: where the micro-batches end.
    """
    examples = examples_in(costs)
    sequences = costs.shape[1]
    micro_batch_of = tf.searchsorted(ends, tf.range(examples), "right")
    longest = tf.math.unsorted_segment_max(costs, micro_batch_of, examples_in(ends))
    lengths = tf.where(
        is_compiled,
        sequences * micro_batches.lengths,
        tf.reduce_sum(longest, axis=1),
    )
    return tf.reduce_sum(lengths * tf.cast(micro_batches.sizes, tf.int64))


def _compiled_by_length(
    micro_batches: _MicroBatches, is_compiled: tf.Tensor, limit: TokenLimit
) -> tf.Tensor:
    """Return the number of compiled micro-batches of each of the lengths for XLA."""
    lengths = tf.boolean_mask(micro_batches.lengths, is_compiled)
    xla_lengths = tf.constant(limit.xla_lengths, tf.int64)
    has_length = lengths[:, None] == xla_lengths[None, :]
    return tf.reduce_sum(tf.cast(has_length, tf.int64), axis=0)
