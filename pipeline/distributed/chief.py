"""The chief of several workers: it starts, informs, watches and ends the others."""

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
from pipeline.checkpoints.fork import Fork
from pipeline.common import imports
from pipeline.common.errors import ConfigError, RunError, say
from pipeline.config import cluster, session
from pipeline.config.resolve import RunSpec
from pipeline.distributed import rendezvous, worker
from pipeline.distributed.straggler import LostWorker
from pipeline.trust import gate

# Seconds within which TensorFlow itself notices that a worker is gone, once all workers
# have joined.
JOINING = 20.0


class WorkerError(RunError):
    """A worker is gone, or has failed; the message is one line."""


class Chief(AbstractContextManager["Chief"]):
    """The chief's control of the other workers of a run, within a `with` block.

    A run with one worker has a chief too, which does nothing.

    Attributes:
        reductions_ready: the `tf.Variable` that counts all-reduces; None until the
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
            process.kill()  # it hangs
            process.wait()
        if isinstance(error, ConfigError):
            self._remove_logs()  # nothing was created

    def start(self, spec: RunSpec, run_dir: Path, task: str = worker.TRAIN) -> None:
        """Start the other workers on this machine, unless something else starts them.

        Args:
            spec: the spec of the run.
            run_dir: the directory of the run; the workers' logs are in it.
            task: dotted name of the function that they call, see `worker.run`.
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
        # If the process has ended already, `_check_processes` finds that.
        with suppress(OSError), process.stdin as pipe:
            pipe.write(json.dumps(message, default=os.fspath) + "\n")

    def gather(
        self, spec: RunSpec, run_dir: Path, start: Checkpoint | Fork | None
    ) -> RunSpec:
        """Wait for all workers, and send them the spec and the start.

        Args:
            spec: the spec of the run.
            run_dir: the directory of the run.
            start: the checkpoint that the training starts from, if there is one.

        Returns:
            The spec with TensorFlow's addresses.
        """
        if self._server is None:
            return spec
        if not self._secret:
            how = "PIPELINE_SECRET or hardware.secret_file closes it"
            say(
                f"whoever reaches {self._server.address} can take part in this run "
                f"and change it: {how}"
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
        """Tell the workers that are waiting that there will be no run.

        With an `error`, the chief rejects the config; without one, the run has
        finished.
        """
        if self._server is not None and not self._server.cluster.started:
            self._server.dismiss(error)

    @contextmanager
    def as_worker_error(self) -> Iterator[None]:
        """Replace TensorFlow's error by one line if another worker is the cause.

        Raises:
            WorkerError: another worker is gone or has failed.
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
                rule = f"refuses: {lost.rejected.rstrip('.')}"
                raise ConfigError(f"worker {lost.index}", rule) from error
            reason = lost.failed or "it was killed, hangs, or is cut off"
            raise WorkerError(
                f"worker {lost.index} does not take part any more: {reason}"
            ) from error

    def _check_processes(self) -> None:
        """Raise a `WorkerError` if a worker has ended before it began."""
        for index, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                last_line = _last_line(self._logs / f"{index}.log")
                raise WorkerError(
                    f"worker {index} ended with status {process.returncode} "
                    f"before it began: {last_line or 'it has said nothing'}"
                )

    def _count_reductions(self) -> Any:
        if self.reductions_ready is None:
            return 0
        return self.reductions_ready

    def _on_lost(self, lost: LostWorker) -> None:
        """Kill a worker that hangs, so that TensorFlow notices.

        While TensorFlow still waits for workers to join, it notices nothing. This
        process then ends itself after a while.
        """
        if self._processes and lost.late:
            self._processes[lost.index - 1].kill()
        if self.reductions_ready is None:
            timer = threading.Timer(JOINING, self._give_up, [lost])
            timer.daemon = True
            timer.start()

    def _give_up(self, lost: LostWorker) -> None:
        """End this process if TensorFlow still waits for a worker to join."""
        if self.reductions_ready is not None or self._ended:
            return
        reason = lost.rejected or lost.failed or "it was killed, or is cut off"
        say(f"pipeline: worker {lost.index} does not take part: {reason}")
        self._remove_logs()
        self._session.remove_empty_folders()
        if lost.rejected is not None:
            os._exit(2)
        os._exit(1)

    def _remove_logs(self) -> None:
        if self._made_logs:
            shutil.rmtree(self._logs, ignore_errors=True)


def tell_workers(hardware: DictConfig, error: ConfigError) -> bool:
    """Tell workers that run elsewhere that the config is rejected.

    Args:
        hardware: the `hardware` group of the config.
        error: why it is rejected.

    Returns:
        Whether the chief, another process, prints the error.
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
            f"TensorFlow listens without a password at {addresses}, "
            f"and at the same ports of {', '.join(hosts)}"
        )


def _last_line(log: Path) -> str:
    """Return the last line of a log that is not empty; "" if there is none."""
    text = log.read_text(encoding="utf-8", errors="replace")
    for line in reversed(text.split("\n")):
        if line.strip():
            return line
    return ""


def _start_as_json(start: Checkpoint | Fork | None) -> dict[str, Any] | None:
    """Return the start of a run in the form that `worker` reads."""
    if start is None:
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
