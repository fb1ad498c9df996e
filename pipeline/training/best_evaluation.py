"""The best evaluation so far, by one metric: `training.keep_best`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Best:
    """The best evaluation so far; of two that are equal the first one.

    Attributes:
        metric: of the validation split, without `val/`.
        mode: `min` or `max`.
        value: of the metric; None before the first evaluation that gave a number.
        update: the completed updates before that evaluation.
    """

    metric: str
    mode: str
    value: float | None = None
    update: int = 0

    def take(self, update: int, results: Mapping[str, float]) -> bool:
        """Return whether the evaluation after `update` updates is the best so far, which it then is from now on."""
        value = results[self.metric]
        if math.isnan(value):
            return False
        if self.value is not None and not (value < self.value if self.mode == "min" else value > self.value):
            return False
        self.value, self.update = value, update
        return True

    def row(self) -> dict[str, float]:
        """Return the metrics that say which it was; empty where there was none."""
        return {} if self.value is None else {f"best/val/{self.metric}": self.value, "best/update": self.update}

    def get_state(self) -> dict[str, Any]:
        """Return what a run that goes on needs, as JSON takes it."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "update": self.update}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` has returned; one of another metric or mode is left alone."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value, self.update = state["value"], state["update"]
