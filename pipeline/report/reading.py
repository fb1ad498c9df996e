"""Reads a sweep from its store in MLflow."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.config.plain import short
from pipeline.report.job_results import JobResult, job_result
from pipeline.report.search_range import recorded_ranges
from pipeline.report.sweep_result import SweepResult
from pipeline.tracking.foreign_store import CRITICAL, ForeignStore, SweepRecord, listed

# The metric of the parent run that records the number of seeds at each verdict.
SEEDS_OF_VERDICT = "verdict/seeds"


def read(uri: str, sweep: str, allow: Sequence[str] = ()) -> SweepResult:
    """Read a sweep in any state.

    Args:
        uri: the address of the sweep's store.
        sweep: the run ID of the sweep, a prefix of it, the run name, or the name of the
            sweep file, which selects its newest sweep.
        allow: locations where the sweep's artifacts may be.

    Raises:
        ConfigError: the store does not exist or does not answer, no sweep or several
            sweeps match, or the artifacts of the sweep lie outside the allowed
            locations.
    """
    store = ForeignStore.open(uri, allow)
    client = store.client()
    parent = store.sweep(sweep)
    run_id = parent.info.run_id
    tags = parent.data.tags

    # Put the planned jobs first, in their order, then jobs that are not in the plan.
    runs = SweepRecord(uri, run_id, parent.info.experiment_id).children()
    names = dict.fromkeys([*listed(tags, "sweep.jobs"), *runs])
    jobs = []
    for name in names:
        job = job_result(client, name, runs.get(name))
        if tags["sweep.name"] == CRITICAL:
            job = _with_last_stage(job)
        jobs.append(job)

    return SweepResult(
        uri=uri,
        run_id=run_id,
        name=tags["sweep.name"],
        status=parent.info.status,
        varied=listed(tags, "sweep.varied"),
        jobs=jobs,
        best=_best_settings(tags),
        ranges=recorded_ranges(tags),
        question=tags.get("sweep.question", ""),
        search="sweep.search" in tags or "sweep.best" in tags,
        looks=_looks(client, parent),
        started=parent.info.start_time,
        folder=tags.get("sweep.folder", ""),
    )


def _looks(client: Any, parent: Any) -> tuple[int, ...]:
    """Return the distinct numbers of seeds at earlier verdicts, in ascending order."""
    if SEEDS_OF_VERDICT not in parent.data.metrics:
        return ()
    points = client.get_metric_history(parent.info.run_id, SEEDS_OF_VERDICT)
    seeds = {int(point.value) for point in points if math.isfinite(point.value)}
    return tuple(sorted(seeds))


def _with_last_stage(branch: JobResult) -> JobResult:
    """Return the branch with the effective batch of its last stage, and no factor.

    The recorded sizes are those of the first stage, so the batch is read from the name
    of the branch. A branch without a batch in its name keeps the recorded size.
    """
    batch = dict(branch.settings).get("batch", branch.effective_batch_size or 0)
    return replace(branch, factor=None, effective_batch_size=int(batch))


def _best_settings(tags: Mapping[str, str]) -> str:
    """Return the best settings of a search, or an empty string for other sweeps."""
    try:
        overrides = json.loads(tags["sweep.best"])["overrides"]
        pairs = [text.lstrip("+~").split("=", 1) for text in overrides]
        return " ".join(short(key, value) for key, value in pairs)
    except (KeyError, TypeError, ValueError, RecursionError):
        # The sweep was not a search, or the tag was edited by hand.
        return ""
