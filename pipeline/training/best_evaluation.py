"""The best evaluation so far, by one metric: `training.keep_best`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Best:
    """The best evaluation so far; of two equal ones, the first.

    Attributes:
        metric: its name, without `val/`.
        mode: `min` or `max`.
        value: of the metric; None before the first evaluation that gives a number.
        update: completed updates before that evaluation.
    """

    metric: str
    mode: str
    value: float | None = None
    update: int = 0

    def take(self, update: int, results: Mapping[str, float]) -> bool:
        """Return whether the evaluation after `update` updates is the best so far; if so, keep it as that."""
        value = results[self.metric]
        if math.isnan(value):
            return False
        if self.value is not None and not (value < self.value if self.mode == "min" else value > self.value):
            return False
        self.value, self.update = value, update
        return True

    def row(self) -> dict[str, float]:
        """Return what is logged of it: the metric and the update; empty if there was none."""
        return {} if self.value is None else {f"best/val/{self.metric}": self.value, "best/update": self.update}

    def get_state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "update": self.update}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `get_state` returned, unless that is of another metric or mode."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value, self.update = state["value"], state["update"]
