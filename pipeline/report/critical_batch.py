"""Critical batch size: the largest effective batch that still pays, and its prediction by the noise scale."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipeline.report import statistics
from pipeline.report.comparison import Comparison
from pipeline.report.findings import Finding
from pipeline.report.job_results import JobResult, grouped
from pipeline.report.statistics import Spread, count, joined, number

NOISE = "train/gradient_noise_scale"
CAVEAT = "Merrill et al. 2025 (arXiv:2505.23971) found the noise scale to underestimate the critical batch by far."
PAYS = 2.0  # ratio to the fewest examples: the cost of the critical batch size in McCandlish et al. 2018


def findings(sweep: Comparison, family: str, jobs: list[JobResult]) -> Iterable[Finding]:
    """Yield the largest batch that still pays, and the prediction by the noise scale; without figures unnamed."""
    at = dict(sorted(grouped(jobs, "batch").items()))
    costs = {b: cost for b, of in at.items() if sweep.target and (cost := sweep.target.spread(of, "examples"))}
    fit = statistics.tradeoff(list(costs), [cost.mean for cost in costs.values()])
    critical = fit[0] / fit[1] if fit else math.nan
    scale = statistics.spread([noise_scale(job, sweep) for job in jobs])
    if len(costs) < 2:
        why = "all jobs have the same one" if len(at) == 1 else "fewer than two batches reached the target"
        yield Finding("largest_batch", f"Which effective batch still pays cannot be said where {why}.")
    else:
        yield _largest(family, at, costs, critical)
    if scale is None:
        which = "that did not fail has a positive" if any(NOISE in job.curves for job in jobs) else "has a"
        why = "" if any((job.factor or 0) > 1 for job in jobs) else ", which takes a factor over 1"
        yield Finding("noise_scale", f"The gradient noise scale predicts nothing where no run {which} {NOISE}{why}.")
        return
    about = f"{family}: " if family else ""
    text = f"{about}The gradient noise scale predicts a critical batch of {scale.text()} examples: "
    text += f"the mean over {count(scale.count, 'run')} of each one's median up to the target."
    figures: dict[str, Any] = {"family": family, "predicted": scale.mean, "deviation": scale.deviation}
    figures |= {"runs": scale.count, "cost": {batch: 1 + batch / scale.mean for batch in at}}
    if fit and min(costs) <= critical <= max(costs):
        figures |= {"measured": critical, "ratio": scale.mean / critical}
        text += f" The sweep measured {number(critical)}: the prediction is {figures['ratio']:.2f} times that."
    elif fit:
        figures["extrapolated"] = critical
        text += f" The sweep's own costs extrapolate to {number(critical)}, outside of what was tried."
    text += f" At that scale a batch of {max(at)} needs {1 + max(at) / scale.mean:.2f} times the examples of a tiny "
    text += f"one. {CAVEAT} `pipeline critical` measures it."
    yield Finding("noise_scale", text, figures, "noise_by_batch")


def _largest(family: str, at: dict[int, list[JobResult]], costs: dict[int, Spread], critical: float) -> Finding:
    """Return the largest batch that pays by the definition of McCandlish et al. 2018 (arXiv:1812.06162, section 2).

    At the critical batch size a target takes twice the examples that the smallest batches need. So here it is the
    largest that reaches the target with at most `PAYS` times the fewest examples of any batch, and with fewer updates
    than any smaller batch. The sweep's minimum is never below the true one, so this errs towards large batches.
    """
    least = min(costs, key=lambda batch: costs[batch].mean)
    ratio = {batch: cost.mean / costs[least].mean for batch, cost in costs.items()}
    updates = {batch: cost.mean / batch for batch, cost in costs.items()}
    saves = [b for b in costs if b == least or all(updates[b] < updates[smaller] for smaller in costs if smaller < b)]
    largest = max(batch for batch in saves if ratio[batch] <= PAYS)
    about = f"{family}: " if family else ""
    text = f"{about}The largest effective batch that still pays is {largest}: it reached the target with "
    text += f"{ratio[largest]:.2f} times the fewest examples ({costs[least].text()}, at {least}), where up to {PAYS:g} "
    text += "times counts as paying (the critical batch size of McCandlish et al. 2018), and with fewer updates "
    text += f"than any smaller batch ({number(updates[largest])}, {number(updates[min(costs)])} at {min(costs)})."
    above = [f"{b} took {ratio[b]:.2f} times, in {number(updates[b])} updates" for b in costs if b > largest]
    above += [f"{b} did not reach it" for b in at if b > largest and b not in costs]
    text += f" {joined(above) or 'It is the largest that was tried, so the limit may lie beyond'}."
    if min(cost.count for cost in costs.values()) == 1:
        text += " With one seed at some batch, this is one observation."
    figures: dict[str, Any] = {"family": family, "largest": largest, "least": least, "open": largest == max(at)}
    figures |= {"ratio": ratio, "updates": updates}
    if not math.isnan(critical):
        figures["critical"] = critical
        text += f" Fitted to all batches, the critical batch is {number(critical)}"
        text += ", outside of what was tried." if not min(costs) <= critical <= max(costs) else "."
    return Finding("largest_batch", text, figures, "examples_to_target")


def noise_scale(job: JobResult, sweep: Comparison) -> float:
    """Return the median of the run's noise scale up to the target, in examples; NaN without one or for a failed run.

    It grows while the loss falls (McCandlish et al. 2018), so later values do not count, nor do those not positive.
    """
    curve = job.curves.get(NOISE)
    if curve is None or job.status in ("FAILED", "KILLED"):
        return math.nan
    until = sweep.cost(job, "updates")
    values = curve.values if math.isnan(until) else curve.values[curve.steps <= until + 1]  # the target is interpolated
    values = values[np.isfinite(values) & (values > 0)]
    return float(np.median(values)) if values.size else math.nan
