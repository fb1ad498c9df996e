"""The tables of a report: their rows, columns and order.

The page has a table with one row per group, and a table of the best result for each
swept value. `jobs.csv` has the columns of the former and one row per job.
"""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.common.errors import printable
from pipeline.report import statistics
from pipeline.report.job_results import (
    EXAMPLES_PER_SECOND,
    EXAMPLES_SEEN,
    LOSS,
    PEAK_MEMORY,
    UPDATE_SECONDS,
    JobResult,
    Measure,
    by_group,
    comparable_jobs,
    finished_jobs,
    pooled,
)
from pipeline.report.noise_scale import noise_scale
from pipeline.report.statistics import Spread
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import PLAIN, SECONDS, SIZE, Scale, number

_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
# A spreadsheet evaluates a cell that begins with one of these characters as a formula.
_FORMULA_STARTS = tuple("=+-@＝＋－＠")


@dataclass(frozen=True)
class Column:
    """A column of the table, which shows one value per job."""

    name: str
    measure: Measure
    scale: Scale = PLAIN  # units on the page; jobs.csv has base units
    # Returns whether the value of a job is only an upper bound.
    is_bound: Callable[[JobResult], bool] = lambda job: False
    # Returns how many of some jobs have a value, such as "2 of 3 jobs", if this has to
    # be said.
    share: Callable[[list[JobResult]], str] = lambda jobs: ""


@dataclass(frozen=True)
class Table:
    """A table on the page.

    Attributes:
        heading: the heading above the table.
        head: the headings of the columns.
        rows: the rows; the first cell of each is the heading of the row.
        has_texts: whether cells are strings, which may be long, instead of numbers.
    """

    heading: str
    head: list[str]
    rows: list[list[str]]
    has_texts: bool = False


def columns(sweep: SweepResult) -> list[Column]:
    """Return all columns in display order, including those without any value."""
    metrics = []
    for metric in sweep.metrics:
        metrics.append(Column(metric, partial(sweep.final, metric=metric)))
    return [
        Column("factor", lambda job: job.factor or math.nan),
        Column("effective batch", lambda job: job.effective_batch_size or math.nan),
        Column("micro-batch", lambda job: job.micro_batch_size or math.nan),
        Column("updates", _updates),
        Column("examples", lambda job: job.last(EXAMPLES_SEEN)),
        *metrics,
        _target_column(sweep, "updates to target", "updates"),
        _target_column(sweep, "examples to target", "examples"),
        _target_column(sweep, "time to target", "seconds", SECONDS),
        Column("time per update", lambda job: job.typical(UPDATE_SECONDS), SECONDS),
        Column("examples/s", lambda job: job.typical(EXAMPLES_PER_SECOND)),
        Column("peak memory", lambda job: job.last(PEAK_MEMORY), SIZE),
        Column("noise scale", lambda job: noise_scale(job, sweep)),
    ]


def _target_column(
    sweep: SweepResult, name: str, axis: str, scale: Scale = PLAIN
) -> Column:
    """Return the column with the cost of reaching the target along `axis`.

    The cost is an upper bound for a job that met the target at its first evaluation.
    A mean over only some of the jobs says so.
    """

    def is_bound(job: JobResult) -> bool:
        return sweep.target is not None and job.name in sweep.target.at_first

    def share(jobs: list[JobResult]) -> str:
        if sweep.target is None:
            return ""
        return sweep.target.share_that_reached(jobs)

    return Column(name, lambda job: sweep.cost(job, axis), scale, is_bound, share)


def _updates(job: JobResult) -> float:
    """Return the number of the last logged update, or NaN if nothing was logged."""
    last_steps = [int(curve.steps[-1]) for curve in job.curves.values()]
    return max(last_steps, default=math.nan)


def groups_table(sweep: SweepResult) -> Table:
    """Return the table with one row per group, which shows means over seeds.

    Groups are in the order of their first jobs in the plan of the sweep. Columns
    without a finite value are left out.
    """
    shown = []
    for column in columns(sweep):
        if any(math.isfinite(column.measure(job)) for job in sweep.jobs):
            shown.append(column)

    rows = []
    for group, jobs in sweep.groups.items():
        cells = [_mean_cell(jobs, column) for column in shown]
        rows.append([group, *cells, _status_cell(jobs)])
    return Table("Table", ["job", *_names(shown), "status"], rows)


def _mean_cell(jobs: list[JobResult], column: Column) -> str:
    jobs = comparable_jobs(jobs)
    spread = pooled(jobs, column.measure)
    if spread is None:
        return "–"
    text = _unbroken(spread, column.scale)
    share = column.share(jobs)
    if share:
        text += f" ({share})"
    if any(column.is_bound(job) for job in jobs):
        return f"≤{_NO_BREAK_SPACE}{text}"
    return text


def _unbroken(spread: Spread, scale: Scale) -> str:
    """Return the text of a cell, which can wrap only before its deviation.

    If the deviation is unknown or 0 (as for sizes), the text is just the mean.
    """
    if spread.deviation:
        text = spread.text(scale)
    else:
        text = number(spread.mean, scale)
    text = text.replace(" ", _NO_BREAK_SPACE)
    return text.replace(f"{_NO_BREAK_SPACE}±", " ±")


def _status_cell(jobs: list[JobResult]) -> str:
    if len(jobs) == 1:
        return jobs[0].status.lower()
    return f"{len(finished_jobs(jobs))} of {len(jobs)} finished"


def best_by_value(sweep: SweepResult) -> Table:
    """Return the table with one row for each value of each swept key.

    A row shows the best final result with that value, and the group that reached it.
    Values without a final result are left out.
    """
    rows = []
    for key in sweep.axes:
        if key == "group":
            continue
        for value, jobs in sweep.by_setting(sweep.jobs, key).items():
            best = _best_group(sweep, jobs)
            if best is None:
                continue
            text = value if isinstance(value, str) else number(value)
            result = statistics.spread(list(sweep.ends[best].values()))
            if result is not None:
                rows.append([f"{key}={text}", result.text(), best])
    head = ["value", f"best final {sweep.quality}", "with"]
    return Table("Best by value", head, rows)


def _best_group(sweep: SweepResult, jobs: list[JobResult]) -> str | None:
    """Return the group with the best final result, or None if no group has one."""
    sign = 1 if sweep.lower_is_better(sweep.quality or LOSS) else -1
    ends = []
    for group in by_group(jobs):
        if group in sweep.ends:
            mean = float(np.mean(list(sweep.ends[group].values())))
            ends.append((sign * mean, group))
    if not ends:
        return None
    _, best = min(ends)
    return best


def write_csv(path: Path, sweep: SweepResult) -> None:
    """Write one row per job, in base units: seconds, bytes and examples."""
    all_columns = columns(sweep)
    head = ["job", "status", "run", "seed", *_names(all_columns)]
    head += ["target at first evaluation", "failure"]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(head)
        for job in sweep.jobs:
            rows.writerow(_csv_row(job, all_columns))


def _csv_row(job: JobResult, all_columns: list[Column]) -> list[float | str]:
    cells: list[float | str] = []
    for text in (job.name, job.status, job.run_id or "", job.seed or ""):
        cells.append(_text_cell(text))
    for column in all_columns:
        cells.append(_value_cell(column.measure(job)))
    # Mark a job whose costs to the target are only upper bounds.
    is_bound = any(column.is_bound(job) for column in all_columns)
    bound_cell = "yes" if is_bound else ""
    cells.append(bound_cell)
    failure = " ".join(job.tags.get("failure", "").split())
    cells.append(_text_cell(failure))
    return cells


def _names(shown: list[Column]) -> list[str]:
    return [column.name for column in shown]


def _value_cell(value: float) -> float | str:
    if math.isnan(value):
        return ""
    return value


def _text_cell(text: str) -> str:
    """Return the text with `?` for each control character.

    An apostrophe is put before a text that begins with white space, or that a
    spreadsheet would evaluate as a formula.
    """
    is_formula = text.lstrip().startswith(_FORMULA_STARTS)
    if is_formula or text[:1].isspace():
        return "'" + printable(text)
    return printable(text)
