"""A sweep that this process runs, from its first batch until it is closed."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.sweep import closing
from pipeline.sweep.ending import JobEndings
from pipeline.sweep.parent_run import ParentRun


@dataclass
class RunningSweep:
    """A sweep that this process runs.

    Attributes:
        parent: the parent run.
        folder: the folder of the sweep.
        patience: seconds that a job's shipper waits for the store.
        places: where artifacts may lie, in addition to the store.
        experiment: name of the experiment of a reopened sweep; empty for a new sweep,
            whose config names it.
        former_status: status of a reopened sweep before it was reopened; empty for a
            new sweep.
        unplanned: names of the unfinished jobs of a reopened sweep that its present
            overrides do not plan.
        endings: how jobs have ended so far.
        closed: set when the sweep is closed; ends the heartbeats.
    """

    parent: ParentRun
    folder: str
    patience: float
    places: tuple[str, ...]
    experiment: str = ""
    former_status: str = ""
    unplanned: Sequence[str] = ()
    endings: JobEndings = field(default_factory=JobEndings)
    closed: threading.Event = field(default_factory=threading.Event)

    def close(self, status: str | None = None, interrupted_by: str = "") -> int:
        """End the heartbeats and the parent run; see `closing.close`.

        A reopened sweep in which no job was run keeps its former status, unless all of
        its jobs have finished.
        """
        self.closed.set()
        unfinished_status = "FAILED"
        if self.former_status and not self.endings.by_name:
            unfinished_status = self.former_status
        return closing.close(
            self.parent,
            self.parent.job_names,
            self.endings,
            self.patience,
            status,
            interrupted_by,
            unfinished_status,
        )

    def lines_on_unplanned(self) -> list[str]:
        """Return a line on the jobs in `unplanned`, or no line if there are none."""
        if not self.unplanned:
            return []
        names = ", ".join(self.unplanned)
        return [
            f"unfinished jobs that these overrides do not plan: {names}; the overrides "
            "are therefore not recorded. --again runs these jobs with the overrides "
            "that planned them"
        ]
