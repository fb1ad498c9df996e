"""The plots of a sweep: which there are, their curves and their captions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np

from pipeline.report import statistics, target_loss
from pipeline.report.comparison import AXES, Comparison, Curve, JobResult, comparable_jobs, grouped, pooled
from pipeline.report.critical_batch import NOISE, noise_scale
from pipeline.report.plotly_figure import Plot, axis, trace
from pipeline.report.target_loss import TargetLoss
from pipeline.report.trajectories import partings

POINTS = 600  # the most points of a drawn curve; a longer one is drawn as means
RESULT = "Trajectory and result"  # a section
BARS = "Bars: ± one sample standard deviation over seeds"
FALLS = 20.0  # a cost whose largest value is more than this many times its smallest gets a logarithmic axis


def draw(sweep: Comparison) -> list[Plot]:
    """Return every plot for which the sweep has data."""
    target = target_loss.choose(sweep)
    plots = [_curves(sweep, metric, axis, target) for metric in sweep.metrics for axis in AXES]
    plots += [_difference(sweep), *_final(sweep)]
    rate = "The rate that each update used; groups that share a schedule lie on one line."
    plots.append(_curve(sweep, "train/learning_rate", "updates", RESULT, "Learning rate by update", rate))
    plots += [*_to_target(sweep, target), *_costs(sweep), *_noise(sweep, target)]
    return [plot for plot in plots if any(trace["x"] for trace in plot.data)]


def _curves(sweep: Comparison, metric: str, along: str, target: TargetLoss | None) -> Plot:
    level = target.value if target is not None and target.metric == metric else None
    notes = {
        "updates": "Equal effective batches lie on one line where accumulation is exact.",
        "examples": "What it costs in data: a line further left learns more from each example.",
        "seconds": "What it costs in time; evaluation, start-up and the tracing of the first update are left out.",
    }
    section = "Loss" if metric.endswith("/loss") else "Metric"
    return _curve(sweep, metric, along, section, f"{metric} by {along}", notes[along], level)


def _curve(
    sweep: Comparison, metric: str, along: str, section: str, title: str, note: str, level: float | None = None
) -> Plot:
    traces = []
    for colour, (group, jobs) in enumerate(sweep.groups.items()):
        curves = [(job, curve) for job in jobs if (curve := job.curves.get(metric)) is not None]
        faint = len(curves) > 1
        draw_one = partial(_points, name=group, colour=colour, by_group=True)
        traces += [draw_one(job.along(along, c.steps), c.values, faint=faint) for job, c in curves]
        together = [(job, curve) for job, curve in curves if job in comparable_jobs(jobs)]
        if faint and together:
            traces.append(draw_one(*_mean(together, along)))
    traces = [one for one in traces if one["x"]]
    if any("hoverinfo" in one for one in traces):
        note += " Thin lines are seeds, the thick one is the mean of those that finished."
    if any(len(curve.steps) > POINTS for job in sweep.jobs if (curve := job.curves.get(metric)) is not None):
        note += f" Long curves are drawn as means over at most {POINTS} stretches."
    values = [value for one in traces for value in one["y"]]
    falls = metric == NOISE or (metric != "train/learning_rate" and sweep.lower_is_better(metric))
    log = falls and min(values, default=0) > 0 and max(values) > FALLS * min(values)
    layout: dict[str, Any] = {"xaxis": axis(AXES[along]), "yaxis": axis(metric, log)}
    if level is not None:
        label = {"text": "target", "textposition": "end", "yanchor": "bottom"}
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level}
        layout["shapes"] = [line | {"label": label}]
    return Plot(re.sub(r"[^\w.-]", "_", f"{metric} by {along}"), section, title, note, traces, layout)


def _points(x: statistics.Array, y: statistics.Array, **options: Any) -> dict[str, Any]:
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) > POINTS:
        edges = np.linspace(0, len(x), POINTS + 1).astype(int)[:-1]
        counts = np.diff(np.append(edges, len(x)))
        x, y = np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts
    marked = len(x) < 30 and not options.get("faint")
    return trace(x=x, y=y, mode="lines+markers" if marked else "lines", **options)


def _mean(curves: list[tuple[JobResult, Curve]], along: str) -> tuple[statistics.Array, statistics.Array]:
    """Return the mean over the updates that all curves have: a mean over fewer seeds would jump where one ends."""
    steps = reduce(np.intersect1d, [curve.steps for _, curve in curves])
    x = np.mean([job.along(along, steps) for job, _ in curves], axis=0)
    return x, np.mean([curve.values[np.isin(curve.steps, steps)] for _, curve in curves], axis=0)


def _difference(sweep: Comparison) -> Plot:
    traces = []
    for colour, pair in enumerate(partings(sweep)):
        values = pair.curve.values
        shown = np.where(values > 0, values, np.nan if values.any() else 1e-17)
        name = f"{pair.other} / {pair.one}"
        traces.append(_points(pair.curve.steps.astype(float), shown, name=name, colour=colour))
    caption = "How far the training losses of two jobs with equal effective batch, seed and config are apart, "
    caption += "relative to their value. Rounding starts it and training amplifies it. "
    caption += "Updates without any difference are left out; where there is none at all, 1e-17 is drawn."
    layout = {"xaxis": axis("updates"), "yaxis": axis("relative difference of train/loss", log=True)}
    return Plot("difference", RESULT, "How far trajectories part", caption, traces, layout)


def _final(sweep: Comparison) -> list[Plot]:
    metric = sweep.quality
    if metric is None:
        return []
    value, note = _finished(partial(sweep.final, metric=metric)), f"{BARS}, where there are several."
    return [
        _by(sweep, size, value, RESULT, f"final_by_{size}", f"Final {metric} by {size}", note, metric)
        for size in _sizes(sweep)
    ]


def _finished(value: Callable[[JobResult], float]) -> Callable[[JobResult], float]:
    return lambda job: value(job) if job.finished else math.nan


def _sizes(sweep: Comparison) -> list[str]:
    """Return which of `factor` and `batch` vary, else `group`."""
    return [size for size in ("factor", "batch") if len(grouped(sweep.jobs, size)) > 1] or ["group"]


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
    """Return `value` over `factor`, `batch` or `group`: one trace a family, a mean with its bar at each x."""
    of_groups = size == "group"
    families = {"": sweep.jobs} if of_groups else sweep.families
    traces = []
    for colour, (family, jobs) in enumerate(families.items()):
        at = {x: spread for x, of in grouped(jobs, size).items() if (spread := pooled(of, value)) is not None}
        xs = list(at) if of_groups else sorted(at)
        means, bars = [at[x].mean for x in xs], [at[x].deviation or 0.0 for x in xs]
        traces.append(trace(family, xs, means, colour, "markers" if of_groups else "lines+markers", bars))
    x: dict[str, Any] = {"type": "category"}
    if not of_groups:
        name = {"factor": "accumulation factor", "batch": "effective batch size"}[size]
        x = axis(name, log=True, ticks=sorted({x for one in traces for x in one["x"]}))
    y = axis(unit, log) | ({"rangemode": "tozero"} if section in ("Cost", "To the target") else {})
    return Plot(key, section, title, note, traces, {"xaxis": x, "yaxis": y})


def _to_target(sweep: Comparison, target: TargetLoss | None) -> list[Plot]:
    if target is None:
        return []
    axes = [("seconds", _sizes(sweep)[0])]
    if "batch" in _sizes(sweep):  # else all cost the same examples, as far as the trajectories agree
        axes += [("examples", "batch"), ("updates", "batch")]
    note = f"Until {target.metric} ≤ {target.value:.4g}; finished jobs that got there. {BARS}."
    found = []
    for along, size in axes:
        cost = _finished(partial(target.cost, axis=along))
        key = "time_to_target" if along == "seconds" else f"{along}_to_target"
        title, unit = f"{along.capitalize()} to the target by {size}", "seconds in updates"
        unit = unit if along == "seconds" else along
        plot = _by(sweep, size, cost, "To the target", key, title, note, unit)
        found.append(_with_prediction(sweep, target, plot) if along == "examples" else plot)
    return found


def _with_prediction(sweep: Comparison, target: TargetLoss, plot: Plot) -> Plot:
    """Add what the noise scale predicts: E ∝ 1 + B / B_noise, through the smallest batch's measured cost."""
    predicted = []
    for measured, (family, jobs) in zip(plot.data, sweep.families.items(), strict=True):
        scale = statistics.spread([noise_scale(job, target) for job in jobs])
        if scale is None or len(measured["x"]) < 2:
            continue
        batches = np.geomspace(measured["x"][0], measured["x"][-1], 40)
        costs = measured["y"][0] * (scale.mean + batches) / (scale.mean + batches[0])
        name = f"{family} predicted by the noise scale".strip()
        predicted.append(trace(name, batches, costs, measured["meta"]["colour"] + 5))
    if not predicted:
        return plot
    caption = f"{plot.caption} The prediction goes through the smallest batch: E ∝ 1 + B / noise scale."
    return replace(plot, caption=caption, data=[*_named(plot.data, "measured"), *predicted])


def _named(traces: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [one | {"name": one["name"] or name} for one in traces]


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
    key, title, scale = "noise_by_batch", "Noise scale against effective batch", partial(noise_scale, target=target)
    plot = _by(sweep, "batch", scale, "Noise scale", key, title, note, "noise scale", log=True)
    traces = [one for one in _named(plot.data, "noise scale") if one["x"]]
    if traces:
        batches = [x for one in traces for x in one["x"]]
        ends = [min(batches) / 2, max(batches) * 2]
        traces.append(trace("noise scale = batch", ends, ends, 7))
    return [replace(plot, data=traces), curve]
