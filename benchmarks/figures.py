"""The results of a benchmark: figures with their spread and their target."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

BEST = "train ÷ best peer"


@dataclasses.dataclass
class Figure:
    """One line of the table.

    Attributes:
        part, subject, what: which benchmark, of which model or command, and what is compared with what.
        values: one per round; a ratio is that of two contenders in the same round.
        unit: of the values; empty for a ratio.
        best: the best round of each contender, in `best_unit`.
        over: examples of the effective batch, of a figure that is drawn over it.
        at_least, at_most: the target; without one, `note` says why.
    """

    part: str
    subject: str
    what: str
    values: Sequence[float]
    unit: str = ""
    best: Mapping[str, float] = dataclasses.field(default_factory=dict)
    best_unit: str = ""
    over: int | None = None
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.values) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None where there is none."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return None if self.at_most is None else self.median <= self.at_most

    def as_dict(self) -> dict[str, object]:
        computed = {"median": self.median, "quartiles": self.quartiles, "met": self.met}
        return dataclasses.asdict(self) | computed


@dataclasses.dataclass
class Missing:
    """A line of the table for a figure that is missing, and why."""

    part: str
    subject: str
    why: str


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio in each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def table(figures: Sequence[Figure | Missing]) -> str:
    """Format all figures as a table, one per line, with those that are missing."""
    head = (
        "part",
        "of",
        "figure",
        "median",
        "quartiles",
        "target",
        "",
        "best round of each",
    )
    rows = [head, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "─" * max(len(line) for line in lines), *lines[1:]])


def _row(figure: Figure | Missing) -> tuple[str, ...]:
    if isinstance(figure, Missing):
        return figure.part, figure.subject, "no figure", *[""] * 4, figure.why
    first, third = figure.quartiles
    unit = f" {figure.unit}" if figure.unit else ""
    target = ""
    if figure.at_least is not None:
        target = f"≥ {_fixed(figure.at_least)}{unit}"
    elif figure.at_most is not None:
        target = f"≤ {_fixed(figure.at_most)}{unit}"
    best = ", ".join(f"{name} {_number(value)}" for name, value in figure.best.items())
    if best and figure.best_unit:
        best += f" {figure.best_unit}"
    return (
        figure.part,
        figure.subject,
        figure.what
        if figure.over is None
        else f"{figure.what}, effective batch {figure.over}",
        f"{_fixed(figure.median)}{unit}",
        f"{_fixed(first)} … {_fixed(third)}",
        target,
        {None: "", True: "met", False: "MISSED"}[figure.met],
        "; ".join(text for text in (best, figure.note) if text),
    )


def _fixed(value: float) -> str:
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.005 else f"{value:.1e}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
