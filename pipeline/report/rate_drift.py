"""Measures the drift: how far the best learning rate moves when the batch doubles.

A sweep over rate and batch has one drift per recipe, such as a scaling rule.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.common.errors import count
from pipeline.report.findings import Result, SweepFinding
from pipeline.report.job_results import LOSS, VALIDATION_LOSS, JobResult, grouped
from pipeline.report.statistics import Array
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import joined


@dataclass(frozen=True)
class BatchLosses:
    """The final losses at one effective batch, all of which are finite.

    Attributes:
        batch: the effective batch, in examples.
        log_rates: log2 of each learning rate, in ascending order.
        seeds: for each rate, the losses of all seeds.
    """

    batch: int
    log_rates: list[float]
    seeds: list[Array]

    @property
    def means(self) -> Array:
        """The mean loss over the seeds, for each rate."""
        return np.array([losses.mean() for losses in self.seeds])

    @property
    def lowest(self) -> int:
        """The index of the rate with the lowest mean loss."""
        return int(np.argmin(self.means))

    @property
    def edge(self) -> str | None:
        """Which end of the rates has the lowest mean loss: `smallest` or `largest`.

        It is None if a rate between the ends has the lowest mean loss.
        """
        if self.lowest == 0:
            return "smallest"
        if self.lowest == len(self.log_rates) - 1:
            return "largest"
        return None

    @property
    def near_lowest(self) -> list[Array]:
        """The losses at up to three rates around the lowest mean."""
        first = max(self.lowest - 1, 0)
        return self.seeds[first : first + 3]


@dataclass(frozen=True)
class Drift(Result):
    """How far the best learning rate of a recipe moves when the batch doubles.

    Attributes:
        recipe: the settings that the jobs share, such as the scaling rule.
        batches: the losses at each batch, in ascending order of batches.
        best: for each batch, log2 of the best rate: the measured value, followed by the
            bootstrap samples.
        slopes: the drift in octaves per doubling of the batch: the measured value,
            followed by the bootstrap samples. None if the lowest loss of a batch is at
            its smallest or largest rate.
    """

    recipe: str
    batches: list[BatchLosses]
    best: list[Array]
    slopes: Array | None

    @property
    def edges(self) -> dict[int, str]:
        """The `edge` of each batch that has one, by batch."""
        return {losses.batch: losses.edge for losses in self.batches if losses.edge}

    @property
    def value(self) -> float | None:
        """The measured drift, or None if there is none."""
        if self.slopes is None:
            return None
        return float(self.slopes[0])

    @property
    def interval(self) -> list[float] | None:
        """The 95% interval of the drift.

        It is None if there is no drift, or if there are no bootstrap samples.
        """
        if self.slopes is None or len(self.slopes) == 1:
            return None
        return _interval(self.slopes)

    @property
    def rates(self) -> dict[int, float]:
        """The measured best rate by batch."""
        rates = {}
        for losses, log_rates in zip(self.batches, self.best, strict=True):
            rates[losses.batch] = 2 ** log_rates[0]
        return rates

    @property
    def stays(self) -> bool:
        """Whether there is an interval that includes a drift of 0."""
        if self.interval is None:
            return False
        low, high = self.interval
        return low <= 0 <= high

    @property
    def farthest(self) -> float:
        """The largest magnitude in `interval`, or infinity if that is None."""
        if self.interval is None:
            return math.inf
        low, high = self.interval
        return max(abs(low), abs(high))

    @property
    def nearest(self) -> float:
        """The smallest magnitude in `interval`, or 0 if that is None."""
        if self.interval is None or self.stays:
            return 0.0
        low, high = self.interval
        return min(abs(low), abs(high))

    def figures(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "drift": self.value,
            "interval": self.interval,
            "edges": self.edges,
            "rates": self.rates,
            "losses": {losses.batch: losses.means.min() for losses in self.batches},
        }


@dataclass(frozen=True)
class LeastDrift(Result):
    """The recipes by their drifts.

    Attributes:
        order: the recipes, in ascending order of their drifts' magnitudes.
        still: the recipes whose interval includes a drift of 0.
    """

    order: list[str]
    still: list[str]


def drifts(sweep: SweepResult) -> list[Drift]:
    """Return the drift of each recipe with enough rates and batches.

    A recipe needs at least two batches, each with losses at three or more rates.
    """
    return [
        _drift(recipe, batches) for recipe, batches in _losses_by_recipe(sweep).items()
    ]


def loss_by_rate_key(index: int) -> str:
    """Return the key of the plot for the drift at this index in `drifts`."""
    return f"loss_by_rate_{index}"


def findings(sweep: SweepResult) -> Iterable[SweepFinding]:
    """Yield the drift for each recipe, then compare the drifts that have intervals."""
    judged = []
    for index, drift in enumerate(drifts(sweep)):
        text = _sentence(drift, sweep.search)
        yield SweepFinding("rate_drift", text, drift, loss_by_rate_key(index))
        if drift.interval is not None:
            judged.append(drift)

    if len(judged) > 1:
        yield _least_drift(judged)


def loss_metric(sweep: SweepResult) -> str:
    """Return the loss metric by which rates are judged."""
    if VALIDATION_LOSS in sweep.metrics:
        return VALIDATION_LOSS
    return LOSS


def _losses_by_recipe(sweep: SweepResult) -> dict[str, list[BatchLosses]]:
    """Return the final losses by recipe.

    A batch with fewer than three rates is left out, and so is a recipe with fewer than
    two batches. A rate at which a job diverged or did not finish is left out, since it
    must not count as the best.
    """
    metric = loss_metric(sweep)
    tried = []
    for job in sweep.jobs:
        if job.effective_batch_size and isinstance(job.setting("rate"), float):
            tried.append(job)
    settings = grouped(
        tried, lambda job: (job.effective_batch_size, job.setting("rate"), job.recipe)
    )

    by_recipe: dict[str, dict[int, BatchLosses]] = {}
    for (batch, rate, recipe), jobs in sorted(settings.items()):
        losses = np.array([_final_loss(sweep, job, metric) for job in jobs])
        if rate > 0 and np.isfinite(losses).all():
            by_batch = by_recipe.setdefault(recipe, {})
            batch_losses = by_batch.setdefault(batch, BatchLosses(batch, [], []))
            batch_losses.log_rates.append(math.log2(rate))
            batch_losses.seeds.append(losses)

    enough = {}
    for recipe, by_batch in by_recipe.items():
        batches = [losses for losses in by_batch.values() if len(losses.seeds) >= 3]
        if len(batches) >= 2:
            enough[recipe] = batches
    return enough


def _final_loss(sweep: SweepResult, job: JobResult, metric: str) -> float:
    if not job.finished:
        return math.nan
    return sweep.final(job, metric)


def _drift(recipe: str, batches: list[BatchLosses]) -> Drift:
    """Compute the drift: the slope of log2 of the best rate against log2 of the batch.

    The slope is that of the least-squares line. The result has no slope if the lowest
    loss of a batch is at its smallest or largest rate.
    """
    best = _best_rates(batches)
    if any(losses.edge for losses in batches):
        return Drift(recipe, batches, best, None)
    x = np.log2([losses.batch for losses in batches])
    centered = x - x.mean()
    slopes = centered @ np.stack(best) / (centered**2).sum()
    return Drift(recipe, batches, best, slopes)


def _best_rates(batches: list[BatchLosses], draws: int = 4000) -> list[Array]:
    """Return, for each batch, log2 of the best rate: as measured, then bootstrapped.

    The bootstrap draws mean losses, with a fixed random seed. To the measured mean over
    n seeds, it adds the mean of n deviations, drawn with replacement. A deviation is
    the difference between the loss of a seed and the mean over all m seeds of its rate,
    times √(m / (m − 1)). Deviations are pooled over rates and batches, since each rate
    has few seeds. Only rates near the lowest losses are included, since losses vary
    more elsewhere. If each of these rates has a single seed, there are no bootstrap
    samples.
    """
    pool = []
    for batch_losses in batches:
        for losses in batch_losses.near_lowest:
            if losses.size > 1:
                scale = math.sqrt(losses.size / (losses.size - 1))
                pool.append((losses - losses.mean()) * scale)

    rng = np.random.default_rng(0)
    best = []
    for batch_losses in batches:
        rows = batch_losses.means[None, :]  # (1, rates)
        if pool:
            deviations = np.concatenate(pool)
            noise = []
            for losses in batch_losses.seeds:
                drawn = rng.choice(deviations, (draws, losses.size))
                noise.append(drawn.mean(axis=1))
            rows = np.vstack([rows, batch_losses.means + np.transpose(noise)])
        best.append(vertex(np.array(batch_losses.log_rates), rows))
    return best


def vertex(rates: Array, losses: Array) -> Array:
    """Return the vertex of the parabola through the lowest loss and its neighbors.

    With the distances l and r to the left and the right neighbor, and the losses
    f₋, f₀, f₊, the vertex is at x₀ + (r² (f₋ − f₀) − l² (f₊ − f₀)) / (2 (r (f₋ − f₀) +
    l (f₊ − f₀))), as in successive parabolic interpolation (Brent 1973, chapter 5). If
    the lowest loss is at the first or the last rate, return that rate.

    Args:
        rates: the rates, or their logarithms, in ascending order, of shape (rates,).
        losses: the losses at these rates, of shape (rows, rates).

    Returns:
        The vertex of each row, in units of `rates`, of shape (rows,).
    """
    lowest = losses.argmin(axis=1)
    center = np.clip(lowest, 1, len(rates) - 2)
    rows = np.arange(len(losses))
    loss_before = losses[rows, center - 1]
    loss_at = losses[rows, center]
    loss_after = losses[rows, center + 1]

    left = rates[center] - rates[center - 1]
    right = rates[center + 1] - rates[center]
    # At an inner minimum, neither `rise` nor `fall` is negative.
    rise = left * (loss_after - loss_at)
    fall = right * (loss_before - loss_at)
    curvature = np.where(rise + fall > 0, rise + fall, 1)
    moved = (right * fall - left * rise) / (2 * curvature)
    return np.where(lowest == center, rates[center] + moved, rates[lowest])


def _sentence(drift: Drift, search: bool) -> str:
    prefix = f"{drift.recipe}: " if drift.recipe else ""
    if drift.edges and search:
        return f"{prefix}{_edges_of_search(drift)}"
    if drift.edges:
        edges = []
        for batch, edge in drift.edges.items():
            edges.append(f"the {edge} rate is the best at {batch}")
        return (
            f"{prefix}No drift of the best rate is reported: of the rates at which "
            f"every seed finished, {joined(edges)}."
        )

    known = "one seed"
    if drift.interval is not None:
        low, high = drift.interval
        fewest = _fewest_seeds(drift.batches)
        known = (
            f"95%: {low:+.2f} to {high:+.2f}, bootstrap over {count(fewest, 'seed')}"
        )
    return (
        f"{prefix}The best rate moves by {drift.value:+.2f} octaves per doubling of "
        f"the batch ({known}): {joined(_rate_texts(drift))}."
    )


def _edges_of_search(drift: Drift) -> str:
    """Return why there is no drift in a search, whose batches have different rates.

    The best rate of a batch may lie inside of the range that was searched.
    """
    clauses = []
    for batch, edge in drift.edges.items():
        side = "below" if edge == "smallest" else "above"
        clauses.append(f"none has a rate {side} the best one at {batch}")
    return (
        "No drift of the best rate is reported: of the trials that finished, "
        f"{joined(clauses)}."
    )


def _rate_texts(drift: Drift) -> list[str]:
    """Return a text per batch size: its best learning rate, with a 95% interval."""
    texts = []
    for (batch, rate), log_rates in zip(drift.rates.items(), drift.best, strict=True):
        text = f"{rate:.2g} at {batch}"
        if len(log_rates) > 1:
            low, high = _interval(log_rates)
            text += f" ({2**low:.2g} to {2**high:.2g})"
        texts.append(text)
    return texts


def _fewest_seeds(batches: list[BatchLosses]) -> int:
    sizes = []
    for batch_losses in batches:
        for losses in batch_losses.seeds:
            sizes.append(losses.size)
    return min(sizes)


def _interval(measured_and_drawn: Array) -> list[float]:
    """Return the 95% interval of the bootstrap samples, without the measured value."""
    return list(np.quantile(measured_and_drawn[1:], (0.025, 0.975)).tolist())


def _least_drift(judged: Sequence[Drift]) -> SweepFinding:
    """Report which recipe has the smallest drift; all drifts must have intervals."""
    order = sorted(judged, key=lambda drift: abs(drift.value or 0))
    names = []
    texts = []
    still = []
    for drift in order:
        names.append(drift.recipe)
        texts.append(f"{drift.value:+.2f} with {drift.recipe}")
        if drift.stays:
            still.append(drift.recipe)

    farthest_of_least = order[0].farthest
    told_apart = all(farthest_of_least < other.nearest for other in order[1:])
    chance = "" if told_apart else ", though not by more than chance can explain"
    text = (
        f"The best rate moves least with {names[0]}{chance}: in octaves per doubling "
        f"of the batch, {joined(texts)}. {_still_sentence(still)}"
    )
    return SweepFinding("rate_drift", text, LeastDrift(names, still))


def _still_sentence(still: Sequence[str]) -> str:
    if not still:
        return "It moves with each of them by more than the variation over seeds."
    return f"Within the variation over seeds, it does not move with {joined(still)}."
