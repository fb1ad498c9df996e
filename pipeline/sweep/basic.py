"""Runs the jobs of a sweep in this process, for use with a debugger."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import ConfigError
from pipeline.config.schema import HardwareConfig
from pipeline.sweep.ending import Ending, interrupted_before_start
from pipeline.sweep.job_task import JobTask
from pipeline.sweep.launcher import SweepLauncher
from pipeline.sweep.running_sweep import RunningSweep


class BasicLauncher(SweepLauncher):
    """Runs all jobs in this process, one after the other.

    The jobs share TensorFlow's global state.
    """

    def _slots(self, hardware_of_jobs: Sequence[HardwareConfig]) -> list[list[str]]:
        """Return one slot without GPUs.

        Raises:
            ConfigError: a job has several workers, but a process can join a TensorFlow
                cluster only once.
        """
        if any(hardware.workers != 1 for hardware in hardware_of_jobs):
            raise ConfigError(
                "hydra/launcher", "must not be basic with several workers", "basic"
            )
        return [[]]

    def _backend(
        self, sweep: RunningSweep, hardware_of_jobs: Sequence[HardwareConfig]
    ) -> "_ThisProcess":
        return _ThisProcess()


class _ThisProcess:
    """The backend that runs each job in this process, within the job's `start`."""

    interval = 0.0

    def job(self, task: JobTask, gpus: list[str]) -> "_InProcessJob":
        return _InProcessJob(task)

    def poll(self) -> None:
        """Do nothing: a job has ended when its `start` returns."""

    def stop(self, running: Sequence[Any], *, kill: bool) -> None:
        """Do nothing: the exception that stops the batch has ended the running job."""


@dataclass
class _InProcessJob:
    task: JobTask
    _ending: Ending | None = None

    def start(self) -> None:
        self._ending = self.task()

    def poll(self) -> Ending:
        if self._ending is None:
            return interrupted_before_start()
        return self._ending
