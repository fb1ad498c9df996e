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
    unpaired = difference(
        {"a": 10.0, "b": 20.0, "c": 30.0}, {"d": 11.0, "e": 22.0, "f": 33.0}
    )
    assert not unpaired.paired
    assert unpaired.half_width() > 20


def test_only_seeds_of_both_groups_are_paired():
    result = difference({"0": 1.0, "1": 2.0, "9": 90.0}, {"0": 2.0, "1": 4.0})
    assert result.seeds == 2
    assert result.value == pytest.approx(1.5)


def test_results_that_do_not_vary_leave_chance_unknown():
    # As of an accuracy over 180 examples.
    apart = difference(by_seed([0.5] * 3), by_seed([0.6] * 3))
    assert apart.half_width() == math.inf
    assert not apart.told_apart
    two = difference(by_seed([0.5, 0.6]), by_seed([0.6, 0.7]))
    assert two.half_width() == math.inf
    # Three seeds that vary, all by the same difference.
    three = difference(by_seed([0.5, 0.6, 0.8]), by_seed([0.6, 0.7, 0.9]))
    assert three.told_apart
    same = difference(by_seed([0.5, 0.6]), by_seed([0.5, 0.6]))
    assert same.equal
    assert same.half_width() == 0
    assert not same.told_apart


def test_more_seeds_of_the_same_spread():
    result = difference(by_seed([0, 0, 0]), by_seed([1, 2, 3])).with_seeds(12)
    assert result.error == pytest.approx(1 / math.sqrt(12))
    assert result.freedom == 11


def test_the_chances_of_all_looks_add_up():
    chances = [chance_of_look(earlier) for earlier in range(50)]
    assert chances[0] == pytest.approx(0.04)
    assert sum(chances) == pytest.approx(CHANCE)


def drawn(rng: np.random.Generator, scales, seeds: int, shared: float = 1.0) -> list:
    """Return a group for each scale, with the same mean; a seed moves all of them."""
    of_seeds = shared * rng.standard_normal(seeds)
    groups = []
    for scale in scales:
        groups.append(by_seed(of_seeds + scale * rng.standard_normal(seeds)))
    return groups


@pytest.mark.parametrize(
    ("bases", "others", "seeds"),
    [
        ([1], [1], 2),
        ([1], [1, 1, 5], 3),
        ([5], [1, 1], 3),
        # Three rates each, of which the best ones are compared.
        ([1, 1, 5], [1, 5, 1, 1, 5, 1], 3),
        ([0.2], [1], 5),
    ],
)
def test_without_a_difference_it_errs_in_five_percent(bases, others, seeds):
    """The seeds of some groups vary five times as much as those of others."""
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(DRAWS):
        groups = drawn(rng, [*bases, *others], seeds)
        first = groups[: len(bases)]
        result = best_against_best(first, groups[len(bases) :], CHANCE)
        if result.upper < 0 or result.lower > 0:
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
            groups.append(by_seed(mean + 0.5 * rng.standard_normal(4)))
        result = best_against_best(groups[:3], groups[3:], CHANCE)
        if not result.lower <= -1 <= result.upper:
            missed += 1
    assert missed / DRAWS <= CHANCE + SLACK


def is_decided(groups: list, seeds: int, chance: float, expected: int = 0) -> bool:
    first = dict(list(groups[0].items())[:seeds])
    others = [dict(list(group.items())[:seeds]) for group in groups[1:]]
    result = best_against_best([first], others, chance, expected)
    return result.upper < 0 or result.lower > 0


@pytest.mark.parametrize("draws", [500, pytest.param(4000, marks=pytest.mark.slow)])
def test_seeds_that_are_added_as_advised_keep_the_five_percent(draws):
    """Without a difference, a verdict is asked for until it is clear or none is near.

    With 5% at each look, the same procedure errs in more.
    """
    rng = np.random.default_rng(2)
    wrong = {"spent": 0, "each": 0}
    for _ in range(draws):
        groups = drawn(rng, [1, 1], 60)
        for method in wrong:
            seeds = 3
            for look in range(6):
                chance = chance_of_look(look) if method == "spent" else CHANCE
                later = chance_of_look(look + 1) if method == "spent" else CHANCE
                if is_decided(groups, seeds, chance):
                    wrong[method] += 1
                    break
                enough = range(seeds + 1, seeds + 11)
                would_tell = [
                    n for n in enough if is_decided(groups, seeds, later, expected=n)
                ]
                if not would_tell:
                    break
                seeds = would_tell[0]
    slack = 3 * math.sqrt(CHANCE * (1 - CHANCE) / draws)
    assert wrong["spent"] / draws <= CHANCE + slack
    assert wrong["each"] / draws > 0.08


def test_one_comparison_is_that_of_student():
    rng = np.random.default_rng(3)
    base, other = drawn(rng, [1, 1], 5)
    result = best_against_best([base], [other], CHANCE)
    expected = float(stdtrit(4, 0.975)) * result.best.error
    assert result.upper - result.value == pytest.approx(expected)
    assert result.value - result.lower == pytest.approx(expected)
