"""The verb `pipeline report`: the comparison of a sweep, as plots and a table, from MLflow alone."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline import compose
from pipeline.errors import ConfigError
from pipeline.sweep import parent_run


def report(arguments: Sequence[str]) -> int:
    """Compare the jobs of a sweep, as plots and a table, from MLflow alone."""
    parser = argparse.ArgumentParser(prog="pipeline report", description=report.__doc__, allow_abbrev=False)
    parser.add_argument("sweep", metavar="SWEEP", help="run ID of the sweep, the start of it, or its run name")
    if not arguments:
        raise ConfigError("SWEEP", "must name a sweep of the store", "")
    options, overrides = parser.parse_known_args(list(arguments))
    publish(compose.composed(overrides).tracking.uri, options.sweep)
    return 0


def publish(uri: str, sweep: str) -> None:
    """Write the report, log it to the parent run under `report/`, and print what was found and where it is."""
    from pipeline.report import page

    client = parent_run.client_of(uri)
    with tempfile.TemporaryDirectory() as folder:
        written = page.write(uri, sweep, Path(folder))
        client.log_artifacts(written.run_id, folder, "report")
    print(written)
    print(f"report: {_place(client.get_run(written.run_id).info.artifact_uri)}/report/{written.page.name}")


def _place(uri: str) -> str:
    return unquote(urlsplit(uri).path) if uri.startswith("file:") else uri
