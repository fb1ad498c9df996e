"""Each job in a process of its own, through submitit."""

from __future__ import annotations

import contextlib
import copy
import glob
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher import submitit_launcher
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from omegaconf import DictConfig, OmegaConf

from pipeline.errors import ConfigError
from pipeline.launching.launcher import SweepLauncher
from pipeline.sweep import parent_run

_MORE = {"max_num_timeout", "setup"}  # parameters that submitit has for this machine, beside those of its config
HELD = "PIPELINE_GPUS"  # environment variable of a job: those that it keeps for itself


class Submitting(SweepLauncher):
    """Each job in a process of its own, through submitit."""

    _EXECUTOR: str
    place: list[str] | None = None  # the GPUs of this job; None: they are not ours to choose

    def __call__(self, overrides: list[str], *more: Any) -> Any:
        sys.argv = ["pipeline", *overrides]  # for the run, which says how it was started
        # In the job's process, before TensorFlow looks for GPUs. Submitit's own way knows no GPU by its UUID.
        if self.place is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.place)
            alone_on(self.place)
        return super().__call__(overrides, *more)  # type: ignore[misc]  # the published launcher's

    def _run(self, overrides: list[str], number: int, place: list[str], current: parent_run.ParentRun) -> JobReturn:
        # What the published launcher does, but for its waiting: a second at a time, and fifteen for what a job that
        # died has not left.
        import submitit

        launcher = copy.copy(self)  # which goes to the job's process
        launcher.place = self._given(place)
        params = {**self.params, **self._more(current)}
        folder = params.pop("submitit_folder").replace("%j", f"{number}/%j")  # process numbers come again
        executor = self._executor(folder, params, overrides)
        job = executor.submit(launcher, overrides, "hydra.sweep.dir", number, str(number), Singleton.get_state())
        how = launcher._wait(job, time.monotonic(), current)
        if not job.paths.result_pickle.exists():
            lines = [line.strip() for line in (job.stderr() or "").splitlines() if line.strip()]
            raise RuntimeError(": ".join([how, *lines[-1:]]))
        # `job.result` waits for the process a second at a time.
        outcome, returned = submitit.core.utils.pickle_load(job.paths.result_pickle)
        if outcome == "error":  # with a whole traceback
            said = [line for line in returned.splitlines() if re.match(r"[\w.]+: ", line)]
            raise RuntimeError(said[-1] if said else "the process failed")
        assert isinstance(returned, JobReturn)
        return returned

    def _executor(self, folder: str, params: dict[str, Any], overrides: Sequence[str]) -> Any:
        import submitit

        timeouts = {f"{self._EXECUTOR}_{key}": params.pop(key) for key in ("max_num_timeout",) if key in params}
        executor = submitit.AutoExecutor(folder, cluster=self._EXECUTOR, **timeouts)
        shared = set(OmegaConf.structured(BaseQueueConf).keys())
        executor.update_parameters(
            **{key if key in shared else f"{self._EXECUTOR}_{key}": value for key, value in params.items()}
        )
        return executor

    def _given(self, place: list[str]) -> list[str] | None:
        return place

    def _more(self, current: parent_run.ParentRun) -> dict[str, Any]:
        """Parameters of submitit beside those of the config."""
        return {}

    def _wait(self, job: Any, submitted: float, current: parent_run.ParentRun) -> str:
        """Waits until the job is over; returns how it ended where it left no result."""
        raise NotImplementedError


class LocalLauncher(Submitting, submitit_launcher.LocalLauncher):
    """Each job a process of its own on this machine: as many at once as `hardware.parallel_jobs` says."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self._check_params()
        return super().launch(job_overrides, initial_job_idx)

    def _check_params(self) -> None:
        known = {*OmegaConf.structured(BaseQueueConf), *_MORE}
        for key, value in self.params.items():
            if key not in known:
                raise ConfigError(f"hydra.launcher.{key}", "must be a parameter of this launcher", value, sorted(known))
        for key in ("nodes", "tasks_per_node"):
            if self.params[key] != 1:
                raise ConfigError(f"hydra.launcher.{key}", "must be 1 on this machine", self.params[key])
        if self.params["timeout_min"] < 1:
            raise ConfigError("hydra.launcher.timeout_min", "must be at least 1", self.params["timeout_min"])

    def _places(self, hardware: Sequence[DictConfig]) -> list[list[str]]:
        at_once = self.config.hardware.parallel_jobs
        gpus = visible_gpus()
        size = max((max(h.gpus_per_job, h.replicas) for h in hardware if h.device.name != "cpu"), default=0)
        if not gpus or not size:
            return [[] for _ in range(at_once or 1)]
        if size > len(gpus):
            raise ConfigError("hardware.gpus_per_job", f"must be at most the {len(gpus)} GPUs of this machine", size)
        places = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]
        return places[:at_once]

    def _wait(self, job: Any, submitted: float, current: parent_run.ParentRun) -> str:
        # A job that has its result is over once its process has let go of its GPUs; without any, at once.
        while not job.done() and (self.place or not job.paths.result_pickle.exists()):
            time.sleep(0.01)
        return "the process died"

    def _end_jobs(self, current: parent_run.ParentRun, late: bool) -> None:
        import psutil

        for process in self._running():
            # Again and again: until it calls the launcher, submitit lets SIGTERM pass by.
            with contextlib.suppress(psutil.Error):  # it has ended by itself
                process.send_signal(signal.SIGKILL if late else signal.SIGTERM)

    def _running(self) -> Iterator[Any]:
        """The jobs' processes, of those that are forked and of those that are not."""
        import psutil

        for process in psutil.Process().children(recursive=True):
            if _runs(process, "submitit.core._submit"):
                yield process


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: by number or UUID."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = (gpu.strip() for gpu in listed.split(","))
        return list(itertools.takewhile(lambda gpu: gpu and not gpu.startswith("-"), names))  # as CUDA reads it
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30)
        count = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        count = len(glob.glob("/dev/nvidia[0-9]*"))
    return [str(number) for number in range(count)]


def alone_on(gpus: Sequence[str]) -> None:
    """Waits until no job of another sweep of this user is on any of `gpus`; keeps them until this process ends."""
    import fcntl

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which submitit ignores; nothing has begun
    ours = os.environ.get(HELD, "").split(",")  # where this sweep was itself started by a job
    for gpu in sorted(set(gpus) - set(ours)):  # in the same order everywhere, so that no two wait for each other
        path = Path(tempfile.gettempdir()) / f"pipeline-{os.getuid()}-gpu-{quote(gpu, safe='')}.lock"
        with contextlib.suppress(OSError):  # where no file can be written
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waits for GPU {gpu}, which a job of another sweep has", file=sys.stderr, flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.environ[HELD] = ",".join(gpus)


def _runs(process: Any, module: str) -> bool:
    try:
        return any(argument.startswith(module) for argument in process.cmdline())
    except Exception:  # it has ended
        return False
