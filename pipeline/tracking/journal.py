"""The durable outbox: the trainer appends lines to a file, a process of its own ships them to MLflow.

    training thread ─► journal.jsonl ─► `python -m pipeline.tracking.shipper` ─► MLflow

The trainer never waits for the tracker, shares no interpreter lock with it, and imports nothing of MLflow
before the run is over. What is on disk keeps its time stamp, so shipping a line again changes nothing. When the
trainer dies without a word, the shipper still ships what was written and closes the run.

One line is one JSON object, with its time in milliseconds as well:
    {"start": {…}}                                    the run: params, tags; the first line
    {"dataset": {…}, "context": "training"}           one of its inputs
    {"step": updates, "metrics": {…}}
    {"tags": {…}}    {"artifact": path}
    {"end": "FINISHED" | "FAILED" | "KILLED"}
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from pipeline import imports
from pipeline.errors import ConfigError
from pipeline.trust import artifact_locations

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes one a line


class Journal:
    """The trainer's end. Opens the store at once, in the background, while TensorFlow is still being imported.

    Args:
        uri: an MLflow tracking URI.
        experiment: that the run will belong to; created with the run where there is none.
    """

    _file: TextIO

    def __init__(self, uri: str, experiment: str):
        self.uri, self.experiment = uri, experiment
        # -P: a file of the user's folder with a module's name is not for the shipper, which runs none of their code.
        # A session of its own: Ctrl-C in the terminal is the trainer's, which then says how the run ended.
        self.shipper: Any = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.tracking.shipper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": imports.path_of_processes()},
            text=True,
            start_new_session=True,
        )
        self._send({"open": uri, "experiment": experiment, "places": artifact_locations.allowed_places()})

    def ready(self) -> None:
        """Wait until the store answers.

        Raises:
            ConfigError: it cannot be reached, read or written; `abandon` what is left.
        """
        answer = self._answer(self.shipper.stdout.readline())
        if "error" in answer:
            key = answer.get("key", "tracking.uri")
            rule = answer.get("rule", f"must be a store that answers ({answer['error']})")
            raise ConfigError(key, rule, self.uri if key == "tracking.uri" else self.experiment)

    def start(self, path: Path, run: dict[str, Any]) -> dict[str, str]:
        """Create the run and return its `run_id` and `experiment_id`.

        Args:
            path: of the journal file.
            run: `experiment`, `name`, `params`, `tags`, `system_metrics`.

        Raises:
            ConfigError: another run has its journal there.
        """
        try:
            # By the line: what the operating system has it keeps if this process dies.
            self._file = path.open("x", buffering=1, encoding="utf-8")
        except FileExistsError:  # of another run, begun in the same moment
            self.abandon()
            raise ConfigError("hydra.run.dir", "must be a folder without a run in it", str(path.parent)) from None
        self.write({"start": run})
        self._send({"start": str(path)})
        answer = self._answer(self.shipper.stdout.readline())
        if "error" in answer:
            self.abandon()
            raise RuntimeError(f"MLflow refused the run: {answer['error']}")
        return answer

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, which is of now unless it has a time. Each (metric, step) may be written once."""
        self._file.write(_ENCODE({"time": int(time.time() * 1000), **line}) + "\n")

    def close(self, status: str) -> str | None:
        """End the run and wait for the shipper; return why something could not be shipped, None when all of it was."""
        self.write({"end": status})
        self._file.close()
        return self._answer(self.shipper.communicate()[0]).get("error")  # it ships what is left when its input ends

    def abandon(self) -> None:
        """Let the shipper go before a run was started; nothing is left in the store."""
        self.shipper.terminate()  # it may still be importing MLflow, or making a schema that nobody needs
        self.shipper.communicate()

    def _send(self, command: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the answer, which is then missing, says so
            self.shipper.stdin.write(json.dumps(command) + "\n")
            self.shipper.stdin.flush()

    def _answer(self, line: str) -> dict[str, str]:
        return json.loads(line) if line else {"error": "the shipper ended without an answer"}
