"""The child's side of a contender in a process of its own.

`processes.Process` is the parent's side. The child first writes a line of JSON with
facts about itself. For each line with a number that it reads, it runs as many updates
and writes a line with the number of their tokens. It exits when its standard input is
closed. This module imports only the standard library.
"""

from __future__ import annotations

import json
import os
import sys


class Child:
    """Counts the updates of this process and waits between its turns."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print to standard error
        self._remaining = 0
        self._tokens = 0

    def ready(self, **facts: object) -> None:
        """Send the facts about this contender, and wait for the first turn."""
        self._answer(json.dumps(facts))

    def updated(self, tokens: int = 0) -> None:
        """Count an update; after the last one of a turn, wait for the next turn.

        Args:
            tokens: of this update, if they are counted.
        """
        self._remaining -= 1
        self._tokens += tokens
        if self._remaining == 0:
            self._answer(str(self._tokens))
            self._tokens = 0

    def _answer(self, text: str) -> None:
        print(text, file=self._answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # within a library's training loop
        self._remaining = int(line)
