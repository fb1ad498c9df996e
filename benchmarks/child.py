"""A contender in a process of its own: the child's side. `turns.Process` is the parent's.

The child says what it is in a line of JSON. A line with a number lets it run as many updates, and its answer is a
line again. It ends with its standard input. Imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import sys


class Child:
    """Counts the updates of this process and waits between its turns."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a library prints is no answer
        self._left = 0

    def ready(self, **facts: object) -> None:
        """Say what is known of this contender, and wait for the first turn."""
        self._answer(json.dumps(facts))

    def updated(self) -> None:
        """Take note of an update; after the last one of a turn wait for the next turn."""
        self._left -= 1
        if self._left == 0:
            self._answer("done")

    def _answer(self, text: str) -> None:
        print(text, file=self._answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # from inside of somebody else's loop
        self._left = int(line)
