"""The parent run of a sweep in MLflow, which records the planned jobs and their ends.

The launcher calls `begin` before the first job starts. The command line calls
`ParentRun.close` after the last job has ended.
"""

import json
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError, say, say_id
from pipeline.common.secrets import mask
from pipeline.common.sqlite_uri import absolute
from pipeline.config import plain, session, trust_entries
from pipeline.sweep import again, files
from pipeline.tracking.foreign_store import (
    LONGEST_TAG,
    MULTIRUN,
    ForeignStore,
    OwnStore,
    SweepRecord,
    listed,
)
from pipeline.tracking.journal_file import WRITER, lock
from pipeline.tracking.params import param_text

NOTE = "sweep.json"  # in the sweep's folder; locked while a process works on the sweep
ALIVE = "sweep.alive"  # tag of the parent: the last heartbeat, in ms since the epoch
# Metrics whose newest point shows when a job was last alive. System metrics are logged
# every few seconds, even if an update takes minutes.
SIGNS = ("train/loss", "system/cpu_utilization_percentage")
HEARTBEAT = 20.0  # seconds between two heartbeats
GONE = 120.0  # seconds without a sign of life after which a process counts as dead
# Tag of the parent while a process reopens it: the time in ms since the epoch, and a
# random ID of the process.
CLAIM = "sweep.claim"
# Seconds to wait before checking that no other process has overwritten the claim. It
# must exceed the duration of a request.
CLAIM_SECONDS = 3.0
# Seconds after which a claim is ignored: the process that made it has died, or writes
# heartbeats.
CLAIM_LASTS = 30.0
# Seconds that a job's shipper has to close the run after the job has ended, in addition
# to `patience`.
GRACE = 15.0


@dataclass
class ParentRun(SweepRecord):
    """The parent run, and the state of its jobs."""

    name: str = ""  # the name of the sweep file, or `multirun`
    places: tuple[str, ...] = ()  # where artifacts may lie, in addition to the store
    names: list[str] = field(default_factory=list)  # all planned jobs, in order
    # Config keys in which the jobs differ.
    varied: list[str] = field(default_factory=list)
    # Metrics that the jobs measure besides the loss.
    metrics: list[str] = field(default_factory=list)
    # Why a job returned no loss, by the job's name.
    lost: dict[str, str] = field(default_factory=dict)
    # Name of the experiment of a reopened sweep; empty for a new sweep.
    experiment: str = ""
    # The job whose rejected config ended the sweep; empty if none did.
    ended_by: str = ""
    # When a job's process ended, by the job's name, in seconds of `time.monotonic`.
    ended: dict[str, float] = field(default_factory=dict)
    folder: str = ""  # the folder of the sweep
    patience: float = 60.0  # seconds that a job's shipper waits for the store
    closed: threading.Event = field(default_factory=threading.Event)  # ends heartbeats
    note: TextIO | None = None  # the open, locked file `NOTE`, see `left_open`

    def finished(self) -> dict[str, float]:
        """Return the last loss of each finished job, by the job's name.

        It is the validation loss, or else the training loss, or infinity if neither was
        logged.
        """
        losses = {}
        for name, run in self.children().items():
            if run.info.status == "FINISHED":
                metrics = run.data.metrics
                loss = metrics.get("train/loss", math.inf)
                losses[name] = metrics.get("val/loss", loss)
        return losses

    def plan(self, names: Iterable[str], varied: Sequence[str]) -> None:
        """Record jobs in the tags of the parent run, before the jobs start.

        Called once per batch; the names are added to those of earlier batches.
        """
        self.names += [name for name in names if name not in self.names]
        self.tag("sweep.varied", json.dumps(list(varied)))
        self.tag("sweep.jobs", json.dumps(self.names))

    def tag(self, key: str, text: str) -> None:
        """Set a tag of the parent run.

        A text longer than `LONGEST_TAG` is continued in the tags KEY.1, KEY.2 and so
        on; `listed` reads them.
        """
        for number, start in enumerate(range(0, len(text), LONGEST_TAG)):
            part = text[start : start + LONGEST_TAG]
            part_key = key
            if number > 0:
                part_key = f"{key}.{number}"
            self.client().set_tag(self.run_id, part_key, part)

    def beat(self) -> None:
        """Write heartbeats to the store until the sweep is closed."""
        while not self.closed.is_set():
            with suppress(Exception):  # the store may be unreachable for a while
                self.show_alive()
            self.closed.wait(HEARTBEAT)

    def show_alive(self) -> None:
        """Write one heartbeat to the store."""
        self.client().set_tag(self.run_id, ALIVE, str(int(time.time() * 1000)))

    def close(self, status: str | None = None) -> int:
        """End the parent run, and print how each job ended.

        First wait until the runs of all ended jobs are closed.

        Args:
            status: `KILLED` or `FAILED` if the sweep itself was killed or failed. If
                None, the status is `FINISHED` if all jobs finished, else `FAILED`.

        Returns:
            0 if all jobs finished, else 1.
        """
        client = self.client()
        self.closed.set()
        try:
            children = self._closed_children()
            interrupted = status == "KILLED" or bool(self.ended_by)
            rows = list(self._rows(children, interrupted))
            self.tag("sweep.lost", json.dumps(self.lost))
        except BaseException:
            with suppress(Exception):  # the store may be unreachable
                client.set_terminated(self.run_id, "KILLED")
            raise

        width = max((len(row.name) for row in rows), default=0)
        finished = 0
        for row in rows:
            say(f"  {row.name:{width}}  {row.status:8}  {row.reason}".rstrip())
            if row.status == "FINISHED":
                finished += 1
        say(f"sweep {self.run_id}: {finished} of {len(rows)} jobs finished")

        all_finished = finished == len(rows)
        if not status:
            status = "FINISHED" if all_finished else "FAILED"
        client.set_terminated(self.run_id, status)
        if all_finished:
            return 0
        return 1

    def _rows(
        self, children: Mapping[str, Any], interrupted: bool
    ) -> Iterator["_JobRow"]:
        """Yield the line to print for each planned job."""
        for name in self.names:
            lost = self.lost.get(name, "")
            if name == self.ended_by:
                lost = "rejected, which ended the sweep"  # the error gives the reason
            run = children.get(name)
            if run is None:
                status = "NOT RUN" if interrupted else "NO RUN"
                yield _JobRow(name, status, lost)
                continue

            reason = run.data.tags.get("failure", "").split("\n")[0]
            is_explained = (
                run.info.status == "FINISHED" or lost in reason or interrupted
            )
            if not is_explained:
                reason = f"{reason} {lost}".strip()
            yield _JobRow(name, run.info.status, reason)

    def _closed_children(self) -> dict[str, Any]:
        """Wait until the runs of all ended jobs are closed, and return all children.

        Usually the job's shipper closes the run. A run that is still open `GRACE` plus
        `patience` seconds after the job ended is closed here as KILLED.
        """
        while True:
            children = self.children()
            running = []
            for name, run in children.items():
                if name in self.ended and run.info.status == "RUNNING":
                    running.append(name)
            if not running:
                return children
            for name in running:
                if time.monotonic() > self.ended[name] + GRACE + self.patience:
                    _close_lost(self.client(), children[name])
            time.sleep(0.5)


@dataclass(frozen=True)
class _JobRow:
    """The line about one job that is printed when a sweep ends."""

    name: str
    status: str
    reason: str


def begin(
    config: DictConfig, names: Collection[str], varied: Sequence[str]
) -> ParentRun:
    """Create the parent run of a multirun, or reopen it with `tracking.sweep`.

    Also store the sweep in the session, record the jobs, start a thread that writes
    heartbeats, and write the locked file `NOTE` to the sweep's folder.

    Args:
        config: the config of the multirun.
        names: the names of the jobs in the first batch.
        varied: the config keys in which these jobs differ.

    Raises:
        ConfigError: the sweep cannot be reopened, or another process works on it.
    """
    name = config.hydra.job.config_name
    if name == "config":
        name = MULTIRUN
    if config.tracking.sweep:
        sweep = _reopen(config, name)
    else:
        sweep = _create(config, name, len(names), varied)
    say_id(sweep.run_id)
    session.session().sweep = sweep

    sweep.varied = list(varied)
    sweep.metrics = [str(metric) for metric in config.training.metrics]
    sweep.plan(names, varied)
    threading.Thread(target=sweep.beat, daemon=True).start()

    sweep.folder = str(config.hydra.sweep.dir)
    sweep.patience = config.tracking.patience
    _leave_note(sweep)
    return sweep


def left_open(folder: Path, own: OwnStore) -> ParentRun | None:
    """Return the sweep in `folder` if its process died before closing it, else None.

    A sweep whose process still runs is not returned either.

    Args:
        folder: the folder of the sweep.
        own: the user's store, which must hold the sweep.

    Raises:
        ConfigError: the sweep is recorded in a store other than the user's.
    """
    try:
        with (folder / NOTE).open("r+", encoding="utf-8") as file:
            if not lock(file.fileno(), WRITER):
                return None
            note = json.load(file)
    except (OSError, ValueError):
        return None

    uri = own.followed(str(note["store"]), f"the sweep in {folder}")
    sweep = ParentRun(uri, note["run_id"], note["experiment_id"], folder=str(folder))
    parent = sweep.client().get_run(sweep.run_id)
    sweep.names = listed(parent.data.tags, "sweep.jobs")
    if parent.info.status != "RUNNING":
        return None
    return sweep


def names_of(
    values: Sequence[Mapping[str, Any]], batches: Sequence[int], first: int = 0
) -> list[str]:
    """Return a unique name for each job, such as `factor=8 batch=256`.

    Args:
        values: the varied values of each job, by config key.
        batches: effective batch size of each job.
        first: number of the first job.
    """
    batches_differ = len(set(batches)) > 1
    names = []
    for job, batch in zip(values, batches, strict=True):
        parts = [plain.short(key, value) for key, value in job.items()]
        has_batch = any(part.startswith("batch=") for part in parts)
        if batches_differ and not has_batch:
            parts.append(f"batch={batch}")
        name = " ".join(parts) or "job"
        names.append(name.replace("${", "{"))  # OmegaConf would interpolate it

    if len(set(names)) < len(names):
        names = [f"{name} #{number}" for number, name in enumerate(names, first)]
    return names


def close_abandoned(client: Any, parent: Any, children: Iterable[Any]) -> None:
    """Close the RUNNING runs of a sweep's jobs whose processes have died, as KILLED.

    Args:
        client: MLflow's client of the store.
        parent: the sweep's parent run, which stays open.
        children: the runs of the sweep's jobs.

    Raises:
        ConfigError: the sweep or a job gave a sign of life in the last `GONE` seconds.
    """
    running = [run for run in children if run.info.status == "RUNNING"]
    signs = []  # times of signs of life, in ms since the epoch
    if parent.info.status == "RUNNING":
        heartbeat = parent.data.tags.get(ALIVE, "")
        if re.fullmatch("[0-9]{1,15}", heartbeat):
            signs.append(int(heartbeat))
    for run in running:
        signs.append(run.info.start_time)
        for key in SIGNS:
            if key in run.data.metrics:
                for point in client.get_metric_history(run.info.run_id, key):
                    signs.append(point.timestamp)

    silence = time.time() - max(signs, default=0) / 1000
    if silence < GONE:
        rule = (
            f"must have ended: {silence:.0f} s ago it still gave a sign of life "
            f"({GONE:.0f} s of silence are enough)"
        )
        raise ConfigError("SWEEP", rule, parent.info.run_id)
    for run in running:
        _close_lost(client, run)


def _create(
    config: DictConfig, name: str, jobs: int, varied: Sequence[str]
) -> ParentRun:
    """Create the parent run of a new sweep, with its tags and params."""
    from mlflow.entities import Param

    from pipeline.tracking.store import Store

    store = Store(config.tracking.uri)
    experiment_id = store.experiment(str(config.tracking.experiment))

    # Do not resolve the overrides, since resolved values may hold secrets. `recordable`
    # leaves out the store: `--again` requires it anew, and its URI may hold a password.
    recorded: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    overrides = again.recordable([*recorded["hydra"], *recorded["task"]])
    tags = {
        "sweep.name": name,
        "sweep.overrides": json.dumps(overrides),
        "mlflow.source.name": "pipeline",
    }
    if config.hydra.sweeper.get("trials"):
        tags["sweep.search"] = "true"
    question = files.question(name)
    if question:
        tags["sweep.question"] = question
    params = {
        "sweep": name,
        "jobs": config.hydra.sweeper.get("trials") or jobs,
        "varied": " ".join(varied),
        "overrides": " ".join(overrides),
        "dataset._target_": config.dataset.get("_target_"),
    }

    client = store.client()
    run = client.create_run(experiment_id, tags=tags, run_name=f"sweep {name}")
    run_id = run.info.run_id
    entries = [Param(key, param_text(value)) for key, value in params.items()]
    client.log_batch(run_id, params=entries)
    say(f"sweep {run_id} ({name}): {params['jobs']} jobs")

    # Allow the run's artifact location, since the user's own store chose it.
    places = tuple(trust_entries.allowed_places([run.info.artifact_uri]))
    return ParentRun(config.tracking.uri, run_id, experiment_id, name, places)


def _reopen(config: DictConfig, name: str) -> ParentRun:
    """Reopen the sweep `tracking.sweep`, after closing the runs of its dead jobs.

    Raises:
        ConfigError: the command line does not name the sweep, the sweep is still
            running, or another process reopens it.
    """
    # `pipeline train` sets `confined` if the command line names the sweep.
    if not config.tracking.confined:
        raise ConfigError(
            "tracking.sweep", "must be given on the command line", config.tracking.sweep
        )
    store = ForeignStore.open(config.tracking.uri, config.trust.allow)
    parent = store.sweep(config.tracking.sweep)
    sweep = ParentRun(
        store.uri,
        parent.info.run_id,
        parent.info.experiment_id,
        name,
        store.places,
        listed(parent.data.tags, "sweep.jobs"),
    )
    client = sweep.client()
    # Use the experiment's current name for new jobs, since it may have been renamed.
    sweep.experiment = client.get_experiment(sweep.experiment_id).name
    _check_experiment_override(config, sweep.experiment)
    store.check_experiment(sweep.experiment)
    close_abandoned(client, parent, sweep.children().values())
    _claim(client, sweep.run_id)
    client.update_run(sweep.run_id, "RUNNING")
    sweep.show_alive()
    with suppress(Exception):  # a process that was rejected may have replaced the claim
        client.delete_tag(sweep.run_id, CLAIM)
    return sweep


def _check_experiment_override(config: DictConfig, experiment: str) -> None:
    """Reject an override that would put the new jobs into another experiment.

    The value in a config file does not count: it may be a name that the experiment
    of the sweep had before it was renamed.
    """
    key = "tracking.experiment"
    for override in config.hydra.overrides.task:
        is_given = override.lstrip("+").startswith(f"{key}=")
        if is_given and config.tracking.experiment != experiment:
            rule = "must be the experiment of the sweep, or be left out"
            raise ConfigError(key, rule, config.tracking.experiment, [experiment])


def _claim(client: Any, run_id: str) -> None:
    """Claim a sweep, so that only one of several processes reopens it.

    The process reads the sweep, writes its claim, waits `CLAIM_SECONDS`, and reads the
    claim again. If two processes reopen the sweep at once, either the second one sees
    the claim or the heartbeat of the first, or it overwrites the claim before the first
    reads it again. Then the first one is rejected.

    Raises:
        ConfigError: another process has just reopened the sweep, or is reopening it.
    """
    rule = "must not be run by two commands at once: another one has just begun"
    parent = client.get_run(run_id)
    earlier = parent.data.tags.get(CLAIM, "")
    if re.fullmatch("[0-9]{1,15} [0-9a-f]{32}", earlier):
        if time.time() - int(earlier.split()[0]) / 1000 < CLAIM_LASTS:
            raise ConfigError("SWEEP", rule, run_id)
    close_abandoned(client, parent, [])

    claim = f"{int(time.time() * 1000)} {uuid.uuid4().hex}"
    client.set_tag(run_id, CLAIM, claim)
    time.sleep(CLAIM_SECONDS)
    if client.get_run(run_id).data.tags.get(CLAIM) != claim:
        raise ConfigError("SWEEP", rule, run_id)


def _leave_note(sweep: ParentRun) -> None:
    """Write the file that `left_open` reads, and keep it open and locked."""
    note = {
        "store": mask(absolute(sweep.uri)),
        "run_id": sweep.run_id,
        "experiment_id": sweep.experiment_id,
    }
    folder = Path(sweep.folder)
    folder.mkdir(parents=True, exist_ok=True)
    sweep.note = (folder / NOTE).open("w", encoding="utf-8")
    lock(sweep.note.fileno(), WRITER)
    print(json.dumps(note), file=sweep.note, flush=True)
    os.fsync(sweep.note.fileno())


def _close_lost(client: Any, run: Any) -> None:
    """Close a run as KILLED, with the reason in the tag `failure`."""
    client.set_tag(
        run.info.run_id, "failure", "The job ended, and its shipper, without a word."
    )
    client.set_terminated(run.info.run_id, "KILLED")
