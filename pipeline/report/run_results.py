"""Reads runs for a report, from a store or from run directories."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.common.recorded import FormError
from pipeline.report.job_results import (
    JobResult,
    current_params,
    curve,
    sizes,
    stored_result,
)
from pipeline.tracking import horizons, journal_file
from pipeline.tracking.journal_file import JOURNAL_NAME, LineReader, Past
from pipeline.tracking.journal_lines import Row
from pipeline.tracking.params import param_text

# The step of MLflow's system metrics is the number of a sample, not of an update.
_NOT_BY_UPDATE = "system/"


def from_store(client: Any, run: Any) -> JobResult:
    """Return the result of a run in MLflow, with all metrics except system metrics.

    Args:
        client: an MLflow client for the run's store.
        run: the run.
    """
    name = horizons.current_name(run.info.run_name or run.info.run_id, run.data.tags)
    return stored_result(client, name, run, _of_updates(run.data.metrics))


def from_directory(run_dir: Path) -> JobResult:
    """Return the result of the run in a directory, from its journal alone.

    So it does not matter whether the store has all of the run. Rows after a damaged
    line are left out.

    Raises:
        ConfigError: the directory has no journal that can be read.
    """
    past = Past.read(run_dir, "RUN", running=True)
    values_by_metric: dict[str, dict[int, float]] = {}
    started: int | None = None
    with (
        (run_dir / JOURNAL_NAME).open("rb") as file,
        suppress(FormError),  # The lines before the damage are valid.
    ):
        for line in LineReader(file.fileno()).lines():
            if started is None:
                started = line.time
            if isinstance(line, Row):
                for metric, value in line.metrics.items():
                    values_by_metric.setdefault(metric, {})[line.step] = value

    curves = {}
    for metric in _of_updates(values_by_metric):
        curves[metric] = curve(values_by_metric[metric])
    texts = {key: param_text(value) for key, value in past.start.params.items()}
    tags = {**past.start.tags, **past.tags}
    params = current_params(texts, tags)
    return JobResult(
        name=horizons.current_name(past.start.name or run_dir.name, tags),
        run_id=past.run_id or None,
        status=past.status or _status_of_open(run_dir),
        params=params,
        tags=tags,
        curves=curves,
        started=started,
        ended=past.last_time,
        pauses=tuple(past.interruptions),
        **sizes(params),
    )


def _status_of_open(run_dir: Path) -> str:
    """Return the status of a run whose journal does not say that it has ended."""
    if journal_file.is_locked(run_dir / JOURNAL_NAME):
        return "RUNNING"
    return "INTERRUPTED"


def _of_updates(metrics: Iterable[str]) -> list[str]:
    """Return the names of the metrics whose step is an update, in order."""
    return sorted(name for name in metrics if not name.startswith(_NOT_BY_UPDATE))


def is_run_directory(name: str) -> bool:
    """Return whether a name is the path of a run directory."""
    return os.path.exists(os.path.join(name, JOURNAL_NAME))


def with_unique_names(runs: Sequence[JobResult]) -> list[JobResult]:
    """Return the runs, each with a unique name.

    If several runs have the same name, the start of the run's ID, or else a number, is
    appended to it.
    """
    counts = Counter(run.name for run in runs)
    taken: set[str] = set()
    unique = []
    for number, run in enumerate(runs, start=1):
        name = run.name
        if counts[name] > 1:
            mark = run.run_id[:8] if run.run_id else number
            name = f"{name} {mark}"
        if name in taken:
            name = f"{name} {number}"
        taken.add(name)
        unique.append(replace(run, name=name))
    return unique
