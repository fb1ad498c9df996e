"""Ships a journal that no trainer writes any more, from whatever process is asked to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.common.errors import NOT_SHIPPED, ConfigError, first_line, say
from pipeline.common.secrets import HIDDEN, mask, remember
from pipeline.tracking.journal_file import Past, absolute

if TYPE_CHECKING:  # it imports MLflow
    from pipeline.tracking.store import Store

RETRY = 1.0  # seconds between two tries


def sync_run(folder: str, given: str | None, patience: float, *, named: bool) -> int:
    """Ship one journal; return the exit status.

    Args:
        folder: its run directory.
        given: the URI of its store, where that is not to be taken from the journal.
        patience: seconds to wait for the store.
        named: somebody asked for this one; else it is left alone while its run goes on, and where it is all there.

    Raises:
        ConfigError: it cannot be shipped, or not to this store.
    """
    try:
        past = Past.of(Path(folder), "RUN_DIR", seconds=1.0)  # another sync looks here too
        past.close()
    except ConfigError as error:
        if named:
            raise
        say(f"{folder}: {error}")
        return 0
    try:
        uri = _store(past, given)
        if not named and _is_closed(past, uri):
            return 0
        sent = _ship(past, uri, patience)
    except Exception as error:
        if named and isinstance(error, ConfigError):
            raise
        say(f"{folder}: not all is in the store yet: {first_line(error)}")
        return NOT_SHIPPED
    say(f"{folder}: {sent}" + (f"; {past.damage}" if past.damage else ""))
    return NOT_SHIPPED if past.damage else 0


def _store(past: Past, given: str | None) -> str:
    """Return the URI of the journal's store."""
    recorded, folder = str(past.start["store"]), str(past.path.parent)
    if given is None and HIDDEN in recorded:
        raise ConfigError("tracking.uri", f"must be given: the journal in {folder} has it without its secret", recorded)
    if given is not None:
        remember(given)  # the record may hide what only its URI shows to be a secret
    if given is not None and past.run and mask(absolute(given)) != mask(recorded):
        raise ConfigError("tracking.uri", f"must be that of the journal in {folder}, {recorded}", given)
    return recorded if given is None else given


def _is_closed(past: Past, uri: str) -> bool:
    """Return whether the store has the run with the status that ends its journal, which is shipped last."""
    from pipeline.tracking.uploader import run_of

    store = _opened(uri)
    experiment_id = store.check(past.start["experiment"])
    run = None if experiment_id is None else run_of(store.client(), experiment_id, past.start["tags"]["journal"])
    return run is not None and run.info.status == (past.status or "KILLED")


def _opened(uri: str) -> Store:
    from pipeline.tracking.store import Store

    try:
        return Store(uri)
    except ConfigError as error:  # it may answer another time
        raise OSError(str(error)) from error


def _ship(past: Past, uri: str, patience: float) -> str:
    """Ship everything; return what was done."""
    from pipeline.tracking.uploader import Delivery

    delivery = Delivery(_opened(uri), past.path, again=True, seconds=patience)
    try:
        until = time.monotonic() + patience
        more = True
        while more:
            more = delivery.read(alive=False)
            while True:
                try:
                    delivery.ship()
                    break
                except Exception:
                    if time.monotonic() > until:
                        raise
                    time.sleep(RETRY)
            until = time.monotonic() + patience
        return f"{delivery.sent} points were missing; run {delivery.run_id} is {delivery.status()}"
    finally:
        delivery.close()
