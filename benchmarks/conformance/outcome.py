"""What came out of a case, and whether that is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.conformance.cases import Case, initial_weights

# Rounding is 2⁻⁵³ = 1e-16 an operation. A weight is a sum of some hundred terms, and moves by a tenth of itself: 1e-14
# of the change. A hundred times for that.
RIGHT = 1e-12
# Some sum the losses that they log in float32: roundings of 6e-8.
RIGHT_IN_A_LOG = 1e-6
WRAPPED = "Exception encountered when calling "  # the first line of what Keras wraps around an exception

Weights = Iterable[np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """What a library made of a case.

    Attributes:
        error: relative; None where there is nothing to compare.
        rows: logged for each update, where the case is about that.
        raised: the first sentence of what it raised.
        note: how it was called, where that is special, or why there is nothing to compare.
    """

    error: float | None = None
    rows: float | None = None
    raised: str = ""
    note: str = ""

    def verdict(self, case: Case) -> str:
        """Return `right`, `wrong`, `raises`, or `none` where a library has nothing for a case."""
        if self.raised:
            return "raises"
        if self.error is None:
            return "none"
        bound = RIGHT_IN_A_LOG if case.logged else RIGHT
        return "right" if self.error <= bound and self.rows in (None, 1) else "wrong"


Way = Callable[[Case], Outcome]


def measured(way: Way, case: Case) -> Outcome:
    """Run a case; an exception is an outcome too."""
    try:
        return way(case)
    except Exception as error:  # whatever a library raises
        lines = [
            re.sub("\x1b\\[[0-9;]*m", "", line).strip()
            for line in str(error).splitlines()
        ]
        said = [line for line in lines if line and not line.startswith(WRAPPED)]
        return Outcome(
            raised=f"{type(error).__name__}: {said[0].partition('. ')[0].strip('.') if said else ''}"[
                :200
            ]
        )


def by_weights(weights: Weights, expected: Weights, note: str = "") -> Outcome:
    """Compare weights: how far they are off ÷ how far the large batches moved them."""
    after, right, before = map(_flat, (weights, expected, initial_weights()))
    return Outcome(
        float(np.linalg.norm(after - right) / np.linalg.norm(right - before)), note=note
    )


def by_log(
    losses: Sequence[float], rows: int, expected: Sequence[float], note: str = ""
) -> Outcome:
    """Compare the last loss that was logged for each update, and count the rows."""
    errors = np.abs(np.subtract(losses, expected)) / np.abs(expected)
    return Outcome(float(errors.max()), rows / len(expected), note=note)


def _flat(weights: Weights) -> np.ndarray:
    return np.concatenate([np.asarray(each, np.float64).ravel() for each in weights])
