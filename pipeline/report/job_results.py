"""The latest run of each job of a sweep, with its settings, sizes and curves."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import former_names
from pipeline.report import statistics
from pipeline.report.statistics import Array, Spread
from pipeline.tracking import horizons
from pipeline.tracking.foreign_store import INTERRUPTIONS

# The horizontal axes over which a metric can be plotted, with their labels.
AXES = {
    "updates": "updates",
    "examples": "examples seen",
    "seconds": "seconds in updates",
}
LOSS = "train/loss"
VALIDATION_LOSS = "val/loss"
LEARNING_RATE = "train/learning_rate"
UPDATE_SECONDS = "perf/update_seconds"
EXAMPLES_PER_SECOND = "perf/examples_per_second"
PEAK_MEMORY = "perf/peak_memory_bytes"
EXAMPLES_SEEN = "train/examples_seen"
EFFECTIVE_BATCH_SIZE = "train/effective_batch_size"

# The tag of a fork: the update of the checkpoint from which it starts.
FORKED_AFTER = "start.update"
NO_RUN = "NO RUN"  # status of a planned job without a run
SIZES = {
    "factor",
    "batch",
    "micro",
    "tokens",
    "effective_batch_size",
    "micro_batch_size",
    "micro_batch_tokens",
}

# `float` also accepts `nan` and `1_0`, but these may be names.
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")

# Larger magnitudes are read as infinite: an SQL store saves infinity as the largest
# double, about 1.797e308.
_STORED_INFINITY = 1.7e308


@dataclass(frozen=True)
class Curve:
    """The history of a metric: `values` after `steps` updates, in ascending order."""

    steps: NDArray[np.int64]
    values: Array


@dataclass(frozen=True)
class JobResult:
    """The latest run of a job, or only the name of a job that has no run."""

    name: str  # unique in its sweep, such as `factor=8 batch=256 seed=1`
    run_id: str | None = None
    status: str = NO_RUN  # or the status of the run in MLflow
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)  # by name of the metric
    started: int | None = None  # milliseconds since the epoch
    ended: int | None = None
    pauses: tuple[tuple[int, int], ...] = ()  # when it was interrupted, and resumed
    factor: int | None = None
    effective_batch_size: int | None = None  # in examples
    micro_batch_size: int | None = None  # in examples

    @property
    def finished(self) -> bool:
        return self.status == "FINISHED"

    @property
    def has_outcome(self) -> bool:
        """Whether the job finished or failed, so that running it again would not help.

        A job that was interrupted goes on with `--again`.
        """
        return self.status in ("FINISHED", "FAILED")

    @property
    def running_milliseconds(self) -> int | None:
        """How long the run was running, or None if its start or its end is not known."""
        if self.started is None or self.ended is None:
            return None
        paused = sum(resumed - interrupted for interrupted, resumed in self.pauses)
        return self.ended - self.started - paused

    @property
    def is_cut_by_tokens(self) -> bool:
        """Whether `accumulation.micro_batch_tokens` cuts the effective batches."""
        return cuts_by_tokens(self.params)

    @property
    def seed(self) -> str | None:
        """The seed in the job's name, or else the recorded seed.

        It is None if there is neither.
        """
        return dict(self.settings).get("seed") or self.params.get("seed")

    @property
    def group(self) -> str:
        """The name without the seed, or `all jobs` if nothing is left.

        The jobs of a group differ only in the seed.
        """
        return self.without({"seed"}) or "all jobs"

    @property
    def family(self) -> str:
        """The name without seed and batch sizes.

        The jobs of a family differ only in seed and batch sizes, so they show the
        effect of the accumulation factor and of the batch.
        """
        return self.without({"seed", *SIZES})

    @property
    def recipe(self) -> str:
        """The name without seed, batch sizes and learning rate.

        The jobs of a recipe may differ in the learning rate, since the best rate may
        depend on the batch.
        """
        keys = {"seed", *SIZES}
        # In a name, `rate` is either the learning rate (a number), which is left out,
        # or `scaling.rate` (a word), which is kept.
        if isinstance(self.setting("rate"), float):
            keys.add("rate")
        return self.without(keys)

    @cached_property
    def settings(self) -> list[tuple[str, str]]:
        """The keys and values in the name, such as `("rate", "0.1")`."""
        # Drop the ending `#2` that distinguishes jobs with equal settings, so that they
        # count as repetitions.
        name = re.sub(r" #\d+$", "", self.name)
        settings = []
        for word in re.split(r" (?=[^\s=]+=)", name):
            key, _, value = word.partition("=")
            settings.append((key, value))
        return settings

    def setting(self, key: str) -> Any:
        """Return the value of a swept key, or None if the name does not have the key.

        The value is a float if the text in the name is a finite number, or else that
        text. For `factor` and `batch`, it is the recorded size; for `group`, the job's
        group.
        """
        if key == "factor":
            return self.factor
        if key == "batch":
            return self.effective_batch_size
        if key == "group":
            return self.group
        text = dict(self.settings).get(key)
        if text is not None and _NUMBER.fullmatch(text):
            value = float(text)
            if math.isfinite(value):
                return value
        return text

    def without(self, keys: set[str]) -> str:
        """Return the name without the settings whose keys are in `keys`."""
        words = []
        for key, value in self.settings:
            if key in keys:
                continue
            if value:
                words.append(f"{key}={value}")
            else:
                words.append(key)
        return " ".join(words)

    @cached_property
    def validation_sets(self) -> set[str]:
        """The names of the sets in `dataset.validations`."""
        names = set()
        for key in self.params:
            parts = key.split(".")
            if len(parts) > 2 and parts[:2] == ["dataset", "validations"]:
                names.add(parts[2])
        return names

    @cached_property
    def updates_before(self) -> int:
        """The number of updates that the job's counters include but it did not run.

        A fork goes on counting from the update of its checkpoint. With the weights
        alone, or those of a registered model, it counts from 0, as other jobs do.
        """
        if self.params.get("start.weights_only", "").lower() == "true":
            return 0
        if self.params.get("start.run", "").startswith("models:/"):
            return 0
        update = self.tags.get(FORKED_AFTER, "")
        if not update.isdecimal():
            return 0
        return int(update)

    @cached_property
    def examples_before(self) -> float:
        """The value of `train/examples_seen` before the job's own first update.

        It is not logged. Updates up to the first logged one are assumed to have had as
        many examples as that one. If these are unknown, the result is the first logged
        value; it is 0 for a job that is not a fork.
        """
        seen = self.curves.get(EXAMPLES_SEEN)
        if seen is None or not self.updates_before:
            return 0.0
        batch = float(self.effective_batch_size or 0)
        batches = self.curves.get(EFFECTIVE_BATCH_SIZE)
        if batches is not None:
            batch = float(batches.values[0])
        own_updates = seen.steps[0] - self.updates_before
        return max(float(seen.values[0] - own_updates * batch), 0.0)

    @cached_property
    def seconds(self) -> Curve | None:
        """The cumulative time spent in the job's own updates.

        The time excludes evaluation, checkpoints and start-up. The first update
        includes tracing, so the median time of the later updates is used for it. The
        result is None if no update times were logged.
        """
        curve = self.curves.get(UPDATE_SECONDS)
        if curve is None:
            return None
        is_first = curve.steps == self.updates_before + 1
        update_seconds = np.where(is_first, self.typical(UPDATE_SECONDS), curve.values)
        # An update that was not logged is assumed to have taken as long as the next
        # logged one.
        updates = np.diff(curve.steps, prepend=self.updates_before)
        return Curve(curve.steps, np.cumsum(update_seconds * updates))

    def along(self, axis: str, steps: NDArray[np.int64]) -> Array:
        """Convert `steps` to an axis of `AXES`.

        Updates and examples are counted as they were logged. So those of a fork include
        what precedes it; see `spent`. The result is NaN after the last logged step of
        the axis, and everywhere if the axis was not logged. The axis `updates` is
        always known.
        """
        if axis == "updates":
            return steps.astype(float)
        if axis == "seconds":
            curve = self.seconds
            first_value = 0.0
        else:
            curve = self.curves.get(EXAMPLES_SEEN)
            first_value = self.examples_before
        if curve is None:
            return np.full(len(steps), np.nan)
        logged_steps = np.append(self.updates_before, curve.steps)
        logged_values = np.append(first_value, curve.values)
        converted = np.interp(steps, logged_steps, logged_values, right=np.nan)
        return np.asarray(converted, float)

    def spent(self, axis: str, steps: NDArray[np.int64]) -> Array:
        """Return what the job itself has spent until `steps`, in units of an axis.

        It is `along`, without the updates and the examples before a fork.
        """
        x = self.along(axis, steps)
        if axis == "updates":
            return x - self.updates_before
        if axis == "examples":
            return x - self.examples_before
        return x

    @property
    def horizon(self) -> float:
        """The number of examples that the job itself saw, or NaN if not logged."""
        return self.last(EXAMPLES_SEEN) - self.examples_before

    @property
    def peak_rate(self) -> float:
        """The largest logged learning rate, or NaN if none was logged."""
        curve = self.curves.get(LEARNING_RATE)
        if curve is None:
            return math.nan
        return float(curve.values.max())

    def last(self, metric: str) -> float:
        """Return the last value of the metric, or NaN if it was not logged."""
        curve = self.curves.get(metric)
        if curve is None:
            return math.nan
        return float(curve.values[-1])

    def typical(self, metric: str) -> float:
        """Return the median of the metric, or NaN if it was not logged.

        The job's first update is left out unless it is the only one, since it includes
        tracing.
        """
        curve = self.curves.get(metric)
        if curve is None:
            return math.nan
        later = curve.values[curve.steps > self.updates_before + 1]
        if later.size:
            return float(np.median(later))
        return float(np.median(curve.values))


Measure = Callable[[JobResult], float]  # returns NaN for a job without the value


def grouped(
    jobs: Sequence[JobResult], key: Callable[[JobResult], Any]
) -> dict[Any, list[JobResult]]:
    """Group the jobs by the result of `key`, in order of first occurrence.

    Jobs for which `key` returns None are left out.
    """
    jobs_by_value: dict[Any, list[JobResult]] = {}
    for job in jobs:
        value = key(job)
        if value is not None:
            jobs_by_value.setdefault(value, []).append(job)
    return jobs_by_value


def by_group(jobs: Sequence[JobResult]) -> dict[str, list[JobResult]]:
    """Group the jobs that differ only in the seed."""
    return grouped(jobs, lambda job: job.group)


def by_family(jobs: Sequence[JobResult]) -> dict[str, list[JobResult]]:
    """Group the jobs that differ only in the seed and the batch sizes."""
    return grouped(jobs, lambda job: job.family)


def jobs_with(jobs: Sequence[JobResult], metric: str) -> list[JobResult]:
    """Return the jobs that logged the metric."""
    return [job for job in jobs if metric in job.curves]


def finished_jobs(jobs: Sequence[JobResult]) -> list[JobResult]:
    """Return the jobs that finished."""
    return [job for job in jobs if job.finished]


def comparable_jobs(jobs: Sequence[JobResult]) -> list[JobResult]:
    """Return the finished jobs, or else the running ones, or else all jobs.

    A mean over jobs that ended at different times would be distorted.
    """
    running = [job for job in jobs if job.status == "RUNNING"]
    return finished_jobs(jobs) or running or list(jobs)


def comparable_state(groups: Iterable[Sequence[JobResult]]) -> str:
    """Return the words for the state of the jobs that `comparable_jobs` chooses."""
    all_finished = True
    any_finished = False
    for jobs in groups:
        if finished_jobs(jobs):
            any_finished = True
        else:
            all_finished = False
    if all_finished:
        return "that finished"
    if any_finished:
        return "that finished, or else of those that did not"
    return "that have not finished"


def pooled(jobs: Sequence[JobResult], measure: Measure) -> Spread | None:
    """Return the spread of a value over the seeds of one group.

    For several groups, return the mean of the group means. Its deviation is None, since
    groups do not differ by chance, and its count is that of the group with the fewest
    values. Return None if no job has a finite value.
    """
    spreads = []
    for group_jobs in by_group(jobs).values():
        spread = statistics.spread([measure(job) for job in group_jobs])
        if spread is not None:
            spreads.append(spread)

    if not spreads:
        return None
    if len(spreads) == 1:
        return spreads[0]
    mean = float(np.mean([spread.mean for spread in spreads]))
    return Spread(mean, None, min(spread.count for spread in spreads))


def job_result(client: Any, name: str, run: Any) -> JobResult:
    """Return the result of the job `name`, with its metrics of training and validation.

    Args:
        client: an MLflow client for the sweep's store.
        name: the name of the job, unique in its sweep.
        run: the latest run of the job in MLflow, or None if the job has no run.
    """
    if run is None:
        return JobResult(name)
    metrics = []
    for metric in run.data.metrics:
        if metric.startswith(("train/", "val/", "perf/")):
            metrics.append(metric)
    return stored_result(client, name, run, metrics)


def stored_result(
    client: Any, name: str, run: Any, metrics: Iterable[str]
) -> JobResult:
    """Return the result of a run in MLflow.

    Args:
        client: an MLflow client for the run's store.
        name: the name of the result.
        run: the run.
        metrics: the names of the metrics to read.
    """
    curves = {}
    for metric in metrics:
        points = client.get_metric_history(run.info.run_id, metric)
        # If a step has several values, keep the latest one.
        points = sorted(points, key=lambda point: point.timestamp)
        curves[metric] = curve({point.step: point.value for point in points})
    return _with_curves(name, run, curves)


def pauses(tags: Mapping[str, str]) -> tuple[tuple[int, int], ...]:
    """Return when a run was interrupted and resumed, in milliseconds since 1970.

    The result is empty for a run of an older version, which has no such tag.
    """
    try:
        pairs = json.loads(tags.get(INTERRUPTIONS, "[]"))
        return tuple((int(interrupted), int(resumed)) for interrupted, resumed in pairs)
    except (TypeError, ValueError, OverflowError, RecursionError):
        # The tag was edited by hand.
        return ()


def last_result(name: str, run: Any) -> JobResult:
    """Return the result of a run in MLflow, with only the last value of each curve.

    The store is not read. The number of updates at the last values is unknown, so the
    curves have step 0.

    Args:
        name: the name of the result.
        run: the run.
    """
    curves = {metric: curve({0: value}) for metric, value in run.data.metrics.items()}
    return _with_curves(name, run, curves)


def _with_curves(name: str, run: Any, curves: dict[str, Curve]) -> JobResult:
    """Return the result of a run in MLflow with curves that were read from it."""
    params = current_params(run.data.params, run.data.tags)
    return JobResult(
        name=name,
        run_id=run.info.run_id,
        status=run.info.status,
        params=params,
        tags=run.data.tags,
        curves=curves,
        started=run.info.start_time,
        ended=run.info.end_time,
        pauses=pauses(run.data.tags),
        **sizes(params),
    )


def current_params(
    params: Mapping[str, str], tags: Mapping[str, str]
) -> dict[str, str]:
    """Return the params of a run, with the current names of keys and functions.

    If the run was resumed with another horizon, they include the new one.
    """
    renamed = {}
    for key, value in params.items():
        renamed[former_names.with_current_key(key)] = former_names.current(value)
    return horizons.current_params(renamed, tags)


def sizes(params: Mapping[str, str]) -> dict[str, int | None]:
    """Return the factor and the batch sizes of a run, as fields of `JobResult`."""
    keys = ("factor", "effective_batch_size", "micro_batch_size")
    sizes_of_run = {key: _size(params, key) for key in keys}
    if cuts_by_tokens(params):
        # The micro-batches of a cut by tokens differ in size, and in number.
        sizes_of_run["factor"] = None
        sizes_of_run["micro_batch_size"] = None
    return sizes_of_run


def cuts_by_tokens(params: Mapping[str, str]) -> bool:
    """Return whether a run with these params cuts its effective batches by tokens."""
    return _size(params, "micro_batch_tokens") is not None


def _size(params: Mapping[str, str], key: str) -> int | None:
    """Return the derived size, or else the configured size, or else None."""
    for group in ("derived", "accumulation"):
        text = params.get(f"{group}.{key}", "")
        if text.isdecimal():
            return int(text)
    return None


def curve(value_by_step: Mapping[int, float]) -> Curve:
    """Return the curve of a metric from its values at each step, in any order."""
    steps = sorted(value_by_step)
    values = np.array([value_by_step[step] for step in steps], float)
    is_infinite = np.abs(values) > _STORED_INFINITY
    values = np.where(is_infinite, np.copysign(np.inf, values), values)
    return Curve(np.array(steps, np.int64), values)
