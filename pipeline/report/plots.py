"""The plots of a report, described once and neutrally; `pipeline.report.drawing` draws them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.report import statistics, target_loss
from pipeline.report.comparison import AXES, Comparison, Curve, JobResult, pooled, whole
from pipeline.report.critical_batch import NOISE, noise_scale
from pipeline.report.target_loss import Target
from pipeline.report.trajectories import partings

POINTS = 600  # of a drawn curve; a longer one is drawn as means
RESULT = "Trajectory and result"  # a section
FALLS = 20.0  # times: a quantity that changes by more is drawn on a logarithmic axis


@dataclass(frozen=True)
class Series:
    """Points, joined by a line or not.

    Attributes:
        name: for the legend.
        x, y: of each point; x may be labels.
        colour: an index; equal groups have equal colours in all plots.
        error: half the length of the bar at each point, in units of y; 0 draws none.
        line: joins the points.
        marks: draws the points.
        faint: one repetition behind its group's mean; not in the legend.
    """

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    colour: int = 0
    error: Sequence[float] | None = None
    line: bool = True
    marks: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis shows; `ticks` are the only ones drawn, where they are given; `zero` begins it there."""

    title: str
    log: bool = False
    zero: bool = False
    ticks: Sequence[float] | None = None


@dataclass(frozen=True)
class Plot:
    """One plot.

    Attributes:
        key: its file's name.
        section: under which it stands.
        caption: what to read in it.
        by_group: its series are the groups of the sweep, whose legend the page draws once.
        level: a horizontal line, with what it is.
    """

    key: str
    section: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: list[Series] = field(default_factory=list)
    by_group: bool = False
    level: tuple[float, str] | None = None


def draw(sweep: Comparison) -> list[Plot]:
    """Every plot for which the sweep has data."""
    aim = target_loss.choose(sweep)
    plots = [_curves(sweep, metric, axis, aim) for metric in sweep.metrics for axis in AXES]
    plots += [_difference(sweep), *_final(sweep)]
    rate = "The rate that each update used; groups that share a schedule lie on one line."
    plots.append(_curve(sweep, "train/learning_rate", "updates", RESULT, "Learning rate by update", rate))
    plots += [*_to_target(sweep, aim), *_costs(sweep), *_noise(sweep, aim)]
    return [plot for plot in plots if any(len(series.x) for series in plot.series)]


def _curves(sweep: Comparison, metric: str, axis: str, aim: Target | None) -> Plot:
    level = (aim.value, "target") if aim is not None and aim.metric == metric else None
    notes = {
        "updates": "Equal effective batches lie on one line where accumulation is exact.",
        "examples": "What it costs in data: a line further left learns more from each example.",
        "seconds": "What it costs in time; evaluation, start-up and the tracing of the first update are left out.",
    }
    section = "Loss" if metric.endswith("/loss") else "Metric"
    return _curve(sweep, metric, axis, section, f"{metric} by {axis}", notes[axis], level)


def _curve(
    sweep: Comparison, metric: str, axis: str, section: str, title: str, note: str, level: tuple | None = None
) -> Plot:
    series = []
    for colour, (group, jobs) in enumerate(sweep.groups.items()):
        curves = [(job, curve) for job in jobs if (curve := job.curves.get(metric)) is not None]
        series += [_one(job, curve, axis, group, colour, len(curves) > 1) for job, curve in curves]
        together = [(job, curve) for job, curve in curves if job in whole(jobs)]
        if len(curves) > 1 and together:
            series.append(_mean(together, axis, group, colour))
    series = [one for one in series if len(one.x)]
    if any(one.faint for one in series):
        note += " Thin lines are seeds, the thick one is the mean of those that finished."
    if any(len(curve.steps) > POINTS for job in sweep.jobs if (curve := job.curves.get(metric)) is not None):
        note += f" Long curves are drawn as means over at most {POINTS} stretches."
    values = np.array([value for one in series for value in one.y])
    rising = values[np.isfinite(values)]
    falls = metric == NOISE or (metric != "train/learning_rate" and sweep.lower_is_better(metric))
    log = bool(falls and rising.size and rising.min() > 0 and rising.max() > FALLS * rising.min())
    key = re.sub(r"[^\w.-]", "_", f"{metric} by {axis}")
    return Plot(key, section, title, note, Axis(AXES[axis]), Axis(metric, log), series, True, level)


def _one(job: JobResult, curve: Curve, axis: str, group: str, colour: int, faint: bool) -> Series:
    return _series(job.along(axis, curve.steps), curve.values, group, colour, faint)


def _series(x: statistics.Array, y: statistics.Array, group: str, colour: int, faint: bool = False) -> Series:
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) > POINTS:
        edges = np.linspace(0, len(x), POINTS + 1).astype(int)[:-1]
        counts = np.diff(np.append(edges, len(x)))
        x, y = np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts
    return Series(group, x.tolist(), y.tolist(), colour, faint=faint, marks=len(x) < 30 and not faint)


def _mean(curves: list[tuple[JobResult, Curve]], axis: str, group: str, colour: int) -> Series:
    """Over the updates that all of them have: a mean over fewer seeds would jump where one ends."""
    steps = curves[0][1].steps
    for _, curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps)
    x = np.mean([job.along(axis, steps) for job, _ in curves], axis=0)
    y = np.mean([curve.values[np.isin(curve.steps, steps)] for _, curve in curves], axis=0)
    return _series(x, y, group, colour)


def _difference(sweep: Comparison) -> Plot:
    series = []
    for colour, pair in enumerate(partings(sweep)):
        values = pair.curve.values
        shown = np.where(values > 0, values, np.nan if values.any() else 1e-17)  # a logarithmic axis has no zero
        series.append(_series(pair.curve.steps.astype(float), shown, f"{pair.other} / {pair.one}", colour))
    caption = "How far the training losses of two jobs with equal effective batch, seed and config are apart, "
    caption += (
        "relative to their value. Rounding starts it and training amplifies it. Updates at which they are equal to "
    )
    caption += "the bit are left out; 1e-17 stands for jobs that are equal at all of them."
    y = Axis("relative difference of train/loss", log=True)
    return Plot("difference", RESULT, "How far trajectories part", caption, Axis("updates"), y, series)


def _final(sweep: Comparison) -> list[Plot]:
    metric = sweep.quality
    if metric is None:
        return []
    title, note = f"Final {metric}", "Bars: ± one sample standard deviation over seeds, where there are several."
    found = []
    for size in _sizes(sweep):
        value = _finished(lambda job: sweep.final(job, metric))
        found.append(_by(sweep, size, value, RESULT, f"final_by_{size}", f"{title} by {size}", note, metric))
    return found


def _finished(value: Callable[[JobResult], float]) -> Callable[[JobResult], float]:
    return lambda job: value(job) if job.finished else math.nan


def _sizes(sweep: Comparison) -> list[str]:
    """`factor`, and `batch` where it varies beside or instead of it; neither where only other things vary."""
    sizes = [s for s in ("factor", "batch") if len({getattr(j, s) for j in sweep.jobs} - {None}) > 1]
    return sizes or ["group"]


def _by(
    sweep: Comparison,
    size: str,
    value: Callable[[JobResult], float],
    section: str,
    key: str,
    title: str,
    note: str,
    unit: str,
    log: bool = False,
) -> Plot:
    """`value` over `factor`, `batch` or `group`: one series a family, a mean with its bar at each x."""
    y = Axis(unit, log, zero=section in ("Cost", "To the target"))
    if size == "group":
        at = {g: s for g, jobs in sweep.groups.items() if (s := statistics.spread([value(j) for j in jobs]))}
        bars = [s.deviation or 0.0 for s in at.values()]
        series = [Series("", list(at), [s.mean for s in at.values()], 0, bars, line=False, marks=True)]
        return Plot(key, section, title, note, Axis(""), y, series)
    series, ticks = [], set()
    for colour, (family, jobs) in enumerate(sweep.families.items()):
        xs = sorted({x for job in jobs if (x := getattr(job, size)) is not None})
        spreads = {x: pooled([job for job in jobs if getattr(job, size) == x], value) for x in xs}
        points = {x: s for x, s in spreads.items() if s is not None}
        bars = [s.deviation or 0.0 for s in points.values()]
        ticks |= set(points)
        series.append(Series(family, list(points), [s.mean for s in points.values()], colour, bars, marks=True))
    title_of = {"factor": "accumulation factor", "batch": "effective batch size"}[size]
    return Plot(key, section, title, note, Axis(title_of, True, ticks=sorted(ticks)), y, series)


def _to_target(sweep: Comparison, aim: Target | None) -> list[Plot]:
    if aim is None:
        return []
    units = {"seconds": "seconds in updates", "examples": "examples", "updates": "updates"}
    what = f"{aim.metric} ≤ {aim.value:.4g}"
    found = []
    axes = [("seconds", _sizes(sweep)[0])]
    if "batch" in _sizes(sweep):  # else all cost the same examples, as far as the trajectories agree
        axes += [("examples", "batch"), ("updates", "batch")]
    for axis, size in axes:
        note = f"Until {what}; finished jobs that got there. Bars: ± one sample standard deviation over seeds."
        cost = _finished(lambda job, axis=axis: aim.costs.get(job.name, {}).get(axis, math.nan))  # type: ignore[misc]
        key = "time_to_target" if axis == "seconds" else f"{axis}_to_target"
        title = f"{axis.capitalize()} to the target by {size}"
        found.append(_by(sweep, size, cost, "To the target", key, title, note, units[axis]))
    return [_with_prediction(sweep, aim, plot) if plot.key == "examples_to_target" else plot for plot in found]


def _with_prediction(sweep: Comparison, aim: Target, plot: Plot) -> Plot:
    """Adds what the noise scale predicts: E ∝ 1 + B / B_noise, through the smallest batch's measured cost."""
    series = list(plot.series)
    for family, jobs in sweep.families.items():
        scale = statistics.spread([noise_scale(job, aim) for job in jobs])
        measured = next(one for one in plot.series if one.name in (family, ""))
        if scale is None or len(measured.x) < 2 or isinstance(measured.x[0], str):
            continue
        batches = np.geomspace(float(measured.x[0]), float(measured.x[-1]), 40)
        costs = measured.y[0] * (1 + batches / scale.mean) / (1 + batches[0] / scale.mean)
        name = f"{family} predicted by the noise scale".strip()
        series.append(Series(name, batches.tolist(), costs.tolist(), measured.colour + 5))
    if len(series) == len(plot.series):
        return plot
    series[0 : len(plot.series)] = [_named(one, "measured") for one in plot.series]
    caption = f"{plot.caption} The prediction goes through the smallest batch: E ∝ 1 + B / noise scale."
    return Plot(plot.key, plot.section, plot.title, caption, plot.x, plot.y, series)


def _named(series: Series, name: str) -> Series:
    return series if series.name else Series(name, series.x, series.y, series.colour, series.error, marks=True)


def _costs(sweep: Comparison) -> list[Plot]:
    size = _sizes(sweep)[0]
    median = "Median over the updates after the first, which is traced while it runs. Bars: over seeds."
    peak = "Of the first GPU, or the resident memory of the process on a CPU; it should not grow with the factor."
    rows = (
        ("update_seconds", "Time per update", "seconds", median, lambda job: job.typical("perf/update_seconds")),
        (
            "examples_per_second",
            "Examples per second",
            "examples/s",
            median,
            lambda job: job.typical("perf/examples_per_second"),
        ),
        ("peak_memory", "Peak memory", "MiB", peak, lambda job: job.last("perf/peak_memory_bytes") / 2**20),
    )
    return [
        _by(sweep, size, value, "Cost", key, f"{title} by {size}", note, unit) for key, title, unit, note, value in rows
    ]


def _noise(sweep: Comparison, aim: Target | None) -> list[Plot]:
    note = "In examples, smoothed by the run. It grows while the loss falls: later training bears larger batches."
    curve = _curve(sweep, NOISE, "examples", "Noise scale", "Noise scale by examples", note)
    note = "Each run's median up to the target. Below the dashed diagonal a batch is larger than the noise scale, "
    note += "and costs over twice the examples of a tiny one. Bars: ± one sample standard deviation over seeds."
    key, title = "noise_by_batch", "Noise scale against effective batch"
    plot = _by(sweep, "batch", lambda job: noise_scale(job, aim), "Noise scale", key, title, note, "noise scale", True)
    series = [_named(one, "noise scale") for one in plot.series if len(one.x)]
    if series:
        ticks = [float(x) for x in plot.x.ticks or ()]
        ends = [ticks[0], ticks[-1]] if len(ticks) > 1 else [ticks[0] / 2, ticks[0] * 2]
        series.append(Series("noise scale = batch", ends, ends, 7))
    return [Plot(plot.key, plot.section, plot.title, plot.caption, plot.x, plot.y, series), curve]
