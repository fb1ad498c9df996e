"""The durable outbox of a run: a file of lines that a separate process ships to MLflow.

    training thread ─► journal.jsonl ─► `python -m pipeline.tracking.shipper` ─► MLflow

The trainer appends lines and opens no store, so training never waits for the tracker.
`pipeline.tracking.uploader` ships the lines in their order; shipping one twice changes
nothing, since every line keeps its time stamp and every point its step.

The lines
---------
One line is one JSON object, with its time in milliseconds and a checksum; see
`pipeline.tracking.journal_file`. Besides these it holds:

    {"start": {…}}                              the run: format, store, params, tags
    {"run": {"run_id": …, "experiment_id": …}}  its IDs in the store
    {"dataset": {…}, "context": "training"}     one of its inputs
    {"step": updates, "metrics": {…}}           one row
    {"tags": {…}}
    {"artifact": name}                          a file in the run directory
    {"model": ID}                               the model in `logged_model-ID` there
    {"fork_of": run_id}                         the run whose checkpoint it begins with
    {"end": "FINISHED" | "FAILED" | "KILLED"}
    {"resume": {…}}                             what the next segment begins with

`start` is the first line, and `resume` follows the end of a segment, if it had one.

After a crash
-------------
- The trainer dies before the first line: there is no run, in the store or on disk.
- The trainer dies later: the shipper sees its standard input end, ships all complete
  lines, and closes the run as KILLED, with the last update in the tag `failure`.
- The shipper dies: the trainer starts another one within `REVIVE` seconds. That one
  finds the run by its tag `journal`, compares the store with the file, and ships what
  is missing.
- Both die: the lines stay in the file, and `pipeline sync` does the same.
- The store is away: the shipper tries again every few seconds, and the lines wait in
  the file. At its end the trainer waits for it while the store makes progress, and
  `patience` seconds longer. What is not shipped by then is left to `pipeline sync`.
- The disk of the journal is full: the lines wait in memory, and at the end they are
  handed to the shipper.
- The machine dies: the lines before the last checkpoint are on the disk, and later
  ones as far as the operating system had written them.
"""

import contextlib
import json
import queue
import subprocess
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from pipeline.common import durable, imports, secrets, sqlite_uri
from pipeline.common.errors import ConfigError, say
from pipeline.tracking import foreign_store, journal_file
from pipeline.tracking.journal_file import FORMAT, Past, Position
from pipeline.trust import artifact_locations

REVIVE = 5.0  # seconds between two checks that the shipper is alive
SILENCE = 10.0  # seconds without an answer before a line reports the wait
RETRY = 5.0  # seconds between two attempts to reach a store that is waited for
GRACE = 2.0  # seconds that a shipper has to end before it is killed
AWAY = "must be a store that answers ({})"
# Failures that a run survives before it exists: shippers that die, and stores that go
# away while they create it.
LIVES = 3
# Points that wait to be shipped before a line reports them. A store takes some seconds
# for that many.
LAG = 20_000


class ShipperProcess:
    """A running shipper, which takes commands and answers them.

    `pipeline.tracking.shipper` lists the commands and the answers. The shipper runs
    none of the user's code. Ctrl-C reaches the trainer alone, which then says how the
    run ended.

    Args:
        opening: the first command.
    """

    def __init__(self, opening: dict[str, Any]):
        self.process = imports.started(
            "pipeline.tracking.shipper", stdout=subprocess.PIPE
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.send(opening)

    def send(self, command: dict[str, Any]) -> None:
        """Send one command; if the shipper is gone, the next answer is an error."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer; None if there is none within `seconds`."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=max(0.0, seconds))
        return None

    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.process.poll() is None

    def close(self) -> None:
        """Tell the shipper that no command follows."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()

    def terminate(self) -> None:
        """End the process, and kill it if it does not end within `GRACE` seconds."""
        self.close()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        self.process.kill()
        self.process.wait()

    def _listen(self) -> None:
        # A shipper that was killed may have written half a line: a ValueError.
        with contextlib.suppress(ValueError), self.process.stdout as answers:
            for line in answers:
                self._answers.put(json.loads(line))
        self._answers.put(
            {"error": "the shipper ended without an answer", "died": True}
        )


class Journal:
    """The trainer's end: writes the lines, and keeps a shipper running.

    The store is opened in the background at once, while TensorFlow is still being
    imported. The experiment is created with the run if it does not exist. Call `ready`,
    then `start` or `resume`, then `write`, then `close`; or `abandon` instead.

    Args:
        uri: the store.
        experiment: the name of the run's experiment.
        patience: how many seconds to wait for an answer of the store, at the start and
            at the end.
        when_unreachable: `refuse` the run, `wait`, or train `offline`.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        *,
        patience: float = 60.0,
        when_unreachable: str = "refuse",
    ):
        self.uri = uri
        self.experiment = experiment
        self.patience = patience
        self._when_unreachable = when_unreachable
        self._is_offline = False
        self._path = Path()
        self._run_id = ""
        self._lives = LIVES
        self._lag = LAG
        self._checked_at = time.monotonic()
        self._deadline = self._checked_at
        self.shipper = self._open()

    def ready(self) -> None:
        """Wait until the store answers.

        Raises:
            ConfigError: it cannot be reached, read or written. Call `abandon` then.
        """
        while not self._is_offline:
            answer = self._answer()
            if "error" not in answer:
                return
            key = answer.get("key", "tracking.uri")
            if not self._recovers(answer, final=key != "tracking.uri"):
                rule = answer.get("rule", AWAY.format(answer["error"]))
                received = self.uri if key == "tracking.uri" else self.experiment
                raise ConfigError(key, rule, received)

    def start(self, path: Path, run: dict[str, Any]) -> dict[str, str]:
        """Create the run.

        Args:
            path: a new journal.
            run: has `experiment`, `name`, `params`, `tags` and `system_metrics`.

        Returns:
            Its `run_id` and `experiment_id`; an empty dict if the run is kept offline.
        """
        tags = {**run["tags"], "journal": uuid.uuid4().hex}
        store = secrets.mask(sqlite_uri.absolute(self.uri))
        start = {"format": FORMAT, "store": store, **run, "tags": tags}
        try:
            self._writer = journal_file.create(path)
            self._writer.write({"start": start})
            self._writer.flush()  # the shipper reads the line from the file
            self._writer.sync()
            durable.sync(path.parent)  # the name of the file
        except BaseException:
            self.abandon()
            raise
        ids = self._attach(path)
        if ids:
            self.write({"run": ids})
        return ids

    def resume(self, past: Past, segment: dict[str, Any]) -> dict[str, str]:
        """Resume the run of `past`, and return its IDs as `start` does.

        The `segment` describes what may have changed since; `provenance` makes it.
        """
        self._run_id = past.run.get("run_id", "")
        ids = self._attach(past.path, may_exist=True)
        self._writer = past.writer()
        if ids and ids != past.run:
            self.write({"run": ids})
        self.write({"resume": segment})
        return ids or past.run

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, as `LineWriter.write` does.

        Each metric may be written once at each step.
        """
        self._writer.write(line)
        if time.monotonic() - self._checked_at > REVIVE:
            self._revive()
            self._warn_if_behind()

    def position(self) -> Position:
        """Return the end of the lines that were written so far."""
        return self._writer.position

    def sync(self) -> None:
        """Wait until the lines in the file are on the disk; any thread may call it."""
        self._writer.sync()

    def ship_now(self) -> None:
        """Let the shipper ship what is written without its usual interval."""
        self.shipper.send({"unwritten": ""})

    def close(self, status: str) -> str | None:
        """End the run, and wait for the shipper.

        Returns:
            Why something was not shipped; None if everything was.
        """
        # A line that the disk does not take is handed to the shipper by `_finish`.
        with contextlib.suppress(OSError):
            self._writer.write({"end": status})

        self._deadline = time.monotonic() + self.patience
        problem: str | None = "the store was not asked"
        try:
            while not self._is_offline and time.monotonic() < self._deadline:
                self._revive()
                problem = self._finish()
                if problem is None:
                    break
                time.sleep(1)
        finally:  # an interruption ends the wait, and closes the file
            self.abandon()
            if not self._writer.close():
                where = "which are lost" if problem else "which the store alone has"
                say(f"the disk has no room for the last lines of {self._path}, {where}")
        return problem

    def abandon(self) -> None:
        """End the shipper; if no run was started, nothing is left in the store.

        The shipper may still be importing MLflow, or creating a schema that is no
        longer needed.
        """
        self.shipper.terminate()

    def _open(self) -> ShipperProcess:
        return ShipperProcess(
            {
                "open": self.uri,
                "experiment": self.experiment,
                "patience": self.patience,
                "places": artifact_locations.confined_to,
            }
        )

    def _attach(self, path: Path, *, may_exist: bool = False) -> dict[str, str]:
        """Let the shipper create or find the run.

        Returns:
            The IDs of the run; empty if it is kept offline.
        """
        self._path = path
        while not self._is_offline:
            self._ship(may_exist=may_exist)
            answer = self._answer()
            if "error" not in answer:
                self._run_id = answer["run_id"]
                return answer
            is_final = "key" in answer or not self._lives
            if not self._recovers(answer, final=is_final):
                self.abandon()
                raise self._attach_error(answer)
            if "died" not in answer:
                # The store may not be away, but reject this run: do not try forever.
                self._lives -= 1
            self.ready()
            may_exist = True
        return {}

    def _ship(self, *, may_exist: bool) -> None:
        """Tell the shipper which run to ship."""
        self.shipper.send(
            {"ship": str(self._path), "may_exist": may_exist, "run_id": self._run_id}
        )

    def _attach_error(self, answer: dict[str, Any]) -> Exception:
        run_dir = str(self._path.parent)
        if answer.get("key") == "RUN_DIR":
            return ConfigError(answer["key"], answer["rule"], run_dir)
        command = foreign_store.sync_command(run_dir, self.uri)
        return RuntimeError(
            f"the store did not take the run ({answer['error']}); "
            f"what it has of it: {command}"
        )

    def _recovers(self, answer: dict[str, Any], *, final: bool) -> bool:
        """Open the store anew, or go offline, after an error.

        A shipper that died is replaced, `LIVES` times. Any other error means that the
        store is away, unless the answer is `final`.

        Returns:
            False if the run cannot go on.
        """
        if "died" in answer and self._lives > 0:
            self._lives -= 1
            self.abandon()
            self.shipper = self._open()
            return True

        if final or self._when_unreachable == "refuse":
            return False
        self.abandon()
        rule = answer.get("rule", AWAY.format(answer["error"]))
        if self._when_unreachable == "offline":
            self._is_offline = True
            say(
                f"tracking.uri {rule}: "
                "this run is kept in its directory, for pipeline sync"
            )
            return True
        say(f"tracking.uri {rule}: waiting for it")
        time.sleep(RETRY)
        self.shipper = self._open()
        return True

    def _answer(self, *, renew_patience: bool = True) -> dict[str, Any]:
        """Return the shipper's next answer that is not a sign of progress.

        Lines report progress, and a store that is silent for long. Each sign of
        progress renews the patience, as the call itself does with `renew_patience`.

        Returns:
            The answer; an error if the store makes no progress within the patience.
        """
        told_at = time.monotonic()
        if renew_patience:
            self._deadline = told_at + self.patience
        silent = f"no answer within {self.patience:.0f} s"
        problem = ""
        while (seconds := self._deadline - time.monotonic()) > 0:
            answer = self.shipper.answer(min(seconds, SILENCE))
            if answer is None or "failing" in answer:
                if not problem:
                    store = secrets.mask(self.uri)
                    say(f"waiting for the store {store}, {seconds:.0f} s at most")
                if answer is not None:
                    problem = answer["failing"]
                elif not problem:
                    problem = silent
            elif "left" in answer:
                problem = ""
                self._deadline = time.monotonic() + self.patience
                if time.monotonic() > told_at + SILENCE:
                    say(f"still shipping: about {answer['left']:,} points left")
                    told_at = time.monotonic()
            else:
                return answer
        return {"error": problem or silent}

    def _revive(self) -> None:
        """Replace a shipper that died: the new one compares store and journal."""
        self._checked_at = time.monotonic()
        if not self._is_offline and not self.shipper.alive():
            self.abandon()  # closes its pipes
            self.shipper = self._open()
            self._ship(may_exist=True)

    def _warn_if_behind(self) -> None:
        """Print a line if many points have waited since the last check."""
        waiting = []
        while (answer := self.shipper.answer(0)) is not None:
            waiting.append(answer.get("left", 0))
        if waiting and min(waiting) > self._lag:
            say(
                "the store is slower than the run: "
                f"about {min(waiting):,} points wait in {self._path}"
            )
            self._lag = 2 * min(waiting)

    def _finish(self) -> str | None:
        """Tell the shipper that the run has ended.

        Returns:
            Why it did not ship everything; None if it did.
        """
        self.shipper.send({"unwritten": self._writer.unwritten()})
        self.shipper.close()
        while True:
            answer = self._answer(renew_patience=False)
            if "error" in answer:
                break
            if "shipped" in answer:
                if answer.get("not_logged"):
                    say(f"the model was not logged: {answer['not_logged']}")
                return None

        # A shipper that has answered with an error ends; one that hangs does not.
        if time.monotonic() < self._deadline:
            self.shipper.process.wait()
        return str(answer["error"])
