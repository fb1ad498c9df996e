"""Critical batch size: of a sweep over batches, predicted by the noise scale, measured by branches of a checkpoint."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.stages import STAGES
from pipeline.report import statistics
from pipeline.report.comparison import Comparison
from pipeline.report.findings import LOSS, Finding
from pipeline.report.html_page import Plot, axis, trace
from pipeline.report.job_results import JobResult, grouped
from pipeline.report.statistics import Array, Spread, count, joined, number

NOISE = "train/gradient_noise_scale"
CAVEAT = "Merrill et al. 2025 (arXiv:2505.23971) found the noise scale to underestimate the critical batch by far."
PAYS = 2.0  # ratio to the fewest examples: the cost of the critical batch size in McCandlish et al. 2018
TOLERANCE = 0.01  # of the loss, as in Merrill et al. 2025: a larger batch counts as no worse up to that
HALF_LIFE = 0.5  # of the largest batch: so many examples earlier, a loss counts half in the slope
DRAWS = 2000
_SIZE = "train/effective_batch_size"
Branch = tuple[Array, Array]  # the examples of each update, and its loss


def findings(
    sweep: Comparison, family: str, jobs: list[JobResult]
) -> Iterable[Finding]:
    """Yield the largest batch that still pays, and the prediction by the noise scale; without figures unnamed."""
    at = dict(sorted(grouped(jobs, "batch").items()))
    costs = {
        b: cost
        for b, of in at.items()
        if sweep.target and (cost := sweep.target.spread(of, "examples"))
    }
    fit = statistics.tradeoff(list(costs), [cost.mean for cost in costs.values()])
    critical = fit[0] / fit[1] if fit else math.nan
    scale = statistics.spread([noise_scale(job, sweep) for job in jobs])
    if len(costs) < 2:
        why = (
            "all jobs have the same one"
            if len(at) == 1
            else "fewer than two batches reached the target"
        )
        yield Finding(
            "largest_batch",
            f"Which effective batch still pays cannot be said where {why}.",
        )
    else:
        yield _largest(family, at, costs, critical)
    if scale is None:
        which = (
            "that did not fail has a positive"
            if any(NOISE in job.curves for job in jobs)
            else "has a"
        )
        why = (
            ""
            if any((job.factor or 0) > 1 for job in jobs)
            else ", which takes a factor over 1"
        )
        yield Finding(
            "noise_scale",
            f"The gradient noise scale predicts nothing where no run {which} {NOISE}{why}.",
        )
        return
    about = f"{family}: " if family else ""
    text = f"{about}The gradient noise scale predicts a critical batch of {scale.text()} examples: "
    text += f"the mean over {count(scale.count, 'run')} of each one's median up to the target."
    figures: dict[str, Any] = {
        "family": family,
        "predicted": scale.mean,
        "deviation": scale.deviation,
    }
    figures |= {
        "runs": scale.count,
        "cost": {batch: 1 + batch / scale.mean for batch in at},
    }
    if fit and min(costs) <= critical <= max(costs):
        figures |= {"measured": critical, "ratio": scale.mean / critical}
        text += f" The sweep measured {number(critical)}: the prediction is {figures['ratio']:.2f} times that."
    elif fit:
        figures["extrapolated"] = critical
        text += f" The sweep's own costs extrapolate to {number(critical)}, outside of what was tried."
    text += f" At that scale a batch of {max(at)} needs {1 + max(at) / scale.mean:.2f} times the examples of a tiny "
    text += f"one. {CAVEAT} `pipeline critical` measures it."
    yield Finding("noise_scale", text, figures, "noise_by_batch")


def _largest(
    family: str,
    at: dict[int, list[JobResult]],
    costs: dict[int, Spread],
    critical: float,
) -> Finding:
    """Return the largest batch that pays by the definition of McCandlish et al. 2018 (arXiv:1812.06162, section 2).

    At the critical batch size a target takes twice the examples that the smallest batches need. So here it is the
    largest that reaches the target with at most `PAYS` times the fewest examples of any batch, and with fewer updates
    than any smaller batch. The sweep's minimum is never below the true one, so this errs towards large batches.
    """
    least = min(costs, key=lambda batch: costs[batch].mean)
    ratio = {batch: cost.mean / costs[least].mean for batch, cost in costs.items()}
    updates = {batch: cost.mean / batch for batch, cost in costs.items()}
    saves = [
        b
        for b in costs
        if b == least
        or all(updates[b] < updates[smaller] for smaller in costs if smaller < b)
    ]
    largest = max(batch for batch in saves if ratio[batch] <= PAYS)
    about = f"{family}: " if family else ""
    text = f"{about}The largest effective batch that still pays is {largest}: it reached the target with "
    text += f"{ratio[largest]:.2f} times the fewest examples ({costs[least].text()}, at {least}), where up to {PAYS:g} "
    text += "times counts as paying (the critical batch size of McCandlish et al. 2018), and with fewer updates "
    text += f"than any smaller batch ({number(updates[largest])}, {number(updates[min(costs)])} at {min(costs)})."
    above = [
        f"{b} took {ratio[b]:.2f} times, in {number(updates[b])} updates"
        for b in costs
        if b > largest
    ]
    above += [f"{b} did not reach it" for b in at if b > largest and b not in costs]
    text += f" {joined(above) or 'It is the largest that was tried, so the limit may lie beyond'}."
    if min(cost.count for cost in costs.values()) == 1:
        text += " With one seed at some batch, this is one observation."
    figures: dict[str, Any] = {
        "family": family,
        "largest": largest,
        "least": least,
        "open": largest == max(at),
    }
    figures |= {"ratio": ratio, "updates": updates}
    if not math.isnan(critical):
        figures["critical"] = critical
        text += f" Fitted to all batches, the critical batch is {number(critical)}"
        text += (
            ", outside of what was tried."
            if not min(costs) <= critical <= max(costs)
            else "."
        )
    return Finding("largest_batch", text, figures, "examples_to_target")


def noise_scale(job: JobResult, sweep: Comparison) -> float:
    """Return the median of the run's noise scale up to the target, in examples; NaN without one or for a failed run.

    It grows while the loss falls (McCandlish et al. 2018), so later values do not count, nor do those not positive.
    """
    curve = job.curves.get(NOISE)
    if curve is None or job.status in ("FAILED", "KILLED"):
        return math.nan
    until = sweep.cost(job, "updates")
    values = (
        curve.values if math.isnan(until) else curve.values[curve.steps <= until + 1]
    )  # the target is interpolated
    values = values[np.isfinite(values) & (values > 0)]
    return float(np.median(values)) if values.size else math.nan


@dataclass(frozen=True)
class Measured:
    """The critical batch, with its 95% interval."""

    critical: int
    interval: tuple[int, int]
    losses: dict[int, float]  # smoothed, by effective batch in ascending order
    errors: list[
        float
    ]  # half the 95% interval of each, of which the branches share the most
    diverged: int | None  # the batch that is not judged, as its loss is no number


def measure(seeds: Sequence[Mapping[int, Branch]]) -> Measured | None:
    """Measure the critical batch by branches of one checkpoint, by effective batch; one mapping for each seed.

    It is the largest batch up to which no batch has a smoothed loss of over `TOLERANCE` above the lowest of the smaller
    ones (Merrill et al. 2025, arXiv:2505.23971, section 3.1). Their average over updates would span k times the
    examples at k times the batch, and lag as much. Here all branches are averaged over the same examples, as many as
    the last update of the largest batch has. As a loss is one of the weights before its update, the mean is moved to
    where that update begins, by the branch's slope, of weights that decay exponentially. Divergence ends the row.

    The interval is a parametric bootstrap (Efron and Tibshirani 1993, section 6.5) of the losses: of errors of the
    examples, which the branches share, of the variance that successive losses of the smallest batch show (von Neumann
    1941), and of the spread over seeds. With one seed the chance of a trajectory is missing, and it is too narrow.
    """
    batches = (
        sorted(set.intersection(*(set(branches) for branches in seeds)))
        if seeds
        else []
    )
    finite = [
        all(np.isfinite(branches[batch][1]).all() for branches in seeds)
        for batch in batches
    ]
    end = [*finite, False].index(False)
    diverged, batches = next(iter(batches[end:]), None), batches[:end]
    if (
        not batches
        or len(finite) < 2
        or any(branches[batches[0]][1].size < 2 for branches in seeds)
    ):
        return None
    read = [_read(branches, batches) for branches in seeds]
    each, covariance = (
        np.array([losses for losses, _ in read]),
        np.mean([errors for _, errors in read], axis=0),
    )
    covariance = (covariance + (np.cov(each.T) if len(seeds) > 1 else 0)) / len(seeds)
    losses = each.mean(axis=0)
    drawn = np.random.default_rng(0).multivariate_normal(losses, covariance, DRAWS)
    low, high = np.quantile(
        [_last(row) for row in drawn], [0.025, 0.975], method="nearest"
    )
    errors = (1.96 * np.sqrt(np.diagonal(covariance))).tolist()
    by_batch = dict(zip(batches, losses.tolist(), strict=True))
    return Measured(
        batches[_last(losses)],
        (batches[int(low)], batches[int(high)]),
        by_batch,
        errors,
        diverged,
    )


def _read(
    branches: Mapping[int, Branch], batches: Sequence[int]
) -> tuple[Array, Array]:
    """Return the losses of the branches, read as `measure` says, and the covariance of their errors."""
    end, largest = int(min(branches[batch][0].sum() for batch in batches)), max(batches)
    found, shares = list[float](), list[Array]()
    for sizes, losses in (branches[batch] for batch in batches):
        until = np.minimum(np.cumsum(sizes), end)
        begin = np.append(0.0, until[:-1])
        weights = np.maximum(until - np.maximum(begin, end - largest), 0) / largest
        recent = np.diff(0.5 ** ((end - np.append(0.0, until)) / (HALF_LIFE * largest)))
        distance = begin - recent @ begin / recent.sum()
        if (square := recent @ distance**2) > 0:
            weights = (
                weights + (end - largest - weights @ begin) * recent * distance / square
            )
        found.append(weights @ losses)
        shares.append(np.repeat(weights / sizes, sizes.astype(int))[:end])
    by_example = np.array(shares)
    sizes, losses = branches[
        batches[0]
    ]  # the most updates, between which the loss falls the least
    variance = np.mean(
        np.diff(losses) ** 2 / (1 / sizes[1:] + 1 / sizes[:-1])
    )  # of an example's loss
    return np.array(found), variance * by_example @ by_example.T


def _last(losses: Array) -> int:
    """Return the place of the critical batch in a row of losses."""
    return (
        int(
            np.append(losses > np.minimum.accumulate(losses) + TOLERANCE, True).argmax()
        )
        - 1
    )


def measured(sweep: Comparison) -> Measured | None:
    """Return what the branches measured; None before two finished, if the first diverged, or if other keys vary too."""
    seeds = []
    for jobs in grouped(sweep.jobs, lambda job: job.params.get("seed")).values():
        over = [
            job
            for job in jobs
            if LOSS in job.curves and (job.finished or np.isnan(job.last(LOSS)))
        ]  # or diverged
        seeds.append(
            {
                job.batch or 0: (job.curves[_SIZE].values, job.curves[LOSS].values)
                for job in over
            }
        )
    missing = {
        job.batch or 0
        for job in sweep.jobs
        if any(job.batch not in branches for branches in seeds)
    }
    below = min(missing, default=np.inf)  # what is larger cannot be judged without it
    alike = len({job.family for job in sweep.jobs}) < 2
    return measure(
        [
            {size: of for size, of in branches.items() if size < below}
            for branches in seeds
            if alike
        ]
    )


def branch_findings(sweep: Comparison) -> Iterable[Finding]:
    """Yield the critical batch with its interval, the schedule that follows from it, and what the noise predicts."""
    if (found := measured(sweep)) is None:
        varied = len({job.family for job in sweep.jobs}) > 1
        why = (
            ": the branches differ in more than batch and seed"
            if varied
            else " before two branches have finished"
        )
        yield Finding("critical", f"The critical batch cannot be said{why}.")
        return
    text = f"The critical batch is {found.critical} (95% interval: {found.interval[0]} to {found.interval[1]}): the "
    text += f"largest up to which no batch ends over {TOLERANCE:g} above a smaller one, at √k times the rate. Losses: "
    text += (
        ", ".join(f"{batch}: {loss:.4f}" for batch, loss in found.losses.items()) + "."
    )
    if found.critical == max(found.losses):
        beyond = "It is the largest that could be judged, so the limit may lie beyond."
        text += (
            f" With {found.diverged} it diverged." if found.diverged else f" {beyond}"
        )
    if len({job.params.get("seed") for job in sweep.jobs} - {None}) < 2:
        text += " With one seed the interval is of the examples' chance alone, and too narrow: add seed=0,1,2."
    yield Finding(
        "critical",
        text,
        {**vars(found), "interval": [*found.interval]},
        "critical_batch",
    )
    with suppress(KeyError, TypeError, ValueError):  # the store was changed
        job = next(job for job in sweep.jobs if job.batch == found.critical)
        stages = [
            (int(after), int(size)) for after, size in json.loads(job.tags[STAGES])
        ]
        texts = ",".join(
            f"{{start:{{updates:{after}}},effective_batch_size:{size}}}"
            for after, size in stages
        )
        line = f"'accumulation.batch_schedule=[{texts}]' scaling.rule=sqrt "
        line += f"scaling.reference_batch_size={int(job.params['scaling.reference_batch_size'])}"
        pays = found.critical > min(found.losses)
        said = (
            f"To paste: {line}"
            if pays
            else "None: at this checkpoint no larger batch pays yet."
        )
        yield Finding("schedule", said, {"schedule": line} if pays else {})
    scale = statistics.spread([noise_scale(job, sweep) for job in sweep.jobs])
    predicted = f"{scale.mean:.4g} examples." if scale else "Not measured."
    yield Finding(
        "noise_scale",
        f"{predicted} {CAVEAT}",
        {"predicted": scale.mean} if scale else {},
    )


def branch_plots(sweep: Comparison) -> list[Plot]:
    """Return the picture of the smoothed losses by effective batch."""
    figures = {finding.topic: finding.figures for finding in branch_findings(sweep)}
    if not (found := figures["critical"]):
        return []
    batches, losses = [*found["losses"]], [*found["losses"].values()]
    bound = min(losses[: batches.index(found["critical"]) + 1]) + TOLERANCE
    ends = [min(losses), max(*losses, bound)]
    drawn = [trace("branches", batches, losses, 0, "lines+markers", found["errors"])]
    drawn.append(
        trace(f"lowest + {TOLERANCE:g}", [batches[0], batches[-1]], [bound, bound], 1)
    )
    drawn.append(trace("critical batch", [found["critical"]] * 2, ends, 2))
    drawn += [
        trace("noise scale", [scale] * 2, ends, 3)
        for scale in figures["noise_scale"].values()
    ]
    note = f"Training losses at the same examples. Bars: 95%, the most of it common to all. {CAVEAT}"
    layout = {
        "xaxis": axis("effective batch size", True, batches),
        "yaxis": axis("smoothed train/loss"),
    }
    return [
        Plot(
            "critical_batch",
            "Critical batch",
            "Loss by effective batch",
            note,
            drawn,
            layout,
        )
    ]
