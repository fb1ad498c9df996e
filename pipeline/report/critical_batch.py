"""The critical batch, measured by branches of one checkpoint (`pipeline critical`)."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.stages import STAGES
from pipeline.report import statistics
from pipeline.report.comparison import SweepResult
from pipeline.report.findings import SweepFinding
from pipeline.report.html_page import Plot, axis, trace
from pipeline.report.job_results import LOSS, grouped
from pipeline.report.noise_scale import UNMEASURED, beside_measured, noise_scale
from pipeline.report.statistics import Array, Spread

# A larger batch counts as no worse if its loss is higher by up to this, as in Merrill
# et al. 2025.
TOLERANCE = 0.01
# So many largest batches earlier, a loss counts half in the slope of the losses.
HALF_LIFE = 0.5
DRAWS = 2000  # of the bootstrap

_SIZE = "train/effective_batch_size"


@dataclass(frozen=True)
class Branch:
    """The updates of one branch of a checkpoint."""

    sizes: Array  # examples of each update
    losses: Array  # loss of each update, by the weights before it


@dataclass(frozen=True)
class CriticalBatch:
    """The critical batch that branches measured, with its 95% interval.

    Attributes:
        critical: the critical batch, in examples.
        interval: the lowest and the highest batch of the interval.
        losses: the smoothed losses, by effective batch in ascending order.
        errors: half the 95% interval of each loss; the branches share most of it.
        diverged: the batch that is not judged, as its loss is no number.
    """

    critical: int
    interval: tuple[int, int]
    losses: dict[int, float]
    errors: list[float]
    diverged: int | None

    def figures(self) -> dict[str, Any]:
        return {
            "critical": self.critical,
            "interval": list(self.interval),
            "losses": self.losses,
            "errors": self.errors,
            "diverged": self.diverged,
        }


def measure(seeds: Sequence[Mapping[int, Branch]]) -> CriticalBatch | None:
    """Measure the critical batch by branches of one checkpoint.

    It is the largest batch up to which no batch has a smoothed loss of over
    `TOLERANCE` above the lowest of the smaller ones (Merrill et al. 2025,
    arXiv:2505.23971, section 3.1). Divergence ends the row.

    Merrill et al. smooth over updates. At k times the batch their average would span k
    times the examples, and lag as much. Here all branches are averaged over the same
    examples, see `_losses_at_same_examples`.

    The interval is a parametric bootstrap (Efron and Tibshirani 1993, section 6.5) of
    the losses. It has the errors of the examples, which the branches share, and the
    spread over seeds. With one seed the chance of a trajectory is missing, and the
    interval is too narrow.

    Args:
        seeds: the branches by effective batch, for each seed.

    Returns:
        None with fewer than two batches, if the smallest one diverged, or if it has a
        single update.
    """
    common_batches = _common_batches(seeds)
    batches = _batches_before_divergence(seeds, common_batches)
    if not batches or len(common_batches) < 2:
        return None
    if any(branches[batches[0]].losses.size < 2 for branches in seeds):
        return None

    losses_by_seed = []
    covariances = []
    for branches in seeds:
        smoothed = _losses_at_same_examples(branches, batches)
        losses_by_seed.append(smoothed.losses)
        covariances.append(smoothed.covariance)
    covariance = np.mean(covariances, axis=0)
    if len(seeds) > 1:
        covariance = covariance + np.cov(np.transpose(losses_by_seed))
    covariance = covariance / len(seeds)

    losses = np.mean(losses_by_seed, axis=0)
    rng = np.random.default_rng(0)
    drawn_losses = rng.multivariate_normal(losses, covariance, DRAWS)
    drawn_positions = [_critical_position(row) for row in drawn_losses]
    low, high = np.quantile(drawn_positions, [0.025, 0.975], method="nearest")

    diverged = None
    if len(batches) < len(common_batches):
        diverged = common_batches[len(batches)]
    return CriticalBatch(
        critical=batches[_critical_position(losses)],
        interval=(batches[int(low)], batches[int(high)]),
        losses=dict(zip(batches, losses.tolist(), strict=True)),
        errors=(1.96 * np.sqrt(np.diagonal(covariance))).tolist(),
        diverged=diverged,
    )


def _common_batches(seeds: Sequence[Mapping[int, Branch]]) -> list[int]:
    """Return the batches that all seeds have, ascending."""
    if not seeds:
        return []
    return sorted(set.intersection(*(set(branches) for branches in seeds)))


def _batches_before_divergence(
    seeds: Sequence[Mapping[int, Branch]], batches: list[int]
) -> list[int]:
    """Return the batches before the first with a loss that is no number."""
    kept = []
    for batch in batches:
        if not all(np.isfinite(branches[batch].losses).all() for branches in seeds):
            break
        kept.append(batch)
    return kept


@dataclass(frozen=True)
class _SmoothedLosses:
    """The smoothed losses of the branches of one seed."""

    losses: Array  # (batches,)
    covariance: Array  # (batches, batches), of their errors


def _losses_at_same_examples(
    branches: Mapping[int, Branch], batches: Sequence[int]
) -> _SmoothedLosses:
    """Smooth the losses of each branch over the same examples.

    These are the last `largest` examples before `end`, as many as the last update of
    the largest batch has. A loss belongs to the weights before its update, so the mean
    of a smaller batch is one of later weights. It is moved by the branch's slope to
    where these examples begin. The slope is that of a linear regression of the losses
    over the examples seen, with weights that decay exponentially into the past.

    A smoothed loss is thus a weighted sum of the losses, and so of the losses of the
    examples, which the branches share. With the weight A[i, j] of example j in branch
    i, the covariance of the errors is variance · A Aᵀ, where `variance` is that of an
    example's loss.
    """
    end = int(min(branches[batch].sizes.sum() for batch in batches))
    largest = max(batches)
    begin_of_last = end - largest

    smoothed = []
    weights_by_example = []
    for batch in batches:
        sizes = branches[batch].sizes
        until = np.minimum(np.cumsum(sizes), end)
        begin = np.append(0.0, until[:-1])
        overlap = np.maximum(until - np.maximum(begin, begin_of_last), 0)
        weights = overlap / largest

        age = (end - np.append(0.0, until)) / (HALF_LIFE * largest)
        decay = np.diff(0.5**age)
        distance = begin - decay @ begin / decay.sum()
        square = decay @ distance**2
        if square > 0:
            shift = begin_of_last - weights @ begin
            weights = weights + shift * decay * distance / square

        smoothed.append(weights @ branches[batch].losses)
        of_examples = np.repeat(weights / sizes, sizes.astype(int))
        weights_by_example.append(of_examples[:end])

    matrix = np.array(weights_by_example)
    variance = _example_variance(branches[batches[0]])
    return _SmoothedLosses(np.array(smoothed), variance * matrix @ matrix.T)


def _example_variance(branch: Branch) -> float:
    """Return the variance of an example's loss, by the differences of successive ones.

    See von Neumann 1941. It is best estimated from the branch of the smallest batch:
    that one has the most updates, between which the loss falls the least.
    """
    squares = np.diff(branch.losses) ** 2
    shares = 1 / branch.sizes[1:] + 1 / branch.sizes[:-1]
    return float(np.mean(squares / shares))


def _critical_position(losses: Array) -> int:
    """Return the position of the critical batch in a row of losses."""
    too_high = losses > np.minimum.accumulate(losses) + TOLERANCE
    first_too_high = np.append(too_high, True).argmax()
    return int(first_too_high) - 1


def measured(sweep: SweepResult) -> CriticalBatch | None:
    """Return the critical batch that the branches of a sweep measured.

    Return None before two branches have finished, if the smallest one diverged, or if
    the sweep varies more than batch and seed.
    """
    if _varies_more(sweep):
        return None

    seeds = []
    for jobs in grouped(sweep.jobs, lambda job: job.seed).values():
        branches = {}
        for job in jobs:
            diverged = np.isnan(job.last(LOSS))
            if LOSS in job.curves and (job.finished or diverged):
                sizes = job.curves[_SIZE].values
                losses = job.curves[LOSS].values
                branches[job.effective_batch_size or 0] = Branch(sizes, losses)
        seeds.append(branches)

    # A batch cannot be judged without all of the smaller ones.
    smallest_missing = math.inf
    for job in sweep.jobs:
        batch = job.effective_batch_size or 0
        if any(batch not in branches for branches in seeds):
            smallest_missing = min(smallest_missing, batch)
    judged = []
    for branches in seeds:
        judged_branches = {}
        for batch, branch in branches.items():
            if batch < smallest_missing:
                judged_branches[batch] = branch
        judged.append(judged_branches)
    return measure(judged)


def _varies_more(sweep: SweepResult) -> bool:
    return len({job.family for job in sweep.jobs}) > 1


def branch_findings(sweep: SweepResult) -> Iterable[SweepFinding]:
    """Yield the critical batch, the schedule that follows, and the noise scale."""
    result = measured(sweep)
    if result is None:
        why = " before two branches have finished"
        if _varies_more(sweep):
            why = ": the branches differ in more than batch and seed"
        yield SweepFinding("critical", f"The critical batch cannot be said{why}.")
        return

    text = _critical_sentences(sweep, result)
    yield SweepFinding("critical", text, result.figures(), "critical_batch")

    schedule = _schedule(sweep, result.critical)
    if schedule is not None:
        if result.critical > min(result.losses):
            text = f"To paste: {schedule}"
            yield SweepFinding("schedule", text, {"schedule": schedule})
        else:
            text = "None: at this checkpoint no larger batch pays yet."
            yield SweepFinding("schedule", text)

    scale = _noise_scale_of_branches(sweep)
    if scale is None:
        yield SweepFinding("noise_scale", f"Not measured. {UNMEASURED}")
    else:
        text = f"{scale.mean:.4g} examples. {_beside_interval(scale.mean, result)}"
        yield SweepFinding("noise_scale", text, {"predicted": scale.mean})


def _critical_sentences(sweep: SweepResult, result: CriticalBatch) -> str:
    low, high = result.interval
    losses = [f"{batch}: {loss:.4f}" for batch, loss in result.losses.items()]
    text = (
        f"The critical batch is {result.critical} (95% interval: {low} to {high}): the "
        f"largest up to which no batch ends over {TOLERANCE:g} above a smaller one, at "
        f"√k times the rate. Losses: {', '.join(losses)}."
    )
    if result.critical == max(result.losses):
        if result.diverged:
            text += f" With {result.diverged} it diverged."
        else:
            text += (
                " It is the largest that could be judged, so the limit may lie beyond."
            )
    seeds = {job.seed for job in sweep.jobs} - {None}
    if len(seeds) < 2:
        text += (
            " With one seed the interval is of the examples' chance alone, and too "
            "narrow: add seed=0,1,2."
        )
    return text


def _schedule(sweep: SweepResult, critical: int) -> str | None:
    """Return the overrides with which a run follows the critical batch.

    Return None if the store does not have the stages as they were written.
    """
    job = next(job for job in sweep.jobs if job.effective_batch_size == critical)
    try:
        stages = []
        for after, size in json.loads(job.tags[STAGES]):
            start = f"start:{{updates:{int(after)}}}"
            stages.append(f"{{{start},effective_batch_size:{int(size)}}}")
        reference = int(job.params["scaling.reference_batch_size"])
    except (KeyError, TypeError, ValueError):
        return None
    return (
        f"'accumulation.batch_schedule=[{','.join(stages)}]' scaling.rule=sqrt "
        f"scaling.reference_batch_size={reference}"
    )


def _beside_interval(scale: float, result: CriticalBatch) -> str:
    """Return how the noise scale compares with the measured interval.

    If the interval ends at the largest batch that was judged, or at the smallest, the
    critical batch may lie beyond.
    """
    low, high = result.interval
    at_largest = high == max(result.losses) and result.diverged is None
    if scale > high and at_largest:
        return UNMEASURED
    if scale < low and low == min(result.losses):
        return UNMEASURED
    return beside_measured(scale, low, high)


def _noise_scale_of_branches(sweep: SweepResult) -> Spread | None:
    return statistics.spread([noise_scale(job, sweep) for job in sweep.jobs])


def branch_plots(sweep: SweepResult) -> list[Plot]:
    """Return the plot of the smoothed losses by effective batch, if there is one."""
    result = measured(sweep)
    if result is None:
        return []

    batches = list(result.losses)
    losses = list(result.losses.values())
    up_to_critical = losses[: batches.index(result.critical) + 1]
    bound = min(up_to_critical) + TOLERANCE
    ends = [min(losses), max(*losses, bound)]
    outer_batches = [batches[0], batches[-1]]

    traces = [
        trace("branches", batches, losses, 0, "lines+markers", result.errors),
        trace(f"lowest + {TOLERANCE:g}", outer_batches, [bound, bound], 1),
        trace("critical batch", [result.critical, result.critical], ends, 2),
    ]
    scale = _noise_scale_of_branches(sweep)
    if scale is not None:
        traces.append(trace("noise scale", [scale.mean, scale.mean], ends, 3))

    caption = (
        "Training losses at the same examples. Bars: 95%, the most of it common to all."
    )
    layout = {
        "xaxis": axis("effective batch size", True, batches),
        "yaxis": axis("smoothed train/loss"),
    }
    title = "Loss by effective batch"
    return [Plot("critical_batch", "Critical batch", title, caption, traces, layout)]
