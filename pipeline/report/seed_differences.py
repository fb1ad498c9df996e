"""Differences between groups of jobs, and their confidence intervals over seeds.

Runs of one seed begin with the same weights and read the examples in the same order. So
two groups are compared seed by seed: what a seed does to both of them cancels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.report.job_results import JobResult, Measure
from pipeline.report.statistics import (
    CHANCE,
    EQUAL,
    spread,
    student_quantile,
    welch,
)

Values = Mapping[str, float]  # a value of each seed

# So many seeds show how far seeds vary.
FEWEST_SEEDS = 3
# The share of `CHANCE` that the first verdict on a sweep may use. Each later one, with
# more seeds, may use a fifth of the one before: 4%, 0.8%, 0.16%, … add up to 5%.
FIRST_SHARE = 0.8


@dataclass(frozen=True)
class Difference:
    """How far the mean of a group is from that of another one, over seeds.

    Attributes:
        value: the difference of the means.
        error: its standard error; None if it is not known.
        freedom: the degrees of freedom of the error.
        seeds: the number of seeds.
        paired: whether the groups have these seeds in common.
        equal: whether each seed has the same value in both groups, within `EQUAL`.
    """

    value: float
    error: float | None
    freedom: float
    seeds: int
    paired: bool
    equal: bool = False

    def half_width(self, tail: float = CHANCE / 2) -> float:
        """Return half the width of the interval with the probability `tail` on a side.

        It is infinite if chance is not known, and 0 between equal groups.
        """
        if self.equal:
            return 0.0
        if self.error is None:
            return math.inf
        return student_quantile(self.freedom, 1 - tail) * self.error

    def with_seeds(self, seeds: int) -> "Difference":
        """Return the difference with more seeds of the same mean and deviation."""
        if self.error is None:
            return replace(self, seeds=seeds)
        error = self.error * math.sqrt(self.seeds / seeds)
        freedom = self.freedom * (seeds - 1) / (self.seeds - 1)
        return replace(self, error=error, freedom=freedom, seeds=seeds)

    @property
    def told_apart(self) -> bool:
        """Return whether chance does not explain the difference."""
        return abs(self.value) > self.half_width() and not self.equal


def values_by_seed(jobs: Sequence[JobResult], measure: Measure) -> dict[str, float]:
    """Return a value of each seed; jobs of the same seed count as their mean.

    A job without a finite value is left out.
    """
    values: dict[str, list[float]] = {}
    for number, job in enumerate(jobs):
        value = measure(job)
        if math.isfinite(value):
            seed = job.seed or f"job {number}"
            values.setdefault(seed, []).append(value)
    return {seed: float(np.mean(of_seed)) for seed, of_seed in values.items()}


def difference(first: Values, second: Values) -> Difference:
    """Return how far the mean of `second` is from that of `first`.

    If both have two seeds or more in common, only these count, and the interval is that
    of Student's paired test (Student 1908): with the standard deviation s of n
    differences, t · s / √n with n − 1 degrees of freedom. It holds whatever the
    variances of the two groups are. Otherwise it is Welch's interval, see
    `statistics.welch`.

    The error is None with one seed, and if no seed differs from another one: equal
    results of few seeds, as of an accuracy over 180 examples, do not show that chance
    has no effect. The same holds for two equal differences.
    """
    common = sorted(set(first) & set(second))
    paired = len(common) > 1 or len(first) == len(second) == len(common)
    if paired:
        differences = np.array([second[seed] - first[seed] for seed in common])
        scale = 0.0
        for seed in common:
            scale = max(scale, abs(first[seed]), abs(second[seed]))
        value = float(np.mean(differences))
        equal = bool(np.all(np.abs(differences) <= EQUAL * scale))
        if len(common) < 2:
            return Difference(value, None, 0, len(common), True, equal)
        deviation = float(np.std(differences, ddof=1))
        error = None
        if deviation > EQUAL * scale or _only_the_seeds_vary(first, common, scale):
            error = deviation / math.sqrt(len(common))
        return Difference(value, error, len(common) - 1, len(common), True, equal)

    first_spread = spread(list(first.values()))
    second_spread = spread(list(second.values()))
    if first_spread is None or second_spread is None:
        return Difference(math.nan, None, 0, 0, False)
    value = second_spread.mean - first_spread.mean
    seeds = min(first_spread.count, second_spread.count)
    result = welch(first_spread, second_spread)
    if result is None:
        return Difference(value, None, 0, seeds, False)
    return Difference(value, result.error, result.freedom, seeds, False)


def _only_the_seeds_vary(values: Values, seeds: Sequence[str], scale: float) -> bool:
    """Return whether three seeds or more vary, given that no difference does."""
    if len(seeds) < FEWEST_SEEDS:
        return False
    return float(np.std([values[seed] for seed in seeds])) > EQUAL * scale


def chance_of_look(earlier: int) -> float:
    """Return the chance of error of a verdict, after `earlier` ones with fewer seeds.

    Who adds seeds until the verdict is clear looks several times, and may err at each.
    All looks together err in at most `CHANCE` of the cases, as their chances add up to
    no more (Bonferroni's inequality): an alpha-spending function (Lan and DeMets 1983)
    of the number of looks.
    """
    return CHANCE * FIRST_SHARE * (1 - FIRST_SHARE) ** earlier


@dataclass(frozen=True)
class BestAgainstBest:
    """The best of some groups against the best of others, where lower is better.

    Attributes:
        base: the position of the best base group, by its mean.
        other: the position of the best other group, by its mean.
        value: the difference of these two means: the other minus the base.
        lower: the lower end of the interval for the difference of the best ones.
        upper: its upper end.
        best: the difference of `other` from `base`, by itself.
    """

    base: int
    other: int
    value: float
    lower: float
    upper: float
    best: Difference


def best_against_best(
    bases: Sequence[Values], others: Sequence[Values], chance: float, seeds: int = 0
) -> BestAgainstBest:
    """Compare the best of `others` with the best of `bases`, where lower is better.

    The interval is for min μ(others) − min μ(bases) = min over j of max over b of δ_jb,
    with the difference δ_jb of the other group j from the base b. It holds although the
    best groups are chosen by the same values:

    - It is below an upper end U if some j is below every b by U. So U is the lowest,
      over j, of the largest upper end over b. Each j gets its share of the chance of
      error (Bonferroni; Dunn 1961). The bases need no share, as all of them have to
      agree (an intersection–union test; Berger 1982, Technometrics 24).
    - The lower end is the same with the roles exchanged.

    Args:
        bases: the values of each base group by seed.
        others: the values of each other group by seed.
        chance: the chance of error, for both ends together.
        seeds: with so many seeds of the same means and deviations; 0 for those that
            there are.
    """
    differences = []
    for other in others:
        row = []
        for base in bases:
            pair = difference(base, other)
            if seeds:
                pair = pair.with_seeds(seeds)
            row.append(pair)
        differences.append(row)

    upper_tail = chance / 2 / len(others)
    lower_tail = chance / 2 / len(bases)
    upper_ends = []
    for row in differences:
        upper_ends.append(max(pair.value + pair.half_width(upper_tail) for pair in row))
    lower_ends = []
    for column in zip(*differences, strict=True):
        lower_ends.append(
            min(pair.value - pair.half_width(lower_tail) for pair in column)
        )

    best_base = _lowest_mean(bases)
    best_other = _lowest_mean(others)
    best = differences[best_other][best_base]
    return BestAgainstBest(
        base=best_base,
        other=best_other,
        value=best.value,
        lower=min(max(lower_ends), best.value),
        upper=max(min(upper_ends), best.value),
        best=best,
    )


def _lowest_mean(groups: Sequence[Values]) -> int:
    means = [float(np.mean(list(group.values()))) for group in groups]
    return int(np.argmin(means))
