"""Does accumulating pay: the loss with factors over 1 against that with factor 1, at the memory of one micro-batch."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipeline.report import statistics
from pipeline.report.comparison import Comparison
from pipeline.report.findings import EQUAL, Finding, shared
from pipeline.report.job_results import JobResult, grouped, pooled
from pipeline.report.statistics import count, joined, number

BUDGETS = {"seconds": "time", "examples": "examples"}  # axes of `AXES`
MOST = 10  # additional seeds; where more would be needed, there is no difference within the seeds
_HEADLINES = {
    "depends": "Accumulate by {factor} only if {scarce} is what you lack",
    "pays": "Accumulate by {factor}",
    "not": "Do not accumulate",
    "few": "There are not enough seeds to tell",
    "same": "Accumulating makes no difference within the seeds",
}


def findings(sweep: Comparison) -> Iterable[Finding]:
    """Yield a verdict for each recipe (such as a scaling rule) and micro-batch, if the sweep is over factors."""
    if len({job.factor for job in sweep.jobs} - {None}) < 2:
        return
    # A setting with which a seed diverged, or failed, is none to recommend.
    left_out = [
        group
        for group, jobs in sweep.groups.items()
        if not all(job.finished for job in jobs)
    ]
    whole = [job for job in sweep.jobs if job.group not in left_out and job.micro]
    more = (
        f" Left out, as not every seed finished: {joined(left_out)}."
        if left_out
        else ""
    )
    every = grouped(whole, lambda job: (job.recipe, job.micro)).values()
    pairs = [jobs for jobs in every if {1} < {job.factor for job in jobs}]
    yield from (
        found := [verdict for jobs in pairs if (verdict := _verdict(sweep, jobs, more))]
    )
    if not found:
        why = "it takes jobs with factor 1 and with a larger factor, of one micro-batch size, that finished with a loss"
        yield Finding(
            "verdict", f"Whether accumulating pays cannot be said: {why}.{more}"
        )


def _verdict(sweep: Comparison, jobs: list[JobResult], more: str) -> Finding | None:
    found = {
        axis: contrast for axis in BUDGETS if (contrast := _contrast(sweep, jobs, axis))
    }
    if sweep.target is None or not found:
        return None
    axis, chosen = min(
        found.items(), key=lambda item: [*_HEADLINES].index(item[1]["state"])
    )
    state = (
        "depends"
        if {"pays", "not"} <= {of["state"] for of in found.values()}
        else chosen["state"]
    )
    decided = next(
        (of for of in found.values() if of["state"] in ("pays", "not")), None
    )  # by time, if that is
    memory = {
        g: pooled(of, lambda job: job.last("perf/peak_memory_bytes"))
        for g, of in grouped(jobs, "group").items()
    }
    base, other = (memory[group] for group in chosen["groups"])
    ratio = other.mean / base.mean if base and other and base.mean else math.nan
    text = f"{jobs[0].recipe}: " if jobs[0].recipe else ""
    text += _HEADLINES[state].format(factor=chosen["factor"], scarce=BUDGETS[axis])
    peak = "" if math.isnan(ratio) else f", peak ×{ratio:.2f}"
    text += f": compared with factor 1 at equal memory (micro-batches of {jobs[0].micro}{peak}), "
    text += " and ".join(
        _clause(of, BUDGETS[axis], sweep.target.metric) for axis, of in found.items()
    )
    text += f" ({count(chosen['seeds'], 'seed')}, bootstrap).{shared(sweep)}{more}"
    take = decided["groups"][decided["state"] == "pays"] if decided else None
    figures = {
        "recipe": jobs[0].recipe,
        "micro": jobs[0].micro,
        "state": state,
        "memory": ratio,
        "take": take,
    }
    return Finding("verdict", text, figures | found)


def _clause(contrast: dict[str, Any], word: str, metric: str) -> str:
    by, half, factor = contrast["difference"], contrast["half"], contrast["factor"]
    known = (
        f"95%: {number(abs(by) - half)} to {number(abs(by) + half)}"
        if half < math.inf
        else "chance unknown"
    )
    few = (
        f"; {count(contrast['more'], 'more seed')} of factors 1 and {factor} would tell"
    )
    known += {"few": few, "same": ", within chance"}.get(contrast["state"], "")
    text = f"at equal {word} {metric} with factor {factor}, the best above 1, is "
    return f"{text}{'lower' if by < 0 else 'higher'} by {number(abs(by))} ({known})"


def _contrast(
    sweep: Comparison, jobs: list[JobResult], axis: str
) -> dict[str, Any] | None:
    """Compare the losses where the first of the jobs ends; each factor is taken at its best rate.

    `half` of the width of the 95% interval of the difference to factor 1 holds for all factors at once.
    """
    curves = (
        [(job, sweep.smooth(job, sweep.target.metric)) for job in jobs]
        if sweep.target
        else []
    )
    along = [
        (job, job.along(axis, curve.steps), curve.values)
        for job, curve in curves
        if curve is not None
    ]
    along = [
        (job, x[known], y[known])
        for job, x, y in along
        if (known := np.isfinite(x)).any()
    ]
    budget = min((x[-1] for _, x, _ in along), default=math.nan)
    losses: dict[int, dict[str, list[float]]] = {}
    for job, x, y in along:
        loss = float(np.interp(budget, x, y, left=math.nan))
        losses.setdefault(job.factor or 0, {}).setdefault(job.group, []).append(loss)
    finite = {
        f: [(g, of) for g, of in at.items() if np.isfinite(of).all()]
        for f, at in sorted(losses.items())
    }
    best = {
        factor: min(at, key=lambda item: float(np.mean(item[1])))
        for factor, at in finite.items()
        if at
    }
    factors, values = [*best], [of for _, of in best.values()]
    if factors[:1] != [1] or len(factors) < 2:
        return None
    by, errors, quantile = statistics.differences(values)
    equal = np.abs(by) <= EQUAL * abs(float(np.mean(values[0])))
    halves = np.where(errors > 0, errors, 1) * np.where(
        errors > 0, quantile, np.where(equal, 0.0, math.inf)
    )
    better = np.flatnonzero(by + halves < 0).tolist()
    i = min(better or range(len(by)), key=lambda i: by[i])
    state, seeds = (
        "pays" if better else "not" if (by - halves > 0).all() else "same",
        min(map(len, values)),
    )
    more = (
        _more_seeds(abs(by[i]), errors[i], seeds, len(values))
        if state == "same" and not equal[i]
        else 0
    )
    figures = {
        "state": "few" if more else state,
        "factor": factors[i + 1],
        "seeds": seeds,
        "more": more,
    }
    figures |= {
        "difference": float(by[i]),
        "half": float(halves[i]),
        "budget": float(budget),
    }
    return figures | {"groups": [best[1][0], best[factors[i + 1]][0]]}


def _more_seeds(by: float, error: float, seeds: int, groups: int) -> int:
    """Return how many more seeds of each group would tell, if mean and variance stay; 0 if it is more than `MOST`."""
    from scipy.special import (
        stdtrit,
    )  # Student's quantile; scipy.stats takes seconds to import

    if not error:
        return max(3 - seeds, 1)  # chance is unknown
    quantile = {
        n: stdtrit(groups * (n - 1), 1 - 0.025 / (groups - 1))
        for n in range(seeds + 1, seeds + MOST + 1)
    }
    return next(
        (
            n - seeds
            for n in quantile
            if quantile[n] * error * math.sqrt(seeds / n) < by
        ),
        0,
    )
