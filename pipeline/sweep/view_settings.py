"""The settings of MLflow's UI for the view that compares the jobs of a sweep.

They are in a private format of MLflow's UI. The keys below are the keys of MLflow
3.17.2; MLflow uses defaults for missing keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.sweep.parent_run import ParentRun

# Versions of MLflow with which the settings were tested.
TESTED_VERSIONS = ("3.17.", "3.18.")
# Tag of each job: the job's name without the seed. The UI groups jobs by this tag to
# average over seeds. The UI derives a group's color from a hash of the tag's name and
# value; this name was chosen because it gives different colors to the groups of typical
# sweeps.
GROUP_TAG = "sweep.repeats"
_EXAMPLES_SEEN = "train/examples_seen"  # the x axis of training metrics
# Config key → the param that is shown instead: the derived size, since a configured
# size may be null.
_DERIVED_PARAMS = {
    "accumulation.factor": "derived.factor",
    "accumulation.effective_batch_size": "derived.effective_batch_size",
    "accumulation.micro_batch_size": "derived.micro_batch_size",
}
# Number of charts side by side. In a new browser, MLflow's assistant is shown beside
# the charts: in a window 1600 pixels wide, each of three charts was then 198 pixels
# wide, and each of two 301.
COLUMNS = 2


class AxisRange(NamedTuple):
    """The lowest and the highest value of a chart's y axis."""

    low: float
    high: float


def view_settings(parent: ParentRun, ranges: Mapping[str, AxisRange]) -> dict[str, Any]:
    """Return the settings of MLflow's UI that differ from its defaults.

    Args:
        parent: the parent run of the sweep.
        ranges: the ranges of the charts' y axes, by metric; may be empty.
    """
    params = [_shown_param(key) for key in parent.varied if key != "seed"]
    validation_metrics = ["val/loss", *(f"val/{name}" for name in parent.metrics)]

    columns = [f"params.`{param}`" for param in params]
    for metric in ("train/loss", *validation_metrics):
        columns.append(f"metrics.`{metric}`")
    return {
        "searchFilter": f"tags.sweep = '{parent.run_id}'",
        # Not `attributes.start_time`, which means the same: if it orders the runs, the
        # UI nests the jobs below the parent and omits them from its charts.
        "orderByKey": "attributes.created",
        "orderByAsc": True,
        "groupBy": _grouping(parent.varied),
        "runsHiddenMode": "SHOW_ALL",
        "selectedColumns": columns,
        "compareRunCharts": _charts(params, validation_metrics, ranges),
        "compareRunSections": _sections(),
        "isAccordionReordered": True,
        "globalLineChartConfig": {
            "xAxisKey": "metric",
            "selectedXAxisMetricKey": _EXAMPLES_SEEN,
            "lineSmoothness": 0,
        },
    }


def _charts(
    params: Sequence[str],
    validation_metrics: Sequence[str],
    ranges: Mapping[str, AxisRange],
) -> list[dict[str, Any]]:
    """Return the settings of all charts; the UI keeps this order in each section."""
    losses = ["train/loss", *validation_metrics]
    charts = []
    for metric in (*losses, "train/learning_rate", "train/gradient_noise_scale"):
        charts.append(_line_chart("curves", metric, ranges))
    for metric in (*losses, "perf/examples_per_second", "perf/peak_memory_bytes"):
        charts.append(_chart("BAR", "ends", metric))
    for axis in ("step", "time-relative"):
        charts.append(_line_chart("axes", "train/loss", ranges, axis))
    if params:
        options = {
            "selectedParams": params,
            "selectedMetrics": validation_metrics,
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


def _grouping(varied: Sequence[str]) -> dict[str, Any] | None:
    """Return the grouping that averages over seeds.

    Return None if the seed does not vary, or if nothing else does. The runs are grouped
    by the tag `GROUP_TAG`, whose values are short names such as `scaling=sqrt
    factor=4`. They are not grouped by params, since no param names the option of a
    config group, and the UI truncates a list of several params.
    """
    if "seed" not in varied or len(varied) == 1:
        return None
    keys = [{"mode": "tag", "groupByData": GROUP_TAG}]
    return {"aggregateFunction": "average", "groupByKeys": keys}


def _shown_param(key: str) -> str:
    """Return the name of the param that shows a varied config key.

    For a config group, it is the param of the group's `_target_`.
    """
    if "." not in key:
        return f"{key}._target_"
    return _DERIVED_PARAMS.get(key, key)


def _chart(kind: str, section: str, metric: str, axis: str = "") -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": f"{section} {kind} {metric} {axis}",
        "metricSectionId": section,
        "deleted": False,
        "metricKey": metric,
    }


def _line_chart(
    section: str, metric: str, ranges: Mapping[str, AxisRange], axis: str = "metric"
) -> dict[str, Any]:
    """Return a line chart. With the axis "metric", x is the number of examples seen."""
    x_metric = ""
    if axis == "metric":
        # Give `val/` metrics their own x-axis metric. The UI samples a metric and its
        # x-axis metric separately, then joins them by step. Most evaluations would have
        # no sampled point of `train/examples_seen` at their step.
        x_metric = metric.split("/")[0] + "/examples_seen"
    options = {
        "xAxisKey": axis,
        "selectedXAxisMetricKey": x_metric,
        "useGlobalXaxisKey": x_metric == _EXAMPLES_SEEN,
        "selectedMetricKeys": [metric],
        "useGlobalLineSmoothing": True,
    }
    chart = _chart("LINE", section, metric, axis) | options
    # Without a range, a chart that averages runs starts at 0, since the UI fills the
    # area below the runs' band.
    if metric in ranges:
        chart["range"] = {"yMin": ranges[metric].low, "yMax": ranges[metric].high}
    return chart
