"""Ranks the finished jobs of a sweep by their last value of one metric."""

import math
from collections.abc import Mapping
from typing import Any

from pipeline.report.job_results import last_result
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import number


def last_values(runs: Mapping[str, Any]) -> dict[str, str]:
    """Return each finished job's last value of the ranking metric, as text.

    The best job comes first. The sweep's report ranks by the same metric. Jobs without
    a finite value are left out.

    Args:
        runs: the runs in MLflow by the name of the job.
    """
    jobs = [last_result(name, run) for name, run in runs.items()]
    sweep = SweepResult("", run_id="", name="", status="RUNNING", varied=[], jobs=jobs)
    metric = sweep.quality
    if metric is None:
        return {}
    ranked = []
    for job in jobs:
        if job.finished and math.isfinite(job.last(metric)):
            ranked.append(job)
    higher_is_better = not sweep.lower_is_better(metric)
    ranked.sort(key=lambda job: job.last(metric), reverse=higher_is_better)
    return {job.name: f"{metric} {number(job.last(metric))}" for job in ranked}
