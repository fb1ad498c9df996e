"""Ships one journal to its run in a store: each line at least once, each point of a metric exactly once.

The run has a tag `journal`, whose value is chosen before the run is created. Any process may continue the work of one
that died: it finds the run by its tag, and compares what the store holds with what the journal says.
"""

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param
from mlflow.exceptions import MlflowException

from pipeline.common import imports
from pipeline.common.errors import ConfigError, first_line
from pipeline.common.recorded import FormError
from pipeline.common.secrets import mask
from pipeline.tracking import model_upload
from pipeline.tracking.journal_file import MODEL, SHIPPER, LineReader, lock
from pipeline.tracking.store import Store
from pipeline.tracking.system_metrics import system_sampler
from pipeline.trust import artifact_locations

AT_ONCE = 1000  # metrics per request, at most; MLflow's limit
AFTER_FAILURE = 50  # and per request that is repeated: servers before 3.17 look each of its points up
PARAMS_AT_ONCE = 100  # params per request, at most; MLflow's limit
PARAM_LENGTH = 6000  # characters of a param's value
TRIES = 5  # of a request that the store refuses because of its content
RETRY = 1.0  # seconds between two tries
REFUSALS = (
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_ALREADY_EXISTS",
    "INVALID_STATE",
)
UNWRITTEN = "journal.unwritten"  # tag: the segment whose end reached the store, but perhaps never the full disk
FORKS = "forks"  # tag: the runs that began with a checkpoint of this one
MOST_FORKS = 140  # that are named: MLflow takes 5000 characters
NOT_LOGGED = "model.not_logged"  # tag: why the model is not in the store
NOT_SHIPPED = "not_shipped"  # tag: what the store did not take, or could not be read
Tell = Callable[
    [int], object
]  # takes about how many points the store does not have yet


class StoreGoneError(OSError):
    """The file of a SQLite store is no longer the one that was opened."""


class Uploader:
    """Ships the lines of one journal, in order, to its run with the IDs `run_id` and `experiment_id`.

    Another process may have created the run if it `may_exist`; it gets some `seconds` to end. Each answer calls `tell`.
    A `ConfigError` says that the run is deleted, is being shipped, or has artifacts that lie where they must not.
    """

    def __init__(
        self,
        store: Store,
        path: Path,
        *,
        may_exist: bool,
        seconds: float = 0.0,
        tell: Tell = lambda _: None,
    ):
        self._store, self._folder, self._tell = store, path.parent, tell
        self._points: list[Metric] = []
        self._lines: list[
            dict[str, Any]
        ] = []  # other than metrics, shipped after the metrics before them
        self._stored: dict[
            str, bytearray
        ] = {}  # metric → 1 at each step that the store has
        self._at_once = AT_ONCE
        self._last_step = self._segment = self._tries = self._points_read = 0
        self.sent = 0  # number of points that the store did not have
        self.status: str | None = (
            None  # of the run by the lines read so far; None while it goes on
        )
        self.not_logged = (
            ""  # why the model could not be logged; empty if it could, or there is none
        )
        self.damage = ""  # why the journal cannot be read further; empty if it can
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not lock(self._descriptor, SHIPPER, seconds):
                raise ConfigError(
                    "RUN_DIR", "is being shipped by another process", str(path.parent)
                )
            self._reader = LineReader(self._descriptor)
            self._open_run(next(self._reader.lines()), may_exist)
        except BaseException:
            self.close()
            raise

    def read(self, *, ended: bool = False) -> bool:
        """Read the lines of one request; return whether there were any. If the trainer has `ended`, so does its run."""
        before = self._reader.offset
        for line in self._readable(self._reader.lines()):
            self._add(line)
            if len(self._points) >= AT_ONCE:
                break
        if self._reader.offset > before:
            return True
        if ended and self.status is None:
            self._add_end()
        return False

    def add_unwritten(self, text: str) -> None:
        """Read the lines that the journal's disk did not take, after those that it did."""
        for line in self._readable(self._reader.continued(text)) if text else ():
            if "end" in line:
                self._add({"tags": {UNWRITTEN: str(self._segment)}})
            self._add(line)

    def left(self) -> int:
        """Return about how many points the store does not have; those in bytes not yet read are estimated."""
        unread = os.fstat(self._descriptor).st_size - self._reader.offset
        return len(self._points) + unread * self._points_read // self._reader.offset

    def sample(self) -> None:
        """Take one sample of the system's metrics; its step is the number of samples before it, as MLflow has it."""
        if self._system is not None:
            sampled, now = self._system(), int(time.time() * 1000)
            self._points += [
                Metric(f"system/{key}", value, now, self._samples)
                for key, value in sampled.items()
            ]
            self._samples += 1

    def ship(self) -> None:
        """Send what was read; what the store has not confirmed is kept and sent again."""
        if self._store.file_id() != self._file_id:  # what is written there is lost
            raise StoreGoneError(f"{self._store.database} was moved or deleted")
        while self._points:
            batch, self._at_once = self._points[: self._at_once], AFTER_FAILURE
            self.client.log_batch(self.run_id, metrics=batch)
            self._at_once = AT_ONCE
            del self._points[: len(batch)]
            self.sent += len(batch)
            self._tell(self.left())
        while self._lines:
            try:
                self._ship_line(self._lines[0])
            except MlflowException as error:
                self._tries += 1
                if error.error_code not in REFUSALS or self._tries < TRIES:
                    raise
                kind = next(key for key in self._lines[0] if key not in ("crc", "time"))
                self._note(f"{kind}: {first_line(error)}")
            self._tries = 0
            del self._lines[0]
            self._tell(self.left())

    def finish(
        self,
        patience: float,
        report: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Ship the rest once no trainer writes; errors are reported, and raised once they last `patience` seconds."""
        more = True
        while more:
            more, until = self.read(ended=True), time.monotonic() + patience
            while True:
                before = self.sent, len(self._lines)
                try:
                    self.ship()
                    break
                except Exception as error:
                    if before != (
                        self.sent,
                        len(self._lines),
                    ):  # it answers now and then
                        until = time.monotonic() + patience
                    if isinstance(error, StoreGoneError) or time.monotonic() > until:
                        raise
                    report(error)
                    time.sleep(RETRY)

    def close(self) -> None:
        """Close the journal, which frees its lock."""
        os.close(self._descriptor)

    def _open_run(self, line: dict[str, Any], may_exist: bool) -> None:
        """Find or create the run of a journal's first line; complete its params, and ask for its points."""
        start = line["start"]
        self.client, self.experiment_id = (
            self._store.client(),
            self._store.experiment(start["experiment"]),
        )
        self._file_id = self._store.file_id()
        self._run = (
            self._found(start["tags"]["journal"]) if may_exist else None
        ) or self._created(line)
        self.run_id = self._run.info.run_id
        try:
            if (places := artifact_locations.confined_to) is not None:
                artifact_locations.check(
                    self._run.info.artifact_uri, self._store.uri, places
                )
            known, given = self._run.data.params, start["params"].items()
            params = [
                Param(key, str(value)[:PARAM_LENGTH])
                for key, value in given
                if key not in known
            ]
            for first in range(0, len(params), PARAMS_AT_ONCE):
                self.client.log_batch(
                    self.run_id, params=params[first : first + PARAMS_AT_ONCE]
                )
            of_run = self._store.uri, self.run_id, start.get("gpus")
            self._system = system_sampler(*of_run) if start["system_metrics"] else None
        except Exception:
            if not may_exist:
                with contextlib.suppress(
                    Exception
                ):  # the trainer is told of the first failure
                    self.client.set_terminated(self.run_id, "FAILED")
            raise
        for key in self._run.data.metrics:
            steps = [
                point.step for point in self.client.get_metric_history(self.run_id, key)
            ]
            self._stored[key] = bytearray(max(steps) + 1)
            for step in steps:
                self._stored[key][step] = 1
            self._tell(self.left())
        self._samples = max(
            (
                len(steps)
                for key, steps in self._stored.items()
                if key.startswith("system/")
            ),
            default=0,
        )

    def _found(self, journal: str) -> Any:
        run = self._store.find_run(self.experiment_id, journal)
        if run is not None and run.info.lifecycle_stage != "active":
            rule = f"must have a run that is not deleted: mlflow runs restore --run-id {run.info.run_id}"
            raise ConfigError("RUN_DIR", rule, str(self._folder))
        return run

    def _created(self, line: dict[str, Any]) -> Any:
        """Create the run. Each try is one request: every retry of MLflow's own could leave another run behind."""
        start = line["start"]
        for left in reversed(range(TRIES)):
            try:
                with imports.variables_set(
                    MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"
                ):  # which is read at each request
                    return self.client.create_run(
                        self.experiment_id, line["time"], start["tags"], start["name"]
                    )
            except MlflowException as error:
                if not left or error.error_code in REFUSALS:
                    raise
            time.sleep(RETRY)
            if found := self._found(start["tags"]["journal"]):
                return found

    def _add(self, line: dict[str, Any]) -> None:
        if "metrics" in line:
            step = line["step"]
            self._last_step = max(step, self._last_step)
            self._points_read += len(line["metrics"])
            for key, value in line["metrics"].items():
                steps = self._stored.get(key, b"")
                if step >= len(steps) or not steps[step]:
                    self._points.append(Metric(key, value, line["time"], step))
        else:
            self._lines.append(line)
            self._segment += "resume" in line
            self.status = line.get("end", None if "resume" in line else self.status)

    def _add_end(self) -> None:
        """End the run of a trainer that died without a word; one whose end only the store has ends as it did there."""
        run = self._run
        if (
            run.data.tags.get(UNWRITTEN) == str(self._segment)
            and run.info.end_time is not None
        ):
            self._add({"end": run.info.status, "time": run.info.end_time})
        else:
            failure = (
                self.damage
                or f"The process ended without a word after update {self._last_step}."
            )
            self._add({"tags": {"failure": failure}})
            self._add({"end": "KILLED", "time": int(time.time() * 1000)})

    def _readable(self, lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        try:
            yield from lines
        except FormError as error:
            self.damage = f"The journal cannot be read further: {error}."

    def _ship_line(self, line: dict[str, Any]) -> None:
        if (
            "dataset" in line
        ):  # MLflow refuses one that another run inserts at the same time; then it is sent again
            tags = [InputTag("mlflow.data.context", line["context"])]
            self.client.log_inputs(
                self.run_id, [DatasetInput(Dataset(**line["dataset"]), tags)]
            )
        for key, value in line.get("tags", {}).items():
            self.client.set_tag(self.run_id, key, value)
        if "fork_of" in line:
            with contextlib.suppress(MlflowException):  # the source may be gone
                named = (
                    self.client.get_run(line["fork_of"])
                    .data.tags.get(FORKS, "")
                    .split(", ")
                )
                forks = ", ".join([*filter(None, named), self.run_id][-MOST_FORKS:])
                if self.run_id not in named:
                    self.client.set_tag(line["fork_of"], FORKS, forks)
        if "artifact" in line:
            name = str(line["artifact"])
            file = self._folder / name
            try:
                if (
                    not stat.S_ISREG(file.lstat().st_mode) or file.name != name
                ):  # a journal may be somebody else's
                    raise OSError(
                        errno.EINVAL, "it is no file of the run directory itself"
                    )
                file.open("rb").close()
            except (OSError, ValueError) as error:
                self._note(f"{name}: {getattr(error, 'strerror', error)}")
            else:
                # TensorBoard finds a profile in such a folder alone.
                place = (
                    f"plugins/profile/{name.partition('.')[0]}"
                    if name.endswith(".xplane.pb")
                    else None
                )
                self.client.log_artifact(self.run_id, str(file), place)
        if "model" in line:
            self._ship_model(str(line["model"]))
        if "resume" in line:
            with contextlib.suppress(MlflowException):  # it may have none
                self.client.delete_tag(self.run_id, "failure")
            self.client.update_run(self.run_id, "RUNNING")
        if (
            "end" in line and line is self._lines[-1]
        ):  # the run was not resumed afterwards
            self.client.set_terminated(self.run_id, line["end"], line["time"])
            if (found := self._store.status(self.run_id)) != line["end"]:
                raise OSError(
                    f"the store has the run as {found} when it is read again, and not as {line['end']}"
                )

    def _ship_model(self, name: str) -> None:
        """Log the model of that name; one that cannot be logged does not keep the run from its end."""
        try:
            if not re.fullmatch(
                "[0-9a-f]{32}", name
            ):  # a journal may be somebody else's
                raise ValueError("its name is not one that this package gives")
            folder = self._folder / MODEL.format(name)
            of_run = self.client, self.experiment_id, self.run_id
            model_upload.ship(*of_run, folder, lambda: self._tell(self.left()))
        except Exception as error:
            if model_upload.may_pass(error):
                raise
            self.not_logged = mask(first_line(error))
            self.client.set_tag(self.run_id, NOT_LOGGED, self.not_logged[:5000])

    def _note(self, what: str) -> None:
        self.client.set_tag(self.run_id, NOT_SHIPPED, what[:5000])
