"""The gradient noise scale, and the critical batch that it predicts."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.common.errors import count
from pipeline.report import statistics
from pipeline.report.findings import Result, SweepFinding
from pipeline.report.job_results import JobResult
from pipeline.report.largest_batch import BatchCosts
from pipeline.report.statistics import Spread
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import number

NOISE = "train/gradient_noise_scale"
UNMEASURED = (
    "The noise scale may be far from the critical batch: Merrill et al. 2025 "
    "(arXiv:2505.23971) measured far larger critical batches."
)

# Why a run whose batches are cut by tokens has no noise scale, and what to do.
BY_TOKENS = (
    "micro-batches that are cut by tokens are not random samples. With "
    "accumulation.micro_batch_tokens=null and accumulation.micro_batch_size, the noise "
    "scale is measured."
)


def beside_measured(scale: float, low: float, high: float) -> str:
    """Return a sentence that compares the noise scale with a measured critical batch.

    Args:
        scale: the noise scale.
        low: the lower end of the interval for the critical batch.
        high: the upper end of the interval.
    """
    if scale < low:
        return (
            "The noise scale is below the critical batch that was measured here, as "
            "Merrill et al. 2025 (arXiv:2505.23971) also found: treat the noise scale "
            "as a lower bound."
        )
    if scale > high:
        return (
            "The noise scale is above the critical batch that was measured here, so it "
            "is not a lower bound."
        )
    return "The noise scale agrees with the critical batch that was measured here."


def noise_scale(job: JobResult, sweep: SweepResult) -> float:
    """Return the median of a run's noise scale up to the target, in examples.

    The noise scale grows while the loss falls (McCandlish et al. 2018), so values after
    the target are left out. If the target was not reached, all values are used. Values
    that are not finite and positive are left out. The result is NaN if no values remain
    or the run failed or was killed.
    """
    curve = job.curves.get(NOISE)
    if curve is None or job.status in ("FAILED", "KILLED"):
        return math.nan

    values = curve.values
    updates_to_target = sweep.cost(job, "updates")
    if not math.isnan(updates_to_target):
        # Include the next update, since the target is reached between two updates.
        last_step = job.updates_before + updates_to_target + 1
        values = values[curve.steps <= last_step]
    values = values[np.isfinite(values) & (values > 0)]
    if not values.size:
        return math.nan
    return float(np.median(values))


@dataclass(frozen=True)
class NoisePrediction(Result):
    """The critical batch that the noise scale predicts for a family.

    Attributes:
        family: the part of the name that the jobs share.
        scale: the noise scale over the runs of the family.
        cost: for each batch, how many times the examples of a tiny batch it needs.
            Empty if no batch is recorded.
        critical: the critical batch as fitted to the costs of the sweep, or None.
        critical_was_tried: whether the critical batch is in the range of the batches
            that reached the target.
    """

    family: str
    scale: Spread
    cost: dict[int, float]
    critical: float | None = None
    critical_was_tried: bool = False

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "family": self.family,
            "predicted": self.scale.mean,
        }
        if not self.cost:
            return figures
        figures["deviation"] = self.scale.deviation
        figures["runs"] = self.scale.count
        figures["cost"] = self.cost
        if self.critical is not None and self.critical_was_tried:
            figures["measured"] = self.critical
            figures["ratio"] = self.scale.mean / self.critical
        elif self.critical is not None:
            figures["extrapolated"] = self.critical
        return figures


def prediction(sweep: SweepResult, costs: BatchCosts) -> SweepFinding | None:
    """Report the critical batch that the noise scale predicts for a family.

    Return None if the family has no run with a positive noise scale that did not fail,
    unless the reason is that all of its runs cut their batches by tokens. Also return
    None for a search: most of its trials are families of their own, and the table shows
    the noise scale of each.

    With the noise scale B_noise, a batch B needs 1 + B / B_noise times as many examples
    as a tiny batch (McCandlish et al. 2018, arXiv:1812.06162, section 2).
    """
    if sweep.search:
        return None
    scale = statistics.spread([noise_scale(job, sweep) for job in costs.jobs])
    if scale is None:
        if costs.jobs and all(job.is_cut_by_tokens for job in costs.jobs):
            text = f"The gradient noise scale is not measured: {BY_TOKENS}"
            return SweepFinding("noise_scale", text)
        return None
    if not costs.batches:
        text = f"{costs.prefix}The gradient noise scale is {scale.text()} examples."
        return SweepFinding(
            "noise_scale", text, NoisePrediction(costs.family, scale, {})
        )

    cost = {batch: 1 + batch / scale.mean for batch in costs.batches}
    result = NoisePrediction(costs.family, scale, cost)
    if costs.fit is not None:
        critical = costs.fit.critical_batch
        result = replace(
            result, critical=critical, critical_was_tried=costs.tried(critical)
        )
    text = f"{costs.prefix}{_sentences(result)}"
    return SweepFinding("noise_scale", text, result, "noise_by_batch")


def _sentences(result: NoisePrediction) -> str:
    scale = result.scale
    beside_the_fit = ""
    caveat = f"{UNMEASURED} `pipeline critical` measures the critical batch."
    if result.critical is not None and result.critical_was_tried:
        beside_the_fit = (
            " The critical batch that fits the sweep's own costs is "
            f"{number(result.critical)}, without an interval: the prediction is "
            f"{scale.mean / result.critical:.2f} times that."
        )
        caveat = _beside_fit(scale.mean, result.critical)
    elif result.critical is not None:
        beside_the_fit = (
            f" The sweep's own costs extrapolate to {number(result.critical)}, outside "
            "of what was tried."
        )

    largest = max(result.cost)
    return (
        "The gradient noise scale predicts a critical batch of "
        f"{scale.text()} examples: the mean over {count(scale.count, 'run')} of each "
        f"run's median up to the target.{beside_the_fit} At this noise scale, a batch "
        f"of {largest} needs {result.cost[largest]:.2f} times the examples of a tiny "
        "one. "
        f"{caveat}"
    )


def _beside_fit(scale: float, critical: float) -> str:
    """Return a sentence that compares the noise scale with a fitted critical batch.

    The fit has no interval, so values within a factor of 1.1 count as equal.
    """
    return beside_measured(scale, critical / 1.1, critical * 1.1)
