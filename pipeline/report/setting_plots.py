"""Plots of means over seeds against the values of a swept key."""

from dataclasses import dataclass, replace
from typing import Any

from pipeline.report import rate_drift
from pipeline.report.html_page import RESULT, Plot, Trace, axis, plot_key, trace
from pipeline.report.job_results import (
    AXES,
    EXAMPLES_PER_SECOND,
    PEAK_MEMORY,
    SIZES,
    UPDATE_SECONDS,
    JobResult,
    Measure,
    finished_jobs,
    grouped,
    pooled,
)
from pipeline.report.noise_scale import noise_scale
from pipeline.report.rate_drift import Drift
from pipeline.report.statistics import Spread
from pipeline.report.sweep_result import SweepResult

BARS = "Bars: ± one sample standard deviation over seeds"
_LAST_COLOR = 7  # gray


@dataclass(frozen=True)
class _Quantity:
    """A value per job that is plotted against a swept key.

    Attributes:
        measure: returns the value of a job.
        key: the key of the plot.
        section: the section of the page.
        title: the title of the plot, without the swept key.
        caption: the caption of the plot.
        unit: the title of the vertical axis.
        finished_only: whether only finished jobs are plotted.
        from_zero: whether the vertical axis includes 0.
    """

    measure: Measure
    key: str
    section: str
    title: str
    caption: str
    unit: str
    finished_only: bool = True
    from_zero: bool = False


def final_plots(sweep: SweepResult) -> list[Plot]:
    """Plot the final value of the ranking metric `quality` against each swept key."""
    metric = sweep.quality
    if metric is None:
        return []
    plots = []
    for key in sweep.axes:
        quantity = _Quantity(
            measure=lambda job: sweep.final(job, metric),
            key=f"final_by_{key}",
            section=RESULT,
            title=f"Final {metric}",
            caption=f"{BARS}, where there are several.",
            unit=metric,
        )
        plots.append(_plot_by(sweep, key, quantity))
    return plots


def target_plots(sweep: SweepResult) -> list[Plot]:
    """Plot the time to the target; if the batch varies, also examples and updates."""
    target = sweep.target
    if target is None:
        return []
    caption = (
        f"Until {target.metric} ≤ {target.value:.4g}, for finished jobs that reached "
        f"this target. {BARS}."
    )
    swept_key_by_axis = {"seconds": sweep.axes[0]}
    # Jobs with equal batches need about the same number of examples, so examples and
    # updates are plotted only if the batch varies.
    if "batch" in sweep.axes:
        swept_key_by_axis["examples"] = "batch"
        swept_key_by_axis["updates"] = "batch"

    plots = []
    for along, swept_key in swept_key_by_axis.items():
        plots.append(_target_plot(sweep, along, swept_key, caption))
    return plots


def _target_plot(sweep: SweepResult, along: str, swept_key: str, caption: str) -> Plot:
    word = "time" if along == "seconds" else along
    quantity = _Quantity(
        measure=lambda job: sweep.exact_cost(job, along),
        key=f"{word}_to_target",
        section="To the target",
        title=f"{word.capitalize()} to the target",
        caption=caption,
        unit=AXES[along],
        from_zero=True,
    )
    return _plot_by(sweep, swept_key, quantity)


def cost_plots(sweep: SweepResult) -> list[Plot]:
    """Plot time per update, speed and memory against the first swept key."""
    median = (
        "Median over the updates after the first, which is traced while it runs. "
        f"{BARS}."
    )
    peak = (
        "Of the first GPU, or the resident memory of the process on a CPU; it should "
        "not grow with the factor."
    )
    seconds = _Quantity(
        measure=lambda job: job.typical(UPDATE_SECONDS),
        key="update_seconds",
        section="Cost",
        title="Time per update",
        caption=median,
        unit="s",
        finished_only=False,
        from_zero=True,
    )
    speed = replace(
        seconds,
        measure=lambda job: job.typical(EXAMPLES_PER_SECOND),
        key="speed",
        title="Examples per second",
        unit="examples/s",
    )
    memory = replace(
        seconds,
        measure=lambda job: job.last(PEAK_MEMORY) / 2**20,
        key="peak_memory",
        title="Peak memory",
        caption=peak,
        unit="MiB",
    )
    swept_key = sweep.axes[0]
    return [
        _plot_by(sweep, swept_key, seconds),
        _plot_by(sweep, swept_key, speed),
        _plot_by(sweep, swept_key, memory),
    ]


def loss_by_rate_plots(sweep: SweepResult) -> list[Plot]:
    """Plot the final loss against the learning rate, for each recipe with a drift."""
    plots = []
    for index, drift in enumerate(rate_drift.drifts(sweep)):
        plots.append(
            _loss_by_rate_plot(sweep, drift, rate_drift.loss_by_rate_key(index))
        )
    return plots


def _loss_by_rate_plot(sweep: SweepResult, drift: Drift, key: str) -> Plot:
    """Plot loss against learning rate, one curve per batch, and the best rates."""
    loss = rate_drift.loss_metric(sweep)
    jobs = [job for job in sweep.jobs if job.recipe == drift.recipe]
    jobs.sort(key=lambda job: job.effective_batch_size or 0)
    quantity = _Quantity(
        measure=lambda job: sweep.final(job, loss),
        key=key,
        section="Best rate by batch",
        title=f"{drift.recipe or 'Final'} {loss}",
        caption=(
            f"{BARS}. A best rate is the vertex of a parabola through three losses."
        ),
        unit=loss,
    )
    plot = _plot_by(replace(sweep, jobs=jobs), "rate", quantity)

    best_rates = []
    lowest_losses = []
    for losses in drift.batches:
        if losses.edge is None:
            best_rates.append(drift.rates[losses.batch])
            lowest_losses.append(losses.means.min())
    best = trace("best rate", best_rates, lowest_losses, _LAST_COLOR, "lines+markers")
    return replace(plot, data=[*plot.data, best])


def noise_by_batch_plot(sweep: SweepResult) -> Plot:
    """Plot the noise scale against the batch, with the diagonal of equal values."""
    quantity = _Quantity(
        measure=lambda job: noise_scale(job, sweep),
        key="noise_by_batch",
        section="Noise scale",
        title="Noise scale",
        caption=(
            "Each run's median up to the target, or up to its end if it did not reach "
            "the target. Below the dashed diagonal a batch is larger than the noise "
            f"scale, and costs over twice the examples of a tiny one. {BARS}."
        ),
        unit="noise scale",
        finished_only=False,
    )
    plot = _plot_by(sweep, "batch", quantity)

    traces = []
    batches: list[float] = []
    for drawn in plot.data:
        if drawn["x"]:
            traces.append(drawn | {"name": drawn["name"] or "noise scale"})
            batches += drawn["x"]
    if batches:
        ends = [min(batches) / 2, max(batches) * 2]
        traces.append(trace("noise scale = batch", ends, ends, _LAST_COLOR))
    layout = plot.layout | {"yaxis": axis("noise scale", log=True)}
    return replace(plot, data=traces, layout=layout)


def _plot_by(sweep: SweepResult, key: str, quantity: _Quantity) -> Plot:
    """Plot a quantity against a swept key: means over seeds with error bars.

    There is one trace for each combination of the other swept keys.
    """
    values = list(sweep.by_setting(sweep.jobs, key))
    numeric = _are_numbers(values)
    traces = []
    for color, (name, jobs) in enumerate(_jobs_by_other_settings(sweep, key).items()):
        if quantity.finished_only:
            jobs = finished_jobs(jobs)
        spreads = _spreads_by_value(
            sweep.by_setting(jobs, key), values, quantity.measure
        )
        x = list(spreads)
        if not numeric:
            x = [str(value) for value in x]
        means = []
        bars = []
        for spread in spreads.values():
            means.append(spread.mean)
            bars.append(spread.deviation or 0.0)
        mode = "lines+markers" if numeric else "markers"
        traces.append(trace(name, x, means, color, mode, bars))

    x_axis: dict[str, Any] = {"type": "category"}
    if numeric:
        x_axis = _number_axis(key, values, traces)
    y_axis = axis(quantity.unit)
    if quantity.from_zero:
        y_axis["rangemode"] = "tozero"
    return Plot(
        key=plot_key(quantity.key),
        section=quantity.section,
        title=f"{quantity.title} by {key}",
        caption=quantity.caption,
        data=traces,
        layout={"xaxis": x_axis, "yaxis": y_axis},
    )


def _jobs_by_other_settings(sweep: SweepResult, key: str) -> dict[str, list[JobResult]]:
    """Group the jobs by their names without the seed and the swept key `key`.

    The key `group` results in a single group.
    """
    if key == "group":
        return {"": sweep.jobs}
    left_out = {"seed", key}
    # Leave out all sizes if one is plotted, since they determine each other.
    if key in SIZES:
        left_out |= SIZES
    return grouped(sweep.jobs, lambda job: job.without(left_out))


def _are_numbers(values: list[Any]) -> bool:
    return not any(isinstance(value, str) for value in values)


def _spreads_by_value(
    jobs_by_value: dict[Any, list[JobResult]], values: list[Any], measure: Measure
) -> dict[Any, Spread]:
    """Return the spread over jobs for each of the values of a swept key, in plot order.

    Numbers are sorted, while strings keep the order of the sweep. Values without a
    finite measure are left out.
    """
    order = sorted(values) if _are_numbers(values) else values
    spreads = {}
    for value in order:
        spread = pooled(jobs_by_value.get(value, []), measure)
        if spread is not None:
            spreads[value] = spread
    return spreads


def _number_axis(key: str, values: list[float], traces: list[Trace]) -> dict[str, Any]:
    """Return the horizontal axis of a numeric key, with a tick at each point."""
    labels = {"factor": "accumulation factor", "batch": "effective batch size"}
    ticks: set[float] = set()
    for drawn in traces:
        ticks.update(drawn["x"])
    log = min(values, default=0) > 0
    return axis(labels.get(key, key), log, sorted(ticks))
