"""Ships the journal of a run whose trainer is gone, from any process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.common.errors import NOT_SHIPPED, ConfigError, first_line, say
from pipeline.common.secrets import HIDDEN, mask, remember
from pipeline.tracking.journal_file import Past, absolute

if TYPE_CHECKING:  # it imports MLflow
    from pipeline.tracking.store import Store


def sync_run(folder: str, given: str | None, patience: float, *, named: bool) -> int:
    """Ship one journal; return the exit status.

    Args:
        folder: its run directory.
        given: the URI of its store; None to take the one in the journal.
        patience: seconds to wait for the store.
        named: whether the user named this run; otherwise it is skipped while it is running or if it is complete.

    Raises:
        ConfigError: it cannot be shipped, or not to this store.
    """
    try:
        past = Past.of(Path(folder), "RUN_DIR", seconds=1.0)  # another sync may be reading it too
        past.close()
    except ConfigError as error:
        if named:
            raise
        say(f"{folder}: {error}")
        return 0
    try:
        uri = _store_uri(past, given)
        store = _opened(uri)
        if not named and _is_closed(past, store):
            return 0
        say(f"{folder}: {_ship(past, store, patience)}" + (f"; {past.damage}" if past.damage else ""))
    except Exception as error:
        if named and isinstance(error, ConfigError):
            raise
        say(f"{folder}: not all is in the store yet: {first_line(error)}")
        return NOT_SHIPPED
    return NOT_SHIPPED if past.damage else 0


def _store_uri(past: Past, given: str | None) -> str:
    """Return the URI of the journal's store."""
    recorded, folder = str(past.start["store"]), str(past.path.parent)
    if given is None:
        if HIDDEN in recorded:
            rule = f"must be given: the journal in {folder} has it without its secret"
            raise ConfigError("tracking.uri", rule, recorded)
        return recorded
    remember(given)  # the record may hide what only its URI shows to be a secret
    if past.run and mask(absolute(given)) != mask(recorded):
        raise ConfigError("tracking.uri", f"must be that of the journal in {folder}, {recorded}", given)
    return given


def _opened(uri: str) -> Store:
    from pipeline.tracking.store import Store

    try:
        return Store(uri)
    except ConfigError as error:  # it may answer another time
        raise OSError(str(error)) from error


def _is_closed(past: Past, store: Store) -> bool:
    """Return whether the store has the run with the status that ends its journal, which is shipped last."""
    experiment_id = store.check(past.start["experiment"])
    run = None if experiment_id is None else store.find_run(experiment_id, past.start["tags"]["journal"])
    return run is not None and run.info.status == (past.status or "KILLED")


def _ship(past: Past, store: Store, patience: float) -> str:
    """Ship everything; return what was done."""
    from pipeline.tracking.uploader import Uploader

    uploader = Uploader(store, past.path, may_exist=True, seconds=patience)
    try:
        uploader.finish(patience)
    finally:
        uploader.close()
    return f"{uploader.sent} points were missing; run {uploader.run_id} is {uploader.status}"
