"""How far the best learning rate moves when the batch doubles.

It is measured for each scaling rule of a sweep over both rate and batch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.report.comparison import VALIDATION_LOSS, SweepResult
from pipeline.report.findings import SweepFinding
from pipeline.report.job_results import LOSS, JobResult, grouped
from pipeline.report.statistics import Array, count, joined


@dataclass(frozen=True)
class BatchLosses:
    """The final losses of one batch, all finite.

    Attributes:
        batch: the effective batch, in examples.
        log_rates: log2 of each rate, ascending.
        seeds: the losses of the seeds, for each rate.
    """

    batch: int
    log_rates: list[float]
    seeds: list[Array]

    @property
    def means(self) -> Array:
        """Return the mean over seeds, for each rate."""
        return np.array([losses.mean() for losses in self.seeds])

    @property
    def lowest(self) -> int:
        """Return the position of the rate with the lowest mean."""
        return int(np.argmin(self.means))

    @property
    def edge(self) -> str | None:
        """Return the edge of the tried rates that has the lowest mean, if any."""
        if self.lowest == 0:
            return "smallest"
        if self.lowest == len(self.log_rates) - 1:
            return "largest"
        return None

    @property
    def near_lowest(self) -> list[Array]:
        """Return the losses at the rates near the lowest mean."""
        first = max(self.lowest - 1, 0)
        return self.seeds[first : first + 3]


@dataclass(frozen=True)
class Drift:
    """How far the best rate of a recipe moves when the batch doubles.

    Attributes:
        recipe: the settings that the jobs share, such as the scaling rule.
        batches: the losses by batch, in ascending order.
        best: log2 of the best rate of each batch: as measured, then as drawn.
        slopes: the drift, in octaves per doubling of the batch: as measured, then as
            drawn; None if a best rate is at an edge of the tried ones.
    """

    recipe: str
    batches: list[BatchLosses]
    best: list[Array]
    slopes: Array | None

    @property
    def edges(self) -> dict[int, str]:
        """Return the batches whose best rate is at an edge, with the edge."""
        return {losses.batch: losses.edge for losses in self.batches if losses.edge}

    @property
    def value(self) -> float | None:
        """Return the drift as measured."""
        if self.slopes is None:
            return None
        return float(self.slopes[0])

    @property
    def interval(self) -> list[float] | None:
        """Return the 95% interval of the drift; None with one seed."""
        if self.slopes is None or len(self.slopes) == 1:
            return None
        return _interval(self.slopes)

    @property
    def rates(self) -> dict[int, float]:
        """Return the best rate by batch."""
        rates = {}
        for losses, log_rates in zip(self.batches, self.best, strict=True):
            rates[losses.batch] = 2 ** log_rates[0]
        return rates

    @property
    def stays(self) -> bool:
        """Return whether the interval includes a drift of 0."""
        if self.interval is None:
            return False
        low, high = self.interval
        return low <= 0 <= high

    def figures(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "drift": self.value,
            "interval": self.interval,
            "edges": self.edges,
            "rates": self.rates,
            "losses": {losses.batch: losses.means.min() for losses in self.batches},
        }


def drifts(sweep: SweepResult) -> list[Drift]:
    """Return the drift of each recipe with three rates at two batches or more."""
    return [
        _drift(recipe, batches) for recipe, batches in _losses_by_recipe(sweep).items()
    ]


def loss_by_rate_key(index: int) -> str:
    """Return the key of the plot of the drift with this index in `drifts`."""
    return f"loss_by_rate_{index}"


def findings(sweep: SweepResult) -> Iterable[SweepFinding]:
    """Yield the drift for each recipe, then which recipe has the least."""
    judged = []
    for index, drift in enumerate(drifts(sweep)):
        text = _sentence(drift)
        yield SweepFinding("rate_drift", text, drift.figures(), loss_by_rate_key(index))
        if drift.interval is not None:
            judged.append(drift)

    if len(judged) > 1:
        yield _least_drift(judged)


def loss_metric(sweep: SweepResult) -> str:
    """Return the loss by which a rate is judged."""
    if VALIDATION_LOSS in sweep.metrics:
        return VALIDATION_LOSS
    return LOSS


def _losses_by_recipe(sweep: SweepResult) -> dict[str, list[BatchLosses]]:
    """Return the final losses by recipe.

    A recipe needs two batches, and each of these three rates. A rate at which a seed
    diverged, or failed, is left out: it is no best one.
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
    """Return the slope of log2 of the best rate over log2 of the batch.

    It is the slope of the least-squares line through the batches; no slope if a best
    rate is at an edge.
    """
    best = _best_rates(batches)
    if any(losses.edge for losses in batches):
        return Drift(recipe, batches, best, None)
    x = np.log2([losses.batch for losses in batches])
    centered = x - x.mean()
    slopes = centered @ np.stack(best) / (centered**2).sum()
    return Drift(recipe, batches, best, slopes)


def _best_rates(batches: list[BatchLosses], draws: int = 4000) -> list[Array]:
    """Return log2 of the best rate of each batch: as measured, then as drawn.

    A parametric bootstrap draws the mean losses with a fixed seed. It draws from the
    deviations of seeds from their mean, scaled by √(n / (n − 1)) for n seeds. These are
    pooled, as a rate has few seeds, but only near the lowest losses: far from these a
    loss varies more. With one seed nothing is drawn.
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
    l (f₊ − f₀))): successive parabolic interpolation (Brent 1973, chapter 5). If the
    lowest loss is at an end, it is that end.

    Args:
        rates: the places of the losses, ascending, of shape (rates,).
        losses: of shape (rows, rates).

    Returns:
        The place for each row, of shape (rows,).
    """
    lowest = losses.argmin(axis=1)
    center = np.clip(lowest, 1, len(rates) - 2)
    rows = np.arange(len(losses))
    loss_before = losses[rows, center - 1]
    loss_at = losses[rows, center]
    loss_after = losses[rows, center + 1]

    left = rates[center] - rates[center - 1]
    right = rates[center + 1] - rates[center]
    # Neither is negative at an inner minimum.
    rise = left * (loss_after - loss_at)
    fall = right * (loss_before - loss_at)
    curvature = np.where(rise + fall > 0, rise + fall, 1)
    moved = (right * fall - left * rise) / (2 * curvature)
    return np.where(lowest == center, rates[center] + moved, rates[lowest])


def _sentence(drift: Drift) -> str:
    prefix = f"{drift.recipe}: " if drift.recipe else ""
    if drift.edges:
        edges = []
        for batch, edge in drift.edges.items():
            edges.append(f"the {edge} rate is the best at {batch}")
        return (
            f"{prefix}No drift of the best rate is claimed: of the rates that every "
            f"seed ended with, {joined(edges)}."
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


def _rate_texts(drift: Drift) -> list[str]:
    """Return the best rate of each batch, with its interval if there is one."""
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
    """Return the 95% interval of the drawn values, which follow the measured one."""
    return list(np.quantile(measured_and_drawn[1:], (0.025, 0.975)).tolist())


def _least_drift(judged: Sequence[Drift]) -> SweepFinding:
    """Return which recipe keeps the best rate where it is; each has an interval."""
    order = sorted(judged, key=lambda drift: abs(drift.value or 0))
    names = []
    texts = []
    still = []
    for drift in order:
        names.append(drift.recipe)
        texts.append(f"{drift.value:+.2f} with {drift.recipe}")
        if drift.stays:
            still.append(drift.recipe)

    farthest_of_least = np.abs(order[0].interval or []).max()
    nearest_of_next = np.abs(order[1].interval or []).min()
    told_apart = farthest_of_least < nearest_of_next
    chance = "" if told_apart else ", though not by more than chance may do"
    text = (
        f"The best rate moves least with {names[0]}{chance}: in octaves per doubling "
        f"of the batch, {joined(texts)}. Within the seeds it stays where it is with "
        f"{joined(still) or 'none of them'}."
    )
    figures = {"order": names, "still": still}
    return SweepFinding("rate_drift", text, figures)
