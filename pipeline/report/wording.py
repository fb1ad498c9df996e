"""Formats numbers, counts and lists of names."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unit:
    """A unit in which a number is written."""

    least: float  # the smallest absolute value that is written in this unit
    divisor: float  # the size of the unit
    name: str


Scale = tuple[Unit, ...]  # from the largest unit to the smallest, whose `least` is 0

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
    """Return `value` as text in the unit of `scale` that fits its size.

    Integers below a million are exact. Other values from 1,000 up to a million are
    rounded to integers, and all remaining ones to four significant digits. These limits
    are for absolute values after the conversion to the unit. A value that is not finite
    has no unit.
    """
    if not math.isfinite(value):
        return str(value)

    unit = unit_of(value, scale)
    value /= unit.divisor
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}{unit.name}"
    if 1000 <= abs(value) < 1e6:
        return f"{value:.0f}{unit.name}"
    short_exponent = re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.4g}")
    return short_exponent + unit.name


def unit_of(value: float, scale: Scale) -> Unit:
    for unit in scale:
        if abs(value) >= unit.least:
            return unit
    raise ValueError(f"no unit of the scale is for {value}")


def plus_minus(value: float, deviation: float, scale: Scale = PLAIN) -> str:
    """Return `value ± deviation`, both in the unit of the value.

    Both have as many decimals as two significant digits of the deviation need, which is
    none if the deviation in this unit is 10 or more. If the deviation is 0 or below
    1e-7, or if the magnitude of one of the two is a million or more, `number` formats
    both instead. A value that is rounded to 0 has no sign.
    """
    unit = unit_of(value, scale)
    value /= unit.divisor
    deviation /= unit.divisor
    if deviation >= 1e-7 and max(abs(value), deviation) < 1e6:
        digits = max(1 - math.floor(math.log10(deviation)), 0)
        text = f"{value:.{digits}f}"
        if float(text) == 0:
            text = text.removeprefix("-")
        return f"{text} ± {deviation:.{digits}f}{unit.name}"
    return f"{number(value)} ± {number(deviation)}{unit.name}"


def joined(names: Sequence[str], most: int = 6) -> str:
    """Join the first `most` names with commas, and add how many names remain."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def finite(value: Any) -> Any:
    """Return `value` with non-finite numbers as strings, since JSON cannot hold them.

    Containers are converted recursively: tuples become lists, and keys become strings.
    """
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
