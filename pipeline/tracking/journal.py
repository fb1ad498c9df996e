"""The durable outbox of a run.

The trainer appends lines to a file, and a separate process ships them to MLflow:

    training thread ─► journal.jsonl ─► `python -m pipeline.tracking.shipper` ─► MLflow

The trainer never waits for the tracker, and opens no store. Every line keeps its time
stamp, so that shipping it twice changes nothing.

    the trainer dies    The shipper ships what was written, and closes the run.
    the shipper dies    The trainer replaces it. The new one compares the store with the
                        journal.
    both die            `pipeline sync` ships the rest.

One line is one JSON object, with its time in milliseconds and its checksum (see
`pipeline.tracking.journal_file`):

    {"start": {…}}                               the run: format, store, params, tags;
                                                 the first line
    {"run": {"run_id": …, "experiment_id": …}}   its IDs in the store
    {"dataset": {…}, "context": "training"}      one of its inputs
    {"step": updates, "metrics": {…}}
    {"tags": {…}}
    {"artifact": name in the run directory}
    {"model": ID}                                the trained model, in `logged_model-ID`
                                                 in the run directory
    {"fork_of": run_id}                          the run whose checkpoint it begins with,
                                                 which gets a tag
    {"end": "FINISHED" | "FAILED" | "KILLED"}
    {"resume": {…}}                              the run is resumed: what its next
                                                 segment begins with
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

from pipeline.common import imports, secrets
from pipeline.common.errors import ConfigError, say
from pipeline.tracking import foreign_store, journal_file
from pipeline.tracking.journal_file import FORMAT, Past
from pipeline.trust import artifact_locations

REVIVE = 5.0  # seconds between two checks that the shipper is alive
# Seconds without an answer after which the user learns that the run waits for the store.
SILENCE = 10.0
RETRY = 5.0  # seconds between two attempts to reach a store that is waited for
AWAY = "must be a store that answers ({})"
# Failures that are survived before the run exists: shippers that die, stores that go
# away.
LIVES = 3
# Points that wait to be shipped before the user learns of it: some seconds of work for a
# store.
LAG = 20_000

# An answer of the shipper, see `pipeline.tracking.shipper`. Its `error` says that it has
# ended; `died` is added if it ended without an answer.
Answer = dict[str, Any]


class ShipperProcess:
    """A running shipper. It takes commands, and its answers are queued.

    Args:
        opening: The first command.
    """

    def __init__(self, opening: dict[str, Any]):
        # It runs none of the user's code. Ctrl-C reaches the trainer alone, which then
        # writes how the run ended.
        self.process = imports.started(
            "pipeline.tracking.shipper", stdout=subprocess.PIPE
        )
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.send(opening)

    def send(self, command: dict[str, Any]) -> None:
        """Send a command; if the shipper has ended, its answer is an error."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def answer(self, seconds: float) -> Answer | None:
        """Return the next answer; None if there is none within `seconds`."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=max(0.0, seconds))
        return None

    def alive(self) -> bool:
        """Return whether the process is running."""
        return self.process.poll() is None

    def close(self) -> None:
        """Tell the shipper that no command follows."""
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()

    def terminate(self) -> None:
        """End the process; kill it if it is stopped or does not end within 2 s."""
        self.close()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self.process.kill()
        self.process.wait()

    def _listen(self) -> None:
        # The last line is incomplete if the shipper was killed.
        with contextlib.suppress(ValueError), self.process.stdout as lines:
            for line in lines:
                self._answers.put(json.loads(line))
        error = "the shipper ended without an answer"
        self._answers.put({"error": error, "died": True})


class Journal:
    """The trainer's end of the outbox.

    The store opens in the background at once, while TensorFlow is still being imported.

    Args:
        uri: Of the store.
        experiment: Its name; it is created with the run if it does not exist.
        patience: Seconds for which an answer of the store is waited for, at the start
            and at the end of the run.
        when_unreachable: What to do with a store that does not answer at the start:
            `refuse` the run, `wait`, or train `offline`.
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
        self._offline = False
        self._path = Path()
        self._lives = LIVES
        self._lag = LAG
        self._checked = time.monotonic()
        self.shipper = self._open()

    def ready(self) -> None:
        """Wait until the store answers.

        Raises:
            ConfigError: It cannot be reached, read or written. Call `abandon` then.
        """
        while not self._offline:
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
            path: Of the journal, which must be new.
            run: With `experiment`, `name`, `params`, `tags` and `system_metrics`.

        Returns:
            Its `run_id` and `experiment_id`; an empty dict if it is kept offline.
        """
        start = {
            "format": FORMAT,
            "store": secrets.mask(journal_file.absolute(self.uri)),
            **run,
            "tags": {**run["tags"], "journal": uuid.uuid4().hex},
        }
        try:
            self._writer = journal_file.create(path)
            self._writer.write({"start": start})
            self._writer.sync()  # The shipper reads it there.
        except BaseException:
            self.abandon()
            raise
        ids = self._attach(path, may_exist=False)
        if ids:
            self.write({"run": ids})
        return ids

    def go_on(self, past: Past, segment: dict[str, Any]) -> dict[str, str]:
        """Resume the run of `past`; return its IDs, as `start` does."""
        ids = self._attach(past.path, may_exist=True)
        self._writer = past.writer()
        if ids and ids != past.run:
            self.write({"run": ids})
        self.write({"resume": segment})
        return ids or past.run

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, as `Writer.write` does. Each (metric, step) is written once."""
        self._writer.write(line)
        if time.monotonic() - self._checked > REVIVE:
            self._revive()
            self._report_lag()

    def ship_now(self) -> None:
        """Let the shipper ship what is written, without its usual interval."""
        self.shipper.send({"unwritten": ""})

    def close(self, status: str) -> str | None:
        """End the run and wait for the shipper.

        Returns:
            Why something was not shipped; None if everything was.
        """
        # What the disk does not take is handed to the shipper.
        with contextlib.suppress(OSError):
            self._writer.write({"end": status})
        self._deadline = time.monotonic() + self.patience
        why: str | None = "the store was not asked"
        try:
            while not self._offline and time.monotonic() < self._deadline:
                self._revive()
                why = self._finish()
                if why is None:
                    break
                time.sleep(1)
        finally:  # An interruption included.
            self.abandon()
            if not self._writer.close():
                where = "which are lost" if why else "which the store alone has"
                say(f"the disk has no room for the last lines of {self._path}, {where}")
        return why

    def abandon(self) -> None:
        """End the shipper. If no run was started, nothing is left in the store."""
        # It may still be importing MLflow, or creating a schema that is not needed.
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

    def _attach(self, path: Path, *, may_exist: bool) -> dict[str, str]:
        """Let the shipper create or find the run.

        Returns:
            Its IDs; an empty dict if it is kept offline.
        """
        self._path = path
        while not self._offline:
            self.shipper.send({"ship": str(path), "may_exist": may_exist})
            answer = self._answer()
            if "error" not in answer:
                return answer
            final = "key" in answer or not self._lives
            if not self._recovers(answer, final=final):
                self.abandon()
                raise self._not_taken(path, answer)
            if "died" not in answer:
                # The store may not be away, but reject the run.
                self._lives -= 1
            self.ready()
            may_exist = True
        return {}

    def _not_taken(self, path: Path, answer: Answer) -> Exception:
        """Return the error for a run that the store did not take."""
        run_dir = str(path.parent)
        if answer.get("key") == "RUN_DIR":
            return ConfigError(answer["key"], answer["rule"], run_dir)
        command = foreign_store.sync_command(run_dir, self.uri)
        return RuntimeError(
            f"the store did not take the run ({answer['error']}); "
            f"what it has of it: {command}"
        )

    def _recovers(self, answer: Answer, *, final: bool) -> bool:
        """Open the store anew, or go offline, after an error.

        A shipper that died is replaced, `LIVES` times. Otherwise the store is away,
        unless the answer is `final`.

        Returns:
            False if the run cannot go on.
        """
        died = "died" in answer and self._lives > 0
        if not died and (final or self._when_unreachable == "refuse"):
            return False
        self.abandon()
        if died:
            self._lives -= 1
        else:
            reason = answer.get("rule", AWAY.format(answer["error"]))
            if self._when_unreachable == "offline":
                self._offline = True
                what = "this run is kept in its directory, for pipeline sync"
                say(f"tracking.uri {reason}: {what}")
                return True
            say(f"tracking.uri {reason}: waiting for it")
            time.sleep(RETRY)
        self.shipper = self._open()
        return True

    def _answer(self, *, anew: bool = True) -> Answer:
        """Return the shipper's next answer.

        It is an error if the store makes no progress within the patience, which begins
        `anew`, or goes on. Lines report progress, and a store that is silent for long.
        """
        last_line = time.monotonic()
        if anew:
            self._deadline = last_line + self.patience
        silent = f"no answer within {self.patience:.0f} s"
        why = ""
        while (seconds := self._deadline - time.monotonic()) > 0:
            answer = self.shipper.answer(min(seconds, SILENCE))
            if answer is None or "failing" in answer:
                if not why:
                    store = secrets.mask(self.uri)
                    say(f"waiting for the store {store}, {seconds:.0f} s at most")
                if answer is not None:
                    why = answer["failing"]
                elif not why:
                    why = silent
            elif "left" in answer:
                self._deadline = time.monotonic() + self.patience
                why = ""
                if time.monotonic() > last_line + SILENCE:
                    say(f"still shipping: about {answer['left']:,} points left")
                    last_line = time.monotonic()
            else:
                return answer
        return {"error": why or silent}

    def _report_lag(self) -> None:
        """Report if the shipper has not caught up since the last look."""
        points_left = []
        while (answer := self.shipper.answer(0)) is not None:
            points_left.append(answer.get("left", 0))
        if points_left and min(points_left) > self._lag:
            least = min(points_left)
            say(
                f"the store is slower than the run: about {least:,} points wait in "
                f"{self._path}"
            )
            self._lag = 2 * least

    def _revive(self) -> None:
        """Replace a shipper that died: the new one compares the store with the journal."""
        self._checked = time.monotonic()
        if not self._offline and not self.shipper.alive():
            self.abandon()  # It closes the pipes.
            self.shipper = self._open()
            self.shipper.send({"ship": str(self._path), "may_exist": True})

    def _finish(self) -> str | None:
        """Tell the shipper that the run has ended.

        Returns:
            Why it did not ship everything; None if it did.
        """
        self.shipper.send({"unwritten": self._writer.unwritten()})
        self.shipper.close()
        while "error" not in (answer := self._answer(anew=False)):
            if "shipped" in answer:
                not_logged = answer.get("not_logged")
                if not_logged:
                    say(f"the model was not logged: {not_logged}")
                return None
        if time.monotonic() < self._deadline:
            # It has answered, and ends.
            self.shipper.process.wait()
        return str(answer["error"])
