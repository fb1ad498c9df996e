"""The page of MLflow's UI that compares a sweep: a saved view, the link that opens it, and the colours of the runs.

A saved view is a tag of the experiment that MLflow's UI reads and writes; it is no public interface. The keys below
are those of MLflow 3.17.2; the UI fills in its defaults for what is not said. Where the installed version is not one
of `TRIED`, the link opens the experiment's plain page.
"""

from __future__ import annotations

import base64
import json
import re
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

TRIED = ("3.17.", "3.18.")  # versions of MLflow in whose UI the saved view was seen to work
EXAMPLES = "train/examples_seen"  # the x axis of what is measured in training
LOCAL = "http://127.0.0.1:5000"  # where `pipeline ui` serves a store that has no server of its own
LONGEST_TAG = 5000  # characters; what every MLflow store takes
TAG = "mlflow.sharedViewState."
# Okabe and Ito 2008, told apart by colour-blind readers too; without black and yellow, on the UI's two backgrounds.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# The config may hold null for one of these three, which is then derived. Another reason: the UI takes a group's colour
# from a hash of its name, and under `accumulation.` the hash is the same for factor 8 and 16.
DERIVED = {f"accumulation.{size}": f"derived.{size}" for size in ("factor", "effective_batch_size", "micro_batch_size")}


def saved_view(
    client: Any, experiment_id: str, sweep_run_id: str, varied: Sequence[str], metrics: Iterable[str], name: str
) -> str:
    """Save the view of a sweep, or save it again; its runs need not be there yet.

    The jobs differ in the config keys `varied`. They measure `metrics` beside the loss, each as in `val/NAME`.

    Returns:
        The part of a URL behind the server's address, from `#/` on: of the plain page where MLflow's version was not
        tried, or where the view is too long for a tag.
    """
    import mlflow

    # A browser that never chose a mode opens every experiment for GenAI, whatever the experiment's tags say.
    page = f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if not mlflow.__version__.startswith(TRIED):
        return page
    state = json.dumps(view_state(sweep_run_id, varied, metrics), separators=(",", ":")).encode()
    packed = "deflate;" + base64.b64encode(zlib.compress(state, 9)).decode()
    view = json.dumps({"name": f"{name} {sweep_run_id[:6]}", "createdAt": int(time.time() * 1000), "state": packed})
    if len(view) > LONGEST_TAG:
        return page
    client.set_experiment_tag(experiment_id, TAG + sweep_run_id, view)
    return f"{page}&compareRunsMode=CHART&viewStateShareKey={sweep_run_id}"


def link(uri: str, fragment: str) -> str:
    """Return the address that opens `fragment` on the store's server, else on the one that `pipeline ui` starts."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return f"{LOCAL}/{fragment}"
    host = parts.netloc.rpartition("@")[2]  # without user and password
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}/{fragment}"


def color(client: Any, runs: Mapping[str, str]) -> None:
    """Give each setting a colour of its own, for runs by the name of the job; the seed alone makes no setting.

    Without one the UI draws a colour at random for each run.
    """
    settings = {name: re.sub(r"(^| )seed=\S+", "", name) or name for name in runs}
    order = list(dict.fromkeys(settings.values()))
    for name, run_id in runs.items():
        client.set_tag(run_id, "mlflow.runColor", COLORS[order.index(settings[name]) % len(COLORS)])


def view_state(sweep_run_id: str, varied: Sequence[str], metrics: Iterable[str]) -> dict[str, Any]:
    """Return what the UI is to show, as far as it is not what the UI shows by default."""
    params = [_param(key) for key in varied if key != "seed"]
    ends = ["val/loss", *(f"val/{metric}" for metric in metrics)]
    losses = ["train/loss", *ends]
    charts = [
        *(_line("curves", key) for key in [*losses, "train/learning_rate", "train/gradient_noise_scale"]),
        *(_chart("BAR", "ends", key) for key in [*losses, "perf/examples_per_second", "perf/peak_memory_bytes"]),
        _line("axes", "train/loss", "step"),
        _line("axes", "train/loss", "time-relative"),
    ]
    if params:
        chosen = {"selectedParams": params, "selectedMetrics": ends, "showAllRuns": True}
        charts.append(_chart("PARALLEL", "ends", "") | chosen)
    sections = {"curves": "By examples seen", "ends": "At the end", "axes": "By updates and by time"}
    # The UI adds a chart of every other metric: folded, as there are many.
    folded = {name: name for name in ("perf", "train", "val", "Model metrics", "System metrics")}
    return {
        "searchFilter": f"tags.sweep = '{sweep_run_id}'",
        # Ordered by `attributes.start_time` the UI adds the parent to what the filter found and folds the jobs below,
        # where no chart sees them. Ordered by the same time under its other name, it lists the jobs alone.
        "orderByKey": "attributes.created",
        "orderByAsc": True,
        "groupBy": _grouping(varied),
        "runsHiddenMode": "SHOW_ALL",
        "selectedColumns": [*(f"params.`{param}`" for param in params), *(f"metrics.`{loss}`" for loss in losses)],
        "compareRunCharts": charts,
        "compareRunSections": [
            {"uuid": uuid, "name": name, "display": uuid in sections, "isReordered": True}
            for uuid, name in (sections | folded).items()
        ],
        "isAccordionReordered": True,
        "globalLineChartConfig": {"xAxisKey": "metric", "selectedXAxisMetricKey": EXAMPLES, "lineSmoothness": 0},
    }


def _grouping(varied: Sequence[str]) -> dict[str, Any] | None:
    """Return the grouping into one averaged curve for each setting, or None for one curve for each run.

    A run's name says more than its group's, so there are groups only where they average seeds, or where one value is
    all that differs. Where a config group differs there are none: no one param tells `optimizer=sgd` from `=momentum`.
    """
    keys = [key for key in varied if key != "seed"]
    if not keys or any("." not in key for key in keys) or (len(keys) > 1 and "seed" not in varied):
        return None
    by = [{"mode": "param", "groupByData": _param(key)} for key in keys]
    return {"aggregateFunction": "average", "groupByKeys": by}


def _param(key: str) -> str:
    """Return the param that shows a varied config key; a config group shows in what it builds."""
    return DERIVED.get(key, key) if "." in key else f"{key}._target_"


def _chart(kind: str, section: str, metric: str, axis: str = "") -> dict[str, Any]:
    uuid = f"{section} {kind} {metric} {axis}"
    return {"type": kind, "uuid": uuid, "metricSectionId": section, "deleted": False, "metricKey": metric}


def _line(section: str, metric: str, axis: str = "metric") -> dict[str, Any]:
    # The UI joins a metric and its x axis by step, after thinning out both: most of the few evaluations would find no
    # `train/` row of their step, so `val/` has an axis of its own.
    examples = metric.split("/")[0] + "/examples_seen" if axis == "metric" else ""
    chosen = {"xAxisKey": axis, "selectedXAxisMetricKey": examples, "useGlobalXaxisKey": examples == EXAMPLES}
    chosen |= {"selectedMetricKeys": [metric], "useGlobalLineSmoothing": True}
    return _chart("LINE", section, metric, axis) | chosen
