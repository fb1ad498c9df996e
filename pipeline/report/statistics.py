"""Statistics of a report: differences, spreads, crossings and fits; and how their numbers are written."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scale = tuple[
    tuple[float, float, str], ...
]  # units: the least value that each is for, its divisor, its name
PLAIN: Scale = ((0, 1.0, ""),)
SECONDS: Scale = (
    (7200, 3600.0, " h"),
    (300, 60.0, " min"),
    (1, 1.0, " s"),
    (1e-3, 1e-3, " ms"),
    (0, 1e-6, " µs"),
)
SIZE: Scale = ((1000 * 2**20, 2.0**30, " GiB"), (0, 2.0**20, " MiB"))


def _unit(value: float, scale: Scale) -> tuple[float, str]:
    return next((by, unit) for least, by, unit in scale if abs(value) >= least)


def number(value: float, scale: Scale = PLAIN) -> str:
    """Return `value` with four significant digits and its unit; integers are not rounded."""
    if not math.isfinite(value):
        return str(value)
    by, unit = _unit(value, scale)
    value /= by
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}{unit}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:.0f}{unit}"
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}") + unit


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def joined(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(frozen=True)
class Spread:
    """A mean over `count` seeds, and the sample standard deviation (n − 1): None for one value."""

    mean: float
    deviation: float | None
    count: int

    def text(self, scale: Scale = PLAIN) -> str:
        """Return `mean ± deviation` with two digits of the deviation, or just the mean of one value."""
        if self.deviation is None or not math.isfinite(self.deviation):
            return number(self.mean, scale)
        by, unit = _unit(self.mean, scale)
        mean, deviation = self.mean / by, self.deviation / by
        digits = 1 - math.floor(math.log10(deviation)) if deviation > 0 else -1
        if 0 <= digits <= 8 and abs(mean) < 1e6:
            return f"{mean:.{digits}f} ± {deviation:.{digits}f}{unit}"
        return f"{number(mean)} ± {number(deviation)}{unit}"


def spread(values: Sequence[float]) -> Spread | None:
    """Return mean and deviation of the finite values; None without any."""
    if not (finite := [value for value in values if math.isfinite(value)]):
        return None
    deviation = float(np.std(finite, ddof=1)) if len(finite) > 1 else None
    return Spread(float(np.mean(finite)), deviation, len(finite))


def difference(one: Spread, other: Spread) -> tuple[float, float] | None:
    """Return `other.mean − one.mean` and the half-width of its 95% interval, in the unit of the values.

    Welch's interval (Welch 1947, Biometrika 34): the variances need not be equal. None if either has a single value or
    neither varies, as the variance is then unknown.
    """
    if one.deviation is None or other.deviation is None:
        return None
    from scipy.special import (
        stdtrit,
    )  # Student's quantile; scipy.stats takes seconds to import

    a, b = one.deviation**2 / one.count, other.deviation**2 / other.count
    if a + b == 0:
        return None
    freedom = (a + b) ** 2 / (a**2 / (one.count - 1) + b**2 / (other.count - 1))
    return other.mean - one.mean, float(stdtrit(freedom, 0.975) * math.sqrt(a + b))


def differences(
    groups: Sequence[Sequence[float]], draws: int = 2000
) -> tuple[Array, Array, float]:
    """Return how far the means of the later groups are from that of the first, their standard errors, and a quantile.

    Each difference ± quantile · error is a 95% interval, all at once (Dunnett 1955). The quantile is that of the
    largest studentized difference of groups that are drawn, with a fixed seed, from the deviations of all groups: three
    values of one would give too narrow ones. It is infinite if the data leave chance unknown.
    """
    values = [np.asarray(group, float) for group in groups]
    pool = np.concatenate([group - group.mean() for group in values])
    rows = np.random.default_rng(0).choice(pool, (draws, len(pool)))
    drawn = np.split(rows, np.cumsum([len(group) for group in values])[:-1], axis=1)
    with np.errstate(all="ignore"):
        largest = np.max([abs(by) / error for by, error in _contrasts(drawn)], axis=0)
    quantile = np.quantile(
        np.where(np.isnan(largest), np.inf, largest), 0.95, method="higher"
    )
    return (*np.transpose(_contrasts(values)), float(quantile))


def _contrasts(groups: Sequence[Array]) -> list[tuple[Array, Array]]:
    """Return each mean − the first, and its standard error by the common variance, or by Welch's if that is larger."""
    freedom = max(sum(group.shape[-1] - 1 for group in groups), 1)
    common = sum(group.var(axis=-1) * group.shape[-1] for group in groups) / freedom
    of = [
        (g.mean(axis=-1), g.shape[-1], g.var(axis=-1) / max(g.shape[-1] - 1, 1))
        for g in groups
    ]
    (mean, n, own), *others = of
    return [
        (m - mean, np.sqrt(np.maximum(common * (1 / n + 1 / k), own + w)))
        for m, k, w in others
    ]


def relative_difference(one: Array, other: Array) -> Array:
    """Return |a − b| / max(|a|, |b|), elementwise: 0 if equal or both NaN, infinite if only one is finite."""
    with np.errstate(all="ignore"):
        result = np.abs(one - other) / np.maximum(np.abs(one), np.abs(other))
    result = np.where(np.isfinite(one) & np.isfinite(other), result, np.inf)
    return np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, result)


def reached(x: Array, y: Array, target: float) -> float:
    """Return the x at which `y` is first at or below `target`, interpolated linearly; NaN if it never is."""
    if not (below := y <= target).any():
        return math.nan
    index = int(below.argmax())
    if index == 0 or not math.isfinite(y[index - 1]) or y[index] == target:
        return float(x[index])
    share = (y[index - 1] - target) / (y[index - 1] - y[index])
    return float(x[index - 1] + share * (x[index] - x[index - 1]))


def trailing_mean(examples: Array, values: Array, window: float) -> Array:
    """Return the mean of `values` over the last `window` examples, or over all if there are fewer.

    `examples` are seen after each value, ascending; a value is a mean over those since the previous one, and a part of
    them has the same mean.
    """
    seen, sums = (
        np.append(0.0, examples),
        np.append(0.0, np.cumsum(np.diff(examples, prepend=0.0) * values)),
    )
    start = np.maximum(examples - window, 0.0)
    return (sums[1:] - np.interp(start, seen, sums)) / (examples - start)


def tradeoff(
    batches: Sequence[float], examples: Sequence[float]
) -> tuple[float, float] | None:
    """Fit (S/S_min − 1)(E/E_min − 1) = 1 of McCandlish et al. 2018, arXiv:1812.06162, section 2.

    With E = B·S it is the line E = E_min + S_min·B, fitted by least squares of the relative residuals. E are the
    `examples` until the target, B the effective `batches`. Returns E_min and S_min, the fewest examples and updates
    that reach the target; at the critical batch of E_min / S_min both are twice that. None with fewer than three
    batches, or without a trade-off.
    """
    if len(set(batches)) < 3:
        return None
    x, y = np.asarray(batches, float), np.asarray(examples, float)
    updates, fewest = np.polyfit(x, y, 1, w=1 / y)
    return (float(fewest), float(updates)) if updates > 0 and fewest > 0 else None
