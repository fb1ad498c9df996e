"""The tag `stop` of a sweep's parent run, by which a user ends the sweep from MLflow."""

import os
import signal
import threading
from contextlib import suppress

from pipeline.common.errors import say
from pipeline.common.signals import STOP_TAG
from pipeline.tracking.foreign_store import SweepRecord

_INTERVAL = 5.0  # seconds between two requests to the store


def obey(parent: SweepRecord, closed: threading.Event) -> None:
    """Wait until the parent run has the tag; then end the sweep as SIGTERM does.

    The wait also ends when the sweep is closed.
    """
    from pipeline.tracking.store import has_stop_tag  # imports MLflow

    while not closed.wait(_INTERVAL):
        with suppress(Exception):  # the store may be unreachable for a while
            if has_stop_tag(parent.client(), parent.run_id):
                break
    if not closed.is_set():
        say(f"sweep {parent.run_id} has the tag {STOP_TAG} in MLflow: it ends now")
        os.kill(os.getpid(), signal.SIGTERM)


def withdraw(parent: SweepRecord) -> None:
    """Remove the tag from the parent run, so that it does not end a resumed sweep."""
    from pipeline.tracking.store import remove_stop_tag  # imports MLflow

    remove_stop_tag(parent.client(), parent.run_id)
