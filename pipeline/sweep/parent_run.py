"""A sweep: one parent run in MLflow, a child for each job, and a table of what became of them.

The launchers call `begin` before the first job starts; the command line calls
`close` when the last one has ended, however it ended.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError, say
from pipeline.common.secrets import HIDDEN, mask
from pipeline.config.allow_list import allowed_places
from pipeline.config.compose import session
from pipeline.sweep import again, description, heartbeat
from pipeline.sweep.mlflow_view import LONGEST_TAG
from pipeline.tracking.foreign_store import ForeignStore, listed
from pipeline.tracking.journal_file import WRITER, absolute, lock
from pipeline.tracking.sweep_record import MULTIRUN, SweepRecord

LETTERS = {"effective_batch_size": "batch", "micro_batch_size": "micro", "learning_rate": "rate"}
# Seconds for a job's shipper to close its run after the job ended: longer than `tracking.shipper.PATIENCE`, and than
# `sweep.launcher.GRACE`.
PATIENCE = 75.0


@dataclass(frozen=True)
class PlannedJob:
    """One job of a sweep: its unique name, such as `factor=8 batch=256`, and the overrides that make it."""

    name: str
    overrides: tuple[str, ...]


@dataclass
class ParentRun(SweepRecord):
    """The parent run, and what is known of its jobs."""

    name: str = ""  # of the sweep file; `multirun` where there is none
    places: tuple[str, ...] = ()  # where artifacts may lie, other than with the store
    names: list[str] = field(default_factory=list)  # of all jobs, in the order in which they were planned
    varied: list[str] = field(default_factory=list)  # config keys in which the jobs differ
    metrics: list[str] = field(default_factory=list)  # what they measure beside the loss
    lost: dict[str, str] = field(default_factory=dict)  # why a job gave no result, by its name
    ended: dict[str, float] = field(default_factory=dict)  # when a job's process ended, by its name
    folder: str = ""  # of the sweep
    closed: threading.Event = field(default_factory=threading.Event)  # set when the parent run is about to end

    def finished(self) -> dict[str, float]:
        """Return the jobs that need not run again, each with its last loss: infinite where it logged none."""
        done = {name: run.data.metrics for name, run in self.children().items() if run.info.status == "FINISHED"}
        return {name: last.get("val/loss", last.get("train/loss", math.inf)) for name, last in done.items()}

    def plan(self, jobs: Sequence[PlannedJob], varied: Sequence[str]) -> None:
        """Note jobs before they start; a sweeper that searches plans some more after each batch."""
        self.names += [job.name for job in jobs if job.name not in self.names]
        self.note("sweep.varied", json.dumps(list(varied)))
        self.note("sweep.jobs", json.dumps(self.names))

    def note(self, key: str, text: str) -> None:
        """Set a tag of the parent run; what is too long for one goes on in KEY.1, KEY.2 and so on: see `listed`."""
        for part, first in enumerate(range(0, len(text), LONGEST_TAG)):
            self.client().set_tag(self.run_id, f"{key}.{part}" if part else key, text[first : first + LONGEST_TAG])

    def close(self, status: str | None = None) -> int:
        """End the parent run, print what became of the jobs, and return 0 when every job finished, else 1.

        `status` is `KILLED` where the sweep was interrupted, and `FAILED` where something other than a job failed.
        """
        client = self.client()
        self.closed.set()
        try:
            rows = self._rows(self._settled(), interrupted=status == "KILLED")
            self.note("sweep.lost", json.dumps(self.lost))
        except BaseException:
            with suppress(Exception):  # the store may be away
                client.set_terminated(self.run_id, "KILLED")
            raise
        width = max((len(name) for name, *_ in rows), default=0)
        say(*(f"  {name:{width}}  {ended:8}  {why}".rstrip() for name, ended, why in rows))
        done = sum(ended == "FINISHED" for _, ended, _ in rows)
        say(f"sweep {self.run_id}: {done} of {len(rows)} jobs finished")
        missing = done < len(rows)
        client.set_terminated(self.run_id, status or ("FAILED" if missing else "FINISHED"))
        return int(missing)

    def _rows(self, children: Mapping[str, Any], interrupted: bool) -> list[tuple[str, str, str]]:
        """Return name, status and reason of every job."""
        rows = []
        for name in self.names:
            run, lost = children.get(name), self.lost.get(name, "")
            if run is None:
                rows.append((name, "NOT RUN" if interrupted else "NO RUN", lost))
                continue
            failure = run.data.tags.get("failure", "").split("\n")[0]
            if run.info.status == "FINISHED" or lost in failure or interrupted:
                lost = ""
            rows.append((name, run.info.status, f"{failure} {lost}".strip()))
        return rows

    def _settled(self) -> dict[str, Any]:
        """Return the children, none of them RUNNING: a job's shipper outlives the job by some seconds.

        Where it did not, because the machine or Slurm ended it with the job, the run is closed from here.
        """
        while True:
            children = self.children()
            running = [name for name, run in children.items() if name in self.ended and run.info.status == "RUNNING"]
            if not running:
                return children
            for name in running:
                if time.monotonic() > self.ended[name] + PATIENCE:
                    heartbeat.close_lost(self.client(), children[name])
            time.sleep(0.5)


NOTE = "sweep.json"  # in the sweep's folder
_notes: list[TextIO] = []  # those of this process, which are locked while they are open


def begin(config: DictConfig, jobs: Sequence[PlannedJob], varied: Sequence[str]) -> ParentRun:
    """Note `jobs`, which differ in the config keys `varied`, and return the sweep of this session.

    On the first call its parent run is created, or taken up again; `config` is what all jobs share, and Hydra's.
    """
    here = session()
    if here.sweep is not None:
        here.sweep.plan(jobs, varied)
        return here.sweep
    file = config.hydra.job.config_name
    name = MULTIRUN if file == "config" else file
    here.sweep = current = _take_up(config, name) if config.tracking.sweep else _create(config, name, jobs, varied)
    current.varied, current.metrics = list(varied), [str(metric) for metric in config.training.metrics]
    current.plan(jobs, varied)
    heartbeat.beat(current.client(), current.run_id, current.closed)
    description.announce(current)
    current.folder = str(config.hydra.sweep.dir)
    _note_here(current)
    return current


def left_open(folder: Path, uri: str | None) -> ParentRun | None:
    """Return the parent run of the sweep in `folder` that nobody closed; None where there is none, or it goes on.

    Args:
        folder: a sweep's, or any other.
        uri: of the store, where its note has it without its secret.
    """
    try:
        with (folder / NOTE).open("r+", encoding="utf-8") as file:
            if not lock(file.fileno(), WRITER):
                return None
            note = json.load(file)
    except (OSError, ValueError):
        return None
    if uri is None and HIDDEN in note["store"]:
        return None
    found = ParentRun(uri or note["store"], note["run_id"], note["experiment_id"], folder=str(folder))
    parent = found.client().get_run(found.run_id)
    found.names = listed(parent.data.tags, "sweep.jobs")
    return found if parent.info.status == "RUNNING" else None


def _note_here(parent: ParentRun) -> None:
    """Note in the sweep's folder which run it is, for `left_open`; the note is locked as long as this process lives."""
    note = {"store": mask(absolute(parent.uri)), "run_id": parent.run_id, "experiment_id": parent.experiment_id}
    Path(parent.folder).mkdir(parents=True, exist_ok=True)
    file = (Path(parent.folder) / NOTE).open("w", encoding="utf-8")
    _notes.append(file)
    lock(file.fileno(), WRITER)
    file.write(json.dumps(note) + "\n")
    file.flush()


def names_of(values: Sequence[Mapping[str, Any]], batches: Sequence[int], first: int = 0) -> list[str]:
    """Return a unique name for each job by what differs, such as `factor=8 batch=256`.

    `values` are those of the varied config keys; `batches` are effective batch sizes; the jobs count from `first`.
    """
    names = []
    for job, batch in zip(values, batches, strict=True):
        parts = [f"{LETTERS.get(last, last)}={value}" for key, value in job.items() if (last := key.split(".")[-1])]
        if len(set(batches)) > 1 and not any(part.startswith("batch=") for part in parts):
            parts.append(f"batch={batch}")
        names.append(" ".join(parts).replace("${", "{") or "job")  # a name is no interpolation
    if len(set(names)) < len(names):
        names = [f"{name} #{number}" for number, name in enumerate(names, first)]
    return names


def _create(config: DictConfig, name: str, jobs: Sequence[PlannedJob], varied: Sequence[str]) -> ParentRun:
    from mlflow.entities import Param

    from pipeline.tracking.store import Store

    store = Store(config.tracking.uri)
    experiment_id = store.experiment(config.tracking.experiment)
    # Not the store: `--again` finds the sweep in the one that it is given, and a URI may hold a password.
    given: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)  # what they refer to may be secret
    overrides = again.recordable([*given["hydra"], *given["task"]])
    tags = {"sweep.name": name, "sweep.overrides": json.dumps(overrides), "mlflow.source.name": "pipeline"}
    client = store.client()
    run = client.create_run(experiment_id, tags=tags, run_name=f"sweep {name}")
    params = {
        "sweep": name,
        "jobs": config.hydra.sweeper.get("trials") or len(jobs),
        "varied": " ".join(varied),
        "overrides": " ".join(overrides)[:6000],
        "dataset._target_": config.dataset.get("_target_"),
    }
    client.log_batch(run.info.run_id, params=[Param(key, str(value)) for key, value in params.items()])
    say(f"sweep {run.info.run_id} ({name}): {params['jobs']} jobs")
    places = tuple(allowed_places([run.info.artifact_uri]))  # the user's own store has just chosen it
    return ParentRun(config.tracking.uri, run.info.run_id, experiment_id, name, places)


def _take_up(config: DictConfig, name: str) -> ParentRun:
    if not config.tracking.confined:  # which `train` adds where it sees the sweep that is meant
        raise ConfigError("tracking.sweep", "must be given on the command line", config.tracking.sweep)
    store = ForeignStore.open(config.tracking.uri, config.trust.allow)
    parent = store.sweep(config.tracking.sweep)
    store.check_experiment(config.tracking.experiment)
    names = listed(parent.data.tags, "sweep.jobs")
    taken = ParentRun(store.uri, parent.info.run_id, parent.info.experiment_id, name, store.places, names)
    heartbeat.take_over(taken.client(), parent, taken.children().values())
    taken.client().update_run(parent.info.run_id, "RUNNING")
    return taken
