"""A sweep in MLflow's UI: the parent run's description, and a view that compares jobs.

A saved view is stored as a tag of the experiment, in a private format of MLflow's UI.
The keys below are the keys of MLflow 3.17.2; MLflow uses defaults for missing keys.
With a version that is not in `TRIED`, the link opens the experiment's plain page.
"""

import base64
import json
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from pipeline.common.errors import say
from pipeline.config.plain import without_seed
from pipeline.sweep.files import question
from pipeline.sweep.parent_run import ParentRun
from pipeline.tracking.foreign_store import LONGEST_TAG

TRIED = ("3.17.", "3.18.")  # versions of MLflow with which the saved view was tested
EXAMPLES = "train/examples_seen"  # the x axis of training metrics
LOCAL = "http://127.0.0.1:5000"  # default address of `pipeline ui`
TAG = "mlflow.sharedViewState."  # experiment tag of a view, followed by the sweep's ID
# Tag of each job: the job's name without the seed. The UI groups jobs by this tag to
# average over seeds. The UI derives a group's color from a hash of the tag's name and
# value; this name was chosen because it gives the groups of usual sweeps different
# colors.
GROUP = "sweep.repeats"
# A chart's range leaves out values whose distance from the middle 96% of the values is
# more than this many times the width of these 96%.
SPIKE = 3.0
# Seconds between two updates of the charts' ranges while a sweep runs. If the values
# take long to read, they are read for at most `READING_SHARE` of the time.
RANGES_EVERY = 60.0
READING_SHARE = 0.05
# Charts side by side. Of three, each was 198 pixels wide in a window of 1600 whose
# right side shows MLflow's assistant, as it does in a new browser; of two, 301.
COLUMNS = 2
# Characters of the description that are reserved for the verdict of the report.
FOR_VERDICT = 2400
# Color-blind safe (Okabe and Ito 2008), without black and yellow, which are hard to see
# on one of the UI's two backgrounds.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Config key → the param that is shown instead: the derived size, since a configured
# size may be null.
DERIVED = {
    "accumulation.factor": "derived.factor",
    "accumulation.effective_batch_size": "derived.effective_batch_size",
    "accumulation.micro_batch_size": "derived.micro_batch_size",
}


def announce(sweep: ParentRun) -> None:
    """Save the view that compares the jobs of a new sweep, and print its URL.

    Also set the description of the parent run, without results, and start a thread that
    keeps the ranges of the charts up to date until the sweep is closed.
    """
    url = link(sweep.uri, _describe(sweep, []))
    condition = ""
    if url.startswith(LOCAL):
        condition = " (once `pipeline ui` runs, which prints it with its port)"
    say(f"compare its runs: {url}{condition}")
    threading.Thread(target=_update_ranges, args=[sweep], daemon=True).start()


def complete(sweep: ParentRun) -> dict[str, Any]:
    """Color the jobs, add their results to the parent's description, and set ranges.

    The ranges of the saved view's charts are computed from the jobs' values.

    Returns:
        The jobs' runs by the job's name.
    """
    children = sweep.children()
    client = sweep.client()
    color(client, {name: run.info.run_id for name, run in children.items()})
    for name, run in children.items():
        if GROUP not in run.data.tags:  # a job of an earlier version
            client.set_tag(run.info.run_id, GROUP, without_seed(name))
    ranges = _ranges(sweep, children.values())
    _describe(sweep, _results(sweep, children), ranges)
    return children


def description(
    sweep: ParentRun, anchor: str, results: Sequence[Sequence[object]]
) -> str:
    """Return the parent's description in Markdown.

    Args:
        sweep: the sweep.
        anchor: URL fragment of the view that compares the jobs.
        results: rows of a table, the header first; empty before the sweep has ended.
            Rows that would exceed the tag's limit, less `FOR_VERDICT` characters, are
            replaced by their number.
    """
    varied = ", ".join(f"`{key}`" for key in sweep.varied) or "nothing"
    title = f"**{sweep.name}**"
    asks = question(sweep.name)
    if asks:
        title += f": {asks}"
    # The link comes first, since the UI shows only three lines until it is expanded.
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
    """Return the URL fragment of the page that lists an experiment's runs.

    The fragment sets the workflow type. Without it, the UI shows the page for GenAI in
    a browser that has not opened the experiment before.
    """
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def view_page(experiment_id: str, sweep_id: str) -> str:
    """Return the URL fragment of the view that is saved for a sweep."""
    page = plain_page(experiment_id)
    return f"{page}&compareRunsMode=CHART&viewStateShareKey={sweep_id}"


def saved_view(
    sweep: ParentRun, ranges: Mapping[str, tuple[float, float]] | None = None
) -> str:
    """Save the view of a sweep, and return its URL fragment, which begins with `#/`.

    If the installed MLflow is not in `TRIED`, or the view is too long for a tag, save
    nothing and return the fragment of the plain page.

    Args:
        sweep: the sweep.
        ranges: the lowest and the highest value of a chart's y axis, by metric.
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
    """Return the URL of `fragment` on the store's server.

    If the store has no server, return the URL on the server of `pipeline ui`.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return f"{LOCAL}/{fragment}"
    host = parts.netloc.rpartition("@")[2]  # without user and password
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}/{fragment}"


def color(client: Any, runs: Mapping[str, str]) -> None:
    """Set the colors of runs in MLflow's UI.

    Jobs that differ only in the seed have the same color.

    Args:
        client: MLflow's client of the store.
        runs: the runs' IDs by the job's name. The colors are assigned in this order.
    """
    settings = {name: without_seed(name) for name in runs}
    order = list(dict.fromkeys(settings.values()))
    for name, run_id in runs.items():
        number = order.index(settings[name])
        client.set_tag(run_id, "mlflow.runColor", COLORS[number % len(COLORS)])


def robust_range(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the range of a chart's y axis: the finite values except spikes.

    A value is a spike if its distance from the middle 96% of the values exceeds `SPIKE`
    times the width of these 96%. A margin of 4% is added on both sides.

    Returns:
        The lower and the upper bound, or None if no two of the values differ.
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
    """Return the settings of MLflow's UI that differ from its defaults.

    For the arguments, see `saved_view`.
    """
    params = [_param(key) for key in sweep.varied if key != "seed"]
    losses = _losses_and_metrics(sweep)
    validation = losses[1:]

    columns = [f"params.`{param}`" for param in params]
    columns += [f"metrics.`{loss}`" for loss in losses]
    return {
        "searchFilter": f"tags.sweep = '{sweep.run_id}'",
        # Not `attributes.start_time`, which means the same: ordered by it, the UI nests
        # the jobs below the parent and omits them from its charts.
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


def _update_ranges(sweep: ParentRun) -> None:
    """Save the view with the ranges of the jobs' values, again and again.

    End once the sweep is closed, as `complete` then saves the view.
    """
    pause = 0.0
    while not sweep.closed.wait(pause):
        started = time.monotonic()
        with suppress(Exception):  # the store may be unreachable for a while
            ranges = _ranges(sweep, sweep.children().values())
            if ranges and not sweep.closed.is_set():
                saved_view(sweep, ranges)
        pause = max(RANGES_EVERY, (time.monotonic() - started) / READING_SHARE)


def _ranges(sweep: ParentRun, runs: Collection[Any]) -> dict[str, tuple[float, float]]:
    """Return the ranges of the charts' y axes, by metric, from the values of runs."""
    client = sweep.client()
    ranges = {}
    for metric in _losses_and_metrics(sweep):
        chart_range = robust_range(_values(client, runs, metric))
        if chart_range is not None:
            ranges[metric] = chart_range
    return ranges


def _losses_and_metrics(sweep: ParentRun) -> list[str]:
    """Return the names of the training loss, the validation loss and the metrics."""
    return ["train/loss", "val/loss", *(f"val/{metric}" for metric in sweep.metrics)]


def _values(client: Any, runs: Iterable[Any], metric: str) -> list[float]:
    """Return the values of a metric at all steps of all runs."""
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
    """Save the view and the parent's description, and return the URL fragment.

    The fragment is the result of `saved_view`.
    """
    fragment = saved_view(sweep, ranges)
    text = description(sweep, fragment, results)
    sweep.client().set_tag(sweep.run_id, "mlflow.note.content", text)
    return fragment


def _results(sweep: ParentRun, children: Mapping[str, Any]) -> list[list[object]]:
    """Return a table with the last metrics of each planned job, the header first."""
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
    """Return the settings of all charts; the UI keeps this order in each section."""
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
    # The UI creates these sections for all other metrics. Collapse them at first.
    for name in ("perf", "train", "val", "Model metrics", "System metrics"):
        sections.append(_section(name, name, display=False))
    return sections


def _section(key: str, name: str, *, display: bool) -> dict[str, Any]:
    return {
        "uuid": key,
        "name": name,
        "display": display,
        "isReordered": True,
        "columns": COLUMNS,
    }


def _range(
    ranges: Mapping[str, tuple[float, float]], metric: str
) -> dict[str, dict[str, float]]:
    """Return the range setting of a chart; empty if the metric has no range.

    Without a range, a chart that averages runs starts at 0, since the UI fills the area
    below the runs' band.
    """
    if metric not in ranges:
        return {}
    low, high = ranges[metric]
    return {"range": {"yMin": low, "yMax": high}}


def _grouping(varied: Sequence[str]) -> dict[str, Any] | None:
    """Return the grouping that averages over seeds.

    Return None if the seed does not vary, or if nothing else does. The runs are grouped
    by the tag `GROUP`, whose values are short names such as `scaling=sqrt factor=4`.
    They are not grouped by params, since no param names the option of a config group,
    and the UI truncates a list of several params.
    """
    if "seed" not in varied or len(varied) == 1:
        return None
    keys = [{"mode": "tag", "groupByData": GROUP}]
    return {"aggregateFunction": "average", "groupByKeys": keys}


def _param(key: str) -> str:
    """Return the name of the param that shows a varied config key.

    For a config group, it is the param of the group's `_target_`.
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
    """Return a line chart. With the axis "metric", x is the number of examples seen."""
    examples = ""
    if axis == "metric":
        # Give `val/` metrics their own x-axis metric. The UI samples a metric and its
        # x-axis metric separately, then joins them by step, and most evaluations would
        # have no sampled `train/` row at their step.
        examples = metric.split("/")[0] + "/examples_seen"
    options = {
        "xAxisKey": axis,
        "selectedXAxisMetricKey": examples,
        "useGlobalXaxisKey": examples == EXAMPLES,
        "selectedMetricKeys": [metric],
        "useGlobalLineSmoothing": True,
    }
    return _chart("LINE", section, metric, axis) | options
