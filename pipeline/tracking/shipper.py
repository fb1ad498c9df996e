"""`python -m pipeline.tracking.shipper`: the process that carries a journal to MLflow. See `pipeline.tracking.journal`.

Reads two commands from standard input, answers each with one line of JSON, then follows the journal until
standard input ends, ships what is left and answers once more.
"""

from __future__ import annotations

import contextlib
import gc
import json
import select
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param

from pipeline import mlflow_internals
from pipeline.errors import ConfigError, first_line
from pipeline.tracking.store import Store
from pipeline.trust import artifact_locations

AT_ONCE = 1000  # metrics in one request, at most; MLflow's limit
INTERVAL = 5.0  # seconds between two writes, and between two samples of the system's metrics
RETRY = 1.0  # seconds between two tries once the trainer is gone
# Seconds of further tries once the trainer is gone; `sweep.parent_run.PATIENCE` must be longer, and
# `launching.launcher.GRACE` gives a job as long to close its run.
PATIENCE = 60.0
PARAM_LENGTH = 6000  # characters of a param's value


class Shipper:
    """Ships the lines of one journal, in order, each at least once; the first line says what run to create."""

    def __init__(self, store: Store, path: Path):
        self._file = path.open(encoding="utf-8")
        self._partial = ""
        self._points: list[Metric] = []
        self._waiting: list[dict[str, Any]] = []  # lines other than metrics, shipped after the metrics before them
        self._ended = False
        self._last_step = self._samples = 0
        line = json.loads(self._file.readline())
        run = line["start"]
        self.client = store.client()
        self.experiment_id = store.experiment(run["experiment"])
        created = self.client.create_run(self.experiment_id, line["time"], run["tags"], run["name"])
        self.run_id = created.info.run_id
        try:
            if (places := artifact_locations.allowed_places()) is not None:
                artifact_locations.check(created.info.artifact_uri, store.uri, places)
            params = [Param(key, str(value)[:PARAM_LENGTH]) for key, value in run["params"].items()]
            for first in range(0, len(params), 100):
                self.client.log_batch(self.run_id, params=params[first : first + 100])
            # Sampled from here, not in a thread of its own that reads the whole run before each of its writes.
            self._system = mlflow_internals.system_sampler(store.uri, self.run_id) if run["system_metrics"] else None
        except Exception:
            with contextlib.suppress(Exception):  # the first failure is what the trainer is told
                self.client.set_terminated(self.run_id, "FAILED")
            raise

    def read(self, alive: bool) -> None:
        """Take in the lines that have been written since; where the trainer died without a word, say so for it."""
        while text := self._file.readline():
            self._partial += text
            if not self._partial.endswith("\n"):
                break
            line, self._partial = json.loads(self._partial), ""
            if "metrics" in line:
                step, milliseconds = line["step"], line["time"]
                self._last_step = max(step, self._last_step)
                self._points += [Metric(key, value, milliseconds, step) for key, value in line["metrics"].items()]
            else:
                self._waiting.append(line)
                self._ended = "end" in line
        if not alive and not self._ended:
            failure = f"The process ended without a word after update {self._last_step}."
            self._waiting += [{"tags": {"failure": failure}}, {"end": "KILLED", "time": int(time.time() * 1000)}]
            self._ended = True

    def sample(self) -> None:
        """Take one sample of the system's metrics; its step is the number of samples before it, as MLflow has it."""
        if self._system is None:
            return
        sampled, now = self._system(), int(time.time() * 1000)
        self._points += [Metric(f"system/{key}", value, now, self._samples) for key, value in sampled.items()]
        self._samples += 1

    def ship(self) -> None:
        """Send everything; what the store has not confirmed stays here and is sent again."""
        while self._points:
            self.client.log_batch(self.run_id, metrics=self._points[:AT_ONCE])
            del self._points[:AT_ONCE]
        while self._waiting:
            line = self._waiting[0]
            if "dataset" in line:  # MLflow refuses one that another run inserts in this moment; then it is sent again
                tags = [InputTag("mlflow.data.context", line["context"])]
                self.client.log_inputs(self.run_id, [DatasetInput(Dataset(**line["dataset"]), tags)])
            for key, value in line.get("tags", {}).items():
                self.client.set_tag(self.run_id, key, value)
            if "artifact" in line:
                self.client.log_artifact(self.run_id, line["artifact"])
            if "end" in line:
                self.client.set_terminated(self.run_id, line["end"], line["time"])
            del self._waiting[0]


def main() -> None:
    """Serve the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's end is ours: it closes our standard input
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # until there is a run to close
    sys.unraisablehook = _say_unraisable
    command = _command()
    if command is not None:
        places = command["places"]  # None: the user's own store, whose artifacts may lie anywhere
        with nullcontext() if places is None else artifact_locations.confined(command["open"], places):
            _serve(command)


def _say_unraisable(what: Any) -> None:
    if not issubclass(what.exc_type, SystemExit):  # SIGTERM in a destructor: the end of standard input follows it
        sys.__unraisablehook__(what)


def _serve(command: dict[str, Any]) -> None:
    try:
        store = Store(command["open"])
        store.check(command["experiment"])
        _answer({})
        store.prepare()  # while the trainer imports TensorFlow
        start = _command()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if start is None:
            return
        shipper = Shipper(store, Path(start["start"]))
    except Exception as error:
        refusal = {"key": error.key, "rule": error.rule} if isinstance(error, ConfigError) else {}
        _answer({"error": first_line(error), **refusal})
        return
    _answer({"run_id": shipper.run_id, "experiment_id": shipper.experiment_id})
    gc.freeze()  # what is loaded by now stays: collecting it again and again doubled the cost of a batch
    _follow(shipper)


def _follow(shipper: Shipper) -> None:
    alive, failing_since = True, None
    while True:
        if alive:
            alive = not select.select([sys.stdin], [], [], INTERVAL)[0]
        elif failing_since:
            time.sleep(RETRY)
        shipper.read(alive)
        if not failing_since:
            shipper.sample()
        try:
            shipper.ship()
        except Exception as error:
            failing_since = failing_since or time.monotonic()
            if not alive and time.monotonic() - failing_since > PATIENCE:
                _answer({"error": first_line(error)})
                return
            continue
        failing_since = None
        if not alive:
            _answer({})
            return


def _command() -> dict[str, Any] | None:
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def _answer(answer: dict[str, str]) -> None:
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:
        sys.stdout = None  # nobody is left to be told


if __name__ == "__main__":
    main()
