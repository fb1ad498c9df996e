"""Ends the parent run of a sweep, after the runs of its jobs are closed."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.errors import count, say
from pipeline.sweep import stop_request, sweep_file
from pipeline.sweep.ending import INTERRUPTED, JobEndings
from pipeline.sweep.parent_run import set_tag
from pipeline.tracking.foreign_store import OwnStore, SweepRecord, listed

# Seconds that a job's shipper has to close the run after the job has ended, in addition
# to `tracking.patience`.
SHIPPER_GRACE = 15.0
_SENT = "SIGTERM"  # the signal that a sweep sends to its jobs to interrupt them


def close(
    parent: SweepRecord,
    job_names: Sequence[str],
    endings: JobEndings,
    patience: float,
    status: str | None = None,
    interrupted_by: str = "",
    unfinished_status: str = "FAILED",
) -> int:
    """End the parent run of a sweep, and print how each job ended, the best one first.

    First wait until the runs of all ended jobs are closed. If an exception ends the
    wait, end the parent run as KILLED.

    Args:
        parent: the parent run of the sweep.
        job_names: the names of all planned jobs.
        endings: how the jobs that this process ran have ended.
        patience: seconds that a job's shipper may wait for the store.
        status: `KILLED` or `FAILED` if the sweep itself was killed or failed. If None,
            the status is `FINISHED` if all jobs finished, else `unfinished_status`.
        interrupted_by: what interrupted the sweep, which then interrupted its jobs. It
            is recorded in their runs.
        unfinished_status: the status of a sweep that itself ended as planned, but whose
            jobs have not all finished.

    Returns:
        0 if all jobs finished, else 1.
    """
    from pipeline.report import job_ranking  # imports NumPy

    client = parent.client()
    try:
        children = _closed_children(parent, endings.ended_at, patience)
        if interrupted_by not in ("", _SENT):
            _record_interruption(parent, children, endings, interrupted_by)
            children = parent.children()
        was_interrupted = status == "KILLED" or bool(endings.ended_sweep)
        rows = list(_rows(job_names, children, endings, was_interrupted))
        results = job_ranking.last_values(children)
        set_tag(parent, "sweep.lost", json.dumps(endings.failure_reasons()))
    except BaseException:
        with suppress(Exception):  # the store may be unreachable
            client.set_terminated(parent.run_id, "KILLED")
        raise

    # Jobs without a result follow the others, in the order of the plan.
    places = {name: place for place, name in enumerate(results)}
    rows.sort(key=lambda row: places.get(row.name, len(places)))
    width = max((len(row.name) for row in rows), default=0)
    finished = 0
    for row in rows:
        result = f"{results.get(row.name, '')}  {row.reason}".strip()
        say(f"  {row.name:{width}}  {row.status:8}  {result}".rstrip())
        if row.status == "FINISHED":
            finished += 1
    say(f"sweep {parent.run_id}: {finished} of {count(len(rows), 'job')} finished")

    all_finished = finished == len(rows)
    if not status:
        status = "FINISHED" if all_finished else unfinished_status
    stop_request.withdraw(parent)
    client.set_terminated(parent.run_id, status)
    if all_finished:
        return 0
    return 1


def _record_interruption(
    parent: SweepRecord,
    children: Mapping[str, Any],
    endings: JobEndings,
    interrupted_by: str,
) -> None:
    """Record in the runs of interrupted jobs what interrupted their sweep.

    A job knows only the signal that the sweep has sent it.
    """
    for name, ending in endings.by_name.items():
        run = children.get(name)
        if run is None or ending.cause != INTERRUPTED:
            continue
        if run.data.tags.get("failure") == f"interrupted by {_SENT}":
            failure = f"interrupted by {interrupted_by}: the sweep sent {_SENT}"
            parent.client().set_tag(run.info.run_id, "failure", failure)


def close_left_open(folder: Path, own: OwnStore) -> None:
    """Close the sweep in `folder` if its process died before closing it.

    A sweep whose process still runs is not changed.

    Args:
        folder: the folder of the sweep.
        own: the user's store, and other stores that the user allows.

    Raises:
        ConfigError: the sweep is recorded in a store that is not among these.
    """
    content = sweep_file.read_unlocked(folder)
    if content is None:
        return
    uri = own.followed(str(content["store"]), f"the sweep in {folder}")
    parent = SweepRecord(uri, content["run_id"], content["experiment_id"])
    stored_parent = parent.client().get_run(parent.run_id)
    tags = stored_parent.data.tags
    process_id = tags.get(sweep_file.PROCESS)
    if process_id is not None and process_id != content.get("process"):
        return  # The sweep was reopened by another process, in another folder.
    job_names = listed(tags, "sweep.jobs")
    if stored_parent.info.status == "RUNNING":
        # No job ended in this process, so there is no shipper to wait for.
        close(parent, job_names, JobEndings(), patience=0)


def close_as_killed(client: Any, run: Any) -> None:
    """Close the run of a job whose process and shipper have died, as KILLED."""
    client.set_tag(
        run.info.run_id, "failure", "The job and its shipper ended without a message."
    )
    client.set_terminated(run.info.run_id, "KILLED")


def _closed_children(
    parent: SweepRecord, ended_at: Mapping[str, float], patience: float
) -> dict[str, Any]:
    """Wait until the runs of all ended jobs are closed, and return all jobs' runs.

    Usually the job's shipper closes the run. A run that is still open `SHIPPER_GRACE`
    plus `patience` seconds after the job ended is closed here as KILLED.
    """
    while True:
        children = parent.children()
        still_open = []
        for name, run in children.items():
            if name in ended_at and run.info.status == "RUNNING":
                still_open.append(name)
        if not still_open:
            return children
        for name in still_open:
            if time.monotonic() > ended_at[name] + SHIPPER_GRACE + patience:
                close_as_killed(parent.client(), children[name])
        time.sleep(0.5)


@dataclass(frozen=True)
class _JobRow:
    """The line about one job that is printed when a sweep ends."""

    name: str
    status: str
    reason: str


def _rows(
    job_names: Sequence[str],
    children: Mapping[str, Any],
    endings: JobEndings,
    was_interrupted: bool,
) -> Iterator[_JobRow]:
    """Yield the line to print for each planned job."""
    failure_reasons = endings.failure_reasons()
    for name in job_names:
        failure_reason = failure_reasons.get(name, "")
        if name == endings.ended_sweep:
            # Leave out the reason, which the error that ends the command gives.
            failure_reason = "rejected, which ended the sweep"
        run = children.get(name)
        if run is None:
            status = "NOT RUN" if was_interrupted else "NO RUN"
            yield _JobRow(name, status, failure_reason)
            continue

        recorded_reason = run.data.tags.get("failure", "").split("\n")[0]
        is_explained = (
            run.info.status == "FINISHED"
            or failure_reason in recorded_reason
            or was_interrupted
        )
        if is_explained:
            reason = recorded_reason
        else:
            reason = f"{recorded_reason} {failure_reason}".strip()
        yield _JobRow(name, run.info.status, reason)
