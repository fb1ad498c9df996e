"""Plots of metrics during training, with one color per group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.report.html_page import RESULT, Plot, Trace, axis, plot_key, trace
from pipeline.report.job_results import (
    AXES,
    LEARNING_RATE,
    JobResult,
    comparable_jobs,
    comparable_state,
    jobs_with,
)
from pipeline.report.noise_scale import NOISE
from pipeline.report.statistics import Array
from pipeline.report.sweep_result import SweepResult
from pipeline.report.trajectories import trajectory_pairs

# Of a long curve, the lowest and the highest value in each of this many parts of its
# axis are drawn. A part is about a pixel wide.
BINS = 600
FEW_POINTS = 30  # A curve with fewer points has markers.
# An axis is logarithmic if the largest value is more than this many times the smallest
# one, and either the metric is the noise scale or lower values of it are better.
FALLS = 20.0

# The axes of `AXES` against which a metric is plotted, with the captions of the plots.
CAPTIONS = {
    "updates": (
        "Jobs with equal effective batches lie on one line where accumulation is exact."
    ),
    "examples": (
        "The cost in data: a line further left learns more from each example."
    ),
    "seconds": (
        "The cost in time; evaluation, start-up and the tracing of the first update "
        "are left out."
    ),
}

# The caption of a plot with a curve that was reduced; see `extremes`.
REDUCED = (
    f"Of a long curve, the lowest and the highest value in each of {BINS} parts are "
    "drawn, so that no spike is lost."
)

# The style of the curve of a single seed behind the mean of its group.
_FAINT = {"mode": "lines", "opacity": 0.4, "hoverinfo": "skip", "hovertemplate": None}


def metric_plots(sweep: SweepResult) -> list[Plot]:
    """Plot each metric against updates, examples and seconds."""
    plots = []
    for metric in sweep.metrics:
        section = "Loss" if metric.endswith("/loss") else "Metric"
        for along, caption in CAPTIONS.items():
            plots.append(_curve_plot(sweep, metric, along, section, caption))
    return plots


def rate_plot(sweep: SweepResult) -> Plot:
    """Plot the learning rate against updates."""
    caption = (
        "The rate that each update used; groups that share a schedule lie on one line."
    )
    return _curve_plot(sweep, LEARNING_RATE, "updates", RESULT, caption)


def noise_plot(sweep: SweepResult) -> Plot:
    """Plot the gradient noise scale against examples."""
    caption = (
        "In examples, smoothed by the run. The scale grows while the loss falls: later "
        "in training, larger batches are useful."
    )
    return _curve_plot(sweep, NOISE, "examples", "Noise scale", caption)


def _curve_plot(
    sweep: SweepResult, metric: str, along: str, section: str, caption: str
) -> Plot:
    """Plot a metric against an axis of `AXES`, with one color per group."""
    traces = []
    for color, (group, jobs) in enumerate(sweep.groups.items()):
        for drawn in _group_traces(group, jobs, metric, along, color):
            if drawn["x"]:
                # The legend of the page hides and shows a group in all plots.
                meta = {"color": color, "group": group}
                traces.append(drawn | {"showlegend": False, "meta": meta})

    if any("hoverinfo" in drawn for drawn in traces):
        state = comparable_state(sweep.groups.values())
        caption += f" Thin lines are seeds; the thick one is the mean of those {state}."
    if _longest_curve(sweep.jobs, metric) > 2 * BINS:
        caption += f" {REDUCED}"

    is_cost = metric == NOISE or sweep.lower_is_better(metric)
    log = metric != LEARNING_RATE and is_cost and falls_far(traces)
    layout: dict[str, Any] = {"xaxis": axis(AXES[along]), "yaxis": axis(metric, log)}
    target = sweep.target
    if target is not None and target.metric == metric:
        layout["shapes"] = [_target_line(target.value)]
    title = f"{metric} by {along}"
    return Plot(plot_key(title), section, title, caption, traces, layout)


def _longest_curve(jobs: Sequence[JobResult], metric: str) -> int:
    """Return the number of points in the longest curve of the metric."""
    lengths = [len(job.curves[metric].steps) for job in jobs_with(jobs, metric)]
    return max(lengths, default=0)


def _group_traces(
    group: str, jobs: list[JobResult], metric: str, along: str, color: int
) -> list[Trace]:
    """Return the curve of a group.

    If several jobs have the metric, return a faint curve for each of them, then the
    mean curve of those that are comparable; see `comparable_jobs`.
    """
    traces = []
    for job in jobs_with(jobs, metric):
        curve = job.curves[metric]
        x = job.along(along, curve.steps)
        traces.append(curve_trace(group, x, curve.values, color))
    if len(traces) < 2:
        return traces

    traces = [_faint(drawn) for drawn in traces]
    averaged = jobs_with(comparable_jobs(jobs), metric)
    if averaged:
        mean = _mean_curve(averaged, metric, along)
        traces.append(curve_trace(group, mean.x, mean.y, color))
    return traces


def _faint(drawn: Trace) -> Trace:
    line = drawn["line"] | {"width": 1}
    return drawn | _FAINT | {"line": line}


def curve_trace(name: str, x: Array, y: Array, color: int) -> Trace:
    """Return the trace of a curve's finite points, reduced by `extremes`.

    Args:
        name: the name in the legend.
        x: the positions of the points, in ascending order.
        y: their values.
        color: the index into the colors of the theme.
    """
    known = np.isfinite(x) & np.isfinite(y)
    x = x[known]
    y = y[known]
    drawn = extremes(x, y)
    x = x[drawn]
    y = y[drawn]
    mode = "lines+markers" if len(x) < FEW_POINTS else "lines"
    return trace(name, x, y, color, mode)


def extremes(x: Array, y: Array) -> NDArray[np.int64]:
    """Return the indices of the points of a curve that are drawn, in ascending order.

    For a curve with more than `2 * BINS` points, these are the first and the last
    point, and the lowest and the highest point in each of `BINS` equally wide parts of
    the axis. So no spike is lost, and each point that is drawn was logged. For any
    other curve, these are all points.

    Args:
        x: the positions of the points, in ascending order and finite.
        y: their finite values.
    """
    if len(x) <= 2 * BINS:
        return np.arange(len(x))
    edges = np.linspace(x[0], x[-1], BINS + 1)
    bins = np.searchsorted(edges[1:-1], x, side="right")

    # In this order, each bin begins with its lowest point and ends with its highest.
    by_bin_and_value = np.lexsort((y, bins))
    begins = np.flatnonzero(np.diff(bins[by_bin_and_value], prepend=-1))
    ends = np.append(begins[1:], len(x)) - 1
    lowest = by_bin_and_value[begins]
    highest = by_bin_and_value[ends]
    return np.unique(np.concatenate([[0], lowest, highest, [len(x) - 1]]))


@dataclass(frozen=True)
class _Points:
    """Points of a curve."""

    x: Array
    y: Array


def _mean_curve(jobs: Sequence[JobResult], metric: str, along: str) -> _Points:
    """Return the mean curve of the jobs at the steps that all jobs logged."""
    steps = jobs[0].curves[metric].steps
    for job in jobs[1:]:
        steps = np.intersect1d(steps, job.curves[metric].steps)

    xs = []
    ys = []
    for job in jobs:
        curve = job.curves[metric]
        xs.append(job.along(along, steps))
        ys.append(curve.values[np.isin(curve.steps, steps)])
    return _Points(np.mean(xs, axis=0), np.mean(ys, axis=0))


def falls_far(traces: list[Trace]) -> bool:
    """Return whether the values call for a logarithmic axis, if lower ones are better.

    They do if all values are positive and vary by more than a factor of `FALLS`.
    """
    values: list[float] = []
    for drawn in traces:
        values += drawn["y"]
    if not values or min(values) <= 0:
        return False
    return max(values) > FALLS * min(values)


def _target_line(value: float) -> dict[str, Any]:
    """Return a horizontal line across the plot, in Plotly's format."""
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "label": {"text": "target", "textposition": "end", "yanchor": "bottom"},
    }


def difference_plot(sweep: SweepResult) -> Plot:
    """Plot the loss differences between jobs that should train the same trajectory."""
    traces = []
    for color, pair in enumerate(trajectory_pairs(sweep)):
        values = pair.curve.values
        # A logarithmic axis cannot show 0: leave zeros out, or draw 1e-17 if all are 0.
        zero = np.nan if values.any() else 1e-17
        shown = np.where(values > 0, values, zero)
        steps = pair.curve.steps.astype(float)
        name = f"{pair.other.name} / {pair.base.name}"
        traces.append(curve_trace(name, steps, shown, color))

    caption = (
        "How far apart the training losses of two jobs with equal effective batch, "
        "seed and config are, relative to their value. Training amplifies a difference "
        "that rounding has caused. Updates without any difference are left out; if no "
        "update has one, 1e-17 is drawn."
    )
    layout = {
        "xaxis": axis("updates"),
        "yaxis": axis("relative difference of train/loss", log=True),
    }
    title = "How far trajectories diverge"
    return Plot("difference", RESULT, title, caption, traces, layout)
