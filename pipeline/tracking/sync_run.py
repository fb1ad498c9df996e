"""Ships the journal of a run whose trainer is gone, from any process."""

from contextlib import closing
from pathlib import Path

from pipeline.common.errors import NOT_SHIPPED, ConfigError, first_line, say
from pipeline.tracking.foreign_store import OwnStore
from pipeline.tracking.journal_file import Past


def sync_run(folder: str, own: OwnStore, patience: float, *, named: bool) -> int:
    """Ship the journal in the run directory `folder` to the user's `own` store; return the exit status.

    A run that the user has not `named` is skipped if it is running or complete, and its `ConfigError` is printed.
    """
    try:
        past = Past.of(
            Path(folder), "RUN_DIR", seconds=1.0
        )  # another sync may be reading it too
        past.close()
    except ConfigError as error:
        if named:
            raise
        say(f"{folder}: {error}")
        return 0
    try:
        uri = own.followed(
            str(past.start["store"]), f"the journal in {folder}", moves=not past.run
        )
        from pipeline.tracking.store import Store  # imports MLflow
        from pipeline.tracking.uploader import Uploader

        try:
            store = Store(uri)
        except ConfigError as error:  # it may answer another time
            raise OSError(str(error)) from error
        if (
            not named
            and (experiment_id := store.check(past.start["experiment"])) is not None
        ):
            run = store.find_run(experiment_id, past.start["tags"]["journal"])
            if run is not None and run.info.status == (
                past.status or "KILLED"
            ):  # which is shipped last
                return 0
        with closing(
            Uploader(store, past.path, may_exist=True, seconds=patience)
        ) as uploader:
            uploader.finish(patience)
        shipped = f"{uploader.sent} points were missing; run {uploader.run_id} is {uploader.status}"
        not_logged = (
            f"the model was not logged: {uploader.not_logged}"
            if uploader.not_logged
            else ""
        )
        say("; ".join(filter(None, (f"{folder}: {shipped}", not_logged, past.damage))))
    except Exception as error:
        if named and isinstance(error, ConfigError):
            raise
        say(f"{folder}: not all is in the store yet: {first_line(error)}")
        return NOT_SHIPPED
    return NOT_SHIPPED if past.damage else 0
