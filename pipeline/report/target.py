"""The target loss of a sweep, and what it cost each job to reach it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.report import statistics
from pipeline.report.job_results import AXES, Curve, JobResult, pooled
from pipeline.report.statistics import Array, Spread

# The target is the lowest loss that all jobs reach if it is at least this share of the
# way down from the first to the lowest loss. Otherwise, it is the lowest loss that half
# of the jobs reach.
PROGRESS = 0.5
# A relative fall of a loss up to this does not count, since it may be rounding.
FELL = 1e-6


@dataclass(frozen=True)
class TargetLoss:
    """A target loss, chosen from the data of a sweep, and the cost of reaching it.

    Attributes:
        metric: `val/loss`, or `train/loss` averaged over `SweepResult.window` examples.
        value: the target loss.
        judged: the names of the jobs from whose curves the target was chosen.
        all_reach: whether the target was chosen so that all judged jobs reach it.
        chosen_by_half: whether it is the lowest loss that half of the judged jobs reach,
            because not all of them get `PROGRESS` of the way down.
        jobs_near_target: the number of judged jobs that get `PROGRESS` of the way down.
        costs: the cost of each job that reached the target, by job name and axis of
            `AXES`, interpolated between two points. The cost of a fork is counted from
            its checkpoint. A cost is NaN if its axis was not logged.
        at_first: the names of the jobs whose first point, after at least one update,
            already met the target. Their costs are upper bounds, since they may have
            reached the target earlier.
    """

    metric: str
    value: float
    judged: list[str]
    all_reach: bool
    chosen_by_half: bool
    jobs_near_target: int
    costs: dict[str, dict[str, float]]
    at_first: frozenset[str] = frozenset()

    def spread(self, jobs: list[JobResult], axis: str) -> Spread | None:
        """Return the spread of the costs of the judged jobs among `jobs`.

        Return None if none of these has a finite cost, if one of them did not reach the
        target, or if the cost of one is only an upper bound.
        """
        judged = [job for job in jobs if job.name in self.judged]
        if not all(job.name in self.costs for job in judged):
            return None
        if any(job.name in self.at_first for job in judged):
            return None
        return pooled(judged, lambda job: self.costs[job.name][axis])

    def share_that_reached(self, jobs: list[JobResult]) -> str:
        """Return how many of the judged jobs among `jobs` reached it: `2 of 3 jobs`.

        Return an empty string if all or none of them did.
        """
        judged = [job for job in jobs if job.name in self.judged]
        reached = [job for job in judged if job.name in self.costs]
        if len(reached) in (0, len(judged)):
            return ""
        return f"{len(reached)} of {len(judged)} jobs"

    def bound(self, jobs: list[JobResult], axis: str) -> float | None:
        """Return an upper bound on the costs of the judged jobs among `jobs`.

        Return None unless all of these jobs reached the target, and at least one of
        their costs is only an upper bound. The bound is NaN if one of the costs is.
        """
        judged = [job for job in jobs if job.name in self.judged]
        if not all(job.name in self.costs for job in judged):
            return None
        if not any(job.name in self.at_first for job in judged):
            return None
        return float(np.max([self.costs[job.name][axis] for job in judged]))


def choose(
    metric: str,
    jobs: Sequence[JobResult],
    curves: Mapping[str, Curve],
    judged: Sequence[str],
) -> TargetLoss | None:
    """Return the target: the lowest loss that all judged jobs reach.

    Jobs without a finite loss set no target. If some job gets less than `PROGRESS` of
    the way down, for example because it diverged, the target is the lowest loss that
    half of the jobs reach. If that loss is not below the start, the target is the
    lowest loss that is reached by all jobs that get at least `PROGRESS` of the way
    down.

    Args:
        metric: the loss metric.
        jobs: all jobs of the sweep.
        curves: the smoothed losses of the jobs that logged the metric, by job name.
        judged: the names of the jobs by whose curves the target is chosen.

    Returns:
        The target, or None if no loss of a judged job has fallen.
    """
    losses = []
    for name in judged:
        values = curves[name].values
        finite = values[np.isfinite(values)]
        if finite.size:
            losses.append(finite)
    chosen = _choose_value(losses)
    if chosen is None:
        return None
    value = chosen.value

    costs: dict[str, dict[str, float]] = {}
    at_first = []
    for job in jobs:
        curve = curves.get(job.name)
        if curve is None or not (curve.values <= value).any():
            continue
        if curve.values[0] <= value and curve.steps[0] > job.updates_before:
            at_first.append(job.name)
        costs[job.name] = {}
        for axis in AXES:
            x = job.spent(axis, curve.steps)
            costs[job.name][axis] = statistics.reached(x, curve.values, value)
    return TargetLoss(
        metric=metric,
        value=value,
        judged=list(judged),
        all_reach=all(name in costs for name in judged),
        chosen_by_half=chosen.chosen_by_half,
        jobs_near_target=chosen.jobs_near_target,
        costs=costs,
        at_first=frozenset(at_first),
    )


@dataclass(frozen=True)
class _ChosenValue:
    """The target with how it was chosen; see `TargetLoss`."""

    value: float
    chosen_by_half: bool
    jobs_near_target: int


def _choose_value(losses: Sequence[Array]) -> _ChosenValue | None:
    """Choose the target for the finite losses of each job; see `choose`."""
    if not losses:
        return None
    minima = sorted(float(job_losses.min()) for job_losses in losses)
    start = float(np.median([job_losses[0] for job_losses in losses]))
    fall = start - minima[0]
    if fall <= FELL * abs(start):
        return None

    near = [loss for loss in minima if start - loss >= PROGRESS * fall]
    if len(near) == len(minima):
        return _ChosenValue(
            minima[-1], chosen_by_half=False, jobs_near_target=len(near)
        )
    reached_by_half = minima[(len(minima) - 1) // 2]
    # If the losses of half of the jobs only rose, this is their loss at the start.
    if reached_by_half >= start:
        return _ChosenValue(near[-1], chosen_by_half=False, jobs_near_target=len(near))
    return _ChosenValue(
        reached_by_half, chosen_by_half=True, jobs_near_target=len(near)
    )
