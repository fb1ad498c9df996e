"""Runs each job in a process on this machine.

    sweep ─► forkserver of `multiprocessing`, which imports `sweep.warm` ─► jobs

On Linux, jobs are forked from a forkserver that has imported TensorFlow, since the
import takes most of the time of a small job. Elsewhere, each job starts a new
Python interpreter.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from omegaconf import DictConfig

from pipeline.common.errors import ConfigError
from pipeline.config.schema import HardwareConfig
from pipeline.sweep import forkserver_internals, gpus, job_process
from pipeline.sweep.ending import (
    INTERRUPTED,
    Ending,
    interrupted_before_start,
    without_result,
)
from pipeline.sweep.job_batch import INTERRUPTION_GRACE
from pipeline.sweep.job_task import JobTask, importing_only_this_package
from pipeline.sweep.launcher import SweepLauncher
from pipeline.sweep.running_sweep import RunningSweep

_SIGNALS = frozenset(signal.Signals)


class LocalLauncher(SweepLauncher):
    """Runs each job in a process on this machine, `hardware.parallel_jobs` at once.

    Args:
        timeout_min: time limit of a job, in minutes.
    """

    def __init__(self, timeout_min: int, **unknown: Any):
        self.timeout_min = timeout_min
        self._unknown = unknown
        # Start methods of `multiprocessing`, in order of preference. A method that does
        # not work on this machine is removed, for all batches. Only Linux uses the
        # forkserver: on other systems, libraries may not work in a forked process.
        self._methods = ["spawn"]
        if sys.platform == "linux":
            self._methods = ["forkserver", "spawn"]

    def setup(self, *, config: DictConfig, **context: Any) -> None:
        """Check the launcher's parameters, then set up the launcher.

        Raises:
            ConfigError: a parameter is unknown, or `timeout_min` is not a positive
                integer.
        """
        for key, value in self._unknown.items():
            raise ConfigError(
                f"hydra.launcher.{key}",
                "must be a parameter of this launcher",
                value,
                ["timeout_min"],
            )
        # `type` and not `isinstance`, since a bool is an int.
        if type(self.timeout_min) is not int or self.timeout_min < 1:
            raise ConfigError(
                "hydra.launcher.timeout_min", "must be at least 1", self.timeout_min
            )
        super().setup(config=config, **context)

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        """Run the jobs. If an exception is raised, kill the forkserver."""
        try:
            return super().launch(job_overrides, initial_job_idx)
        except BaseException:
            forkserver_internals.kill()  # it may still be importing TensorFlow
            raise

    def _slots(self, hardware_of_jobs: Sequence[HardwareConfig]) -> list[list[str]]:
        return gpus.slots(hardware_of_jobs, self.config.hardware.parallel_jobs)

    def _prepare(self) -> None:
        """Start the forkserver.

        It imports TensorFlow while this process imports MLflow.
        """
        if "forkserver" in self._methods:
            with importing_only_this_package():
                forkserver_internals.start("pipeline.sweep.warm")

    def _backend(
        self, sweep: RunningSweep, hardware_of_jobs: Sequence[HardwareConfig]
    ) -> "_LocalProcesses":
        return _LocalProcesses(
            timeout_min=self.timeout_min,
            methods=self._methods,
            patience=self.config.tracking.patience,
            shares_gpus=self.config.hardware.jobs_per_gpu > 1,
        )


@dataclass
class _LocalProcesses:
    """The backend that runs each job in a process. For its fields, see `LocalJob`."""

    timeout_min: int
    methods: list[str]
    patience: float
    shares_gpus: bool
    interval: float = 0.1  # seconds between two polls

    def job(self, task: JobTask, gpus: list[str]) -> "LocalJob":
        log = Path(task.config.hydra.sweep.dir) / str(task.number) / "job.log"
        methods = self.methods
        if _sets_variables(task):
            methods = ["spawn"]
        return LocalJob(
            task, gpus, log, self.timeout_min, methods, self.patience, self.shares_gpus
        )

    def poll(self) -> None:
        """Do nothing: each job polls its own process."""

    def stop(self, running: Sequence["LocalJob"], *, kill: bool) -> None:
        for job in running:
            if kill:
                job.kill()
            else:
                job.interrupt()


def _sets_variables(task: JobTask) -> bool:
    """Return whether the job sets environment variables with `hydra.job.env_set`.

    Such a job is not forked, since TensorFlow reads some variables when it is imported.
    """
    for override in task.overrides:
        if override.lstrip("+").startswith("hydra.job.env_set"):
            return True
    return bool(task.config.hydra.job.env_set)


class LocalJob:
    """A job in a process of its own.

    Args:
        task: the job.
        gpus: the GPUs that it uses.
        log: the file for its output.
        timeout_min: time limit in minutes.
        methods: start methods in order of preference. A method that fails is removed
            from this list.
        patience: seconds that an interrupted job may wait for the store.
        shares_gpus: whether other jobs may use the same GPUs.
    """

    def __init__(
        self,
        task: JobTask,
        gpus: list[str],
        log: Path,
        timeout_min: int,
        methods: list[str],
        patience: float = 0,
        shares_gpus: bool = False,
    ):
        self._task = task
        self._gpus = gpus
        self._log = log
        self._timeout_min = timeout_min
        self._methods = methods
        self._grace = INTERRUPTION_GRACE + patience
        self._shares_gpus = shares_gpus

        self._pipe, self._pipe_of_process = multiprocessing.Pipe()
        self._process: Any = None
        self._ending: Ending | None = None  # as the process has sent it
        # The time at which the job is interrupted, or killed if it is overdue, by
        # `time.monotonic`.
        self.deadline = float("inf")
        self._is_overdue = False  # whether the job has reached its time limit
        self._was_interrupted = False

    @property
    def _pid(self) -> int | None:
        """The ID of the process, or None if it has not started."""
        return getattr(self._process, "pid", None)

    def start(self) -> None:
        """Start the process, then send the job to the process.

        If the start is interrupted before the job is sent, the pipe is closed and the
        process ends by itself.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._start_process()
            self.deadline = time.monotonic() + 60 * self._timeout_min
            self._pipe_of_process.close()
            # Ignore a process that has already died: `poll` detects it.
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(cloudpickle.dumps(self._task))
        except BaseException:
            self._pipe.close()
            raise

    def _start_process(self) -> None:
        settings = job_process.ProcessSettings(
            log=self._log,
            # The job's process sets CUDA_VISIBLE_DEVICES before TensorFlow looks for
            # GPUs.
            variables={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(self._gpus)},
            shares_gpus=self._shares_gpus,
            start_method=multiprocessing.get_start_method(allow_none=True),
        )
        while True:
            context: Any = multiprocessing.get_context(self._methods[0])
            self._process = context.Process(
                target=job_process.main,
                args=(self._pipe_of_process, settings),
                name=f"job {self._task.number}",
            )
            try:
                with importing_only_this_package():
                    self._process.start()
                return
            except (EOFError, OSError):
                # Try the next start method if the forkserver could not import
                # everything or cannot fork.
                if len(self._methods) == 1:
                    raise
                del self._methods[0]

    def poll(self) -> Ending | None:
        """Return how the job ended, or None while its process runs.

        A job that exceeds its time limit is interrupted, and later killed.
        """
        self._receive()
        if self._pid is None:
            return interrupted_before_start()

        status = self._process.exitcode
        if self._is_running(status):
            self._enforce_time_limit()
            return None

        self._pipe.close()
        if self._ending is not None:
            return self._ending
        output = ""
        if self._log.exists():
            output = self._log.read_text(encoding="utf-8", errors="replace")
        return without_result(self._cause(status), output)

    def interrupt(self) -> None:
        """Send SIGTERM, at the first call only.

        A second SIGTERM would kill the process before it has closed its run.
        """
        if self._pid is not None and not self._was_interrupted:
            self._was_interrupted = True
            self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def _receive(self) -> None:
        """Read the ending if it was sent; close the pipe if the job has closed it."""
        try:
            while not self._pipe.closed and self._pipe.poll():
                self._ending = self._pipe.recv()
        except (EOFError, OSError):
            self._pipe.close()

    def _is_running(self, status: int | None) -> bool:
        """Return whether the process runs, given its `exitcode`."""
        if status == forkserver_internals.UNKNOWN_STATUS:
            # The forkserver has died. The process closes the pipe when it ends.
            return not self._pipe.closed
        return status is None

    def _enforce_time_limit(self) -> None:
        """Interrupt the job at its deadline, and kill it when its grace is over."""
        if time.monotonic() <= self.deadline:
            return
        if self._is_overdue:
            self.kill()
        else:
            self.interrupt()
        self._is_overdue = True
        self.deadline = time.monotonic() + self._grace

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it has been started."""
        pid = self._pid
        if pid is not None:
            with contextlib.suppress(OSError):  # it has already ended
                os.kill(pid, number)

    def _cause(self, status: int) -> str:
        """Return the cause of the process's end, given its exit status."""
        if self._is_overdue:
            return f"killed at its time limit of {self._timeout_min} min"
        if status < 0:
            number = -status
        else:
            number = status - 128  # the shell's convention for a signal
        if number == signal.SIGTERM and self._was_interrupted:
            return INTERRUPTED
        if number in _SIGNALS:
            return f"killed by {signal.Signals(number).name}"
        return f"ended with status {status}"
