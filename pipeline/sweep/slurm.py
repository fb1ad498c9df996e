"""Runs each job of a sweep as a Slurm job, through submitit."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

GONE = "gone"  # state of a job that `squeue` no longer lists, minutes after its end
ENDED = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
    GONE,
)
# Variables that Slurm and submitit set in a job, and those that find the controller.
_SET_IN_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
_READ_BY_SBATCH = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
# Number of polls after the end of a job until it counts as killed if it has no result:
# on a network file system, the result may become visible late.
LATE = 3


class SlurmLauncher(SweepLauncher):
    """Runs each job as a Slurm job; Slurm decides when and where each job runs.

    The parameters are those of submitit's Slurm executor.
    """

    interval = 5.0  # seconds between two calls of `squeue`, which lists all jobs

    def __init__(self, **params: Any):
        self.params: Any = OmegaConf.to_container(OmegaConf.create(params))
        # States of the jobs by their Slurm ID, or None if `squeue` failed.
        self.states: dict[str, str] | None = None
        self._was_cancelled = False

    @property
    def name(self) -> str:
        """Return the name that all Slurm jobs of the sweep share."""
        return f"pipeline-{self.sweep.run_id}"

    def _slots(self, hardware: Sequence[schema.HardwareConfig]) -> list[list[str]]:
        """Set submitit's `gpus_per_node` if the jobs need GPUs; return empty slots.

        Nothing is set if the user requests GPUs, or if no job requires a GPU and
        `sinfo` lists none. There are `array_parallelism` slots, by default 256.

        Raises:
            ConfigError: this machine has no `sbatch`.
        """
        if shutil.which("sbatch") is None:
            rule = "must be one of this machine, which has no sbatch"
            raise ConfigError("hydra/launcher", rule, "submitit_slurm")

        nodes = self.params.get("nodes") or 1
        gpus_per_node = -(-gpus_of_machine.per_job(hardware) // nodes)  # rounded up
        if gpus_per_node and not self._user_requests_gpus():
            required = any(job.device.name == "gpu" for job in hardware)
            if required or self._cluster_has_gpus():
                self.params["gpus_per_node"] = gpus_per_node
        return [[] for _ in range(self.params.get("array_parallelism") or 256)]

    def _user_requests_gpus(self) -> bool:
        for key in ("gpus_per_node", "gpus_per_task", "gres"):
            if self.params.get(key) is not None:
                return True
        return False

    def _cluster_has_gpus(self) -> bool:
        """Return whether `sinfo` lists GPUs in the partition."""
        command = ["sinfo", "--noheader", "--format=%G"]
        if self.params.get("partition"):
            command.append(f"--partition={self.params['partition']}")
        resources = imports.output_of(*command) or ""
        return "gpu" in resources

    def _job(self, call: JobCall, gpus: list[str]) -> "SlurmJob":
        return SlurmJob(call, self)

    def _wait(self) -> None:
        """Wait for `interval` seconds, then poll the states of all jobs with `squeue`.

        If `squeue` fails, the states are None.
        """
        super()._wait()
        # Submitit would call `sacct`. On a cluster without an accounting database, it
        # would wait forever for a job that died. `squeue` works on every cluster.
        lines = imports.output_of(
            "squeue",
            "--noheader",
            "--states=all",
            f"--name={self.name}",
            "--format=%i %T",
        )
        if lines is None:
            self.states = None
            return
        self.states = {}
        for line in lines.splitlines():
            if line.strip():
                job_id, state, *_ = line.split()
                self.states[job_id] = state

    def _ask_to_end(self, running: Sequence["SlurmJob"], late: bool) -> None:
        """Cancel all jobs of the sweep: once, and at every poll if `late`."""
        # `scancel` removes pending jobs. It sends SIGTERM to running jobs, and SIGKILL
        # after Slurm's KillWait.
        if late or not self._was_cancelled:
            self._was_cancelled = True
            subprocess.run(["scancel", f"--name={self.name}"], check=False)


class SlurmJob:
    """A job submitted by submitit."""

    def __init__(self, call: JobCall, launcher: SlurmLauncher):
        self._call = call
        self._launcher = launcher
        self._job: Any = None
        self._polls = 0  # number of polls since Slurm ended the job

    def start(self) -> None:
        """Submit the job."""
        call = _RemoteCall(self._call, list(sys.path), os.environ.get("PYTHONPATH", ""))
        executor = self._executor()
        # The workers of a job authenticate each other with this secret. `sbatch` passes
        # the environment on to them.
        secret = {cluster.SECRET: secrets.token_hex(32)}
        with _outside_of_slurm(), importing_only_this_package(**secret):
            self._job = executor.submit(call)

    def _executor(self) -> Any:
        import submitit

        params = {**self._launcher.params, "name": self._launcher.name}
        # Give each job of the sweep its own folder, since Slurm reuses job IDs.
        folder = params.pop("submitit_folder").replace("%j", f"{self._call.number}/%j")
        executor = submitit.AutoExecutor(
            folder, cluster="slurm", slurm_max_num_timeout=params.pop("max_num_timeout")
        )
        shared = set(OmegaConf.structured(BaseQueueConf).keys())
        submitit_params = {}
        for key, value in params.items():
            if key not in shared:
                key = f"slurm_{key}"
            submitit_params[key] = value
        executor.update_parameters(**submitit_params)
        return executor

    def ending(self) -> Ending | None:
        """Return how the job ended, or None while the job is pending or running."""
        if self._job is None:
            return Ending("interrupted")
        if not self._job.paths.result_pickle.exists():
            return self._ending_without_result()
        try:
            return self._job.task(0).result()  # with several workers, 0 is the chief
        except Exception as error:  # the message is the traceback of the job
            reason = "the process failed"
            for line in str(error).splitlines():
                if re.match(r"[\w.]+: ", line):
                    reason = line
            return Ending(FAILED, reason=reason)

    def _ending_without_result(self) -> Ending | None:
        """Return a killed job's ending if Slurm has ended it `LATE` polls ago."""
        states = self._launcher.states
        state = None
        if states is not None:
            state = states.get(self._job.job_id, GONE)

        if state in ENDED:
            self._polls += 1
        else:
            self._polls = 0
        if self._polls < LATE:
            return None
        how = f"killed (Slurm job {self._job.job_id}: {state})"
        return killed(how, self._job.stderr() or "")


@contextmanager
def _outside_of_slurm() -> Iterator[None]:
    """Within the block, hide the Slurm job that this process is part of, if any.

    `sbatch` passes on the environment. Without this, a job that is submitted in a task
    of a job array would have that task's IDs, and submitit would look for its files.
    """
    hidden = {}
    if "SLURM_JOB_ID" in os.environ:
        for name in list(os.environ):
            if name.startswith(_SET_IN_A_JOB) and name not in _READ_BY_SBATCH:
                hidden[name] = os.environ.pop(name)
    try:
        yield
    finally:
        os.environ.update(hidden)


@dataclass(frozen=True)
class _RemoteCall:
    """Runs a job in a Slurm job, with the import paths of the sweep's process."""

    call: JobCall
    path: list[str]  # `sys.path` of the sweep's process
    python_path: str  # the variable PYTHONPATH of the sweep's process

    def __call__(self) -> Ending:
        sys.path[:] = self.path
        os.environ["PYTHONPATH"] = self.python_path
        os.environ.pop("PYTHONSAFEPATH", None)
        requeue: Any = signal.getsignal(signal.SIGUSR2)
        try:
            return self.call()
        except signals.Terminated as error:
            # The run has written its checkpoint and is closed: let submitit requeue the
            # job.
            if str(error) == "SIGUSR2" and callable(requeue):
                requeue(signal.SIGUSR2, None)
            raise

    def checkpoint(self) -> Any:
        """Return the submission for a requeued job: the same job, to be resumed.

        Submitit calls this method after it has received SIGUSR2, with which Slurm warns
        a job of its end.
        """
        from submitit.helpers import DelayedSubmission

        overrides = [*self.call.overrides, "training.resume=auto"]
        resumed = replace(self.call, overrides=overrides)
        return DelayedSubmission(replace(self, call=resumed))
