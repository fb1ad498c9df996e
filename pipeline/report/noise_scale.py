"""The gradient noise scale, and the critical batch that it predicts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.common.errors import count
from pipeline.report import statistics
from pipeline.report.findings import Result, SweepFinding
from pipeline.report.job_results import Curve, JobResult
from pipeline.report.largest_batch import BatchCosts
from pipeline.report.statistics import Spread
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import number

NOISE = "train/gradient_noise_scale"
EVERY = "accumulation.noise_scale_every"
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


# With fewer measurements in all runs, a noise scale is not compared.
FEWEST_MEASUREMENTS = 10
# A noise scale agrees with a critical batch only if the upper end of its interval is at
# most this many times the lower end.
WIDEST = 2.0


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale over several runs, each represented by its median.

    Attributes:
        spread: the spread of the medians over the runs.
        measurements: the number of measurements in all of the runs.
        reached: the number of runs that reached the target. Later measurements of these
            are left out.
    """

    spread: Spread
    measurements: int
    reached: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean over the runs, or None if there is one run."""
        if self.spread.deviation is None:
            return None
        runs = self.spread.count
        quantile = statistics.student_quantile(runs - 1, 0.975)
        half_width = quantile * self.spread.deviation / math.sqrt(runs)
        return max(self.spread.mean - half_width, 0.0), self.spread.mean + half_width

    def position(self, low: float, high: float) -> str:
        """Return where it is, compared with a measured critical batch.

        The result is `below`, `above`, `agrees`, or `uncertain` if the noise scale is
        too uncertain to be compared.

        Args:
            low: the lower end of the interval for the critical batch.
            high: the upper end of the interval.
        """
        if self.interval is None or self.measurements < FEWEST_MEASUREMENTS:
            return "uncertain"
        lower, upper = self.interval
        if upper < low:
            return "below"
        if lower > high:
            return "above"
        if upper > WIDEST * lower:
            return "uncertain"
        return "agrees"


def beside_measured(scale: NoiseScale, low: float, high: float) -> str:
    """Return a sentence that compares the noise scale with a measured critical batch.

    For the arguments, see `NoiseScale.position`.
    """
    position = scale.position(low, high)
    if position == "uncertain":
        return _too_uncertain(scale)
    if position == "below":
        return (
            "The noise scale is below the critical batch that was measured here, as "
            "Merrill et al. 2025 (arXiv:2505.23971) also found: treat the noise scale "
            "as a lower bound."
        )
    if position == "above":
        return (
            "The noise scale is above the critical batch that was measured here, so it "
            "is not a lower bound."
        )
    return "The noise scale agrees with the critical batch that was measured here."


def _too_uncertain(scale: NoiseScale) -> str:
    measurements = count(scale.measurements, "measurement")
    text = (
        "The noise scale is too uncertain to be compared with the critical batch that "
        f"was measured here: it comes from {measurements} in "
        f"{count(scale.spread.count, 'run')}"
    )
    if scale.interval is not None:
        lower, upper = scale.interval
        text += f", and its 95% interval is {number(lower)} to {number(upper)}"
    return f"{text}."


def noise_scale(job: JobResult, sweep: SweepResult) -> float:
    """Return the median of a run's noise scale up to the target, in examples.

    The noise scale grows while the loss falls (McCandlish et al. 2018), so values after
    the target are left out. If the target was not reached, all values are used. Values
    that are not finite and positive are left out. The result is NaN if no values remain
    or the run failed or was killed.
    """
    curve = _up_to_target(job, sweep)
    if not curve.values.size:
        return math.nan
    return float(np.median(curve.values))


def noise_scale_of_runs(
    jobs: Sequence[JobResult], sweep: SweepResult
) -> NoiseScale | None:
    """Return the noise scale over several runs, or None if none of them has one."""
    scales = []
    measurements = 0
    reached = 0
    for job in jobs:
        scale = noise_scale(job, sweep)
        if math.isnan(scale):
            continue
        scales.append(scale)
        measurements += _measurements(job, _up_to_target(job, sweep))
        if not math.isnan(sweep.cost(job, "updates")):
            reached += 1
    spread = statistics.spread(scales)
    if spread is None:
        return None
    return NoiseScale(spread, measurements, reached)


def _up_to_target(job: JobResult, sweep: SweepResult) -> Curve:
    """Return the part of a run's noise scale of which `noise_scale` is the median."""
    curve = job.curves.get(NOISE)
    if curve is None or job.status in ("FAILED", "KILLED"):
        return Curve(np.empty(0, np.int64), np.empty(0))

    used = np.isfinite(curve.values) & (curve.values > 0)
    updates_to_target = sweep.cost(job, "updates")
    if not math.isnan(updates_to_target):
        # Include the next update, since the target is reached between two updates.
        last_step = job.updates_before + updates_to_target + 1
        used &= curve.steps <= last_step
    return Curve(curve.steps[used], curve.values[used])


def _measurements(job: JobResult, curve: Curve) -> int:
    """Return how many measurements the values of a noise scale come from.

    A value is logged with every update, also between two measurements.
    """
    every = job.params.get(EVERY, "")
    if not every.isdecimal() or int(every) == 0:
        return curve.steps.size
    return np.unique((curve.steps - 1) // int(every)).size


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
    scale: NoiseScale
    cost: dict[int, float]
    critical: float | None = None
    critical_was_tried: bool = False

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "family": self.family,
            "predicted": self.scale.spread.mean,
        }
        if not self.cost:
            return figures
        figures["deviation"] = self.scale.spread.deviation
        figures["runs"] = self.scale.spread.count
        figures["measurements"] = self.scale.measurements
        figures["cost"] = self.cost
        if self.critical is not None and self.critical_was_tried:
            figures["measured"] = self.critical
            figures["ratio"] = self.scale.spread.mean / self.critical
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
    scale = noise_scale_of_runs(costs.jobs, sweep)
    if scale is None:
        if costs.jobs and all(job.is_cut_by_tokens for job in costs.jobs):
            text = f"The gradient noise scale is not measured: {BY_TOKENS}"
            return SweepFinding("noise_scale", text)
        return None
    if not costs.batches:
        value = scale.spread.text()
        text = f"{costs.prefix}The gradient noise scale is {value} examples."
        return SweepFinding(
            "noise_scale", text, NoisePrediction(costs.family, scale, {})
        )

    cost = {batch: 1 + batch / scale.spread.mean for batch in costs.batches}
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
            f"{number(result.critical)}, without an interval"
        )
        low, high = _around_fit(result.critical)
        if scale.position(low, high) != "uncertain":
            ratio = scale.spread.mean / result.critical
            beside_the_fit += f": the prediction is {ratio:.2f} times that"
        beside_the_fit += "."
        caveat = beside_measured(scale, low, high)
    elif result.critical is not None:
        beside_the_fit = (
            f" The sweep's own costs extrapolate to {number(result.critical)}, outside "
            "of what was tried."
        )

    largest = max(result.cost)
    return (
        "The gradient noise scale predicts a critical batch of "
        f"{scale.spread.text()} examples: the mean over "
        f"{count(scale.spread.count, 'run')} "
        f"({count(scale.measurements, 'measurement')}) of each run's median"
        f"{_end_of_medians(scale)}.{beside_the_fit} At this noise scale, a batch of "
        f"{largest} needs {result.cost[largest]:.2f} times the examples of a tiny one. "
        f"{caveat}"
    )


def _end_of_medians(scale: NoiseScale) -> str:
    """Return up to where each run's median is taken."""
    others = scale.spread.count - scale.reached
    if not scale.reached:
        return " up to its end, as none of them reached the target"
    if others:
        return (
            " up to the target, or up to its end for the "
            f"{count(others, 'run')} without the target"
        )
    return " up to the target"


def _around_fit(critical: float) -> tuple[float, float]:
    """Return the interval around a fitted critical batch in which values are equal.

    The fit has no interval of its own, so this is a factor of 1.1 to both sides.
    """
    return critical / 1.1, critical * 1.1
