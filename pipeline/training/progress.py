"""Shows the progress of a run on standard error.

The progress is shown as a bar on a terminal, and otherwise as a line every few seconds.
Every evaluation has a line.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from pipeline.common.errors import QUIET, say

# Minimum interval between two plain lines for updates. The last one is printed in any
# case.
SECONDS = 5.0


class Progress:
    """Shows the progress of a run.

    Args:
        updates: the number of updates in the whole run, or 0 if unknown.
        shown: whether this process shows anything.
        work: returns a number proportional to the time of the first n updates, by
            default n. Pass a function if the sizes of updates differ.

    Attributes:
        done_before: the number of updates that were completed before this process.
    """

    def __init__(
        self, updates: int, shown: bool = True, work: Callable[[int], float] = float
    ):
        self.updates = updates
        self.done_before = 0
        self._work = work
        self._silent = not shown or QUIET in os.environ
        self._total = f"/{updates}" if updates else ""
        self._on_terminal = sys.stderr.isatty()
        # Create the bar at the first update, so that it does not mix with lines printed
        # before.
        self._bar: tqdm[Any] | None = None
        now = time.monotonic()
        self._started = now
        self._compile_seconds = 0.0
        self._last_shown = now
        self._postponed = ""  # the latest line for an update, if it is not printed

    def start_clock(self) -> None:
        """Begin to count the time of updates now."""
        self._started = time.monotonic()

    def show(
        self,
        update: int,
        row: Mapping[str, float],
        examples_per_second: float | None,
        compile_seconds: float = 0.0,
    ) -> None:
        """Show the row of `update`, the last update whose results were fetched.

        Args:
            update: the number of the update.
            row: its results.
            examples_per_second: the speed, or None if all updates so far compiled.
            compile_seconds: the time that compilation has taken in this process. The
                estimate of the time that is left excludes it.
        """
        if self._silent:
            return
        self._compile_seconds = compile_seconds
        if examples_per_second is None:
            rate = "compiled"
        else:
            rate = f"{examples_per_second:,.0f} examples/s"
        if self._on_terminal:
            with suppress(OSError):  # The terminal may be closed.
                self._move_bar(update, row, rate)
        else:
            self._show_line(update, row, rate)

    def evaluated(self, split: str, update: int, results: Mapping[str, float]) -> None:
        """Show the results over the split `val` or `test`. The bar ends with `test`."""
        if self._silent:
            return
        values = [f"{split}/{name} {value:.4f}" for name, value in results.items()]
        line = f"update {update}{self._total}  {'  '.join(values)}"

        if self._bar is not None and split == "val":
            with suppress(OSError):
                self._bar.write(line, file=sys.stderr)
            return
        if split == "test":
            self.close()
        say(line)

    def close(self) -> None:
        """Close the bar.

        If the number of updates is unknown, print the postponed line: the last update
        could not be recognized before.
        """
        self._close_bar()
        if self._postponed and not self.updates:
            say(self._postponed)
        self._postponed = ""

    def _move_bar(self, update: int, row: Mapping[str, float], rate: str) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=self.updates or None,
                initial=self.done_before,
                unit="update",
                file=sys.stderr,
            )
        values = f"loss {row['loss']:.4g}, lr {row['learning_rate']:.3g}, {rate}"
        self._bar.set_postfix_str(values, refresh=False)
        self._bar.update(update - self._bar.n)

    def _show_line(self, update: int, row: Mapping[str, float], rate: str) -> None:
        now = time.monotonic()
        line = (
            f"update {update}{self._total}  loss {row['loss']:.4g}  "
            f"lr {row['learning_rate']:.3g}  {rate}"
        )
        if self.updates:
            line += f"  {self._seconds_left(update, now):.0f} s left"
        if now - self._last_shown >= SECONDS or update == self.updates:
            self._last_shown = now
            self._postponed = ""
            say(line)
        else:
            self._postponed = line

    def _seconds_left(self, update: int, now: float) -> float:
        work_done = self._work(update) - self._work(self.done_before)
        work_left = self._work(self.updates) - self._work(update)
        seconds = max(0.0, now - self._started - self._compile_seconds)
        return seconds / work_done * work_left

    def _close_bar(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
