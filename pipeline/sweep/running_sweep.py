"""A sweep that this process runs, from its first batch until it is closed."""

import threading
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
        endings: how jobs have ended so far.
        closed: set when the sweep is closed; ends the heartbeats.
    """

    parent: ParentRun
    folder: str
    patience: float
    places: tuple[str, ...]
    experiment: str = ""
    endings: JobEndings = field(default_factory=JobEndings)
    closed: threading.Event = field(default_factory=threading.Event)

    def close(self, status: str | None = None, interrupted_by: str = "") -> int:
        """End the heartbeats and the parent run; see `closing.close`."""
        self.closed.set()
        return closing.close(
            self.parent,
            self.parent.job_names,
            self.endings,
            self.patience,
            status,
            interrupted_by,
        )
