"""What a person opens: the comparison of a sweep in MLflow's UI, and its report."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.sweep import Sweep


def opened(sweep: Sweep) -> None:
    """Makes the saved view of a sweep that begins, and prints the link that opens it."""
    from pipeline import saved_view

    fragment = _describe(sweep, [])
    link = saved_view.link(sweep.uri, fragment)
    served = " (once `pipeline ui` runs)" if link.startswith(saved_view.LOCAL) else ""
    print(f"compare its runs: {link}{served}", file=sys.stderr)


def prepare() -> None:
    """Imports in a thread what the report is made with, while the jobs run."""
    names = ("pipeline.report", "matplotlib.backends.backend_agg", "matplotlib.figure")
    threading.Thread(target=lambda: list(map(importlib.import_module, names)), daemon=True).start()


def concluded(sweep: Sweep) -> None:
    """Completes the parent's description with the results, and writes the report."""
    from pipeline import saved_view

    children = sweep.children()
    saved_view.color(sweep.client(), {name: run.info.run_id for name, run in children.items()})
    _describe(sweep, _results(sweep.names, children))
    if any("train/loss" in run.data.metrics for run in children.values()):
        publish(sweep.uri, sweep.run_id)


def report(arguments: Sequence[str]) -> int:
    """`pipeline report SWEEP`: the comparison of a sweep, as plots and a table, from MLflow alone."""
    from pipeline import composing

    parser = argparse.ArgumentParser(prog="pipeline report", description=report.__doc__, allow_abbrev=False)
    parser.add_argument("sweep", metavar="SWEEP", help="run ID of the sweep, the start of it, or its run name")
    if not arguments:
        raise ConfigError("SWEEP", "must name a sweep of the store", "")
    options, overrides = parser.parse_known_args(list(arguments))
    publish(composing.composed(overrides).tracking.uri, options.sweep)
    return 0


def publish(uri: str, sweep: str) -> None:
    """Writes the report, logs it to the parent run under `report/`, and prints what was found and where it is."""
    from pipeline import report as reporting
    from pipeline import sweep as sweeping

    client = sweeping.client_of(uri)
    with tempfile.TemporaryDirectory() as folder:
        written = reporting.write(uri, sweep, Path(folder))
        client.log_artifacts(written.run_id, folder, "report")
    print(written)
    print(f"report: {_place(client.get_run(written.run_id).info.artifact_uri)}/report/{written.page.name}")


def _describe(sweep: Sweep, results: Sequence[Sequence[object]]) -> str:
    """Saves the view and the parent's description; returns the part of a URL that opens the view."""
    from pipeline import saved_view

    client = sweep.client()
    fragment = saved_view.saved_view(client, sweep.experiment_id, sweep.run_id, sweep.varied, sweep.metrics, sweep.name)
    text = saved_view.description(sweep.name, _question(sweep.name), sweep.varied, fragment, results)
    client.set_tag(sweep.run_id, "mlflow.note.content", text)
    return fragment


def _question(name: str) -> str:
    """That the sweep file asks in its first comment."""
    from pipeline import composing

    file = composing.sweeps().get(name)
    found = (
        re.search(r"^# Question: *((?:.*\n#  +)*.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if file else None
    )
    return " ".join(found[1].replace("#", " ").split()) if found else ""


def _results(names: Sequence[str], children: dict[str, Any]) -> list[list[object]]:
    """A header and a row for each job: its status and the last values of what was measured."""
    measured = {key for run in children.values() for key in run.data.metrics if key.startswith("val/")}
    keys = sorted(measured - {"val/examples_seen"})
    keys = [*(keys or ["train/loss"]), "perf/examples_per_second"]
    rows: list[list[object]] = [["job", "status", *keys]]
    for name in names:
        run = children.get(name)
        values = [run.data.metrics.get(key) if run is not None else None for key in keys]
        shown = ["" if value is None else f"{value:.4g}" for value in values]
        rows.append([name, run.info.status if run is not None else "no run", *shown])
    return rows


def _place(uri: str) -> str:
    return unquote(urlsplit(uri).path) if uri.startswith("file:") else uri
