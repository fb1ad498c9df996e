"""The statistics of a report, and how a report writes numbers.

Differences and their intervals, spreads over seeds, crossings and fits. A confidence
interval is always a 95% interval.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Results whose relative difference is below this count as equal: it is about ten
# times the machine epsilon of float32.
EQUAL = 1e-6
# The chance that a confidence interval misses the true value.
CHANCE = 0.05


@dataclass(frozen=True)
class Unit:
    """A unit in which a number is written."""

    least: float  # The unit is for absolute values from here on.
    divisor: float
    name: str


Scale = tuple[Unit, ...]  # The largest unit stands first; the last one is for all.

PLAIN: Scale = (Unit(0, 1.0, ""),)
SECONDS: Scale = (
    Unit(7200, 3600.0, " h"),
    Unit(300, 60.0, " min"),
    Unit(1, 1.0, " s"),
    Unit(1e-3, 1e-3, " ms"),
    Unit(0, 1e-6, " µs"),
)
SIZE: Scale = (Unit(1000 * 2**20, 2.0**30, " GiB"), Unit(0, 2.0**20, " MiB"))


def number(value: float, scale: Scale = PLAIN) -> str:
    """Return `value` with four significant digits and its unit.

    An integer of up to six digits is not rounded.
    """
    if not math.isfinite(value):
        return str(value)

    unit = _unit(value, scale)
    value /= unit.divisor
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}{unit.name}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:.0f}{unit.name}"
    short_exponent = re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}")
    return short_exponent + unit.name


def _unit(value: float, scale: Scale) -> Unit:
    for unit in scale:
        if abs(value) >= unit.least:
            return unit
    raise ValueError(f"no unit of the scale is for {value}")


def count(n: int, noun: str) -> str:
    """Return `n` and the noun, in the plural unless `n` is 1."""
    if n == 1:
        return f"{n} {noun}"
    return f"{n} {noun}s"


def joined(names: list[str], most: int = 6) -> str:
    """Return the first `most` names with commas, and how many more there are."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


@dataclass(frozen=True)
class Spread:
    """The mean over seeds, and how far the seeds vary."""

    mean: float
    deviation: float | None  # sample standard deviation (n − 1); None for one value
    count: int  # number of seeds

    def text(self, scale: Scale = PLAIN) -> str:
        """Return `mean ± deviation`, with two digits of the deviation.

        Return just the mean if the deviation is unknown.
        """
        if self.deviation is None or not math.isfinite(self.deviation):
            return number(self.mean, scale)

        unit = _unit(self.mean, scale)
        mean = self.mean / unit.divisor
        deviation = self.deviation / unit.divisor
        digits = -1
        if deviation > 0:
            digits = 1 - math.floor(math.log10(deviation))
        if 0 <= digits <= 8 and abs(mean) < 1e6:
            return f"{mean:.{digits}f} ± {deviation:.{digits}f}{unit.name}"
        return f"{number(mean)} ± {number(deviation)}{unit.name}"


def spread(values: Sequence[float]) -> Spread | None:
    """Return the mean and the deviation of the finite values; None without any."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    deviation = float(np.std(finite, ddof=1)) if len(finite) > 1 else None
    return Spread(float(np.mean(finite)), deviation, len(finite))


def student_quantile(freedom: float, probability: float) -> float:
    """Return the quantile of Student's t distribution with `freedom` degrees."""
    # scipy.stats has it too, but takes seconds to import.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


@dataclass(frozen=True)
class Welch:
    """The difference of two means whose variances need not be equal.

    Attributes:
        value: `second.mean − first.mean`.
        error: its standard error.
        freedom: the degrees of freedom of the error.
    """

    value: float
    error: float
    freedom: float

    @property
    def half_width(self) -> float:
        """Return half the width of the interval."""
        return student_quantile(self.freedom, 1 - CHANCE / 2) * self.error


def welch(first: Spread, second: Spread) -> Welch | None:
    """Return `second.mean − first.mean` with Welch's interval, in the values' unit.

    The variances of the two need not be equal (Welch 1947, Biometrika 34). With the
    squared standard errors `a` = s₁² / n₁ and `b` = s₂² / n₂, the half-width is
    t · √(a + b), where t is Student's quantile with
    (a + b)² / (a² / (n₁ − 1) + b² / (n₂ − 1)) degrees of freedom.

    The result is None if either has a single value or neither varies, since the
    variance is then unknown.
    """
    if first.deviation is None or second.deviation is None:
        return None
    a = first.deviation**2 / first.count
    b = second.deviation**2 / second.count
    if a + b == 0:
        return None
    freedom = (a + b) ** 2 / (a**2 / (first.count - 1) + b**2 / (second.count - 1))
    return Welch(second.mean - first.mean, math.sqrt(a + b), freedom)


def relative_difference(first: Array, second: Array) -> Array:
    """Return |a − b| / max(|a|, |b|) of the elements a of `first` and b of `second`.

    It is 0 if both are equal or NaN, and infinite if only one is finite.
    """
    with np.errstate(all="ignore"):
        larger = np.maximum(np.abs(first), np.abs(second))
        relative = np.abs(first - second) / larger
    both_finite = np.isfinite(first) & np.isfinite(second)
    relative = np.where(both_finite, relative, np.inf)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    return np.where(same, 0.0, relative)


def reached(x: Array, y: Array, target: float) -> float:
    """Return the x at which `y` is first at or below `target`; NaN if it never is.

    It is interpolated linearly between two points.
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

    At the start, where fewer examples were seen, it is the mean over all of them.

    Args:
        examples: the number of examples seen after each value, ascending.
        values: each is a mean over the examples since the previous one; a part of
            these counts with the same mean.
        window: a number of examples.
    """
    sums = np.cumsum(np.diff(examples, prepend=0.0) * values)
    seen_from_0 = np.append(0.0, examples)
    sums_from_0 = np.append(0.0, sums)

    start = np.maximum(examples - window, 0.0)
    sums_before = np.interp(start, seen_from_0, sums_from_0)
    return (sums_from_0[1:] - sums_before) / (examples - start)


@dataclass(frozen=True)
class Tradeoff:
    """The trade-off of examples against updates, fitted by `tradeoff`."""

    fewest_examples: float  # E_min
    fewest_updates: float  # S_min

    @property
    def critical_batch(self) -> float:
        """Return E_min / S_min, where examples and updates are twice the fewest."""
        return self.fewest_examples / self.fewest_updates


def tradeoff(batches: Sequence[float], examples: Sequence[float]) -> Tradeoff | None:
    """Fit (S / S_min − 1)(E / E_min − 1) = 1 of McCandlish et al. 2018, section 2.

    See arXiv:1812.06162. With E = B · S it is the line E = E_min + S_min · B, fitted
    by least squares of the relative residuals.

    Args:
        batches: the effective batches B.
        examples: the examples E until the target, for each batch.

    Returns:
        None with fewer than three batches, or if there is no trade-off.
    """
    if len(set(batches)) < 3:
        return None
    x = np.asarray(batches, float)
    y = np.asarray(examples, float)
    fewest_updates, fewest_examples = np.polyfit(x, y, 1, w=1 / y)
    if fewest_updates <= 0 or fewest_examples <= 0:
        return None
    return Tradeoff(float(fewest_examples), float(fewest_updates))
