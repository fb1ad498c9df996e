"""The parent run of a sweep in MLflow: it holds the plan, and in the end a table of how each job ended.

The launcher calls `begin` before the first job starts; the command line calls `close` after the last one.
"""

import json
import math
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError, say, say_id
from pipeline.common.secrets import mask
from pipeline.config import allow_list, plain, session
from pipeline.sweep import again, files
from pipeline.tracking.foreign_store import (
    LONGEST_TAG,
    MULTIRUN,
    ForeignStore,
    OwnStore,
    SweepRecord,
    listed,
)
from pipeline.tracking.journal_file import WRITER, absolute, lock

NOTE = "sweep.json"  # in the sweep's folder; locked while a process works on the sweep
ALIVE = "sweep.alive"  # tag of the parent: time of the last heartbeat, in ms since the epoch
# Metrics that show that a job is alive. System metrics come every few seconds, also where an update takes minutes.
SIGNS = ("train/loss", "system/cpu_utilization_percentage")
HEARTBEAT, GONE = (
    20.0,
    120.0,
)  # seconds between two heartbeats; seconds of silence after which a process is gone
GRACE = 15.0  # seconds that a job's shipper has to close the run after the job ended, beside its patience


@dataclass
class ParentRun(SweepRecord):
    """The parent run, and the state of its jobs."""

    name: str = ""  # of the sweep file, or `multirun`
    places: tuple[str, ...] = ()  # where artifacts may be, besides the store
    names: list[str] = field(default_factory=list)  # of all planned jobs, in order
    varied: list[str] = field(
        default_factory=list
    )  # config keys in which the jobs differ
    metrics: list[str] = field(
        default_factory=list
    )  # that the jobs measure beside the loss
    lost: dict[str, str] = field(
        default_factory=dict
    )  # why a job returned no loss, by its name
    ended: dict[str, float] = field(
        default_factory=dict
    )  # when a job's process ended, in seconds of a monotonic clock
    folder: str = ""  # of the sweep
    patience: float = 60.0  # of a job's shipper with the store, in seconds
    closed: threading.Event = field(
        default_factory=threading.Event
    )  # stops the heartbeats
    note: TextIO | None = None  # open and locked file in `folder`, see `left_open`

    def finished(self) -> dict[str, float]:
        """Return the last loss of each finished job, which does not run again: infinite if it logged none."""
        done = {
            name: run.data.metrics
            for name, run in self.children().items()
            if run.info.status == "FINISHED"
        }
        return {
            name: last.get("val/loss", last.get("train/loss", math.inf))
            for name, last in done.items()
        }

    def plan(self, names: Iterable[str], varied: Sequence[str]) -> None:
        """Record jobs before they start; a sweeper that searches plans more after each batch."""
        self.names += [name for name in names if name not in self.names]
        self.tag("sweep.varied", json.dumps(list(varied)))
        self.tag("sweep.jobs", json.dumps(self.names))

    def tag(self, key: str, text: str) -> None:
        """Set a tag of the parent run; a long text continues in KEY.1, KEY.2 and so on, see `listed`."""
        for part, first in enumerate(range(0, len(text), LONGEST_TAG)):
            self.client().set_tag(
                self.run_id,
                f"{key}.{part}" if part else key,
                text[first : first + LONGEST_TAG],
            )

    def beat(self) -> None:
        """Write heartbeats to the store until the sweep is closed."""
        while not self.closed.is_set():
            with suppress(Exception):  # the store may be away for a while
                self.client().set_tag(self.run_id, ALIVE, str(int(time.time() * 1000)))
            self.closed.wait(HEARTBEAT)

    def close(self, status: str | None = None) -> int:
        """End the parent run, as `KILLED` or `FAILED` if the sweep was; return 0 if all jobs finished, else 1."""
        client = self.client()
        self.closed.set()
        try:
            rows = list(
                self._rows(self._closed_children(), interrupted=status == "KILLED")
            )
            self.tag("sweep.lost", json.dumps(self.lost))
        except BaseException:
            with suppress(Exception):  # the store may be away
                client.set_terminated(self.run_id, "KILLED")
            raise
        width = max((len(name) for name, *_ in rows), default=0)
        say(
            *(
                f"  {name:{width}}  {ended:8}  {why}".rstrip()
                for name, ended, why in rows
            )
        )
        done = sum(ended == "FINISHED" for _, ended, _ in rows)
        say(f"sweep {self.run_id}: {done} of {len(rows)} jobs finished")
        client.set_terminated(
            self.run_id, status or ("FINISHED" if done == len(rows) else "FAILED")
        )
        return int(done < len(rows))

    def _rows(
        self, children: Mapping[str, Any], interrupted: bool
    ) -> Iterator[tuple[str, str, str]]:
        for name in self.names:
            lost, run = self.lost.get(name, ""), children.get(name)
            if run is None:
                yield name, "NOT RUN" if interrupted else "NO RUN", lost
            else:
                failure = run.data.tags.get("failure", "").split("\n")[0]
                known = run.info.status == "FINISHED" or lost in failure or interrupted
                yield (
                    name,
                    run.info.status,
                    failure if known else f"{failure} {lost}".strip(),
                )

    def _closed_children(self) -> dict[str, Any]:
        """Return the children once the shippers of all ended jobs have closed their runs, or were killed with them."""
        while True:
            children = self.children()
            running = [
                name
                for name, run in children.items()
                if name in self.ended and run.info.status == "RUNNING"
            ]
            if not running:
                return children
            for name in running:
                if time.monotonic() > self.ended[name] + GRACE + self.patience:
                    _close_lost(self.client(), children[name])
            time.sleep(0.5)


def begin(
    config: DictConfig, names: Collection[str], varied: Sequence[str]
) -> ParentRun:
    """Create the parent run of a multirun whose first jobs have these `names`, or reopen it; start its heartbeats."""
    file = config.hydra.job.config_name
    name = MULTIRUN if file == "config" else file
    sweep = (
        _reopen(config, name)
        if config.tracking.sweep
        else _create(config, name, len(names), varied)
    )
    say_id(sweep.run_id)
    session.session().sweep = sweep
    sweep.varied, sweep.metrics = (
        list(varied),
        [str(metric) for metric in config.training.metrics],
    )
    sweep.plan(names, varied)
    threading.Thread(target=sweep.beat, daemon=True).start()
    # For `left_open`; the lock is held until this process ends.
    note = {
        "store": mask(absolute(sweep.uri)),
        "run_id": sweep.run_id,
        "experiment_id": sweep.experiment_id,
    }
    sweep.folder, sweep.patience = str(config.hydra.sweep.dir), config.tracking.patience
    Path(sweep.folder).mkdir(parents=True, exist_ok=True)
    sweep.note = (Path(sweep.folder) / NOTE).open("w", encoding="utf-8")
    lock(sweep.note.fileno(), WRITER)
    print(json.dumps(note), file=sweep.note, flush=True)
    return sweep


def left_open(folder: Path, own: OwnStore) -> ParentRun | None:
    """Return the sweep in `folder` if its process did not close it, else None; its store has to be the user's `own`."""
    try:
        with (folder / NOTE).open("r+", encoding="utf-8") as file:
            if not lock(file.fileno(), WRITER):
                return None
            note = json.load(file)
    except (OSError, ValueError):
        return None
    uri = own.followed(str(note["store"]), f"the sweep in {folder}")
    found = ParentRun(uri, note["run_id"], note["experiment_id"], folder=str(folder))
    parent = found.client().get_run(found.run_id)
    found.names = listed(parent.data.tags, "sweep.jobs")
    return found if parent.info.status == "RUNNING" else None


def names_of(
    values: Sequence[Mapping[str, Any]], batches: Sequence[int], first: int = 0
) -> list[str]:
    """Return a unique name for each job, such as `factor=8 batch=256`, from its varied `values` and effective batch."""
    names = []
    for job, batch in zip(values, batches, strict=True):
        parts = [plain.short(key, value) for key, value in job.items()]
        if len(set(batches)) > 1 and not any(
            part.startswith("batch=") for part in parts
        ):
            parts.append(f"batch={batch}")
        names.append(
            " ".join(parts).replace("${", "{") or "job"
        )  # not an interpolation
    if len(set(names)) < len(names):
        names = [f"{name} #{number}" for number, name in enumerate(names, first)]
    return names


def _create(
    config: DictConfig, name: str, jobs: int, varied: Sequence[str]
) -> ParentRun:
    from mlflow.entities import Param

    from pipeline.tracking.store import Store

    store = Store(config.tracking.uri)
    experiment_id = store.experiment(config.tracking.experiment)
    # Without the store: `--again` is told where it is, and its URI may hold a password.
    given: Any = OmegaConf.to_container(
        config.hydra.overrides, resolve=False
    )  # resolved they may hold secrets
    overrides = again.recordable([*given["hydra"], *given["task"]])
    tags = {
        "sweep.name": name,
        "sweep.overrides": json.dumps(overrides),
        "mlflow.source.name": "pipeline",
    }
    tags |= {"sweep.question": asked} if (asked := files.question(name)) else {}
    client = store.client()
    run = client.create_run(experiment_id, tags=tags, run_name=f"sweep {name}")
    params = {
        "sweep": name,
        "jobs": config.hydra.sweeper.get("trials") or jobs,
        "varied": " ".join(varied),
    }
    params |= {
        "overrides": " ".join(overrides)[:6000],
        "dataset._target_": config.dataset.get("_target_"),
    }
    client.log_batch(
        run.info.run_id,
        params=[Param(key, str(value)) for key, value in params.items()],
    )
    say(f"sweep {run.info.run_id} ({name}): {params['jobs']} jobs")
    places = tuple(
        allow_list.allowed_places([run.info.artifact_uri])
    )  # the user's own store chose it
    return ParentRun(config.tracking.uri, run.info.run_id, experiment_id, name, places)


def _reopen(config: DictConfig, name: str) -> ParentRun:
    if (
        not config.tracking.confined
    ):  # `pipeline train` sets it if the command line names the sweep
        raise ConfigError(
            "tracking.sweep", "must be given on the command line", config.tracking.sweep
        )
    store = ForeignStore.open(config.tracking.uri, config.trust.allow)
    parent = store.sweep(config.tracking.sweep)
    store.check_experiment(config.tracking.experiment)
    names = listed(parent.data.tags, "sweep.jobs")
    sweep = ParentRun(
        store.uri,
        parent.info.run_id,
        parent.info.experiment_id,
        name,
        store.places,
        names,
    )
    close_abandoned(sweep.client(), parent, sweep.children().values())
    sweep.client().update_run(parent.info.run_id, "RUNNING")
    return sweep


def close_abandoned(client: Any, parent: Any, children: Iterable[Any]) -> None:
    """Close the `children` whose processes ended without closing their runs; refuse a sweep that is alive."""
    running = [run for run in children if run.info.status == "RUNNING"]
    alive = parent.data.tags.get(ALIVE, "")
    signs = (
        [int(alive) if re.fullmatch("[0-9]{1,15}", alive) else 0]
        if parent.info.status == "RUNNING"
        else []
    )
    for run in running:
        histories = [
            client.get_metric_history(run.info.run_id, key)
            for key in SIGNS
            if key in run.data.metrics
        ]
        signs += [
            run.info.start_time,
            *(point.timestamp for history in histories for point in history),
        ]
    silence = time.time() - max(signs, default=0) / 1000
    if silence < GONE:
        rule = f"must have ended: {silence:.0f} s ago it still gave a sign of life ({GONE:.0f} s of silence are enough)"
        raise ConfigError("SWEEP", rule, parent.info.run_id)
    for run in running:
        _close_lost(client, run)


def _close_lost(client: Any, run: Any) -> None:
    client.set_tag(
        run.info.run_id, "failure", "The job ended, and its shipper, without a word."
    )
    client.set_terminated(run.info.run_id, "KILLED")
