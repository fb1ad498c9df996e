"""`pipeline runs`: list the runs below a folder and in the configured store."""

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.checkpoints import files, run_dirs
from pipeline.common import imports
from pipeline.common.errors import ConfigError, Parser, count, first_line, say
from pipeline.config import compose
from pipeline.tracking.foreign_store import CRITICAL, ForeignStore, again_command
from pipeline.tracking.journal_file import JOURNAL_NAME, is_locked
from pipeline.tracking.journal_summary import JournalSummary, ranked_metric

_LIMIT = 100  # default number of runs
# Widths of columns, in characters.
_STATUS = 11
_EXPERIMENT = 10
_NAME = 18
_METRIC = 12  # at most


@dataclass(frozen=True)
class ListedRun:
    """One run of the list.

    Attributes:
        run_id: the ID of the run, or "" if no store has the run.
        status: `running`, `finished` or `failed`; `interrupted` if the run can be
            resumed, else `killed`.
        started_at: when the run began, in milliseconds since 1970.
        experiment: the name of the run's experiment.
        name: the name of the run, which by default consists of its overrides.
        metric: the metric of `best` and `last`.
        best: the best value of the metric, or None if unknown.
        last: the last value of the metric, or None if there is none.
        run_dir: the run directory, or None if it is not below the folders.
        not_shipped: the number of updates whose rows the store lacks, or None if
            unknown.
        next_command: the command that continues the run, or "" if there is none.
    """

    run_id: str
    status: str
    started_at: int
    experiment: str
    name: str
    metric: str
    best: float | None
    last: float | None
    run_dir: str | None = None
    not_shipped: int | None = None
    next_command: str = ""


def runs(arguments: Sequence[str]) -> int:
    """List the runs below FOLDER … and in the configured store, the newest first.

    By default, the folder is the working directory.
    """
    parser = Parser(prog="pipeline runs", description=runs.__doc__, allow_abbrev=False)
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help="run directories, or folders that contain them",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=_LIMIT,
        metavar="N",
        help=f"list the newest N runs; default {_LIMIT}",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the list as JSON to standard output"
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        metavar="DIR",
        help="a folder with config groups of your own",
    )
    overrides = [text for text in arguments if "=" in text and not os.path.exists(text)]
    options = parser.parse_args([text for text in arguments if text not in overrides])
    if options.limit < 1:
        raise ConfigError("--limit", "must be at least 1", options.limit)
    config_dir = ["--config-dir", options.config_dir] if options.config_dir else []
    uri = compose.composed([*config_dir, *overrides]).tracking.uri

    summaries = _summaries(run_dirs.run_dirs(options.folders))
    # For 200 runs, this takes 0.5 s, and collecting garbage would take 1.4 s more.
    with imports.without_collections():
        stored = _Stored.read(uri, options.limit)
    listed = [_local_run(path, each, stored) for path, each in summaries.items()]
    local_ids = {run.run_id for run in listed}
    for run_id in stored.runs:
        if run_id not in local_ids:
            listed.append(stored.listed(run_id))
    listed.sort(key=lambda run: run.started_at, reverse=True)
    newest = listed[: options.limit]

    if options.json:
        entries = [asdict(run) for run in newest]
        say(json.dumps(entries), to=sys.stdout, always=True)
        return 0
    if not newest:
        say("there is no run yet")
    for run in newest:
        say(*_lines(run), to=sys.stdout, always=True)
    return 0


def _summaries(folders: Iterable[Path]) -> dict[Path, JournalSummary]:
    """Return the state of each run. If a journal cannot be opened, print why."""
    summaries = {}
    for folder in folders:
        try:
            summary = JournalSummary.read(folder)
        except OSError as error:
            say(f"{folder} is left out: {first_line(error)}")
            continue
        if summary is not None:
            summaries[folder] = summary
    return summaries


@dataclass(frozen=True)
class _Stored:
    """The newest runs of a store.

    Attributes:
        uri: the URI of the store.
        runs: MLflow's runs by ID; empty if the store does not answer.
        experiments: the names of the experiments by ID.
    """

    uri: str
    runs: Mapping[str, Any]
    experiments: Mapping[str, str]

    @classmethod
    def read(cls, uri: str, limit: int) -> "_Stored":
        """Read the newest runs. If the store does not answer, print why."""
        try:
            client = ForeignStore.open(uri).client()
            from pipeline.tracking.store import all_experiments  # imports MLflow

            experiments = {}
            for experiment in all_experiments(client):
                experiments[experiment.experiment_id] = experiment.name
            newest = client.search_runs(
                list(experiments), max_results=limit, order_by=["start_time DESC"]
            )
        except Exception as error:
            say(f"the runs of the store are left out: {first_line(error)}")
            return cls(uri, {}, {})
        return cls(uri, {run.info.run_id: run for run in newest}, experiments)

    def listed(self, run_id: str) -> ListedRun:
        """Return a run of the store whose directory is not below the folders."""
        run = self.runs[run_id]
        tags = run.data.tags
        metric = ranked_metric(run.data.params)
        status = _STATUSES.get(run.info.status, run.info.status.lower())
        next_command = ""
        sweep = tags.get("sweep.name")
        # `pipeline critical` also needs the run from which its jobs branch off.
        is_repeatable = sweep is not None and sweep != CRITICAL
        if is_repeatable and status in ("failed", "killed"):
            next_command = again_command(sweep, run_id, self.uri)
        shown = metric.or_training_loss(run.data.metrics).name
        return ListedRun(
            run_id=run_id,
            status=status,
            started_at=run.info.start_time,
            experiment=self.experiments[run.info.experiment_id],
            name=run.info.run_name or "",
            metric=shown,
            best=run.data.metrics.get(f"best/{metric.name}"),
            last=run.data.metrics.get(shown),
            next_command=next_command,
        )

    def lacks(self, summary: JournalSummary) -> int | None:
        """Return the number of updates of an ended run whose rows the store lacks.

        Return None if it is unknown, because the store was not read, or does not
        have the run among its newest ones.
        """
        if not summary.run_id:
            return summary.updates
        run = self.runs.get(summary.run_id)
        if run is None:
            return None
        # The status is shipped last, so a run that has it is complete. After a resume,
        # it may be the status of an earlier segment.
        if not summary.resumes and run.info.status == (summary.status or "KILLED"):
            return 0
        client = ForeignStore(self.uri).client()
        points = client.get_metric_history(summary.run_id, "train/loss")
        return max(0, summary.updates - len(points))


_STATUSES = {  # words for MLflow's statuses
    "RUNNING": "running",
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "killed",
}


def _local_run(run_dir: Path, summary: JournalSummary, stored: _Stored) -> ListedRun:
    """Return the run in a run directory."""
    metric = ranked_metric(summary.start.params).or_training_loss(summary.last).name
    status = _STATUSES.get(summary.status or "KILLED", "killed")
    not_shipped = None
    next_command = ""
    if is_locked(run_dir / JOURNAL_NAME):
        status = "running"
    else:
        not_shipped = stored.lacks(summary)
        if status == "killed" and files.saved_updates(run_dir / "checkpoints"):
            status = "interrupted"
            # The jobs of a sweep are resumed together, by the command of the sweep.
            if "sweep" not in summary.start.tags:
                next_command = shlex.join(["pipeline", "resume", str(run_dir)])
    return ListedRun(
        run_id=summary.run_id,
        status=status,
        started_at=summary.started_at,
        experiment=summary.start.experiment,
        name=summary.start.name or "",
        metric=metric,
        best=summary.best,
        last=summary.last.get(metric),
        run_dir=str(run_dir),
        not_shipped=not_shipped,
        next_command=next_command,
    )


def _lines(run: ListedRun) -> list[str]:
    """Return the line about a run, and one for each command that it waits for."""
    began = datetime.fromtimestamp(run.started_at / 1000)
    columns = [
        f"{run.status:{_STATUS}}",
        f"{run.run_id[:8]:8}",
        f"{began:%m-%d %H:%M}",
        _cut(run.experiment, _EXPERIMENT),
        _cut(run.name, _NAME),
    ]
    if run.last is not None:
        values = f"{_cut(run.metric, _METRIC).rstrip()} {_number(run.last)}"
        if run.best is not None:
            values += f" best {_number(run.best)}"
        columns.append(values)
    lines = [" ".join(columns).rstrip()]
    if run.next_command:
        lines.append(f"    {run.next_command}")
    if run.not_shipped and run.run_dir is not None:
        rows = count(run.not_shipped, "update")
        lines.append(f"    {rows} not in the store: {_sync(run)}")
    return lines


def _sync(run: ListedRun) -> str:
    return shlex.join(["pipeline", "sync", str(run.run_dir)])


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _cut(text: str, width: int) -> str:
    """Return a text of exactly this width."""
    if len(text) > width:
        text = f"{text[: width - 1]}…"
    return f"{text:{width}}"
