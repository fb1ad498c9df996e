"""Differences over seeds: by hand, and that they err as rarely as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import stdtrit

from pipeline.report.seed_differences import (
    best_against_best,
    chance_of_look,
    difference,
)
from pipeline.report.statistics import CHANCE

DRAWS = 1500
# Of a share of 5% in so many draws, three standard errors: 1.7%.
SLACK = 3 * math.sqrt(CHANCE * (1 - CHANCE) / DRAWS)


def by_seed(values) -> dict[str, float]:
    return {str(seed): float(value) for seed, value in enumerate(values)}


def test_the_paired_interval_by_hand():
    """Differences of 1, 2 and 3: a mean of 2 with an error of 1 / √3."""
    result = difference(by_seed([10, 20, 30]), by_seed([11, 22, 33]))
    assert result.paired
    assert result.seeds == 3
    assert result.value == pytest.approx(2)
    # Student's quantile for 97.5% with two degrees of freedom.
    assert result.half_width() == pytest.approx(4.302653 / math.sqrt(3))
    assert not result.told_apart

    # Not paired, the spread over seeds, 10, would hide it.
    first = {"a": 10.0, "b": 20.0, "c": 30.0}
    second = {"d": 11.0, "e": 22.0, "f": 33.0}
    unpaired = difference(first, second)
    assert not unpaired.paired
    assert unpaired.half_width() > 20


def test_only_seeds_of_both_groups_are_paired():
    first = {"0": 1.0, "1": 2.0, "9": 90.0}
    second = {"0": 2.0, "1": 4.0}
    result = difference(first, second)
    assert result.seeds == 2
    assert result.value == pytest.approx(1.5)


def test_results_that_do_not_vary_leave_chance_unknown():
    # As of an accuracy over 180 examples.
    apart = difference(by_seed([0.5] * 3), by_seed([0.6] * 3))
    assert apart.half_width() == math.inf
    assert not apart.told_apart

    # The seeds vary, all by the same difference: three are enough, two are not.
    two = difference(by_seed([0.5, 0.6]), by_seed([0.6, 0.7]))
    assert two.half_width() == math.inf
    three = difference(by_seed([0.5, 0.6, 0.8]), by_seed([0.6, 0.7, 0.9]))
    assert three.told_apart

    same = difference(by_seed([0.5, 0.6]), by_seed([0.5, 0.6]))
    assert same.equal
    assert same.half_width() == 0
    assert not same.told_apart


def test_more_seeds_of_the_same_spread():
    of_three_seeds = difference(by_seed([0, 0, 0]), by_seed([1, 2, 3]))
    result = of_three_seeds.with_seeds(12)
    assert result.error == pytest.approx(1 / math.sqrt(12))
    assert result.freedom == 11


def test_the_chances_of_all_looks_add_up():
    chances = [chance_of_look(earlier) for earlier in range(50)]
    assert chances[0] == pytest.approx(0.04)
    assert sum(chances) == pytest.approx(CHANCE)


def drawn(rng: np.random.Generator, scales, seeds: int, shared: float = 1.0) -> list:
    """Return a group for each scale, with the same mean; a seed moves all of them."""
    effects_of_seeds = shared * rng.standard_normal(seeds)
    groups = []
    for scale in scales:
        noise = scale * rng.standard_normal(seeds)
        groups.append(by_seed(effects_of_seeds + noise))
    return groups


def decides(result) -> bool:
    """Return whether the interval of a contrast leaves out 0."""
    return result.upper < 0 or result.lower > 0


@pytest.mark.parametrize(
    ("bases", "others", "seeds"),
    [
        ([1], [1], 2),
        ([1], [1, 1, 5], 3),
        ([5], [1, 1], 3),
        # Three rates each, of which the best ones are compared.
        pytest.param([1, 1, 5], [1, 5, 1, 1, 5, 1], 3, marks=pytest.mark.slow),
        ([0.2], [1], 5),
    ],
)
def test_without_a_difference_it_errs_in_five_percent(bases, others, seeds):
    """The seeds of some groups vary five times as much as those of others."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(DRAWS):
        groups = drawn(rng, [*bases, *others], seeds)
        base_groups = groups[: len(bases)]
        other_groups = groups[len(bases) :]
        if decides(best_against_best(base_groups, other_groups, CHANCE)):
            wrong += 1
    assert wrong / DRAWS <= CHANCE + SLACK


def test_the_interval_has_the_difference_of_the_best():
    """The best base is at 0, the best other group at −1; both have rivals."""
    rng = np.random.default_rng(1)
    base_means = [0.0, 0.3, 2.0]
    other_means = [-1.0, -0.8, 3.0]
    missed = 0
    for _ in range(DRAWS):
        groups = []
        for mean in base_means + other_means:
            noise = 0.5 * rng.standard_normal(4)
            groups.append(by_seed(mean + noise))
        result = best_against_best(groups[:3], groups[3:], CHANCE)
        if not result.lower <= -1 <= result.upper:
            missed += 1
    assert missed / DRAWS <= CHANCE + SLACK


def is_decided(groups: list, seeds: int, chance: float, expected: int = 0) -> bool:
    """Return whether the first seeds decide between the first group and the others.

    Args:
        groups: results by seed.
        seeds: how many of them are looked at.
        chance: of an error.
        expected: if not 0, predict the result for this number of seeds.
    """
    groups_so_far = []
    for group in groups:
        first_seeds = list(group)[:seeds]
        groups_so_far.append({seed: group[seed] for seed in first_seeds})
    base, *others = groups_so_far
    return decides(best_against_best([base], others, chance, expected))


def five_percent_each(look: int) -> float:
    """Return the chance of error of a look as if it were the only one."""
    return CHANCE


def errs(groups: list, chance_of) -> bool:
    """Return whether a sweep ends with a verdict, as seeds are added as advised.

    Args:
        groups: results by seed, without a difference between the groups.
        chance_of: the chance of error of a look, by its number.
    """
    seeds = 3
    for look in range(6):
        if is_decided(groups, seeds, chance_of(look)):
            return True
        # As in the advice: the fewest seeds that would tell, of up to ten more.
        next_chance = chance_of(look + 1)
        for enough in range(seeds + 1, seeds + 11):
            if is_decided(groups, seeds, next_chance, expected=enough):
                seeds = enough
                break
        else:
            return False
    return False


@pytest.mark.parametrize("draws", [500, pytest.param(4000, marks=pytest.mark.slow)])
def test_seeds_that_are_added_as_advised_keep_the_five_percent(draws):
    """Without a difference, a verdict is asked for until it is clear or none is near.

    With 5% at each look, the same procedure errs in more.
    """
    rng = np.random.default_rng(2)
    wrong = 0
    wrong_with_five_percent_each = 0
    for _ in range(draws):
        groups = drawn(rng, [1, 1], 60)
        if errs(groups, chance_of_look):
            wrong += 1
        if errs(groups, five_percent_each):
            wrong_with_five_percent_each += 1
    slack = 3 * math.sqrt(CHANCE * (1 - CHANCE) / draws)
    assert wrong / draws <= CHANCE + slack
    assert wrong_with_five_percent_each / draws > 0.08


def test_one_comparison_is_that_of_student():
    rng = np.random.default_rng(3)
    base, other = drawn(rng, [1, 1], 5)
    result = best_against_best([base], [other], CHANCE)
    expected = float(stdtrit(4, 0.975)) * result.best.error
    assert result.upper - result.value == pytest.approx(expected)
    assert result.value - result.lower == pytest.approx(expected)
