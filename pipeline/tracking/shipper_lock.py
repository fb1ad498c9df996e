"""Locks a journal for the process that ships it, and waits for an earlier one.

An earlier process may still be shipping: the shipper of a trainer that was killed ships
all lines of the journal, which takes minutes if the store is slow.
"""

import time
from collections.abc import Callable

from pipeline.common.errors import first_line
from pipeline.tracking.journal_file import SHIPPER, lock
from pipeline.tracking.store import Store

CHECK = 5.0  # maximum seconds between two looks at what the store has
NO_ROWS = "another process still ships the run, and none of its rows arrive"


def lock_as_shipper(
    descriptor: int,
    stored: Callable[[], str],
    seconds: float,
    tell: Callable[[None], object],
    report: Callable[[str], object],
) -> bool:
    """Lock a journal as its shipper; wait as long as another shipper makes progress.

    Args:
        descriptor: the journal.
        stored: returns a text that changes when the store gets more of the run.
        seconds: how long to wait without progress.
        tell: called with None when there was progress.
        report: called with the reason after each look that finds no progress.

    Returns:
        Whether the journal was locked: False if another process still has it locked
        after `seconds` without progress.
    """
    if lock(descriptor, SHIPPER):
        return True
    before: str | None = None
    # The caller of `tell` may have half of the time limit.
    interval = min(CHECK, seconds / 8)
    deadline = time.monotonic() + seconds
    while True:
        problem = NO_ROWS
        now = before
        try:
            now = stored()
        except Exception as error:  # the store may answer later
            problem = first_line(error)
        if before is not None and now != before:
            deadline = time.monotonic() + seconds
            tell(None)
        elif before is not None or now is None:
            report(problem)
        before = now

        remaining = deadline - time.monotonic()
        if lock(descriptor, SHIPPER, min(interval, max(0.0, remaining))):
            return True
        if remaining <= 0:
            return False


def stored_state(store: Store, journal: str, run_id: str) -> str:
    """Return a text that changes when the store gets rows or tags of a run.

    Args:
        store: the store.
        journal: the value of the run's tag `journal`.
        run_id: the ID of the run, or "" if it is not known.
    """
    run = store.find_run(journal, run_id)
    if run is None:
        return ""
    # Compare texts, as NaN is not equal to itself.
    metrics = sorted(run.data.metrics.items())
    tags = sorted(run.data.tags.items())
    return repr((run.info.status, metrics, tags))
