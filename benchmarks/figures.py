"""The results of a benchmark: figures with their spread and their target."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BEST_PEER = "train ÷ best peer"
HEAD = (
    "part",
    "of",
    "figure",
    "median",
    "quartiles",
    "target",
    "",
    "best round of each",
)


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        part: the benchmark.
        subject: the model or the command that is measured.
        what: what is measured, or what is compared with what.
        values: one per round; a ratio is that of two contenders in the same round.
        unit: of the values; empty for a ratio.
        best: the best round of each contender, in `best_unit`.
        best_unit: of `best`.
        over: examples of the effective batch, if the figure is drawn over it.
        at_least: the target, if there is one.
        at_most: the target, if there is one.
        note: conditions, or why there is no target.
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
        """Whether the median meets the target; None if there is no target."""
        if self.at_least is not None:
            return self.median >= self.at_least
        if self.at_most is not None:
            return self.median <= self.at_most
        return None

    def summary(self) -> Summary:
        """Return what the JSON file holds of this figure."""
        return Summary(
            part=self.part,
            subject=self.subject,
            what=self.what,
            rounds=len(self.values),
            median=self.median,
            quartiles=self.quartiles,
            unit=self.unit,
            best=self.best,
            best_unit=self.best_unit,
            over=self.over,
            at_least=self.at_least,
            at_most=self.at_most,
            met=self.met,
            note=self.note,
        )


@dataclass(frozen=True)
class Summary:
    """A figure in the JSON file: median and quartiles in place of the values.

    The attributes are those of `Figure`, and `rounds` is the number of its values.
    """

    part: str
    subject: str
    what: str
    rounds: int
    median: float
    quartiles: tuple[float, float]
    unit: str
    best: Mapping[str, float]
    best_unit: str
    over: int | None
    at_least: float | None
    at_most: float | None
    met: bool | None
    note: str


@dataclass(frozen=True)
class Missing:
    """A line of the table for a figure that is missing, and why."""

    part: str
    subject: str
    why: str


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio in each round."""
    pairs = zip(above, below, strict=True)
    return [numerator / denominator for numerator, denominator in pairs]


def table(lines: Sequence[Figure | Missing]) -> str:
    """Format figures as a table, one per line, with those that are missing."""
    rows: list[Sequence[str]] = [HEAD]
    for line in lines:
        if isinstance(line, Missing):
            rows.append(_missing_row(line))
        else:
            rows.append(_row(line))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formatted = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        formatted.append("  ".join(cells).rstrip())
    rule = "─" * max(map(len, formatted))
    return "\n".join([formatted[0], rule, *formatted[1:]])


def _missing_row(line: Missing) -> Sequence[str]:
    return [line.part, line.subject, "no figure", "", "", "", "", line.why]


def _row(figure: Figure) -> Sequence[str]:
    what = figure.what
    if figure.over is not None:
        what += f", effective batch {figure.over}"
    unit = f" {figure.unit}" if figure.unit else ""
    first, third = figure.quartiles
    verdicts = {None: "", True: "met", False: "MISSED"}
    remarks = [_best(figure), figure.note]
    return [
        figure.part,
        figure.subject,
        what,
        _fixed(figure.median) + unit,
        f"{_fixed(first)} … {_fixed(third)}",
        _target(figure),
        verdicts[figure.met],
        "; ".join(filter(None, remarks)),
    ]


def _best(figure: Figure) -> str:
    rounds = [f"{name} {_number(value)}" for name, value in figure.best.items()]
    text = ", ".join(rounds)
    if text and figure.best_unit:
        text += f" {figure.best_unit}"
    return text


def _target(figure: Figure) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    if figure.at_least is not None:
        return f"≥ {_fixed(figure.at_least)}{unit}"
    if figure.at_most is not None:
        return f"≤ {_fixed(figure.at_most)}{unit}"
    return ""


def _fixed(value: float) -> str:
    if value == 0 or abs(value) >= 0.005:
        return f"{value:.2f}"
    return f"{value:.1e}"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
