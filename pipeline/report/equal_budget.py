"""Compares factors above 1 with factor 1 at an equal budget of time or examples."""

import math
from collections.abc import Sequence
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
        most_seeds: the largest number of seeds of a setting.
        more: the additional seeds that a verdict is expected to need; none unless the
            state is `few`.
    """

    axis: str
    budget: float
    state: str
    base: Setting
    other: Setting
    result: BestAgainstBest
    best_by_factor: dict[int, Setting]
    without: "WithoutLoss"
    most_seeds: int
    more: "MoreSeeds"

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
            "more": self.more.count,
            "difference": self.result.value,
            "interval": [self.result.lower, self.result.upper],
            "paired": self.result.best.paired,
            "budget": self.budget,
            "groups": [self.base.group, self.other.group],
        }


@dataclass(frozen=True)
class MoreSeeds:
    """Additional seeds that a verdict is expected to need.

    Attributes:
        count: the number of additional seeds per group; 0 if none would tell.
        factors: the factors whose settings need them, in ascending order.
    """

    count: int = 0
    factors: tuple[int, ...] = ()


@dataclass(frozen=True)
class WithoutLoss:
    """The names of the groups that have no finite loss at a budget for some seed.

    Attributes:
        later: those whose loss was logged for the first time after the budget.
        never: those that did not log the loss, or the axis of the budget.
        not_finite: the others, whose loss was not finite at the budget.
    """

    later: list[str] = field(default_factory=list)
    never: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)

    def add(
        self, group: str, budget: float, firsts: Sequence[float], jobs: int
    ) -> None:
        """Add a group.

        Args:
            group: its name.
            budget: the budget, in units of its axis.
            firsts: where the loss was logged first, for each job that logged it.
            jobs: the number of jobs of the group.
        """
        if len(firsts) < jobs:
            self.never.append(group)
        elif max(firsts) > budget:
            self.later.append(group)
        else:
            self.not_finite.append(group)

    def clauses(self, metric: str) -> list[str]:
        """Return a clause for each of the lists that is not empty."""
        clauses = []
        if self.later:
            clauses.append(f"{joined(self.later)} had no {metric} yet")
        if self.never:
            clauses.append(f"{joined(self.never)} logged no {metric}")
        if self.not_finite:
            clauses.append(f"{joined(self.not_finite)} had no finite {metric}")
        return clauses


@dataclass(frozen=True)
class Losses:
    """The losses of the settings at a budget, or the reason why there are none.

    Attributes:
        budget: the amount at which the shortest job ends, in units of the axis.
        settings: the settings that have a finite loss at the budget for each seed.
        without: the other groups.
        reason: why the settings cannot be compared; empty if they can.
    """

    budget: float = math.nan
    settings: list[Setting] = field(default_factory=list)
    without: WithoutLoss = field(default_factory=WithoutLoss)
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
        looks: the largest number of seeds of a setting at each earlier verdict.
    """
    bases = [setting for setting in losses.settings if setting.factor == 1]
    others = [setting for setting in losses.settings if setting.factor != 1]
    base_losses = [setting.losses for setting in bases]
    other_losses = [setting.losses for setting in others]
    # If seeds were added to only some of the settings, that is a look, too.
    most_seeds = max(len(setting.losses) for setting in losses.settings)
    earlier = len([look for look in looks if look < most_seeds])
    result = best_against_best(base_losses, other_losses, chance_of_look(earlier))

    more = MoreSeeds()
    if result.upper < 0:
        state = "pays"
    elif result.lower > 0:
        state = "not"
    else:
        state = "same"
        if not result.best.equal:
            more = _more_seeds(bases, others, result, earlier)
        if more.count:
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
        most_seeds=most_seeds,
        more=more,
    )


def losses_at_budget(
    sweep: SweepResult, metric: str, jobs: list[JobResult], axis: str
) -> Losses:
    """Return the loss per setting and seed at the budget: where the shortest job ends.

    A loss is interpolated linearly between two points of its curve. A setting is left
    out if it has no finite loss at the budget for some seed, for example because the
    first point of a job comes later. The budget of a fork begins at its checkpoint.
    """
    losses_at: dict[str, tuple[Any, Any]] = {}
    for job in jobs:
        curve = sweep.smooth(job, metric)
        if curve is None:
            continue
        x = job.spent(axis, curve.steps)
        known = np.isfinite(x)
        if known.any():
            losses_at[job.name] = (x[known], curve.values[known])
    if not losses_at:
        return Losses(reason=f"no job logged its {BUDGETS[axis]}")
    budget = min(float(x[-1]) for x, _ in losses_at.values())

    def loss_at_budget(job: JobResult) -> float:
        if job.name not in losses_at:
            return math.nan
        x, y = losses_at[job.name]
        return float(np.interp(budget, x, y, left=math.nan))

    settings = []
    without = WithoutLoss()
    for group, group_jobs in by_group(jobs).items():
        if all(math.isfinite(loss_at_budget(job)) for job in group_jobs):
            losses = values_by_seed(group_jobs, loss_at_budget)
            settings.append(Setting(group, group_jobs[0].factor or 0, losses))
            continue
        firsts = [
            losses_at[job.name][0][0] for job in group_jobs if job.name in losses_at
        ]
        without.add(group, budget, firsts, len(group_jobs))

    factors = {setting.factor for setting in settings}
    if 1 not in factors or len(factors) < 2:
        unit = "examples"
        amount = number(budget)
        if axis == "seconds":
            unit = "of training"
            amount = number(budget, wording.SECONDS)
        reason = (
            f"{' and '.join(without.clauses(metric))} when the shortest run ended, "
            f"after {amount} {unit}"
        )
        return Losses(reason=reason)
    return Losses(budget, settings, without)


def _more_seeds(
    bases: list[Setting], others: list[Setting], result: BestAgainstBest, earlier: int
) -> MoreSeeds:
    """Predict the additional seeds that a verdict needs.

    The prediction assumes that means and deviations do not change. It counts the later
    verdict as one more look at the data; see `chance_of_look`. It asks for seeds of
    factor 1 and of the best larger factor, unless all factors need them: one larger
    factor is enough to show that accumulating pays, but only all of them can show that
    it does not.

    Returns:
        No seeds if more than `MOST_ADDED_SEEDS` are needed. If the error is unknown,
        the number that raises the seeds to `FEWEST_SEEDS`.
    """
    seeds = result.best.seeds
    best_factor = others[result.other].factor
    if result.best.error is None:
        # Nothing can be predicted from an unknown error. If the results of
        # `FEWEST_SEEDS` seeds do not vary, those of further seeds will not either.
        missing = max(FEWEST_SEEDS - seeds, 0)
        if not missing:
            return MoreSeeds()
        return MoreSeeds(missing, (1, best_factor))

    base_losses = [setting.losses for setting in bases]
    other_losses = [setting.losses for setting in others]
    of_best_factor = [setting.factor == best_factor for setting in others]
    all_factors = tuple(sorted({1, *(setting.factor for setting in others)}))
    chance = chance_of_look(earlier + 1)
    for total in range(seeds + 1, seeds + MOST_ADDED_SEEDS + 1):
        for factors, grows in (
            ((1, best_factor), of_best_factor),
            (all_factors, [True] * len(others)),
        ):
            expected = best_against_best(
                base_losses, other_losses, chance, total, grows
            )
            if expected.upper < 0 or expected.lower > 0:
                return MoreSeeds(total - seeds, factors)
    return MoreSeeds()
