"""Each job a Slurm job."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from hydra_plugins.hydra_submitit_launcher import submitit_launcher
from omegaconf import DictConfig

from pipeline import config as configuration
from pipeline.errors import ConfigError
from pipeline.launching.local import Submitting
from pipeline.sweep import parent_run

SLURM_INTERVAL = 5.0  # seconds between two questions to Slurm, whatever the number of jobs


class SlurmLauncher(Submitting, submitit_launcher.SlurmLauncher):
    """Each job a Slurm job; Slurm decides how many run at once, and where."""

    def _places(self, hardware: Sequence[DictConfig]) -> list[list[str]]:
        if shutil.which("sbatch") is None:
            raise ConfigError("hydra/launcher", "must be one of this machine, which has no sbatch", "submitit_slurm")
        wanted = max((max(h.gpus_per_job, h.replicas) for h in hardware if h.device.name != "cpu"), default=0)
        asked = [key for key in ("gpus_per_node", "gpus_per_task", "gres") if self.params.get(key) is not None]
        if wanted and not asked and (self._has_gpus() or any(h.device.name == "gpu" for h in hardware)):
            self.params["gpus_per_node"] = wanted
        return [[] for _ in range(self.params.get("array_parallelism") or 256)]

    def _has_gpus(self) -> bool:
        """Whether the nodes that a job may come to have GPUs to give."""
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

    def _given(self, place: list[str]) -> list[str] | None:
        return None

    def _more(self, current: parent_run.ParentRun) -> dict[str, Any]:
        return {"name": f"pipeline-{current.run_id}"}

    def _wait(self, job: Any, submitted: float, current: parent_run.ParentRun) -> str:
        states = _SlurmStates.of(f"pipeline-{current.run_id}")
        while not job.paths.result_pickle.exists():
            ended = states.ended(job.job_id, submitted)
            if ended:
                until = time.monotonic() + 2 * SLURM_INTERVAL  # a network's file system may show the file late
                while not job.paths.result_pickle.exists() and time.monotonic() < until:
                    time.sleep(0.5)
                return f"Slurm job {job.job_id}: {ended}"
            time.sleep(0.5)
        return ""

    def _end_jobs(self, current: parent_run.ParentRun, late: bool) -> None:
        # Those that wait are gone, those that run get SIGTERM, and SIGKILL after Slurm's KillWait.
        subprocess.run(["scancel", f"--name=pipeline-{current.run_id}"], check=False)


class _SlurmStates:
    """What Slurm says of the jobs of one name, asked once for all of them.

    `squeue` answers on every cluster; submitit asks `sacct`, which needs a database, and where there is none it
    waits for a job that died for ever.
    """

    _ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
    _by_name: dict[str, _SlurmStates] = {}  # noqa: RUF012

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._asked = self._answered = float("-inf")
        self._states: dict[str, str] = {}

    @classmethod
    def of(cls, name: str) -> _SlurmStates:
        return cls._by_name.setdefault(name, cls(name))

    def ended(self, job_id: str, submitted: float) -> str:
        """The state in which the job ended; empty where it has not, or Slurm has not been asked since `submitted`."""
        with self._lock:
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
