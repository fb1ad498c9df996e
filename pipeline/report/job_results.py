"""The latest run of each job of a sweep: its settings, its sizes and its curves, as MLflow has them."""

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
from pipeline.report import statistics
from pipeline.report.statistics import Array, Spread

AXES = {
    "updates": "updates",
    "examples": "examples seen",
    "seconds": "seconds in updates",
}
NO_RUN = "NO RUN"  # status of a planned job without a run
SIZES = {"factor", "batch", "micro", "effective_batch_size", "micro_batch_size"}


@dataclass(frozen=True)
class Curve:
    """The history of a metric: `values` after `steps` completed updates, in ascending order."""

    steps: NDArray[np.int64]
    values: Array


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
        return self.without({"seed"}) or "all jobs"

    @property
    def family(self) -> str:
        """Return the name without seed and batch sizes; jobs of one family show the effect of factor and batch."""
        return self.without({"seed", *SIZES})

    @property
    def recipe(self) -> str:
        """Return the name without seed, batch sizes and learning rate, as each batch may have its own best rate."""
        rate = (
            {"rate"} if isinstance(self.setting("rate"), float) else set[str]()
        )  # `scaling.rate` is a word
        return self.without({"seed", *SIZES} | rate)

    @cached_property
    def settings(self) -> list[tuple[str, str]]:
        """Return the keys and values in the name, such as `rate` and `0.1`."""
        # Jobs with equal values end in a number: they are repetitions too.
        words = re.split(r" (?=[^\s=]+=)", re.sub(r" #\d+$", "", self.name))
        return [
            (key, value) for key, _, value in (word.partition("=") for word in words)
        ]

    def setting(self, key: str) -> Any:
        """Return the value of a swept key: a number where it is one; None without it."""
        if key in ("factor", "batch", "group"):
            return getattr(self, key)
        value = dict(self.settings).get(key)
        with suppress(TypeError, ValueError):
            return float(value)  # type: ignore[arg-type]
        return value

    def without(self, keys: set[str]) -> str:
        """Return the name without the settings of `keys`."""
        return " ".join(
            f"{key}={value}" if value else key
            for key, value in self.settings
            if key not in keys
        )

    @cached_property
    def seconds(self) -> Curve | None:
        """Return the cumulative time spent in updates, without evaluation, checkpoints, start-up and first tracing."""
        if (curve := self.curves.get("perf/update_seconds")) is None:
            return None
        each = np.where(
            curve.steps == 1, self.typical("perf/update_seconds"), curve.values
        )
        # If only some updates were logged, each row stands for all updates since the previous row.
        return Curve(curve.steps, np.cumsum(each * np.diff(curve.steps, prepend=0)))

    def along(self, axis: str, steps: NDArray[np.int64]) -> Array:
        """Convert `steps` to an axis of `AXES`; NaN beyond what the run logged."""
        if axis == "updates":
            return steps.astype(float)
        curve = (
            self.seconds
            if axis == "seconds"
            else self.curves.get("train/examples_seen")
        )
        if curve is None:
            return np.full(len(steps), np.nan)
        known = np.interp(
            steps, np.append(0, curve.steps), np.append(0.0, curve.values), right=np.nan
        )
        return np.asarray(known, float)

    def last(self, metric: str) -> float:
        return (
            float(curve.values[-1]) if (curve := self.curves.get(metric)) else math.nan
        )

    def typical(self, metric: str) -> float:
        """Return the median over all rows but the first update's, which includes tracing."""
        if (curve := self.curves.get(metric)) is None:
            return math.nan
        later = curve.values[curve.steps > 1]
        return float(np.median(later if later.size else curve.values))


def grouped(
    jobs: Sequence[JobResult], key: str | Callable[[JobResult], Any]
) -> dict[Any, list[JobResult]]:
    """Group the jobs by their attribute `key` or by what it returns, in order; jobs with None are left out."""
    found: dict[Any, list[JobResult]] = {}
    for job in jobs:
        if (value := key(job) if callable(key) else getattr(job, key)) is not None:
            found.setdefault(value, []).append(job)
    return found


Measure = Callable[[JobResult], float]  # NaN for a job without the value


def comparable_jobs(jobs: Sequence[JobResult]) -> list[JobResult]:
    """Return the finished jobs, else the running ones, else all: a job that ended early would distort the mean."""
    found = grouped(jobs, "status")
    return found.get("FINISHED") or found.get("RUNNING") or list(jobs)


def pooled(jobs: Sequence[JobResult], value: Measure) -> Spread | None:
    """Return the spread of `value` over the seeds of one group; for several groups, the mean of their means.

    The latter has no deviation, since groups do not differ by chance, and counts the fewest seeds of a group.
    """
    groups = grouped(jobs, "group").values()
    spreads = [
        found
        for group in groups
        if (found := statistics.spread([value(job) for job in group])) is not None
    ]
    if len(spreads) < 2:
        return spreads[0] if spreads else None
    return Spread(
        float(np.mean([s.mean for s in spreads])), None, min(s.count for s in spreads)
    )


def job_result(client: Any, name: str, run: Any) -> JobResult:
    """Return the result of the job `name`, whose run is None if it has not begun."""
    if run is None:
        return JobResult(name)
    info, tags = run.info, run.data.tags
    params = {
        former_names.current_key(key): former_names.current(value)
        for key, value in run.data.params.items()
    }
    metrics = [
        key for key in run.data.metrics if key.startswith(("train/", "val/", "perf/"))
    ]
    curves = {
        key: _curve(client.get_metric_history(info.run_id, key)) for key in metrics
    }
    # As derived, or as configured if the run ended before it was derived.
    keys = [
        (f"derived.{key}", f"accumulation.{key}")
        for key in ("factor", "effective_batch_size", "micro_batch_size")
    ]
    sizes = [
        next((int(params[key]) for key in both if params.get(key, "").isdigit()), None)
        for both in keys
    ]
    return JobResult(
        name,
        info.run_id,
        info.status,
        params,
        tags,
        curves,
        info.start_time,
        info.end_time,
        *sizes,
    )


def _curve(points: Sequence[Any]) -> Curve:
    by_step = {
        point.step: point.value
        for point in sorted(points, key=lambda point: (point.step, point.timestamp))
    }
    values = np.array(list(by_step.values()), float)
    # SQL stores hold the largest double in place of infinity.
    values = np.where(np.abs(values) > 1.7e308, np.copysign(np.inf, values), values)
    return Curve(np.array(list(by_step), np.int64), values)
