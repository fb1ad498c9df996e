"""The range in which a search looked for a value, and whether the best lies at its edge.

The search records the ranges in its parent run.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

# The share of an interval, at each end, that counts as its edge.
_SHARE_OF_EDGE = 0.1
# With fewer distinct values, the best one is at an edge anyway.
FEWEST_VALUES = 3


@dataclass(frozen=True)
class SearchRange:
    """The numbers that a search may choose for a key.

    Attributes:
        low: the lowest one.
        high: the highest one.
        log: whether an interval is sampled on a logarithmic scale.
        listed: whether the numbers are a list instead of an interval.
    """

    low: float
    high: float
    log: bool = False
    listed: bool = False

    def edge(self, best: float, tried: Collection[float]) -> str:
        """Return `lower` or `upper` if the best value lies at this edge, else "".

        It lies at an edge if no value beyond it was tried, and if it is the last one of
        the list, or in the last tenth of the interval.

        Args:
            best: the best value.
            tried: the values of all trials.
        """
        if len(set(tried)) < FEWEST_VALUES:
            return ""
        position = self._position(best)
        margin = 0.0 if self.listed else _SHARE_OF_EDGE
        if best <= min(tried) and position <= margin:
            return "lower"
        if best >= max(tried) and position >= 1 - margin:
            return "upper"
        return ""

    def _position(self, value: float) -> float:
        """Return where a value lies: 0 at the lower end, 1 at the upper end."""
        low = self.low
        high = self.high
        if self.log and min(low, high, value) > 0:
            low = math.log(low)
            high = math.log(high)
            value = math.log(value)
        if high == low:
            return 0.5
        return (value - low) / (high - low)


def recorded_ranges(tags: Mapping[str, str]) -> dict[str, SearchRange]:
    """Return the recorded ranges of a search, by key.

    It is empty for other sweeps, for older searches, and if the tag was edited by hand.
    """
    ranges = {}
    try:
        for key, entry in json.loads(tags["sweep.best"])["ranges"].items():
            low = float(entry["low"])
            high = float(entry["high"])
            if math.isfinite(low) and math.isfinite(high):
                log = bool(entry["log"])
                ranges[key] = SearchRange(low, high, log, bool(entry["listed"]))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}
    return ranges
