"""Each job a Slurm job, through submitit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from omegaconf import DictConfig, OmegaConf

from pipeline import config as configuration
from pipeline.errors import ConfigError
from pipeline.launching.job_call import FAILED, Ending, JobCall, importing_only_this_package
from pipeline.launching.launcher import SweepLauncher

SLURM_INTERVAL = 5.0  # seconds between two questions to Slurm, whatever the number of jobs
STEP = 0.5  # seconds between two looks for results


class SlurmLauncher(SweepLauncher):
    """Each job a Slurm job; Slurm decides how many run at once, and where.

    Args:
        params: of submitit.
    """

    def __init__(self, **params: Any):
        self.params: dict[str, Any] = {
            key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in params.items()
        }

    @property
    def name(self) -> str:
        """Name of all Slurm jobs of the sweep."""
        return f"pipeline-{self.sweep.run_id}"

    def _slots(self, hardware: Sequence[DictConfig]) -> list[list[str]]:
        if shutil.which("sbatch") is None:
            raise ConfigError("hydra/launcher", "must be one of this machine, which has no sbatch", "submitit_slurm")
        wanted = max((max(h.gpus_per_job, h.replicas) for h in hardware if h.device.name != "cpu"), default=0)
        asked = [key for key in ("gpus_per_node", "gpus_per_task", "gres") if self.params.get(key) is not None]
        if wanted and not asked and (self._has_gpus() or any(h.device.name == "gpu" for h in hardware)):
            self.params["gpus_per_node"] = wanted
        return [[] for _ in range(self.params.get("array_parallelism") or 256)]

    def _has_gpus(self) -> bool:
        """Return whether the nodes that a job may come to have GPUs to give."""
        partition = [f"--partition={self.params['partition']}"] if self.params.get("partition") else []
        answer = subprocess.run(["sinfo", "--noheader", "--format=%G", *partition], capture_output=True, text=True)
        return "gpu" in answer.stdout

    def _check(self, config: DictConfig, overrides: Sequence[str]) -> configuration.Settings:
        device = config.hardware.device
        config.hardware.device = "auto"  # the job's machine may have the GPU that this one lacks
        try:
            return super()._check(config, overrides)
        finally:
            config.hardware.device = device

    def _prepare(self) -> None:
        self._states: _SlurmStates | None = None

    def _running(self, call: JobCall, gpus: list[str]) -> SlurmJob:
        self._states = self._states or _SlurmStates(self.name)
        params = {**self.params, "name": self.name}
        return SlurmJob(call, params, self._states)

    def _wait(self, running: Sequence[SlurmJob], seconds: float) -> None:
        time.sleep(min(seconds, STEP))

    def _ask_to_end(self, running: Sequence[SlurmJob], late: bool) -> None:
        # Those that wait are gone, those that run get SIGTERM, and SIGKILL after Slurm's KillWait.
        subprocess.run(["scancel", f"--name={self.name}"], check=False)


class SlurmJob:
    """A job of submitit.

    Args:
        call: what the job is.
        params: of submitit.
        states: what Slurm says of the jobs of this sweep.
    """

    def __init__(self, call: JobCall, params: dict[str, Any], states: _SlurmStates):
        self._call, self._states = call, states
        self._params = params
        self._job: Any = None
        self._submitted = 0.0
        self._gone_since = 0.0

    def start(self) -> None:
        """Submit the job."""
        folder = self._params.pop("submitit_folder").replace("%j", f"{self._call.number}/%j")  # Slurm's numbers recur
        call = _Elsewhere(self._call, sys.path, os.environ.get("PYTHONPATH", ""))
        with importing_only_this_package():  # sbatch passes the environment on
            self._job = _executor(folder, self._params).submit(call)
        self._submitted = time.monotonic()

    def ending(self) -> Ending | None:
        """Return how the job ended; None while it waits or runs."""
        if self._job is None:
            return Ending("interrupted")
        if self._job.paths.result_pickle.exists():
            return self._result()
        state = self._states.ended(self._job.job_id, self._submitted)
        self._gone_since = self._gone_since or time.monotonic() if state else 0.0
        if not state or time.monotonic() < self._gone_since + 2 * SLURM_INTERVAL:
            return None  # a network's file system may show the file late
        how = f"killed (Slurm job {self._job.job_id}: {state})"
        lines = [line.strip() for line in (self._job.stderr() or "").splitlines() if line.strip()]
        return Ending(how, reason=": ".join([how, *lines[-1:]]))

    def _result(self) -> Ending:
        from submitit.core.utils import pickle_load

        outcome, returned = pickle_load(self._job.paths.result_pickle)  # `result` waits a second at a time
        if outcome == "error":  # with a whole traceback
            lines = [line for line in returned.splitlines() if re.match(r"[\w.]+: ", line)]
            return Ending(FAILED, reason=lines[-1] if lines else "the process failed")
        assert isinstance(returned, Ending)
        return returned


@dataclass(frozen=True)
class _Elsewhere:
    """A job on another machine, which searches the sweep's path for code."""

    call: JobCall
    path: list[str]
    variable: str  # PYTHONPATH

    def __call__(self) -> Ending:
        sys.path[:] = self.path
        os.environ["PYTHONPATH"] = self.variable
        os.environ.pop("PYTHONSAFEPATH", None)
        return self.call()


def _executor(folder: str, params: dict[str, Any]) -> Any:
    import submitit

    retries = {"slurm_max_num_timeout": params.pop("max_num_timeout")}
    executor = submitit.AutoExecutor(folder, cluster="slurm", **retries)
    shared = set(OmegaConf.structured(BaseQueueConf).keys())
    executor.update_parameters(**{key if key in shared else f"slurm_{key}": value for key, value in params.items()})
    return executor


class _SlurmStates:
    """What Slurm says of the jobs of one name, asked once for all of them.

    `squeue` answers on every cluster; submitit asks `sacct`, which needs a database, and where there is none it
    waits for a job that died for ever.
    """

    _ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")

    def __init__(self, name: str):
        self._name = name
        self._asked = self._answered = float("-inf")
        self._states: dict[str, str] = {}

    def ended(self, job_id: str, submitted: float) -> str:
        """Return the state in which the job ended.

        Empty where it has not ended, or where Slurm has not been asked since `submitted`.
        """
        now = time.monotonic()
        if now - self._asked > SLURM_INTERVAL:
            command = ["squeue", "--noheader", "--states=all", f"--name={self._name}", "--format=%i %T"]
            answer = subprocess.run(command, capture_output=True, text=True)
            self._asked = now
            if answer.returncode == 0:
                self._answered = now
                self._states = dict(line.split()[:2] for line in answer.stdout.splitlines() if line.strip())
        if self._answered < submitted:
            return ""
        state = self._states.get(job_id, "gone")
        return state if state == "gone" or state in self._ENDED else ""
