"""Reads a sweep from MLflow: jobs with their curves, in groups that differ only by the seed, and the loss to reach."""

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import former_names
from pipeline.config.metric_names import UPDATE_METRICS
from pipeline.report import statistics
from pipeline.report.statistics import Array, Spread
from pipeline.tracking.foreign_store import ForeignStore, SweepRecord, listed

AXES = {"updates": "updates", "examples": "examples seen", "seconds": "seconds in updates"}
NO_RUN = "NO RUN"  # status of a planned job without a run
EVALUATIONS = 5  # the fewest points of a validation loss between which a crossing is worth interpolating
PROGRESS = 0.5  # the least share of the way from the first to the best loss at which a target may be
FELL = 1e-6  # the least relative fall of a loss; a smaller one is rounding
_SIZES = {"factor", "batch", "micro", "effective_batch_size", "micro_batch_size"}
_COST = re.compile(r"loss|error|perplex|entropy|divergence|hinge|poisson|logcosh|^(r?mse|mae|mape)$", re.IGNORECASE)


@dataclass(frozen=True)
class Curve:
    """The history of a metric: `values` after `steps` completed updates, in ascending order."""

    steps: NDArray[np.int64]
    values: Array

    @property
    def last(self) -> float:
        return float(self.values[-1])


@dataclass(frozen=True)
class JobResult:
    """The latest run of a job; a job without a run has only a name."""

    name: str  # unique in its sweep, such as `factor=8 batch=256 seed=1`
    run_id: str | None = None
    status: str = NO_RUN  # or MLflow's status of the run
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    started: int | None = None  # ms since the epoch
    ended: int | None = None
    factor: int | None = None
    batch: int | None = None  # the effective batch, in examples
    micro: int | None = None  # the micro-batch, in examples

    @property
    def finished(self) -> bool:
        return self.status == "FINISHED"

    @property
    def group(self) -> str:
        """Return the name without the seed; jobs of one group are repetitions."""
        return self._without({"seed"}) or "all jobs"

    @property
    def family(self) -> str:
        """Return the name without seed and batch sizes; jobs of one family show the effect of factor and batch."""
        return self._without({"seed", *_SIZES})

    def _without(self, keys: set[str]) -> str:
        # Jobs with equal values end in a number: they are repetitions too.
        words = re.split(r" (?=[^\s=]+=)", re.sub(r" #\d+$", "", self.name))
        return " ".join(word for word in words if word.partition("=")[0] not in keys)

    @cached_property
    def seconds(self) -> Curve | None:
        """Return the cumulative time spent in updates, without evaluation, checkpoints, start-up and first tracing."""
        if (curve := self.curves.get("perf/update_seconds")) is None:
            return None
        each = np.where(curve.steps == 1, self.typical("perf/update_seconds"), curve.values)
        # If only some updates were logged, each row stands for all updates since the previous row.
        return Curve(curve.steps, np.cumsum(each * np.diff(curve.steps, prepend=0)))

    def along(self, axis: str, steps: NDArray[np.int64]) -> Array:
        """Convert `steps` to an axis of `AXES`; NaN beyond what the run logged."""
        if axis == "updates":
            return steps.astype(float)
        curve = self.seconds if axis == "seconds" else self.curves.get("train/examples_seen")
        if curve is None:
            return np.full(len(steps), np.nan)
        known = np.interp(steps, np.append(0, curve.steps), np.append(0.0, curve.values), right=np.nan)
        return np.asarray(known, float)

    def last(self, metric: str) -> float:
        return curve.last if (curve := self.curves.get(metric)) else math.nan

    def typical(self, metric: str) -> float:
        """Return the median over all rows but the first update's, which includes tracing."""
        if (curve := self.curves.get(metric)) is None:
            return math.nan
        later = curve.values[curve.steps > 1]
        return float(np.median(later if later.size else curve.values))


def grouped(jobs: Sequence[JobResult], key: str | Callable[[JobResult], Any]) -> dict[Any, list[JobResult]]:
    """Group the jobs by their attribute `key` or by what it returns, in order; jobs with None are left out."""
    found: dict[Any, list[JobResult]] = {}
    for job in jobs:
        if (value := key(job) if callable(key) else getattr(job, key)) is not None:
            found.setdefault(value, []).append(job)
    return found


Measure = Callable[[JobResult], float]  # NaN for a job without the value


def comparable_jobs(jobs: Sequence[JobResult]) -> list[JobResult]:
    """Return the finished jobs, else the running ones, else all: a job that ended early would distort the mean."""
    for status in ("FINISHED", "RUNNING"):
        if found := [job for job in jobs if job.status == status]:
            return found
    return list(jobs)


def pooled(jobs: Sequence[JobResult], value: Measure) -> Spread | None:
    """Return the spread of `value` over the seeds of one group; for several groups, the mean of their means.

    The latter has no deviation, since groups do not differ by chance, and counts the fewest seeds of a group.
    """
    groups = grouped(jobs, "group").values()
    spreads = [found for group in groups if (found := statistics.spread([value(job) for job in group])) is not None]
    if len(spreads) < 2:
        return spreads[0] if spreads else None
    return Spread(float(np.mean([s.mean for s in spreads])), None, min(s.count for s in spreads))


@dataclass(frozen=True)
class TargetLoss:
    """A loss to reach, chosen from the data of a sweep, and the cost of reaching it for each job."""

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


@dataclass(frozen=True)
class Comparison:
    """A sweep with all of its jobs, in the order of the plan."""

    uri: str  # of its store
    run_id: str
    name: str
    status: str
    varied: list[str]
    jobs: list[JobResult]
    best: str = ""  # overrides with the lowest loss, if the sweep was a search

    @property
    def groups(self) -> dict[str, list[JobResult]]:
        return grouped(self.jobs, "group")

    @property
    def families(self) -> dict[str, list[JobResult]]:
        return grouped(self.jobs, "family")

    @cached_property
    def metrics(self) -> list[str]:
        """Return the losses, then the user's validation metrics, or training metrics if there are none."""
        names = sorted({name for job in self.jobs for name in job.curves if not name.startswith("perf/")})
        users = [name for name in names if name.partition("/")[2] not in UPDATE_METRICS]
        validation = [name for name in users if name.startswith("val/")]
        return [name for name in ("train/loss", "val/loss") if name in names] + (validation or users)

    @property
    def quality(self) -> str | None:
        """Return the metric that ranks the jobs: the first that is not a loss, else a loss."""
        return next(iter([m for m in self.metrics if not m.endswith("/loss")] + self.metrics[::-1]), None)

    def lower_is_better(self, metric: str) -> bool:
        """Return whether the metric is a cost, judged by its name and its class's name."""
        name = metric.split("/", 1)[1]
        targets = [job.params.get(f"training.metrics.{name}._target_", "") for job in self.jobs]
        return any(_COST.search(text) for text in (name, *(target.rsplit(".", 1)[-1] for target in targets)))

    @property
    def window(self) -> int:
        """Return the number of examples over which training metrics are averaged: the largest batch."""
        return max((job.batch or 1 for job in self.jobs), default=1)

    def smooth(self, job: JobResult, metric: str) -> Curve | None:
        """Return the job's curve; a training metric is averaged over the last `window` examples."""
        curve = job.curves.get(metric)
        if curve is None or not metric.startswith("train/"):
            return curve
        examples = job.along("examples", curve.steps)
        if not np.isfinite(examples).all():
            return curve
        return Curve(curve.steps, statistics.trailing_mean(examples, curve.values, self.window))

    def final(self, job: JobResult, metric: str) -> float:
        return curve.last if (curve := self.smooth(job, metric)) else math.nan

    @cached_property
    def target(self) -> TargetLoss | None:
        """Return the lowest loss that all finished jobs, or else the running ones, reach.

        Half of them suffice if that is no progress, as with a diverged job, whose loss every job meets at its start.
        """
        jobs = comparable_jobs([job for job in self.jobs if job.status in ("FINISHED", "RUNNING")])
        for metric in ("val/loss", "train/loss"):
            curves = {job.name: curve for job in jobs if (curve := self.smooth(job, metric)) is not None}
            if curves and (metric == "train/loss" or min(len(c.steps) for c in curves.values()) >= EVALUATIONS):
                break
        else:
            return None
        finite = {name: curve.values[np.isfinite(curve.values)] for name, curve in curves.items()}
        best = {name: float(values.min()) if values.size else np.inf for name, values in finite.items()}
        lowest, value = min(best.values()), max(best.values())
        if not np.isfinite(lowest):
            return None
        start = float(np.median([values[0] for values in finite.values() if values.size]))
        if start - lowest <= FELL * abs(start):
            return None
        all_reach = start - value >= PROGRESS * (start - lowest)
        if not all_reach:
            value = float(np.sort(list(best.values()))[(len(best) - 1) // 2])
        costs = {job.name: cost for job in self.jobs if (cost := self._cost(job, metric, value))}
        return TargetLoss(metric, value, list(curves), all_reach, costs)

    def _cost(self, job: JobResult, metric: str, value: float) -> dict[str, float]:
        if (curve := self.smooth(job, metric)) is None:
            return {}
        found = {axis: statistics.reached(job.along(axis, curve.steps), curve.values, value) for axis in AXES}
        return {axis: cost for axis, cost in found.items() if cost is not None}

    @property
    def at_once(self) -> int:
        """Return the largest number of jobs that ran at the same time."""
        edges = [(job.started, 1) for job in self.jobs if job.started]
        edges += [(job.ended, -1) for job in self.jobs if job.started and job.ended]
        return int(max(np.cumsum([change for _, change in sorted(edges)]), default=0))


def read(uri: str, sweep: str, allow: Sequence[str] = ()) -> Comparison:
    """Read a sweep in any state, given its run ID, the start of it, or its run name; else raise a `ConfigError`."""
    store = ForeignStore.open(uri, allow)
    client, parent = store.client(), store.sweep(sweep)
    tags, info = parent.data.tags, parent.info
    runs = SweepRecord(uri, info.run_id, info.experiment_id).children()
    jobs = [_job(client, name, runs.get(name)) for name in dict.fromkeys([*listed(tags, "sweep.jobs"), *runs])]
    best = ""
    with suppress(KeyError, TypeError, ValueError, RecursionError):  # no search, or the tag was changed
        best = " ".join(json.loads(tags["sweep.best"])["overrides"])
    return Comparison(uri, info.run_id, tags["sweep.name"], info.status, listed(tags, "sweep.varied"), jobs, best)


def _job(client: Any, name: str, run: Any) -> JobResult:
    if run is None:
        return JobResult(name)
    info, tags = run.info, run.data.tags
    params = {key: former_names.current(value) for key, value in run.data.params.items()}
    metrics = [key for key in run.data.metrics if key.startswith(("train/", "val/", "perf/"))]
    curves = {key: _curve(client.get_metric_history(info.run_id, key)) for key in metrics}
    sizes = []
    for key in ("factor", "effective_batch_size", "micro_batch_size"):
        # As derived, or as configured if the run ended before it was derived.
        values = (params.get(f"{place}.{key}", "") for place in ("derived", "accumulation"))
        sizes.append(next((int(value) for value in values if value.isdigit()), None))
    return JobResult(name, info.run_id, info.status, params, tags, curves, info.start_time, info.end_time, *sizes)


def _curve(points: Sequence[Any]) -> Curve:
    by_step = {point.step: point.value for point in sorted(points, key=lambda point: (point.step, point.timestamp))}
    values = np.array(list(by_step.values()), float)
    # SQL stores hold the largest double in place of infinity.
    values = np.where(np.abs(values) > 1.7e308, np.copysign(np.inf, values), values)
    return Curve(np.array(list(by_step), np.int64), values)
