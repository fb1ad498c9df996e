"""The plots of a sweep: their curves and captions."""

import re
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np

from pipeline.report import rate_drift
from pipeline.report.comparison import Comparison
from pipeline.report.critical_batch import NOISE, noise_scale
from pipeline.report.findings import partings
from pipeline.report.html_page import Plot, axis, trace
from pipeline.report.job_results import (
    AXES,
    SIZES,
    Curve,
    JobResult,
    Measure,
    comparable_jobs,
    grouped,
    pooled,
)
from pipeline.report.statistics import Array

POINTS = 600  # the most points of a curve; a longer one is drawn as means
RESULT = "Trajectory and result"  # a section
BARS = "Bars: ± one sample standard deviation over seeds"
FAINT = {"mode": "lines", "opacity": 0.4, "hoverinfo": "skip", "hovertemplate": None}
FALLS = 20.0  # ratio of the largest to the smallest value above which a cost has a logarithmic axis
NOTES = {
    "updates": "Equal effective batches lie on one line where accumulation is exact.",
    "examples": "What it costs in data: a line further left learns more from each example.",
    "seconds": "What it costs in time; evaluation, start-up and the tracing of the first update are left out.",
}


def draw(sweep: Comparison) -> list[Plot]:
    """Return every plot for which the sweep has data."""
    plots = []
    for metric in sweep.metrics:
        section = "Loss" if metric.endswith("/loss") else "Metric"
        plots += [
            _curve(sweep, metric, along, section, note) for along, note in NOTES.items()
        ]
    plots.append(_difference(sweep))
    if quality := sweep.quality:
        final, note = (
            partial(sweep.final, metric=quality),
            f"{BARS}, where there are several.",
        )
        for key in sweep.axes:
            plots.append(
                _by(
                    sweep,
                    key,
                    final,
                    RESULT,
                    f"final_by_{key}",
                    f"Final {quality}",
                    note,
                    quality,
                )
            )
    rate = (
        "The rate that each update used; groups that share a schedule lie on one line."
    )
    plots.append(_curve(sweep, "train/learning_rate", "updates", RESULT, rate))
    by_rate = [
        _loss_by_rate(sweep, f.figures, f.plot)
        for f in rate_drift.findings(sweep)
        if f.plot
    ]
    plots += [*_to_target(sweep), *_costs(sweep), *by_rate, _noise_by_batch(sweep)]
    noise = "In examples, smoothed by the run. It grows while the loss falls: later training bears larger batches."
    plots.append(_curve(sweep, NOISE, "examples", "Noise scale", noise))
    return [plot for plot in plots if any(drawn["x"] for drawn in plot.data)]


def _curve(sweep: Comparison, metric: str, along: str, section: str, note: str) -> Plot:
    traces = []
    for colour, (group, jobs) in enumerate(sweep.groups.items()):
        curves = [
            (job, curve)
            for job in jobs
            if (curve := job.curves.get(metric)) is not None
        ]
        drawn = [
            _points(group, job.along(along, c.steps), c.values, colour)
            for job, c in curves
        ]
        together = [
            (job, curve) for job, curve in curves if job in comparable_jobs(jobs)
        ]
        if len(curves) > 1:  # each is a repetition, behind the mean
            drawn = [
                seed | FAINT | {"line": seed["line"] | {"width": 1}} for seed in drawn
            ]
            drawn += (
                [_points(group, *_mean(together, along), colour)] if together else []
            )
        traces += [
            one | {"showlegend": False, "meta": {"colour": colour, "group": group}}
            for one in drawn
            if one["x"]
        ]
    if any("hoverinfo" in drawn for drawn in traces):
        note += (
            " Thin lines are seeds, the thick one is the mean of those that finished."
        )
    if any(
        len(job.curves[metric].steps) > POINTS
        for job in sweep.jobs
        if metric in job.curves
    ):
        note += f" Long curves are drawn as means over at most {POINTS} stretches."
    values = [value for drawn in traces for value in drawn["y"]]
    falls = metric == NOISE or (
        metric != "train/learning_rate" and sweep.lower_is_better(metric)
    )
    log = falls and min(values, default=0) > 0 and max(values) > FALLS * min(values)
    layout: dict[str, Any] = {"xaxis": axis(AXES[along]), "yaxis": axis(metric, log)}
    if (target := sweep.target) is not None and target.metric == metric:
        line = {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": target.value,
            "y1": target.value,
        }
        layout["shapes"] = [
            line
            | {"label": {"text": "target", "textposition": "end", "yanchor": "bottom"}}
        ]
    title = f"{metric} by {along}"
    return Plot(re.sub(r"[^\w.-]", "_", title), section, title, note, traces, layout)


def _points(name: str, x: Array, y: Array, colour: int) -> dict[str, Any]:
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) > POINTS:
        x, y = (
            np.array([part.mean() for part in np.array_split(values, POINTS)])
            for values in (x, y)
        )
    return trace(name, x, y, colour, "lines+markers" if len(x) < 30 else "lines")


def _mean(curves: list[tuple[JobResult, Curve]], along: str) -> tuple[Array, Array]:
    steps = reduce(np.intersect1d, [curve.steps for _, curve in curves])
    x = np.mean([job.along(along, steps) for job, _ in curves], axis=0)
    return x, np.mean(
        [curve.values[np.isin(curve.steps, steps)] for _, curve in curves], axis=0
    )


def _difference(sweep: Comparison) -> Plot:
    traces = []
    for colour, pair in enumerate(partings(sweep)):
        steps, values = pair.curve.steps.astype(float), pair.curve.values
        shown = np.where(values > 0, values, np.nan if values.any() else 1e-17)
        traces.append(
            _points(f"{pair.other.name} / {pair.base.name}", steps, shown, colour)
        )
    caption = "How far the training losses of two jobs with equal effective batch, seed and config are apart, "
    caption += "relative to their value. Rounding starts it and training amplifies it. "
    caption += "Updates without any difference are left out; where there is none at all, 1e-17 is drawn."
    layout = {
        "xaxis": axis("updates"),
        "yaxis": axis("relative difference of train/loss", log=True),
    }
    return Plot(
        "difference", RESULT, "How far trajectories part", caption, traces, layout
    )


def _by(
    sweep: Comparison,
    key: str,
    value: Measure,
    section: str,
    name: str,
    title: str,
    note: str,
    unit: str,
) -> Plot:
    """Plot `value` by one of `sweep.axes`: a trace for each combination of the others, with means and error bars."""
    left_out = {"seed", key} | (
        SIZES if key in SIZES else set()
    )  # sizes follow from each other
    others = (
        {"": sweep.jobs}
        if key == "group"
        else grouped(sweep.jobs, partial(JobResult.without, keys=left_out))
    )
    settings = grouped(sweep.jobs, setting := partial(JobResult.setting, key=key))
    numbers, is_result = (
        not any(isinstance(x, str) for x in settings),
        section not in ("Cost", "Noise scale"),
    )
    traces = []
    for colour, (other, jobs) in enumerate(others.items()):
        by_setting = grouped(
            [job for job in jobs if job.finished or not is_result], setting
        )
        at = {
            x: spread
            for x in settings
            if (spread := pooled(by_setting.get(x, []), value)) is not None
        }
        at = (
            dict(sorted(at.items()))
            if numbers
            else {str(x): spread for x, spread in at.items()}
        )
        means, bars = (
            [of.mean for of in at.values()],
            [of.deviation or 0.0 for of in at.values()],
        )
        traces.append(
            trace(
                other,
                at,
                means,
                colour,
                "lines+markers" if numbers else "markers",
                bars,
            )
        )
    x: dict[str, Any] = {"type": "category"}
    if numbers:
        label = {"factor": "accumulation factor", "batch": "effective batch size"}.get(
            key, key
        )
        x = axis(
            label,
            log=min(settings, default=0) > 0,
            ticks=sorted({x for drawn in traces for x in drawn["x"]}),
        )
    y = axis(unit) | (
        {"rangemode": "tozero"} if section in ("Cost", "To the target") else {}
    )
    return Plot(
        re.sub(r"[^\w.-]", "_", name),
        section,
        f"{title} by {key}",
        note,
        traces,
        {"xaxis": x, "yaxis": y},
    )


def _to_target(sweep: Comparison) -> list[Plot]:
    if (target := sweep.target) is None:
        return []
    sizes = {"seconds": sweep.axes[0]}
    if (
        "batch" in sweep.axes
    ):  # otherwise all need the same examples, as far as the trajectories agree
        sizes |= {"examples": "batch", "updates": "batch"}
    note, plots = (
        f"Until {target.metric} ≤ {target.value:.4g}; finished jobs that got there. {BARS}.",
        [],
    )
    for along, size in sizes.items():
        what, cost = (
            "time" if along == "seconds" else along,
            partial(sweep.cost, axis=along),
        )
        title = f"{what.capitalize()} to the target"
        plots.append(
            _by(
                sweep,
                size,
                cost,
                "To the target",
                f"{what}_to_target",
                title,
                note,
                AXES[along],
            )
        )
    return plots


def _costs(sweep: Comparison) -> list[Plot]:
    median = "Median over the updates after the first, which is traced while it runs. Bars: over seeds."
    peak = "Of the first GPU, or the resident memory of the process on a CPU; it should not grow with the factor."
    seconds, speed, memory = (
        "perf/update_seconds",
        "perf/examples_per_second",
        "perf/peak_memory_bytes",
    )
    plot = partial(_by, sweep, sweep.axes[0], section="Cost")
    return [
        plot(
            lambda job: job.typical(seconds),
            name="update_seconds",
            title="Time per update",
            note=median,
            unit="s",
        ),
        plot(
            lambda job: job.typical(speed),
            name="speed",
            title="Examples per second",
            note=median,
            unit="examples/s",
        ),
        plot(
            lambda job: job.last(memory) / 2**20,
            name="peak_memory",
            title="Peak memory",
            note=peak,
            unit="MiB",
        ),
    ]


def _loss_by_rate(sweep: Comparison, drift: dict[str, Any], name: str) -> Plot:
    """Plot the final loss by rate, a curve for each batch, and the best rates of a finding of `rate_drift`."""
    loss, note = (
        rate_drift.loss_of(sweep),
        f"{BARS}. A best rate is the vertex of a parabola through three losses.",
    )
    jobs = sorted(
        (job for job in sweep.jobs if job.recipe == drift["recipe"]),
        key=lambda job: job.batch or 0,
    )
    final, title = (
        partial(sweep.final, metric=loss),
        f"{drift['recipe'] or 'Final'} {loss}",
    )
    plot = _by(
        replace(sweep, jobs=jobs),
        "rate",
        final,
        "Best rate by batch",
        name,
        title,
        note,
        loss,
    )
    inner = [batch for batch in drift["rates"] if batch not in drift["edges"]]
    rates, lowest = (
        [drift[key][batch] for batch in inner] for key in ("rates", "losses")
    )
    return replace(
        plot, data=[*plot.data, trace("best rate", rates, lowest, 7, "lines+markers")]
    )


def _noise_by_batch(sweep: Comparison) -> Plot:
    note = "Each run's median up to the target. Below the dashed diagonal a batch is larger than the noise scale, "
    note += f"and costs over twice the examples of a tiny one. {BARS}."
    title, scale = "Noise scale", partial(noise_scale, sweep=sweep)
    plot = _by(
        sweep, "batch", scale, title, "noise_by_batch", title, note, "noise scale"
    )
    traces = [
        drawn | {"name": drawn["name"] or "noise scale"}
        for drawn in plot.data
        if drawn["x"]
    ]
    if batches := [x for drawn in traces for x in drawn["x"]]:
        ends = [min(batches) / 2, max(batches) * 2]
        traces.append(trace("noise scale = batch", ends, ends, 7))
    return replace(
        plot, data=traces, layout=plot.layout | {"yaxis": axis("noise scale", log=True)}
    )
