"""Compares factors above 1 with factor 1 at an equal budget of time or examples."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.report import wording
from pipeline.report.job_results import JobResult, by_group
from pipeline.report.seed_differences import (
    FEWEST_SEEDS,
    BestAgainstBest,
    Values,
    best_against_best,
    chance_of_look,
    values_by_seed,
)
from pipeline.report.sweep_result import SweepResult
from pipeline.report.wording import joined, number

# The axes of `AXES` that can be a budget, with their names in sentences.
BUDGETS = {"seconds": "time", "examples": "examples"}

# The maximum number of additional seeds per group that a report recommends. If a
# verdict would need more, `BudgetContrast.state` is `same`.
MOST_ADDED_SEEDS = 10


@dataclass(frozen=True)
class Setting:
    """A group of jobs with one factor, and its loss at the budget by seed."""

    group: str
    factor: int
    losses: Values

    def mean_loss(self) -> float:
        return float(np.mean(list(self.losses.values())))


@dataclass(frozen=True)
class BudgetContrast:
    """The best setting with a factor above 1 compared with the best with factor 1.

    Attributes:
        axis: the axis of the budget, one of `BUDGETS`.
        budget: the amount at which the shortest job ends, in units of the axis.
        state: `pays`, `not` (does not pay), `few` (more seeds would tell), `unvaried`
            (the results do not vary over the seeds, so chance is unknown) or `same` (no
            difference within the seeds).
        base: the best setting with factor 1.
        other: the best setting with a larger factor.
        result: the difference between the losses of `other` and `base`. Its interval
            allows for the choice of the best settings.
        best_by_factor: the best setting for each factor.
        without: the groups without a finite loss at the budget.
        more_seeds: the number of additional seeds per group that a verdict is expected
            to need; 0 unless the state is `few`.
    """

    axis: str
    budget: float
    state: str
    base: Setting
    other: Setting
    result: BestAgainstBest
    best_by_factor: dict[int, Setting]
    without: list[str]
    more_seeds: int

    @property
    def decided(self) -> bool:
        return self.state in ("pays", "not")

    @property
    def seeds(self) -> int:
        return self.result.best.seeds

    @property
    def better(self) -> Setting:
        """The recommended setting; valid only if the contrast is decided."""
        if self.state == "pays":
            return self.other
        return self.base

    def figures(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "factor": self.other.factor,
            "seeds": self.seeds,
            "more": self.more_seeds,
            "difference": self.result.value,
            "interval": [self.result.lower, self.result.upper],
            "paired": self.result.best.paired,
            "budget": self.budget,
            "groups": [self.base.group, self.other.group],
        }


@dataclass(frozen=True)
class Losses:
    """The losses of the settings at a budget, or the reason why there are none.

    Attributes:
        budget: the amount at which the shortest job ends, in units of the axis.
        settings: the settings that have a finite loss at the budget for each seed.
        without: the names of the other groups.
        reason: why the settings cannot be compared; empty if they can.
    """

    budget: float = math.nan
    settings: list[Setting] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    reason: str = ""


def contrast_at_budget(
    losses: Losses, axis: str, looks: tuple[int, ...]
) -> BudgetContrast:
    """Compare the best setting with a larger factor to the best with factor 1.

    The comparison uses the confidence interval of `best_against_best`.

    Args:
        losses: the settings' losses at the budget. They must include settings with
            factor 1 and with a larger factor.
        axis: the axis of the budget.
        looks: the number of seeds at each earlier verdict.
    """
    bases = [setting for setting in losses.settings if setting.factor == 1]
    others = [setting for setting in losses.settings if setting.factor != 1]
    base_losses = [setting.losses for setting in bases]
    other_losses = [setting.losses for setting in others]
    seeds = min(len(setting.losses) for setting in losses.settings)
    earlier = len([look for look in looks if look < seeds])
    result = best_against_best(base_losses, other_losses, chance_of_look(earlier))

    more_seeds = 0
    if result.upper < 0:
        state = "pays"
    elif result.lower > 0:
        state = "not"
    else:
        state = "same"
        if not result.best.equal:
            more_seeds = _more_seeds(base_losses, other_losses, result, earlier)
        if more_seeds:
            state = "few"
        elif not result.best.equal and result.best.error is None:
            state = "unvaried"

    best_by_factor: dict[int, Setting] = {}
    for setting in sorted(losses.settings, key=lambda setting: setting.factor):
        best_yet = best_by_factor.get(setting.factor)
        if best_yet is None or setting.mean_loss() < best_yet.mean_loss():
            best_by_factor[setting.factor] = setting
    return BudgetContrast(
        axis=axis,
        budget=losses.budget,
        state=state,
        base=bases[result.base],
        other=others[result.other],
        result=result,
        best_by_factor=best_by_factor,
        without=losses.without,
        more_seeds=more_seeds,
    )


def losses_at_budget(
    sweep: SweepResult, metric: str, jobs: list[JobResult], axis: str
) -> Losses:
    """Return the loss per setting and seed at the budget: where the shortest job ends.

    A loss is interpolated linearly between two points of its curve. A setting is left
    out if it has no finite loss at the budget for some seed, for example because the
    first point of a job comes later.
    """
    losses_at: dict[str, tuple[Any, Any]] = {}
    budget = math.inf
    for job in jobs:
        curve = sweep.smooth(job, metric)
        if curve is None:
            continue
        x = job.along(axis, curve.steps)
        known = np.isfinite(x)
        if known.any():
            losses_at[job.name] = (x[known], curve.values[known])
            budget = min(budget, float(x[known][-1]))
    if not losses_at:
        return Losses(reason=f"no job logged its {BUDGETS[axis]}")

    def loss_at_budget(job: JobResult) -> float:
        if job.name not in losses_at:
            return math.nan
        x, y = losses_at[job.name]
        return float(np.interp(budget, x, y, left=math.nan))

    settings = []
    without = []
    for group, group_jobs in by_group(jobs).items():
        if all(math.isfinite(loss_at_budget(job)) for job in group_jobs):
            losses = values_by_seed(group_jobs, loss_at_budget)
            settings.append(Setting(group, group_jobs[0].factor or 0, losses))
        else:
            without.append(group)

    factors = {setting.factor for setting in settings}
    if 1 not in factors or len(factors) < 2:
        unit = "examples"
        amount = number(budget)
        if axis == "seconds":
            unit = "of training"
            amount = number(budget, wording.SECONDS)
        reason = (
            f"{joined(without)} had no finite {metric} by then: the shortest run ends "
            f"after {amount} {unit}"
        )
        return Losses(reason=reason)
    return Losses(budget, settings, without)


def _more_seeds(
    bases: list[Values], others: list[Values], result: BestAgainstBest, earlier: int
) -> int:
    """Predict the number of additional seeds per group that a verdict needs.

    The prediction assumes that means and deviations do not change. It counts the later
    verdict as one more look at the data; see `chance_of_look`.

    Returns:
        The number of seeds, or 0 if more than `MOST_ADDED_SEEDS` are needed. If the
        error is unknown, the number that raises the seeds to `FEWEST_SEEDS`.
    """
    seeds = result.best.seeds
    if result.best.error is None:
        # Nothing can be predicted from an unknown error. If the results of
        # `FEWEST_SEEDS` seeds do not vary, those of further seeds will not either.
        return max(FEWEST_SEEDS - seeds, 0)
    chance = chance_of_look(earlier + 1)
    for total in range(seeds + 1, seeds + MOST_ADDED_SEEDS + 1):
        expected = best_against_best(bases, others, chance, total)
        if expected.upper < 0 or expected.lower > 0:
            return total - seeds
    return 0
