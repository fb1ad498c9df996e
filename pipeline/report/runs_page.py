"""The page of one run, or of several runs side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pipeline.config.metric_names import UPDATE_METRICS
from pipeline.report import curve_plots, key_differences
from pipeline.report.findings import FindingsPage, Result, SweepFinding, states
from pipeline.report.html_page import PageParts, Plot, axis, plot_key, render
from pipeline.report.job_results import (
    AXES,
    EXAMPLES_SEEN,
    Curve,
    JobResult,
    comparable_jobs,
    jobs_with,
)
from pipeline.report.sweep_result import SweepResult
from pipeline.report.table import Table
from pipeline.report.wording import SECONDS, joined, number
from pipeline.tracking import horizons
from pipeline.tracking.journal_summary import RankedMetric, ranked_metric

MOST_RUNS = 20  # maximum number of runs on a page
# The headings of the findings, by topic.
TOPICS = {
    "runs": "Runs",
    "keys": "What differs",
    "result": "Result",
}
# The sections of the plots, in the order of the page.
_LOSS = "Loss"
_METRIC = "Metric"
_TRAINING = "Training"
_COST = "Cost"
_SECTIONS = (_LOSS, _METRIC, _TRAINING, _COST)


def page(runs: Sequence[JobResult], selection: str = "") -> FindingsPage:
    """Return the page of one or more runs.

    Args:
        runs: the runs, each with a name of its own.
        selection: the filter string that selected the runs, if there was one.
    """
    names = [run.name for run in runs]
    findings = [states(runs, "runs", "run")]
    tables = [_facts(runs)]
    if len(runs) > 1:
        keys = key_differences.between([run.params for run in runs])
        code = key_differences.between([key_differences.code_of(run) for run in runs])
        findings.append(key_differences.finding(keys, code))
        tables += key_differences.tables(names, keys, code)
    findings.append(_result(runs))
    tables.append(_metrics_table(runs))

    title = f"{len(runs)} runs"
    about = selection or joined(names)
    if len(runs) == 1:
        title = f"Run {names[0]}"
        about = selection or f"MLflow run: {_id_of(runs[0])}"
    parts = PageParts(findings=findings, topics=TOPICS, tables=tables, groups=names)
    footer = (
        "Computed from all rows of these runs, without MLflow's system metrics. A "
        "metric that a run logged only once is not plotted, but is in the table."
    )
    html = render(title, about, plots(runs), footer, parts)
    return FindingsPage(findings, TOPICS, html)


def _facts(runs: Sequence[JobResult]) -> Table:
    """Return the table of facts about runs, without those that no run has."""
    columns = [_facts_of(run) for run in runs]
    rows = []
    for fact in columns[0]:
        cells = [facts[fact] for facts in columns]
        if any(cells):
            rows.append([fact, *cells])
    return Table("Facts", ["fact", *(run.name for run in runs)], rows, has_texts=True)


def _facts_of(run: JobResult) -> dict[str, str]:
    """Return the facts about a run by their names; an unknown fact is empty."""
    steps = [int(curve.steps[-1]) for curve in run.curves.values()]
    examples = ""
    if EXAMPLES_SEEN in run.curves:
        examples = number(run.last(EXAMPLES_SEEN))
    horizon = ""
    in_force = horizons.of_tags(run.tags)
    if in_force:
        horizon = horizons.described(in_force)
    started = ""
    duration = ""
    if run.started is not None:
        time = datetime.fromtimestamp(run.started / 1000, UTC)
        started = f"{time:%Y-%m-%d %H:%M} UTC"
    if run.running_milliseconds is not None:
        duration = number(run.running_milliseconds / 1000, SECONDS)
    return {
        "status": run.status.lower(),
        "failure": run.tags.get("failure", ""),
        "MLflow run": _id_of(run),
        "started": started,
        "duration": duration,
        "updates": str(max(steps, default="")),
        "horizon": horizon,
        "examples": examples,
        "effective batch": str(run.effective_batch_size or ""),
        "factor": str(run.factor or ""),
        "micro-batch": str(run.micro_batch_size or ""),
        "stopped by": run.tags.get("stopped_by", ""),
        "command": run.tags.get("mlflow.source.name", ""),
        **{tag: run.tags.get(tag, "") for tag in key_differences.CODE},
    }


def _id_of(run: JobResult) -> str:
    """Return the ID of a run in MLflow, or how the run gets there."""
    if run.run_id is None:
        return "not in a store yet; pipeline sync uploads it"
    return run.run_id


def _metrics(runs: Sequence[JobResult]) -> list[str]:
    """Return the names of all metrics, in the order of the sections."""
    names: set[str] = set()
    for run in runs:
        names.update(run.curves)
    return sorted(names, key=lambda name: (_SECTIONS.index(_section(name)), name))


def _section(metric: str) -> str:
    """Return the section of the page with the plot of a metric."""
    prefix, _, name = metric.partition("/")
    if prefix == "perf":
        return _COST
    if metric.endswith("loss"):
        return _LOSS
    if name in UPDATE_METRICS:
        return _TRAINING
    return _METRIC


def _collection(runs: Sequence[JobResult]) -> SweepResult:
    """Return the runs as a sweep without a parent, to compare their results."""
    return SweepResult(
        uri="", run_id="", name="", status="FINISHED", varied=[], jobs=list(runs)
    )


def _metrics_table(runs: Sequence[JobResult]) -> Table:
    """Return the table with the last and the best value of each metric of each run."""
    collection = _collection(runs)
    rows = []
    for metric in _metrics(runs):
        lower = collection.lower_is_better(metric)
        has_best = _section(metric) in (_LOSS, _METRIC)
        cells = []
        for run in runs:
            cells.append(_metric_cell(run.curves.get(metric), lower, has_best))
        rows.append([metric, *cells])
    return Table("Metrics", ["metric", *(run.name for run in runs)], rows)


def _metric_cell(curve: Curve | None, lower_is_better: bool, has_best: bool) -> str:
    """Return the last value of a metric, and its best one if it has one."""
    if curve is None:
        return key_differences.ABSENT
    text = number(float(curve.values[-1]))
    finite = np.isfinite(curve.values)
    if not has_best or len(curve.steps) == 1 or not finite.any():
        return text
    # Negate values if higher is better, so that the best one is the lowest.
    sign = 1 if lower_is_better else -1
    index = int(np.where(finite, sign * curve.values, np.inf).argmin())
    best = number(float(curve.values[index]))
    return f"{text}, best {best} at {int(curve.steps[index])}"


@dataclass(frozen=True)
class LastValues(Result):
    """The last values of the metric that ranks the runs.

    Attributes:
        metric: the metric.
        values: its last value in each run that has one, with the best run first.
        examples: the number of examples that each of these runs saw.
    """

    metric: str
    values: dict[str, float]
    examples: list[float]


def _result(runs: Sequence[JobResult]) -> SweepFinding:
    """Report the last value of the metric that ranks the runs."""
    compared = comparable_jobs(runs)
    ranking = _ranking(compared)
    if ranking is None:
        return SweepFinding("result", "There is no metric of training or validation.")
    metric = ranking.name
    lower = not ranking.higher_is_better
    ranked = []
    for run in jobs_with(compared, metric):
        if math.isfinite(run.last(metric)):
            ranked.append(run)
    if not ranked:
        return SweepFinding("result", f"No last value of {metric} is finite.")

    ranked.sort(key=lambda run: run.last(metric), reverse=not lower)
    result = LastValues(
        metric=metric,
        values={run.name: run.last(metric) for run in ranked},
        examples=[run.last(EXAMPLES_SEEN) for run in ranked],
    )
    if len(runs) == 1:
        cell = _metric_cell(ranked[0].curves[metric], lower, has_best=True)
        return SweepFinding("result", f"Last {metric}: {cell}.", result)
    return SweepFinding("result", _ranking_sentences(result, lower), result)


def _ranking(runs: Sequence[JobResult]) -> RankedMetric | None:
    """Return the metric that ranks runs, or None if there is no metric.

    As in `pipeline runs`, it is the metric of `training.keep_best`. The default is the
    validation loss, or else the training loss. The default is also used if the runs
    keep their best checkpoints by different metrics.
    """
    collection = _collection(runs)
    ranked = {ranked_metric(run.params) for run in runs}
    metric = ranked.pop() if len(ranked) == 1 else ranked_metric({})
    logged = collection.metrics
    metric = metric.or_training_loss(logged)
    if metric.name in logged:
        return metric
    # Another program logged the runs.
    name = collection.quality
    if name is None:
        return None
    return RankedMetric(name, not collection.lower_is_better(name))


def _ranking_sentences(result: LastValues, lower_is_better: bool) -> str:
    names = list(result.values)
    values = list(result.values.values())
    direction = "lower" if lower_is_better else "higher"
    text = f"Last {result.metric}, where {direction} is better: "
    if len(set(values)) == 1:
        text += f"{number(values[0])} in {joined(names)}."
    else:
        text += (
            f"{names[0]} is best, at {number(values[0])}, and {names[-1]} worst, at "
            f"{number(values[-1])}. It takes several seeds of each, as in a sweep, to "
            "tell whether chance explains the difference."
        )
    examples = result.examples
    if len(set(examples)) > 1 and not np.isnan(examples).any():
        fewest = number(min(examples))
        text += f" The runs saw from {fewest} to {number(max(examples))} examples."
    return text


def plots(runs: Sequence[JobResult]) -> list[Plot]:
    """Return a plot of each metric that a run logged at two updates or more.

    The axis is that of the examples if the effective batches differ and each run has
    logged its examples, or else that of the updates.
    """
    batches = {run.effective_batch_size for run in runs}
    along = "updates"
    if len(batches) > 1 and len(jobs_with(runs, EXAMPLES_SEEN)) == len(runs):
        along = "examples"
    collection = _collection(runs)
    drawn = []
    for position, metric in enumerate(_metrics(runs)):
        if any(len(run.curves[metric].steps) > 1 for run in jobs_with(runs, metric)):
            # Different names may yield the same key, but keys must be unique.
            key = f"{plot_key(metric)}-{position}"
            drawn.append(_plot(collection, metric, along, key))
    return [plot for plot in drawn if plot.has_points()]


def _plot(collection: SweepResult, metric: str, along: str, key: str) -> Plot:
    """Plot a metric of all runs against an axis of `AXES`."""
    traces = []
    not_finite = 0
    is_long = False
    for color, run in enumerate(collection.jobs):
        curve = run.curves.get(metric)
        if curve is None:
            continue
        x = run.along(along, curve.steps)
        drawn = curve_plots.curve_trace(run.name, x, curve.values, color)
        meta = {"color": color, "group": run.name}
        traces.append(drawn | {"showlegend": False, "meta": meta})
        not_finite += int(np.count_nonzero(~np.isfinite(curve.values)))
        is_long = is_long or len(curve.steps) > 2 * curve_plots.BINS

    captions = []
    if is_long:
        captions.append(curve_plots.REDUCED)
    if not_finite:
        captions.append(f"NaN or infinite values that are not drawn: {not_finite}.")
    section = _section(metric)
    is_cost = section == _LOSS or collection.lower_is_better(metric)
    log = section in (_LOSS, _METRIC) and is_cost and curve_plots.falls_far(traces)
    layout: dict[str, Any] = {"xaxis": axis(AXES[along]), "yaxis": axis(metric, log)}
    title = f"{metric} by {along}"
    return Plot(key, section, title, " ".join(captions), traces, layout)
