"""What each effective batch costs in examples, and the largest batch that pays."""

import math
from dataclasses import dataclass, replace
from typing import Any

from pipeline.report import statistics
from pipeline.report.comparison import SweepResult
from pipeline.report.findings import SweepFinding
from pipeline.report.job_results import JobResult, grouped
from pipeline.report.seed_differences import (
    Difference,
    Values,
    difference,
    values_by_seed,
)
from pipeline.report.statistics import CHANCE, Spread, Tradeoff, joined, number

# A batch pays up to this ratio to the fewest examples of any batch. It is the cost of
# the critical batch size in McCandlish et al. 2018.
PAYS = 2.0


@dataclass(frozen=True)
class BatchCosts:
    """What the effective batches of a family need to reach the target.

    Attributes:
        family: the name that the jobs share.
        jobs: the jobs of the family.
        batches: the batches that were tried, ascending.
        examples: the examples until the target, by batch, ascending; a batch that did
            not reach it with all seeds is left out.
        by_seed: the same costs, by batch and seed.
        bounds: the most examples that a batch may have needed which was at the target
            at its first evaluation, by batch.
        horizons: the examples that the jobs of a batch saw, by batch.
        fit: the trade-off of examples against updates; None if there is none.
    """

    family: str
    jobs: list[JobResult]
    batches: list[int]
    examples: dict[int, Spread]
    by_seed: dict[int, Values]
    bounds: dict[int, float]
    horizons: dict[int, float]
    fit: Tradeoff | None

    @property
    def prefix(self) -> str:
        """Return how a sentence about the family begins."""
        if not self.family:
            return ""
        return f"{self.family}: "

    @property
    def updates(self) -> dict[int, float]:
        """Return the updates until the target, by batch."""
        return {batch: cost.mean / batch for batch, cost in self.examples.items()}

    @property
    def cheapest(self) -> int:
        """Return the batch that reached the target with the fewest examples."""
        return min(self.examples, key=lambda batch: self.examples[batch].mean)

    @property
    def ratios(self) -> dict[int, float]:
        """Return the examples until the target over the fewest, by batch."""
        fewest = self.examples[self.cheapest].mean
        return {batch: cost.mean / fewest for batch, cost in self.examples.items()}

    def tried(self, batch: float) -> bool:
        """Return whether a batch is between those that reached the target."""
        return min(self.examples) <= batch <= max(self.examples)

    def saves_updates(self, batch: int) -> bool:
        """Return whether `batch` needs fewer updates than any smaller batch."""
        for other, updates in self.updates.items():
            if other < batch and self.updates[batch] >= updates:
                return False
        return True


def batch_costs(sweep: SweepResult, family: str, jobs: list[JobResult]) -> BatchCosts:
    """Return what each effective batch of a family costs."""
    jobs_by_batch = grouped(jobs, lambda job: job.effective_batch_size)
    batches = sorted(jobs_by_batch)
    examples = {}
    by_seed: dict[int, Values] = {}
    bounds = {}
    horizons = {}
    means = []
    target = sweep.target
    for batch in batches:
        batch_jobs = jobs_by_batch[batch]
        horizons[batch] = min(job.horizon for job in batch_jobs)
        if target is None:
            continue
        bound = target.bound(batch_jobs, "examples")
        if bound is not None:
            bounds[batch] = bound
        cost = target.spread(batch_jobs, "examples")
        if cost is not None:
            examples[batch] = cost
            means.append(cost.mean)
            judged = [job for job in batch_jobs if job.name in target.judged]
            by_seed[batch] = values_by_seed(
                judged, lambda job: sweep.cost(job, "examples")
            )
    fit = statistics.tradeoff(list(examples), means)
    return BatchCosts(family, jobs, batches, examples, by_seed, bounds, horizons, fit)


def finding(costs: BatchCosts) -> SweepFinding:
    """Return the largest batch that pays by McCandlish et al. 2018, section 2.

    At the critical batch size a target takes twice the examples that the smallest
    batches need (arXiv:1812.06162). So here it is the largest batch that reaches the
    target with at most `PAYS` times the fewest examples of any batch, and with fewer
    updates than any smaller batch. The sweep's minimum is never below the true one, so
    this errs towards large batches.
    """
    if costs.bounds:
        return SweepFinding("largest_batch", _nothing_said_for_bounds(costs))
    if len(costs.examples) < 2:
        why = "fewer than two batches reached the target"
        if len(costs.batches) == 1:
            why = "all jobs have the same one"
        text = f"Which effective batch still pays cannot be said where {why}."
        return SweepFinding("largest_batch", text)

    largest = _largest_that_pays(costs)
    interval = interval_of_largest(costs)
    figures: dict[str, Any] = {
        "family": costs.family,
        "largest": largest,
        "interval": interval,
        "least": costs.cheapest,
        "open": largest == costs.batches[-1],
        "ratio": costs.ratios,
        "updates": costs.updates,
    }
    text = _why_it_pays(costs, largest) + _what_larger_ones_cost(costs, largest)
    if min(cost.count for cost in costs.examples.values()) == 1:
        text += " With one seed at some batch, this is one observation."
    else:
        low, high = interval
        text += f" With the chance of the seeds (95%) it is from {low} to {high}."
    if costs.fit is not None:
        critical = costs.fit.critical_batch
        figures["critical"] = critical
        text += f" Fitted to all batches, the critical batch is {number(critical)}"
        if not costs.tried(critical):
            text += ", outside of what was tried"
        text += "."
    return SweepFinding("largest_batch", text, figures, "examples_to_target")


def _nothing_said_for_bounds(costs: BatchCosts) -> str:
    names = []
    for batch, bound in costs.bounds.items():
        names.append(f"{batch} (≤ {number(bound)} examples)")
    return (
        f"{costs.prefix}Which effective batch still pays cannot be said where a batch "
        f"was at the target at its first evaluation: {joined(names)}. Evaluate more "
        "often (training.evaluate_every)."
    )


def interval_of_largest(costs: BatchCosts) -> tuple[int, int]:
    """Return the 95% interval for the largest batch that pays, from the seeds.

    A batch B pays if, for every other batch b, the ratio of its examples to those of b
    is at most a limit: `PAYS`, and B / b if b is smaller, as B then needs as few
    updates. Each ratio has the interval of a paired difference of logarithms.

    - The upper end is the largest batch of which no ratio is surely above its limit.
      The others have shares of the chance of error (Bonferroni; Dunn 1961).
    - The lower end is the last of the batches, in ascending order, whose ratios are all
      surely below their limits; the first other one ends the row. This is a
      fixed-sequence test of intersection–union tests (Maurer et al. 1995; Berger
      1982), so each ratio has the whole chance of error of this end.

    A batch that did not reach the target counts as one that may pay, unless it saw more
    than `PAYS` times the fewest examples. With one seed the interval has all batches.
    """
    lowest = costs.batches[0]
    for batch in costs.batches:
        if not _surely_pays(costs, batch):
            break
        lowest = batch
    highest = max(batch for batch in costs.batches if _may_pay(costs, batch))

    # The measured batch is always in its interval.
    largest = _largest_that_pays(costs)
    return min(lowest, largest), max(highest, largest)


def _surely_pays(costs: BatchCosts, batch: int) -> bool:
    """Return whether all ratios of the batch are below their limits beyond chance."""
    if batch not in costs.examples:
        return False
    for excess in _excesses(costs, batch):
        if excess.value + excess.half_width(CHANCE / 2) > 0:
            return False
    return True


def _may_pay(costs: BatchCosts, batch: int) -> bool:
    """Return whether no ratio of the batch is above its limit beyond chance."""
    if batch not in costs.examples:
        fewest = costs.examples[costs.cheapest].mean
        return not costs.horizons[batch] > PAYS * fewest
    excesses = _excesses(costs, batch)
    tail = CHANCE / 2 / len(excesses)
    return all(excess.value - excess.half_width(tail) <= 0 for excess in excesses)


def _excesses(costs: BatchCosts, batch: int) -> list[Difference]:
    """Return how far each ratio of the batch is above its limit, in logarithms."""
    excesses = []
    for other in costs.examples:
        if other == batch:
            continue
        limit = PAYS
        if other < batch:
            limit = min(PAYS, batch / other)
        ratio = _log_ratio(costs, batch, other)
        excesses.append(replace(ratio, value=ratio.value - math.log(limit)))
    return excesses


def _log_ratio(costs: BatchCosts, batch: int, other: int) -> Difference:
    """Return the logarithm of the ratio of the examples of two batches."""
    logs = []
    for values in (costs.by_seed[other], costs.by_seed[batch]):
        logs.append({seed: math.log(value) for seed, value in values.items()})
    return difference(logs[0], logs[1])


def _largest_that_pays(costs: BatchCosts) -> int:
    cheapest = costs.cheapest
    paying = []
    for batch, ratio in costs.ratios.items():
        if ratio <= PAYS and (batch == cheapest or costs.saves_updates(batch)):
            paying.append(batch)
    return max(paying)


def _why_it_pays(costs: BatchCosts, largest: int) -> str:
    cheapest = costs.cheapest
    smallest = min(costs.examples)
    updates = number(costs.updates[largest])
    updates_of_smallest = number(costs.updates[smallest])
    return (
        f"{costs.prefix}The largest effective batch that still pays is {largest}: it "
        f"reached the target with {costs.ratios[largest]:.2f} times the fewest "
        f"examples ({costs.examples[cheapest].text()}, at {cheapest}), where up to "
        f"{PAYS:g} times counts as paying (the critical batch size of McCandlish et "
        f"al. 2018), and with fewer updates than any smaller batch ({updates}, "
        f"{updates_of_smallest} at {smallest})."
    )


def _what_larger_ones_cost(costs: BatchCosts, largest: int) -> str:
    clauses = []
    for batch, updates in costs.updates.items():
        if batch > largest:
            ratio = costs.ratios[batch]
            clauses.append(
                f"{batch} took {ratio:.2f} times, in {number(updates)} updates"
            )
    for batch in costs.batches:
        if batch > largest and batch not in costs.examples:
            clauses.append(f"{batch} did not reach it")
    if not clauses:
        return " It is the largest that was tried, so the limit may lie beyond."
    return f" {joined(clauses)}."
