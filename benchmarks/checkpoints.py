"""What one checkpoint costs the training loop: how long it stalls, and the seconds.

Both contenders are `pipeline.training.loop.Trainer`. One begins each of its turns with
a checkpoint and ends it when that is written, synced and verified, so that all of it is
in the turn. The difference of two turns is what one checkpoint costs. At the default
interval of `training.checkpoint_every` that is a share of five minutes at most.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks import fit
from benchmarks.figures import Figure
from benchmarks.turns import Coroutine, alternate
from benchmarks.workloads import Workload
from pipeline.checkpoints.files import AUTO_SECONDS, Checkpoints
from pipeline.checkpoints.snapshot import Snapshot
from pipeline.config.plan import Plan


def measure(workload: Workload, rounds: int, seconds: float) -> list[Figure]:
    """Return the stall, the cost, and the ratio at the default interval."""
    updates = fit.updates_within(workload, seconds)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = TimedCheckpoints(Path(folder), updates, fit.plan(workload))
        contenders = {
            "with": Coroutine(fit.ours(workload, updates, checkpoints=checkpoints)),
            "bare": Coroutine(fit.ours(workload, updates)),
        }
        alternate(contenders, 2)
        checkpoints.stalls.clear()
        times = alternate(contenders, rounds)
        for contender in contenders.values():
            contender.close()

    costs = []
    for with_checkpoint, bare in zip(times["with"], times["bare"], strict=True):
        costs.append(with_checkpoint - bare)
    shares = [AUTO_SECONDS / (AUTO_SECONDS + max(cost, 0)) for cost in costs]

    target: float | None = 0.99
    note = ""
    # Then most of the turn is the wait for the end of the writing.
    if median(costs) > median(times["bare"]):
        target = None
        note = "at least: writing takes longer than a turn, which waits for it"
    return [
        Figure(
            "checkpoints",
            workload.name,
            "stall",
            [1e3 * stall for stall in checkpoints.stalls],
            unit="ms",
        ),
        Figure(
            "checkpoints",
            workload.name,
            "cost of one",
            costs,
            unit="s",
            note=f"turns of {updates} updates",
        ),
        Figure(
            "checkpoints",
            workload.name,
            "every five minutes ÷ bare",
            shares,
            at_least=target,
            note=note,
        ),
    ]


class TimedCheckpoints(Checkpoints):
    """Measures how long each checkpoint stalls the loop."""

    def __init__(self, folder: Path, every: int, plan: Plan):
        super().__init__(folder, every, plan)
        self.stalls: list[float] = []

    def save(
        self, update: int, capture: Callable[[], Snapshot], *, best: bool = False
    ) -> None:
        begun = time.perf_counter()
        super().save(update, capture, best=best)
        self.stalls.append(time.perf_counter() - begun)
