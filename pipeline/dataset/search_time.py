"""Limits the time of a search for data that cannot be read."""

import time

from pipeline.common.errors import say

SECONDS = 120.0  # time limit of a search, which reads the data again
SILENCE = 5.0  # seconds of searching before a message is printed


class SearchTime:
    """Measures how long a search takes, from the creation of this object on."""

    def __init__(self, announcement: str):
        self._start = time.monotonic()
        self._announcement = announcement
        self._announced = False

    def is_over(self) -> bool:
        """Return whether the time limit is exceeded.

        Once the search takes long, print the announcement.
        """
        elapsed = time.monotonic() - self._start
        if elapsed > SECONDS:
            return True
        if not self._announced and elapsed > SILENCE:
            say(self._announcement)
            self._announced = True
        return False
