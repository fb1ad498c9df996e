"""The chief of several workers: it starts the others, sends them the spec, watches them and ends them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.fork import Fork
from pipeline.common import imports
from pipeline.common.errors import ConfigError, RunError, say
from pipeline.config import cluster, compose
from pipeline.config.cluster import Cluster
from pipeline.config.resolve import RunSpec
from pipeline.distributed import rendezvous
from pipeline.distributed.worker import TRAIN
from pipeline.trust import gate

if TYPE_CHECKING:  # importing it takes seconds
    import tensorflow as tf

JOINING = 20.0  # seconds after which TensorFlow, once all have joined, has noticed by itself that a worker is gone
ENDING = 10.0  # seconds for a worker to end after the chief


class WorkerError(RunError):
    """A worker is gone, or has failed; the message is one line."""


class Chief(AbstractContextManager["Chief"]):
    """The chief's hold of the other workers; `workers` is None for a single one, which has nothing to do here."""

    def __init__(self, workers: Cluster | None):
        self.cluster, self._session = workers, compose.session()
        self._server = None if workers is None else rendezvous.Server(workers)
        self._processes: list[subprocess.Popen[str]] = []
        self._made_logs = self._ended = False
        self.reductions_ready: tf.Variable | None = None  # counts all-reduces, once the devices are set up

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._ended = True
        if isinstance(error, ConfigError):
            self.dismiss(error)
        if self._server is not None:
            self._server.close()
        for process in self._processes:
            try:
                process.wait(ENDING if error is None else 1.0)
            except subprocess.TimeoutExpired:  # it hangs
                process.kill()
                process.wait()
        if isinstance(error, ConfigError) and self._made_logs:
            shutil.rmtree(self._logs, ignore_errors=True)  # nothing was created

    def start(self, spec: RunSpec, run_dir: Path, task: str = TRAIN) -> None:
        """Start the workers on this machine, unless something else does; `task` is as `worker.run` has it."""
        if self.cluster is None or not self.cluster.started:
            return
        self._logs = run_dir.absolute() / "workers"
        self._made_logs = not self._logs.exists()
        self._logs.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", "pipeline.distributed.worker"]
        ours = {**os.environ, "PYTHONPATH": imports.path_of_processes()}
        for index in range(1, len(self.cluster.addresses)):
            with (self._logs / f"{index}.log").open("ab") as log:
                # A session of its own: Ctrl-C interrupts this process alone, which ends the workers.
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=ours, text=True, start_new_session=True
                )
            self._processes.append(process)
            given = {"addresses": self.cluster.addresses, "index": index, "spec": spec.to_text(), "task": task}
            given["gate"] = None if (found := gate.in_force()) is None else asdict(found)
            assert process.stdin is not None
            with suppress(OSError), process.stdin as pipe:  # it may have ended, which `_check_processes` finds
                pipe.write(json.dumps(given, default=os.fspath) + "\n")

    def gather(self, spec: RunSpec, run_dir: Path, start: Checkpoint | Fork | None) -> None:
        """Wait for all workers, and send them the spec and the checkpoint that the run starts from."""
        if self._server is None:
            return
        answer = {"run_dir": str(run_dir.absolute()), "spec": spec.shared_text(), "start": _as_json(start)}
        self._server.gather(rendezvous.statement(spec), answer, self._check_processes)
        self._server.watch(
            lambda: 0 if self.reductions_ready is None else int(self.reductions_ready.numpy()), self._lost
        )

    def _check_processes(self) -> None:
        for index, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                log = self._logs / f"{index}.log"
                printed = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
                last = next((line for line in reversed(printed) if line.strip()), "it has said nothing")
                raise WorkerError(f"worker {index} ended with status {process.returncode} before it began: {last}")

    def dismiss(self, error: ConfigError | None = None) -> None:
        """Tell the workers that wait that there will be no run; without an error, that the run has finished."""
        if self._server is not None and not self._server.cluster.started:
            self._server.dismiss(error)

    def _lost(self, index: int, said: Mapping[str, Any]) -> None:
        """Kill a worker that hangs, so that TensorFlow notices; later end this process if it still waits for joins."""
        if self._processes and "late" in said:
            self._processes[index - 1].kill()
        if self.reductions_ready is None:
            timer = threading.Timer(JOINING, self._give_up, [index, said])
            timer.daemon = True
            timer.start()

    def _give_up(self, index: int, said: Mapping[str, Any]) -> None:
        """End this process if TensorFlow still waits for a worker to join: nothing else ends that."""
        if self.reductions_ready is not None or self._ended:
            return
        why = said.get("refused") or said.get("failed") or "it was killed, or is cut off"
        say(f"pipeline: worker {index} does not take part: {why}")
        if self._made_logs:
            shutil.rmtree(self._logs, ignore_errors=True)
        with suppress(OSError):
            self._session.remove_empty_folders()
        os._exit(2 if "refused" in said else 1)

    @contextmanager
    def as_worker_error(self) -> Iterator[None]:
        """Raise an error of one line in place of TensorFlow's if another worker is its cause, or refuses its data."""
        try:
            yield
        except Exception as error:
            text = f"{error} {error.__cause__}"
            if self._server is None or not re.search(r"/task:[1-9]|Collective ops is aborted", text):
                raise
            index, said = self._server.failed()
            if "refused" in said:
                raise ConfigError(f"worker {index}", f"refuses: {said['refused'].rstrip('.')}") from error
            number = index or next(iter(re.findall(r"task:([1-9]\d*)", text)), None)
            who = f"worker {number}" if number else "a worker"
            why = said.get("failed") or "it was killed, hangs, or is cut off"
            raise WorkerError(f"{who} does not take part any more: {why}") from error


def tell_workers(count: int | None, error: ConfigError) -> bool:
    """Tell workers that run elsewhere, of `count` in all, of a refusal; return whether the chief prints the error."""
    found = cluster.resolve(count, os.environ)
    if found is None or found.started:
        return False
    if found.is_chief:
        rendezvous.Server(found).dismiss(error)
        return False
    return rendezvous.Client(found).refuse(error)


def _as_json(start: Checkpoint | Fork | None) -> dict[str, Any] | None:
    if start is None:
        return None
    at = start.checkpoint if isinstance(start, Fork) else start
    place = {"folder": str(at.folder.absolute().parent), "update": at.update}
    if not isinstance(start, Fork):
        return place
    return {**place, "fork": [start.run_id, str(start.run_dir), start.weights_only, start.own_rate]}
