"""The cost of each effective batch in examples, and the largest batch that pays."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.report import statistics
from pipeline.report.findings import Result, SweepFinding
from pipeline.report.job_results import JobResult, grouped
from pipeline.report.seed_differences import (
    Difference,
    Values,
    difference,
    values_by_seed,
)
from pipeline.report.statistics import CHANCE, Spread, Tradeoff
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import joined, number

# A batch pays if it needs at most this many times the minimum number of examples over
# all batches. The critical batch size of McCandlish et al. 2018 has this cost.
PAYS = 2.0


@dataclass(frozen=True)
class BatchCosts:
    """The cost of reaching the target for each effective batch of a family.

    Attributes:
        family: the part of the name that the jobs share.
        jobs: the jobs of the family.
        batches: the batches that were tried, in ascending order.
        examples: the number of examples to the target, by batch in ascending order. A
            batch is left out if one of its judged jobs did not reach the target or has
            only an upper bound.
        updates: the mean number of updates to the target, of the same batches. It may
            exceed the examples divided by the batch, as the last batch of an epoch may
            be smaller.
        by_seed: the same costs, by batch and seed.
        bounds: the upper bound on the number of examples to the target, for each batch
            whose judged jobs all reached it, at least one of them at its first point.
        begun_at_target: the batches with a judged job that was at the target before its
            first update. The cost of such a job is 0.
        lower_bounds: a lower bound on the number of examples to the target, by batch:
            the minimum over its jobs of the examples until the target, or until the end
            for a job that did not reach it. NaN if the number is unknown for a job.
        shares_that_reached: how many jobs of a batch reached the target, such as `2 of
            3 jobs`, for each batch of which some did and some did not.
        fit: the trade-off between examples and updates, or None if it cannot be fitted;
            see `statistics.tradeoff`.
    """

    family: str
    jobs: list[JobResult]
    batches: list[int]
    examples: dict[int, Spread]
    updates: dict[int, float]
    by_seed: dict[int, Values]
    bounds: dict[int, float]
    begun_at_target: list[int]
    lower_bounds: dict[int, float]
    shares_that_reached: dict[int, str]
    fit: Tradeoff | None

    @property
    def prefix(self) -> str:
        """The beginning of a sentence about the family, which may be empty."""
        if not self.family:
            return ""
        return f"{self.family}: "

    @property
    def cheapest(self) -> int:
        """The batch size that needed the fewest examples on average."""
        return min(self.examples, key=lambda batch: self.examples[batch].mean)

    @property
    def ratios(self) -> dict[int, float]:
        """The mean number of examples needed, relative to `cheapest`, by batch size."""
        fewest = self.examples[self.cheapest].mean
        return {batch: cost.mean / fewest for batch, cost in self.examples.items()}

    def tried(self, batch: float) -> bool:
        """Return whether `batch` is in the range of batches that reached the target."""
        return min(self.examples) <= batch <= max(self.examples)

    def saves_updates(self, batch: int) -> bool:
        """Return whether `batch` needs fewer updates than every smaller batch."""
        for other, updates in self.updates.items():
            if other < batch and self.updates[batch] >= updates:
                return False
        return True


@dataclass(frozen=True)
class LargestBatch(Result):
    """The largest batch of a family that still pays.

    Attributes:
        family: the part of the name that the jobs share.
        largest: the largest batch that pays.
        interval: its 95% interval; see `interval_of_largest`.
        cheapest: the batch that needed the fewest examples.
        largest_tried: the largest batch of the family.
        ratios: the examples to the target, relative to `cheapest`, by batch.
        updates: the updates to the target, by batch.
        critical: the critical batch as fitted to all batches, or None if it cannot be
            fitted.
    """

    family: str
    largest: int
    interval: tuple[int, int]
    cheapest: int
    largest_tried: int
    ratios: dict[int, float]
    updates: dict[int, float]
    critical: float | None

    @property
    def open(self) -> bool:
        """Whether no batch was too large, so the limit may be higher."""
        return self.largest == self.largest_tried

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "family": self.family,
            "largest": self.largest,
            "interval": self.interval,
            "least": self.cheapest,
            "open": self.open,
            "ratio": self.ratios,
            "updates": self.updates,
        }
        if self.critical is not None:
            figures["critical"] = self.critical
        return figures


def batch_costs(sweep: SweepResult, family: str, jobs: list[JobResult]) -> BatchCosts:
    """Return the cost of reaching the target for each effective batch of a family."""
    jobs_by_batch = grouped(jobs, lambda job: job.effective_batch_size)
    batches = sorted(jobs_by_batch)
    examples = {}
    updates = {}
    by_seed: dict[int, Values] = {}
    bounds = {}
    begun_at_target = []
    lower_bounds = {}
    shares_that_reached = {}
    means = []
    target = sweep.target
    for batch in batches:
        batch_jobs = jobs_by_batch[batch]
        least = [_examples_lower_bound(sweep, job) for job in batch_jobs]
        lower_bounds[batch] = float(np.min(least))
        if target is None:
            continue
        share = target.share_that_reached(batch_jobs)
        if share:
            shares_that_reached[batch] = share
        bound = target.bound(batch_jobs, "examples")
        if bound is not None:
            bounds[batch] = bound
        cost = target.spread(batch_jobs, "examples")
        cost_in_updates = target.spread(batch_jobs, "updates")
        if cost is not None and cost_in_updates is not None:
            examples[batch] = cost
            updates[batch] = cost_in_updates.mean
            means.append(cost.mean)
            judged = [job for job in batch_jobs if job.name in target.judged]
            by_seed[batch] = values_by_seed(
                judged, lambda job: sweep.cost(job, "examples")
            )
            if any(value <= 0 for value in by_seed[batch].values()):
                begun_at_target.append(batch)
    fit = None
    if not begun_at_target:
        fit = statistics.tradeoff(list(examples), means)
    return BatchCosts(
        family=family,
        jobs=jobs,
        batches=batches,
        examples=examples,
        updates=updates,
        by_seed=by_seed,
        bounds=bounds,
        begun_at_target=begun_at_target,
        lower_bounds=lower_bounds,
        shares_that_reached=shares_that_reached,
        fit=fit,
    )


def _examples_lower_bound(sweep: SweepResult, job: JobResult) -> float:
    """Return the examples of a job until the target, or else until its end."""
    if sweep.target is not None and job.name in sweep.target.costs:
        return sweep.cost(job, "examples")
    return job.horizon


def finding(sweep: SweepResult, costs: BatchCosts) -> SweepFinding | None:
    """Report the largest batch that pays, following McCandlish et al. 2018, section 2.

    Return None if the sweep does not compare batches: it is a search, whose trials
    differ in more than the batch, or all its jobs have the same batch.

    At the critical batch size, reaching a target takes twice as many examples as with
    the smallest batches (arXiv:1812.06162). So the largest batch that pays is the
    largest one that needs at most `PAYS` times the minimum number of examples of any
    batch, and fewer updates than every smaller batch. A sweep may not include the
    cheapest batch of all, so its minimum tends to be too high, and the result too
    large.
    """
    batches_of_sweep = {job.effective_batch_size for job in sweep.jobs} - {None}
    if sweep.search or len(batches_of_sweep) < 2:
        return None
    if len(costs.batches) == 1:
        text = (
            "Which effective batch still pays cannot be determined for settings that "
            "were tried with only one batch."
        )
        return SweepFinding("largest_batch", text)
    if costs.bounds:
        return SweepFinding("largest_batch", _nothing_said_for_bounds(costs))
    if costs.begun_at_target:
        batches = joined([str(batch) for batch in costs.begun_at_target])
        text = (
            f"{costs.prefix}Which effective batch still pays cannot be determined if a "
            f"batch was at the target before its first update: {batches}."
        )
        return SweepFinding("largest_batch", text)
    if len(costs.examples) < 2:
        text = (
            "Which effective batch still pays cannot be determined if fewer than two "
            "batches reached the target."
        )
        if costs.shares_that_reached:
            shares = [
                f"{share} of {batch}"
                for batch, share in costs.shares_that_reached.items()
            ]
            text = (
                f"{costs.prefix}{text[:-1]} with each of their jobs; only "
                f"{joined(shares)} reached it."
            )
        return SweepFinding("largest_batch", text)

    critical = None
    if costs.fit is not None:
        critical = costs.fit.critical_batch
    result = LargestBatch(
        family=costs.family,
        largest=_largest_that_pays(costs),
        interval=interval_of_largest(costs),
        cheapest=costs.cheapest,
        largest_tried=costs.batches[-1],
        ratios=costs.ratios,
        updates=costs.updates,
        critical=critical,
    )
    text = _sentences(costs, result)
    return SweepFinding("largest_batch", text, result, "examples_to_target")


def _sentences(costs: BatchCosts, result: LargestBatch) -> str:
    largest = result.largest
    text = _why_it_pays(costs, largest) + _what_larger_ones_cost(costs, largest)
    if min(cost.count for cost in costs.examples.values()) == 1:
        text += " Some batch has only one seed, so this is one observation."
    else:
        low, high = result.interval
        text += (
            " Allowing for chance between seeds (95%), the largest batch that pays is "
            f"from {low} to {high}."
        )
    if result.critical is not None:
        critical = number(result.critical)
        text += f" Fitted to all batches, the critical batch is {critical}"
        if not costs.tried(result.critical):
            text += ", which is outside the range of the batch sizes tried"
        text += "."
    return text


def _nothing_said_for_bounds(costs: BatchCosts) -> str:
    names = []
    for batch, bound in costs.bounds.items():
        names.append(f"{batch} (≤ {number(bound)} examples)")
    return (
        f"{costs.prefix}Which effective batch still pays cannot be determined if a "
        f"batch was at the target at its first evaluation: {joined(names)}. Evaluate "
        "more often (training.evaluate_every)."
    )


def interval_of_largest(costs: BatchCosts) -> tuple[int, int]:
    """Return the 95% interval for the largest batch that pays, from the seeds.

    A batch B pays if, for every other batch b, the ratio of the examples of B to those
    of b is at most a limit. The limit is `PAYS`, or B / b if that is less and b < B:
    then B needs no more updates than b. The interval of each ratio is that of the
    difference between logarithms; see `seed_differences.difference`.

    - The upper end is the largest batch that has no ratio significantly above its
      limit. The chance of error is divided among the ratios (Bonferroni; Dunn 1961).
    - For the lower end, batches are tested in ascending order up to the first with a
      ratio that is not significantly below its limit; the batch before it is the lower
      end. This is a fixed-sequence test of intersection–union tests (Maurer et al.
      1995; Berger 1982), so the chance of error is not divided.

    A batch with a job that did not reach the target may pay, unless all of its jobs saw
    more than `PAYS` times the minimum number of examples, until they reached the target
    or until their end. With one seed no ratio is significant, so the
    interval begins at the smallest batch and ends at the largest that may pay.
    """
    lowest = costs.batches[0]
    for batch in costs.batches:
        if not _surely_pays(costs, batch):
            break
        lowest = batch
    highest = max(batch for batch in costs.batches if _may_pay(costs, batch))

    # Widen the interval, if necessary, to include the measured batch.
    largest = _largest_that_pays(costs)
    return min(lowest, largest), max(highest, largest)


def _surely_pays(costs: BatchCosts, batch: int) -> bool:
    """Return whether all ratios of the batch are significantly below their limits.

    Return False for a batch that did not reach the target.
    """
    if batch not in costs.examples:
        return False
    for excess in _excesses(costs, batch):
        if excess.value + excess.half_width(CHANCE / 2) > 0:
            return False
    return True


def _may_pay(costs: BatchCosts, batch: int) -> bool:
    """Return whether no ratio of the batch is significantly above its limit.

    For a batch that did not reach the target, see `interval_of_largest`.
    """
    if batch not in costs.examples:
        fewest = costs.examples[costs.cheapest].mean
        return not costs.lower_bounds[batch] > PAYS * fewest
    excesses = _excesses(costs, batch)
    tail = CHANCE / 2 / len(excesses)
    return all(excess.value - excess.half_width(tail) <= 0 for excess in excesses)


def _excesses(costs: BatchCosts, batch: int) -> list[Difference]:
    """Return the logarithm of each ratio of the batch minus that of its limit."""
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
    """Return the log of the ratio of the examples of `batch` to those of `other`."""
    logs = []
    for values in (costs.by_seed[other], costs.by_seed[batch]):
        logs.append({seed: math.log(value) for seed, value in values.items()})
    return difference(logs[0], logs[1])


def _largest_that_pays(costs: BatchCosts) -> int:
    # The cheapest batch pays, even if a smaller one needs as few updates.
    paying = [costs.cheapest]
    for batch, ratio in costs.ratios.items():
        if ratio <= PAYS and costs.saves_updates(batch):
            paying.append(batch)
    return max(paying)


def _why_it_pays(costs: BatchCosts, largest: int) -> str:
    cheapest = costs.cheapest
    smallest = min(costs.examples)
    updates = number(costs.updates[largest])
    saved = f"and with fewer updates than any smaller batch ({updates}, against "
    saved += f"{number(costs.updates[smallest])} at {smallest})"
    if largest == smallest:
        saved = f"in {updates} updates; no smaller batch reached the target"
        if any(batch < smallest for batch in costs.shares_that_reached):
            saved += " with each of its jobs"
        if largest == costs.batches[0]:
            saved = f"in {updates} updates; it is the smallest batch that was tried"
    return (
        f"{costs.prefix}The largest effective batch that still pays is {largest}: it "
        f"reached the target with {costs.ratios[largest]:.2f} times the fewest "
        f"examples ({costs.examples[cheapest].text()}, at {cheapest}), where up to "
        f"{PAYS:g} times counts as paying (the critical batch size of McCandlish et "
        f"al. 2018), {saved}."
    )


def _what_larger_ones_cost(costs: BatchCosts, largest: int) -> str:
    clauses = []
    for batch, updates in costs.updates.items():
        if batch > largest:
            ratio = costs.ratios[batch]
            clauses.append(
                f"{batch} took {ratio:.2f} times the fewest examples, in "
                f"{number(updates)} updates"
            )
    for batch in costs.batches:
        if batch > largest and batch not in costs.examples:
            share = costs.shares_that_reached.get(batch)
            if share:
                clauses.append(f"{batch} reached the target in only {share}")
            else:
                clauses.append(f"{batch} did not reach the target")
    if not clauses:
        return " It is the largest that was tried, so the limit may be higher."
    return f" {joined(clauses)}."
