"""Reads a sweep from MLflow: jobs with their curves, in groups that differ only by the seed, and the loss to reach."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from pipeline.config.metric_names import UPDATE_METRICS
from pipeline.config.plain import short
from pipeline.report import statistics
from pipeline.report.job_results import (
    AXES,
    SIZES,
    Curve,
    JobResult,
    comparable_jobs,
    grouped,
    job_result,
    pooled,
)
from pipeline.report.statistics import Spread
from pipeline.tracking.foreign_store import CRITICAL, ForeignStore, SweepRecord, listed

EVALUATIONS = 5  # the fewest points of a validation loss between which a crossing is worth interpolating
PROGRESS = 0.5  # the least share of the way from the first to the best loss at which a target may be
FELL = 1e-6  # the least relative fall of a loss; a smaller one is rounding
_COST = re.compile(
    r"loss|error|perplex|entropy|divergence|hinge|poisson|logcosh|^(r?mse|mae|mape)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class TargetLoss:
    """A loss to reach, chosen from the data of a sweep, and the cost of reaching it for each job."""

    metric: (
        str  # `val/loss`, or `train/loss` averaged over `Comparison.window` examples
    )
    value: float
    judged: list[str]  # names of the jobs from which it was chosen
    all_reach: bool  # otherwise half of them reach it
    costs: dict[
        str, dict[str, float]
    ]  # by job that reached it and axis of `AXES`, interpolated between two points

    def spread(self, jobs: list[JobResult], axis: str) -> Spread | None:
        """Return the costs of the judged jobs among `jobs`; None unless all of these reached the target."""
        judged = [job for job in jobs if job.name in self.judged]
        reached = all(job.name in self.costs for job in judged)
        return (
            pooled(judged, lambda job: self.costs[job.name][axis]) if reached else None
        )


@dataclass(frozen=True)
class Comparison:
    """A sweep with all of its jobs, in the order of the plan."""

    uri: str  # of its store
    run_id: str
    name: str
    status: str
    varied: list[str]
    jobs: list[JobResult]
    best: str = ""  # settings with the lowest loss, if the sweep was a search
    question: str = ""  # of the sweep file

    @property
    def branches(self) -> bool:
        """Return whether the jobs are branches of a checkpoint, of `pipeline critical`."""
        return self.name == CRITICAL and any(
            "start.update" in job.tags for job in self.jobs
        )

    @property
    def groups(self) -> dict[str, list[JobResult]]:
        return grouped(self.jobs, "group")

    @cached_property
    def axes(self) -> list[str]:
        """Return the swept keys: `factor` and `batch` if they vary, then all others but the seed; else `group`."""
        named = dict.fromkeys(
            key
            for job in self.jobs
            for key, _ in job.settings
            if key not in {"seed", *SIZES}
        )
        by = {
            key: grouped(self.jobs, partial(JobResult.setting, key=key))
            for key in ("factor", "batch", *named)
        }
        return [key for key, found in by.items() if len(found) > 1] or ["group"]

    @cached_property
    def metrics(self) -> list[str]:
        """Return the losses, then the user's validation metrics, or training metrics if there are none."""
        names = sorted(
            {
                name
                for job in self.jobs
                for name in job.curves
                if not name.startswith("perf/")
            }
        )
        users = [name for name in names if name.partition("/")[2] not in UPDATE_METRICS]
        validation = [name for name in users if name.startswith("val/")]
        return [name for name in ("train/loss", "val/loss") if name in names] + (
            validation or users
        )

    @property
    def quality(self) -> str | None:
        """Return the metric that ranks the jobs: the first that is not a loss, else a loss."""
        return next(
            iter(
                [m for m in self.metrics if not m.endswith("/loss")]
                + self.metrics[::-1]
            ),
            None,
        )

    def lower_is_better(self, metric: str) -> bool:
        """Return whether the metric is a cost, judged by its name and its class's name."""
        name = metric.split("/", 1)[1]
        targets = [
            job.params.get(f"training.metrics.{name}._target_", "") for job in self.jobs
        ]
        return any(
            _COST.search(text)
            for text in (name, *(target.rsplit(".", 1)[-1] for target in targets))
        )

    @cached_property
    def ends(self) -> dict[str, Spread]:
        """Return the last values of `quality`, by group with a job that finished with one."""
        measure = partial(self.final, metric=self.quality or "")
        finals = {
            group: [measure(job) for job in jobs if job.finished]
            for group, jobs in self.groups.items()
        }
        return {
            group: found
            for group, values in finals.items()
            if (found := statistics.spread(values))
        }

    @property
    def window(self) -> int:
        """Return the number of examples over which training metrics are averaged: the largest batch."""
        return max((job.batch or 1 for job in self.jobs), default=1)

    def smooth(self, job: JobResult, metric: str) -> Curve | None:
        """Return the job's curve; a training metric is averaged over the last `window` examples."""
        if (curve := job.curves.get(metric)) is None or not metric.startswith("train/"):
            return curve
        examples = job.along("examples", curve.steps)
        if not np.isfinite(examples).all():
            return curve
        return Curve(
            curve.steps, statistics.trailing_mean(examples, curve.values, self.window)
        )

    def final(self, job: JobResult, metric: str) -> float:
        return (
            float(curve.values[-1]) if (curve := self.smooth(job, metric)) else math.nan
        )

    def cost(self, job: JobResult, axis: str) -> float:
        """Return what the job needed to reach the target, in units of an axis of `AXES`; NaN if it did not."""
        return (
            self.target.costs.get(job.name, {}).get(axis, math.nan)
            if self.target
            else math.nan
        )

    @cached_property
    def target(self) -> TargetLoss | None:
        """Return the lowest loss that all finished jobs, or else the running ones, reach.

        Half of them suffice if that is no progress, as with a diverged job, whose loss every job meets at its start.
        """
        if self.branches:  # their examples count from the other run's start
            return None
        jobs = comparable_jobs(
            [job for job in self.jobs if job.status in ("FINISHED", "RUNNING")]
        )
        for metric, fewest in (("val/loss", EVALUATIONS), ("train/loss", 0)):
            curves = {
                job.name: curve
                for job in jobs
                if (curve := self.smooth(job, metric)) is not None
            }
            if curves and min(len(curve.steps) for curve in curves.values()) >= fewest:
                break
        else:
            return None
        finite = [curve.values[np.isfinite(curve.values)] for curve in curves.values()]
        best = sorted(float(values.min(initial=np.inf)) for values in finite)
        lowest, value = best[0], best[-1]
        if not np.isfinite(lowest):
            return None
        start = float(np.median([values[0] for values in finite if values.size]))
        if start - lowest <= FELL * abs(start):
            return None
        all_reach = start - value >= PROGRESS * (start - lowest)
        value = value if all_reach else best[(len(best) - 1) // 2]
        costs: dict[str, dict[str, float]] = {}
        for job in self.jobs:
            if (curve := self.smooth(job, metric)) is not None and (
                curve.values <= value
            ).any():
                along = {axis: job.along(axis, curve.steps) for axis in AXES}
                costs[job.name] = {
                    axis: statistics.reached(x, curve.values, value)
                    for axis, x in along.items()
                }
        return TargetLoss(metric, value, list(curves), all_reach, costs)


def read(uri: str, sweep: str, allow: Sequence[str] = ()) -> Comparison:
    """Read a sweep in any state, given its run ID, the start of it, or its run name; else raise a `ConfigError`."""
    store = ForeignStore.open(uri, allow)
    client, parent = store.client(), store.sweep(sweep)
    tags, info = parent.data.tags, parent.info
    runs = SweepRecord(uri, info.run_id, info.experiment_id).children()
    jobs = [
        job_result(client, name, runs.get(name))
        for name in dict.fromkeys([*listed(tags, "sweep.jobs"), *runs])
    ]
    if (
        tags["sweep.name"] == CRITICAL
    ):  # the batch of their last stage; the recorded factor is of the first one
        jobs = [
            replace(
                job,
                factor=None,
                batch=int(dict(job.settings).get("batch", job.batch or 0)),
            )
            for job in jobs
        ]
    best, varied, question = (
        "",
        listed(tags, "sweep.varied"),
        tags.get("sweep.question", ""),
    )
    with suppress(
        KeyError, TypeError, ValueError, RecursionError
    ):  # no search, or the tag was changed
        best = " ".join(
            short(*text.split("=", 1))
            for text in json.loads(tags["sweep.best"])["overrides"]
        )
    return Comparison(
        uri, info.run_id, tags["sweep.name"], info.status, varied, jobs, best, question
    )
