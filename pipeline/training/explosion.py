"""Notices a loss that is still finite but has exploded."""

import math
from dataclasses import dataclass

FACTOR = 1e6  # a loss has exploded if it is this many times the first one
# The first loss counts as at least this, so that a run whose first loss is 0 by chance
# does not count as exploded while its loss is below 1.
LEAST_FIRST = 1e-6


@dataclass
class Explosion:
    """Compares each loss of a run with the first one, by their absolute values.

    Attributes:
        first: the first loss, or None before the first update.
        update: the first update at which the loss had exploded, or None.
    """

    first: float | None = None
    update: int | None = None

    def add(self, update: int, loss: float) -> str:
        """Take the loss of an update; return a description if it has just exploded.

        Otherwise return an empty string. A loss that is not finite is ignored.
        """
        if not math.isfinite(loss):
            return ""
        if self.first is None:
            self.first = loss
        limit = FACTOR * max(abs(self.first), LEAST_FIRST)
        if self.update is not None or abs(loss) < limit:
            return ""
        self.update = update
        return f"{loss:.3g} at update {update}; the first loss was {self.first:.3g}"
