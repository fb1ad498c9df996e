"""Chooses the lengths for which XLA compiles the micro-batches of a cut by tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from .token_cut import MOST_XLA_LENGTHS, check_positive

# At most this many lengths are distinguished, because the search tries all pairs.
_MOST_DISTINCT = 1024


def choose_xla_lengths(
    lengths: Iterable[int] | tf.RaggedTensor, count: int = 4, multiple: int = 8
) -> tuple[int, ...]:
    """Return at most `count` lengths that minimize the padding of the examples.

    They are the lengths for `xla_lengths` of an `Update`, whose examples are padded to
    the nearest one that is not below their own length. The largest is at least the
    longest of `lengths`. If the longest is more than 1,024 times `multiple`, then
    `multiple` is replaced by the smallest of its multiples that are at least 1/1,024 of
    the longest.

    Args:
        lengths: the lengths of the examples, or of a sample of them; or the examples as
            a ragged tensor. If examples have several sequences, give the length of the
            longest.
        count: maximum number of lengths, at most 32. XLA compiles once for each.
        multiple: each length is a multiple of it, such as `pad_multiple`.

    Raises:
        ValueError: there are no lengths, one is not a whole number of at least 0, or an
            argument is out of its range.
    """
    check_positive("count", count)
    check_positive("multiple", multiple)
    if count > MOST_XLA_LENGTHS:
        rule = f"count must be at most {MOST_XLA_LENGTHS}"
        raise ValueError(f"{rule}. Received: {count}")
    values = _whole_numbers(lengths)

    # Round up to the multiple, or to a multiple of it if there are many lengths.
    step = multiple * max(1, -(-int(values.max()) // (multiple * _MOST_DISTINCT)))
    rounded = step * np.maximum(-(-values // step), 1)
    distinct, examples = np.unique(rounded, return_counts=True)
    chosen = _least_padding(distinct, examples, min(count, len(distinct)))
    return tuple(int(length) for length in chosen)


def _whole_numbers(lengths: Any) -> np.ndarray:
    """Return the lengths as an array of int64, or raise a ValueError."""
    if isinstance(lengths, tf.RaggedTensor):
        lengths = lengths.row_lengths()
    if not isinstance(lengths, np.ndarray | tf.Tensor):
        lengths = list(lengths)
    values = np.asarray(lengths)
    if not values.size:
        raise ValueError("lengths must not be empty")
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        rule = "lengths must be whole numbers, one for each example"
        raise ValueError(
            f"{rule}. Received: shape {values.shape}, dtype {values.dtype}"
        )
    if values.min() < 0:
        rule = "lengths must not be negative"
        raise ValueError(f"{rule}. Received: {values.min()}")
    return values.astype(np.int64)


def _least_padding(
    distinct: np.ndarray, examples: np.ndarray, count: int
) -> np.ndarray:
    """Return those `count` distinct lengths that need the fewest positions in total.

    If the last of them is `distinct[i]`, and the one before it is `distinct[j]`, the
    examples of the lengths after j are padded to `distinct[i]`. All pairs of i and j
    are tried at once.

    Args:
        distinct: the lengths, in increasing order.
        examples: the number of examples of each length.
        count: the number of lengths to choose.
    """
    up_to = np.cumsum(examples)
    between = up_to[None, :] - up_to[:, None]  # examples after j, up to i
    positions = np.where(between > 0, between * distinct[None, :], np.inf)

    # In row k: the fewest positions of the examples up to i with k + 1 lengths.
    fewest = [up_to * distinct]
    previous = []
    for _ in range(count - 1):
        totals = fewest[-1][:, None] + positions
        previous.append(np.argmin(totals, axis=0))
        fewest.append(np.min(totals, axis=0))

    last = len(distinct) - 1
    chosen = [last]
    for choices in reversed(previous):
        last = choices[last]
        chosen.append(last)
    return distinct[chosen[::-1]]
