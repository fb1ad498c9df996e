"""Figures of `benchmarks/gpu.py` that compare the results of two processes.

This module imports no TensorFlow: the parent process compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.figures import Figure

UPDATES = 20  # of a trajectory
TINY_UPDATES = 4
FEWER_MICRO_BATCHES = 2
MORE_MICRO_BATCHES = 64


@dataclass(frozen=True)
class Trained:
    """A network and its weights after some updates."""

    name: str
    weights: list[np.ndarray]


@dataclass(frozen=True)
class MemoryUse:
    """The peak of a process, and the effective batch on the host, in bytes."""

    peak: int
    batch: int


def updates(tiny: bool) -> int:
    """Return how many updates a trajectory has."""
    return TINY_UPDATES if tiny else UPDATES


def equal(
    _: str, ours: Sequence[Trained], reference: Sequence[Trained], tiny: bool
) -> list[Figure]:
    """Return the largest difference of a weight of each network."""
    what = f"largest difference of a weight after {updates(tiny)} updates"
    figures = []
    for network, expected in zip(ours, reference, strict=True):
        difference = largest_difference(network.weights, expected.weights)
        figures.append(Figure("equal", network.name, what, [difference], at_most=1e-10))
    return figures


def repeatable(
    _: str, first: Sequence[Trained], second: Sequence[Trained], tiny: bool
) -> list[Figure]:
    """Return how many weights of each network differ in any bit."""
    what = f"weights that differ after {updates(tiny)} updates"
    figures = []
    for network, again in zip(first, second, strict=True):
        differing = 0
        for array, other in zip(network.weights, again.weights, strict=True):
            differing += int(np.sum(array.view(np.uint32) != other.view(np.uint32)))
        figures.append(Figure("repeatable", network.name, what, [differing], at_most=0))
    return figures


def memory(
    name: str, fewer: Sequence[MemoryUse], more: Sequence[MemoryUse], tiny: bool
) -> list[Figure]:
    """Return the growth of the peak.

    The batch is subtracted only if the growth shows that it is on the device.
    """
    (least,) = fewer
    (most,) = more
    growth = most.peak - least.peak
    batch_growth = most.batch - least.batch
    if growth > batch_growth / 2:
        growth -= batch_growth

    target = None if tiny else 1.0
    note = (
        f"{least.peak / 1e6:,.0f} → {most.peak / 1e6:,.0f} MB; "
        f"the batch is {batch_growth / 1e6:,.1f} MB larger"
    )
    return [
        Figure(
            "memory",
            name,
            f"growth of the peak, factor {FEWER_MICRO_BATCHES} to {MORE_MICRO_BATCHES}",
            [100 * growth / least.peak],
            unit="%",
            at_most=target,
            note=note,
        )
    ]


def largest_difference(
    weights: Sequence[np.ndarray], others: Sequence[np.ndarray]
) -> float:
    """Return the largest difference; NaN if there is a NaN."""
    differences = []
    for array, other in zip(weights, others, strict=True):
        differences.append(np.max(np.abs(array - other), initial=0.0))
    # NumPy's largest of anything and NaN is NaN.
    return float(np.max(differences))


# By part: called with the subject, the results of both sides, and `tiny`.
COMPARISONS: dict[str, Callable[..., list[Figure]]] = {
    "equal": equal,
    "repeatable": repeatable,
    "memory": memory,
}
