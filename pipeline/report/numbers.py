"""Formats numbers and counts for people."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from pipeline.report.statistics import Spread

Scale = Callable[[float], tuple[float, str]]  # value -> divisor and unit


def plain(value: float) -> tuple[float, str]:
    return 1.0, ""


def seconds(value: float) -> tuple[float, str]:
    steps = ((7200, 3600.0, "h"), (300, 60.0, "min"), (1, 1.0, "s"), (1e-3, 1e-3, "ms"))
    return next(((by, f" {unit}") for least, by, unit in steps if abs(value) >= least), (1e-6, " µs"))


def size(value: float) -> tuple[float, str]:
    return (2.0**30, " GiB") if value >= 1000 * 2**20 else (2.0**20, " MiB")


def number(value: float, scale: Scale = plain) -> str:
    """Return `value` with four significant digits and its unit; integers are not rounded."""
    if not math.isfinite(value):
        return str(value)
    by, unit = scale(value)
    value /= by
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}{unit}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:.0f}{unit}"
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}") + unit


def spread(value: Spread, scale: Scale = plain) -> str:
    """Return `mean ± deviation` with two digits of the deviation, or just the mean of one value."""
    if value.deviation is None or not math.isfinite(value.deviation):
        return number(value.mean, scale)
    by, unit = scale(value.mean)
    mean, deviation = value.mean / by, value.deviation / by
    digits = 1 - math.floor(math.log10(deviation)) if deviation > 0 else -1
    if 0 <= digits <= 8 and abs(mean) < 1e6:
        return f"{mean:.{digits}f} ± {deviation:.{digits}f}{unit}"
    return f"{number(mean)} ± {number(deviation)}{unit}"


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def joined(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
