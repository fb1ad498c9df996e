"""The durable outbox: the trainer appends lines to a file, a process of its own ships them to MLflow.

    training thread ─► journal.jsonl ─► `python -m pipeline.tracking.shipper` ─► MLflow

The trainer never waits for the tracker, shares no interpreter lock with it, and imports nothing of MLflow
before the run is over. What is on disk keeps its time stamp, so shipping a line again changes nothing. When the
trainer dies without a word, the shipper still ships what was written and closes the run; when the shipper dies,
another one is started; when both do, `pipeline sync` ships the rest.

One line is one JSON object, with its time in milliseconds and its checksum (`pipeline.tracking.journal_file`) as well:
    {"start": {…}}                                    the run: format, store, params, tags; the first line
    {"run": {"run_id": …, "experiment_id": …}}        what the store called it
    {"dataset": {…}, "context": "training"}           one of its inputs
    {"step": updates, "metrics": {…}}
    {"tags": {…}}    {"artifact": name in the run directory}
    {"fork_of": run_id}                               the run that it begins with, which is told of it
    {"end": "FINISHED" | "FAILED" | "KILLED"}
    {"resume": {…}}                                   it goes on: what its next segment begins with
"""

from __future__ import annotations

import contextlib
import queue
import shlex
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from pipeline.common.errors import ConfigError, say
from pipeline.common.secrets import mask
from pipeline.tracking import journal_file
from pipeline.tracking.journal_file import FORMAT, Past, Writer
from pipeline.tracking.shipper_process import ShipperProcess
from pipeline.trust import artifact_locations

REVIVE = 5.0  # seconds between two looks at whether the shipper lives
SILENCE = 10.0  # seconds for which the store may stay silent before it is said that the run waits for it
RETRY = 5.0  # seconds between two tries to reach a store that is waited for
AWAY = "must be a store that answers ({})"
LIVES = 3  # shippers that may die, or stores that may go away, before the run has begun


class Journal:
    """The trainer's end. Opens the store at once, in the background, while TensorFlow is still being imported.

    Args:
        uri: an MLflow tracking URI.
        experiment: that the run will belong to; created with the run where there is none.
        patience: seconds to wait for the store, at the start and at the end of the run.
        when_unreachable: what to do when the store does not answer at the start: `refuse` the run, `wait`, or train
            `offline`.
    """

    _writer: Writer

    def __init__(self, uri: str, experiment: str, *, patience: float = 60.0, when_unreachable: str = "refuse"):
        self.uri, self.experiment, self.patience = uri, experiment, patience
        self._when_unreachable = when_unreachable
        self._offline, self._lives = False, LIVES
        self._path = Path()
        self._looked = time.monotonic()
        self.shipper = self._open()

    def ready(self) -> None:
        """Wait until the store answers.

        Raises:
            ConfigError: it cannot be reached, read or written; `abandon` what is left.
        """
        while not self._offline:
            answer = self._answer()
            if "error" not in answer:
                return
            if self._replaced(answer):
                continue
            key = answer.get("key", "tracking.uri")
            rule = answer.get("rule", AWAY.format(answer["error"]))
            if key != "tracking.uri" or self._when_unreachable == "refuse":
                raise ConfigError(key, rule, self.uri if key == "tracking.uri" else self.experiment)
            self._wait_or_go_offline(rule)

    def start(self, path: Path, run: dict[str, Any]) -> dict[str, str]:
        """Create the run and return its `run_id` and `experiment_id`; nothing where it is kept offline.

        Args:
            path: of the journal file.
            run: `experiment`, `name`, `params`, `tags`, `system_metrics`.

        Raises:
            ConfigError: another run has its journal there.
            OSError: the disk has no room for its first line.
        """
        tags = {**run["tags"], "journal": uuid.uuid4().hex}
        start = {"format": FORMAT, "store": mask(journal_file.absolute(self.uri)), **run, "tags": tags}
        try:
            self._writer = journal_file.create(path)
            self._writer.write({"start": start})
            self._writer.sync()  # the shipper reads it there
        except BaseException:
            self.abandon()
            raise
        return self._attached(path, again=False)

    def go_on(self, past: Past, segment: dict[str, Any]) -> dict[str, str]:
        """Go on with the run of `past`; return its IDs, as `start` does."""
        answer = self._attached(past.path, again=True, writer=past)
        self.write({"resume": segment})
        return answer or past.run

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, which is of now unless it has a time. Each (metric, step) may be written once.

        Raises:
            OSError: the disk is full, and too much waits in memory already.
        """
        self._writer.write(line)
        if time.monotonic() - self._looked > REVIVE:
            self._revive()

    def close(self, status: str) -> str | None:
        """End the run and wait for the shipper; return why something could not be shipped, None when all of it was."""
        with contextlib.suppress(OSError):  # what the disk does not take is handed to the shipper
            self._writer.write({"end": status})
        until = time.monotonic() + self.patience
        why: str | None = "the store was not asked"
        try:
            while not self._offline and why is not None and time.monotonic() < until:
                self._revive()
                why = self._finish(until)
                time.sleep(0 if why is None else 1)
        finally:  # an interruption included
            self.abandon()
            if not self._writer.close():
                say(f"the disk has no room for the last lines of {self._path}, which are lost")
        return why

    def reaches_store(self, run_id: str) -> bool:
        """Return whether the store answers within the patience, of which less is left for `close`."""
        from mlflow.tracking import MlflowClient

        asked: queue.SimpleQueue[bool] = queue.SimpleQueue()

        def ask() -> None:
            try:
                MlflowClient(self.uri).get_run(run_id)
            except Exception:
                asked.put(False)
            else:
                asked.put(True)

        began = time.monotonic()
        threading.Thread(target=ask, daemon=True).start()
        try:
            return asked.get(timeout=self.patience)
        except queue.Empty:
            return False
        finally:
            self.patience = max(min(self.patience, 1.0), self.patience - (time.monotonic() - began))

    def abandon(self) -> None:
        """Let the shipper go; where no run was started, nothing is left in the store."""
        self.shipper.terminate()  # it may still be importing MLflow, or making a schema that nobody needs

    def _open(self) -> ShipperProcess:
        places = artifact_locations.allowed_places()
        return ShipperProcess(
            {"open": self.uri, "experiment": self.experiment, "places": places, "patience": self.patience}
        )

    def _attached(self, path: Path, *, again: bool, writer: Past | None = None) -> dict[str, str]:
        """Let the shipper create or find the run; return what the store calls it."""
        self._path = path
        answer: dict[str, str] = {}
        if not self._offline:
            answer = self._created(again)
            if "error" in answer:
                self.abandon()
                if answer.get("key") == "RUN_DIR":
                    raise ConfigError(answer["key"], answer["rule"], str(path.parent))
                go_on = shlex.join(["pipeline", "sync", str(path.parent)])
                raise RuntimeError(f"the store did not take the run ({answer['error']}); what it has of it: {go_on}")
        if writer is not None:
            self._writer = writer.writer()
        if answer and (writer is None or writer.run != answer):
            self.write({"run": answer})
        return answer

    def _created(self, again: bool) -> dict[str, Any]:
        """Let the shipper create or find the run; return its answer, empty where it is kept offline."""
        while not self._offline:
            self.shipper.send({"ship": str(self._path), "again": again})
            answer = self._answer()
            if not self._replaced(answer):
                if "error" not in answer or "key" in answer or self._when_unreachable == "refuse" or not self._lives:
                    return answer
                self._lives -= 1  # it may not be away, but refuse the run
                self._wait_or_go_offline(AWAY.format(answer["error"]))
            self.ready()
            again = True
        return {}

    def _wait_or_go_offline(self, rule: str) -> None:
        """Do what `tracking.when_unreachable` says of a store that `rule` says is away."""
        self.abandon()
        self._offline = self._when_unreachable == "offline"
        if self._offline:
            say(f"tracking.uri {rule}: this run is kept in its directory, for pipeline sync")
            return
        say(f"tracking.uri {rule}: waiting for it")
        time.sleep(RETRY)
        self.shipper = self._open()

    def _replaced(self, answer: dict[str, Any]) -> bool:
        """Start another shipper where `answer` is that it died, but not again and again; return whether it was."""
        if "died" not in answer or not self._lives:
            return False
        self._lives -= 1
        self.shipper.terminate()  # its pipes are left
        self.shipper = self._open()
        return True

    def _answer(self) -> dict[str, Any]:
        """Return the shipper's next answer; say that the store is silent where it is for long."""
        answer = self.shipper.answer(min(SILENCE, self.patience))
        if answer is None:
            say(f"waiting for the store {mask(self.uri)}")
            answer = self.shipper.answer(max(0.0, self.patience - SILENCE))
        return {"error": f"no answer within {self.patience:.0f} s"} if answer is None else answer

    def _revive(self) -> None:
        """Start another shipper where it died: it compares what the store holds with what the journal says."""
        self._looked = time.monotonic()
        if not self._offline and not self.shipper.alive():
            self.shipper.terminate()  # its pipes are left
            self.shipper = self._open()
            self.shipper.send({"ship": str(self._path), "again": True})

    def _finish(self, until: float) -> str | None:
        """Tell the shipper that the run has ended; return why it did not ship everything."""
        shipper, why = self.shipper, ""
        shipper.send({"unwritten": self._writer.unwritten()})
        shipper.close()
        while (left := until - time.monotonic()) > 0:
            answer = shipper.answer(min(left, SILENCE)) or {}
            if "shipped" in answer:
                return None
            if "error" in answer:
                shipper.wait()
                return str(answer["error"])
            if not why:
                say(f"waiting for the store {mask(self.uri)}, {left:.0f} s at most")
            why = answer.get("failing") or why or f"no answer within {self.patience:.0f} s"
        return why or f"no answer within {self.patience:.0f} s"
