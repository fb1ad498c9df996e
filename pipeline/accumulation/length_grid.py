"""Chooses the lengths for which XLA compiles the micro-batches of a cut by tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# Longest lengths are told apart in steps of a thousandth of the longest.
_STEPS = 1024


def choose_xla_lengths(
    lengths: Iterable[int], count: int = 4, multiple: int = 8
) -> tuple[int, ...]:
    """Return at most `count` lengths with which the least padding is computed.

    They are the lengths for `xla_lengths` of an `Update`, whose examples are padded to
    the nearest one that is not below their own length. The largest is at least the
    longest of `lengths`.

    Args:
        lengths: the lengths of the examples, or of a sample of them. If examples have
            several sequences, the length of the longest.
        count: maximum number of lengths. XLA compiles once for each.
        multiple: each length is a multiple of it.

    Raises:
        ValueError: there are no lengths, or an argument is below 1.
    """
    values = np.fromiter(lengths, np.int64)
    for name, value in (("count", count), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1. Received: {value}")
    if not values.size:
        raise ValueError("lengths must not be empty")
    if values.min() < 0:
        rule = "lengths must not be negative"
        raise ValueError(f"{rule}. Received: {values.min()}")

    # Round up to the multiple, or to a multiple of it if there are many lengths.
    step = multiple * max(1, -(-int(values.max()) // (multiple * _STEPS)))
    rounded = step * np.maximum(-(-values // step), 1)
    distinct, numbers = np.unique(rounded, return_counts=True)
    chosen = _least_padding(distinct, numbers, min(count, len(distinct)))
    return tuple(int(length) for length in chosen)


def _least_padding(distinct: np.ndarray, numbers: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` of the distinct lengths with the fewest positions in total.

    If the last of them is `distinct[i]`, and the one before it is `distinct[j]`, the
    examples of the lengths after j are padded to `distinct[i]`. All pairs of i and j
    are tried at once.

    Args:
        distinct: the lengths, in increasing order.
        numbers: the number of examples of each length.
        count: the number of lengths to choose.
    """
    up_to = np.cumsum(numbers)
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
