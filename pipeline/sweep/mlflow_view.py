"""A sweep in MLflow's UI: the parent run's description, and a view that compares jobs.

A saved view is a tag of the experiment, with the settings of `view_settings`. With a
version of MLflow that is not in `TESTED_VERSIONS`, the link opens the experiment's list
of runs. In this module, a fragment is the part of a URL from `#/`, which names a page
of the UI.
"""

import base64
import json
import re
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from pipeline.common.errors import say
from pipeline.config.plain import without_seed
from pipeline.sweep import files
from pipeline.sweep.parent_run import ParentRun
from pipeline.sweep.view_settings import (
    GROUP_TAG,
    TESTED_VERSIONS,
    AxisRange,
    view_settings,
)
from pipeline.tracking.foreign_store import LONGEST_TAG, NOTE

LOCAL_SERVER = "http://127.0.0.1:5000"  # default address of `pipeline ui`
# Experiment tag of a saved view, followed by the sweep's ID.
VIEW_TAG = "mlflow.sharedViewState."
# A chart's range leaves out values whose distance from the middle 96% of the values is
# more than this many times the width of these 96%.
_SPIKE_DISTANCE = 3.0
# Seconds between two updates of the charts' ranges while a sweep runs. If the values
# take long to read, they are read for at most `_READING_SHARE` of the time.
RANGES_EVERY = 60.0
_READING_SHARE = 0.05
# Number of characters in the description that are reserved for the report's verdict.
_RESERVED_FOR_VERDICT = 2400
# A comment in Markdown, which is not shown: the user's own text may follow it.
_END = "<!-- end of the sweep's description -->"
# The part of a parent's description that was written here: the link, which the headline
# of a verdict may precede, and all that follows up to the comment.
_OWN_PART = re.compile(
    r"(?:^\*\*[^*\n]*\*\* )?\[Compare the runs of this sweep\].*?" + re.escape(_END),
    re.DOTALL | re.MULTILINE,
)
# Colors that color-blind readers can tell apart (Okabe and Ito 2008), without black and
# yellow: each of these is hard to see on one of the UI's two backgrounds.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def announce(parent: ParentRun, closed: threading.Event) -> None:
    """Save the view that compares the jobs of a sweep, and print its URL.

    Also set the description of the parent run, without results, and start a thread that
    keeps the ranges of the charts up to date until the sweep is closed.

    Args:
        parent: the parent run of the sweep.
        closed: is set when the sweep is closed.
    """
    fragment = save_view(parent, {})
    _set_description(parent, fragment, [])
    url = page_url(parent.uri, fragment)
    condition = ""
    if url.startswith(LOCAL_SERVER):
        condition = " (start `pipeline ui`, which prints this address with its port)"
    say(f"compare its runs: {url}{condition}")
    threading.Thread(target=_update_ranges, args=[parent, closed], daemon=True).start()


def complete(parent: ParentRun) -> dict[str, Any]:
    """Color the jobs, add their results to the parent's description, and set ranges.

    The ranges of the saved view's charts are computed from the jobs' values.

    Returns:
        The jobs' runs by the job's name.
    """
    children = parent.children()
    client = parent.client()
    set_colors(client, {name: run.info.run_id for name, run in children.items()})
    for name, run in children.items():
        if GROUP_TAG not in run.data.tags:  # a job of an earlier version
            client.set_tag(run.info.run_id, GROUP_TAG, without_seed(name))

    fragment = save_view(parent, _axis_ranges(parent, children.values()))
    _set_description(parent, fragment, _result_table(parent, children))
    return children


def description(
    parent: ParentRun,
    fragment: str,
    result_table: Sequence[Sequence[object]],
    other_text: int = 0,
) -> str:
    """Return the parent's description in Markdown.

    Args:
        parent: the parent run of the sweep.
        fragment: fragment of the view that compares the jobs.
        result_table: the cells of each row, the header first; empty before the sweep
            has ended. Rows that do not fit into the tag's limit, less
            `_RESERVED_FOR_VERDICT` characters, are replaced by a line with their
            number.
        other_text: the number of characters in the tag that the user wrote.
    """
    varied_keys = ", ".join(f"`{key}`" for key in parent.varied) or "nothing"
    title = f"**{parent.name}**"
    question = files.question(parent.name)
    if question:
        title += f": {question}"
    # The link comes first, since the UI shows only three lines until it is expanded.
    lines = [
        f"[Compare the runs of this sweep]({fragment}). They differ in {varied_keys}.",
        "",
        title,
        "",
    ]
    if not result_table:
        lines += [
            "The results will appear here when all jobs have ended. Until then: "
            f"`pipeline report {parent.run_id}`",
            _END,
        ]
        return "\n".join(lines)

    header, *rows = [_markdown_row(cells) for cells in result_table]
    lines += [header, "|" + " --- |" * len(result_table[0])]
    most = LONGEST_TAG - _RESERVED_FOR_VERDICT - other_text
    for number, row in enumerate(rows):
        omission = ["", f"and {len(rows) - number} more", _END]
        if len("\n".join([*lines, row, *omission])) > most:
            lines += omission
            return "\n".join(lines)
        lines.append(row)
    return "\n".join([*lines, "", _END])


def runs_fragment(experiment_id: str) -> str:
    """Return the fragment of the page that lists an experiment's runs.

    The fragment sets the workflow type. Without it, the UI shows the page for GenAI in
    a browser that has not opened the experiment before.
    """
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning"


def view_fragment(experiment_id: str, sweep_id: str) -> str:
    """Return the fragment of the view that is saved for a sweep."""
    list_of_runs = runs_fragment(experiment_id)
    return f"{list_of_runs}&compareRunsMode=CHART&viewStateShareKey={sweep_id}"


def save_view(parent: ParentRun, ranges: Mapping[str, AxisRange]) -> str:
    """Save the view of a sweep, and return its fragment.

    If the installed MLflow is not in `TESTED_VERSIONS`, or the view is too long for a
    tag, save nothing and return the fragment of the list of runs.

    Args:
        parent: the parent run of the sweep.
        ranges: the ranges of the charts' y axes, by metric; may be empty.
    """
    import mlflow

    list_of_runs = runs_fragment(parent.experiment_id)
    if not mlflow.__version__.startswith(TESTED_VERSIONS):
        return list_of_runs

    settings = json.dumps(view_settings(parent, ranges), separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(settings.encode(), 9)).decode()
    view = json.dumps(
        {
            "name": f"{parent.name} {parent.run_id[:6]}",
            "createdAt": int(time.time() * 1000),
            "state": f"deflate;{packed}",
        }
    )
    if len(view) > LONGEST_TAG:
        return list_of_runs
    key = VIEW_TAG + parent.run_id
    parent.client().set_experiment_tag(parent.experiment_id, key, view)
    return view_fragment(parent.experiment_id, parent.run_id)


def page_url(uri: str, fragment: str) -> str:
    """Return the URL of `fragment` on the store's server.

    If the store has no server, return the URL on the server of `pipeline ui`.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return f"{LOCAL_SERVER}/{fragment}"
    host = parts.netloc.rpartition("@")[2]  # without user and password
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}/{fragment}"


def set_colors(client: Any, run_ids: Mapping[str, str]) -> None:
    """Set the colors of runs in MLflow's UI.

    Jobs that differ only in the seed have the same color.

    Args:
        client: an MLflow client for the store.
        run_ids: the runs' IDs by the job's name. The colors are assigned in this order.
    """
    colors: dict[str, str] = {}  # by the job's name without the seed
    for name, run_id in run_ids.items():
        next_color = _COLORS[len(colors) % len(_COLORS)]
        color = colors.setdefault(without_seed(name), next_color)
        client.set_tag(run_id, "mlflow.runColor", color)


def robust_range(values: Sequence[float]) -> AxisRange | None:
    """Return the range of a chart's y axis: the finite values except spikes.

    A value is a spike if its distance from the middle 96% of the values exceeds
    `_SPIKE_DISTANCE` times the width of these 96%. A margin of 4% is added on both
    sides.

    Returns:
        The range, or None if fewer than two distinct values remain without the spikes.
    """
    import numpy as np

    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return None
    low, high = np.quantile(finite, (0.02, 0.98))
    distance = _SPIKE_DISTANCE * (high - low)
    kept = finite[(finite >= low - distance) & (finite <= high + distance)]
    if kept.min() == kept.max():
        return None
    margin = 0.04 * (kept.max() - kept.min())
    return AxisRange(float(kept.min() - margin), float(kept.max() + margin))


def _update_ranges(parent: ParentRun, closed: threading.Event) -> None:
    """Save the view at intervals, with ranges from the jobs' values so far.

    End once the sweep is closed, since `complete` then saves the view.
    """
    pause = 0.0
    while not closed.wait(pause):
        started = time.monotonic()
        with suppress(Exception):  # The store may be unreachable for a while.
            ranges = _axis_ranges(parent, parent.children().values())
            if ranges and not closed.is_set():
                save_view(parent, ranges)
        pause = max(RANGES_EVERY, (time.monotonic() - started) / _READING_SHARE)


def _axis_ranges(parent: ParentRun, runs: Collection[Any]) -> dict[str, AxisRange]:
    """Return the ranges of the charts' y axes, by metric, from the values of runs."""
    client = parent.client()
    ranges = {}
    validation_metrics = [f"val/{name}" for name in parent.metrics]
    for metric in ("train/loss", "val/loss", *validation_metrics):
        axis_range = robust_range(metric_values(client, runs, metric))
        if axis_range is not None:
            ranges[metric] = axis_range
    return ranges


def metric_values(client: Any, runs: Iterable[Any], metric: str) -> list[float]:
    """Return the values of a metric at all steps of all runs."""
    values = []
    for run in runs:
        if metric in run.data.metrics:
            points = client.get_metric_history(run.info.run_id, metric)
            values += [point.value for point in points]
    return values


def _set_description(
    parent: ParentRun, fragment: str, result_table: Sequence[Sequence[object]]
) -> None:
    """Set the parent's description, but keep what a user wrote before or after it.

    For the arguments, see `description`.
    """
    client = parent.client()
    note = client.get_run(parent.run_id).data.tags.get(NOTE, "")
    before = ""
    after = ""
    match = _OWN_PART.search(note)
    if match is not None:
        before = note[: match.start()]
        after = note[match.end() :]
    of_user = len(before) + len(after)
    text = description(parent, fragment, result_table, of_user)
    client.set_tag(parent.run_id, NOTE, f"{before}{text}{after}")


def _result_table(parent: ParentRun, children: Mapping[str, Any]) -> list[list[object]]:
    """Return a table with the last metrics of each planned job, the header first."""
    measured: set[str] = set()
    for run in children.values():
        measured.update(run.data.metrics)
    measured.discard("val/examples_seen")
    columns = sorted(metric for metric in measured if metric.startswith("val/"))
    if not columns:
        columns = ["train/loss"]
    columns.append("perf/examples_per_second")

    rows: list[list[object]] = [["job", "status", *columns]]
    for name in parent.job_names:
        run = children.get(name)
        if run is None:
            rows.append([name, "no run", *[""] * len(columns)])
            continue
        cells = []
        for metric in columns:
            cell = ""
            if metric in run.data.metrics:
                cell = f"{run.data.metrics[metric]:.4g}"
            cells.append(cell)
        rows.append([name, run.info.status, *cells])
    return rows


def _markdown_row(cells: Iterable[object]) -> str:
    escaped = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(escaped)} |"
