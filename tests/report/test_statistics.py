"""The statistics of a report, by hand."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_values_do_not_vary(count):
    """Of the accuracies over 180 examples, the mean of three is rounded for 34."""
    for correct in range(181):
        accuracy = correct / 180
        assert statistics.spread([accuracy] * count).deviation == 0
    apart = statistics.spread([0.1, 0.10001])
    assert apart.deviation == pytest.approx(1e-5 / math.sqrt(2))


def test_relative_difference_knows_zero_and_what_is_not_finite():
    first = np.array([2.0, 0, 1, np.nan, np.inf, 1])
    second = np.array([1.0, 0, -1, np.nan, np.inf, np.nan])
    relative = statistics.relative_difference(first, second).tolist()
    assert relative == [0.5, 0, 2, 0, 0, np.inf]


def test_a_target_is_reached_between_two_points():
    x = np.array([10.0, 20, 30, 40])
    y = np.array([4.0, 3, 1, 2])
    assert statistics.reached(x, y, 2) == 25
    assert statistics.reached(x, y, 3) == 20
    assert statistics.reached(x, y, 5) == 10
    assert math.isnan(statistics.reached(x, y, 0.5))


def test_a_trailing_mean_weighs_by_examples():
    examples = np.array([10.0, 20, 25, 35])
    values = np.array([1.0, 2, 4, 8])
    means = statistics.trailing_mean(examples, values, 15)
    expected = [1, (5 * 1 + 10 * 2) / 15, (10 * 2 + 5 * 4) / 15, (5 * 4 + 10 * 8) / 15]
    assert means.tolist() == pytest.approx(expected, rel=1e-12)
    assert statistics.trailing_mean(examples, values, 1).tolist() == values.tolist()


@pytest.mark.parametrize("spike", [math.inf, -math.inf, math.nan, 1e30])
def test_a_spike_changes_only_the_means_over_it(spike):
    examples = np.arange(1, 41.0) * 10
    values = np.linspace(2, 1, 40)
    calm = statistics.trailing_mean(examples, values, 35)
    values[3] = spike
    means = statistics.trailing_mean(examples, values, 35)
    # The window of 35 examples begins in the middle of an update.
    assert means[:3].tolist() == calm[:3].tolist()
    assert not (np.abs(means[3:7]) < 1e6).any()
    assert means[7:].tolist() == calm[7:].tolist()


def test_trailing_means_are_those_of_single_examples():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 50)
    values = rng.normal(size=50)
    losses = np.repeat(values, sizes)
    seen = np.cumsum(sizes)
    for window in (1, 7, 30, 1000):
        means = statistics.trailing_mean(seen.astype(float), values, window)
        expected = [losses[max(end - window, 0) : end].mean() for end in seen]
        assert means.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_loss_of_a_short_tail_is_no_target():
    """An epoch of 1000 examples in batches of 124 ends with a batch of 8.

    The loss of that one is lower by chance.
    """
    examples = np.array([*range(124, 993, 124), 1000.0])
    values = np.array([2.0] * 8 + [0.1])
    last_mean = statistics.trailing_mean(examples, values, 124)[-1]
    assert last_mean == pytest.approx((116 * 2 + 8 * 0.1) / 124)


def test_the_trade_off_is_fitted_exactly_and_rejected_where_there_is_none():
    batches = [16, 64, 256]
    fit = statistics.tradeoff(batches, [1000 + 5 * batch for batch in batches])
    assert fit.fewest_examples == pytest.approx(1000)
    assert fit.fewest_updates == pytest.approx(5)
    assert statistics.tradeoff(batches[:2], [1000, 2000]) is None
    assert statistics.tradeoff(batches, [3000, 2000, 1000]) is None


def test_the_fit_weighs_every_batch_by_its_relative_residual():
    batches = np.array([10.0, 100, 1000])
    costs = np.array([200.0, 300, 900])
    fit = statistics.tradeoff(batches, costs)

    def residual(examples: float, updates: float) -> float:
        return float(np.sum(((examples + updates * batches) / costs - 1) ** 2))

    least = residual(fit.fewest_examples, fit.fewest_updates)
    for share in (0.99, 1.01):
        assert residual(fit.fewest_examples * share, fit.fewest_updates) > least
        assert residual(fit.fewest_examples, fit.fewest_updates * share) > least


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
