"""A sweep: its jobs, how they are grouped, and the values that are compared."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.config.metric_names import UPDATE_METRICS, is_loss
from pipeline.report import metric_direction, statistics
from pipeline.report.job_results import (
    FORKED_AFTER,
    LOSS,
    NO_RUN,
    SIZES,
    VALIDATION_LOSS,
    Curve,
    JobResult,
    by_group,
    comparable_jobs,
    finished_jobs,
    grouped,
)
from pipeline.report.search_range import SearchRange
from pipeline.report.seed_differences import Values, values_by_seed
from pipeline.report.target import TargetLoss, choose
from pipeline.tracking.foreign_store import CRITICAL
from pipeline.tracking.journal_summary import kept_metric

# The minimum number of validation losses per judged job. With fewer, it would be too
# uncertain when a job reached the target, so jobs are judged by the training loss.
EVALUATIONS = 5
# Training metrics are averaged over this share of the examples in the shortest run, so
# that a single batch with a low loss does not reach the target.
WINDOW = 0.1


@dataclass(frozen=True)
class SweepResult:
    """A sweep with all of its jobs.

    Attributes:
        uri: the address of the sweep's store.
        run_id: the ID of the parent run.
        name: the name of the sweep.
        status: the status of the parent run in MLflow.
        varied: the keys that the sweep varies.
        jobs: the jobs in the order of the plan, then those that are not in the plan.
        best: the settings with the lowest loss if the sweep was a search, or else
            empty.
        ranges: the ranges in which a search looked for values, by key.
        question: the question in the header of the sweep file.
        search: whether the sweep was a search, in which the results of earlier trials
            determine later ones.
        looks: the distinct numbers of seeds at earlier verdicts on this sweep, in
            ascending order.
        started: when the sweep began, in milliseconds since the epoch, or None.
        folder: its folder on the machine on which it began; empty if unknown.
    """

    uri: str
    run_id: str
    name: str
    status: str
    varied: list[str]
    jobs: list[JobResult]
    best: str = ""
    ranges: Mapping[str, SearchRange] = field(default_factory=dict)
    question: str = ""
    search: bool = False
    looks: tuple[int, ...] = ()
    started: int | None = None
    folder: str = ""

    @property
    def identity(self) -> str:
        """Which sweep it is, in words: its ID, its name, its start and its folder."""
        return f"sweep {self.run_id[:8]} ({self.name}){self.place}"

    @property
    def place(self) -> str:
        """When and where the sweep began, in words; empty if neither is known."""
        text = ""
        if self.started:
            local_time = datetime.fromtimestamp(self.started / 1000)
            text = f", begun {local_time:%Y-%m-%d %H:%M:%S}"
        if self.folder:
            text += f" in {self.folder}"
        return text

    @property
    def branches(self) -> bool:
        """Whether the jobs are the branches of `pipeline critical`."""
        if self.name != CRITICAL:
            return False
        return any(FORKED_AFTER in job.tags for job in self.jobs)

    @property
    def groups(self) -> dict[str, list[JobResult]]:
        """The jobs by group. The jobs of a group differ only in the seed."""
        return by_group(self.jobs)

    @cached_property
    def axes(self) -> list[str]:
        """The swept keys over which results are plotted.

        These are `factor` and `batch` if they vary, then all other varied keys except
        the seed and those in `SIZES`. If no such key varies, this is only `group`.
        """
        keys = {"factor": None, "batch": None}
        for job in self.jobs:
            for key, _ in job.settings:
                if key not in {"seed", *SIZES}:
                    keys[key] = None
        varied = [key for key in keys if len(self.by_setting(self.jobs, key)) > 1]
        return varied or ["group"]

    def by_setting(
        self, jobs: Sequence[JobResult], key: str
    ) -> dict[Any, list[JobResult]]:
        """Group some jobs of the sweep by their value of a swept key.

        The values are numbers if all values of the key in the sweep are numbers, and
        different strings are different numbers. Otherwise they are the strings in the
        names of the jobs, since 1.1 and 1.10 may be versions, and `all` may be a value
        beside 100.
        """
        are_texts = key in self._text_keys

        def value(job: JobResult) -> Any:
            setting = job.setting(key)
            if are_texts and isinstance(setting, float):
                return dict(job.settings)[key]
            return setting

        return grouped(jobs, value)

    @cached_property
    def _text_keys(self) -> set[str]:
        """The keys in the names of the jobs whose values are not all numbers."""
        texts_by_value: dict[str, dict[Any, str]] = {}
        keys = set()
        for job in self.jobs:
            for key, text in job.settings:
                value = job.setting(key)
                # A recorded size (an int) replaces the text in the name, so only floats
                # and strings are checked.
                if isinstance(value, str):
                    keys.add(key)
                if isinstance(value, float):
                    texts = texts_by_value.setdefault(key, {})
                    if texts.setdefault(value, text) != text:
                        keys.add(key)
        return keys

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the losses, then those of the user's metrics.

        The user's metrics are the validation metrics, or the training metrics if there
        are no validation metrics. Those of further validation sets come last, with
        their losses.
        """
        names: set[str] = set()
        for job in self.jobs:
            names.update(job.curves)

        losses = []
        validation = []
        of_sets = []
        training = []
        for name in sorted(names):
            prefix, _, rest = name.partition("/")
            if name in (LOSS, VALIDATION_LOSS):
                losses.append(name)
            elif prefix == "perf" or rest in UPDATE_METRICS:
                continue
            elif rest.partition("/")[0] in self._validation_sets and prefix == "val":
                of_sets.append(name)
            elif prefix == "val":
                validation.append(name)
            else:
                training.append(name)
        return losses + ((validation + of_sets) or training)

    @property
    def keeps_best_by(self) -> str | None:
        """The metric of `training.keep_best`, or None if there is none.

        It is also None if the jobs that ran do not all have the same metric, or if the
        metric was not logged.
        """
        kept = {kept_metric(job.params) for job in self.jobs if job.status != NO_RUN}
        if len(kept) != 1:
            return None
        metric_of_all = kept.pop()
        if metric_of_all is None or metric_of_all.name not in self.metrics:
            return None
        return metric_of_all.name

    @property
    def quality(self) -> str | None:
        """The metric that ranks the jobs, or None if there is none.

        It is `keeps_best_by`, unless that is None. Otherwise, it is the first metric
        that is not a loss; see `is_loss`. If all are losses, it is the validation loss,
        or else the training loss. The loss of a single output never ranks the jobs.
        """
        if self.keeps_best_by is not None:
            return self.keeps_best_by
        for metric in self.metrics:
            if not is_loss(metric):
                return metric
        for metric in (VALIDATION_LOSS, LOSS):
            if metric in self.metrics:
                return metric
        return None

    @cached_property
    def _validation_sets(self) -> set[str]:
        """The names of the further validation sets of all jobs."""
        names: set[str] = set()
        for job in self.jobs:
            names |= job.validation_sets
        return names

    def lower_is_better(self, metric: str) -> bool:
        """Return whether lower values of a metric are better."""
        return metric_direction.lower_is_better(metric, self.jobs)

    @cached_property
    def ends(self) -> dict[str, Values]:
        """The final value of `quality` for each seed, by group.

        A group is left out if none of its finished jobs has a finite final value.
        """
        metric = self.quality or ""
        ends: dict[str, Values] = {}
        for group, jobs in self.groups.items():
            finished = finished_jobs(jobs)
            values = values_by_seed(finished, lambda job: self.final(job, metric))
            if values:
                ends[group] = values
        return ends

    def target_values(self, axis: str) -> dict[str, Values]:
        """Return the cost of reaching the target for each seed, by group.

        The cost is in the unit of `axis`, one of `AXES`. A group is left out if it has
        no judged jobs, if one of them did not reach the target or has only an upper
        bound on the cost, or if no cost is finite. In other groups, jobs without a
        finite cost are left out.
        """
        if self.target is None:
            return {}
        judged = self.target.judged
        costs: dict[str, Values] = {}
        for group, jobs in self.groups.items():
            if self.target.spread(jobs, axis) is None:
                continue
            jobs = [job for job in jobs if job.name in judged]
            costs[group] = values_by_seed(jobs, lambda job: self.cost(job, axis))
        return costs

    def horizon(self, group: str) -> float:
        """Return the mean number of examples seen by the comparable jobs of a group.

        See `comparable_jobs`. A fork counts from its checkpoint. The mean is NaN if no
        number was logged.
        """
        jobs = comparable_jobs(self.groups[group])
        spread = statistics.spread([job.horizon for job in jobs])
        return math.nan if spread is None else spread.mean

    @cached_property
    def largest_batch(self) -> int:
        return max((job.effective_batch_size or 1 for job in self.jobs), default=1)

    @cached_property
    def window(self) -> int:
        """The number of examples over which training metrics are averaged.

        It is the share `WINDOW` of the examples in the shortest comparable run, but at
        least the largest batch of the sweep.
        """
        horizons = [job.horizon for job in comparable_jobs(self.jobs)]
        shortest = min((seen for seen in horizons if math.isfinite(seen)), default=0.0)
        return max(self.largest_batch, round(WINDOW * shortest))

    def smooth(self, job: JobResult, metric: str) -> Curve | None:
        """Return the curve of a metric of a job, or None if the metric was not logged.

        A training metric is averaged over the last `window` examples if the number of
        examples seen is known at each of its steps. Other curves are not averaged.
        """
        curve = job.curves.get(metric)
        if curve is None or not metric.startswith("train/"):
            return curve
        examples = job.spent("examples", curve.steps)
        if not np.isfinite(examples).all():
            return curve
        means = statistics.trailing_mean(examples, curve.values, self.window)
        return Curve(curve.steps, means)

    def final(self, job: JobResult, metric: str) -> float:
        """Return the last value of the job's smoothed curve, or NaN if it has none."""
        curve = self.smooth(job, metric)
        if curve is None:
            return math.nan
        return float(curve.values[-1])

    def cost(self, job: JobResult, axis: str) -> float:
        """Return the job's cost of reaching the target, or NaN if it did not reach it.

        See `TargetLoss.costs`. The cost is in the unit of `axis`, one of `AXES`. It is
        an upper bound if the first point of the job already met the target.
        """
        if self.target is None:
            return math.nan
        costs = self.target.costs.get(job.name, {})
        return costs.get(axis, math.nan)

    def exact_cost(self, job: JobResult, axis: str) -> float:
        """Return the job's cost of reaching the target, or NaN if it has no exact cost.

        An upper bound is not an exact cost.
        """
        if self.target is not None and job.name in self.target.at_first:
            return math.nan
        return self.cost(job, axis)

    @cached_property
    def target(self) -> TargetLoss | None:
        """The target loss, chosen from the curves of the finished or else running jobs.

        See `target.choose`. It is None for the branches of `pipeline critical`, or if
        no loss was logged or has fallen.
        """
        # Branches have no target: their examples are counted from the start of the run
        # from which they branch off.
        metric = self.judged_loss
        if self.branches or metric is None:
            return None
        curves = self._smooth_curves(self.jobs, metric)
        judged = [job.name for job in self._judged_jobs if job.name in curves]
        return choose(metric, self.jobs, curves, judged)

    @cached_property
    def judged_loss(self) -> str | None:
        """The loss metric by which jobs are compared during training.

        It is the validation loss if at least one judged job logged it, and all jobs
        that logged it have at least `EVALUATIONS` points. Otherwise, it is the training
        loss, or None if no judged job logged a training loss.
        """
        for metric, fewest_points in ((VALIDATION_LOSS, EVALUATIONS), (LOSS, 0)):
            points = self._fewest_points(metric)
            if points is not None and points >= fewest_points:
                return metric
        return None

    @property
    def fewest_evaluations(self) -> int | None:
        """The fewest validation losses of a judged job that logged any, or None."""
        return self._fewest_points(VALIDATION_LOSS)

    def _fewest_points(self, metric: str) -> int | None:
        """Return the fewest points of a judged job that logged the metric, or None.

        An evaluation before the first update does not show how a run trains, so it does
        not count.
        """
        points = []
        for job in self._judged_jobs:
            curve = job.curves.get(metric)
            if curve is not None:
                points.append(int((curve.steps > job.updates_before).sum()))
        return min(points, default=None)

    @property
    def _judged_jobs(self) -> list[JobResult]:
        jobs = [job for job in self.jobs if job.status in ("FINISHED", "RUNNING")]
        return comparable_jobs(jobs)

    def _smooth_curves(self, jobs: list[JobResult], metric: str) -> dict[str, Curve]:
        """Return the smoothed curves of the jobs that have the metric, by job name."""
        curves = {}
        for job in jobs:
            curve = self.smooth(job, metric)
            if curve is not None:
                curves[job.name] = curve
        return curves
