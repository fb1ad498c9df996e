"""Which of several workers the others wait for.

TensorFlow notices a worker that is killed or stopped, but not one that hangs. Its time limit for an all-reduce costs a
sleeping thread for each reduction of each update: thousands within seconds. So the workers tell each other how many
all-reduces they were ready for; the lowest count names the straggler.
"""

import time

STARTUP_TIMEOUT = 600.0  # seconds for the first two all-reduces: a store may be slow, and TensorFlow compiles
TIMEOUT = 90.0  # seconds that a worker may keep the others waiting for its part of an all-reduce


class ReductionCounts:
    """The number of all-reduces that each of `workers` was ready for, and since when one of them is behind."""

    def __init__(self, workers: int):
        self._counts, self._since = [0] * workers, time.monotonic()

    def note(self, worker: int, count: int) -> None:
        if self._counts[worker] == count:
            return
        least, even = min(self._counts), min(self._counts) == max(self._counts)
        self._counts[worker] = count
        if even or min(self._counts) > least:  # the waiting begins, or the last worker has caught up
            self._since = time.monotonic()

    def straggler(self) -> int | None:
        """Return the worker that has kept the others waiting for too long; None if there is none."""
        least = min(self._counts)
        timeout = STARTUP_TIMEOUT if least < 2 else TIMEOUT  # an update may take two all-reduces
        waiting = least < max(self._counts) and time.monotonic() - self._since > timeout
        return self._counts.index(least) if waiting else None
