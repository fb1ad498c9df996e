"""`pipeline report`: compare the jobs of a sweep, as plots and a table, from MLflow alone."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.common.errors import ConfigError, Parser, say
from pipeline.config import compose
from pipeline.tracking.foreign_store import ForeignStore


def report(arguments: Sequence[str]) -> int:
    """Write the report of a sweep from what MLflow recorded: findings, a table and plots."""
    parser = Parser(prog="pipeline report", description=report.__doc__, allow_abbrev=False)
    parser.add_argument("sweep", metavar="SWEEP", help="run ID of the sweep, its start, or the name of its run")
    parser.add_argument("--allow", action="append", default=[], metavar="PLACE", help="a place where artifacts may be")
    if not arguments:
        raise ConfigError("SWEEP", "must name a sweep of the store", "")
    options, overrides = parser.parse_known_args(list(arguments))
    own = compose.composed(overrides)
    publish(own.tracking.uri, options.sweep, [*own.trust.allow, *options.allow])
    return 0


def publish(uri: str, sweep: str, allow: Sequence[str]) -> None:
    """Write the report of a sweep, log it to the parent run, and print its findings; for arguments see `writer`."""
    from pipeline.report import writer

    store = ForeignStore.open(uri, allow)
    with store.confined(), tempfile.TemporaryDirectory() as folder:
        written = writer.write(uri, sweep, Path(folder), allow)
        store.client().log_artifacts(written.run_id, folder, "report")
        place = store.client().get_run(written.run_id).info.artifact_uri
    shown = unquote(urlsplit(place).path) if place.startswith("file:") else place
    say(*str(written).splitlines(), f"report: {shown}/report/{written.page.name}", to=sys.stdout)
