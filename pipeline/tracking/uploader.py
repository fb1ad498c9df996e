"""Carries one journal to its run in a store: each line at least once, each point of a metric exactly once.

The run has a tag `journal`, made before the run was: by it a second process finds the run that a first one created,
and compares what the store holds with what the journal says. So any process may take up the work of another one that
died, any number of times.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, ViewType
from mlflow.exceptions import MlflowException

from pipeline.common.errors import ConfigError, first_line
from pipeline.tracking import mlflow_internals
from pipeline.tracking.journal_file import SHIPPER, DamagedError, Reader, lock
from pipeline.tracking.store import Store
from pipeline.trust import artifact_locations

AT_ONCE = 1000  # metrics in one request, at most; MLflow's limit
AFTER_FAILURE = 50  # and in a request that is tried again: servers before 3.17 look each of its points up
PARAM_LENGTH = 6000  # characters of a param's value
TRIES = 5  # of a request that the store refuses for what it says
RETRY = 1.0  # seconds between two tries to create a run
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE")
UNWRITTEN = "journal.unwritten"  # tag: the segment whose end reached the store, and perhaps never the full disk
FORKS = "forks"  # tag: the runs that began with a checkpoint of this one
MOST_FORKS = 140  # that are named: MLflow takes 5000 characters
NOT_SHIPPED = "not_shipped"  # tag: what the store did not take, or could not be read


class Delivery:
    """Ships the lines of one journal, in order; the first one says what run to create.

    Args:
        store: that gets the run.
        path: of the journal.
        again: another process may have created the run.
        seconds: to wait for that other process to end.

    Attributes:
        run_id, experiment_id: of the run.
        sent: points that the store did not have.

    Raises:
        ConfigError: the run is deleted, another process ships this journal, or its artifacts lie where they must not.
    """

    def __init__(self, store: Store, path: Path, *, again: bool, seconds: float = 0.0):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if not lock(self._descriptor, SHIPPER, seconds):
            raise ConfigError("RUN_DIR", "is being shipped by another process", str(path.parent))
        self._store, self._folder = store, path.parent
        self._reader = Reader(self._descriptor)
        self._points: list[Metric] = []
        self._waiting: list[dict[str, Any]] = []  # lines other than metrics, shipped after the metrics before them
        self._held: dict[str, bytearray] = {}  # 1 at each step that the store has of a metric
        self._status: str | None = None
        self._at_once = AT_ONCE
        self._last_step = self._samples = self._segment = self._tries = self.sent = 0
        self.damage = ""
        line = next(self._reader.lines())
        begun = line["start"]
        self.client = store.client()
        self.experiment_id = store.experiment(begun["experiment"])
        self._file = None if store.database is None else _identity(store.database)
        run = (self._found(begun["tags"]["journal"]) if again else None) or self._created(line)
        self.run_id, self._before = run.info.run_id, run
        try:
            if (places := artifact_locations.allowed_places()) is not None:
                artifact_locations.check(run.info.artifact_uri, store.uri, places)
            params = [Param(key, str(value)[:PARAM_LENGTH]) for key, value in begun["params"].items()]
            missing = [param for param in params if param.key not in run.data.params]
            for first in range(0, len(missing), 100):
                self.client.log_batch(self.run_id, params=missing[first : first + 100])
            # Sampled from here, not in a thread of its own that reads the whole run before each of its writes.
            self._system = mlflow_internals.system_sampler(store.uri, self.run_id) if begun["system_metrics"] else None
        except Exception:
            if not again:
                with contextlib.suppress(Exception):  # the first failure is what the trainer is told
                    self.client.set_terminated(self.run_id, "FAILED")
            raise
        for key in run.data.metrics:
            steps = [point.step for point in self.client.get_metric_history(self.run_id, key)]
            self._held[key] = bytearray(max(steps) + 1)
            for step in steps:
                self._held[key][step] = 1
        self._samples = max((len(steps) for key, steps in self._held.items() if key.startswith("system/")), default=0)

    def read(self, alive: bool) -> bool:
        """Take in lines that were not read before, so many that they can be shipped at once; return whether any were.

        Where the trainer is not `alive` and died without a word, say so for it.
        """
        before = self._reader.offset
        try:
            for line in self._reader.lines():
                self._take(line)
                if len(self._points) >= AT_ONCE:
                    break
        except DamagedError as error:
            self._damaged(error)
        if self._reader.offset > before:
            return True
        if not alive and self._status is None:
            before = self._before
            if before.data.tags.get(UNWRITTEN) == str(self._segment) and before.info.end_time is not None:
                self._status = before.info.status
                self._waiting.append({"end": self._status, "time": before.info.end_time})
                return False
            failure = self.damage or f"The process ended without a word after update {self._last_step}."
            self._waiting += [{"tags": {"failure": failure}}, {"end": "KILLED", "time": int(time.time() * 1000)}]
            self._status = "KILLED"
        return False

    def add_unwritten(self, text: str) -> None:
        """Take in what the disk of the journal did not take; its first line may go on with the file's last one."""
        if text:
            try:
                for line in self._reader.lines():
                    self._take(line)
                beginning = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, self._reader.offset)
                for whole in (beginning + text.encode()).splitlines(keepends=True):
                    line = self._reader.checked(whole)
                    if "end" in line:
                        self._take({"tags": {UNWRITTEN: str(self._segment)}})
                    self._take(line)
            except DamagedError as error:
                self._damaged(error)

    def sample(self) -> None:
        """Take one sample of the system's metrics; its step is the number of samples before it, as MLflow has it."""
        if self._system is None:
            return
        sampled, now = self._system(), int(time.time() * 1000)
        self._points += [Metric(f"system/{key}", value, now, self._samples) for key, value in sampled.items()]
        self._samples += 1

    def ship(self) -> None:
        """Send what was read; what the store has not confirmed stays here and is sent again."""
        if self._file is not None and _identity(self._store.database) != self._file:  # what is written there is lost
            raise StoreGoneError(f"{self._store.database} was moved or deleted")
        while self._points:
            batch = self._points[: self._at_once]
            self._at_once = AFTER_FAILURE
            self.client.log_batch(self.run_id, metrics=batch)
            self._at_once = AT_ONCE
            del self._points[: len(batch)]
            self.sent += len(batch)
        while self._waiting:
            line = self._waiting[0]
            try:
                self._deliver(line)
            except MlflowException as error:
                self._tries += 1
                if error.error_code not in REFUSALS or self._tries < TRIES:
                    raise
                self._note(f"{next(iter(line))}: {first_line(error)}")
            self._tries = 0
            del self._waiting[0]

    def status(self) -> str | None:
        """Return the status that the run has by what was read; None while it goes on."""
        return self._status

    def close(self) -> None:
        """Let the journal be, and free its lock."""
        os.close(self._descriptor)

    def _damaged(self, error: DamagedError) -> None:
        self.damage = f"The journal cannot be read further: {error}."

    def _take(self, line: dict[str, Any]) -> None:
        if "metrics" in line:
            step, milliseconds = line["step"], line["time"]
            self._last_step = max(step, self._last_step)
            for key, value in line["metrics"].items():
                steps = self._held.get(key, b"")
                if step >= len(steps) or not steps[step]:
                    self._points.append(Metric(key, value, milliseconds, step))
        else:
            self._waiting.append(line)
            self._segment += "resume" in line
            self._status = line.get("end", None if "resume" in line else self._status)

    def _deliver(self, line: dict[str, Any]) -> None:
        if "dataset" in line:  # MLflow refuses one that another run inserts in this moment; then it is sent again
            tags = [InputTag("mlflow.data.context", line["context"])]
            self.client.log_inputs(self.run_id, [DatasetInput(Dataset(**line["dataset"]), tags)])
        for key, value in line.get("tags", {}).items():
            self.client.set_tag(self.run_id, key, value)
        if "fork_of" in line:
            self._link(line["fork_of"])
        if "artifact" in line:
            file = self._folder / line["artifact"]
            try:
                file.open("rb").close()
            except OSError as error:
                self._note(f"{file.name}: {error.strerror}")
            else:
                self.client.log_artifact(self.run_id, str(file))
        if "resume" in line:
            with contextlib.suppress(MlflowException):  # it may have none
                self.client.delete_tag(self.run_id, "failure")
            self.client.update_run(self.run_id, "RUNNING")
        if "end" in line and line is self._waiting[-1]:  # of a run that was not resumed since
            self.client.set_terminated(self.run_id, line["end"], line["time"])

    def _link(self, source: str) -> None:
        """Name this run in the tag `forks` of the one that it begins with, where that can be written."""
        with contextlib.suppress(MlflowException):
            named = self.client.get_run(source).data.tags.get(FORKS, "").split(", ")
            if self.run_id not in named:
                self.client.set_tag(source, FORKS, ", ".join([*filter(None, named), self.run_id][-MOST_FORKS:]))

    def _note(self, what: str) -> None:
        self.client.set_tag(self.run_id, NOT_SHIPPED, what[:5000])

    def _found(self, name: str) -> Any:
        run = run_of(self.client, self.experiment_id, name)
        if run is not None and run.info.lifecycle_stage != "active":
            rule = f"must have a run that is not deleted: mlflow runs restore --run-id {run.info.run_id}"
            raise ConfigError("RUN_DIR", rule, str(self._folder))
        return run

    def _created(self, line: dict[str, Any]) -> Any:
        """Create the run: a request a try, as MLflow's own further ones would leave a run each behind."""
        begun = line["start"]
        for tries in itertools.count(1):
            try:
                with _without_retries():
                    return self.client.create_run(self.experiment_id, line["time"], begun["tags"], begun["name"])
            except MlflowException as error:
                if tries == TRIES or error.error_code in REFUSALS:
                    raise
                time.sleep(RETRY)
                if found := self._found(begun["tags"]["journal"]):
                    return found
        return None


def run_of(client: Any, experiment_id: str, journal: str) -> Any:
    """Return the run that was created for a journal, by its name; None where there is none."""
    where = f"tags.journal = '{journal}'"
    runs = client.search_runs([experiment_id], where, ViewType.ALL, order_by=["start_time ASC"])
    return next(iter(runs), None)


class StoreGoneError(OSError):
    """The file of a SQLite store is no longer the one that was opened."""


def _identity(database: Path | None) -> tuple[int, int]:
    assert database is not None
    try:
        found = database.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _without_retries() -> Iterator[None]:
    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"  # read at each request
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
