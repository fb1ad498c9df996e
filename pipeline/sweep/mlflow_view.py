"""A sweep in MLflow's UI: its parent run's description, and a view that compares jobs.

A saved view is a tag of the experiment in a private format of MLflow's UI. The keys
below are those of MLflow 3.17.2; it uses defaults for missing ones. With a version that
is not in `TRIED`, the link opens the experiment's plain page.
"""

import base64
import json
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pipeline.common.errors import say
from pipeline.config.plain import without_seed
from pipeline.sweep.files import question
from pipeline.sweep.parent_run import ParentRun
from pipeline.tracking.foreign_store import LONGEST_TAG

TRIED = ("3.17.", "3.18.")  # versions of MLflow with which the saved view was tested
EXAMPLES = "train/examples_seen"  # the x axis of training metrics
LOCAL = "http://127.0.0.1:5000"  # address of `pipeline ui`
TAG = "mlflow.sharedViewState."
# Tag of each job: its name without the seed. By it the UI averages seeds. The UI hashes
# the tag's name and value to a color: with this name, those of usual sweeps differ.
GROUP = "sweep.repeats"
# A value that is so many times farther from the bulk of the values than these are from
# each other is left out of a chart's range.
SPIKE = 3.0
# Of the description's characters, these are for the verdict of the report.
FOR_VERDICT = 2400
# Color-blind safe (Okabe and Ito 2008), without black and yellow because of the UI's
# two backgrounds.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# The derived sizes, as one of the configured ones may be null.
DERIVED = {
    "accumulation.factor": "derived.factor",
    "accumulation.effective_batch_size": "derived.effective_batch_size",
    "accumulation.micro_batch_size": "derived.micro_batch_size",
}


def announce(sweep: ParentRun) -> None:
    """Save the view of a new sweep and the parent's description; print the view's URL.

    The view compares the sweep's jobs.
    """
    url = link(sweep.uri, _describe(sweep, []))
    condition = ""
    if url.startswith(LOCAL):
        condition = " (once `pipeline ui` runs, which prints it with its port)"
    say(f"compare its runs: {url}{condition}")


def complete(sweep: ParentRun) -> dict[str, Any]:
    """Color the jobs and add their results to the parent's description.

    The charts get the range of the jobs' values. Return the jobs' runs by name.
    """
    children = sweep.children()
    client = sweep.client()
    color(client, {name: run.info.run_id for name, run in children.items()})
    for name, run in children.items():
        if GROUP not in run.data.tags:  # a job of an earlier version
            client.set_tag(run.info.run_id, GROUP, without_seed(name))
    ranges = {}
    for metric in _losses_and_metrics(sweep):
        chart_range = robust_range(_values(client, children.values(), metric))
        if chart_range is not None:
            ranges[metric] = chart_range
    _describe(sweep, _results(sweep, children), ranges)
    return children


def description(
    sweep: ParentRun, anchor: str, results: Sequence[Sequence[object]]
) -> str:
    """Return the parent's description in Markdown.

    Args:
        sweep: the sweep.
        anchor: URL fragment of the view that compares the jobs.
        results: rows of a table, the header first; rows that do not fit the tag,
            which has the verdict of the report too, are counted instead. Empty before
            the sweep has ended.
    """
    varied = ", ".join(f"`{key}`" for key in sweep.varied) or "nothing"
    title = f"**{sweep.name}**"
    asks = question(sweep.name)
    if asks:
        title += f": {asks}"
    # The link comes first, since the UI folds all but three lines.
    lines = [
        f"[Compare the runs of this sweep]({anchor}). They differ in {varied}.",
        "",
        title,
        "",
    ]
    if not results:
        return "\n".join([*lines, "The results come here when the sweep has ended."])

    header, *rows = [_row(cells) for cells in results]
    lines += [header, "|" + " --- |" * len(results[0])]
    for number, row in enumerate(rows):
        rest = f"\n\nand {len(rows) - number} more"
        length = len("\n".join([*lines, row])) + len(rest)
        if length > LONGEST_TAG - FOR_VERDICT:
            return "\n".join(lines) + rest
        lines.append(row)
    return "\n".join(lines)


def plain_page(experiment_id: str) -> str:
    """Return the URL fragment of an experiment's runs.

    Without a workflow type, a new browser opens every experiment as one for GenAI.
    """
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def view_page(experiment_id: str, sweep_id: str) -> str:
    """Return the URL fragment of the view that is saved for a sweep."""
    page = plain_page(experiment_id)
    return f"{page}&compareRunsMode=CHART&viewStateShareKey={sweep_id}"


def saved_view(
    sweep: ParentRun, ranges: Mapping[str, tuple[float, float]] | None = None
) -> str:
    """Save the view of a sweep; return its URL fragment from `#/` on.

    If MLflow would not show the view, the fragment is that of the plain page.

    Args:
        sweep: the sweep.
        ranges: the lowest and the highest value of a chart, by metric.
    """
    import mlflow

    page = plain_page(sweep.experiment_id)
    if not mlflow.__version__.startswith(TRIED):
        return page

    state = json.dumps(view_state(sweep, ranges), separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(state, 9)).decode()
    view = json.dumps(
        {
            "name": f"{sweep.name} {sweep.run_id[:6]}",
            "createdAt": int(time.time() * 1000),
            "state": f"deflate;{packed}",
        }
    )
    if len(view) > LONGEST_TAG:
        return page
    sweep.client().set_experiment_tag(sweep.experiment_id, TAG + sweep.run_id, view)
    return view_page(sweep.experiment_id, sweep.run_id)


def link(uri: str, fragment: str) -> str:
    """Return the URL of `fragment` on the server of the store.

    A store without a server is shown by `pipeline ui`.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return f"{LOCAL}/{fragment}"
    host = parts.netloc.rpartition("@")[2]  # without user and password
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}/{fragment}"


def color(client: Any, runs: Mapping[str, str]) -> None:
    """Color runs in the order of the jobs; `runs` has their IDs by the job's name.

    Jobs that differ only by the seed share a color.
    """
    settings = {name: without_seed(name) for name in runs}
    order = list(dict.fromkeys(settings.values()))
    for name, run_id in runs.items():
        number = order.index(settings[name])
        client.set_tag(run_id, "mlflow.runColor", COLORS[number % len(COLORS)])


def robust_range(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the range of a chart: all values but spikes; None without any.

    A value is a spike if it is beyond the middle 96% of the values by more than `SPIKE`
    times their extent.
    """
    import numpy as np

    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return None
    low, high = np.quantile(finite, (0.02, 0.98))
    reach = SPIKE * (high - low)
    kept = finite[(finite >= low - reach) & (finite <= high + reach)]
    if kept.min() == kept.max():
        return None
    margin = 0.04 * (kept.max() - kept.min())
    return float(kept.min() - margin), float(kept.max() + margin)


def view_state(
    sweep: ParentRun, ranges: Mapping[str, tuple[float, float]] | None = None
) -> dict[str, Any]:
    """Return the part of the UI's state that differs from its default.

    For the arguments see `saved_view`.
    """
    params = [_param(key) for key in sweep.varied if key != "seed"]
    losses = _losses_and_metrics(sweep)
    validation = losses[1:]

    columns = [f"params.`{param}`" for param in params]
    columns += [f"metrics.`{loss}`" for loss in losses]
    return {
        "searchFilter": f"tags.sweep = '{sweep.run_id}'",
        # By its other name, `attributes.start_time`, the UI nests the jobs in the
        # parent, out of its charts.
        "orderByKey": "attributes.created",
        "orderByAsc": True,
        "groupBy": _grouping(sweep.varied),
        "runsHiddenMode": "SHOW_ALL",
        "selectedColumns": columns,
        "compareRunCharts": _charts(params, validation, ranges or {}),
        "compareRunSections": _sections(),
        "isAccordionReordered": True,
        "globalLineChartConfig": {
            "xAxisKey": "metric",
            "selectedXAxisMetricKey": EXAMPLES,
            "lineSmoothness": 0,
        },
    }


def _losses_and_metrics(sweep: ParentRun) -> list[str]:
    """Return the training loss, the validation loss and the validation metrics."""
    return ["train/loss", "val/loss", *(f"val/{metric}" for metric in sweep.metrics)]


def _values(client: Any, runs: Iterable[Any], metric: str) -> list[float]:
    """Return all values of a metric in the runs."""
    values = []
    for run in runs:
        if metric in run.data.metrics:
            points = client.get_metric_history(run.info.run_id, metric)
            values += [point.value for point in points]
    return values


def _describe(
    sweep: ParentRun,
    results: Sequence[Sequence[object]],
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Save the view and the parent's description; return the view's URL fragment."""
    fragment = saved_view(sweep, ranges)
    text = description(sweep, fragment, results)
    sweep.client().set_tag(sweep.run_id, "mlflow.note.content", text)
    return fragment


def _results(sweep: ParentRun, children: Mapping[str, Any]) -> list[list[object]]:
    """Return the last metrics of each job as rows, the header first."""
    measured: set[str] = set()
    for run in children.values():
        measured.update(run.data.metrics)
    measured.discard("val/examples_seen")
    validation = sorted(key for key in measured if key.startswith("val/"))
    keys = [*(validation or ["train/loss"]), "perf/examples_per_second"]

    rows: list[list[object]] = [["job", "status", *keys]]
    for name in sweep.names:
        run = children.get(name)
        if run is None:
            rows.append([name, "no run", *[""] * len(keys)])
            continue
        cells = []
        for key in keys:
            cell = ""
            if key in run.data.metrics:
                cell = f"{run.data.metrics[key]:.4g}"
            cells.append(cell)
        rows.append([name, run.info.status, *cells])
    return rows


def _row(cells: Iterable[object]) -> str:
    escaped = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _charts(
    params: Sequence[str],
    validation: Sequence[str],
    ranges: Mapping[str, tuple[float, float]],
) -> list[dict[str, Any]]:
    """Return the charts, in their order in each section."""
    losses = ["train/loss", *validation]
    charts = []
    for metric in (*losses, "train/learning_rate", "train/gradient_noise_scale"):
        charts.append(_line("curves", metric) | _range(ranges, metric))
    for metric in (*losses, "perf/examples_per_second", "perf/peak_memory_bytes"):
        charts.append(_chart("BAR", "ends", metric))
    for axis in ("step", "time-relative"):
        charts.append(_line("axes", "train/loss", axis) | _range(ranges, "train/loss"))
    if params:
        options = {
            "selectedParams": params,
            "selectedMetrics": validation,
            "showAllRuns": True,
        }
        charts.append(_chart("PARALLEL", "ends", "") | options)
    return charts


def _sections() -> list[dict[str, Any]]:
    names = {
        "curves": "By examples seen",
        "ends": "At the end",
        "axes": "By updates and by time",
    }
    sections = [_section(key, name, display=True) for key, name in names.items()]
    # The UI makes these itself for the many other metrics; they begin folded.
    for name in ("perf", "train", "val", "Model metrics", "System metrics"):
        sections.append(_section(name, name, display=False))
    return sections


def _section(key: str, name: str, *, display: bool) -> dict[str, Any]:
    return {"uuid": key, "name": name, "display": display, "isReordered": True}


def _range(
    ranges: Mapping[str, tuple[float, float]], metric: str
) -> dict[str, dict[str, float]]:
    """Return the part of a chart with its range.

    Without one, the UI begins at 0 where it averages runs: their band is filled to 0.
    """
    if metric not in ranges:
        return {}
    low, high = ranges[metric]
    return {"range": {"yMin": low, "yMax": high}}


def _grouping(varied: Sequence[str]) -> dict[str, Any] | None:
    """Return the grouping that averages seeds; None if they do not vary.

    It is by a tag, whose values are short names such as `scaling=sqrt factor=4`: config
    groups have no param that tells them apart, and several params are cut by the UI.
    """
    if "seed" not in varied or len(varied) == 1:
        return None
    keys = [{"mode": "tag", "groupByData": GROUP}]
    return {"aggregateFunction": "average", "groupByKeys": keys}


def _param(key: str) -> str:
    """Return the param that shows a varied config key.

    A config group is shown by its `_target_`.
    """
    if "." not in key:
        return f"{key}._target_"
    return DERIVED.get(key, key)


def _chart(kind: str, section: str, metric: str, axis: str = "") -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": f"{section} {kind} {metric} {axis}",
        "metricSectionId": section,
        "deleted": False,
        "metricKey": metric,
    }


def _line(section: str, metric: str, axis: str = "metric") -> dict[str, Any]:
    """Return a line chart; the axis "metric" is that of examples seen."""
    examples = ""
    if axis == "metric":
        # The UI samples a metric and its x axis separately, then joins them by step.
        # Most evaluations would have no row of `train/` at their step, so `val/` has
        # its own axis.
        examples = metric.split("/")[0] + "/examples_seen"
    options = {
        "xAxisKey": axis,
        "selectedXAxisMetricKey": examples,
        "useGlobalXaxisKey": examples == EXAMPLES,
        "selectedMetricKeys": [metric],
        "useGlobalLineSmoothing": True,
    }
    return _chart("LINE", section, metric, axis) | options
