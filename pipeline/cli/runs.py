"""`pipeline runs`: list the runs below a folder and in the configured store."""

import json
import math
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.checkpoints import files, run_dirs
from pipeline.checkpoints.run_dirs import resume_command
from pipeline.cli import runs_filter
from pipeline.cli.runs_filter import StatusFilter
from pipeline.cli.runs_order import COLUMNS, STARTED, Entry, sorted_runs
from pipeline.common import imports, sqlite_uri
from pipeline.common.errors import ConfigError, Parser, count, first_line, say
from pipeline.common.secrets import mask, remember
from pipeline.common.sqlite_uri import absolute
from pipeline.config import compose
from pipeline.config.overrides import named_experiment, names_and_overrides
from pipeline.sweep import liveness, sweep_file
from pipeline.tracking import horizons, older_copy
from pipeline.tracking.foreign_store import (
    CRITICAL,
    MOST_RUNS,
    RUN_ID,
    ForeignStore,
    again_command,
    sync_command,
)
from pipeline.tracking.journal_file import JOURNAL_NAME, is_locked
from pipeline.tracking.journal_summary import JournalSummary, ranked_metric

_LIMIT = 100  # default number of runs
_IDS_PER_SEARCH = 100  # in a filter string
# Widths of columns, in characters; in a terminal, the last three are the largest ones.
_STATUS = 11
_EXPERIMENT = 10
_NAME = 18  # more if the terminal is wider than 100 characters
_METRIC = 12
_BESIDE_NAME = 82  # the other columns


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
        store: the URI of the run's store, with secrets masked.
        sweep: the ID of the sweep of which the run is a job, or "".
        absent: whether the store does not have the run, or does not exist.
        not_shipped: the number of updates whose rows the store lacks, or None if
            unknown.
        sync_command: the command that uploads what the store lacks, also if that is
            unknown, or "" if it lacks nothing or the run is running.
        next_command: the command that continues the run, or else uploads it, or "" if
            there is none.
        older_copy: whether the run was continued in another copy of the run directory.
            The other values are then those in the store.
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
    store: str = ""
    sweep: str = ""
    absent: bool = False
    not_shipped: int | None = None
    sync_command: str = ""
    next_command: str = ""
    older_copy: bool = False


def runs(arguments: Sequence[str]) -> int:
    """List the runs below this folder and in the configured store, the newest first.

    With FOLDER …, only the runs below these folders are listed.
    """
    query = _query(arguments)
    folders = list(run_dirs.run_dirs(query.folders))
    # Look for locks before the journals are read, so that a run that ends in between is
    # not taken for an interrupted one.
    running = {folder for folder in folders if is_locked(folder / JOURNAL_NAME)}
    summaries = _summaries(folders)
    # For 200 runs, this takes 0.5 s, and collecting garbage would take 1.4 s more.
    with imports.without_collections():
        stored = _Stored.read(query, summaries.values())
    entries = []
    for path, each in summaries.items():
        if query.filter is None or stored.selects(each):
            # A run that is being resumed is locked before its journal says so.
            is_running = is_locked(path / JOURNAL_NAME) or (
                path in running and each.status is None
            )
            run = _local_run(path, each, stored, is_running)
            metrics = dict(stored.metrics(each))
            if not run.older_copy:
                metrics |= each.last
            entries.append(Entry(run, metrics, each.start.params))
    local_ids = {entry.run.run_id for entry in entries}
    for run_id in stored.newest:
        if run_id not in local_ids and not query.folders:
            entries.append(stored.entry(run_id))
    if query.statuses is not None:
        entries = [each for each in entries if query.statuses.accept(each.run.status)]
    listed = sorted_runs(entries, query.sort, query.reverse)[: query.limit]

    if query.json:
        texts = [asdict(run) for run in listed]
        say(json.dumps(texts), to=sys.stdout, always=True)
        return 0
    if not listed:
        say(query.nothing)
    columns = _Columns.of_list(listed)
    for run in listed:
        say(*_lines(run, columns), to=sys.stdout, always=True)
    say(*_copies(listed))
    return 0


def _copies(listed: Iterable[ListedRun]) -> list[str]:
    """Return one line per run that is listed more than once because it was copied."""
    folders_by_id: dict[str, list[str]] = {}
    for run in listed:
        if run.run_id and run.run_dir is not None:
            folders_by_id.setdefault(run.run_id, []).append(run.run_dir)
    lines = []
    for run_id, folders in folders_by_id.items():
        if len(folders) > 1:
            lines.append(
                f"run {run_id} was copied, and is in {', '.join(folders)}: resume and "
                "sync only one of them"
            )
    return lines


@dataclass(frozen=True)
class _Query:
    """The arguments of the command line.

    Attributes:
        folders: run directories, or folders that contain them; empty for the working
            directory and the store.
        filter: MLflow's filter string for runs, or None.
        statuses: the filter's comparisons of the status with words of the list, or
            None.
        experiment: the experiment that the filter string is for, or None for all.
        sort: a column or a metric.
        reverse: whether the order is the opposite of the default one.
        limit: the largest number of runs that are listed.
        json: whether to print JSON.
        uri: the URI of the store.
    """

    folders: list[str]
    filter: str | None
    statuses: StatusFilter | None
    experiment: str | None
    sort: str
    reverse: bool
    limit: int
    json: bool
    uri: str

    @property
    def fetched(self) -> int:
        """The largest number of runs to read from the store."""
        is_newest_first = self.sort == STARTED and not self.reverse
        return self.limit if is_newest_first else MOST_RUNS

    @property
    def nothing(self) -> str:
        """The message if there are no runs to list."""
        return "there is no run yet" if self.filter is None else "no run matches"


def _query(arguments: Sequence[str]) -> _Query:
    """Parse the command line."""
    parser = Parser(prog="pipeline runs", description=runs.__doc__, allow_abbrev=False)
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help="list only the runs in these run directories, or below these folders",
    )
    parser.add_argument(
        "--filter",
        metavar="TEXT",
        help="list only the store's runs that match this filter string of MLflow, such "
        "as \"tags.team='vision'\"; a status may also be one of the list's words",
    )
    parser.add_argument(
        "--sort",
        metavar="METRIC_OR_COLUMN",
        default=STARTED,
        help="sort by a metric, such as val/loss, with the best run first, or by a "
        f"column: {', '.join(COLUMNS)}; default {STARTED}, with the newest run first",
    )
    parser.add_argument(
        "--reverse",
        action="store_true",
        help="reverse the order; without --sort, the oldest run then comes first",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=_LIMIT,
        metavar="N",
        help=f"list the first N runs; default {_LIMIT}",
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
    options = parser.parse_intermixed_args(list(arguments))
    folders, overrides = names_and_overrides(options.folders)
    if options.limit < 1:
        raise ConfigError("--limit", "must be at least 1", options.limit)
    config_dir = ["--config-dir", options.config_dir] if options.config_dir else []
    config = compose.composed([*config_dir, *overrides])
    condition = options.filter
    statuses = None
    if condition is not None:
        condition, statuses = runs_filter.split(condition)
    return _Query(
        folders=folders,
        filter=condition,
        statuses=statuses,
        experiment=named_experiment(overrides, config.tracking.experiment),
        sort=options.sort,
        reverse=options.reverse,
        limit=options.limit,
        json=options.json,
        uri=config.tracking.uri,
    )


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
class _Shipped:
    """What a store has of a run.

    Attributes:
        run_id: the ID of the run, or "" if no store is known to have it.
        absent: whether the store does not have the run, or does not exist.
        lacking: the number of updates whose rows the store lacks, or None if unknown.
        lacks_end: whether the store lacks the status of the run, which is shipped last.
    """

    run_id: str
    absent: bool
    lacking: int | None
    lacks_end: bool = False


@dataclass(frozen=True)
class _Stored:
    """Runs of the configured store.

    Attributes:
        uri: the URI of the store.
        answers: whether the store was read.
        newest: MLflow's newest runs, or those that the query's filter selects, by ID.
        others: further runs of the folder, and the sweeps of its jobs, by ID.
        experiments: the names of the experiments by ID.
    """

    uri: str
    answers: bool
    newest: Mapping[str, Any]
    others: Mapping[str, Any]
    experiments: Mapping[str, str]

    @classmethod
    def read(cls, query: _Query, summaries: Collection[JournalSummary]) -> "_Stored":
        """Read the runs that the query asks for, and those of the folder.

        If the store does not answer, print why.

        Raises:
            ConfigError: the query has a filter, and the filter is wrong or the store
                does not answer.
        """
        try:
            store = ForeignStore.open(query.uri)
            client = store.client()
            from pipeline.tracking.store import all_experiments  # imports MLflow

            experiments = {}
            for experiment in all_experiments(client):
                experiments[experiment.experiment_id] = experiment.name
            if query.filter is not None:
                runs = store.listed_by(query.filter, query.experiment)
            else:
                runs = client.search_runs(
                    list(experiments),
                    max_results=query.fetched,
                    order_by=["start_time DESC"],
                )
            newest = {run.info.run_id: run for run in runs}
            others = _with_ids(client, _ids_of(summaries) - newest.keys())
        except Exception as error:
            if query.filter is not None:
                raise
            say(
                "the runs of the store are left out, and it is unknown what it lacks: "
                f"{first_line(error)}"
            )
            return cls(query.uri, False, {}, {}, {})
        return cls(query.uri, True, newest, others, experiments)

    def selects(self, summary: JournalSummary) -> bool:
        """Return whether the filter of the query has selected a run of the folder."""
        run = self._run(summary)
        return run is not None and run.info.run_id in self.newest

    def entry(self, run_id: str) -> Entry:
        """Return a run of the store whose directory is not below the folders."""
        run = self.newest[run_id]
        return Entry(self._listed(run), run.data.metrics, run.data.params)

    def continued_elsewhere(
        self, run_dir: Path, summary: JournalSummary
    ) -> ListedRun | None:
        """Return the store's run if a directory that is not locked is an older copy."""
        run = self._run(summary)
        # The segments after a damaged line are not known.
        if run is None or summary.damage:
            return None
        if not older_copy.is_older_copy(run, summary.resumes, summary.status):
            return None
        listed = self._listed(run)
        # The command of a sweep would resume the job in this directory.
        return replace(listed, run_dir=str(run_dir), next_command="", older_copy=True)

    def _listed(self, run: Any) -> ListedRun:
        tags = run.data.tags
        metric = ranked_metric(run.data.params)
        status = _STATUSES.get(run.info.status, run.info.status.lower())
        next_command = ""
        sweep = tags.get("sweep.name")
        if sweep is not None and liveness.was_killed(run):
            status = "killed"
        # `pipeline critical` also needs the run from which its jobs branch off.
        is_repeatable = sweep is not None and sweep != CRITICAL
        if is_repeatable and status in ("failed", "killed"):
            next_command = again_command(sweep, run.info.run_id, self.uri)
        shown = metric.or_training_loss(run.data.metrics).name
        return ListedRun(
            run_id=run.info.run_id,
            status=status,
            started_at=run.info.start_time,
            experiment=self.experiments.get(run.info.experiment_id, ""),
            name=horizons.current_name(run.info.run_name or "", tags),
            metric=shown,
            best=run.data.metrics.get(f"best/{metric.name}"),
            last=run.data.metrics.get(shown),
            store=mask(absolute(self.uri)),
            sweep=tags.get("sweep", ""),
            next_command=next_command,
        )

    def is_store_of(self, summary: JournalSummary) -> bool:
        """Return whether a run of the folder belongs to this store."""
        remember(self.uri)
        return mask(absolute(self.uri)) == mask(summary.store)

    def metrics(self, summary: JournalSummary) -> Mapping[str, float]:
        """Return the last values that the store has of a run of the folder.

        They include the metrics of the user's own code, which a summary leaves out.
        """
        run = self._run(summary)
        if run is None:
            return {}
        metrics: Mapping[str, float] = run.data.metrics
        return metrics

    def shipped(self, summary: JournalSummary) -> _Shipped:
        """Return what the store of an ended run has of it, as far as that is known."""
        run_id = summary.run_id
        run = self._run(summary)
        if run is None:
            is_gone = sqlite_uri.is_missing(summary.store)
            is_asked = self.answers and self.is_store_of(summary)
            if not run_id or is_gone or is_asked:
                return _Shipped(run_id, True, summary.updates)
            lacking = 0 if summary.uploaded else None
            return _Shipped(run_id, False, lacking)

        run_id = run.info.run_id
        # The status is shipped last, so a run that has it is complete. After a resume,
        # it may be the status of an earlier segment.
        lacks_end = run.info.status != (summary.status or "KILLED")
        if not summary.resumes and not lacks_end:
            return _Shipped(run_id, False, 0)
        client = ForeignStore(self.uri).client()
        points = client.get_metric_history(run_id, "train/loss")
        lacking = max(0, summary.updates - len(points))
        return _Shipped(run_id, False, lacking, lacks_end)

    def command_of_sweep(self, run_dir: Path, summary: JournalSummary) -> str:
        """Return the command that runs the unfinished jobs of a run's sweep.

        If the sweep is not known or cannot be repeated, it is the command for this run
        alone. It is "" if the sweep still runs.
        """
        if is_locked(run_dir.parent / sweep_file.NAME):
            return ""
        parent_id = summary.start.tags["sweep"]
        parent = self.newest.get(parent_id) or self.others.get(parent_id)
        name = CRITICAL
        if parent is not None:
            name = parent.data.tags.get("sweep.name", CRITICAL)
        if name == CRITICAL:
            return resume_command(run_dir)
        return again_command(name, parent_id, self.uri)

    def sync_command(self, run_dir: Path, summary: JournalSummary) -> str:
        """Return the command that uploads a run to the store that it belongs to."""
        uri = self.uri if self.is_store_of(summary) else summary.store
        return sync_command(str(run_dir), uri)

    def _run(self, summary: JournalSummary) -> Any:
        """Return the store's run for a journal, or None if no such run is known."""
        if summary.run_id:
            return self.newest.get(summary.run_id) or self.others.get(summary.run_id)
        # A run that was offline at first may have been uploaded since.
        for run in self.newest.values():
            if run.data.tags.get("journal") == summary.start.tags.get("journal", ""):
                return run
        return None


def _ids_of(summaries: Iterable[JournalSummary]) -> set[str]:
    """Return the IDs of runs of a folder, and those of the sweeps of its jobs."""
    ids = set()
    for summary in summaries:
        for run_id in (summary.run_id, summary.start.tags.get("sweep", "")):
            # An ID becomes a part of a filter string.
            if RUN_ID.fullmatch(run_id):
                ids.add(run_id)
    return ids


def _with_ids(client: Any, run_ids: Collection[str]) -> dict[str, Any]:
    """Return the runs of a store with these IDs, also deleted ones, by ID."""
    from mlflow.entities import ViewType

    from pipeline.tracking.store import all_experiments

    remaining = sorted(run_ids)
    if not remaining:
        return {}
    experiments = all_experiments(client, ViewType.ALL)
    experiment_ids = [experiment.experiment_id for experiment in experiments]
    runs = {}
    for first in range(0, len(remaining), _IDS_PER_SEARCH):
        ids = ", ".join(f"'{run_id}'" for run_id in remaining[first:][:_IDS_PER_SEARCH])
        for run in client.search_runs(
            experiment_ids, f"attributes.run_id IN ({ids})", ViewType.ALL
        ):
            runs[run.info.run_id] = run
    return runs


_STATUSES = {  # words for MLflow's statuses
    "RUNNING": "running",
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "killed",
}


def _local_run(
    run_dir: Path, summary: JournalSummary, stored: _Stored, is_running: bool
) -> ListedRun:
    """Return the run in a run directory."""
    if not is_running:
        listed = stored.continued_elsewhere(run_dir, summary)
        if listed is not None:
            return listed
    start = summary.start
    metric = ranked_metric(start.params).or_training_loss(summary.last).name
    status = _STATUSES.get(summary.status or "KILLED", "killed")
    shipped = _Shipped(summary.run_id, False, None)
    sync = ""
    next_command = ""
    if is_running:
        status = "running"
    else:
        shipped = stored.shipped(summary)
        # Whether the store lacks rows may be unknown; the command then finds out.
        if shipped.absent or shipped.lacking != 0 or shipped.lacks_end:
            sync = stored.sync_command(run_dir, summary)
        next_command = sync
        has_checkpoint = files.are_in(run_dir / "checkpoints")
        if status == "killed" and has_checkpoint:
            status = "interrupted"
        if status in ("killed", "interrupted"):
            next_command = resume_command(run_dir, from_start=not has_checkpoint)
            # The jobs of a sweep are resumed together, by the command of the sweep.
            if "sweep" in start.tags:
                next_command = stored.command_of_sweep(run_dir, summary) or sync
    return ListedRun(
        run_id=shipped.run_id,
        status=status,
        started_at=summary.started_at,
        experiment=start.experiment,
        name=horizons.current_name(start.name or "", summary.tags),
        metric=metric,
        best=summary.best,
        last=summary.last.get(metric),
        run_dir=str(run_dir),
        store=summary.store,
        sweep=start.tags.get("sweep", ""),
        absent=shipped.absent,
        not_shipped=shipped.lacking,
        sync_command=sync,
        next_command=next_command,
    )


@dataclass(frozen=True)
class _Columns:
    """The widths of the columns, in characters.

    Attributes:
        experiment: the width of the experiment's name.
        name: the width of the run's name.
        metric: the width of the metric's name.
        shared: words that all names have. They are left out of names that are too long.
    """

    experiment: int
    name: int
    metric: int
    shared: Collection[str]

    @classmethod
    def of_list(cls, runs: Sequence[ListedRun]) -> "_Columns":
        """Return the columns of a list: as wide as needed, or as the terminal allows.

        Without a terminal, for example if the list is piped, nothing is cut.
        """
        experiment = max((len(run.experiment) for run in runs), default=0)
        name = max((len(run.name) for run in runs), default=0)
        metric = max((len(run.metric) for run in runs), default=0)
        words = [set(run.name.split(" ")) for run in runs]
        shared = set.intersection(*words) if len(words) > 1 else set()
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
            experiment = min(experiment, _EXPERIMENT)
            name = min(name, max(_NAME, width - _BESIDE_NAME))
            metric = _METRIC
        return cls(experiment, name, metric, shared)


def _lines(run: ListedRun, columns: _Columns) -> list[str]:
    """Return the line about a run, and one per command that continues or uploads it."""
    began = datetime.fromtimestamp(run.started_at / 1000)
    name = run.name
    if len(name) > columns.name:
        differing = [word for word in name.split(" ") if word not in columns.shared]
        name = f"… {' '.join(differing)}"
    cells = [
        f"{run.status:{_STATUS}}",
        f"{run.run_id[:8]:8}",
        f"{began:%m-%d %H:%M}",
        _cut(run.experiment, columns.experiment),
        _cut(name, columns.name),
    ]
    if run.last is not None:
        values = f"{_cut(run.metric, columns.metric).rstrip()} {_number(run.last)}"
        if run.best is not None:
            values += f" best {_number(run.best)}"
        cells.append(values)
    if run.sweep:
        cells.append(f"sweep {run.sweep[:8]}")
    lines = [" ".join(cells).rstrip()]
    if run.older_copy:
        lines.append(f"    continued elsewhere: {run.run_dir} is an older copy")
    if run.next_command != run.sync_command:
        lines.append(f"    {run.next_command}")
    if run.sync_command:
        lines.append(f"    {_missing(run)}: {run.sync_command}")
    return lines


def _missing(run: ListedRun) -> str:
    """Return the words for what the store lacks of a run."""
    if run.absent and run.run_id:
        return "absent from the store"
    if run.not_shipped:
        return f"{count(run.not_shipped, 'update')} not in the store"
    if run.not_shipped is None:
        return "unknown whether its store lacks anything"
    if not run.absent:
        return "its end is not in the store"
    return "not in the store"


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _cut(text: str, width: int) -> str:
    """Return a text of exactly this width."""
    if len(text) > width:
        text = f"{text[: width - 1]}…"
    return f"{text:{width}}"
