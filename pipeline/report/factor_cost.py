"""The cost of a larger accumulation factor in time per update, speed and memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipeline.report import wording
from pipeline.report.findings import Result, SweepFinding, shared_device_caveat
from pipeline.report.job_results import (
    EXAMPLES_PER_SECOND,
    PEAK_MEMORY,
    UPDATE_SECONDS,
    JobResult,
    Measure,
    by_family,
    grouped,
    pooled,
)
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import Scale


@dataclass(frozen=True)
class Cost:
    """A kind of cost, which is measured for each job."""

    key: str  # the key in the figures of the finding
    words: str  # the words before the values in the sentence
    scale: Scale
    measure: Measure


COSTS = (
    Cost(
        "update_seconds",
        "an update takes",
        wording.SECONDS,
        lambda job: job.typical(UPDATE_SECONDS),
    ),
    Cost(
        "examples_per_second",
        "examples per second",
        wording.PLAIN,
        lambda job: job.typical(EXAMPLES_PER_SECOND),
    ),
    Cost(
        "peak_memory_bytes",
        "peak memory",
        wording.SIZE,
        lambda job: job.last(PEAK_MEMORY),
    ),
)


@dataclass(frozen=True)
class FactorCosts(Result):
    """The costs of the smallest and the largest factor of a family.

    Attributes:
        family: the part of the name that the jobs share.
        factors: the factors whose updates were timed, in ascending order.
        changes: the cost with the smallest and with the largest factor, by `Cost.key`.
    """

    family: str
    factors: list[int]
    changes: dict[str, tuple[float, float]]

    def figures(self) -> dict[str, Any]:
        return {"family": self.family, "factors": self.factors, **self.changes}


def findings(sweep: SweepResult) -> Iterable[SweepFinding]:
    """Yield, for each family, the costs of the smallest and the largest factor.

    Families with fewer than two timed factors are skipped.
    """
    caveat = shared_device_caveat(sweep)
    for family, jobs in by_family(sweep.jobs).items():
        factors = _timed_factors(jobs)
        if len(factors) < 2:
            continue

        smallest = factors[0]
        largest = factors[-1]
        jobs_by_factor = grouped(jobs, lambda job: job.factor)
        changes = {}
        clauses = []
        for cost in COSTS:
            low = pooled(jobs_by_factor[smallest], cost.measure)
            high = pooled(jobs_by_factor[largest], cost.measure)
            if low is None or high is None or low.mean == 0:
                continue
            change = f"{low.text(cost.scale)} → {high.text(cost.scale)}"
            ratio = high.mean / low.mean
            clauses.append(f"{cost.words} {change} (×{ratio:.2f})")
            changes[cost.key] = (low.mean, high.mean)

        if not changes:
            continue
        begin = "From"
        if family:
            begin = f"{family}: from"
        text = f"{begin} factor {smallest} to {largest}, {'; '.join(clauses)}.{caveat}"
        result = FactorCosts(family, factors, changes)
        yield SweepFinding("cost", text, result, "update_seconds")


def _timed_factors(jobs: list[JobResult]) -> list[int]:
    """Return the factors of jobs whose updates were timed, in ascending order."""
    factors = set()
    for job in jobs:
        if job.factor and UPDATE_SECONDS in job.curves:
            factors.add(job.factor)
    return sorted(factors)
