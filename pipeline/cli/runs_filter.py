"""Reads from a filter string the words that `pipeline runs` shows for a status."""

import re
from dataclasses import dataclass

# The words of the list. MLflow's own, in capitals, are left to MLflow: it does not know
# `interrupted`, and calls a run whose machine died RUNNING.
WORDS = ("running", "finished", "failed", "killed", "interrupted")
# Matches a comparison of the status with one of these words.
_COMPARISON = re.compile(
    r"(?<![\w.`'\"])(?:(?:attributes?|attr|run)\.)?status\s*(!?=)\s*"
    rf"(['\"])({'|'.join(WORDS)})\2",
    re.IGNORECASE,
)
_ALWAYS_TRUE = "attributes.status LIKE '%'"


@dataclass(frozen=True)
class StatusFilter:
    """Comparisons of the status in the list.

    Attributes:
        comparisons: pairs of an operator, `=` or `!=`, and a word. All must hold.
    """

    comparisons: tuple[tuple[str, str], ...]

    def accept(self, status: str) -> bool:
        """Return whether all comparisons hold for a status of the list."""
        for operator, word in self.comparisons:
            is_equal = status == word
            if is_equal != (operator == "="):
                return False
        return True


def split(condition: str) -> tuple[str, StatusFilter | None]:
    """Split a filter string into MLflow's part and the comparisons of the status.

    The status words are those of `pipeline runs`.

    MLflow's filter strings join all comparisons by AND.

    Args:
        condition: the filter string.

    Returns:
        The filter string without comparisons of the status with words of the list, and
        these comparisons, or None if there are none.
    """
    comparisons = []

    def take(match: re.Match[str]) -> str:
        word = match[3]
        if word.isupper():
            return match[0]
        comparisons.append((match[1], word.lower()))
        return _ALWAYS_TRUE

    rest = _COMPARISON.sub(take, condition)
    if not comparisons:
        return rest, None
    return rest, StatusFilter(tuple(comparisons))
