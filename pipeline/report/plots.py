"""The plots of a sweep: which there are, their curves and their captions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from pipeline.report import statistics, target_loss
from pipeline.report.comparison import AXES, Comparison, Curve, JobResult, comparable_jobs, pooled
from pipeline.report.critical_batch import NOISE, noise_scale
from pipeline.report.plotly_figure import Axis, Plot, Series
from pipeline.report.target_loss import TargetLoss
from pipeline.report.trajectories import partings

POINTS = 600  # the most points of a drawn curve; a longer one is drawn as means
RESULT = "Trajectory and result"  # a section
BARS = "Bars: ± one sample standard deviation over seeds"
ZEROS = "Updates without any difference are left out; where there is none at all, 1e-17 is drawn."
FALLS = 20.0  # a cost whose largest value is more than this many times its smallest gets a logarithmic axis


def draw(sweep: Comparison) -> list[Plot]:
    """Return every plot for which the sweep has data."""
    target = target_loss.choose(sweep)
    plots = [_curves(sweep, metric, axis, target) for metric in sweep.metrics for axis in AXES]
    plots += [_difference(sweep), *_final(sweep)]
    rate = "The rate that each update used; groups that share a schedule lie on one line."
    plots.append(_curve(sweep, "train/learning_rate", "updates", RESULT, "Learning rate by update", rate))
    plots += [*_to_target(sweep, target), *_costs(sweep), *_noise(sweep, target)]
    return [plot for plot in plots if any(len(series.x) for series in plot.series)]


def _curves(sweep: Comparison, metric: str, axis: str, target: TargetLoss | None) -> Plot:
    level = (target.value, "target") if target is not None and target.metric == metric else None
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
        faint = len(curves) > 1
        series += [_series(job.along(axis, c.steps), c.values, group, colour, faint) for job, c in curves]
        together = [(job, curve) for job, curve in curves if job in comparable_jobs(jobs)]
        if faint and together:
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


def _series(x: statistics.Array, y: statistics.Array, group: str, colour: int, faint: bool = False) -> Series:
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) > POINTS:
        edges = np.linspace(0, len(x), POINTS + 1).astype(int)[:-1]
        counts = np.diff(np.append(edges, len(x)))
        x, y = np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts
    return Series(group, x.tolist(), y.tolist(), colour, faint=faint, marks=len(x) < 30 and not faint)


def _mean(curves: list[tuple[JobResult, Curve]], axis: str, group: str, colour: int) -> Series:
    """Return the mean over the updates that all curves have: a mean over fewer seeds would jump where one ends."""
    steps = curves[0][1].steps
    for _, curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps)
    x = np.mean([job.along(axis, steps) for job, _ in curves], axis=0)
    y = np.mean([curve.values[np.isin(curve.steps, steps)] for _, curve in curves], axis=0)
    return _series(x, y, group, colour)


def _difference(sweep: Comparison) -> Plot:
    series = []
    for colour, pair in enumerate(partings(sweep)):
        shown = without_zeros(pair.curve.values)
        series.append(_series(pair.curve.steps.astype(float), shown, f"{pair.other} / {pair.one}", colour))
    caption = "How far the training losses of two jobs with equal effective batch, seed and config are apart, "
    caption += f"relative to their value. Rounding starts it and training amplifies it. {ZEROS}"
    y = Axis("relative difference of train/loss", log=True)
    return Plot("difference", RESULT, "How far trajectories part", caption, Axis("updates"), y, series)


def without_zeros(values: statistics.Array) -> statistics.Array:
    """Return what a logarithmic axis can show of differences; `ZEROS` says what became of zeros."""
    return np.where(values > 0, values, np.nan if values.any() else 1e-17)


def _final(sweep: Comparison) -> list[Plot]:
    metric = sweep.quality
    if metric is None:
        return []
    value, note = _finished(lambda job: sweep.final(job, metric)), f"{BARS}, where there are several."
    return [
        _by(sweep, size, value, RESULT, f"final_by_{size}", f"Final {metric} by {size}", note, metric)
        for size in _sizes(sweep)
    ]


def _finished(value: Callable[[JobResult], float]) -> Callable[[JobResult], float]:
    return lambda job: value(job) if job.finished else math.nan


def _sizes(sweep: Comparison) -> list[str]:
    """Return which of `factor` and `batch` vary, else `group`."""
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
    """Return `value` over `factor`, `batch` or `group`: one series a family, a mean with its bar at each x."""
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


def _to_target(sweep: Comparison, target: TargetLoss | None) -> list[Plot]:
    if target is None:
        return []
    units = {"seconds": "seconds in updates", "examples": "examples", "updates": "updates"}
    what = f"{target.metric} ≤ {target.value:.4g}"
    found = []
    axes = [("seconds", _sizes(sweep)[0])]
    if "batch" in _sizes(sweep):  # else all cost the same examples, as far as the trajectories agree
        axes += [("examples", "batch"), ("updates", "batch")]
    for axis, size in axes:
        note = f"Until {what}; finished jobs that got there. {BARS}."
        cost = _finished(partial(target.cost, axis=axis))
        key = "time_to_target" if axis == "seconds" else f"{axis}_to_target"
        title = f"{axis.capitalize()} to the target by {size}"
        found.append(_by(sweep, size, cost, "To the target", key, title, note, units[axis]))
    return [_with_prediction(sweep, target, plot) if plot.key == "examples_to_target" else plot for plot in found]


def _with_prediction(sweep: Comparison, target: TargetLoss, plot: Plot) -> Plot:
    """Add what the noise scale predicts: E ∝ 1 + B / B_noise, through the smallest batch's measured cost."""
    series = list(plot.series)
    for family, jobs in sweep.families.items():
        scale = statistics.spread([noise_scale(job, target) for job in jobs])
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
    return replace(plot, caption=caption, series=series)


def _named(series: Series, name: str) -> Series:
    return series if series.name else replace(series, name=name)


def _costs(sweep: Comparison) -> list[Plot]:
    size = _sizes(sweep)[0]
    median = "Median over the updates after the first, which is traced while it runs. Bars: over seeds."
    peak = "Of the first GPU, or the resident memory of the process on a CPU; it should not grow with the factor."

    def plot(key: str, title: str, unit: str, note: str, value: Callable[[JobResult], float]) -> Plot:
        return _by(sweep, size, value, "Cost", key, f"{title} by {size}", note, unit)

    seconds, speed, memory = "perf/update_seconds", "perf/examples_per_second", "perf/peak_memory_bytes"
    return [
        plot("update_seconds", "Time per update", "seconds", median, lambda job: job.typical(seconds)),
        plot("examples_per_second", "Examples per second", "examples/s", median, lambda job: job.typical(speed)),
        plot("peak_memory", "Peak memory", "MiB", peak, lambda job: job.last(memory) / 2**20),
    ]


def _noise(sweep: Comparison, target: TargetLoss | None) -> list[Plot]:
    note = "In examples, smoothed by the run. It grows while the loss falls: later training bears larger batches."
    curve = _curve(sweep, NOISE, "examples", "Noise scale", "Noise scale by examples", note)
    note = "Each run's median up to the target. Below the dashed diagonal a batch is larger than the noise scale, "
    note += f"and costs over twice the examples of a tiny one. {BARS}."
    key, title = "noise_by_batch", "Noise scale against effective batch"
    plot = _by(
        sweep, "batch", lambda job: noise_scale(job, target), "Noise scale", key, title, note, "noise scale", True
    )
    series = [_named(one, "noise scale") for one in plot.series if len(one.x)]
    if series:
        ticks = [float(x) for x in plot.x.ticks or ()]
        ends = [ticks[0], ticks[-1]] if len(ticks) > 1 else [ticks[0] / 2, ticks[0] * 2]
        series.append(Series("noise scale = batch", ends, ends, 7))
    return [replace(plot, series=series), curve]
