"""A sweep in MLflow's UI: the description of its parent run, and a saved view with charts that compare its jobs.

A saved view is a tag of the experiment in a private format of MLflow's UI. The keys below are those of MLflow 3.17.2;
it uses defaults for missing ones. With a version that is not in `TRIED`, the link opens the experiment's plain page.
"""

import base64
import json
import re
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pipeline.common.errors import say
from pipeline.sweep.files import question
from pipeline.sweep.parent_run import ParentRun
from pipeline.tracking.foreign_store import LONGEST_TAG

TRIED = ("3.17.", "3.18.")  # versions of MLflow with which the saved view was tested
EXAMPLES = "train/examples_seen"  # the x axis of training metrics
LOCAL = "http://127.0.0.1:5000"  # address of `pipeline ui`
TAG = "mlflow.sharedViewState."
# Color-blind safe (Okabe and Ito 2008), without black and yellow because of the UI's two backgrounds.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# The derived sizes, as one of the configured ones may be null. Also, the UI hashes a group's name to a color, and with
# `accumulation.factor` 8 and 16 have the same hash.
DERIVED = {
    f"accumulation.{size}": f"derived.{size}"
    for size in ("factor", "effective_batch_size", "micro_batch_size")
}


def announce(sweep: ParentRun) -> None:
    """Save the view of a new sweep and the parent's description; print the link that compares its jobs."""
    shown = link(sweep.uri, _describe(sweep, []))
    served = " (once `pipeline ui` runs)" if shown.startswith(LOCAL) else ""
    say(f"compare its runs: {shown}{served}")


def complete(sweep: ParentRun) -> dict[str, Any]:
    """Color the jobs and add their results to the parent's description; return the jobs' runs by name."""
    children = sweep.children()
    color(sweep.client(), {name: run.info.run_id for name, run in children.items()})
    measured = {
        key
        for run in children.values()
        for key in run.data.metrics
        if key.startswith("val/")
    }
    keys = [
        *(sorted(measured - {"val/examples_seen"}) or ["train/loss"]),
        "perf/examples_per_second",
    ]
    rows: list[list[object]] = [["job", "status", *keys]]
    for name in sweep.names:
        run = children.get(name)
        last = run.data.metrics if run else {}
        values = [f"{last[key]:.4g}" if key in last else "" for key in keys]
        rows.append([name, run.info.status if run else "no run", *values])
    _describe(sweep, rows)
    return children


def description(
    sweep: ParentRun, anchor: str, results: Sequence[Sequence[object]]
) -> str:
    """Return the parent's description in Markdown; rows of `results` that do not fit its tag are counted instead."""
    differ = ", ".join(f"`{key}`" for key in sweep.varied) or "nothing"
    # The link comes first, since the UI folds all but three lines.
    lines = [
        f"[Compare the runs of this sweep]({anchor}). They differ in {differ}.",
        "",
    ]
    lines += [
        f"**{sweep.name}**" + (f": {asked}" if (asked := question(sweep.name)) else ""),
        "",
    ]
    if not results:
        return "\n".join([*lines, "The results come here when the sweep has ended."])
    header, *rows = (_row(cells) for cells in results)
    lines += [header, "|" + " --- |" * len(results[0])]
    for number, row in enumerate(rows):
        rest = f"\n\nand {len(rows) - number} more"
        if len("\n".join([*lines, row])) + len(rest) > LONGEST_TAG:
            return "\n".join(lines) + rest
        lines.append(row)
    return "\n".join(lines)


def _describe(sweep: ParentRun, results: Sequence[Sequence[object]]) -> str:
    fragment = saved_view(sweep)
    sweep.client().set_tag(
        sweep.run_id, "mlflow.note.content", description(sweep, fragment, results)
    )
    return fragment


def _row(cells: Iterable[object]) -> str:
    return (
        "| "
        + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
        + " |"
    )


def saved_view(sweep: ParentRun) -> str:
    """Save the view of a sweep; return its URL fragment from `#/` on, or the plain page's."""
    import mlflow

    # Without a workflow type, a new browser opens every experiment as one for GenAI.
    page = f"#/experiments/{sweep.experiment_id}/runs?workflowType=machine_learning"
    if not mlflow.__version__.startswith(TRIED):
        return page
    state = json.dumps(view_state(sweep), separators=(",", ":")).encode()
    text = "deflate;" + base64.b64encode(zlib.compress(state, 9)).decode()
    view = json.dumps(
        {
            "name": f"{sweep.name} {sweep.run_id[:6]}",
            "createdAt": int(time.time() * 1000),
            "state": text,
        }
    )
    if len(view) > LONGEST_TAG:
        return page
    sweep.client().set_experiment_tag(sweep.experiment_id, TAG + sweep.run_id, view)
    return f"{page}&compareRunsMode=CHART&viewStateShareKey={sweep.run_id}"


def link(uri: str, fragment: str) -> str:
    """Return the URL of `fragment` on the store's server, or on that of `pipeline ui` if the store has none."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return f"{LOCAL}/{fragment}"
    host = parts.netloc.rpartition("@")[2]  # without user and password
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}/{fragment}"


def color(client: Any, runs: Mapping[str, str]) -> None:
    """Color the runs, given their IDs by job, not at random: jobs that differ only by the seed share a color."""
    settings = {name: re.sub(r"(^| )seed=\S+", "", name) or name for name in runs}
    order = list(dict.fromkeys(settings.values()))
    for name, run_id in runs.items():
        client.set_tag(
            run_id, "mlflow.runColor", COLORS[order.index(settings[name]) % len(COLORS)]
        )


def view_state(sweep: ParentRun) -> dict[str, Any]:
    """Return the UI's state that differs from its default."""
    params = [_param(key) for key in sweep.varied if key != "seed"]
    ends = ["val/loss", *(f"val/{metric}" for metric in sweep.metrics)]
    losses = ["train/loss", *ends]
    charts = [
        *(
            _line("curves", key)
            for key in [*losses, "train/learning_rate", "train/gradient_noise_scale"]
        ),
        *(
            _chart("BAR", "ends", key)
            for key in [*losses, "perf/examples_per_second", "perf/peak_memory_bytes"]
        ),
        *(_line("axes", "train/loss", axis) for axis in ("step", "time-relative")),
    ]
    if params:
        chosen = {
            "selectedParams": params,
            "selectedMetrics": ends,
            "showAllRuns": True,
        }
        charts.append(_chart("PARALLEL", "ends", "") | chosen)
    sections = {
        "curves": "By examples seen",
        "ends": "At the end",
        "axes": "By updates and by time",
    }
    # Sections that the UI makes itself for the many other metrics: folded.
    folded = {
        name: name
        for name in ("perf", "train", "val", "Model metrics", "System metrics")
    }
    return {
        "searchFilter": f"tags.sweep = '{sweep.run_id}'",
        # By its other name, `attributes.start_time`, the UI nests the jobs in the parent, out of its charts.
        "orderByKey": "attributes.created",
        "orderByAsc": True,
        "groupBy": _grouping(sweep.varied),
        "runsHiddenMode": "SHOW_ALL",
        "selectedColumns": [
            *(f"params.`{param}`" for param in params),
            *(f"metrics.`{loss}`" for loss in losses),
        ],
        "compareRunCharts": charts,
        "compareRunSections": [
            {
                "uuid": uuid,
                "name": name,
                "display": uuid in sections,
                "isReordered": True,
            }
            for uuid, name in (sections | folded).items()
        ],
        "isAccordionReordered": True,
        "globalLineChartConfig": {
            "xAxisKey": "metric",
            "selectedXAxisMetricKey": EXAMPLES,
            "lineSmoothness": 0,
        },
    }


def _grouping(varied: Sequence[str]) -> dict[str, Any] | None:
    """Return the grouping that averages seeds or shows one key; None where no single param tells the runs apart."""
    keys = [key for key in varied if key != "seed"]
    if (
        not keys
        or any("." not in key for key in keys)
        or (len(keys) > 1 and "seed" not in varied)
    ):
        return None
    by = [{"mode": "param", "groupByData": _param(key)} for key in keys]
    return {"aggregateFunction": "average", "groupByKeys": by}


def _param(key: str) -> str:
    """Return the param that shows a varied config key: for a config group, its `_target_`."""
    return DERIVED.get(key, key) if "." in key else f"{key}._target_"


def _chart(kind: str, section: str, metric: str, axis: str = "") -> dict[str, Any]:
    uuid = f"{section} {kind} {metric} {axis}"
    return {
        "type": kind,
        "uuid": uuid,
        "metricSectionId": section,
        "deleted": False,
        "metricKey": metric,
    }


def _line(section: str, metric: str, axis: str = "metric") -> dict[str, Any]:
    # The UI samples a metric and its x axis separately, then joins them by step. Most evaluations would have no row of
    # `train/` at their step, so `val/` has its own axis.
    examples = metric.split("/")[0] + "/examples_seen" if axis == "metric" else ""
    chosen = {
        "xAxisKey": axis,
        "selectedXAxisMetricKey": examples,
        "useGlobalXaxisKey": examples == EXAMPLES,
    }
    chosen |= {"selectedMetricKeys": [metric], "useGlobalLineSmoothing": True}
    return _chart("LINE", section, metric, axis) | chosen
