"""Ships the journal of a run whose trainer has ended, for `pipeline sync`."""

from contextlib import closing, suppress
from pathlib import Path

from pipeline.common import secrets, sqlite_uri
from pipeline.common.errors import NOT_SHIPPED, ConfigError, count, first_line, say
from pipeline.tracking import older_copy
from pipeline.tracking.foreign_store import OwnStore
from pipeline.tracking.journal_file import LockedPast, Past
from pipeline.tracking.journal_lines import Created, RunIds


def sync_run(folder: str, own: OwnStore, patience: float, *, named: bool) -> int:
    """Ship the journal in a run directory to the user's store.

    Args:
        folder: the run directory.
        own: the store that the user's config names.
        patience: seconds without progress after which the store counts as unreachable.
        named: whether the user named the run. If not, a run that is complete in its
            store is skipped, and a run that is still running or whose journal cannot be
            read is skipped with a message.

    Returns:
        The exit status: 0, or `NOT_SHIPPED` if the store lacks a part of the run. It is
        also `NOT_SHIPPED` if that is unknown, as the run is in a store that is neither
        the user's nor allowed, and its journal does not say that it is complete.

    Raises:
        ConfigError: the user named the run, and it cannot be shipped to this store.
    """
    try:
        # Wait up to a second: another sync may have locked the journal to read it.
        past = Past.read(Path(folder), "RUN_DIR", seconds=1.0)
    except ConfigError as error:
        if named:
            raise
        say(f"{folder}: {error}")
        return 0

    try:
        where = f"the journal in {folder}"
        uri = own.followed(past.store, where, moves=not past.run_id)
    except ConfigError as error:
        if named:
            raise
        if past.uploaded:
            return 0
        problem = "nothing is in a store yet"
        if past.run_id:
            problem = "it is unknown whether its store has everything"
        say(f"{folder}: {problem}: {error}")
        return NOT_SHIPPED

    try:
        summary = _ship(folder, past, uri, patience, skip_complete=not named)
    except Exception as error:
        if named and isinstance(error, ConfigError):
            raise
        problem = f"not everything is in the store {secrets.mask(uri)} yet"
        say(f"{folder}: {problem}: {first_line(error)}")
        return NOT_SHIPPED
    if summary is None:
        return 0

    parts = [f"{folder}: {summary}"]
    if past.damage:
        parts.append(past.damage)
    say("; ".join(parts))
    return NOT_SHIPPED if past.damage else 0


def _ship(
    folder: str, past: Past, uri: str, patience: float, *, skip_complete: bool
) -> str | None:
    """Ship the journal; return a summary, or None if the run was skipped."""
    from pipeline.tracking.store import Store  # imports MLflow
    from pipeline.tracking.uploader import Uploader

    try:
        store = Store(uri)
    except ConfigError as error:  # not a user error: the store may answer later
        raise OSError(str(error)) from error

    run = None
    if not store.is_new():
        run = store.find_run(past.start.tags["journal"], past.run_id)
    # A run with the expected status is complete, since the status is shipped last.
    expected = past.status or "KILLED"
    if skip_complete and run is not None and run.info.status == expected:
        return None

    is_older_copy = False
    # The segments after a damaged line are not known.
    if run is not None and not past.damage:
        is_older_copy = older_copy.is_older_copy(run, len(past.resumed), past.status)
    uploader = Uploader(
        store,
        past.path,
        may_exist=True,
        run_id=past.run_id,
        only_rows=is_older_copy,
        seconds=patience,
    )
    with closing(uploader):
        uploader.finish(patience)
    _remember(past, RunIds(uploader.run_id, uploader.experiment_id), uri)
    sent = count(uploader.sent, "point")
    status = uploader.status
    if run is not None and is_older_copy:
        status = (
            f"{run.info.status}: it was continued from another copy of this directory"
        )
    summary = f"{sent} sent to the store; run {uploader.run_id} is {status}"
    if uploader.not_logged:
        summary += f"; the model was not logged: {uploader.not_logged}"
    return summary


def _remember(past: Past, run: RunIds, uri: str) -> None:
    """Append to the journal that the store at `uri` has all of the run.

    Nothing is appended if the journal says so already, is damaged, is in use, or has
    changed meanwhile. The next `pipeline sync` then asks the store.
    """
    store = secrets.mask(sqlite_uri.absolute(uri))
    is_known = past.uploaded and past.run_id == run.run_id and past.store == store
    if past.damage or is_known:
        return
    with suppress(ConfigError, OSError):
        locked = LockedPast.open(past.path.parent)
        if locked.last_position != past.last_position or locked.damage:
            locked.close()
            return
        writer = locked.truncated_writer()
        try:
            moved_to = None if store == past.start.store else store
            writer.write(Created(run, moved_to, complete=True).content())
            writer.flush()
        finally:
            writer.close()
