"""Runs each job of a sweep as a Slurm job, through submitit."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from omegaconf import OmegaConf

from pipeline.common import imports, signals
from pipeline.common.errors import ConfigError
from pipeline.config import cluster, schema
from pipeline.sweep import gpus as gpus_of_machine
from pipeline.sweep.job_call import (
    FAILED,
    Ending,
    JobCall,
    importing_only_this_package,
    killed,
)
from pipeline.sweep.launcher import SweepLauncher

# The last is for a job that Slurm has forgotten, some minutes after its end.
ENDED = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
    "gone",
)
LATE = 3  # polls after Slurm ended a job until its result must be visible on a network file system


class SlurmLauncher(SweepLauncher):
    """Runs each job as a Slurm job; Slurm decides how many run at once, and where. The parameters are submitit's."""

    interval = 5.0  # one `squeue` for all jobs in that time

    def __init__(self, **params: Any):
        self.params: Any = OmegaConf.to_container(OmegaConf.create(params))
        self.states: dict[str, str] | None = None
        self._asked = False

    @property
    def name(self) -> str:  # of all Slurm jobs of the sweep
        return f"pipeline-{self.sweep.run_id}"

    def _slots(self, hardware: Sequence[schema.HardwareConfig]) -> list[list[str]]:
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "hydra/launcher",
                "must be one of this machine, which has no sbatch",
                "submitit_slurm",
            )
        wanted = -(
            -gpus_of_machine.per_job(hardware) // (self.params.get("nodes") or 1)
        )
        if wanted and all(
            self.params.get(key) is None
            for key in ("gpus_per_node", "gpus_per_task", "gres")
        ):
            partition = (
                [f"--partition={self.params['partition']}"]
                if self.params.get("partition")
                else []
            )
            nodes = imports.said("sinfo", "--noheader", "--format=%G", *partition) or ""
            if "gpu" in nodes or any(h.device.name == "gpu" for h in hardware):
                self.params["gpus_per_node"] = wanted
        return [[] for _ in range(self.params.get("array_parallelism") or 256)]

    def _job(self, call: JobCall, gpus: list[str]) -> "SlurmJob":
        return SlurmJob(call, self)

    def _wait(self) -> None:
        super()._wait()
        # Works on every cluster; submitit calls `sacct`, and without its database waits forever for a job that died.
        lines = imports.said(
            "squeue",
            "--noheader",
            "--states=all",
            f"--name={self.name}",
            "--format=%i %T",
        )
        states = (line.split() for line in (lines or "").splitlines() if line.strip())
        self.states = (
            None if lines is None else {job_id: state for job_id, state, *_ in states}
        )

    def _ask_to_end(self, running: Sequence["SlurmJob"], late: bool) -> None:
        # Removes pending jobs; running ones get SIGTERM, and SIGKILL after Slurm's KillWait.
        if late or not self._asked:
            self._asked = True
            subprocess.run(["scancel", f"--name={self.name}"], check=False)


class SlurmJob:
    """A job submitted by submitit."""

    def __init__(self, call: JobCall, launcher: SlurmLauncher):
        self._call, self._launcher = call, launcher
        self._job: Any = None
        self._polls = 0  # since Slurm ended it

    def start(self) -> None:
        """Submit the job."""
        import submitit

        params = {**self._launcher.params, "name": self._launcher.name}
        folder = params.pop("submitit_folder").replace(
            "%j", f"{self._call.number}/%j"
        )  # Slurm reuses its job numbers
        executor = submitit.AutoExecutor(
            folder, cluster="slurm", slurm_max_num_timeout=params.pop("max_num_timeout")
        )
        shared = set(OmegaConf.structured(BaseQueueConf).keys())
        executor.update_parameters(
            **{
                key if key in shared else f"slurm_{key}": value
                for key, value in params.items()
            }
        )
        variable = os.environ.get("PYTHONPATH", "")
        of_job = {
            cluster.SECRET: secrets.token_hex(32)
        }  # which the tasks prove to each other
        with importing_only_this_package(**of_job):  # sbatch passes the environment on
            self._job = executor.submit(
                _RemoteCall(self._call, list(sys.path), variable)
            )

    def ending(self) -> Ending | None:
        """Return how the job ended; None while it is pending or running."""
        if self._job is None:
            return Ending("interrupted")
        if not self._job.paths.result_pickle.exists():
            states = self._launcher.states
            state = None if states is None else states.get(self._job.job_id, "gone")
            self._polls = self._polls + 1 if state in ENDED else 0
            if self._polls < LATE:
                return None
            return killed(
                f"killed (Slurm job {self._job.job_id}: {state})",
                self._job.stderr() or "",
            )
        try:
            return self._job.task(0).result()  # task 0 is the chief of several workers
        except Exception as error:  # its text is a traceback
            lines = [
                line for line in str(error).splitlines() if re.match(r"[\w.]+: ", line)
            ]
            return Ending(FAILED, reason=lines[-1] if lines else "the process failed")


@dataclass(frozen=True)
class _RemoteCall:
    """A job on another machine, with the `sys.path` and PYTHONPATH of the sweep's process."""

    call: JobCall
    path: list[str]
    variable: str  # PYTHONPATH

    def __call__(self) -> Ending:
        sys.path[:] = self.path
        os.environ["PYTHONPATH"] = self.variable
        os.environ.pop("PYTHONSAFEPATH", None)
        requeue: Any = signal.getsignal(signal.SIGUSR2)
        try:
            return self.call()
        except (
            signals.Terminated
        ) as error:  # the run has written its checkpoint and is closed
            if str(error) == "SIGUSR2" and callable(requeue):
                requeue(signal.SIGUSR2, None)
            raise

    def checkpoint(self) -> Any:
        """Return what submitit runs when Slurm requeues a job that it warned with SIGUSR2: the same job, resumed."""
        from submitit.helpers import DelayedSubmission

        resumed = replace(
            self.call, overrides=[*self.call.overrides, "training.resume=auto"]
        )
        return DelayedSubmission(replace(self, call=resumed))
