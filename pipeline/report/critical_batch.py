"""The critical batch, measured by branches of one checkpoint (`pipeline critical`)."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.common.errors import count
from pipeline.config.stages import STAGES
from pipeline.report import statistics
from pipeline.report.findings import Result, SweepFinding
from pipeline.report.html_page import Plot, axis, trace
from pipeline.report.job_results import (
    EFFECTIVE_BATCH_SIZE,
    LOSS,
    JobResult,
    grouped,
)
from pipeline.report.noise_scale import (
    BY_TOKENS,
    UNMEASURED,
    NoiseScale,
    beside_measured,
    noise_scale_of_runs,
)
from pipeline.report.statistics import Array
from pipeline.report.sweep_result import SweepResult

# A larger batch counts as no worse if its loss is at most this much higher, as in
# Merrill et al. 2025.
TOLERANCE = 0.01
# The half-life of the weights in the regression that gives the slope of the losses, in
# units of the largest batch.
HALF_LIFE = 0.5
DRAWS = 2000  # number of bootstrap samples

# The error that ends a run whose loss or gradient is not finite, as in its tag
# `failure`; see `pipeline.training.recorder`.
_NON_FINITE = "NonFiniteError"


@dataclass(frozen=True)
class Branch:
    """The updates of one branch of a checkpoint."""

    sizes: Array  # examples per update
    losses: Array  # training loss per update, from the weights before the update
    # whether the training ended because of a non-finite loss or gradient
    diverged: bool = False


@dataclass(frozen=True)
class CriticalBatch(Result):
    """The critical batch measured by branches, with its 95% interval.

    Attributes:
        critical: the critical batch, in examples.
        interval: the smallest and the largest batch in the interval.
        losses: the smoothed loss by effective batch, in ascending order of batches.
        errors: the half-width of the 95% interval of each loss, in the same order. Most
            of the error is common to all branches.
        diverged: the smallest batch that diverged, or None if none did. Neither this
            batch nor any larger one is judged.
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


@dataclass(frozen=True)
class Schedule(Result):
    """The overrides of a run that uses the critical batch."""

    schedule: str


@dataclass(frozen=True)
class BranchNoise(Result):
    """The noise scale of the branches, which predicts a critical batch.

    Attributes:
        predicted: the mean over the branches.
        deviation: the standard deviation over the branches, or None with one branch.
        runs: the number of branches with a noise scale.
        measurements: the number of measurements in these branches.
    """

    predicted: float
    deviation: float | None
    runs: int
    measurements: int


def measure(seeds: Sequence[Mapping[int, Branch]]) -> CriticalBatch | None:
    """Measure the critical batch by branches of one checkpoint.

    Batches are compared in ascending order, until the smoothed loss of one exceeds the
    lowest loss of all smaller batches by more than `TOLERANCE` (Merrill et al. 2025,
    arXiv:2505.23971, section 3.1). The critical batch is the last one before that. The
    first batch that diverged and all larger ones are left out.

    Merrill et al. average over a number of updates. With a batch k times as large, such
    an average spans k times as many examples, and so includes older losses. Here the
    losses of all branches are averaged over the same examples; see
    `_losses_at_same_examples`.

    The interval is computed from draws of the smoothed losses. With several seeds, the
    losses are drawn from the t distribution that their spread over seeds gives; see
    `_drawn_from_seeds`. With one seed, they are drawn with the sampling error of the
    examples (a parametric bootstrap: Efron and Tibshirani 1993, section 6.5). The
    variation between trajectories is then unknown, so the interval is too narrow.

    Args:
        seeds: for each seed, its branches by effective batch.

    Returns:
        The critical batch, or None if fewer than two batches are common to all seeds,
        or if, for some seed, the smallest of these diverged or has a single update.
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
    losses = np.mean(losses_by_seed, axis=0)
    rng = np.random.default_rng(0)
    if len(seeds) > 1:
        deviations = np.array(losses_by_seed) - losses
        drawn_losses = losses + _drawn_from_seeds(rng, deviations)
        quantile = statistics.student_quantile(len(seeds) - 1, 0.975)
        spread_over_seeds = np.std(losses_by_seed, axis=0, ddof=1)
        standard_errors = spread_over_seeds / math.sqrt(len(seeds))
    else:
        (covariance,) = covariances
        drawn_losses = rng.multivariate_normal(losses, covariance, DRAWS)
        quantile = 1.96
        standard_errors = np.sqrt(np.diagonal(covariance))

    drawn_positions = [_critical_position(row) for row in drawn_losses]
    low, high = np.quantile(drawn_positions, [0.025, 0.975], method="nearest")

    diverged = None
    if len(batches) < len(common_batches):
        diverged = common_batches[len(batches)]
    return CriticalBatch(
        critical=batches[_critical_position(losses)],
        interval=(batches[int(low)], batches[int(high)]),
        losses=dict(zip(batches, losses.tolist(), strict=True)),
        errors=(quantile * standard_errors).tolist(),
        diverged=diverged,
    )


def _drawn_from_seeds(rng: np.random.Generator, deviations: Array) -> Array:
    """Draw errors of the mean losses over seeds, from their spread over seeds.

    With n seeds, each weighted sum of the losses of different batches, such as the
    difference between two of them, is drawn from Student's t distribution with n − 1
    degrees of freedom, scaled by the standard error of its mean over seeds.

    Args:
        rng: the generator of random numbers.
        deviations: the deviation of each seed's losses from their mean, of shape
            (seeds, batches).

    Returns:
        The drawn errors, of shape (`DRAWS`, batches).
    """
    seeds = len(deviations)
    normal = rng.standard_normal((DRAWS, seeds)) @ deviations
    scale = np.sqrt((seeds - 1) / rng.chisquare(seeds - 1, (DRAWS, 1)))
    return scale * normal / math.sqrt(seeds * (seeds - 1))


def _common_batches(seeds: Sequence[Mapping[int, Branch]]) -> list[int]:
    """Return the batches that every seed has, in ascending order."""
    if not seeds:
        return []
    return sorted(set.intersection(*(set(branches) for branches in seeds)))


def _batches_before_divergence(
    seeds: Sequence[Mapping[int, Branch]], batches: list[int]
) -> list[int]:
    """Return the batches before the first one that diverged for some seed."""
    kept: list[int] = []
    for batch in batches:
        for branches in seeds:
            branch = branches[batch]
            if branch.diverged or not np.isfinite(branch.losses).all():
                return kept
        kept.append(batch)
    return kept


@dataclass(frozen=True)
class _SmoothedLosses:
    """The smoothed losses of the branches of one seed."""

    losses: Array  # (batches,)
    covariance: Array  # (batches, batches), covariance of the errors of the losses


def _losses_at_same_examples(
    branches: Mapping[int, Branch], batches: Sequence[int]
) -> _SmoothedLosses:
    """Smooth the losses of each branch over the same examples.

    All branches have seen the first `end` examples. The losses are averaged over the
    last `largest` examples of these, where `largest` is the largest batch. An update's
    loss is computed with the weights before the update, so the mean loss of a smaller
    batch comes from later weights on average. To correct for this, the mean is moved
    along the branch's slope to the start of the averaged examples. The slope comes from
    a linear regression of the losses on the number of examples seen, with weights that
    decay exponentially into the past.

    A smoothed loss is thus a weighted sum of the losses of single examples, which all
    branches share. If A[i, j] is the weight of example j in branch i, the covariance
    of the errors is variance · A Aᵀ, where `variance` is the variance of the loss of
    one example.
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
    """Estimate the variance of one example's loss from successive updates of a branch.

    The estimate uses the differences between successive losses (von Neumann 1941). It
    is most accurate for the branch with the smallest batch, which has the most updates:
    there the loss falls least from one update to the next.
    """
    squares = np.diff(branch.losses) ** 2
    shares = 1 / branch.sizes[1:] + 1 / branch.sizes[:-1]
    return float(np.mean(squares / shares))


def _critical_position(losses: Array) -> int:
    """Return the index of the critical batch in losses ordered by ascending batch."""
    too_high = losses > np.minimum.accumulate(losses) + TOLERANCE
    first_too_high = np.append(too_high, True).argmax()
    return int(first_too_high) - 1


def measured(sweep: SweepResult) -> CriticalBatch | None:
    """Return the critical batch measured by the branches of a sweep.

    Return None if the sweep varies more than batch and seed, or if `measure` returns
    None, for example before two branches have finished.
    """
    if _varies_more(sweep):
        return None

    seeds = []
    for jobs in grouped(sweep.jobs, lambda job: job.seed).values():
        branches = {}
        for job in jobs:
            branch = _branch(job)
            if branch is not None:
                branches[job.effective_batch_size or 0] = branch
        seeds.append(branches)

    # Leave out the smallest batch that some seed lacks, and all larger batches, since a
    # batch is judged against all smaller ones.
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


def _branch(job: JobResult) -> Branch | None:
    """Return the branch of a job, or None if it neither finished nor diverged.

    Also return None if the size or the loss of some update was not logged. A branch
    that diverged needs no losses, since it is not judged.
    """
    if _diverged(job):
        return Branch(np.empty(0), np.empty(0), diverged=True)
    if not job.finished:
        return None
    losses = job.curves.get(LOSS)
    sizes = job.curves.get(EFFECTIVE_BATCH_SIZE)
    if losses is None or sizes is None:
        return None
    if not np.array_equal(losses.steps, sizes.steps):
        return None
    return Branch(sizes.values, losses.values)


def _diverged(job: JobResult) -> bool:
    """Return whether a job ended because its loss or gradient was not finite.

    A gradient is judged by the recorded failure, not by its norm, since in float16,
    updates with a gradient that is not finite are skipped.
    """
    if job.finished:
        return False
    if _NON_FINITE in job.tags.get("failure", ""):
        return True
    return LOSS in job.curves and not math.isfinite(job.last(LOSS))


def _varies_more(sweep: SweepResult) -> bool:
    return len({job.family for job in sweep.jobs}) > 1


def branch_findings(sweep: SweepResult) -> Iterable[SweepFinding]:
    """Yield the critical batch, the batch schedule for it, and the noise scale.

    If the critical batch cannot be measured, yield only the reason.
    """
    result = measured(sweep)
    if result is None:
        why = " before two branches have finished"
        if _varies_more(sweep):
            why = " because the branches differ in more than batch and seed"
        yield SweepFinding("critical", f"The critical batch cannot be determined{why}.")
        return

    text = _critical_sentences(sweep, result)
    yield SweepFinding("critical", text, result, "critical_batch")

    schedule = _schedule(sweep, result.critical)
    if schedule is not None:
        if result.critical > min(result.losses):
            text = f"{_uncertainty_sentence(result)}Overrides to paste: {schedule}"
            yield SweepFinding("schedule", text, Schedule(schedule))
        else:
            text = "None: at this checkpoint no larger batch pays yet."
            yield SweepFinding("schedule", text)

    scale = noise_scale_of_runs(sweep.jobs, sweep)
    if scale is not None:
        yield _noise_finding(scale, result)
    elif any(job.is_cut_by_tokens for job in sweep.jobs):
        yield SweepFinding("noise_scale", f"Not measured: {BY_TOKENS}")
    else:
        yield SweepFinding("noise_scale", f"Not measured. {UNMEASURED}")


def _uncertainty_sentence(result: CriticalBatch) -> str:
    """Return a sentence if it is not certain that a larger batch pays, else ""."""
    smallest = min(result.losses)
    if result.interval[0] > smallest:
        return ""
    return (
        f"The interval includes the smallest batch, {smallest}, so it is not certain "
        "that a larger batch pays; more seeds or --examples may tell. "
    )


def _noise_finding(scale: NoiseScale, result: CriticalBatch) -> SweepFinding:
    """Report the noise scale of the branches beside the measured critical batch."""
    spread = scale.spread
    text = (
        f"{spread.text()} examples: the mean over {count(spread.count, 'run')} "
        f"({count(scale.measurements, 'measurement')}) of each run's median. "
        f"{_beside_interval(scale, result)}"
    )
    noise = BranchNoise(spread.mean, spread.deviation, spread.count, scale.measurements)
    return SweepFinding("noise_scale", text, noise)


def _critical_sentences(sweep: SweepResult, result: CriticalBatch) -> str:
    low, high = result.interval
    losses = []
    for (batch, loss), error in zip(result.losses.items(), result.errors, strict=True):
        losses.append(f"{batch}: {loss:.4f} ± {error:.4f}")
    several_seeds = len({job.seed for job in sweep.jobs} - {None}) > 1
    interval = f"{low} to {high}"
    errors = "intervals"
    if several_seeds:
        interval = f"95% interval: {interval}"
        errors = "95% intervals"
    text = (
        f"The critical batch is {result.critical} ({interval}): up to it, no batch "
        f"ends with a loss more than {TOLERANCE:g} above that of a smaller batch, if k "
        "times the batch trains at √k times the rate. Losses "
        f"({errors}; most of the error is common to all batches): "
        f"{', '.join(losses)}."
    )
    if result.critical == max(result.losses):
        if result.diverged:
            text += f" With a batch of {result.diverged}, training diverged."
        else:
            text += (
                f" {result.critical} is the largest batch that could be judged, so the "
                "limit may be higher."
            )
    if not several_seeds:
        text += (
            f" With one seed, the interval {interval} covers only the choice of "
            "examples, and is too narrow: add seed=0,1,2."
        )
    return text


def _schedule(sweep: SweepResult, critical: int) -> str | None:
    """Return the overrides that make a run use the critical batch.

    Return None if the recorded stages or reference batch are missing or malformed.
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


def _beside_interval(scale: NoiseScale, result: CriticalBatch) -> str:
    """Return a sentence that compares the noise scale with the measured interval.

    Return `UNMEASURED` if the noise scale is below an interval that begins at the
    smallest judged batch, since the critical batch may be smaller, too. The same
    applies above an interval that ends at the largest judged batch, unless a larger
    batch diverged.
    """
    low, high = result.interval
    at_largest = high == max(result.losses) and result.diverged is None
    position = scale.position(low, high)
    if position == "above" and at_largest:
        return UNMEASURED
    if position == "below" and low == min(result.losses):
        return UNMEASURED
    return beside_measured(scale, low, high)


def branch_plots(sweep: SweepResult) -> list[Plot]:
    """Return the plot of the smoothed losses by batch, if there is a result."""
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
    scale = noise_scale_of_runs(sweep.jobs, sweep)
    if scale is not None:
        mean = scale.spread.mean
        traces.append(trace("noise scale", [mean, mean], ends, 3))

    caption = (
        "Training losses after the same examples. Bars: 95% intervals; most of the "
        "error is common to all branches."
    )
    layout = {
        "xaxis": axis("effective batch size", True, batches),
        "yaxis": axis("smoothed train/loss"),
    }
    title = "Loss by effective batch"
    return [Plot("critical_batch", "Critical batch", title, caption, traces, layout)]
