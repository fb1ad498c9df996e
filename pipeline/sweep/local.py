"""Runs each job in a process on this machine, forked from one that has imported TensorFlow.

    sweep ─► forkserver of Python's `multiprocessing`, which imports `pipeline.sweep.warm` ─► each job

Importing TensorFlow takes most of the time of a small job. Without a forkserver, a job is a new process.
"""

import atexit
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
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
from omegaconf import DictConfig

from pipeline.common import nvidia, signals
from pipeline.common.errors import ConfigError, described
from pipeline.config.schema import HardwareConfig
from pipeline.sweep import gpus as gpus_of_machine
from pipeline.sweep.job_call import (
    FAILED,
    Ending,
    JobCall,
    importing_only_this_package,
    killed,
)
from pipeline.sweep.launcher import GRACE, SweepLauncher

LOST = 255  # exit status in `multiprocessing` of a job whose forkserver has died; the job may still run


class LocalLauncher(SweepLauncher):
    """Runs each job in a process on this machine, `hardware.parallel_jobs` at once."""

    def __init__(self, timeout_min: int, **unknown: Any):
        self.timeout_min, self._unknown = (
            timeout_min,
            unknown,
        )  # time limit of a job in minutes
        # On other systems than Linux, libraries may not work in a forked process.
        self._methods = (
            ["forkserver", "spawn"] if sys.platform == "linux" else ["spawn"]
        )

    def setup(self, *, config: DictConfig, **given: Any) -> None:
        for key, value in self._unknown.items():
            raise ConfigError(
                f"hydra.launcher.{key}",
                "must be a parameter of this launcher",
                value,
                ["timeout_min"],
            )
        if (
            type(self.timeout_min) is not int or self.timeout_min < 1
        ):  # a bool is an int too
            raise ConfigError(
                "hydra.launcher.timeout_min", "must be at least 1", self.timeout_min
            )
        super().setup(config=config, **given)

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        try:
            return super().launch(job_overrides, initial_job_idx)
        except BaseException:
            for (
                process
            ) in psutil.Process().children():  # it may still be importing TensorFlow
                with contextlib.suppress(psutil.Error):
                    if "multiprocessing.forkserver" in " ".join(process.cmdline()):
                        process.kill()
            raise

    def _slots(self, hardware: Sequence[HardwareConfig]) -> list[list[str]]:
        slots = gpus_of_machine.slots(hardware, self.config.hardware.parallel_jobs)
        if "forkserver" in self._methods:
            multiprocessing.set_forkserver_preload(["pipeline.sweep.warm"])
            with importing_only_this_package():
                forkserver.ensure_running()  # imports TensorFlow while this process imports MLflow
        return slots

    def _job(self, call: JobCall, gpus: list[str]) -> "LocalJob":
        # TensorFlow reads some variables at import, so a job that sets variables is not forked.
        sets = any(
            override.lstrip("+").startswith("hydra.job.env_set")
            for override in call.overrides
        )
        methods = ["spawn"] if sets or call.config.hydra.job.env_set else self._methods
        log = Path(call.config.hydra.sweep.dir) / str(call.number) / "job.log"
        job = LocalJob(
            call, gpus, log, self.timeout_min, methods, self.config.tracking.patience
        )
        job.shared = self.config.hardware.jobs_per_gpu > 1
        return job

    def _ask_to_end(self, running: Sequence["LocalJob"], late: bool) -> None:
        for job in running:
            job.end(late)


class LocalJob:
    """A job in a process of its own, with a `limit` in minutes; a start method that fails leaves `methods`."""

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
        self._call, self._gpus, self._log, self._limit, self._methods = (
            call,
            gpus,
            log,
            limit,
            methods,
        )
        self._ours, self._theirs = multiprocessing.Pipe()
        self._process: Any = None  # has a `pid` once it has started
        self._ending: Ending | None = None
        self._overdue = self._asked = False
        self._grace = GRACE + patience

    def start(self) -> None:
        """Start the process, then send it the job; if interrupted in between, the process ends by itself."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._start_process()
            self.deadline = time.monotonic() + 60 * self._limit
            self._theirs.close()
            with contextlib.suppress(OSError):  # it has died; see `ending`
                self._ours.send_bytes(cloudpickle.dumps(self._call))
        except BaseException:
            self._ours.close()
            raise

    def _start_process(self) -> None:
        method = multiprocessing.get_start_method(allow_none=True)
        # Set before TensorFlow looks for GPUs.
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(self._gpus)}
        arguments = (self._theirs, str(self._log), variables, self.shared, method)
        context: Any = multiprocessing.get_context(self._methods[0])
        self._process = context.Process(
            target=_main, args=arguments, name=f"job {self._call.number}"
        )
        try:
            with importing_only_this_package():
                self._process.start()
        except (
            EOFError,
            OSError,
        ):  # the forkserver failed to import, or may not be forked
            if len(self._methods) == 1:
                raise
            del self._methods[0]
            self._start_process()

    def ending(self) -> Ending | None:
        """Return how the job ended; None until its process has ended and so released its GPUs."""
        try:
            while not self._ours.closed and self._ours.poll():
                self._ending = self._ours.recv()
        except (EOFError, OSError):
            self._ours.close()
        if getattr(self._process, "pid", None) is None:
            return Ending("interrupted")
        status = self._process.exitcode
        if status is None or (status == LOST and not self._ours.closed):
            if time.monotonic() > self.deadline:
                self.end(late=self._overdue)
                self._overdue, self.deadline = True, time.monotonic() + self._grace
            return None
        self._ours.close()
        if self._ending is not None:
            return self._ending
        how = f"ended with status {status}"
        if self._overdue:
            how = f"killed at its time limit of {self._limit} min"
        elif (number := -status if status < 0 else status - 128) in set(
            signal.Signals
        ):  # a shell adds 128
            how = f"killed by {signal.Signals(number).name}"
        return killed(
            how,
            self._log.read_text(encoding="utf-8", errors="replace")
            if self._log.exists()
            else "",
        )

    def end(self, late: bool) -> None:
        """Ask the job to end, once; kill it if it is `late`."""
        if (pid := getattr(self._process, "pid", None)) and (
            late or not self._asked
        ):  # a second SIGTERM would kill
            self._asked = True
            with contextlib.suppress(OSError):  # it has already ended
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)


def _main(
    parent: connection.Connection,
    log: str,
    variables: dict[str, str],
    shared: bool,
    method: str | None,
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    with open(log, "ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.set_start_method(
        method, force=True
    )  # for the job's own processes, as without a sweep
    try:
        call = parent.recv_bytes()
    except EOFError:
        return
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    nvidia.lock(nvidia.visible(), shared=shared)
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
        atexit._run_exitfuncs()  # a forked process does not call them
    with contextlib.suppress(OSError):  # the sweep was killed
        parent.send(ending)


def _end_with(sweep: connection.Connection) -> None:
    """End this job, as SIGTERM does, when the sweep is gone, whose process alone has the other end of the pipe."""
    with contextlib.suppress(OSError):
        sweep.poll(None)
    os.kill(os.getpid(), signal.SIGTERM)
