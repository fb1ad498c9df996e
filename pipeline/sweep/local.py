"""Runs each job in a process on this machine.

    sweep ─► forkserver of `multiprocessing`, which imports `sweep.warm` ─► jobs

On Linux, jobs are forked from a forkserver that has imported TensorFlow, since the
import takes most of the time of a small job. Elsewhere each job is a new process.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import cloudpickle
from omegaconf import DictConfig

from pipeline.common import nvidia, signals
from pipeline.common.errors import ConfigError, described
from pipeline.config.schema import HardwareConfig
from pipeline.sweep import forkserver_internals
from pipeline.sweep import gpus as gpus_of_machine
from pipeline.sweep.job_call import (
    FAILED,
    Ending,
    JobCall,
    importing_only_this_package,
    killed,
)
from pipeline.sweep.launcher import GRACE, SweepLauncher

_SIGNALS = frozenset(signal.Signals)


class LocalLauncher(SweepLauncher):
    """Runs each job in a process on this machine, `hardware.parallel_jobs` at once.

    Args:
        timeout_min: time limit of a job, in minutes.
    """

    def __init__(self, timeout_min: int, **unknown: Any):
        self.timeout_min = timeout_min
        self._unknown = unknown
        # Start methods of `multiprocessing`, in order of preference. Only Linux uses
        # the forkserver: on other systems, libraries may not work in a forked process.
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

    def _slots(self, hardware: Sequence[HardwareConfig]) -> list[list[str]]:
        """Return the GPUs of each concurrent job, and start the forkserver."""
        slots = gpus_of_machine.slots(hardware, self.config.hardware.parallel_jobs)
        if "forkserver" in self._methods:
            # Start it now, so that it imports TensorFlow while this process imports
            # MLflow.
            with importing_only_this_package():
                forkserver_internals.start("pipeline.sweep.warm")
        return slots

    def _job(self, call: JobCall, gpus: list[str]) -> "LocalJob":
        log = Path(call.config.hydra.sweep.dir) / str(call.number) / "job.log"
        methods = self._methods
        if _sets_variables(call):
            methods = ["spawn"]
        patience = self.config.tracking.patience
        job = LocalJob(call, gpus, log, self.timeout_min, methods, patience)
        job.shared = self.config.hardware.jobs_per_gpu > 1
        return job

    def _ask_to_end(self, running: Sequence["LocalJob"], late: bool) -> None:
        for job in running:
            job.end(late)


def _sets_variables(call: JobCall) -> bool:
    """Return whether the job sets environment variables with `hydra.job.env_set`.

    Such a job is not forked, since TensorFlow reads some variables when it is imported.
    """
    for override in call.overrides:
        if override.lstrip("+").startswith("hydra.job.env_set"):
            return True
    return bool(call.config.hydra.job.env_set)


@dataclass(frozen=True)
class _Surroundings:
    """Settings that a job's process applies before it receives its job."""

    log: Path  # the file for standard output and standard error
    variables: dict[str, str]  # the environment variables
    shares_gpus: bool  # whether other jobs may use the same GPUs
    start_method: str | None  # `multiprocessing` start method for the job's processes


class LocalJob:
    """A job in a process of its own.

    Args:
        call: the job.
        gpus: the GPUs that it uses.
        log: the file for its output.
        limit: time limit in minutes.
        methods: start methods in order of preference. A method that fails is removed
            from this list.
        patience: seconds that an interrupted job may wait for the store.
    """

    shared = False  # whether other jobs may use the same GPUs

    def __init__(
        self,
        call: JobCall,
        gpus: list[str],
        log: Path,
        limit: int,
        methods: list[str],
        patience: float = 0,
    ):
        self.deadline = float("inf")  # by `time.monotonic`, in seconds
        self._call = call
        self._gpus = gpus
        self._log = log
        self._limit = limit
        self._methods = methods
        self._grace = GRACE + patience

        self._pipe, self._pipe_of_job = multiprocessing.Pipe()
        self._process: Any = None
        self._ending: Ending | None = None
        self._is_overdue = False
        self._was_asked_to_end = False

    @property
    def _pid(self) -> int | None:
        """Return the ID of the process, or None if it has not started."""
        return getattr(self._process, "pid", None)

    def start(self) -> None:
        """Start the process, then send the job to the process.

        If the call is interrupted before the job is sent, the pipe is closed and the
        process ends by itself.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._start_process()
            self.deadline = time.monotonic() + 60 * self._limit
            self._pipe_of_job.close()
            # Ignore a process that has already died: `ending` detects it.
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(cloudpickle.dumps(self._call))
        except BaseException:
            self._pipe.close()
            raise

    def _start_process(self) -> None:
        surroundings = _Surroundings(
            log=self._log,
            # The job's process sets CUDA_VISIBLE_DEVICES before TensorFlow looks for
            # GPUs.
            variables={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(self._gpus)},
            shares_gpus=self.shared,
            start_method=multiprocessing.get_start_method(allow_none=True),
        )
        context: Any = multiprocessing.get_context(self._methods[0])
        self._process = context.Process(
            target=_main,
            args=(self._pipe_of_job, surroundings),
            name=f"job {self._call.number}",
        )
        try:
            with importing_only_this_package():
                self._process.start()
        except (EOFError, OSError):
            # Try the next start method if the forkserver could not import everything or
            # cannot fork.
            if len(self._methods) == 1:
                raise
            del self._methods[0]
            self._start_process()

    def ending(self) -> Ending | None:
        """Return how the job ended, or None while its process runs and uses its GPUs.

        A job that exceeds its time limit is asked to end, and later killed.
        """
        self._receive()
        if self._pid is None:
            return Ending("interrupted")

        status = self._process.exitcode
        lost = status == forkserver_internals.LOST and not self._pipe.closed
        if status is None or lost:
            if time.monotonic() > self.deadline:
                self.end(late=self._is_overdue)
                self._is_overdue = True
                self.deadline = time.monotonic() + self._grace
            return None

        self._pipe.close()
        if self._ending is not None:
            return self._ending
        printed = ""
        if self._log.exists():
            printed = self._log.read_text(encoding="utf-8", errors="replace")
        return killed(self._how_it_ended(status), printed)

    def end(self, late: bool) -> None:
        """Send SIGTERM at the first call, or SIGKILL if `late`."""
        pid = self._pid
        if pid is None:
            return
        # A second SIGTERM would kill the process before it has closed its run.
        if self._was_asked_to_end and not late:
            return
        self._was_asked_to_end = True
        number = signal.SIGTERM
        if late:
            number = signal.SIGKILL
        with contextlib.suppress(OSError):  # it has already ended
            os.kill(pid, number)

    def _receive(self) -> None:
        """Read the ending if the job has sent it. Close the pipe if the job has."""
        try:
            while not self._pipe.closed and self._pipe.poll():
                self._ending = self._pipe.recv()
        except (EOFError, OSError):
            self._pipe.close()

    def _how_it_ended(self, status: int) -> str:
        """Return how a process with this exit status ended, for an `Ending`."""
        if self._is_overdue:
            return f"killed at its time limit of {self._limit} min"
        if status < 0:
            number = -status
        else:
            number = status - 128  # the shell's convention for a signal
        if number in _SIGNALS:
            return f"killed by {signal.Signals(number).name}"
        return f"ended with status {status}"


def _main(sweep: connection.Connection, surroundings: _Surroundings) -> None:
    """Run the job that is received from `sweep`, and send back its `Ending`."""
    _settle_in(surroundings)
    try:
        call = sweep.recv_bytes()
    except EOFError:
        return

    threading.Thread(target=_end_with, args=[sweep], daemon=True).start()
    nvidia.lock(nvidia.visible(), shared=surroundings.shares_gpus)
    try:
        ending = pickle.loads(call)()
    except Exception as error:
        traceback.print_exc()
        ending = Ending(FAILED, reason=described(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except signals.Terminated:
        sys.exit(128 + signal.SIGTERM)
    finally:
        forkserver_internals.call_exit_functions()
    with contextlib.suppress(OSError):  # the sweep was killed
        sweep.send(ending)


def _settle_in(surroundings: _Surroundings) -> None:
    """Prepare this process for its job.

    Start a new session, replace the environment variables, redirect standard output and
    standard error to the log, and set the start method of `multiprocessing`.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(surroundings.variables)
    with open(surroundings.log, "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.set_start_method(surroundings.start_method, force=True)


def _end_with(sweep: connection.Connection) -> None:
    """Send SIGTERM to this process when the sweep's process has ended.

    Only the sweep's process holds the other end of the pipe, which closes with it.
    """
    with contextlib.suppress(OSError):
        sweep.poll(None)
    os.kill(os.getpid(), signal.SIGTERM)
