"""Statistics for a report: differences, spreads over seeds, crossings and fits.

The default confidence level of an interval is 95%.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.report.wording import PLAIN, Scale, number, plus_minus

Array = NDArray[np.float64]

# Results whose relative difference is at most this count as equal. The value is about
# ten times the machine epsilon of float32.
EQUAL = 1e-6
# The probability that a confidence interval misses the true value.
CHANCE = 0.05


@dataclass(frozen=True)
class Spread:
    """The mean and the standard deviation of a value over seeds."""

    mean: float
    # The sample standard deviation (n − 1), or None if it is unknown.
    deviation: float | None
    count: int  # number of values, such as one per seed

    def text(self, scale: Scale = PLAIN) -> str:
        """Return `mean ± deviation`, or the mean alone if the deviation is unknown."""
        if self.deviation is None or not math.isfinite(self.deviation):
            return number(self.mean, scale)
        return plus_minus(self.mean, self.deviation, scale)


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of the finite values, or None if there are none.

    A deviation of at most `EQUAL` times the mean counts as 0: even equal values differ
    from their mean by about 1e-17, since the computed mean is rounded.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    mean = float(np.mean(finite))
    deviation = None
    if len(finite) > 1:
        deviation = float(np.std(finite, ddof=1))
        if deviation <= EQUAL * abs(mean):
            deviation = 0.0
    return Spread(mean, deviation, len(finite))


def student_quantile(freedom: float, probability: float) -> float:
    """Return the quantile of Student's t distribution at a cumulative `probability`.

    `freedom` is the number of degrees of freedom.
    """
    # Do not use scipy.stats here, which takes seconds to import.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


@dataclass(frozen=True)
class Welch:
    """The error of a difference between two means, whose variances may differ.

    Attributes:
        error: the standard error of the difference.
        freedom: the degrees of freedom of `error`.
    """

    error: float
    freedom: float


def welch(first: Spread, second: Spread) -> Welch | None:
    """Return the error of `second.mean − first.mean`, as in Welch's test.

    The variances of the two groups may differ (Welch 1947, Biometrika 34). With the
    squared standard errors `a` = s₁² / n₁ and `b` = s₂² / n₂ of the two means, the
    standard error of the difference is √(a + b), and it has
    (a + b)² / (a² / (n₁ − 1) + b² / (n₂ − 1)) degrees of freedom.

    Return None if the deviation of a group is unknown, because it has a single value,
    or if both deviations are 0.
    """
    if first.deviation is None or second.deviation is None:
        return None
    a = first.deviation**2 / first.count
    b = second.deviation**2 / second.count
    if a + b == 0:
        return None
    freedom = (a + b) ** 2 / (a**2 / (first.count - 1) + b**2 / (second.count - 1))
    return Welch(math.sqrt(a + b), freedom)


def relative_difference(first: Array, second: Array) -> Array:
    """Return |a − b| / max(|a|, |b|) for the elements a of `first` and b of `second`.

    The result is 0 where a and b are equal or both NaN. Elsewhere it is infinite if a
    or b is not finite.
    """
    with np.errstate(all="ignore"):
        larger = np.maximum(np.abs(first), np.abs(second))
        relative = np.abs(first - second) / larger
    both_finite = np.isfinite(first) & np.isfinite(second)
    relative = np.where(both_finite, relative, np.inf)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return np.where(same, 0.0, relative)


def reached(x: Array, y: Array, target: float) -> float:
    """Return the x at which `y` first reaches `target` from above.

    The result is interpolated linearly between the first point at or below `target` and
    the point before. It is the x of that first point if the point before is missing or
    not finite, and NaN if no `y` is at or below `target`.
    """
    below = y <= target
    if not below.any():
        return math.nan

    index = int(below.argmax())
    if index == 0 or not math.isfinite(y[index - 1]) or y[index] == target:
        return float(x[index])
    share = (y[index - 1] - target) / (y[index - 1] - y[index])
    return float(x[index - 1] + share * (x[index] - x[index - 1]))


def trailing_mean(examples: Array, values: Array, window: float) -> Array:
    """Return the mean of `values` over the last `window` examples.

    Where fewer than `window` examples have been seen, the mean is over all of them. A
    value that is not finite, or so large that sums are rounded to it, changes only the
    means of windows that include it.

    Args:
        examples: the number of examples seen at each value, in ascending order.
        values: each value is the mean over the examples since the previous value. If
            the window begins between two values, the later one is weighted by the
            number of its examples inside the window.
        window: a number of examples.
    """
    start = np.maximum(examples - window, 0.0)
    # The window of each value begins inside the examples of the value `first`.
    first = np.searchsorted(examples, start, side="right")
    last = np.arange(len(examples))
    # An update without examples has an empty window: its own value is its mean.
    first = np.minimum(first, last)

    sizes = np.diff(examples, prepend=0.0)
    inside = examples[first] - start
    sums = inside * values[first] + _sums(sizes * values, first + 1, last + 1)
    seen = examples - start
    return np.where(seen > 0, sums / np.where(seen > 0, seen, 1.0), values)


def _sums(values: Array, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Array:
    """Return the sum of `values[begin[i] : end[i]]` for each i.

    A difference between two cumulative sums would not do: a value before the interval
    that is not finite would make both sums not finite, and a huge one would round both.
    So each sum is composed of sums over 1, 2, 4, … values.
    """
    sums = np.zeros(len(begin))
    position = begin.copy()
    remaining = end - begin
    block_sums = values
    block = 1
    while (remaining > 0).any():
        in_block = (remaining & block) > 0
        sums[in_block] += block_sums[position[in_block]]
        position[in_block] += block
        remaining = remaining - np.where(in_block, block, 0)
        block_sums = block_sums[:-block] + block_sums[block:]
        block *= 2
    return sums


@dataclass(frozen=True)
class Tradeoff:
    """The trade-off between examples and updates, as fitted by `tradeoff`."""

    fewest_examples: float  # E_min
    fewest_updates: float  # S_min

    @property
    def critical_batch(self) -> float:
        """The critical batch E_min / S_min.

        With this batch, the target takes twice `fewest_examples` and twice
        `fewest_updates`.
        """
        return self.fewest_examples / self.fewest_updates


def tradeoff(batches: Sequence[float], examples: Sequence[float]) -> Tradeoff | None:
    """Fit the trade-off (S / S_min − 1)(E / E_min − 1) = 1 of examples E and updates S.

    See McCandlish et al. 2018, arXiv:1812.06162, section 2. With E = B · S this is the
    line E = E_min + S_min · B, which is fitted by least squares of the relative
    residuals.

    Args:
        batches: the effective batches B.
        examples: the number of examples E to the target, for each batch.

    Returns:
        The fit, or None if there are fewer than three different batches, or if a fitted
        minimum is not positive.
    """
    if len(set(batches)) < 3:
        return None
    x = np.asarray(batches, float)
    y = np.asarray(examples, float)
    fewest_updates, fewest_examples = np.polyfit(x, y, 1, w=1 / y)
    if fewest_updates <= 0 or fewest_examples <= 0:
        return None
    return Tradeoff(float(fewest_examples), float(fewest_updates))
