"""The durable outbox: the trainer appends lines to a file, and a separate process ships them to MLflow.

    training thread ─► journal.jsonl ─► `python -m pipeline.tracking.shipper` ─► MLflow

The trainer never waits for the tracker, and opens no store. Every line keeps its time stamp: shipping it twice changes
nothing. If the trainer dies without a word, the shipper ships what was written and closes the run; a shipper that dies
is replaced; if both die, `pipeline sync` ships the rest.

One line is one JSON object, with its time in milliseconds and its checksum (`pipeline.tracking.journal_file`):
    {"start": {…}}                                    the run: format, store, params, tags; the first line
    {"run": {"run_id": …, "experiment_id": …}}        its IDs in the store
    {"dataset": {…}, "context": "training"}           one of its inputs
    {"step": updates, "metrics": {…}}
    {"tags": {…}}    {"artifact": name in the run directory}
    {"model": ID}                                     the trained model, in `logged_model-ID` in the run directory
    {"fork_of": run_id}                               the run whose checkpoint it begins with, which gets a tag
    {"end": "FINISHED" | "FAILED" | "KILLED"}
    {"resume": {…}}                                   the run is resumed: what its next segment begins with
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
SILENCE = 10.0  # seconds without an answer after which the user is told that the run waits for the store
RETRY = 5.0  # seconds between two attempts to reach a store that is waited for
AWAY = "must be a store that answers ({})"
LIVES = 3  # failures that are survived before the run exists: shippers that die, stores that go away
LAG = 20_000  # points that wait to be shipped before the user is told: some seconds of work for a store


class ShipperProcess:
    """A running shipper, whose first command is `opening`: takes commands, and queues the answers."""

    def __init__(self, opening: dict[str, Any]):
        # It runs none of the user's code. Ctrl-C reaches the trainer alone, which then says how the run ended.
        self.process = imports.started(
            "pipeline.tracking.shipper", stdout=subprocess.PIPE
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.send(opening)

    def send(self, command: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # then the answer is an error
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer; None if there is none within `seconds`."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=max(0.0, seconds))
        return None

    def alive(self) -> bool:
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
        with (
            contextlib.suppress(ValueError),
            self.process.stdout as answers,
        ):  # half a line, if it was killed
            for line in answers:
                self._answers.put(json.loads(line))
        self._answers.put(
            {"error": "the shipper ended without an answer", "died": True}
        )


class Journal:
    """The trainer's end. Opens the store in the background at once, while TensorFlow is still being imported.

    The experiment is created with the run if it does not exist. The `patience` is how many seconds an answer of the
    store is waited for, at the start and at the end. `when_unreachable`: `refuse` the run, `wait`, or train `offline`.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        *,
        patience: float = 60.0,
        when_unreachable: str = "refuse",
    ):
        self.uri, self.experiment, self.patience = uri, experiment, patience
        self._when_unreachable, self._offline, self._path = (
            when_unreachable,
            False,
            Path(),
        )
        self._lives, self._lag, self._checked = LIVES, LAG, time.monotonic()
        self.shipper = self._open()

    def ready(self) -> None:
        """Wait until the store answers; call `abandon` after a `ConfigError`: it cannot be reached, read or written."""
        while not self._offline and "error" in (answer := self._answer()):
            key = answer.get("key", "tracking.uri")
            if not self._recovers(answer, final=key != "tracking.uri"):
                rule = answer.get("rule", AWAY.format(answer["error"]))
                raise ConfigError(
                    key, rule, self.uri if key == "tracking.uri" else self.experiment
                )

    def start(self, path: Path, run: dict[str, Any]) -> dict[str, str]:
        """Create the run and return its `run_id` and `experiment_id`, or an empty dict if the run is kept offline.

        The journal at `path` must be new; `run` has `experiment`, `name`, `params`, `tags` and `system_metrics`.
        """
        tags = {**run["tags"], "journal": uuid.uuid4().hex}
        start = {
            "format": FORMAT,
            "store": secrets.mask(journal_file.absolute(self.uri)),
            **run,
            "tags": tags,
        }
        try:
            self._writer = journal_file.create(path)
            self._writer.write({"start": start})
            self._writer.sync()  # the shipper reads it there
        except BaseException:
            self.abandon()
            raise
        ids = self._attach(path, may_exist=False)
        if ids:
            self.write({"run": ids})
        return ids

    def go_on(self, past: Past, segment: dict[str, Any]) -> dict[str, str]:
        """Resume the run of `past`; return its IDs, as `start` does."""
        ids, self._writer = self._attach(past.path, may_exist=True), past.writer()
        if ids and ids != past.run:
            self.write({"run": ids})
        self.write({"resume": segment})
        return ids or past.run

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, as `Writer.write` does. Each (metric, step) may be written once."""
        self._writer.write(line)
        if time.monotonic() - self._checked > REVIVE:
            self._revive()
            told = [
                answer.get("left", 0)
                for answer in iter(lambda: self.shipper.answer(0), None)
            ]
            if (
                told and min(told) > self._lag
            ):  # since the last look: it does not catch up
                say(
                    f"the store is slower than the run: about {min(told):,} points wait in {self._path}"
                )
                self._lag = 2 * min(told)

    def ship_now(self) -> None:
        """Let the shipper ship what is written, without its usual interval."""
        self.shipper.send({"unwritten": ""})

    def close(self, status: str) -> str | None:
        """End the run and wait for the shipper; return why something was not shipped, or None if everything was."""
        with contextlib.suppress(
            OSError
        ):  # what the disk does not take is handed to the shipper
            self._writer.write({"end": status})
        self._deadline = time.monotonic() + self.patience
        why: str | None = "the store was not asked"
        try:
            while (
                not self._offline
                and why is not None
                and time.monotonic() < self._deadline
            ):
                self._revive()
                why = self._finish()
                time.sleep(0 if why is None else 1)
        finally:  # also after an interruption
            self.abandon()
            if not self._writer.close():
                where = "which are lost" if why else "which the store alone has"
                say(f"the disk has no room for the last lines of {self._path}, {where}")
        return why

    def abandon(self) -> None:
        """End the shipper. If no run was started, nothing is left in the store."""
        self.shipper.terminate()  # it may still be importing MLflow, or creating a schema that is no longer needed

    def _open(self) -> ShipperProcess:
        known = {
            "open": self.uri,
            "experiment": self.experiment,
            "patience": self.patience,
        }
        return ShipperProcess({**known, "places": artifact_locations.confined_to})

    def _attach(self, path: Path, *, may_exist: bool) -> dict[str, str]:
        """Let the shipper create or find the run; return its IDs, empty if it is kept offline."""
        self._path = path
        while not self._offline:
            self.shipper.send({"ship": str(path), "may_exist": may_exist})
            answer = self._answer()
            if "error" not in answer:
                return answer
            if not self._recovers(answer, final="key" in answer or not self._lives):
                self.abandon()
                if answer.get("key") == "RUN_DIR":
                    raise ConfigError(answer["key"], answer["rule"], str(path.parent))
                command = foreign_store.sync_command(str(path.parent), self.uri)
                raise RuntimeError(
                    f"the store did not take the run ({answer['error']}); what it has of it: {command}"
                )
            self._lives -= (
                "died" not in answer
            )  # the store may not be away, but refuse the run
            self.ready()
            may_exist = True
        return {}

    def _recovers(self, answer: dict[str, Any], *, final: bool) -> bool:
        """Open the store anew, or go offline, after an error; return False if the run cannot go on.

        A shipper that died is replaced, `LIVES` times; else the store is away, unless the answer is `final`.
        """
        died = "died" in answer and self._lives > 0
        if not died and (final or self._when_unreachable == "refuse"):
            return False
        self.abandon()
        if not died:
            self._offline = self._when_unreachable == "offline"
            what = (
                "this run is kept in its directory, for pipeline sync"
                if self._offline
                else "waiting for it"
            )
            say(
                f"tracking.uri {answer.get('rule', AWAY.format(answer['error']))}: {what}"
            )
            if self._offline:
                return True
            time.sleep(RETRY)
        self._lives -= died
        self.shipper = self._open()
        return True

    def _answer(self, *, anew: bool = True) -> dict[str, Any]:
        """Return the shipper's next answer; an error if the store makes no progress within the patience.

        The patience begins `anew`, or goes on. The user is told of progress, and of a store that is silent for long.
        """
        why, told, silent = (
            "",
            time.monotonic(),
            f"no answer within {self.patience:.0f} s",
        )
        self._deadline = told + self.patience if anew else self._deadline
        while (seconds := self._deadline - time.monotonic()) > 0:
            answer = self.shipper.answer(min(seconds, SILENCE))
            if answer is None or "failing" in answer:
                if not why:
                    say(
                        f"waiting for the store {secrets.mask(self.uri)}, {seconds:.0f} s at most"
                    )
                why = answer["failing"] if answer else why or silent
            elif "left" in answer:
                self._deadline, why = time.monotonic() + self.patience, ""
                if time.monotonic() > told + SILENCE:
                    say(f"still shipping: about {answer['left']:,} points left")
                    told = time.monotonic()
            else:
                return answer
        return {"error": why or silent}

    def _revive(self) -> None:
        """Replace a shipper that died: the new one compares the store with the journal."""
        self._checked = time.monotonic()
        if not self._offline and not self.shipper.alive():
            self.abandon()  # closes its pipes
            self.shipper = self._open()
            self.shipper.send({"ship": str(self._path), "may_exist": True})

    def _finish(self) -> str | None:
        """Tell the shipper that the run has ended; return why it did not ship everything, or None."""
        self.shipper.send({"unwritten": self._writer.unwritten()})
        self.shipper.close()
        while "error" not in (answer := self._answer(anew=False)):
            if "shipped" in answer:
                if why := answer.get("not_logged"):
                    say(f"the model was not logged: {why}")
                return None
        if time.monotonic() < self._deadline:  # it has said why, and ends
            self.shipper.process.wait()
        return str(answer["error"])
