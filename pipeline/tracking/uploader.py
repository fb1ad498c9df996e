"""Ships one journal to its run in a store.

Every line arrives at least once, and every point of a metric exactly once, whoever dies
meanwhile:

- The run has a tag `journal`, whose value is chosen before the run is created. So any
  process that continues the work finds the run, even if the answer to the request that
  created it was lost.
- A process that opens the run reads which points the store has, and adds only those
  that are missing.
- A request that failed may have been done. What it held is kept until a request
  succeeds, and sent again: MLflow keeps a repeated point once, and a repeated tag,
  input or file replaces itself.
- Points are sent before the other lines that were read with them, and the end of the
  run comes last. So the status of a run says that everything before it is there.
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
from pipeline.tracking.foreign_store import LONGEST_TAG
from pipeline.tracking.journal_file import MODEL, SHIPPER, LineReader, lock
from pipeline.tracking.params import param_text
from pipeline.tracking.store import Store
from pipeline.tracking.system_metrics import system_sampler
from pipeline.trust import artifact_locations

POINTS_PER_REQUEST = 1000  # MLflow's limit
# Servers before 3.17 look up each point of a request that is repeated.
POINTS_AFTER_FAILURE = 50
PARAMS_PER_REQUEST = 100  # MLflow's limit
TRIES = 5  # of a request that the store rejects because of its content
RETRY = 1.0  # seconds between two tries
# MLflow's error codes of such requests.
REJECTIONS = (
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_ALREADY_EXISTS",
    "INVALID_STATE",
)
MOST_FORKS = 140  # that fit in a tag

# Tags of a run.
UNWRITTEN = "journal.unwritten"  # the segment whose end the full disk may not have
FORKS = "forks"  # the runs that began with a checkpoint of this one
NOT_LOGGED = "model.not_logged"  # why the model is not in the store
NOT_SHIPPED = "not_shipped"  # what the store did not take, or could not be read

Tell = Callable[[int], object]  # takes about how many points the store does not have


class StoreGoneError(OSError):
    """The file of a SQLite store is no longer the one that was opened."""


class Uploader:
    """Ships the lines of one journal, in order, to its run.

    Args:
        store: where the run is, or will be created.
        path: the journal.
        may_exist: another process may have created the run.
        seconds: how long to wait for another process that ships the journal.
        tell: is called after each request.

    Attributes:
        run_id: the run's ID.
        experiment_id: the ID of its experiment.
        sent: how many points were sent that the store did not have.
        status: the run's status by the lines read so far; None while it goes on.
        not_logged: why the model could not be logged; empty if it could, or if there
            is none.
        damage: why the journal cannot be read further; empty if it can.

    Raises:
        ConfigError: the run is deleted, is being shipped by another process, or has
            artifacts that lie where they must not.
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
        self._store = store
        self._folder = path.parent
        self._tell = tell

        # What was read and is not in the store yet: points, and all other lines.
        self._points: list[Metric] = []
        self._lines: list[dict[str, Any]] = []
        # Metric → 1 at each step that the store has.
        self._stored: dict[str, bytearray] = {}

        self._sample_system: Callable[[], dict[str, float]] | None = None
        self._samples = 0
        self._points_per_request = POINTS_PER_REQUEST
        self._tries = 0
        self._last_step = 0
        self._segment = 0
        self._points_read = 0
        self.sent = 0
        self.status: str | None = None
        self.not_logged = ""
        self.damage = ""

        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not lock(self._descriptor, SHIPPER, seconds):
                rule = "is being shipped by another process"
                raise ConfigError("RUN_DIR", rule, str(path.parent))
            self._reader = LineReader(self._descriptor)
            self._open_run(next(self._reader.lines()), may_exist)
        except BaseException:
            self.close()
            raise

    def read(self, *, ended: bool = False) -> bool:
        """Read the lines of one request.

        If the trainer has `ended` and the lines do not say so, the run ends too.

        Returns:
            Whether there were any lines.
        """
        before = self._reader.offset
        for line in self._readable(self._reader.lines()):
            self._add(line)
            if len(self._points) >= POINTS_PER_REQUEST:
                break
        if self._reader.offset > before:
            return True
        if ended and self.status is None:
            self._add_end()
        return False

    def add_unwritten(self, text: str) -> None:
        """Read the lines that the journal's disk did not take, after those it did."""
        if not text:
            return
        for line in self._readable(self._reader.continued(text)):
            if "end" in line:
                self._add({"tags": {UNWRITTEN: str(self._segment)}})
            self._add(line)

    def left(self) -> int:
        """Return about how many points the store does not have.

        Those in bytes that were not read yet are estimated.
        """
        unread_bytes = os.fstat(self._descriptor).st_size - self._reader.offset
        unread_points = unread_bytes * self._points_read // self._reader.offset
        return len(self._points) + unread_points

    def sample(self) -> None:
        """Take one sample of the system's metrics.

        Its step is the number of samples before it, as in MLflow.
        """
        if self._sample_system is None:
            return
        values = self._sample_system()
        now = int(time.time() * 1000)
        for name, value in values.items():
            self._points.append(Metric(f"system/{name}", value, now, self._samples))
        self._samples += 1

    def ship(self) -> None:
        """Send what was read; what the store has not confirmed is kept for next time.

        Raises:
            StoreGoneError: the store's file was moved or deleted.
            Exception: the store did not answer, or rejected a request.
        """
        if self._store.file_id() != self._file_id:  # what is written there is lost
            raise StoreGoneError(f"{self._store.database} was moved or deleted")
        while self._points:
            self._ship_points()
            self._tell(self.left())
        while self._lines:
            self._ship_next_line()
            self._tell(self.left())

    def finish(
        self,
        patience: float,
        report: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Ship the rest, once no trainer writes.

        Args:
            patience: seconds without progress after which an error is raised.
            report: is called with each error before that.
        """
        has_more = True
        while has_more:
            has_more = self.read(ended=True)
            self._ship_patiently(patience, report)

    def close(self) -> None:
        """Close the journal, which releases its lock."""
        os.close(self._descriptor)

    def _open_run(self, line: dict[str, Any], may_exist: bool) -> None:
        """Find or create the run of a journal's first line, and read what it has."""
        start = line["start"]
        self.client = self._store.client()
        self.experiment_id = self._store.experiment(start["experiment"])
        self._file_id = self._store.file_id()
        run = None
        if may_exist:
            run = self._find_run(start["tags"]["journal"])
        if run is None:
            run = self._create_run(line)
        self._run = run
        self.run_id = run.info.run_id
        try:
            self._prepare_run(start)
        except Exception:
            if not may_exist:
                # The trainer is told of the first failure, not of one here.
                with contextlib.suppress(Exception):
                    self.client.set_terminated(self.run_id, "FAILED")
            raise
        self._read_stored_points()

    def _find_run(self, journal: str) -> Any:
        """Return the run with this value of the tag `journal`; None without one."""
        run = self._store.find_run(self.experiment_id, journal)
        if run is not None and run.info.lifecycle_stage != "active":
            command = f"mlflow runs restore --run-id {run.info.run_id}"
            rule = f"must have a run that is not deleted: {command}"
            raise ConfigError("RUN_DIR", rule, str(self._folder))
        return run

    def _create_run(self, line: dict[str, Any]) -> Any:
        """Create the run.

        A request that failed may have created it. So MLflow does not repeat requests
        here, and before each further try the run is looked for.
        """
        start = line["start"]
        tries = 0
        while True:
            tries += 1
            try:
                # MLflow reads the variable at each request.
                with imports.variables_set(MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"):
                    return self.client.create_run(
                        self.experiment_id, line["time"], start["tags"], start["name"]
                    )
            except MlflowException as error:
                if tries == TRIES or error.error_code in REJECTIONS:
                    raise
            time.sleep(RETRY)
            run = self._find_run(start["tags"]["journal"])
            if run is not None:
                return run

    def _prepare_run(self, start: dict[str, Any]) -> None:
        """Check where the run keeps its artifacts, and complete its params."""
        places = artifact_locations.confined_to
        if places is not None:
            artifact_uri = self._run.info.artifact_uri
            artifact_locations.check(artifact_uri, self._store.uri, places)

        params = []
        for name, value in start["params"].items():
            if name not in self._run.data.params:
                params.append(Param(name, param_text(value)))
        for first in range(0, len(params), PARAMS_PER_REQUEST):
            batch = params[first : first + PARAMS_PER_REQUEST]
            self.client.log_batch(self.run_id, params=batch)

        if start["system_metrics"]:
            self._sample_system = system_sampler(
                self._store.uri, self.run_id, start.get("gpus")
            )

    def _read_stored_points(self) -> None:
        """Ask the store which points it has."""
        for key in self._run.data.metrics:
            history = self.client.get_metric_history(self.run_id, key)
            steps = [point.step for point in history]
            self._stored[key] = bytearray(max(steps) + 1)
            for step in steps:
                self._stored[key][step] = 1
            if key.startswith("system/"):
                self._samples = max(self._samples, len(self._stored[key]))
            self._tell(self.left())

    def _is_stored(self, key: str, step: int) -> bool:
        steps = self._stored.get(key, b"")
        return step < len(steps) and bool(steps[step])

    def _readable(self, lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield lines up to the first one that is damaged, which is noted."""
        try:
            yield from lines
        except FormError as error:
            self.damage = f"The journal cannot be read further: {error}."

    def _add(self, line: dict[str, Any]) -> None:
        if "metrics" in line:
            self._add_row(line)
            return
        self._lines.append(line)
        if "resume" in line:
            self._segment += 1
            self.status = None
        self.status = line.get("end", self.status)

    def _add_row(self, line: dict[str, Any]) -> None:
        step = line["step"]
        self._last_step = max(step, self._last_step)
        self._points_read += len(line["metrics"])
        for key, value in line["metrics"].items():
            if not self._is_stored(key, step):
                self._points.append(Metric(key, value, line["time"], step))

    def _add_end(self) -> None:
        """End the run of a trainer that died without a word.

        If the disk was full, only the store may have the end: the run keeps it.
        """
        info = self._run.info
        unwritten_segment = self._run.data.tags.get(UNWRITTEN)
        if unwritten_segment == str(self._segment) and info.end_time is not None:
            self._add({"end": info.status, "time": info.end_time})
            return
        failure = self.damage
        if not failure:
            failure = (
                f"The process ended without a word after update {self._last_step}."
            )
        self._add({"tags": {"failure": failure}})
        self._add({"end": "KILLED", "time": int(time.time() * 1000)})

    def _ship_patiently(
        self, patience: float, report: Callable[[Exception], object]
    ) -> None:
        deadline = time.monotonic() + patience
        while True:
            before = (self.sent, len(self._lines))
            try:
                self.ship()
                return
            except Exception as error:
                if (self.sent, len(self._lines)) != before:
                    # The store answers now and then.
                    deadline = time.monotonic() + patience
                if isinstance(error, StoreGoneError) or time.monotonic() > deadline:
                    raise
                report(error)
                time.sleep(RETRY)

    def _ship_points(self) -> None:
        """Send the points of one request."""
        batch = self._points[: self._points_per_request]
        self._points_per_request = POINTS_AFTER_FAILURE
        self.client.log_batch(self.run_id, metrics=batch)
        self._points_per_request = POINTS_PER_REQUEST
        # Only now does the store have them: after an error they are sent again.
        del self._points[: len(batch)]
        self.sent += len(batch)

    def _ship_next_line(self) -> None:
        """Send the first line that waits.

        A line that the store rejects `TRIES` times is left out, and noted in a tag: it
        does not keep the run from its end.
        """
        line = self._lines[0]
        try:
            self._ship_line(line)
        except MlflowException as error:
            self._tries += 1
            if error.error_code not in REJECTIONS or self._tries < TRIES:
                raise
            kind = next(key for key in line if key not in ("crc", "time"))
            self._note(f"{kind}: {first_line(error)}")
        self._tries = 0
        del self._lines[0]

    def _ship_line(self, line: dict[str, Any]) -> None:
        if "dataset" in line:
            self._ship_dataset(line)
        for key, value in line.get("tags", {}).items():
            self.client.set_tag(self.run_id, key, value)
        if "fork_of" in line:
            self._tag_source(line["fork_of"])
        if "artifact" in line:
            self._ship_artifact(str(line["artifact"]))
        if "model" in line:
            self._ship_model(str(line["model"]))
        if "resume" in line:
            self._reopen_run()
        # A run that was resumed afterwards goes on.
        if "end" in line and line is self._lines[-1]:
            self._end_run(line)

    def _ship_dataset(self, line: dict[str, Any]) -> None:
        """Log one input.

        MLflow rejects one that another run inserts at the same time; it is sent again.
        """
        tags = [InputTag("mlflow.data.context", line["context"])]
        dataset = DatasetInput(Dataset(**line["dataset"]), tags)
        self.client.log_inputs(self.run_id, [dataset])

    def _tag_source(self, source: str) -> None:
        """Name this run in the tags of the run whose checkpoint it began with."""
        with contextlib.suppress(MlflowException):  # the source may be gone
            tags = self.client.get_run(source).data.tags
            forks = [name for name in tags.get(FORKS, "").split(", ") if name]
            if self.run_id not in forks:
                newest = [*forks, self.run_id][-MOST_FORKS:]
                self.client.set_tag(source, FORKS, ", ".join(newest))

    def _ship_artifact(self, name: str) -> None:
        """Log a file of the run directory; one that cannot be read is noted in a tag.

        The journal may be somebody else's: only files of the directory itself are sent.
        """
        file = self._folder / name
        try:
            is_file = stat.S_ISREG(file.lstat().st_mode)
            if not is_file or file.name != name:
                problem = "it is no file of the run directory itself"
                raise OSError(errno.EINVAL, problem)
            file.open("rb").close()
        except (OSError, ValueError) as error:
            self._note(f"{name}: {getattr(error, 'strerror', error)}")
            return

        place = None
        if name.endswith(".xplane.pb"):
            # TensorBoard finds a profile only in such a folder.
            place = f"plugins/profile/{name.partition('.')[0]}"
        self.client.log_artifact(self.run_id, str(file), place)

    def _ship_model(self, name: str) -> None:
        """Log the model of that name.

        A model that cannot be logged does not keep the run from its end.
        """
        try:
            # The journal may be somebody else's.
            if not re.fullmatch("[0-9a-f]{32}", name):
                raise ValueError("its name is not one that this package gives")
            model_upload.ship(
                self.client,
                self.experiment_id,
                self.run_id,
                self._folder / MODEL.format(name),
                lambda: self._tell(self.left()),
            )
        except Exception as error:
            if model_upload.may_pass(error):
                raise
            self.not_logged = mask(first_line(error))
            self.client.set_tag(self.run_id, NOT_LOGGED, self.not_logged[:LONGEST_TAG])

    def _reopen_run(self) -> None:
        try:
            self.client.delete_tag(self.run_id, "failure")
        except MlflowException as error:
            if model_upload.may_pass(error):  # else the run has no such tag
                raise
        self.client.update_run(self.run_id, "RUNNING")

    def _end_run(self, line: dict[str, Any]) -> None:
        """Close the run, and check that other processes find it closed."""
        self.client.set_terminated(self.run_id, line["end"], line["time"])
        status = self._store.status(self.run_id)
        if status != line["end"]:
            raise OSError(
                f"the store has the run as {status} when it is read again, "
                f"and not as {line['end']}"
            )

    def _note(self, problem: str) -> None:
        self.client.set_tag(self.run_id, NOT_SHIPPED, problem[:LONGEST_TAG])
