"""Ships one journal to its run in a store.

Every line that the store does not reject arrives at least once, and every point of a
metric exactly once, even if processes die meanwhile:

- The run has a tag `journal`, whose value is chosen before the run is created. So any
  process that continues the upload finds the run, even if the answer to the request
  that created the run was lost.
- A process that opens the run reads which points the store has, and adds only the
  missing points.
- Failed requests are repeated according to the rules in `failures`.
- A failed request may still have taken effect. Its content is kept and sent again until
  a request succeeds. MLflow stores a repeated point once; a repeated tag, input or file
  replaces the earlier one.
- Points are sent before the other lines that were read with them, and the end of the
  run is sent last. So a run that has its final status is complete.
- A proxy in front of a server may confirm a request and lose it. So before the end of
  the run, the items that the server must have are read back: each step of each metric
  in the journal, params, tags, inputs, and the artifacts. If any is missing, all lines
  are shipped again. Models, system metrics and profiles are not read back.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from pipeline.common.errors import first_line
from pipeline.tracking import failures
from pipeline.tracking.expected import Expected, stored_steps
from pipeline.tracking.journal_cursor import JournalCursor
from pipeline.tracking.journal_lines import Created, Evaluated, Line, Row, Tags
from pipeline.tracking.params import param_text
from pipeline.tracking.run_creation import RunDirError, find_or_create
from pipeline.tracking.shipper_lock import lock_as_shipper, stored_state
from pipeline.tracking.store import Store, has_stop_tag, remove_stop_tag
from pipeline.tracking.stored_run import IncompleteError, StoredRun
from pipeline.trust import artifact_locations

POINTS_PER_REQUEST = 1000  # MLflow's limit
# Points per request after a failure: MLflow servers before 3.17 look up each point of a
# repeated request, which is slow.
POINTS_AFTER_FAILURE = 50
PARAMS_PER_REQUEST = 100  # MLflow's limit
# Maximum number of attempts to ship a line that the store rejects: another run may have
# logged the same input at the same time.
TRIES = 5
RETRY = 1.0  # seconds between two attempts


class StoreGoneError(OSError):
    """The file of a SQLite store was moved, deleted or replaced."""


class Uploader:
    """Ships the lines of one journal to its run.

    Args:
        store: the store that holds the run, or in which the run is created.
        path: the journal.
        may_exist: whether another process may have created the run.
        run_id: the run's ID, or "" to find the run by its tag `journal`.
        only_rows: whether to ship only rows, since the run was continued in another
            copy of the run directory: see `older_copy`.
        seconds: how long to wait for another process that ships the journal. The time
            begins anew whenever the store gets more of the run.
        tell: called after each request with the approximate number of unshipped points,
            or with None after progress of another process that ships the journal.
        report: called at intervals if another process ships the journal and makes no
            progress, with a description.

    Attributes:
        start: the content of the journal's first line.
        run_id: the run's ID.
        experiment_id: the ID of the run's experiment.
        sent: the number of points that were sent.

    Raises:
        RunDirError: the run is deleted, or is being shipped by another process.
        ConfigError: the run's artifacts lie outside the allowed locations.
    """

    def __init__(
        self,
        store: Store,
        path: Path,
        *,
        may_exist: bool,
        run_id: str = "",
        only_rows: bool = False,
        seconds: float = 0.0,
        tell: Callable[[int | None], object] = lambda _: None,
        report: Callable[[str], object] = lambda _: None,
    ):
        self._store = store
        self._only_rows = only_rows
        self._tell = tell

        # Points, and lines without points, that were read but not confirmed.
        self._points: list[Metric] = []
        self._lines: list[Line] = []
        # Metric → the steps of the points that the store had before this process began
        # to ship the lines, or last started over (see `_start_over`).
        self._steps_in_store: dict[str, set[int]] = {}
        self._starts_over = False
        self._starts = 0
        self._incomplete_since: float | None = None

        self._samples = 0
        self._points_per_request = POINTS_PER_REQUEST
        self._tries = 0
        self.sent = 0

        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._cursor = JournalCursor(self._descriptor)
            self.start = self._cursor.start.start
            journal = self.start.tags.get("journal", "")
            is_locked = lock_as_shipper(
                self._descriptor,
                lambda: stored_state(store, journal, run_id),
                seconds,
                tell,
                report,
            )
            if not is_locked:
                raise RunDirError("is being shipped by another process", path.parent)
            self.client = store.client()
            self._file_id = store.file_id()
            # The run, as read from the store when this uploader was created or last
            # started over.
            self._mlflow_run = find_or_create(
                store,
                self._cursor.start,
                path.parent,
                may_exist=may_exist,
                run_id=run_id,
            )
            self.run_id: str = self._mlflow_run.info.run_id
            self.experiment_id: str = self._mlflow_run.info.experiment_id
            self._stored_run = StoredRun(
                store,
                self.client,
                self.run_id,
                self.experiment_id,
                path.parent,
                lambda: self._tell(self.left()),
            )
            self._stored_run.expected = self._first_expected()
            self._check_and_complete(is_new=not may_exist)
            self._steps_in_store = self._read_steps_in_store(self._mlflow_run)
        except BaseException:
            self.close()
            raise

    @property
    def status(self) -> str | None:
        """The run's final status, or None if no line that was read ends the run."""
        return self._cursor.status

    @property
    def damage(self) -> str:
        """Why the journal cannot be read further; empty if it can be read."""
        return self._cursor.damage

    @property
    def not_logged(self) -> str:
        """Why the model was not logged, or "" if it was logged or there is no model."""
        return self._stored_run.not_logged

    def read(self) -> bool:
        """Read about as many lines as one request can ship.

        Returns:
            Whether any lines were read.
        """
        has_lines = False
        for line in self._cursor.lines():
            has_lines = True
            self._add(line)
            if len(self._points) >= POINTS_PER_REQUEST:
                break
        return has_lines

    def add_unwritten(self, text: str) -> None:
        """Read the rest of the journal, then the lines in `text`.

        These lines are missing in the journal because the disk was full.
        """
        for line in self._cursor.unwritten_lines(text):
            self._add(line)

    def left(self) -> int:
        """Return the approximate number of points that are not shipped yet.

        The number of points in the unread part of the journal is estimated.
        """
        return len(self._points) + self._cursor.unread_points()

    def add_sample(self, values: Mapping[str, float]) -> None:
        """Add one sample of the system metrics, to be shipped with the next request.

        As in MLflow, the step of a sample is the number of earlier samples.
        """
        if not values:
            return
        now = int(time.time() * 1000)
        for name, value in values.items():
            self._points.append(Metric(f"system/{name}", value, now, self._samples))
        self._samples += 1

    def ship(self) -> None:
        """Send the lines that were read. Keep them until the store confirms them.

        Raises:
            StoreGoneError: the store's file was moved or deleted.
            IncompleteError: the store lost an item. The next call prepares to ship all
                lines again; the caller must then read them again.
            Exception: the store did not answer, or rejected a request.
        """
        if self._store.file_id() != self._file_id:  # writes to the old file are lost
            raise StoreGoneError(f"{self._store.database} was moved or deleted")
        if self._starts_over:
            self._start_over()
        while self._points:
            self._ship_points()
            self._tell(self.left())
        while self._lines:
            self._ship_next_line()
            self._tell(self.left())

    def stop_is_requested(self) -> bool:
        """Return whether somebody has set the run's tag `stop` in the store."""
        return has_stop_tag(self.client, self.run_id)

    def withdraw_stop_request(self) -> None:
        """Remove the run's tag `stop` in the store."""
        remove_stop_tag(self.client, self.run_id)

    def finish(
        self,
        patience: float,
        report: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        """Ship all remaining lines and the end of the run, after the trainer has ended.

        Args:
            patience: seconds without progress after which the last error is raised.
            report: called with each error after which the request is repeated.
        """
        while True:
            starts = self._starts
            has_more = self.read()
            if not has_more and self.status is None and not self._only_rows:
                self._lines += self._cursor.missing_end(self._mlflow_run)
            self._ship_patiently(patience, report)
            if not has_more and self._starts == starts:
                return

    def close(self) -> None:
        """Close the journal, which releases its lock."""
        os.close(self._descriptor)

    def _check_and_complete(self, *, is_new: bool) -> None:
        """Check the artifact location, and log missing params.

        Args:
            is_new: whether this process has created the run. If so, an error ends the
                run as FAILED.
        """
        try:
            places = artifact_locations.confined_to
            if places is not None:
                artifact_uri = self._mlflow_run.info.artifact_uri
                artifact_locations.check(artifact_uri, self._store.uri, places)
            self._complete_params(self._mlflow_run)
        except Exception:
            if is_new:
                # Suppress errors here, so that the trainer gets the original error.
                with contextlib.suppress(Exception):
                    self.client.set_terminated(self.run_id, "FAILED")
            raise

    def _complete_params(self, run: Any) -> None:
        """Log the params that the store lacks.

        Args:
            run: the run as it was read from the store.
        """
        params = []
        for name, value in self.start.params.items():
            if name not in run.data.params:
                params.append(Param(name, param_text(value)))
        for first in range(0, len(params), PARAMS_PER_REQUEST):
            batch = params[first : first + PARAMS_PER_REQUEST]
            self.client.log_batch(self.run_id, params=batch)

    def _first_expected(self) -> Expected:
        """Return the items to expect in the store when only the first line is read."""
        return Expected(params=set(self.start.params))

    def _read_steps_in_store(self, run: Any) -> dict[str, set[int]]:
        """Return the steps that the store has for each metric of the journal.

        Also count the samples of system metrics that the store has.

        Args:
            run: the run as it was read.
        """
        stored: dict[str, set[int]] = {}
        if not run.data.metrics:
            return stored
        keys = self._cursor.metric_names()
        # Ignore metrics that are not in the journal: somebody else may have logged
        # them.
        for key in run.data.metrics:
            if key in keys:
                stored[key] = self._read_steps(key)
            elif key.startswith("system/"):
                self._samples = max(self._samples, len(self._read_steps(key)))
        return stored

    def _read_steps(self, key: str) -> set[int]:
        self._tell(self.left())
        return stored_steps(self.client, self.run_id, key)

    def _add(self, line: Line) -> None:
        if isinstance(line, Row):
            self._add_row(line)
            if isinstance(line, Evaluated):
                # Ship the tag before the end of the run, which is only shipped if it
                # is the last line.
                self._lines.insert(0, Tags(line.tags))
        # Skip a line with the run's IDs: it may follow the `end` line, which has to be
        # the last line to end the run.
        elif not isinstance(line, Created) and not self._only_rows:
            self._lines.append(line)

    def _add_row(self, row: Row) -> None:
        assert row.time is not None  # a row without a time is not read
        self._stored_run.expected.add_row(row.step, row.metrics)
        for key, value in row.metrics.items():
            if row.step not in self._steps_in_store.get(key, ()):
                self._points.append(Metric(key, value, row.time, row.step))

    def _ship_patiently(
        self, patience: float, report: Callable[[Exception], object]
    ) -> None:
        """Ship the lines that were read, and repeat failed requests.

        After `patience` seconds without progress, raise the last error. Lines that are
        shipped again because the store lost an item do not count as progress. Raise a
        `StoreGoneError` at once.
        """
        deadline = time.monotonic() + patience
        while True:
            before = (self.sent, len(self._lines))
            try:
                self.ship()
                return
            except Exception as error:
                if isinstance(error, IncompleteError):
                    # Do not count lines that are shipped again as progress.
                    if self._incomplete_since is None:
                        self._incomplete_since = time.monotonic()
                    deadline = self._incomplete_since + patience
                elif (self.sent, len(self._lines)) != before:
                    # There was progress: restart the time limit.
                    deadline = time.monotonic() + patience
                if isinstance(error, StoreGoneError) or time.monotonic() > deadline:
                    raise
                report(error)
                time.sleep(RETRY)

    def _ship_points(self) -> None:
        """Send as many points as one request may hold; fewer after a failure."""
        batch = self._points[: self._points_per_request]
        self._points_per_request = POINTS_AFTER_FAILURE
        self.client.log_batch(self.run_id, metrics=batch)
        self._points_per_request = POINTS_PER_REQUEST
        # Remove the points only after a success: after an error, they are sent again.
        del self._points[: len(batch)]
        self.sent += len(batch)

    def _ship_next_line(self) -> None:
        """Send the first of the pending lines.

        A line that the store rejects `TRIES` times is left out and noted in a tag, so
        that the run can still be ended.
        """
        line = self._lines[0]
        try:
            self._stored_run.ship(line, is_last=len(self._lines) == 1)
        except IncompleteError:
            self._starts_over = True
            raise
        except MlflowException as error:
            if not failures.is_rejected(error):
                raise
            self._tries += 1
            if self._tries < TRIES:
                raise
            self._stored_run.note(f"{line.KEY}: {first_line(error)}")
        self._tries = 0
        del self._lines[0]

    def _start_over(self) -> None:
        """Prepare to ship all lines again, since the store lost an item."""
        run = self.client.get_run(self.run_id)
        self._complete_params(run)
        steps_in_store = self._read_steps_in_store(run)
        cursor = self._cursor.from_start()

        # Change the state last, since the requests above may fail.
        self._mlflow_run = run
        self._steps_in_store = steps_in_store
        self._stored_run.expected = self._first_expected()
        self._cursor = cursor
        self._points = []
        self._lines = []
        self._starts += 1
        self._starts_over = False
