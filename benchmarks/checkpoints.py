"""What one checkpoint costs the training loop: how long it stalls, and the time that its writing takes from training.

Both contenders are `pipeline.training.loop.Trainer`. One begins each of its turns with a checkpoint and ends it when
that is written, synced and verified, so that all of it is in the turn. The difference of two turns is what one
checkpoint costs; at the default interval of `training.checkpoint_every` that is a share of five minutes at most.
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
from pipeline.checkpoints.files import AUTO_SECONDS, Checkpoints
from pipeline.checkpoints.snapshot import State
from pipeline.config.plan import Plan


def measure(name: str, rounds: int, seconds: float) -> list[Figure]:
    """The stall, the cost, and the ratio at the default interval."""
    updates = fit.updates_within(name, seconds)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Metered(Path(folder), updates, fit.plan(name))
        contenders = {
            "with": Coroutine(fit.ours(name, updates, checkpoints=checkpoints)),
            "bare": Coroutine(fit.ours(name, updates)),
        }
        alternate(contenders, 2)
        checkpoints.stalls.clear()
        times = alternate(contenders, rounds)
        for contender in contenders.values():
            contender.close()
    costs = [
        with_one - bare
        for with_one, bare in zip(times["with"], times["bare"], strict=True)
    ]
    shares = [AUTO_SECONDS / (AUTO_SECONDS + max(cost, 0)) for cost in costs]
    note = f"turns of {updates} updates"
    share = Figure(
        "checkpoints", name, "every five minutes ÷ bare", shares, at_least=0.99
    )
    if median(costs) > median(
        times["bare"]
    ):  # most of the turn is then the wait for the end of the writing
        share.at_least, share.note = (
            None,
            "at least: writing takes longer than a turn, which waits for it",
        )
    return [
        Figure(
            "checkpoints",
            name,
            "stall",
            [1e3 * stall for stall in checkpoints.stalls],
            "ms",
        ),
        Figure("checkpoints", name, "cost of one", costs, "s", note=note),
        share,
    ]


class Metered(Checkpoints):
    """Notes how long each stalls."""

    def __init__(self, folder: Path, every: int, plan: Plan):
        super().__init__(folder, every, plan)
        self.stalls: list[float] = []

    def save(
        self, update: int, capture: Callable[[], State], *, best: bool = False
    ) -> None:
        begun = time.perf_counter()
        super().save(update, capture, best=best)
        self.stalls.append(time.perf_counter() - begun)
