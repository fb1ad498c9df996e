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
from pipeline.config import cluster
from pipeline.config.schema import HardwareConfig
from pipeline.sweep import gpus
from pipeline.sweep.ending import (
    Ending,
    Outcome,
    interrupted_before_start,
    without_result,
)
from pipeline.sweep.job_task import JobTask, importing_only_this_package
from pipeline.sweep.launcher import SweepLauncher
from pipeline.sweep.running_sweep import RunningSweep

# State of a job that `squeue` no longer lists, since it ended minutes ago.
_UNLISTED = "gone"
_ENDED_STATES = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
    _UNLISTED,
)
# Prefixes of the environment variables that Slurm and submitit set in a job. The
# variables in `_READ_BY_SBATCH` have such a prefix, but `sbatch` needs them to reach
# the controller and to authenticate.
_SET_IN_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_")
_READ_BY_SBATCH = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
# A job without a result counts as ended once this many polls in a row have found that
# Slurm has ended it: on a network file system, the result may become visible late.
_POLLS_FOR_RESULT = 3
_MOST_AT_ONCE = 256  # concurrent jobs, if `array_parallelism` is not set


class SlurmLauncher(SweepLauncher):
    """Runs each job as a Slurm job; Slurm decides when and where each job runs.

    The parameters are those of submitit's Slurm executor.
    """

    def __init__(self, **params: Any):
        self.params: Any = OmegaConf.to_container(OmegaConf.create(params))

    def _slots(self, hardware_of_jobs: Sequence[HardwareConfig]) -> list[list[str]]:
        """Return slots without GPUs, since Slurm assigns the GPUs.

        Raises:
            ConfigError: this machine has no `sbatch`.
        """
        if shutil.which("sbatch") is None:
            rule = "must be another launcher on this machine, which has no sbatch"
            raise ConfigError("hydra/launcher", rule, "submitit_slurm")
        at_once = self.params.get("array_parallelism") or _MOST_AT_ONCE
        return [[] for _ in range(at_once)]

    def _backend(
        self, sweep: RunningSweep, hardware_of_jobs: Sequence[HardwareConfig]
    ) -> "SlurmBackend":
        # All Slurm jobs of the sweep share this name.
        params = {**self.params, "name": f"pipeline-{sweep.parent.run_id}"}
        gpus_per_node = self._gpus_per_node(hardware_of_jobs)
        if gpus_per_node:
            params["gpus_per_node"] = gpus_per_node
        return SlurmBackend(params)

    def _gpus_per_node(self, hardware_of_jobs: Sequence[HardwareConfig]) -> int:
        """Return the number of GPUs per node to request for the jobs of a batch.

        It is 0, for no request, if all jobs run on the CPU, if the user requests GPUs,
        or if no job requires a GPU and `sinfo` lists none.
        """
        nodes = self.params.get("nodes") or 1
        gpus_per_node = -(-gpus.per_job(hardware_of_jobs) // nodes)  # rounded up
        if gpus_per_node == 0 or self._user_requests_gpus():
            return 0
        if gpus.is_required(hardware_of_jobs) or self._cluster_has_gpus():
            return gpus_per_node
        return 0

    def _user_requests_gpus(self) -> bool:
        for key in ("gpus_per_node", "gpus_per_task", "gres"):
            if self.params.get(key) is not None:
                return True
        return False

    def _cluster_has_gpus(self) -> bool:
        """Return whether `sinfo` lists GPUs, in the partition if the user sets one."""
        command = ["sinfo", "--noheader", "--format=%G"]
        if self.params.get("partition"):
            command.append(f"--partition={self.params['partition']}")
        resources = imports.output_of(*command) or ""
        return "gpu" in resources


class SlurmBackend:
    """The backend that submits each job of a batch to Slurm.

    Args:
        params: submitit's parameters for the jobs. `name` is the name that all Slurm
            jobs of the sweep share.
    """

    interval = 5.0  # seconds between two calls of `squeue`, which lists all jobs

    def __init__(self, params: dict[str, Any]):
        self.params = params
        # States of the sweep's jobs by their Slurm ID, or None if `squeue` failed.
        self.states: dict[str, str] | None = None
        self._was_cancelled = False

    def job(self, task: JobTask, gpus: list[str]) -> "SlurmJob":
        return SlurmJob(task, self)

    def poll(self) -> None:
        """Update the states of all jobs with `squeue`."""
        # Submitit would call `sacct`. On a cluster without an accounting database, it
        # would wait forever for a job that died. `squeue` works on every cluster.
        lines = imports.output_of(
            "squeue",
            "--noheader",
            "--states=all",
            f"--name={self.params['name']}",
            "--format=%i %T",
        )
        if lines is None:
            self.states = None
            return
        self.states = {}
        for line in lines.splitlines():
            if line.strip():
                slurm_id, state, *_ = line.split()
                self.states[slurm_id] = state

    def stop(self, running: Sequence["SlurmJob"], *, kill: bool) -> None:
        """Cancel the sweep's jobs at the first call, and at every call with `kill`."""
        # Cancel by name, since a job may have been submitted although its submission
        # was interrupted. `scancel` removes pending jobs. It sends SIGTERM to running
        # jobs, and SIGKILL after Slurm's KillWait.
        if kill or not self._was_cancelled:
            self._was_cancelled = True
            command = ["scancel", f"--name={self.params['name']}"]
            subprocess.run(command, check=False)


class SlurmJob:
    """A job that submitit submits to Slurm."""

    def __init__(self, task: JobTask, backend: SlurmBackend):
        self._task = task
        self._backend = backend
        self._submitted: Any = None  # submitit's job
        self._polls_since_end = 0  # polls in a row that found the job ended

    def start(self) -> None:
        """Submit the job."""
        remote_task = _RemoteTask(
            self._task, list(sys.path), os.environ.get("PYTHONPATH", "")
        )
        executor = self._executor()
        # The workers of a job authenticate each other with this secret. `sbatch` passes
        # the environment on to them.
        secret = {cluster.SECRET: secrets.token_hex(32)}
        with _outside_of_slurm(), importing_only_this_package(**secret):
            self._submitted = executor.submit(remote_task)

    def _executor(self) -> Any:
        import submitit

        params = dict(self._backend.params)
        # Give each job of the sweep its own folder, since Slurm reuses job IDs.
        folder = params.pop("submitit_folder").replace("%j", f"{self._task.number}/%j")
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

    def poll(self) -> Ending | None:
        """Return how the job ended, or None while the job is pending or running."""
        if self._submitted is None:
            return interrupted_before_start()
        if not self._submitted.paths.result_pickle.exists():
            return self._ending_without_result()
        try:
            # With several workers, task 0 of the Slurm job is the chief.
            return self._submitted.task(0).result()
        except Exception as error:  # the message is the traceback of the job
            reason = "the process failed"
            for line in str(error).splitlines():
                if re.match(r"[\w.]+: ", line):
                    reason = line
            return Ending(Outcome.FAILED, reason=reason)

    def _ending_without_result(self) -> Ending | None:
        """Return the ending of a job that has no result and will not have one.

        Return None while the job runs or its state is unknown, and for the first
        `_POLLS_FOR_RESULT` - 1 polls that find that Slurm has ended it.
        """
        states = self._backend.states
        state = None
        if states is not None:
            state = states.get(self._submitted.job_id, _UNLISTED)

        if state in _ENDED_STATES:
            self._polls_since_end += 1
        else:
            self._polls_since_end = 0
        if self._polls_since_end < _POLLS_FOR_RESULT:
            return None
        cause = f"killed (Slurm job {self._submitted.job_id}: {state})"
        output = ""
        if state != "CANCELLED":  # the last line is not why it was cancelled
            output = self._submitted.stderr() or ""
        return without_result(cause, output)


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
class _RemoteTask:
    """Runs a job in a Slurm job, with the import paths of the sweep's process."""

    task: JobTask
    path: list[str]  # `sys.path` of the sweep's process
    python_path: str  # the variable PYTHONPATH of the sweep's process

    def __call__(self) -> Ending:
        sys.path[:] = self.path
        os.environ["PYTHONPATH"] = self.python_path
        os.environ.pop("PYTHONSAFEPATH", None)
        requeue: Any = signal.getsignal(signal.SIGUSR2)
        try:
            return self.task()
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

        overrides = [*self.task.overrides, "training.resume=auto"]
        resumed = replace(self.task, overrides=overrides)
        return DelayedSubmission(replace(self, task=resumed))
