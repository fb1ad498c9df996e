"""The critical batch as `pipeline critical` measured it: branches of one checkpoint, at larger and larger batches."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.report import statistics
from pipeline.report.comparison import Comparison
from pipeline.report.critical_batch import CAVEAT, noise_scale
from pipeline.report.findings import Finding
from pipeline.report.html_page import Plot, axis, trace
from pipeline.report.job_results import JobResult, grouped
from pipeline.report.statistics import Array, joined, number

TOLERANCE = 0.01  # of the loss, as in Merrill et al. 2025: a larger batch counts as no worse up to that
HALF_LIFE = 0.5  # of the largest batch: so many examples earlier, a loss counts half in the slope
DRAWS = 2000
Branch = tuple[Array, Array]  # the examples of each update, and its loss


@dataclass(frozen=True)
class Measured:
    """The smoothed losses of the branches at one number of examples, by effective batch in ascending order."""

    losses: dict[int, float]
    covariance: Array

    @cached_property
    def critical(self) -> int:
        return list(self.losses)[_last(np.array(list(self.losses.values())))]

    @cached_property
    def interval(self) -> tuple[int, int]:
        """Return the 2.5% and 97.5% quantiles of the critical batch over losses drawn with the covariance."""
        drawn = np.random.default_rng(0).multivariate_normal([*self.losses.values()], self.covariance, DRAWS)
        low, high = np.quantile(list(map(_last, drawn)), [0.025, 0.975], method="nearest")
        return list(self.losses)[int(low)], list(self.losses)[int(high)]

    @property
    def errors(self) -> Array:
        return np.asarray(1.96 * np.sqrt(np.diagonal(self.covariance)))


def measure(seeds: Sequence[Mapping[int, Branch]]) -> Measured:
    """Measure the critical batch by branches of one checkpoint, by effective batch; one mapping for each seed.

    It is the largest batch up to which no batch has a smoothed loss of over `TOLERANCE` above the lowest of the smaller
    ones (Merrill et al. 2025, arXiv:2505.23971, section 3.1). They take the moving average over updates, which at 64
    times the batch would span 64 times the examples, and lag as much. Here all branches are averaged over the same
    examples, as many as the last update of the largest batch has. As a loss is one of the weights before its update,
    the mean is moved, by the branch's own slope, to the number of examples where that update begins. The slope is of
    least squares, with weights of an exponential moving average. A branch that diverged ends the row.

    The covariance is that of the examples' chance: independent errors of the examples, which all branches share, of the
    variance that successive losses show (von Neumann 1941, Annals of Mathematical Statistics 12). The spread over
    several seeds is added. One seed does not show the chance of its trajectory: the interval is then too narrow.
    """
    batches = sorted(set.intersection(*(set(branches) for branches in seeds)))
    finite = [all(np.isfinite(branches[batch][1]).all() for branches in seeds) for batch in batches]
    batches = batches[: finite.index(False)] if False in finite else batches
    read = [_read(branches, batches) for branches in seeds]
    losses = np.array([found for found, _ in read])
    covariance = np.mean([each for _, each in read], axis=0) / len(seeds)
    if len(seeds) > 1:
        covariance = covariance + np.cov(losses.T).reshape(covariance.shape) / len(seeds)
    return Measured(dict(zip(batches, losses.mean(axis=0).tolist(), strict=True)), covariance)


def _read(branches: Mapping[int, Branch], batches: Sequence[int]) -> tuple[Array, Array]:
    """Return the losses of the branches, read as `measure` says, and their covariance."""
    end, variance = int(min(branches[batch][0].sum() for batch in batches)), _variance(branches.values())
    losses, by_example = [], []
    window, decay = max(batches), np.log(2) / (HALF_LIFE * max(batches))
    for batch in batches:
        sizes, values = branches[batch]
        until = np.minimum(np.cumsum(sizes), end)
        begin = np.append(0.0, until[:-1])
        weights = np.maximum(until - np.maximum(begin, end - window), 0) / window
        recent = np.exp(decay * (until - end)) - np.exp(decay * (begin - end))
        distance = begin - recent @ begin / recent.sum()
        if (square := recent @ distance**2) > 0:
            weights = weights + (end - window - weights @ begin) * recent * distance / square
        losses.append(weights @ values)
        by_example.append(np.repeat(weights / sizes, sizes.astype(int))[:end])
    shares = np.array(by_example)
    return np.array(losses), variance * shares @ shares.T


def _variance(branches: Iterable[Branch]) -> float:
    """Return the variance of an example's loss: half the squared differences of successive ones, by their sizes."""
    squares = [np.diff(losses) ** 2 / (1 / sizes[1:] + 1 / sizes[:-1]) for sizes, losses in branches]
    together = np.concatenate([each[np.isfinite(each)] for each in squares])
    return float(together.mean()) if together.size else 0.0


def _last(losses: Array) -> int:
    """Return the place of the critical batch in a row of losses."""
    above = losses > np.minimum.accumulate(losses) + TOLERANCE
    return int(above.argmax()) - 1 if above.any() else len(losses) - 1


def of(sweep: Comparison) -> Measured | None:
    """Return what the branches of `pipeline critical` measured; None before the first two have finished."""
    seeds = [
        {job.batch: _branch(job) for job in jobs if job.batch and _judged(job)}
        for jobs in grouped(sweep.jobs, lambda job: job.params.get("seed")).values()
    ]
    if not seeds or len(set.intersection(*(set(branches) for branches in seeds))) < 2:
        return None
    return measure(seeds)


def _judged(job: JobResult) -> bool:
    loss = job.curves.get("train/loss")
    return loss is not None and (job.finished or not np.isfinite(loss.last))


def _branch(job: JobResult) -> Branch:
    return job.curves["train/effective_batch_size"].values, job.curves["train/loss"].values


def findings(sweep: Comparison) -> Iterable[Finding]:
    """Yield the critical batch with its interval, the schedule that follows from it, and what the noise predicts."""
    if (found := of(sweep)) is None:
        yield Finding("critical", "The critical batch cannot be said before two branches have finished.")
        return
    (low, high), tried = found.interval, [*found.losses]
    job = next(job for job in sweep.jobs if job.batch == found.critical)
    text = f"The critical batch is {found.critical} (95% interval: {low} to {high}) after update "
    text += f"{job.tags.get('start.update')} of run {job.tags.get('start.run')}: the largest up to which no batch has "
    text += f"a loss of over {TOLERANCE:g} above that of a smaller one, at the square root of the rate (Merrill et al. "
    text += "2025, arXiv:2505.23971). "
    text += joined([f"{batch}: {loss:.4f}" for batch, loss in found.losses.items()], 9) + "."
    if found.critical == tried[-1]:
        text += " It is the largest that could be judged, so the limit may lie beyond."
    if len({job.params.get("seed") for job in sweep.jobs}) == 1:
        text += " With one seed the interval is that of the examples alone, and too narrow: seed=0,1,2 tells more."
    figures: dict[str, Any] = {"critical": found.critical, "interval": [low, high], "losses": found.losses}
    yield Finding("critical", text, figures, "critical_batch")
    try:
        stages = json.loads(job.tags["accumulation.stages"])
        pairs = [f"{{start:{{updates:{int(after)}}},effective_batch_size:{int(size)}}}" for after, size in stages]
        reference = int(job.params["scaling.reference_batch_size"])
    except (KeyError, TypeError, ValueError):  # the store was changed
        return
    key = f"accumulation.schedule=[{','.join(pairs)}]"
    line = f"'{key}' scaling.rule=sqrt scaling.reference_batch_size={reference}"
    yield Finding("schedule", f"Paste it: {line}", {"schedule": key, "arguments": line})
    scale = statistics.spread([noise_scale(job, None) for job in sweep.jobs])
    predicted = "No branch has a gradient noise scale." if scale is None else f"It predicts {number(scale.mean)}."
    yield Finding("noise_scale", f"{predicted} {CAVEAT}", {} if scale is None else {"predicted": scale.mean})


def plots(sweep: Comparison) -> list[Plot]:
    """Return the picture of the losses by effective batch."""
    if (found := of(sweep)) is None:
        return []
    batches, losses = list(found.losses), list(found.losses.values())
    bound = min(losses[: batches.index(found.critical) + 1]) + TOLERANCE
    drawn = [trace("smoothed loss", batches, losses, 0, "lines+markers", found.errors.tolist())]
    drawn.append(trace(f"lowest + {TOLERANCE:g}", [batches[0], batches[-1]], [bound, bound], 1))
    drawn.append(trace("critical batch", [found.critical] * 2, [min(losses), max(max(losses), bound)], 2))
    scale = statistics.spread([noise_scale(job, None) for job in sweep.jobs])
    if scale is not None:
        drawn.append(trace("noise scale", [scale.mean] * 2, [min(losses), max(max(losses), bound)], 3))
    note = f"Each branch's training loss at the same examples. Bars: 95%, of which branches share the most. {CAVEAT}"
    layout = {"xaxis": axis("effective batch size", True, batches), "yaxis": axis("smoothed train/loss")}
    return [Plot("critical_batch", "Critical batch", "Loss by effective batch", note, drawn, layout)]
