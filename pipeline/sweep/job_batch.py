"""Runs the jobs of a batch: one per slot at a time, on a backend.

A batch holds the jobs that Hydra's sweeper launches together: all jobs of a grid, or
some jobs of a search.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.common.errors import RunError, first_line, say
from pipeline.common.signals import Terminated
from pipeline.sweep.ending import Ending, JobEndings, Outcome
from pipeline.sweep.job_task import JobTask

# Seconds that an interrupted job has to close its run before it is killed, in addition
# to `tracking.patience`.
INTERRUPTION_GRACE = 60.0


class RunningJob(Protocol):
    """A job in a slot."""

    def start(self) -> None:
        """Start the job. It may return before the job has ended."""

    def poll(self) -> Ending | None:
        """Return how the job ended. Return None while it runs.

        A job whose start was interrupted has ended, too.
        """


class Backend(Protocol):
    """Where the jobs of a batch run: this process, processes of their own, or Slurm.

    Attributes:
        interval: seconds between two polls of the jobs.
    """

    interval: float

    def job(self, task: JobTask, gpus: list[str]) -> RunningJob:
        """Return the job, not yet started, that runs `task` on `gpus`."""

    def poll(self) -> None:
        """Update the state that the jobs' `poll` reads, for all jobs at once."""

    def stop(self, running: Sequence[Any], *, kill: bool) -> None:
        """Interrupt running jobs of this backend, or `kill` them.

        The method is called at every poll until all jobs have ended. A job that has
        been interrupted before is not interrupted again.
        """


@dataclass(frozen=True)
class StartedJob:
    """A job that has been started, or whose start is under way."""

    name: str
    job: RunningJob
    started_at: float  # by `time.monotonic`, in seconds


@dataclass
class Slot:
    """A place for one job at a time, with the GPUs that the job may use."""

    gpus: list[str]
    current: StartedJob | None = None


@dataclass
class JobBatch:
    """Runs the jobs of a batch in slots.

    Attributes:
        backend: where the jobs run.
        slots: the slots, all of which are free at first.
        endings: the endings of the sweep's jobs. `run` adds those of the batch's jobs.
        stop_if_first_is_rejected: whether the sweep ends if the first of its jobs to
            end in this process is rejected.
        patience: `tracking.patience`, in seconds.
    """

    backend: Backend
    slots: Sequence[Slot]
    endings: JobEndings
    stop_if_first_is_rejected: bool
    patience: float

    def run(self, tasks: Mapping[str, JobTask]) -> None:
        """Run jobs until all of them have ended.

        If an exception is raised, all running jobs are interrupted first.

        Args:
            tasks: the jobs by name.

        Raises:
            RunError: the first job to end was rejected because of its config, and
                `stop_if_first_is_rejected` is True.
        """
        waiting = deque(tasks.items())
        try:
            while waiting or self._running():
                for slot in self.slots:
                    if waiting and slot.current is None:
                        name, task = waiting.popleft()
                        self._start(slot, name, task)
                self._poll()
                self._check_first_ending()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Interrupt all running jobs, so that each closes its run, and wait for them.

        Jobs that run longer than `INTERRUPTION_GRACE` plus `patience` seconds are
        killed.
        """
        deadline = time.monotonic() + INTERRUPTION_GRACE + self.patience
        while self._running():
            try:
                is_late = time.monotonic() > deadline
                self.backend.stop(self._running(), kill=is_late)
                self._poll()
            except (KeyboardInterrupt, Terminated):
                deadline = 0.0  # a second signal kills at once

    def _running(self) -> list[RunningJob]:
        running = []
        for slot in self.slots:
            if slot.current is not None:
                running.append(slot.current.job)
        return running

    def _start(self, slot: Slot, name: str, task: JobTask) -> None:
        """Start a job in a free slot. A job that cannot be started counts as failed."""
        say(f"  {name}: started")
        started_at = time.monotonic()
        try:
            job = self.backend.job(task, slot.gpus)
            # Occupy the slot before the job starts, so that `stop` finds the job if the
            # start is interrupted.
            slot.current = StartedJob(name, job, started_at)
            job.start()
        except Exception as error:
            ending = Ending(Outcome.FAILED, reason=first_line(error))
            self._record_ending(name, started_at, ending)
            slot.current = None

    def _poll(self) -> None:
        """Wait for the backend's interval, then free the slots of ended jobs."""
        time.sleep(self.backend.interval)
        self.backend.poll()
        for slot in self.slots:
            current = slot.current
            if current is None:
                continue
            ending = current.job.poll()
            if ending is not None:
                self._record_ending(current.name, current.started_at, ending)
                slot.current = None

    def _record_ending(self, name: str, started_at: float, ending: Ending) -> None:
        """Record and print how a job ended."""
        is_first = not self.endings.by_name and self.stop_if_first_is_rejected
        if is_first and ending.outcome == Outcome.REJECTED:
            self.endings.ended_sweep = name
        self.endings.add(name, ending)
        seconds = time.monotonic() - started_at
        say(f"  {name}: {ending} after {seconds:.0f} s")

    def _check_first_ending(self) -> None:
        """Raise a `RunError` if a rejected job has ended the sweep.

        The configs of the other jobs probably have the same error.
        """
        name = self.endings.ended_sweep
        if name:
            reason = self.endings.failure_reasons()[name]
            raise RunError(
                f"{reason} As {name} was the first job to end, this ended the sweep."
            )
