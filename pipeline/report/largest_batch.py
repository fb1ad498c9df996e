"""What each effective batch costs in examples, and the largest batch that pays."""

from dataclasses import dataclass
from typing import Any

from pipeline.report import statistics
from pipeline.report.comparison import SweepResult
from pipeline.report.findings import SweepFinding
from pipeline.report.job_results import JobResult, grouped
from pipeline.report.statistics import Spread, Tradeoff, joined, number

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
        fit: the trade-off of examples against updates; None if there is none.
    """

    family: str
    jobs: list[JobResult]
    batches: list[int]
    examples: dict[int, Spread]
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
    jobs_by_batch = grouped(jobs, lambda job: job.batch)
    batches = sorted(jobs_by_batch)
    examples = {}
    means = []
    if sweep.target is not None:
        for batch in batches:
            cost = sweep.target.spread(jobs_by_batch[batch], "examples")
            if cost is not None:
                examples[batch] = cost
                means.append(cost.mean)
    fit = statistics.tradeoff(list(examples), means)
    return BatchCosts(family, jobs, batches, examples, fit)


def finding(costs: BatchCosts) -> SweepFinding:
    """Return the largest batch that pays by McCandlish et al. 2018, section 2.

    At the critical batch size a target takes twice the examples that the smallest
    batches need (arXiv:1812.06162). So here it is the largest batch that reaches the
    target with at most `PAYS` times the fewest examples of any batch, and with fewer
    updates than any smaller batch. The sweep's minimum is never below the true one, so
    this errs towards large batches.
    """
    if len(costs.examples) < 2:
        why = "fewer than two batches reached the target"
        if len(costs.batches) == 1:
            why = "all jobs have the same one"
        text = f"Which effective batch still pays cannot be said where {why}."
        return SweepFinding("largest_batch", text)

    largest = _largest_that_pays(costs)
    figures: dict[str, Any] = {
        "family": costs.family,
        "largest": largest,
        "least": costs.cheapest,
        "open": largest == costs.batches[-1],
        "ratio": costs.ratios,
        "updates": costs.updates,
    }
    text = _why_it_pays(costs, largest) + _what_larger_ones_cost(costs, largest)
    if min(cost.count for cost in costs.examples.values()) == 1:
        text += " With one seed at some batch, this is one observation."
    if costs.fit is not None:
        critical = costs.fit.critical_batch
        figures["critical"] = critical
        text += f" Fitted to all batches, the critical batch is {number(critical)}"
        if not costs.tried(critical):
            text += ", outside of what was tried"
        text += "."
    return SweepFinding("largest_batch", text, figures, "examples_to_target")


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
