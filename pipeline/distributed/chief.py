"""The other workers of a run, as its chief has them: started, told with what to begin, watched, ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.fork import Fork
from pipeline.common import imports
from pipeline.common.errors import ConfigError, RunError, say
from pipeline.config import cluster
from pipeline.config import validate as configuration
from pipeline.config.cluster import Cluster
from pipeline.config.compose import RunFolders
from pipeline.config.schema import Config
from pipeline.config.sizes import Batching
from pipeline.distributed import rendezvous
from pipeline.distributed.worker import TRAIN
from pipeline.trust import gate

if TYPE_CHECKING:  # importing it takes seconds
    import tensorflow as tf

JOINING = 20.0  # seconds in which TensorFlow sees by itself that a worker is gone, once all have joined
SECONDS = 10.0  # for a worker to end, once the chief has


class WorkerError(RunError):
    """A worker is gone, or has failed; the message is one line."""


class Others:
    """The other workers, as the chief has them.

    Args:
        workers: of the run, as the chief sees them; None where it is alone.
        config: checked, as each worker has composed it.

    Raises:
        ConfigError: the chief's port is taken.
    """

    def __init__(self, workers: Cluster | None, config: DictConfig):
        self.cluster, self._composed = workers, deepcopy(config)
        self._chief = None if workers is None else rendezvous.Chief(workers)
        self._processes: list[subprocess.Popen[str]] = []
        self._made = self._ended = False
        self.arrived: tf.Variable | None = None  # counts the sums that the chief had ready for the others, once there

    def __enter__(self) -> Others:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended = True
        if isinstance(error, ConfigError):
            self.refuse(error)
        if self._chief is not None:
            self._chief.close()
        for process in self._processes:
            try:
                process.wait(SECONDS if error is None else 1.0)
            except subprocess.TimeoutExpired:  # it hangs
                process.kill()
                process.wait()
        if isinstance(error, ConfigError) and self._made:
            shutil.rmtree(self._logs, ignore_errors=True)  # nothing was created

    def start(self, config: DictConfig, run_dir: Path, task: str = TRAIN) -> None:
        """Start them on this machine, where nothing else does; what each prints is in RUN_DIR/workers.

        Each calls `task`, a dotted name, as `worker.take_part` does.
        """
        if self.cluster is None or not self.cluster.started:
            return
        self._logs = run_dir.absolute() / "workers"
        # What refers to Hydra is known here alone. JSON would make texts of the labels in training.class_weight.
        plain = OmegaConf.to_yaml(OmegaConf.create(configuration.plain(config)))
        composed: Any = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(plain))
        self._composed = composed
        self._made = not self._logs.exists()
        self._logs.mkdir(exist_ok=True)
        for index in range(1, len(self.cluster.addresses)):
            with (self._logs / f"{index}.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "pipeline.distributed.worker"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": imports.path_of_processes()},
                    text=True,
                    start_new_session=True,  # Ctrl-C is for this process, which ends the others
                )
            self._processes.append(process)
            given = {
                "addresses": self.cluster.addresses,
                "index": index,
                "config": plain,
                "task": task,
                "gate": _gate(),
            }
            assert process.stdin is not None
            with suppress(OSError), process.stdin as pipe:  # it may have ended, which is seen later
                pipe.write(json.dumps(given) + "\n")

    def gather(self, config: DictConfig, run_dir: Path, start: Checkpoint | Fork | None) -> None:
        """Wait until all are there, and tell them with what the run begins.

        Raises:
            ConfigError: one refuses its config, or has another one, or did not come.
        """
        if self._chief is None:
            return
        composed, now = (configuration.leaves(configuration.plain(each)) for each in (self._composed, config))
        changes = {key: value for key, value in now.items() if key not in composed or composed[key] != value}
        gone = [key for key in composed if key not in now]
        answer = {"run_dir": str(run_dir.absolute()), "changes": changes, "gone": gone, "start": _as_json(start)}
        self._chief.gather(rendezvous.statement(self._composed), answer, self._check_processes)
        self._chief.watch(lambda: 0 if self.arrived is None else int(self.arrived.numpy()), self._lost)

    def _check_processes(self) -> None:
        for index, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                log = self._logs / f"{index}.log"
                printed = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
                last = next((line for line in reversed(printed) if line.strip()), "it has said nothing")
                raise WorkerError(f"worker {index} ended with status {process.returncode} before it began: {last}")

    def refuse(self, error: ConfigError) -> None:
        """Let those who wait know that there will be no run."""
        if self._chief is not None and self.cluster is not None and not self.cluster.started:
            self._chief.refuse(error)

    def dismiss(self) -> None:
        """Let those who wait know that the run has finished."""
        if self._chief is not None and self.cluster is not None and not self.cluster.started:
            self._chief.finished()

    def _lost(self, index: int, said: Mapping[str, Any]) -> None:
        """End a worker that hangs, so that TensorFlow sees it; later this process, if it still waits to be joined."""
        if self._processes and "late" in said:
            self._processes[index - 1].kill()
        if self.arrived is None:
            timer = threading.Timer(JOINING, self._give_up, [index, said])
            timer.daemon = True
            timer.start()

    def _give_up(self, index: int, said: Mapping[str, Any]) -> None:
        """End where TensorFlow waits for a worker that does not come, which nothing else ends."""
        if self.arrived is not None or self._ended:
            return
        why = said.get("refused") or said.get("failed") or "it was killed, or is cut off"
        say(f"pipeline: worker {index} does not take part: {why}")
        self._take_back()
        os._exit(2 if "refused" in said else 1)

    def _take_back(self) -> None:
        if self._made:
            shutil.rmtree(self._logs, ignore_errors=True)
        with suppress(OSError):
            RunFolders.take_back()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Raise what the chief runs into where another worker is gone or has failed as one line that says so.

        Raises:
            WorkerError: one is gone, or has failed.
            ConfigError: one refuses what only it knows of, such as its data.
        """
        try:
            yield
        except Exception as error:
            text = f"{error} {error.__cause__}"
            if self._chief is None or not re.search(r"/task:[1-9]|Collective ops is aborted", text):
                raise
            index, said = self._chief.failed()
            if "refused" in said:
                raise ConfigError(f"worker {index}", f"refuses: {said['refused'].rstrip('.')}") from error
            found = re.search(r"task:([1-9]\d*)", text)
            number = index or (found and found[1])
            who = f"worker {number}" if number else "a worker"
            why = said.get("failed") or "it was killed, hangs, or is cut off"
            raise WorkerError(f"{who} does not take part any more: {why}") from error


def checked(config: DictConfig, overrides: Sequence[str]) -> Batching:
    """Return how a checked config cuts its effective batch; let the other workers know where it is refused."""
    try:
        return configuration.check(config, overrides)
    except ConfigError as error:
        if tell(config, error):
            raise SystemExit(2) from None
        raise


def tell(config: DictConfig, error: ConfigError) -> bool:
    """Tell the workers that were not started from here that this one refuses; return whether their chief says so."""
    try:
        cluster.settle(config, os.environ)
        found = cluster.of(config, os.environ)
        if found is None or found.started:
            return False
        if found.is_chief:
            rendezvous.Chief(found).refuse(error)
            return False
        return rendezvous.Member(found).refuse(error)
    except Exception:  # the environment is what is wrong, or the config too wrong to say
        return False


def _gate() -> dict[str, Any] | None:
    """Return the gate that this process is under, as JSON takes it."""
    found = gate.in_force()
    if found is None:
        return None
    places = {name: None if (path := getattr(found, name)) is None else str(path) for name in ("run_dir", "data_dir")}
    return {**asdict(found), **places, "allowed": list(found.allowed)}


def _as_json(start: Checkpoint | Fork | None) -> dict[str, Any] | None:
    if start is None:
        return None
    at = start.checkpoint if isinstance(start, Fork) else start
    place = {"folder": str(at.folder.absolute().parent), "update": at.update}
    if not isinstance(start, Fork):
        return place
    return {**place, "fork": [start.run_id, str(start.run_dir), start.weights_only, start.own_rate]}
