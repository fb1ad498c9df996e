"""How a job of a sweep ended, and how all jobs that this process ran have ended."""

import enum
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.common import secrets

INTERRUPTED = "interrupted"  # the cause of the end of a job that its sweep interrupted
WORST = math.inf  # the loss that a sweeper gets for a job without a loss


class Outcome(enum.Enum):
    """The ways in which a job can end."""

    FINISHED = "finished"
    FAILED = "failed"  # it raised an error
    REJECTED = "rejected"  # its config was invalid; the job did not train
    NO_RESULT = "no result"  # its process ended first, for example by a signal


@dataclass(frozen=True)
class Ending:
    """How a job ended.

    Attributes:
        outcome: the way in which the job ended.
        loss: the last loss of a job that finished, else `WORST`.
        reason: why the job has no loss, in one line, or an empty string.
        cause: what ended the process of a job without a result, such as `killed by
            SIGKILL`; empty for other outcomes.
    """

    outcome: Outcome
    loss: float = WORST
    reason: str = ""
    cause: str = ""

    def __str__(self) -> str:
        """Return the words for the ending in the output of a sweep."""
        return self.cause or self.outcome.value


def interrupted_before_start() -> Ending:
    """Return the ending of a job whose start was interrupted."""
    return Ending(Outcome.NO_RESULT, cause=INTERRUPTED)


def without_result(cause: str, output: str) -> Ending:
    """Return the ending of a job whose process ended without a result.

    The reason is the cause, followed by the last non-empty line of the output. The line
    is left out if the sweep interrupted the job, since it then says only what the job
    was doing.

    Args:
        cause: what ended the process.
        output: the output of the process.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = cause
    if lines and cause != INTERRUPTED:
        reason = f"{cause}: {secrets.mask(lines[-1])}"
    return Ending(Outcome.NO_RESULT, reason=reason, cause=cause)


@dataclass
class JobEndings:
    """How the jobs that this process ran for a sweep have ended.

    If a job runs again in a later batch of a search, its last ending counts.

    Attributes:
        by_name: the endings by the job's name.
        ended_at: when each job ended, in seconds of `time.monotonic`.
        ended_sweep: name of the job whose invalid config ended the sweep; empty if
            there is no such job.
    """

    by_name: dict[str, Ending] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    ended_sweep: str = ""

    def add(self, name: str, ending: Ending) -> None:
        """Record that a job has just ended."""
        self.by_name[name] = ending
        self.ended_at[name] = time.monotonic()

    def losses(self, names: Iterable[str]) -> dict[str, float]:
        """Return the losses of these jobs, all of which have ended."""
        return {name: self.by_name[name].loss for name in names}

    @property
    def any_rejected(self) -> bool:
        """Whether a job was rejected because of its config."""
        return any(
            ending.outcome == Outcome.REJECTED for ending in self.by_name.values()
        )

    def failure_reasons(self) -> dict[str, str]:
        """Return the reason for each job that returned no loss, by job name."""
        reasons = {}
        for name, ending in self.by_name.items():
            if ending.outcome != Outcome.FINISHED:
                reasons[name] = ending.reason or str(ending)
        return reasons
