"""Which of several workers lets the others wait.

TensorFlow sees a process that is killed or stopped, and not one that hangs. It has a time limit for a sum over all, for
which it lets a thread sleep that long for each sum of each update: thousands of them within seconds.
"""

from __future__ import annotations

import time

BEGINS = 600.0  # seconds for its first two: a store may be slow, and TensorFlow compiles
HANGS = 90.0  # seconds that a worker may let the others wait for its part of a sum


class Lag:
    """Knows of so many workers how many sums each had ready for the others, and since when one is behind."""

    def __init__(self, workers: int):
        self._counts, self._since = [0] * workers, time.monotonic()

    def note(self, worker: int, count: int) -> None:
        if self._counts[worker] == count:
            return
        least, even = min(self._counts), min(self._counts) == max(self._counts)
        self._counts[worker] = count
        if even or min(self._counts) > least:  # waiting begins, or who was waited for is here
            self._since = time.monotonic()

    def late(self) -> int | None:
        """Return the worker that the others have waited for too long; None where there is none."""
        least = min(self._counts)
        begins = least < 2  # an update may take two sums
        waiting = least < max(self._counts) and time.monotonic() - self._since > (BEGINS if begins else HANGS)
        return self._counts.index(least) if waiting else None
