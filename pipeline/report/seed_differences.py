"""Differences between groups of jobs, and their confidence intervals over seeds.

Runs with the same seed begin with the same weights and read the examples in the same
order. So two groups are compared seed by seed: the effect of a seed that is common to
both groups cancels.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.report.job_results import JobResult, Measure
from pipeline.report.statistics import CHANCE, EQUAL, spread, student_quantile, welch

Values = Mapping[str, float]  # a value for each seed

# The minimum number of seeds from which the variation over seeds is judged.
FEWEST_SEEDS = 3
# The share of `CHANCE` that is allowed for the first verdict on a sweep. Each later
# verdict, with more seeds, is allowed a fifth of the chance of the previous one: 4%,
# 0.8%, 0.16%, … add up to 5%.
FIRST_SHARE = 0.8


@dataclass(frozen=True)
class Difference:
    """The difference between the means of two groups over seeds.

    Attributes:
        value: the difference between the means: the second minus the first.
        error: the standard error of `value`, or None if it is unknown.
        freedom: the degrees of freedom of `error`.
        seeds: the number of seeds in common if paired, or else the number of values in
            the smaller group.
        paired: whether the groups are compared at seeds that both have.
        equal: whether both groups have the same value at each seed, within `EQUAL`.
    """

    value: float
    error: float | None
    freedom: float
    seeds: int
    paired: bool
    equal: bool = False

    def half_width(self, tail: float = CHANCE / 2) -> float:
        """Return half the width of the interval with probability `tail` on each side.

        The result is 0 if the groups are equal, or infinite if the error is unknown.
        """
        if self.equal:
            return 0.0
        if self.error is None:
            return math.inf
        return student_quantile(self.freedom, 1 - tail) * self.error

    def with_seeds(self, seeds: int) -> "Difference":
        """Predict the difference for `seeds` seeds with the same mean and deviation."""
        if self.error is None:
            return replace(self, seeds=seeds)
        error = self.error * math.sqrt(self.seeds / seeds)
        freedom = self.freedom * (seeds - 1) / (self.seeds - 1)
        return replace(self, error=error, freedom=freedom, seeds=seeds)

    @property
    def told_apart(self) -> bool:
        """Whether 0 is outside the 95% interval of the difference."""
        return abs(self.value) > self.half_width() and not self.equal


def values_by_seed(jobs: Sequence[JobResult], measure: Measure) -> dict[str, float]:
    """Return the value for each seed, averaged over jobs with the same seed.

    Jobs without a finite value are left out. A job without a seed counts as a seed of
    its own.
    """
    values: dict[str, list[float]] = {}
    for number, job in enumerate(jobs):
        value = measure(job)
        if math.isfinite(value):
            seed = job.seed or f"job {number}"
            values.setdefault(seed, []).append(value)
    return {seed: float(np.mean(of_seed)) for seed, of_seed in values.items()}


def paired_seeds(first: Collection[str], second: Collection[str]) -> list[str]:
    """Return the seeds at which two groups are compared seed by seed, if they are.

    These are the common seeds if there are two or more, or if both groups have the same
    single seed. Otherwise, the result is empty.
    """
    common = sorted(set(first) & set(second))
    if len(common) > 1 or len(first) == len(second) == len(common):
        return common
    return []


def difference(first: Values, second: Values) -> Difference:
    """Return the mean of `second` minus the mean of `first`, with its standard error.

    If the groups have two or more seeds in common, only these seeds are used, as in
    Student's paired test (Student 1908): the half-width of the interval is t · s / √n,
    with the standard deviation s of the n differences and n − 1 degrees of freedom.
    This holds for any variances of the two groups. With fewer seeds in common, the
    error is that of Welch's test (see `statistics.welch`), unless both groups have the
    same single seed.

    The error is None if a group has a single seed, or if the groups have just two seeds
    in common and both differences are equal. It is also None if no results vary over
    the seeds: equal results, such as accuracies over 180 examples, do not show that
    chance has no effect.
    """
    common = paired_seeds(first, second)
    if common:
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
    """Return whether there are `FEWEST_SEEDS` or more `seeds` and their values vary.

    If the differences between two groups do not vary, this shows that the two groups
    vary in the same way.
    """
    if len(seeds) < FEWEST_SEEDS:
        return False
    return float(np.std([values[seed] for seed in seeds])) > EQUAL * scale


def chance_of_look(earlier: int) -> float:
    """Return the allowed chance of error of a verdict after `earlier` verdicts.

    A user who adds seeds until the verdict is clear looks at the data several times,
    and each look may err. The allowed chances of all looks add up to at most `CHANCE`,
    so the chance that any look errs is at most `CHANCE` (Bonferroni's inequality). This
    is an alpha-spending function (Lan and DeMets 1983) of the number of looks.
    """
    return CHANCE * FIRST_SHARE * (1 - FIRST_SHARE) ** earlier


@dataclass(frozen=True)
class BestAgainstBest:
    """The best of the other groups compared with the best base group; lower is better.

    Attributes:
        base: the index of the base group with the lowest mean.
        other: the index of the other group with the lowest mean.
        value: the difference between these two means: the other minus the base.
        lower: the lower end of the interval for the difference, which allows for the
            choice of the best groups.
        upper: the upper end of this interval.
        best: the difference between the two chosen groups, without such an allowance.
    """

    base: int
    other: int
    value: float
    lower: float
    upper: float
    best: Difference


def best_against_best(
    bases: Sequence[Values],
    others: Sequence[Values],
    chance: float,
    seeds: int = 0,
    grows: Sequence[bool] | None = None,
) -> BestAgainstBest:
    """Compare the best of `others` with the best of `bases`, where lower is better.

    The interval covers min μ(others) − min μ(bases) = min over j of max over b of δ_jb,
    where δ_jb is the mean of the other group j minus that of the base group b. The
    interval is valid although the best groups are chosen by the same values that are
    compared:

    - The upper end is the minimum over j of the maximum over b of the upper ends of
      δ_jb. The chance of error is divided among all j (Bonferroni; Dunn 1961). It is
      not divided among the bases, since the bound has to hold for every b (an
      intersection–union test; Berger 1982, Technometrics 24).
    - The lower end is computed in the same way with the roles exchanged.

    If necessary, the interval is widened to include the measured difference.

    Args:
        bases: for each base group, its values by seed.
        others: for each other group, its values by seed.
        chance: the chance of error of both ends together.
        seeds: if not 0, predict the result for this number of seeds, assuming the same
            means and deviations.
        grows: for each of the other groups, whether it gets these seeds; by default,
            all do. The base groups do in any case.
    """
    if grows is None:
        grows = [True] * len(others)
    differences = []
    for other, gets_seeds in zip(others, grows, strict=True):
        row = []
        for base in bases:
            pair = difference(base, other)
            if gets_seeds and seeds > pair.seeds:
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
