"""The statistics of a report, by hand."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

from pipeline.report import statistics, wording
from pipeline.report.statistics import Spread


def test_spread_and_welch_interval_by_hand():
    assert statistics.spread([1, 2, 3, math.nan]) == Spread(2, 1, 3)
    assert statistics.spread([5]) == Spread(5, None, 1)
    assert statistics.spread([math.nan]) is None

    result = statistics.welch(Spread(10, 2, 4), Spread(13, 2, 4))
    # The standard error is √(4/4 + 4/4).
    assert result.error == pytest.approx(math.sqrt(2))
    assert result.freedom == pytest.approx(6)
    assert statistics.student_quantile(6, 0.975) == pytest.approx(2.446912, rel=1e-6)
    assert statistics.welch(Spread(10, None, 1), Spread(13, 2, 4)) is None


class RelativeDifference(NamedTuple):
    """Two values, and their relative difference."""

    first: float
    second: float
    expected: float


# A loss that falls, and rises at the end.
UPDATES = np.array([10.0, 20, 30, 40])
LOSSES = np.array([4.0, 3, 1, 2])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_values_do_not_vary(count):
    """Of the accuracies over 180 examples, the mean of three is rounded for 34."""
    examples = 180
    for correct in range(examples + 1):
        accuracy = correct / examples
        spread = statistics.spread([accuracy] * count)
        assert spread.deviation == 0
    apart = statistics.spread([0.1, 0.10001])
    assert apart.deviation == pytest.approx(1e-5 / math.sqrt(2))


def test_relative_difference_knows_zero_and_what_is_not_finite():
    pairs = [
        RelativeDifference(2.0, 1.0, expected=0.5),
        RelativeDifference(0.0, 0.0, expected=0.0),
        RelativeDifference(1.0, -1.0, expected=2.0),
        RelativeDifference(np.nan, np.nan, expected=0.0),
        RelativeDifference(np.inf, np.inf, expected=0.0),
        RelativeDifference(1.0, np.nan, expected=np.inf),
    ]
    first = np.array([pair.first for pair in pairs])
    second = np.array([pair.second for pair in pairs])
    relative = statistics.relative_difference(first, second)
    assert relative.tolist() == [pair.expected for pair in pairs]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (2, 25),  # half of the way from (20, 3) to (30, 1)
        (3, 20),
        (5, 10),  # met at the first point already
    ],
)
def test_a_target_is_reached_between_two_points(target, expected):
    assert statistics.reached(UPDATES, LOSSES, target) == expected


def test_a_target_that_is_never_reached():
    assert math.isnan(statistics.reached(UPDATES, LOSSES, 0.5))


def test_a_trailing_mean_weighs_by_examples():
    examples = np.array([10.0, 20, 25, 35])
    values = np.array([1.0, 2, 4, 8])
    means = statistics.trailing_mean(examples, values, 15)
    expected = [
        1,  # of the first ten examples, as there are no others
        (5 * 1 + 10 * 2) / 15,
        (10 * 2 + 5 * 4) / 15,
        (5 * 4 + 10 * 8) / 15,
    ]
    assert means.tolist() == pytest.approx(expected, rel=1e-12)
    of_single_examples = statistics.trailing_mean(examples, values, 1)
    assert of_single_examples.tolist() == values.tolist()


@pytest.mark.parametrize("spike", [math.inf, -math.inf, math.nan, 1e30])
def test_a_spike_changes_only_the_means_over_it(spike):
    # 40 updates of ten examples each.
    examples = 10.0 * np.arange(1, 41)
    values = np.linspace(2, 1, 40)
    calm = statistics.trailing_mean(examples, values, 35)

    values[3] = spike
    means = statistics.trailing_mean(examples, values, 35)

    # The window of 35 examples begins in the middle of an update: it has some of four.
    before = slice(3)
    over_the_spike = slice(3, 7)
    after = slice(7, None)
    assert means[before].tolist() == calm[before].tolist()
    is_small = np.abs(means[over_the_spike]) < 1e6
    assert not is_small.any()
    assert means[after].tolist() == calm[after].tolist()


def test_trailing_means_are_those_of_single_examples():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 50)
    values = rng.normal(size=50)
    losses = np.repeat(values, sizes)
    seen = np.cumsum(sizes)
    for window in (1, 7, 30, 1000):
        means = statistics.trailing_mean(seen.astype(float), values, window)
        expected = []
        for end in seen:
            start = max(end - window, 0)
            expected.append(losses[start:end].mean())
        assert means.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_loss_of_a_short_tail_is_no_target():
    """An epoch of 1000 examples in batches of 124 ends with a batch of 8.

    The loss of that one is lower by chance.
    """
    batch = 124
    tail = 1000 - 8 * batch
    assert tail == 8
    examples = np.array([*range(batch, 8 * batch + 1, batch), 1000.0])
    losses = np.array([2.0] * 8 + [0.1])
    means = statistics.trailing_mean(examples, losses, batch)
    # The last mean has most of the batch before the tail as well.
    expected = ((batch - tail) * 2.0 + tail * 0.1) / batch
    assert means[-1] == pytest.approx(expected)


def test_the_trade_off_is_fitted_exactly_and_rejected_where_there_is_none():
    batches = [16, 64, 256]
    costs = [1000 + 5 * batch for batch in batches]
    fit = statistics.tradeoff(batches, costs)
    assert fit.fewest_examples == pytest.approx(1000)
    assert fit.fewest_updates == pytest.approx(5)
    assert statistics.tradeoff(batches[:2], [1000, 2000]) is None
    assert statistics.tradeoff(batches, [3000, 2000, 1000]) is None


def test_the_fit_weighs_every_batch_by_its_relative_residual():
    batches = np.array([10.0, 100, 1000])
    costs = np.array([200.0, 300, 900])
    fit = statistics.tradeoff(batches, costs)

    def residual(examples: float, updates: float) -> float:
        fitted = examples + updates * batches
        relative = fitted / costs - 1
        return float(np.sum(relative**2))

    # Any other fit near it is worse.
    examples = fit.fewest_examples
    updates = fit.fewest_updates
    least = residual(examples, updates)
    for share in (0.99, 1.01):
        assert residual(share * examples, updates) > least
        assert residual(examples, share * updates) > least


def test_numbers_are_written_with_the_digits_that_count():
    assert Spread(0.97901, 0.00969, 3).text() == "0.9790 ± 0.0097"
    assert Spread(0.303, 0.0862, 3).text(wording.SECONDS) == "303 ± 86 ms"
    assert Spread(7354.2, 40.8, 3).text() == "7354 ± 41"
    assert Spread(672.4, 135.8, 3).text() == "672 ± 136"
    assert Spread(0.5, 3e6, 3).text() == "0.5 ± 3e6"
    assert wording.number(2.0) == "2"
    assert wording.number(0.25) == "0.25"
    assert wording.number(1e-7) == "1e-7"
    assert wording.number(12345.6) == "12346"
    assert wording.number(3 * 2**30, wording.SIZE) == "3 GiB"
