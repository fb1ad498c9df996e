"""Cuts an effective batch of sequences by tokens, so that little padding is computed.

The examples are sorted by length, the longest first. Then they are cut into as few
micro-batches as the limit allows. Among these cuts, one with the least padding is used:

    lengths   9 8 8 | 5 4 4 4 3 | 2 2 1 1 1 1        at most 27 tokens
    computed  3 × 9 | 5 × 5     | 6 × 2              64 positions for 53 tokens

An effective batch is a sum over its examples, so its update does not depend on their
order. Everything here is computed on the host.

For the cut whose micro-batches XLA compiles, see `token_cut_for_xla`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from .batch import ABSENT, DealtBatch, Nest, Share, examples_in, parts_of
from .padding import padded_length, sequences_in

# More than the positions of any effective batch: in the sums below, one micro-batch
# fewer is worth any padding.
_MICRO_BATCH = 2**40

# XLA compiles once for each length, which takes seconds to minutes.
MOST_XLA_LENGTHS = 32


@dataclass(frozen=True)
class TokenLimit:
    """The largest micro-batch.

    Attributes:
        tokens: maximum number of positions, padding included. A micro-batch of one
            example may have more.
        examples: maximum number of examples, or None for any number.
        pad_multiple: micro-batches are padded to a multiple of this length.
        xla_lengths: the lengths of the micro-batches that XLA compiles, in increasing
            order; empty if it compiles none.
    """

    tokens: int
    examples: int | None = None
    pad_multiple: int = 1
    xla_lengths: tuple[int, ...] = ()


class CutCounts(NamedTuple):
    """The counts of a cut by tokens, over all replicas; scalars except `compiled`.

    Attributes:
        micro_batches: number of micro-batches.
        tokens: number of positions that are not padding, in all ragged inputs.
        positions: number of positions that are computed, in all ragged inputs.
        compiled: number of micro-batches that XLA compiles, for each of the lengths in
            `TokenLimit.xla_lengths`, a vector; `ABSENT` in a cut that is not for XLA.
    """

    micro_batches: tf.Tensor
    tokens: tf.Tensor
    positions: tf.Tensor
    compiled: tf.Tensor | tuple[()] = ABSENT


class TokenCut(NamedTuple):
    """A cut of a batch into micro-batches.

    Attributes:
        order: the indices of the examples after sorting, (examples,) of int32.
        ends: where each micro-batch ends in this order, exclusive; int32.
        counts: what the cut computes, of int64.
        for_xla: what XLA compiles, or None in a cut that is not for XLA.
    """

    order: tf.Tensor
    ends: tf.Tensor
    counts: CutCounts
    for_xla: CompiledPart | None = None


class CompiledPart(NamedTuple):
    """The part of a cut that XLA compiles.

    Attributes:
        begin: where the first compiled micro-batch begins in the cut's order, scalar
            of int32.
        end: where the last one ends, exclusive.
        minimum_lengths: the least length to which each micro-batch of the cut is
            padded, int64; 0 for those that are not compiled.
    """

    begin: tf.Tensor
    end: tf.Tensor
    minimum_lengths: tf.Tensor


def micro_batch_limit(
    micro_batch_size: int | None,
    micro_batch_tokens: int | None,
    pad_multiple: int,
    xla_lengths: Sequence[int] = (),
) -> int | TokenLimit:
    """Return the limit of a micro-batch: a number of examples, or one of tokens.

    Raises:
        ValueError: an argument is not a positive integer, neither the size nor the
            tokens are given, `xla_lengths` do not increase or are not multiples of
            `pad_multiple`, or `xla_lengths` or `pad_multiple` has no effect.
    """
    if not isinstance(xla_lengths, Sequence | np.ndarray):
        rule = "xla_lengths must be a sequence of whole numbers, () for none"
        raise ValueError(f"{rule}. Received: {xla_lengths!r}")
    if micro_batch_size is not None:
        check_positive("micro_batch_size", micro_batch_size)
    if micro_batch_tokens is None:
        if micro_batch_size is None:
            rule = "micro_batch_size or micro_batch_tokens must be given"
            raise ValueError(f"{rule}. Received: neither")
        if pad_multiple != 1:
            rule = "pad_multiple must be 1 without micro_batch_tokens"
            raise ValueError(f"{rule}. Received: {pad_multiple!r}")
        if len(xla_lengths):
            rule = "xla_lengths must be empty without micro_batch_tokens"
            raise ValueError(f"{rule}. Received: {xla_lengths!r}")
        return micro_batch_size
    check_positive("micro_batch_tokens", micro_batch_tokens)
    check_positive("pad_multiple", pad_multiple)
    lengths = _checked_lengths(xla_lengths, pad_multiple)
    return TokenLimit(micro_batch_tokens, micro_batch_size, pad_multiple, lengths)


def _checked_lengths(xla_lengths: Sequence[int], pad_multiple: int) -> tuple[int, ...]:
    """Return the lengths for XLA as a tuple, or raise a ValueError."""
    for length in xla_lengths:
        check_positive("each of xla_lengths", length)
    lengths = tuple(int(length) for length in xla_lengths)
    rule = ""
    if len(lengths) > MOST_XLA_LENGTHS:
        rule = f"xla_lengths must have at most {MOST_XLA_LENGTHS} lengths"
    elif list(lengths) != sorted(set(lengths)):
        rule = "xla_lengths must increase"
    elif any(length % pad_multiple for length in lengths):
        rule = f"xla_lengths must be multiples of pad_multiple, {pad_multiple}"
    if rule:
        raise ValueError(f"{rule}. Received: {xla_lengths!r}")
    return lengths


def check_lengths_for_xla(limit: TokenLimit, jit_compile: bool | str) -> None:
    """Reject a cut by tokens that has no lengths for XLA, if XLA must compile.

    Raises:
        ValueError: `jit_compile` is True and there are no lengths. With "auto", XLA
            compiles nothing then.
    """
    if jit_compile is True and not limit.xla_lengths:
        rule = (
            'jit_compile must be False or "auto" with micro_batch_tokens but without '
            "xla_lengths, because XLA would compile once for each length"
        )
        remedy = "Give xla_lengths, such as choose_xla_lengths(x.row_lengths().numpy())"
        raise ValueError(f"{rule}. {remedy}. Received: True")


def check_positive(name: str, value: Any) -> None:
    """Reject a value that is not an integer of at least 1."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < 1:
        rule = f"{name} must be a whole number of at least 1"
        raise ValueError(f"{rule}. Received: {value!r}")


def cut_by_tokens(x: Nest, limit: TokenLimit) -> TokenCut:
    """Return the cut of a batch with these inputs.

    An example costs the sum of the padded lengths of its ragged inputs. The lengths for
    XLA are not used.
    """
    costs = costs_of(x, limit.pad_multiple)
    order = tf.argsort(
        tf.reduce_sum(costs, axis=1), direction="DESCENDING", stable=True
    )
    best = _best_cuts(tf.gather(costs, order), limit)
    ends = _ends(best.starts, examples_in(order))
    total = best.totals[-1]
    counts = CutCounts(
        micro_batches=total // _MICRO_BATCH,
        tokens=tokens_in(x),
        positions=total % _MICRO_BATCH,
    )
    return TokenCut(order, ends, counts)


def dealt(batch: Nest | Share, replicas: int, pad_multiple: int) -> Nest:
    """Return the batch divided into shares with about equal numbers of tokens.

    The examples are sorted by length, as for a cut. Each replica's share consists of
    examples that follow each other in this order, so that little padding is computed.
    With one replica, and for the share of one of several processes, the batch is
    returned unchanged.
    """
    if replicas == 1 or isinstance(batch, Share):
        return batch
    parts = parts_of(batch)
    with tf.device("CPU:0"):
        costs = tf.reduce_sum(costs_of(parts[0], pad_multiple), axis=1)
        order = tf.argsort(costs, direction="DESCENDING", stable=True)
        costs = tf.gather(costs, order)
        # An example belongs to the share in which the middle of its tokens lies. All
        # numbers are doubled, so that the middle is an integer.
        ends = tf.cumsum(costs)
        middles = 2 * ends - costs
        shares = middles * replicas // tf.maximum(2 * tf.reduce_sum(costs), 1)
        all_shares = tf.range(replicas + 1, dtype=tf.int64)
        starts = tf.searchsorted(shares, all_shares, "left")

        def in_order(leaf: Any) -> Any:
            return None if leaf is None else tf.gather(leaf, order)

        return DealtBatch(tf.nest.map_structure(in_order, parts), starts, order)


def costs_of(x: Nest, pad_multiple: int) -> tf.Tensor:
    """Return the padded lengths of the ragged inputs, (examples, inputs) of int64."""
    padded_lengths = []
    for sequence in sequences_in(x):
        length = tf.cast(sequence.row_lengths(), tf.int64)
        padded_lengths.append(padded_length(length, pad_multiple))
    return tf.stack(padded_lengths, axis=1)


def tokens_in(x: Nest) -> tf.Tensor:
    """Return the number of positions in all ragged inputs, of int64."""
    tokens = []
    for sequence in sequences_in(x):
        tokens.append(tf.reduce_sum(sequence.row_lengths()))
    return tf.cast(tf.add_n(tokens), tf.int64)


class _BestCuts(NamedTuple):
    """The best cut of the first i examples, for each i."""

    starts: tf.Tensor  # where its last micro-batch begins, (examples,) of int32
    totals: tf.Tensor  # its positions + `_MICRO_BATCH` each, (examples + 1,) of int64


def _best_cuts(costs: tf.Tensor, limit: TokenLimit) -> _BestCuts:
    """Return the best cut of the first i examples, for each i, one after another.

    If the last micro-batch of the best cut of i examples begins at j, the rest is the
    best cut of the first j examples. All j are tried at once.
    """
    examples = examples_in(costs)
    indices = tf.range(examples)
    largest = tf.constant(tf.int64.max)

    def body(
        i: tf.Tensor, longest: tf.Tensor, starts: tf.Tensor, totals: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        # In row j: the padded lengths of a micro-batch of the examples j, …, i.
        is_start = indices <= i
        longest = tf.maximum(longest, costs[i])
        longest = tf.where(is_start[:, None], longest, tf.zeros_like(longest))

        count = tf.cast(i + 1 - indices, tf.int64)
        positions = count * tf.reduce_sum(longest, axis=1)
        fits = positions <= limit.tokens
        if limit.examples is not None:
            fits &= count <= limit.examples
        fits = is_start & (fits | (count == 1))

        candidates = tf.where(fits, totals[:-1] + positions + _MICRO_BATCH, largest)
        start = tf.argmin(candidates, output_type=tf.int32)
        starts = tf.tensor_scatter_nd_update(starts, [[i]], [start])
        totals = tf.tensor_scatter_nd_update(totals, [[i + 1]], [candidates[start]])
        return i + 1, longest, starts, totals

    starts = tf.zeros([examples], tf.int32)
    totals = tf.zeros([examples + 1], tf.int64)
    state = (tf.constant(0), tf.zeros_like(costs), starts, totals)
    _, _, starts, totals = tf.while_loop(
        lambda i, *_: i < examples, body, state, parallel_iterations=1
    )
    return _BestCuts(starts, totals)


def _ends(starts: tf.Tensor, examples: tf.Tensor) -> tf.Tensor:
    """Return the ends of the best cut's micro-batches, found from the last one back."""

    def body(end: tf.Tensor, ends: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return starts[end - 1], tf.concat([[end], ends], 0)

    _, ends = tf.while_loop(
        lambda end, _: end > 0,
        body,
        (examples, tf.zeros([0], tf.int32)),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
    )
    return ends
