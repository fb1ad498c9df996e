"""Shows pictures and tables after each evaluation."""

from __future__ import annotations

from typing import Any

from pipeline.common.errors import first_line, say
from pipeline.shown import drawing, encoding, tables
from pipeline.shown.collector import Collected, Collector
from pipeline.shown.functions import Functions
from pipeline.shown.plan import InputKind, ShownPlan
from pipeline.tracking.shown_files import EncodedPicture
from pipeline.tracking.tracker import Tracker

PREFIX = "shown"  # of the keys of pictures


class Show:
    """Collects what to show of an evaluation of the validation split, and logs it.

    Call `start`, `add` for each batch, `finish`, and then the object itself.

    Args:
        plan: what is shown.
        tracker: logs the pictures and tables.
        functions: the user's own functions, or None.
    """

    def __init__(self, plan: ShownPlan, tracker: Tracker, functions: Functions | None):
        self.plan = plan
        self._tracker = tracker
        self._functions = functions
        self._collector = Collector(plan)
        self._is_collected = True  # whether no batch of the evaluation has failed
        self._has_reported = False

    @property
    def collected(self) -> Collected:
        """The examples and counts of the last evaluation."""
        return self._collector.collected

    def start(self) -> None:
        """Begin an evaluation."""
        self._is_collected = True
        self._collector.start()

    def add(self, batch: Any, observation: Any) -> None:
        """Add a batch and its observation; see `Observer`."""
        if not self.plan.observes or not self._is_collected:
            return
        try:
            self._collector.add(batch, observation)
        except Exception as error:
            self._is_collected = False
            self._report(error)

    def finish(self) -> None:
        """End an evaluation, while the model still has the evaluated weights."""
        if self._functions is not None:
            self._functions.compute_outputs()

    def __call__(self, update: int) -> None:
        """Log what is shown of the evaluation after `update` updates.

        If there is an error, the run continues, nothing is shown of this evaluation,
        and the first such error is printed.
        """
        if self._tracker.has_shown(update):
            return
        try:
            pictures = {}
            names_and_tables = {}
            if self._is_collected:
                pictures = self._pictures()
                names_and_tables = self._tables()
            if self._functions is not None:
                own_pictures, own_tables = self._functions.results()
                pictures |= own_pictures
                names_and_tables |= own_tables
            pictures = {f"{PREFIX}/{name}": each for name, each in pictures.items()}
            self._tracker.show(update, pictures, names_and_tables)
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Print why something is left out, the first time."""
        if not self._has_reported:
            self._has_reported = True
            reason = f"{type(error).__name__}: {first_line(error)}"
            say(f"tracking.show is left out: {reason}")

    def _pictures(self) -> dict[str, EncodedPicture]:
        collected = self.collected
        pictures = {}
        if self.plan.shown_input.kind is InputKind.PICTURE:
            if collected.fixed:
                pictures["fixed"] = drawing.sheet(collected.fixed)
            if collected.worst:
                pictures["worst"] = drawing.sheet(collected.worst)
        if collected.confusion is not None:
            pictures["confusion"] = drawing.confusion_matrix(collected.confusion)
        if collected.reliability is not None:
            pictures["reliability"] = drawing.reliability_curve(collected.reliability)
        return {name: encoding.encoded(each) for name, each in pictures.items()}

    def _tables(self) -> dict[str, str]:
        collected = self.collected
        if not collected.fixed and not collected.worst:
            return {}
        return {"examples": tables.of_examples(collected, self.plan.shown_input)}
