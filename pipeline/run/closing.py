"""The end of a run: FINISHED, FAILED or KILLED, with its model logged and all rows shipped."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.common.errors import first_line, say
from pipeline.common.secrets import mask
from pipeline.common.signals import Terminated
from pipeline.config.plain import leaves
from pipeline.tracking.tracker import Tracker

if TYPE_CHECKING:  # importing these takes seconds
    from pipeline.components.assembly import Parts
    from pipeline.training.recorder import Recorder


@contextmanager
def closing(tracker: Tracker, recorder: Recorder) -> Iterator[list[str]]:
    """Close the run as FINISHED, FAILED or KILLED, with all that it has logged.

    Yield a list, which afterwards has a line if the run has finished but the store did not get all of it.
    """
    unshipped: list[str] = []
    try:
        yield unshipped
    except BaseException as error:
        killed = isinstance(error, KeyboardInterrupt | Terminated)
        failure = "".join(traceback.format_exception_only(error)).strip()
        with suppress(Exception):  # a second failure, such as of a lost device, must not hide the first
            recorder.fetch()
        say(*_end(tracker, recorder, "KILLED" if killed else "FAILED", failure))
        raise
    unshipped += _end(tracker, recorder, "FINISHED")


def _end(tracker: Tracker, recorder: Recorder, status: str, failure: str | None = None) -> list[str]:
    """Close the run if it has begun; return a line that says what to do if something could not be shipped."""
    recorder.progress.close()
    try:
        why = tracker.end(status, failure) if tracker.begun else None
    except BaseException:
        say(unshipped_line(tracker.run_dir))
        raise
    return [unshipped_line(tracker.run_dir, f" ({why})")] if why else []


def unshipped_line(run_dir: Path, why: str = "") -> str:
    """Return the line that says what to do if the store did not get all of a run."""
    return f"not all of the run is in the store{why}: {shlex.join(['pipeline', 'sync', str(run_dir)])}"


def log_model(parts: Parts, tracker: Tracker) -> None:
    """Log the trained model; one that cannot be logged does not undo the run."""
    from pipeline.tracking import logged_model  # imports TensorFlow

    spec, tracking = parts.spec, parts.spec.config.tracking
    if not tracker.reaches_store():
        tracker.journal.write({"tags": {"model.not_logged": "the store was away"}})
        say("the model was not logged, as the store is away: its weights are in the last checkpoint")
        return
    try:
        code = tracking.code
        if code is None:
            targets = [str(value) for key, value in leaves(spec.resolved).items() if key.endswith("_target_")]
            code = logged_model.own_code(parts.model, targets)
        logged_model.log(tracking.uri, tracker.experiment_id, tracker.run_id, parts.model, parts.example(), code)
    except Exception as error:  # the run is trained and recorded all the same
        first = first_line(error)
        tracker.journal.write({"tags": {"model.not_logged": mask(first)}})
        say(f"the model was not logged: {first}")
