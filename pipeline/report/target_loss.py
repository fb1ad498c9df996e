"""A target loss chosen from the data of a sweep, and the cost of reaching it for each job."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.report import statistics
from pipeline.report.comparison import AXES, Comparison, JobResult, comparable_jobs, pooled
from pipeline.report.statistics import Spread

EVALUATIONS = 5  # the fewest points of a validation loss between which a crossing is worth interpolating
PROGRESS = 0.5  # the least share of the way from the first to the best loss at which a target may be
FELL = 1e-6  # the least relative fall of a loss; a smaller one is rounding


@dataclass(frozen=True)
class TargetLoss:
    """A loss to reach."""

    metric: str  # `val/loss`, or `train/loss` averaged over `Comparison.window` examples
    value: float
    judged: list[str]  # names of the jobs from which it was chosen
    all_reach: bool  # otherwise half of them reach it
    costs: dict[str, dict[str, float]]  # by job that reached it and axis, interpolated between two points

    def cost(self, job: JobResult, axis: str) -> float:
        """Return what the job needed, in units of an axis of `AXES`; NaN if it did not reach the target."""
        return self.costs.get(job.name, {}).get(axis, math.nan)

    def spread(self, jobs: list[JobResult], axis: str) -> Spread | None:
        """Return the costs of the judged jobs among `jobs`; None unless all of these reached the target."""
        judged = [job for job in jobs if job.name in self.judged]
        if not judged or any(job.name not in self.costs for job in judged):
            return None
        return pooled(judged, lambda job: self.cost(job, axis))


def choose(sweep: Comparison) -> TargetLoss | None:
    """Return the lowest loss that all finished jobs reach, or that half of them reach if the former is no progress.

    A diverged job would otherwise set a target that every job meets at its start. Until a job has finished, running
    jobs are judged.
    """
    jobs = comparable_jobs([job for job in sweep.jobs if job.status in ("FINISHED", "RUNNING")])
    for metric in ("val/loss", "train/loss"):
        curves = {job.name: curve for job in jobs if (curve := sweep.smooth(job, metric)) is not None}
        if curves and (metric == "train/loss" or min(len(c.steps) for c in curves.values()) >= EVALUATIONS):
            break
    else:
        return None
    finite = {name: curve.values[np.isfinite(curve.values)] for name, curve in curves.items()}
    best = {name: float(values.min()) if values.size else np.inf for name, values in finite.items()}
    if not np.isfinite(min(best.values())):
        return None
    start = float(np.median([values[0] for values in finite.values() if values.size]))
    lowest, value = min(best.values()), max(best.values())
    if start - lowest <= FELL * abs(start):
        return None
    all_reach = start - value >= PROGRESS * (start - lowest)
    if not all_reach:
        value = float(np.sort(list(best.values()))[(len(best) - 1) // 2])
    costs = {job.name: cost for job in sweep.jobs if (cost := _cost(sweep, job, metric, value))}
    return TargetLoss(metric, value, list(curves), all_reach, costs)


def _cost(sweep: Comparison, job: JobResult, metric: str, value: float) -> dict[str, float]:
    curve = sweep.smooth(job, metric)
    if curve is None:
        return {}
    found = {axis: statistics.reached(job.along(axis, curve.steps), curve.values, value) for axis in AXES}
    return {axis: cost for axis, cost in found.items() if cost is not None}
