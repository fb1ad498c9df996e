"""The journal of a run: a file of lines that a separate process ships to MLflow.

    training thread ─► journal.jsonl ─► `python -m pipeline.tracking.shipper` ─► MLflow

The trainer only appends lines and never opens the store, so an update never waits for
MLflow. `pipeline.tracking.uploader` ships the lines. Shipping a line a second time has
no effect, since each line has a fixed time stamp and each point a fixed step.
`pipeline.tracking.journal_lines` lists the lines.

After a crash
-------------
- The trainer dies before it writes the first line: there is no run, neither in the
  store nor on disk.
- The trainer dies later: the shipper's standard input is closed. The shipper ships all
  complete lines. If the last line does not end the run, the shipper closes the run as
  KILLED, with the last update in the tag `failure`.
- The shipper dies: the trainer, which checks the shipper every `REVIVE` seconds when it
  writes a line, starts another one. The new shipper finds the run by its ID or its tag
  `journal`, compares the store with the journal, and ships the missing lines.
- Both die: the lines stay in the journal, and `pipeline sync` ships the missing lines.
- The store is unreachable: the lines stay in the journal, and the shipper retries every
  few seconds. At the end of training, the trainer waits for the shipper until the store
  has made no progress for `patience` seconds. `pipeline sync` can ship the rest.
- The journal's disk is full: the lines are buffered in memory until there is space
  again. At the end of training, the lines that are still buffered are sent to the
  shipper.
- The machine dies: all lines before the last checkpoint are on the disk. Later lines
  may be lost if the operating system had not written them.
"""

import contextlib
import queue
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.common import durable, imports, secrets, sqlite_uri
from pipeline.common.errors import ConfigError, StoreError, say
from pipeline.tracking import foreign_store, journal_file, shipper_protocol
from pipeline.tracking.journal_file import JOURNAL_NAME, LockedPast, Position
from pipeline.tracking.journal_lines import (
    FORMAT,
    Created,
    End,
    Line,
    Resume,
    RunIds,
    RunStart,
    Start,
)
from pipeline.tracking.shipper_protocol import (
    AddLines,
    Attached,
    Failed,
    Failing,
    Fault,
    Message,
    Open,
    Progress,
    Ship,
    ShipNow,
    Shipped,
    StopRequested,
)
from pipeline.trust import artifact_locations

REVIVE = 5.0  # seconds between two checks that the shipper is alive
# Seconds without an answer after which a message reports the wait; also the minimum
# interval between two messages about progress.
SILENCE = 10.0
RECONNECT = 5.0  # seconds between two attempts to reach the store with `wait`
GRACE = 2.0  # seconds that a shipper has to end before it is killed
UNREACHABLE = "must be a store that answers ({})"
# Maximum number of failures before the run exists: shippers that die, and stores that
# fail while they create the run.
LIVES = 3
# Number of unshipped points above which a message reports the delay. A store takes
# seconds to log this many points.
LAG = 20_000


class ShipperProcess:
    """A shipper in a subprocess, with methods to send commands and receive answers.

    `pipeline.tracking.shipper_protocol` lists the commands and the answers. The shipper
    runs no user code. It ignores Ctrl-C: the trainer handles the interruption and then
    ends the run.

    Args:
        opening: the first command.

    Attributes:
        stop_requested: whether the shipper has sent `StopRequested`.
    """

    def __init__(self, opening: Open):
        self.stop_requested = False
        self.process = imports.started(
            "pipeline.tracking.shipper", stdout=subprocess.PIPE
        )
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.send(opening)

    def send(self, command: Message) -> None:
        """Send one command. If the shipper has ended, the command is dropped."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(command.encoded() + "\n")
            self.process.stdin.flush()

    def answer(self, seconds: float) -> Message | None:
        """Return the next answer, or None if none arrives within `seconds`."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=max(0.0, seconds))
        return None

    def alive(self) -> bool:
        """Return whether the process is running."""
        return self.process.poll() is None

    def close(self) -> None:
        """Close the shipper's standard input, which marks the end of the commands."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()

    def terminate(self) -> None:
        """End the process by SIGTERM, and after `GRACE` seconds by SIGKILL."""
        self.close()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        self.process.kill()
        self.process.wait()

    def _listen(self) -> None:
        """Put the shipper's answers into the queue, and an error at their end."""
        try:
            # Ignore the ValueError for an incomplete line from a shipper that was
            # killed, and for a line that a library has printed.
            with contextlib.suppress(ValueError), self.process.stdout as answers:
                for line in answers:
                    answer = shipper_protocol.decoded(line)
                    if isinstance(answer, StopRequested):
                        self.stop_requested = True
                    else:
                        self._answers.put(answer)
        finally:
            self._answers.put(Failed("the shipper ended without an answer", Fault.DIED))


class Journal:
    """The trainer's side of the journal: writes lines, and keeps a shipper running.

    The constructor starts a shipper, which opens the store in the background while
    TensorFlow is being imported. The experiment is created with the run if it does not
    exist. Call `ready`, then `start` or `resume`, then `write`, then `close`. To give
    up before the run exists, call `abandon`.

    Args:
        uri: the URI of the store.
        experiment: the name of the run's experiment.
        patience: maximum seconds to wait for progress of the store, at the start and at
            the end of the run.
        when_unreachable: `refuse` the run, `wait` for the store, or train `offline`.
        run_dir: the folder of the journal, for messages.

    Attributes:
        id: identifies the run, whether or not a store has it; it is the run's tag
            `journal`. Set by `start` and `resume`.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        *,
        patience: float = 60.0,
        when_unreachable: str = "refuse",
        run_dir: Path = Path(),
    ):
        self.id = ""
        self.uri = uri
        self.experiment = experiment
        self.patience = patience
        self._when_unreachable = when_unreachable
        self._is_offline = False
        self._path = run_dir / JOURNAL_NAME
        self._ids: RunIds | None = None  # of the run, once it is in the store
        self._lives = LIVES
        self._lag = LAG
        # Held while a line is written. A thread may enter it twice, since a signal may
        # interrupt a write.
        self._lock = threading.RLock()
        # Why the shipper has ended, and the reasons that were printed before.
        self._reason = ""
        self._reported: set[str] = set()
        self._checked_at = time.monotonic()
        self._deadline = self._checked_at
        self.shipper = self._open()

    def ready(self) -> None:
        """Wait until the store answers, or until the run is offline.

        If the store does not answer, `when_unreachable` decides: the run is refused,
        the call waits without a time limit, or the run goes offline.

        Raises:
            ConfigError: the run is refused, or the store cannot be used with this
                config. The caller must then call `abandon`.
        """
        while not self._is_offline:
            answer = self._wait_for_answer()
            if not isinstance(answer, Failed):
                return
            if answer.fault == Fault.DIED and self._lives:
                self._replace_shipper()
            elif answer.fault == Fault.CONFIG:
                raise ConfigError(answer.key, answer.rule, self.experiment)
            elif self._when_unreachable == "refuse":
                rule = _unreachable_rule(answer)
                if self.uri.lower().startswith(("http:", "https:")):
                    rule += ", or tracking.when_unreachable must be offline or wait"
                raise ConfigError("tracking.uri", rule, self.uri)
            else:
                self._wait_or_go_offline(answer)

    def start(self, path: Path, run: RunStart) -> RunIds | None:
        """Create the journal and the run.

        Args:
            path: the path of the new journal.
            run: the description of the run. The format, the store and the tag `journal`
                are added.

        Returns:
            The run's IDs, or None if it is offline.

        Raises:
            ConfigError: the folder has a run already, or another process trains in it;
                or see `ready`.
            OSError: the journal cannot be written.
            StoreError: the store did not accept the run.
        """
        self.id = uuid.uuid4().hex
        tags = {**run.tags, "journal": self.id}
        store = secrets.mask(sqlite_uri.absolute(self.uri))
        run = replace(run, format=FORMAT, store=store, tags=tags)
        try:
            self._writer = journal_file.create(path)
            self._writer.write(Start(run).content())
            # A buffered line would not do: the shipper reads this line from the file.
            self._writer.flush()
            self._writer.sync()
            durable.sync(path.parent)  # so that the file's name survives a crash
        except BaseException:
            self.abandon()
            raise
        ids = self._attach(path)
        if ids is not None:
            self.write(Created(ids))
        return ids

    def resume(self, past: LockedPast, segment: Mapping[str, Any]) -> RunIds | None:
        """Resume a run.

        Args:
            past: the content of the run's journal.
            segment: the settings that may have changed; see `provenance.segment`.

        Returns:
            The run's IDs, or None if the run has never been in a store.

        Raises:
            ConfigError: the run is deleted, or another process still ships it; or see
                `ready`.
            StoreError: the store did not accept the run.
        """
        self.id = past.start.tags["journal"]
        self._ids = past.run
        ids = self._attach(past.path, resumes=True)
        self._writer = past.truncated_writer()
        store = secrets.mask(sqlite_uri.absolute(self.uri))
        has_moved = ids is not None and store != past.store
        if ids is not None and (ids != past.run or has_moved):
            moved_to = store if has_moved else None
            self.write(Created(ids, moved_to))
        self.write(Resume(segment))
        # If a power cut left the journal with fewer segments than the run in the store,
        # the run directory would seem to be an older copy.
        self._writer.sync()
        return ids or past.run

    def write(self, line: Line) -> None:
        """Write one line; see `LineWriter.write`.

        If the last check was more than `REVIVE` seconds ago, also check the shipper,
        and replace it if it has ended. Each metric may be written only once per step.
        Any thread may call this method: the user's own code logs metrics in threads of
        TensorFlow.
        """
        with self._lock:
            self._writer.write(line.content())
            if time.monotonic() - self._checked_at > REVIVE:
                self._read_reports()
                self._revive(report=True)

    def stop_requested(self) -> bool:
        """Return whether somebody has asked this run to end, by its tag `STOP_TAG`.

        The shipper asks the store, so the call takes no time.
        """
        return self.shipper.stop_requested

    def position(self) -> Position:
        """Return the position after the last line that was written."""
        with self._lock:
            return self._writer.position

    def sync(self) -> None:
        """Wait until the lines in the file are on the disk. Thread-safe."""
        self._writer.sync()

    def ship_now(self) -> None:
        """Make the shipper ship the written lines now, not at its next interval."""
        self.shipper.send(ShipNow())

    def close(self, status: str) -> str | None:
        """Write the end of the run, and wait until all lines are shipped.

        The wait ends if the store makes no progress for `patience` seconds. If all
        lines are shipped, the last line of the journal says so: `pipeline sync` then
        knows it without asking the store.

        Returns:
            The reason why lines were not shipped, or None if all lines were shipped.
        """
        # Ignore a write error: `_finish` sends lines that are not in the file to the
        # shipper.
        with contextlib.suppress(OSError), self._lock:
            self._writer.write(End(status).content())
            # A power cut after the store has the end must not lose it here.
            self._writer.sync()

        self._deadline = time.monotonic() + self.patience
        problem: str | None = "the store was not contacted"
        try:
            while not self._is_offline and time.monotonic() < self._deadline:
                self._revive()
                problem = self._finish()
                if problem is None:
                    break
                time.sleep(1)
        finally:  # also after an interruption, which ends the wait
            self.shipper.terminate()
            if problem is None and self._ids is not None:
                self._note_complete(self._ids)
            if not self._writer.close():
                where = "which are lost" if problem else "which only the store has"
                say(f"the disk has no room for the last lines of {self._path}, {where}")
        return problem

    def _note_complete(self, ids: RunIds) -> None:
        """Write a line that says that the store has all lines before it.

        If the disk is full, it is left out, as the file lacks other lines, too.
        """
        with contextlib.suppress(OSError), self._lock:
            if not self._writer.unwritten():
                self._writer.write(Created(ids, complete=True).content())

    def abandon(self) -> None:
        """Give up before the run exists, and leave the store unchanged.

        The shipper is ended. It may still be importing MLflow or preparing a new store.
        """
        self.shipper.terminate()

    def _open(self) -> ShipperProcess:
        places = artifact_locations.confined_to
        return ShipperProcess(Open(self.uri, self.experiment, self.patience, places))

    def _attach(self, path: Path, *, resumes: bool = False) -> RunIds | None:
        """Make the shipper create or find the run.

        Args:
            path: the journal.
            resumes: whether the run is resumed, and may already be in the store.

        Returns:
            The IDs of the run, or None if the run is offline.
        """
        self._path = path
        may_exist = resumes
        while not self._is_offline:
            self._ship(may_exist=may_exist, resumes=resumes)
            answer = self._wait_for_answer()
            if isinstance(answer, Attached):
                self._ids = RunIds(answer.run_id, answer.experiment_id)
                return self._ids

            assert isinstance(answer, Failed)  # the only other answer to `Ship`
            if answer.fault == Fault.DIED and self._lives:
                self._replace_shipper()
            elif (
                answer.fault in (Fault.CONFIG, Fault.RUN_DIR)
                or self._when_unreachable == "refuse"
                or not self._lives
            ):
                self.shipper.terminate()
                raise self._attach_error(answer, resumes=resumes)
            else:
                self._wait_or_go_offline(answer)
                # Limit the number of attempts: the store may be reachable but reject
                # this run.
                self._lives -= 1
            self.ready()
            may_exist = True
        return None

    def _ship(self, *, may_exist: bool, resumes: bool = False) -> None:
        """Send the command to ship this run."""
        run_id = "" if self._ids is None else self._ids.run_id
        self.shipper.send(Ship(str(self._path), may_exist, run_id, resumes))

    def _attach_error(self, failure: Failed, *, resumes: bool) -> Exception:
        """Return the exception for a shipper that could not create or find the run."""
        if failure.fault == Fault.RUN_DIR:
            return ConfigError(failure.key, failure.rule, str(self._path.parent))
        consequence = "it does not train"
        if resumes:
            consequence = "it does not continue"
        message = (
            f"the store {secrets.mask(self.uri)} did not accept the run "
            f"({failure.error}), so {consequence}; upload what the run directory has "
            f"with: {self._sync_command()}"
        )
        return StoreError(message, has_trained=resumes)

    def _sync_command(self) -> str:
        """Return the command that uploads this run."""
        return foreign_store.sync_command(str(self._path.parent), self.uri)

    def _replace_shipper(self) -> None:
        """Start another shipper in place of one that died, at most `LIVES` times."""
        self._lives -= 1
        self.shipper.terminate()  # closes its pipes
        self.shipper = self._open()

    def _wait_or_go_offline(self, failure: Failed) -> None:
        """Go offline if `when_unreachable` is `offline`; else start another shipper.

        The other shipper starts after `RECONNECT` seconds. Print what is done, and why.
        """
        self.shipper.terminate()
        store = secrets.mask(self.uri)
        line = f"the store {store} does not answer ({failure.error})"
        if self._when_unreachable == "offline":
            self._is_offline = True
            say(
                f"{line}: the run trains offline and is kept in {self._path.parent}; "
                f"upload it later with: {self._sync_command()}"
            )
            return
        say(f"{line}: waiting for it")
        time.sleep(RECONNECT)
        self.shipper = self._open()

    def _wait_for_answer(self, *, renew_patience: bool = True) -> Message:
        """Wait for the shipper's next answer other than `Progress` or `Failing`.

        Print a message when the store begins to fail or is silent for `SILENCE`
        seconds, and at most one per `SILENCE` seconds while it makes progress. Each
        `Progress` sets `_deadline` to `patience` seconds later.

        Args:
            renew_patience: whether the start of this call sets the deadline, too.

        Returns:
            The answer, or `Failed` if the store makes no progress until the deadline.
        """
        told_at = time.monotonic()
        if renew_patience:
            self._deadline = told_at + self.patience
        silent = f"no answer within {self.patience:.0f} s"
        problem = ""
        while (seconds := self._deadline - time.monotonic()) > 0:
            answer = self.shipper.answer(min(seconds, SILENCE))
            if answer is None or isinstance(answer, Failing):
                if not problem:
                    store = secrets.mask(self.uri)
                    say(f"waiting for the store {store}, {seconds:.0f} s at most")
                if answer is not None:
                    problem = answer.error
                elif not problem:
                    problem = silent
            elif isinstance(answer, Progress):
                problem = ""
                self._deadline = time.monotonic() + self.patience
                if time.monotonic() > told_at + SILENCE:
                    say(_progress_line(answer))
                    told_at = time.monotonic()
            else:
                return answer
        return Failed(problem or silent)

    def _revive(self, *, report: bool = False) -> None:
        """If the shipper has ended, start another one, which ships the missing lines.

        Args:
            report: whether to print why the shipper ended. Each reason is printed once.
        """
        self._checked_at = time.monotonic()
        if self._is_offline or self.shipper.alive():
            return
        if report:
            reason = self._reason or self._last_error()
            if reason not in self._reported:
                self._reported.add(reason)
                say(f"the shipper ended and is replaced: {reason}")
        self._reason = ""
        self.shipper.terminate()  # closes its pipes
        self.shipper = self._open()
        self._ship(may_exist=True)

    def _last_error(self) -> str:
        """Return the error with which the shipper has ended, or "" if it is unknown."""
        # Skip earlier answers: the last answer of a shipper that has ended is `Failed`.
        answer = self.shipper.answer(GRACE)
        while answer is not None and not isinstance(answer, Failed):
            answer = self.shipper.answer(GRACE)
        return "" if answer is None else answer.error

    def _read_reports(self) -> None:
        """Read the shipper's answers; print a message if too many points are unshipped.

        The limit is `LAG` at first. After a message, it is twice the number in the
        message. If the shipper has failed, keep the error in `_reason`.
        """
        waiting = []
        while (answer := self.shipper.answer(0)) is not None:
            if isinstance(answer, Progress | Failing) and answer.left is not None:
                waiting.append(answer.left)
            elif isinstance(answer, Failed) and not self._reason:
                self._reason = answer.error
        if waiting and min(waiting) > self._lag:
            say(
                "the store is slower than the run: "
                f"about {min(waiting):,} points are waiting in {self._path}"
            )
            self._lag = 2 * min(waiting)

    def _finish(self) -> str | None:
        """Let the shipper ship the rest and end; return why lines were not shipped.

        First send it the lines that are not in the file.

        Returns:
            The reason why lines were not shipped, or None if all lines were shipped.
        """
        unwritten = self._writer.unwritten()
        if unwritten:
            self.shipper.send(AddLines(unwritten))
        self.shipper.close()
        answer = self._wait_for_answer(renew_patience=False)
        while not isinstance(answer, Failed | Shipped):
            answer = self._wait_for_answer(renew_patience=False)
        if isinstance(answer, Shipped):
            if answer.not_logged:
                say(f"the model was not logged: {answer.not_logged}")
            return None

        # If there is time left, the shipper has answered with an error and ends by
        # itself. Otherwise it hangs, and `close` terminates it.
        if time.monotonic() < self._deadline:
            self.shipper.process.wait()
        return str(answer.error)


def _progress_line(progress: Progress) -> str:
    if progress.left is None:
        return "still waiting: another process ships earlier rows of this run"
    points = "1 point"
    if progress.left > 1:
        points = f"{progress.left:,} points"
    return f"still shipping: about {points} left"


def _unreachable_rule(failure: Failed) -> str:
    """Return the rule to name in an error about a store that did not answer."""
    return failure.rule or UNREACHABLE.format(failure.error)
