"""The chief of several workers: it starts the others, sends them the spec, watches them and ends them."""

import json
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.fork import Fork
from pipeline.common import imports
from pipeline.common.errors import ConfigError, RunError, say
from pipeline.config import cluster, session
from pipeline.config.resolve import RunSpec
from pipeline.distributed import rendezvous, worker
from pipeline.trust import gate

JOINING = 20.0  # seconds after which TensorFlow, once all have joined, has noticed by itself that a worker is gone


class WorkerError(RunError):
    """A worker is gone, or has failed; the message is one line."""


class Chief(AbstractContextManager["Chief"]):
    """The chief's hold of the other workers of a run; a run with a single one has nothing to do here."""

    def __init__(self, spec: RunSpec):
        self._session, self._secret, self._server = session.session(), b"", None
        if spec.workers is not None:
            own = secrets.token_hex(32).encode() if spec.workers.started else None
            self._secret = own or cluster.secret(
                spec.config.hardware.secret_file, os.environ
            )
            self._server = rendezvous.Server(spec.workers, self._secret)
        self._processes: list[subprocess.Popen[str]] = []
        self._made_logs = self._ended = False
        self.reductions_ready: Any = (
            None  # the tf.Variable that counts all-reduces, once the devices are set up
        )

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._ended, self.reductions_ready = True, None
        if (
            error is None
        ):  # the workers end with this process: TensorFlow would report those that it misses before
            return
        if isinstance(error, ConfigError):
            self.dismiss(error)
        if self._server is not None:
            self._server.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.kill()  # it hangs
            process.wait()
        if isinstance(error, ConfigError) and self._made_logs:
            shutil.rmtree(self._logs, ignore_errors=True)  # nothing was created

    def start(self, spec: RunSpec, run_dir: Path, task: str = worker.TRAIN) -> None:
        """Start the workers on this machine, unless something else does; `task` is as `worker.run` has it."""
        if self._server is None or not self._server.cluster.started:
            return
        addresses = self._server.cluster.addresses
        self._logs = run_dir.absolute() / "workers"
        self._made_logs = not self._logs.exists()
        self._logs.mkdir(exist_ok=True)
        secret = {cluster.SECRET: self._secret.decode()}
        found = None if gate.in_force is None else asdict(gate.in_force)
        given = {
            "addresses": addresses,
            "rendezvous": self._server.address,
            "spec": spec.to_text(),
            "gate": found,
        }
        for index in range(1, len(addresses)):
            with (self._logs / f"{index}.log").open("ab") as log:
                process = imports.started(
                    "pipeline.distributed.worker", secret, stdout=log, stderr=log
                )
            self._processes.append(process)
            with (
                suppress(OSError),
                process.stdin as pipe,
            ):  # it may have ended, which `_check_processes` finds
                pipe.write(
                    json.dumps(
                        {**given, "index": index, "task": task}, default=os.fspath
                    )
                    + "\n"
                )

    def gather(
        self, spec: RunSpec, run_dir: Path, start: Checkpoint | Fork | None
    ) -> RunSpec:
        """Send all workers, once they are there, the spec and the start; return it with TensorFlow's addresses."""
        if self._server is None:
            return spec
        if not self._secret:
            how = "PIPELINE_SECRET or hardware.secret_file closes it"
            say(
                f"whoever reaches {self._server.address} can take part in this run and change it: {how}"
            )
        answer = {
            "run_dir": str(run_dir.absolute()),
            "spec": spec.shared_text(),
            "start": _as_json(start),
        }
        workers = self._server.gather(
            rendezvous.statement(spec), answer, self._check_processes
        )
        if reached := cluster.reachable():
            listening = f"TensorFlow listens without a password at {', '.join(workers.addresses)}"
            say(f"{listening}, and at the same ports of {', '.join(reached)}")
        self._server.watch(
            lambda: 0 if self.reductions_ready is None else self.reductions_ready,
            self._lost,
        )
        return replace(spec, workers=workers)

    def _check_processes(self) -> None:
        for index, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                printed = (
                    (self._logs / f"{index}.log")
                    .read_text(encoding="utf-8", errors="replace")
                    .split("\n")
                )
                last = next(
                    (line for line in reversed(printed) if line.strip()),
                    "it has said nothing",
                )
                raise WorkerError(
                    f"worker {index} ended with status {process.returncode} before it began: {last}"
                )

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
        why = (
            said.get("refused") or said.get("failed") or "it was killed, or is cut off"
        )
        say(f"pipeline: worker {index} does not take part: {why}")
        if self._made_logs:
            shutil.rmtree(self._logs, ignore_errors=True)
        self._session.remove_empty_folders()
        os._exit(2 if "refused" in said else 1)

    @contextmanager
    def as_worker_error(self) -> Iterator[None]:
        """Raise an error of one line in place of TensorFlow's if another worker is gone, or refuses its data."""
        try:
            yield
        except Exception as error:
            own = isinstance(error, ConfigError) and error.__cause__ is None
            index, said = (
                (0, {}) if own or self._server is None else self._server.lost()
            )
            if not index:
                raise
            if "refused" in said:
                raise ConfigError(
                    f"worker {index}", f"refuses: {said['refused'].rstrip('.')}"
                ) from error
            why = said.get("failed") or "it was killed, hangs, or is cut off"
            raise WorkerError(
                f"worker {index} does not take part any more: {why}"
            ) from error


def tell_workers(hardware: DictConfig, error: ConfigError) -> bool:
    """Tell workers that run elsewhere of a refusal; return whether the chief prints the error."""
    found = cluster.workers_of_run(hardware.workers, os.environ)
    if found is None or found.started:
        return False
    secret = cluster.secret(hardware.secret_file, os.environ)
    if found.is_chief:
        rendezvous.Server(found, secret).dismiss(error)
        return False
    return rendezvous.Client(found, secret).refuse(error)


def _as_json(start: Checkpoint | Fork | None) -> dict[str, Any] | None:
    if start is None:
        return None
    own = (
        [start.run_id, str(start.run_dir), start.weights_only, start.own_rate]
        if isinstance(start, Fork)
        else None
    )
    at = start.checkpoint if isinstance(start, Fork) else start
    return {
        "folder": str(at.folder.absolute().parent),
        "update": at.update,
        "fork": own,
    }
