"""How far the best learning rate moves when the batch doubles, for each scaling rule in a sweep over both."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipeline.report.comparison import Comparison
from pipeline.report.findings import Finding
from pipeline.report.job_results import grouped
from pipeline.report.statistics import Array, count, joined

Losses = dict[
    int, dict[float, Array]
]  # by batch and log2 of the rate: the final losses of the seeds, all finite


def findings(sweep: Comparison) -> Iterable[Finding]:
    """Yield the drift for each recipe with three rates at two batches or more, then which recipe has the least."""
    found = [
        _drift(recipe, losses, f"loss_by_rate_{i}")
        for i, (recipe, losses) in enumerate(_losses(sweep).items())
    ]
    yield from found
    drifts = sorted(
        (f.figures for f in found if f.figures["interval"]),
        key=lambda of: abs(of["drift"]),
    )
    if len(drifts) > 1:
        still = [
            of["recipe"] for of in drifts if of["interval"][0] <= 0 <= of["interval"][1]
        ]
        apart = max(map(abs, drifts[0]["interval"])) < min(
            map(abs, drifts[1]["interval"])
        )
        chance = "" if apart else ", though not by more than chance may do"
        text = f"The best rate moves least with {drifts[0]['recipe']}{chance}: in octaves per doubling of the batch, "
        text += joined([f"{of['drift']:+.2f} with {of['recipe']}" for of in drifts])
        text += f". Within the seeds it stays where it is with {joined(still) or 'none of them'}."
        yield Finding(
            "rate_drift",
            text,
            {"order": [of["recipe"] for of in drifts], "still": still},
        )


def _drift(recipe: str, losses: Losses, plot: str) -> Finding:
    """Return the slope of log2 of the best rate over log2 of the batch; none if a best rate is at an edge."""
    means = {
        batch: np.array([of.mean() for of in at.values()])
        for batch, at in losses.items()
    }
    best = _fitted(losses, means)
    lowest = [(batch, int(np.argmin(of)), len(of) - 1) for batch, of in means.items()]
    edges = {
        batch: "largest" if i else "smallest"
        for batch, i, last in lowest
        if i in (0, last)
    }
    figures: dict[str, Any] = {
        "recipe": recipe,
        "drift": None,
        "interval": None,
        "edges": edges,
    }
    figures |= {
        "rates": {b: 2 ** of[0] for b, of in best.items()},
        "losses": {b: of.min() for b, of in means.items()},
    }
    text = f"{recipe}: " if recipe else ""
    if edges:
        at = joined(
            [f"the {edge} rate is the best at {batch}" for batch, edge in edges.items()]
        )
        text += f"No drift of the best rate is claimed: of the rates that every seed ended with, {at}."
        return Finding("rate_drift", text, figures, plot)
    x = np.log2([*best])
    slopes = (x - x.mean()) @ np.stack([*best.values()]) / ((x - x.mean()) ** 2).sum()
    figures["drift"], known = float(slopes[0]), "one seed"
    rates = [f"{rate:.2g} at {batch}" for batch, rate in figures["rates"].items()]
    if len(slopes) > 1:
        ends, *of_rates = (
            np.quantile(of[1:], (0.025, 0.975)) for of in (slopes, *best.values())
        )
        figures["interval"], seeds = (
            ends.tolist(),
            min(of.size for at in losses.values() for of in at.values()),
        )
        known = f"95%: {ends[0]:+.2f} to {ends[1]:+.2f}, bootstrap over {count(seeds, 'seed')}"
        rates = [
            f"{rate} ({2 ** of[0]:.2g} to {2 ** of[1]:.2g})"
            for rate, of in zip(rates, of_rates, strict=True)
        ]
    text += f"The best rate moves by {slopes[0]:+.2f} octaves per doubling of the batch ({known}): {joined(rates)}."
    return Finding("rate_drift", text, figures, plot)


def loss_of(sweep: Comparison) -> str:
    return "val/loss" if "val/loss" in sweep.metrics else "train/loss"


def _losses(sweep: Comparison) -> dict[str, Losses]:
    """Return the final losses by recipe; a batch needs three rates, a recipe two batches.

    A rate at which a seed diverged, or failed, is left out: it is no best one.
    """
    found: dict[str, Losses] = {}
    tried = [
        job
        for job in sweep.jobs
        if job.batch and isinstance(job.setting("rate"), float)
    ]
    cells = grouped(tried, lambda job: (job.batch, job.setting("rate"), job.recipe))
    for (batch, rate, recipe), jobs in sorted(cells.items()):
        ends = np.array(
            [
                sweep.final(job, loss_of(sweep)) if job.finished else math.nan
                for job in jobs
            ]
        )
        if rate > 0 and np.isfinite(ends).all():
            found.setdefault(recipe, {}).setdefault(batch, {})[math.log2(rate)] = ends
    enough = {
        recipe: {batch: of for batch, of in at.items() if len(of) > 2}
        for recipe, at in found.items()
    }
    return {recipe: at for recipe, at in enough.items() if len(at) > 1}


def _fitted(
    losses: Losses, means: dict[int, Array], draws: int = 4000
) -> dict[int, Array]:
    """Return log2 of the best rate of each batch: as measured, then for losses drawn with a fixed seed.

    They are drawn from the deviations of seeds from their mean, pooled, as a rate has few seeds, but only near the
    lowest losses: far from these a loss varies more. With one seed nothing is drawn.
    """
    near = [
        of
        for batch, at in losses.items()
        for of in [*at.values()][max(int(means[batch].argmin()) - 1, 0) :][:3]
    ]
    pool = [
        (of - of.mean()) * math.sqrt(of.size / (of.size - 1))
        for of in near
        if of.size > 1
    ]
    rng, found = np.random.default_rng(0), {}
    for batch, at in losses.items():
        noise = [
            rng.choice(np.concatenate(pool), (draws, of.size)).mean(axis=1)
            for of in at.values()
            if pool
        ]
        rows = np.vstack(
            [means[batch], *(means[batch] + np.transpose(noise) if pool else [])]
        )
        found[batch] = vertex(np.array([*at]), rows)
    return found


def vertex(rates: Array, losses: Array) -> Array:
    """Return for each row the vertex of the parabola through the lowest loss and its neighbors; an end stays an end."""
    lowest = losses.argmin(axis=1)
    i = np.clip(lowest, 1, len(rates) - 2)
    before, at, after = (
        losses[np.arange(len(losses)), i + step] for step in (-1, 0, 1)
    )
    left, right = rates[i] - rates[i - 1], rates[i + 1] - rates[i]
    rise, fall = (
        left * (after - at),
        right * (before - at),
    )  # neither is negative at an inner minimum
    moved = (right * fall - left * rise) / (
        2 * np.where(rise + fall > 0, rise + fall, 1)
    )
    return np.where(lowest == i, rates[i] + moved, rates[lowest])
