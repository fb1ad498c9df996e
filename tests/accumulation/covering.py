"""Tables of cases that have every pair of values of two axes, in few rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product

Value = tuple[int, str]  # the index of an axis, and one of its values
Pair = tuple[Value, Value]
CANDIDATES = 40  # rows that `crossed` fills at random before it takes the best of them


def pairs_of(row: Sequence[str]) -> set[Pair]:
    """Return the pairs of values in a row, each value with the index of its axis."""
    return set(combinations(enumerate(row), 2))


def covering(*axes: Iterable[str]) -> list[tuple[str, ...]]:
    """Return rows that have each pair of values of two axes.

    The next row is always one with most new pairs; among these it is one whose values
    were used least. All rows are tried, so this is for few axes.
    """
    pairs_by_row = {}
    missing: set[Pair] = set()
    for row in product(*axes):
        pairs_by_row[row] = pairs_of(row)
        missing |= pairs_by_row[row]

    uses: Counter[str] = Counter()
    rows: list[tuple[str, ...]] = []

    def merit(row: tuple[str, ...]) -> tuple[int, int]:
        new_pairs = len(pairs_by_row[row] & missing)
        return new_pairs, -sum(uses[value] for value in row)

    while missing:
        best = max(pairs_by_row, key=merit)
        rows.append(best)
        uses.update(best)
        missing -= pairs_by_row[best]
    return rows


def crossed(
    axes: Iterable[Iterable[str]], impossible: Sequence[tuple[str, str]]
) -> list[tuple[str, ...]]:
    """Return rows that have every possible pair of values, for many axes.

    The next row is always the best of `CANDIDATES`, each of which is filled axis by
    axis in a random order. Where several values of an axis give as many new pairs, the
    first one is taken. The random numbers have a fixed seed.

    Args:
        axes: the values of each axis.
        impossible: pairs of values that no row may have.
    """
    numbered_axes = []
    for index, axis in enumerate(axes):
        numbered_axes.append([(index, value) for value in axis])
    missing = _possible_pairs(numbered_axes, impossible)

    draw = random.Random(0)
    rows = []
    while missing:
        candidates = []
        for _ in range(CANDIDATES):
            candidates.append(_filled_row(draw, numbered_axes, missing, impossible))
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        rows.append(best)
        missing -= pairs_of(best)
    return rows


def _possible_pairs(
    axes: list[list[Value]], impossible: Sequence[tuple[str, str]]
) -> set[Pair]:
    pairs = set()
    for first_axis, second_axis in combinations(axes, 2):
        for pair in product(first_axis, second_axis):
            if _is_possible(pair, impossible):
                pairs.add(pair)
    return pairs


def _filled_row(
    draw: random.Random,
    axes: list[list[Value]],
    missing: set[Pair],
    impossible: Sequence[tuple[str, str]],
) -> tuple[str, ...]:
    """Return a row that begins with a missing pair and adds many others."""
    row = list(draw.choice(sorted(missing)))

    def new_pairs(value: Value) -> int:
        pairs = [(min(value, other), max(value, other)) for other in row]
        return len([pair for pair in pairs if pair in missing])

    for index in draw.sample(range(len(axes)), len(axes)):
        if index in dict(row):
            continue
        values = []
        for value in axes[index]:
            if _is_possible([*row, value], impossible):
                values.append(value)
        row.append(max(values, key=new_pairs))
    return tuple(value for _, value in sorted(row))


def _is_possible(row: Iterable[Value], impossible: Sequence[tuple[str, str]]) -> bool:
    values = {value for _, value in row}
    return not any(values.issuperset(pair) for pair in impossible)
