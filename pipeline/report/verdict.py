"""Does accumulating pay? The loss with factors over 1 against that with factor 1.

Both have micro-batches of one size, so both need the same memory. They are compared at
an equal budget: the examples, and the time, that the shortest of the jobs has.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.report import statistics
from pipeline.report.comparison import SweepResult, TargetLoss
from pipeline.report.findings import SweepFinding, shared_device_caveat
from pipeline.report.job_results import (
    PEAK_MEMORY,
    JobResult,
    by_group,
    finished_jobs,
    grouped,
    pooled,
)
from pipeline.report.statistics import (
    Contrast,
    contrasts_with_first,
    count,
    joined,
    number,
)

# The axes of `AXES` along which a budget is equal, and their words.
BUDGETS = {"seconds": "time", "examples": "examples"}

# If more than so many additional seeds were needed, there is no difference within the
# seeds.
MOST_ADDED_SEEDS = 10

# The states of a verdict. Of the states at the budgets, the one that stands first here
# is the verdict; it `depends` if one budget pays and the other does not.
_HEADLINES = {
    "depends": "Accumulate by {factor} only if {scarce} is what you lack",
    "pays": "Accumulate by {factor}",
    "not": "Do not accumulate",
    "few": "There are not enough seeds to tell",
    "same": "Accumulating makes no difference within the seeds",
}


@dataclass(frozen=True)
class Setting:
    """A group of jobs with one factor, and its losses at the budget."""

    group: str
    factor: int
    losses: list[float]  # one for each seed

    def all_finite(self) -> bool:
        return bool(np.isfinite(self.losses).all())

    def mean_loss(self) -> float:
        return float(np.mean(self.losses))


@dataclass(frozen=True)
class BudgetContrast:
    """The best factor above 1 against factor 1, at an equal budget.

    Attributes:
        axis: the axis of the budget, one of `BUDGETS`.
        budget: where the first of the jobs ends, in units of the axis.
        state: one of `_HEADLINES` other than `depends`.
        base: the best setting with factor 1.
        other: the best setting with the factor that is compared.
        loss_contrast: the difference of their losses; its interval holds for all
            factors at once.
        seeds: the fewest seeds of any factor.
        more_seeds: how many more seeds of each factor would tell; 0 unless the state
            is `few`.
    """

    axis: str
    budget: float
    state: str
    base: Setting
    other: Setting
    loss_contrast: Contrast
    seeds: int
    more_seeds: int

    @property
    def decided(self) -> bool:
        return self.state in ("pays", "not")

    @property
    def better(self) -> Setting:
        """Return the setting to take, if the contrast is decided."""
        if self.state == "pays":
            return self.other
        return self.base

    def figures(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "factor": self.other.factor,
            "seeds": self.seeds,
            "more": self.more_seeds,
            "difference": self.loss_contrast.difference,
            "half": self.loss_contrast.half_width,
            "budget": self.budget,
            "groups": [self.base.group, self.other.group],
        }


def findings(sweep: SweepResult) -> Iterable[SweepFinding]:
    """Yield a verdict for each recipe and micro-batch, if the sweep is over factors.

    A recipe is what the jobs share apart from sizes and rate, such as a scaling rule.
    """
    if len(_factors(sweep.jobs) - {None}) < 2:
        return

    # A setting with a seed that diverged, or failed, is none to recommend.
    left_out = []
    for group, jobs in sweep.groups.items():
        if len(finished_jobs(jobs)) < len(jobs):
            left_out.append(group)
    remark = ""
    if left_out:
        remark = f" Left out, as not every seed finished: {joined(left_out)}."

    verdicts = []
    for jobs in _jobs_of_equal_memory(sweep, left_out):
        verdict = _verdict(sweep, jobs, remark)
        if verdict is not None:
            verdicts.append(verdict)
    yield from verdicts

    if not verdicts:
        text = (
            "Whether accumulating pays cannot be said: it takes jobs with factor 1 and "
            "with a larger factor, of one micro-batch size, that finished with a loss."
        )
        yield SweepFinding("verdict", text + remark)


def _jobs_of_equal_memory(
    sweep: SweepResult, left_out: list[str]
) -> Iterable[list[JobResult]]:
    """Yield the jobs of each recipe and micro-batch that has factor 1 and another."""
    jobs = [job for job in sweep.jobs if job.group not in left_out and job.micro]
    for alike in grouped(jobs, lambda job: (job.recipe, job.micro)).values():
        factors = _factors(alike)
        if 1 in factors and len(factors) > 1:
            yield alike


def _factors(jobs: list[JobResult]) -> set[int | None]:
    return {job.factor for job in jobs}


def _verdict(
    sweep: SweepResult, jobs: list[JobResult], remark: str
) -> SweepFinding | None:
    """Return the verdict on jobs of one recipe and micro-batch; None without losses."""
    if sweep.target is None:
        return None
    contrasts = []
    for axis in BUDGETS:
        contrast = _contrast(sweep, sweep.target, jobs, axis)
        if contrast is not None:
            contrasts.append(contrast)
    if not contrasts:
        return None

    order = list(_HEADLINES)
    chosen = min(contrasts, key=lambda contrast: order.index(contrast.state))
    state = chosen.state
    if {"pays", "not"} <= {contrast.state for contrast in contrasts}:
        state = "depends"
    memory_ratio = _memory_ratio(jobs, chosen)
    figures: dict[str, Any] = {
        "recipe": jobs[0].recipe,
        "micro": jobs[0].micro,
        "state": state,
        "memory": memory_ratio,
        "take": _group_to_take(contrasts),
    }
    clauses = []
    for contrast in contrasts:
        figures[contrast.axis] = contrast.figures()
        clauses.append(_clause(contrast, sweep.target.metric))

    headline = _HEADLINES[state].format(
        factor=chosen.other.factor, scarce=BUDGETS[chosen.axis]
    )
    text = (
        f"{_prefix(jobs)}{headline}: {_equal_memory(jobs, memory_ratio)}, "
        f"{' and '.join(clauses)} ({count(chosen.seeds, 'seed')}, bootstrap)."
    )
    text += shared_device_caveat(sweep) + remark
    return SweepFinding("verdict", text, figures)


def _group_to_take(contrasts: list[BudgetContrast]) -> str | None:
    """Return the better group; None if no contrast is decided.

    The first budget is time, which decides if it can.
    """
    for contrast in contrasts:
        if contrast.decided:
            return contrast.better.group
    return None


def _prefix(jobs: list[JobResult]) -> str:
    recipe = jobs[0].recipe
    if not recipe:
        return ""
    return f"{recipe}: "


def _equal_memory(jobs: list[JobResult], memory_ratio: float) -> str:
    """Return with what the factors are compared, and that they need equal memory."""
    peak = ""
    if not math.isnan(memory_ratio):
        peak = f", peak ×{memory_ratio:.2f}"
    micro = jobs[0].micro
    return f"compared with factor 1 at equal memory (micro-batches of {micro}{peak})"


def _memory_ratio(jobs: list[JobResult], contrast: BudgetContrast) -> float:
    """Return the peak memory of the factor over that of factor 1; NaN if unknown."""
    jobs_by_group = by_group(jobs)
    base = pooled(jobs_by_group[contrast.base.group], _peak_memory)
    other = pooled(jobs_by_group[contrast.other.group], _peak_memory)
    if base is None or other is None or base.mean == 0:
        return math.nan
    return other.mean / base.mean


def _peak_memory(job: JobResult) -> float:
    return job.last(PEAK_MEMORY)


def _clause(contrast: BudgetContrast, metric: str) -> str:
    """Return how the losses compare at one budget."""
    difference = contrast.loss_contrast.difference
    distance = abs(difference)
    half_width = contrast.loss_contrast.half_width
    factor = contrast.other.factor

    direction = "lower" if difference < 0 else "higher"
    certainty = "chance unknown"
    if half_width < math.inf:
        least = number(distance - half_width)
        most = number(distance + half_width)
        certainty = f"95%: {least} to {most}"
    if contrast.state == "few":
        seeds = count(contrast.more_seeds, "more seed")
        certainty += f"; {seeds} of factors 1 and {factor} would tell"
    if contrast.state == "same":
        certainty += ", within chance"

    word = BUDGETS[contrast.axis]
    return (
        f"at equal {word} {metric} with factor {factor}, the best above 1, is "
        f"{direction} by {number(distance)} ({certainty})"
    )


def _contrast(
    sweep: SweepResult, target: TargetLoss, jobs: list[JobResult], axis: str
) -> BudgetContrast | None:
    """Compare the losses where the first of the jobs ends.

    Return None unless factor 1 and a larger one have losses there.
    """
    budget, settings = _settings_at_budget(sweep, target.metric, jobs, axis)

    # Each factor is represented by its best setting, as each batch may have its own
    # best learning rate.
    best_by_factor: dict[int, Setting] = {}
    for setting in sorted(settings, key=lambda setting: setting.factor):
        if not setting.all_finite():
            continue
        best_yet = best_by_factor.get(setting.factor)
        if best_yet is None or setting.mean_loss() < best_yet.mean_loss():
            best_by_factor[setting.factor] = setting
    best = list(best_by_factor.values())
    if len(best) < 2 or best[0].factor != 1:
        return None

    contrasts = contrasts_with_first([setting.losses for setting in best])
    clearly_lower = [contrast for contrast in contrasts if contrast.upper < 0]
    candidates = clearly_lower or contrasts
    best_contrast = min(candidates, key=lambda contrast: contrast.difference)
    if clearly_lower:
        state = "pays"
    elif all(contrast.lower > 0 for contrast in contrasts):
        state = "not"
    else:
        state = "same"

    seeds = min(len(setting.losses) for setting in best)
    more_seeds = 0
    if state == "same" and not best_contrast.equal:
        more_seeds = _more_seeds(best_contrast, seeds, len(best))
    if more_seeds:
        state = "few"
    return BudgetContrast(
        axis=axis,
        budget=budget,
        state=state,
        base=best[0],
        other=best[1 + contrasts.index(best_contrast)],
        loss_contrast=best_contrast,
        seeds=seeds,
        more_seeds=more_seeds,
    )


def _settings_at_budget(
    sweep: SweepResult, metric: str, jobs: list[JobResult], axis: str
) -> tuple[float, list[Setting]]:
    """Return the budget, and the loss of each job there, by setting.

    The budget is where the first of the jobs ends. A loss is interpolated linearly
    between two points, and NaN before the first.
    """
    curves = []
    budget = math.inf
    for job in jobs:
        curve = sweep.smooth(job, metric)
        if curve is None:
            continue
        x = job.along(axis, curve.steps)
        known = np.isfinite(x)
        if known.any():
            curves.append((job, x[known], curve.values[known]))
            budget = min(budget, float(x[known][-1]))

    losses_by_setting: dict[tuple[str, int], list[float]] = {}
    for job, x, y in curves:
        loss = float(np.interp(budget, x, y, left=math.nan))
        key = (job.group, job.factor or 0)
        losses_by_setting.setdefault(key, []).append(loss)

    settings = []
    for (group, factor), losses in losses_by_setting.items():
        settings.append(Setting(group, factor, losses))
    return budget, settings


def _more_seeds(contrast: Contrast, seeds: int, groups: int) -> int:
    """Return how many more seeds of each group would tell.

    Mean and variance are taken to stay as they are. With n seeds of each of the
    g groups, the half-width is then t · error · √(seeds / n), where t is Student's
    quantile for 1 − 0.025 / (g − 1) with g (n − 1) degrees of freedom: Bonferroni's
    bound (Dunn 1961) on the quantile for g − 1 intervals at once.

    Returns:
        A number of seeds; 0 if more than `MOST_ADDED_SEEDS` would be needed.
    """
    if contrast.error == 0:
        # Chance is unknown: three seeds show some, or else one more.
        return max(3 - seeds, 1)
    for n in range(seeds + 1, seeds + MOST_ADDED_SEEDS + 1):
        freedom = groups * (n - 1)
        quantile = statistics.student_quantile(freedom, 1 - 0.025 / (groups - 1))
        half_width = quantile * contrast.error * math.sqrt(seeds / n)
        if half_width < abs(contrast.difference):
            return n - seeds
    return 0
