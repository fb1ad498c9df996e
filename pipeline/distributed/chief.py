"""The chief of several workers: starts, configures, monitors and ends the others."""

import json
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.fork import Beginning, Fork, ModelStart
from pipeline.common import imports
from pipeline.common.errors import ConfigError, RunError, say
from pipeline.config import cluster, session
from pipeline.config.resolve import RunSpec
from pipeline.distributed import rendezvous, worker
from pipeline.distributed.heartbeats import LostWorker
from pipeline.trust import gate

# If a worker is lost before all workers have joined, this process exits after this many
# seconds. Once all have joined, TensorFlow itself detects the loss within this time.
JOINING = 20.0


class WorkerError(RunError):
    """Another worker has died or failed; the message is one line."""


class Chief(AbstractContextManager["Chief"]):
    """A context manager with which the chief controls the other workers of a run.

    In a run with one worker, its methods have no effect.

    Attributes:
        reductions_ready: the `tf.Variable` that counts all-reduces, or None before the
            devices are set up.
    """

    def __init__(self, spec: RunSpec):
        self.reductions_ready: Any = None
        self._session = session.session()
        self._secret = b""
        self._server: rendezvous.Server | None = None
        self._processes: list[subprocess.Popen[str]] = []
        self._logs = Path()  # the folder of the workers' logs, set by `start`
        self._made_logs = False
        self._ended = False
        if spec.workers is not None:
            if spec.workers.started:
                self._secret = secrets.token_hex(32).encode()
            else:
                file = spec.config.hardware.secret_file
                self._secret = cluster.secret(file, os.environ)
            self._server = rendezvous.Server(spec.workers, self._secret)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._ended = True
        self.reductions_ready = None
        # Without an error, the workers end with this process. If they ended earlier,
        # TensorFlow would miss them and report a crash.
        if error is None:
            return
        if isinstance(error, ConfigError):
            self.dismiss(error)
        if self._server is not None:
            self._server.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.kill()  # has no effect on a process that has ended
            process.wait()
        if isinstance(error, ConfigError):
            self._remove_logs()  # the run was not created

    def start(self, spec: RunSpec, run_dir: Path, task: str = worker.TRAIN) -> None:
        """Start the other workers on this machine, if the chief has to start them.

        Args:
            spec: the spec of the run.
            run_dir: the directory of the run; the workers' logs are in its folder
                `workers`.
            task: dotted name of the function that the workers call; see `worker.run`.
        """
        if self._server is None or not self._server.cluster.started:
            return
        self._logs = run_dir.absolute() / "workers"
        self._made_logs = not self._logs.exists()
        self._logs.mkdir(exist_ok=True)

        addresses = self._server.cluster.addresses
        gate_in_force = None
        if gate.in_force is not None:
            gate_in_force = asdict(gate.in_force)
        message = {
            "addresses": addresses,
            "rendezvous": self._server.address,
            "spec": spec.to_text(),
            "gate": gate_in_force,
            "task": task,
        }
        for index in range(1, len(addresses)):
            self._start_worker(index, {**message, "index": index})

    def _start_worker(self, index: int, message: dict[str, Any]) -> None:
        variables = {cluster.SECRET: self._secret.decode()}
        with (self._logs / f"{index}.log").open("ab") as log:
            process = imports.started(
                "pipeline.distributed.worker", variables, stdout=log, stderr=log
            )
        self._processes.append(process)
        # Ignore a process that has already ended: `_check_processes` detects it.
        with suppress(OSError), process.stdin as pipe:
            pipe.write(json.dumps(message, default=os.fspath) + "\n")

    def gather(
        self, spec: RunSpec, run_dir: Path, start: Checkpoint | Beginning | None
    ) -> RunSpec:
        """Wait for all workers, send them the spec and the start, and monitor them.

        Args:
            spec: the spec of the run.
            run_dir: the directory of the run.
            start: the checkpoint from which training starts, or None to start anew.

        Returns:
            The spec with the addresses at which TensorFlow listens.

        Raises:
            ConfigError: a worker is missing, rejects its config, or has a different
                config.
            WorkerError: the process of a worker has ended.
        """
        if self._server is None:
            return spec
        if not self._secret:
            how = "PIPELINE_SECRET or hardware.secret_file prevents that"
            say(
                f"anyone who can reach {self._server.address} can take part in this "
                f"run and change it: {how}"
            )
        answer = {
            "run_dir": str(run_dir.absolute()),
            "spec": spec.shared_text(),
            "start": _start_as_json(start),
        }
        workers = self._server.gather(
            rendezvous.statement(spec), answer, self._check_processes
        )
        _say_open_ports(workers)
        self._server.watch(self._count_reductions, self._on_lost)
        return replace(spec, workers=workers)

    def dismiss(self, error: ConfigError | None = None) -> None:
        """Notify waiting workers that this process will not train.

        Workers that the chief has started are not notified.

        Args:
            error: why the chief rejects the config, or None if the run has finished.
        """
        if self._server is not None and not self._server.cluster.started:
            self._server.dismiss(error)

    @contextmanager
    def as_worker_error(self) -> Iterator[None]:
        """Replace an error in the `with` block if another worker is the cause.

        TensorFlow's error would be long and would not name the cause.

        Raises:
            WorkerError: another worker has died or failed.
            ConfigError: another worker rejects its config or data.
        """
        try:
            yield
        except Exception as error:
            is_of_chief = isinstance(error, ConfigError) and error.__cause__ is None
            if is_of_chief or self._server is None:
                raise
            lost = self._server.lost()
            if lost is None:
                raise
            if lost.rejected is not None:
                rule = f"refuses to train: {lost.rejected.rstrip('.')}"
                raise ConfigError(f"worker {lost.index}", rule) from error
            reason = lost.failed or "it was killed, hangs, or is cut off"
            raise WorkerError(
                f"worker {lost.index} no longer takes part: {reason}"
            ) from error

    def _check_processes(self) -> None:
        """Raise a `WorkerError` if a started worker's process has ended."""
        for index, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                last_line = _last_line(self._logs / f"{index}.log")
                raise WorkerError(
                    f"worker {index} ended with status {process.returncode} before it "
                    f"joined the run: {last_line or 'it printed nothing'}"
                )

    def _count_reductions(self) -> Any:
        """Return the number of all-reduces for which this process was ready."""
        if self.reductions_ready is None:
            return 0
        return self.reductions_ready

    def _on_lost(self, lost: LostWorker) -> None:
        """Kill a hanging worker that the chief started: TensorFlow detects its death.

        While TensorFlow waits for workers to join, it does not detect a loss. In that
        case, end this process after `JOINING` seconds.
        """
        if self._processes and lost.late:
            self._processes[lost.index - 1].kill()
        if self.reductions_ready is None:
            timer = threading.Timer(JOINING, self._give_up, [lost])
            timer.daemon = True
            timer.start()

    def _give_up(self, lost: LostWorker) -> None:
        """End this process if TensorFlow still waits for workers to join.

        The exit status is 2 if the worker rejected its config or data, else 1.
        """
        if self.reductions_ready is not None or self._ended:
            return
        reason = lost.rejected or lost.failed or "it was killed, or is cut off"
        say(
            f"pipeline: the run ends, as worker {lost.index} has not joined it: {reason}"
        )
        self._remove_logs()
        self._session.remove_empty_folders()
        if lost.rejected is not None:
            os._exit(2)
        os._exit(1)

    def _remove_logs(self) -> None:
        if self._made_logs:
            shutil.rmtree(self._logs, ignore_errors=True)


def tell_workers(hardware: DictConfig, error: ConfigError) -> bool:
    """Notify the other workers of a cluster that this process rejects the config.

    Nothing is sent if the run has one worker, or if the chief starts the workers.

    Args:
        hardware: the `hardware` group of the config.
        error: why the config is rejected.

    Returns:
        Whether the chief, in another process, prints the error.
    """
    workers = cluster.workers_of_run(hardware.workers, os.environ)
    if workers is None or workers.started:
        return False
    secret = cluster.secret(hardware.secret_file, os.environ)
    if workers.is_chief:
        rendezvous.Server(workers, secret).dismiss(error)
        return False
    return rendezvous.Client(workers, secret).reject(error)


def _say_open_ports(workers: cluster.Cluster) -> None:
    hosts = cluster.reachable()
    if hosts:
        addresses = ", ".join(workers.addresses)
        say(
            f"TensorFlow listens without a password at {addresses}, and on the same "
            f"ports of {', '.join(hosts)}"
        )


def _last_line(log: Path) -> str:
    """Return the last non-empty line of a log, or "" if there is none."""
    text = log.read_text(encoding="utf-8", errors="replace")
    for line in reversed(text.split("\n")):
        if line.strip():
            return line
    return ""


def _start_as_json(start: Checkpoint | Beginning | None) -> dict[str, Any] | None:
    """Return the start of a run as a JSON object for `worker._start_from_json`."""
    # A run that begins with a registered model has a single worker.
    if start is None or isinstance(start, ModelStart):
        return None
    if isinstance(start, Fork):
        checkpoint = start.checkpoint
        fork = [start.run_id, str(start.run_dir), start.weights_only, start.own_rate]
    else:
        checkpoint = start
        fork = None
    return {
        "folder": str(checkpoint.folder.absolute().parent),
        "update": checkpoint.updates_done,
        "fork": fork,
    }
