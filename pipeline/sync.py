"""`pipeline sync`: ship to MLflow whatever a run could not. Safe to call again, and from several machines at once."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import compose
from pipeline.errors import NOT_SHIPPED, ConfigError, Parser, first_line, say
from pipeline.masking import HIDDEN, mask
from pipeline.run_dirs import run_dirs
from pipeline.tracking.journal_file import Past, absolute

if TYPE_CHECKING:  # it imports MLflow
    from pipeline.tracking.store import Store

RETRY = 1.0  # seconds between two tries


def sync(arguments: Sequence[str]) -> int:
    """Ship to MLflow what is missing of the runs in RUN_DIR …; without one, of those below the working directory."""
    parser = Parser(prog="pipeline sync", description=sync.__doc__, allow_abbrev=False)
    parser.add_argument("folders", metavar="RUN_DIR", nargs="*", help="run directories, or folders that hold some")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with config groups of your own")
    options = parser.parse_args([text for text in arguments if "=" not in text])
    overrides = [text for text in arguments if "=" in text]
    config_dir = ["--config-dir", options.config_dir] if options.config_dir else []
    tracking = compose.composed([*config_dir, *overrides]).tracking
    # The journal names its store; the config's counts where it is given here, as it may hold a password.
    given = tracking.uri if any(text.startswith(("tracking.uri=", "tracking=")) for text in overrides) else None
    found = run_dirs(options.folders)
    if not found:
        say("no run directory with a journal was found")
        return 0
    named = {os.path.normpath(folder) for folder in options.folders}
    statuses = [_sync(folder, given, tracking.patience, named=folder in named) for folder in found]
    return max(statuses + [_close_sweep(folder, given) for folder in {Path(folder).parent for folder in found}])


def _sync(folder: str, given: str | None, patience: float, *, named: bool) -> int:
    """Ship one journal; return the exit status. One that was not `named` is left alone while its run goes on."""
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


def _close_sweep(folder: Path, given: str | None) -> int:
    """Close the sweep in `folder`, if there is one that could not be closed when its jobs had ended."""
    from pipeline.sweep import parent_run

    try:
        parent = parent_run.left_open(folder, given)
        if parent is not None:
            parent.close()
    except Exception as error:
        say(f"{folder}: the sweep is not closed in the store yet: {first_line(error)}")
        return NOT_SHIPPED
    return 0


def _store(past: Past, given: str | None) -> str:
    """Return the URI of the journal's store."""
    recorded, folder = str(past.start["store"]), str(past.path.parent)
    if given is None and HIDDEN in recorded:
        raise ConfigError("tracking.uri", f"must be given: the journal in {folder} has it without its secret", recorded)
    if given is not None and past.run and mask(absolute(given)) != recorded:
        raise ConfigError("tracking.uri", f"must be that of the journal in {folder}, {recorded}", given)
    return recorded if given is None else given


def _is_closed(past: Past, uri: str) -> bool:
    """Return whether the store has the run with the status that ends its journal, which is shipped last."""
    from pipeline.tracking.delivery import run_of

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
    from pipeline.tracking.delivery import Delivery

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
