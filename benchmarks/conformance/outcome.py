"""The outcome of a case, and whether it is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.conformance.cases import Arrays, Case, initial_weights

# Rounding is 2⁻⁵³ = 1e-16 per operation. A weight is a sum of some hundred terms, and
# moves by a tenth of itself: 1e-14 of the change. The bound is a hundred times that.
RIGHT = 1e-12
# Some libraries sum the losses that they log in float32, with roundings of 6e-8.
RIGHT_IN_A_LOG = 1e-6
# The first line of what Keras wraps around an exception.
WRAPPED = "Exception encountered when calling "
LONGEST_ERROR = 200  # characters
COLOR = re.compile("\x1b\\[[0-9;]*m")

Weights = Iterable[np.ndarray]


@dataclass(frozen=True)
class LargeBatches:
    """What training on large batches gives: the expected outcome of a case.

    Attributes:
        weights: the weights after the last update.
        losses: the loss of each update.
    """

    weights: Arrays
    losses: list[float]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case with a library.

    Attributes:
        error: the relative error, or None if there is nothing to compare.
        rows: the number of rows that are logged per update, in a case about the log.
        raised: the first sentence of the exception, if there was one.
        note: how the library was called, if that is special, or why there is nothing to
            compare.
    """

    error: float | None = None
    rows: float | None = None
    raised: str = ""
    note: str = ""

    def verdict(self, case: Case) -> str:
        """Return `right`, `wrong`, `raises`, or `none` without anything to compare."""
        if self.raised:
            return "raises"
        if self.error is None:
            return "none"
        bound = RIGHT_IN_A_LOG if case.logged else RIGHT
        if self.error <= bound and self.rows in (None, 1):
            return "right"
        return "wrong"


Way = Callable[[Case], Outcome]


def measured(way: Way, case: Case) -> Outcome:
    """Run a case; an exception is an outcome too."""
    try:
        return way(case)
    except Exception as error:  # whatever a library raises
        sentence = _first_sentence(str(error))
        raised = f"{type(error).__name__}: {sentence}"
        return Outcome(raised=raised[:LONGEST_ERROR])


def by_weights(weights: Weights, expected: Weights, note: str = "") -> Outcome:
    """Compare weights: their error ÷ how far the large batches moved them."""
    after = _flat(weights)
    right = _flat(expected)
    moved = np.linalg.norm(right - _flat(initial_weights()))
    return Outcome(float(np.linalg.norm(after - right) / moved), note=note)


def by_log(
    losses: Sequence[float], rows: int, expected: Sequence[float], note: str = ""
) -> Outcome:
    """Compare the last loss that was logged for each update, and count the rows."""
    errors = np.abs(np.subtract(losses, expected)) / np.abs(expected)
    return Outcome(float(errors.max()), rows / len(expected), note=note)


def _first_sentence(message: str) -> str:
    """Return the first sentence of an exception, without what Keras puts before it."""
    for line in message.splitlines():
        text = COLOR.sub("", line).strip()
        if text and not text.startswith(WRAPPED):
            return text.partition(". ")[0].strip(".")
    return ""


def _flat(weights: Weights) -> np.ndarray:
    vectors = [np.asarray(array, np.float64).ravel() for array in weights]
    return np.concatenate(vectors)
