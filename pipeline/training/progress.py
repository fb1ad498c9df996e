"""Progress of a run on standard error: a bar on a terminal, a line every few seconds elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from pipeline.common.errors import QUIET, say

SECONDS = 5.0  # between two plain lines


class Progress:
    """Shows the progress of a run of `updates` updates, 0 if unknown, of which `done` were completed before it.

    `work` of updates is what their time is proportional to, where they are of unequal sizes.
    """

    def __init__(
        self, updates: int, shown: bool = True, work: Callable[[int], float] = float
    ):
        self._work = work
        self.updates, self.done, self._silent = (
            updates,
            0,
            not shown or QUIET in os.environ,
        )
        self._of = f"/{updates}" if updates else ""
        self._on_terminal = sys.stderr.isatty()
        self._bar: tqdm[Any] | None = (
            None  # drawn with the first update: what is printed before it stays readable
        )
        self._begun = self._shown = self._evaluated = time.monotonic()
        self._held: dict[str, str] = {}  # the latest lines that were not due

    def show(
        self, update: int, row: Mapping[str, float], examples_per_second: float | None
    ) -> None:
        """Show the row of `update`, the latest one that was fetched."""
        if self._silent:
            return
        rate = (
            "compiled"
            if examples_per_second is None
            else f"{examples_per_second:,.0f} examples/s"
        )
        if self._on_terminal:
            with suppress(OSError):  # it may be closed
                self._bar = self._bar or tqdm(
                    total=self.updates or None,
                    initial=self.done,
                    unit="update",
                    file=sys.stderr,
                )
                shown = f"loss {row['loss']:.4g}, lr {row['learning_rate']:.3g}, {rate}"
                self._bar.set_postfix_str(shown, refresh=False)
                self._bar.update(update - self._bar.n)
            return
        now = time.monotonic()
        done, here, all_of_it = map(self._work, (self.done, update, self.updates))
        left = (now - self._begun) / (here - done) * (all_of_it - here)
        remaining = f"  {left:.0f} s left" if self.updates else ""
        line = f"update {update}{self._of}  loss {row['loss']:.4g}  lr {row['learning_rate']:.3g}  {rate}{remaining}"
        if now - self._shown >= SECONDS or update == self.updates:
            self._shown = now
            self._say("train", line)
        else:
            self._held["train"] = line

    def evaluated(self, split: str, update: int, results: Mapping[str, float]) -> None:
        """Show the results over a split: `test`, which is the last, or `val`, above the bar or every few seconds."""
        if self._silent:
            return
        values = "  ".join(
            f"{split}/{name} {value:.4f}" for name, value in results.items()
        )
        line = f"update {update}{self._of}  {values}"
        if self._bar is not None and split == "val":
            self._held.pop(split, None)
            with suppress(OSError):
                self._bar.write(line, file=sys.stderr)
        elif (
            split == "test"
            or update == self.updates
            or time.monotonic() - self._evaluated >= SECONDS
        ):
            self.close() if split == "test" else self._end_bar()
            self._evaluated = time.monotonic()
            self._say(split, line)
        else:
            self._held[split] = line

    def close(self) -> None:
        """End the bar's line; show what was held back of a run that did not know its last update."""
        self._end_bar()
        say(*([] if self.updates else self._held.values()))
        self._held.clear()

    def _say(self, kind: str, line: str) -> None:
        self._held.pop(kind, None)
        say(line)

    def _end_bar(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
