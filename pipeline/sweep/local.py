"""Runs each job in a process on this machine, forked from one that has TensorFlow.

    sweep ─► forkserver of `multiprocessing`, which imports `sweep.warm` ─► jobs

Importing TensorFlow takes most of the time of a small job. Without a forkserver, a job
is a new process.
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
        # Start methods of `multiprocessing`, best first. On other systems than Linux,
        # libraries may not work in a forked process.
        self._methods = ["spawn"]
        if sys.platform == "linux":
            self._methods = ["forkserver", "spawn"]

    def setup(self, *, config: DictConfig, **context: Any) -> None:
        """Check the launcher's own parameters."""
        for key, value in self._unknown.items():
            raise ConfigError(
                f"hydra.launcher.{key}",
                "must be a parameter of this launcher",
                value,
                ["timeout_min"],
            )
        # A bool is an int, too.
        if type(self.timeout_min) is not int or self.timeout_min < 1:
            raise ConfigError(
                "hydra.launcher.timeout_min", "must be at least 1", self.timeout_min
            )
        super().setup(config=config, **context)

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        """Run the jobs; if that is interrupted, leave no forkserver behind."""
        try:
            return super().launch(job_overrides, initial_job_idx)
        except BaseException:
            forkserver_internals.kill()  # it may still be importing TensorFlow
            raise

    def _slots(self, hardware: Sequence[HardwareConfig]) -> list[list[str]]:
        slots = gpus_of_machine.slots(hardware, self.config.hardware.parallel_jobs)
        if "forkserver" in self._methods:
            # It imports TensorFlow while this process imports MLflow.
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
    """Return whether the job sets environment variables.

    TensorFlow reads some of them when it is imported, so such a job is not forked.
    """
    for override in call.overrides:
        if override.lstrip("+").startswith("hydra.job.env_set"):
            return True
    return bool(call.config.hydra.job.env_set)


@dataclass(frozen=True)
class _Surroundings:
    """What a job's process takes over before it gets its job."""

    log: Path  # standard output and standard error go there
    variables: dict[str, str]  # the environment
    shares_gpus: bool
    start_method: str | None  # of processes that the job starts


class LocalJob:
    """A job in a process of its own.

    Args:
        call: the job.
        gpus: the GPUs that it uses.
        log: the file for its output.
        limit: time limit in minutes.
        methods: start methods, best first; one that fails is removed from the list.
        patience: seconds that its run waits for the store when it is interrupted.
    """

    shared = False  # whether other jobs may use its GPUs, too

    def __init__(
        self,
        call: JobCall,
        gpus: list[str],
        log: Path,
        limit: int,
        methods: list[str],
        patience: float = 0,
    ):
        self.deadline = float("inf")  # in seconds of the monotonic clock
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
        """Return the ID of the process, None before it has started."""
        return getattr(self._process, "pid", None)

    def start(self) -> None:
        """Start the process, then send it the job.

        If this is interrupted in between, the process ends by itself.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._start_process()
            self.deadline = time.monotonic() + 60 * self._limit
            self._pipe_of_job.close()
            # A process that has died already is found by `ending`.
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(cloudpickle.dumps(self._call))
        except BaseException:
            self._pipe.close()
            raise

    def _start_process(self) -> None:
        surroundings = _Surroundings(
            log=self._log,
            # Set before TensorFlow looks for GPUs.
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
            # The forkserver could not import everything, or it may not be forked.
            if len(self._methods) == 1:
                raise
            del self._methods[0]
            self._start_process()

    def ending(self) -> Ending | None:
        """Return how the job ended.

        Return None until its process has ended, and has thus released its GPUs.
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
        """Ask the job to end, once; kill it if it is `late`."""
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
        """Read what the job has sent; close the pipe if the job has closed it."""
        try:
            while not self._pipe.closed and self._pipe.poll():
                self._ending = self._pipe.recv()
        except (EOFError, OSError):
            self._pipe.close()

    def _how_it_ended(self, status: int) -> str:
        if self._is_overdue:
            return f"killed at its time limit of {self._limit} min"
        if status < 0:
            number = -status
        else:
            number = status - 128  # as a shell says it
        if number in _SIGNALS:
            return f"killed by {signal.Signals(number).name}"
        return f"ended with status {status}"


def _main(sweep: connection.Connection, surroundings: _Surroundings) -> None:
    """Run the job that `sweep` sends, and send back how it ended."""
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
    """Give this process the session, the environment and the output of a job."""
    os.setsid()
    os.environ.clear()
    os.environ.update(surroundings.variables)
    with open(surroundings.log, "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.set_start_method(surroundings.start_method, force=True)


def _end_with(sweep: connection.Connection) -> None:
    """End this job, like SIGTERM, when the sweep's process is gone.

    That process alone has the other end of the pipe.
    """
    with contextlib.suppress(OSError):
        sweep.poll(None)
    os.kill(os.getpid(), signal.SIGTERM)
