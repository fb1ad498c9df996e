"""The plan of a run whose data say only while they are read how many examples an update has and where an epoch ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.common.errors import ConfigError
from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching, Horizon

ENDLESS = 2**31 - 1  # updates of a run whose epochs have no known length
UNCUT = 2**30  # micro-batch size of batches that are not cut; TensorFlow counts examples in 32 bits


class Window(NamedTuple):
    """What was read for one update."""

    sizes: tuple[int, ...]  # examples of each batch
    examples_seen: int  # at its end
    epoch: int  # from 0 on
    in_epoch: int  # of the epoch's updates, from 0 on
    last: bool  # of its epoch
    digest: int  # checksum of its content


@dataclass(frozen=True)
class StreamPlan(Plan):
    """A run counted in updates that learns the sizes of its batches, and the ends of its epochs, as they are read.

    `batching` has the sizes of the first update. Ask only about updates whose batches were read.
    """

    windows: Sequence[Window] = ()  # of all updates so far, in order; it grows
    per_epoch: int | None = None  # updates of an epoch, where the data say so
    whole_epochs: int | None = None  # the horizon, where it is in epochs
    cut: bool = True  # whether micro-batches have at most `batching.micro_batch_size` examples
    _steps: list[int] = field(default_factory=list, init=False, compare=False)  # micro-steps up to each update

    @property
    def updates_per_epoch(self) -> int:
        return self.per_epoch or ENDLESS

    @property
    def epochs(self) -> int:
        return self.whole_epochs or ENDLESS

    @property
    def micro_batch_size(self) -> int:
        return self.batching.micro_batch_size if self.cut else UNCUT

    def ended(self, update: int) -> bool:
        over = update > 0 and self.ends_epoch(update) and self.windows[update - 1].epoch + 1 == self.whole_epochs
        return over or (self.whole_epochs is None and update >= self.updates)

    def place(self, done: int) -> tuple[int, int]:
        if not done:
            return 0, 0
        before = self.windows[done - 1]
        return (before.epoch + 1, 0) if before.last else (before.epoch, before.in_epoch + 1)

    def digest(self, update: int) -> int | None:
        return self.windows[update - 1].digest if update else None

    def batch_size(self, update: int) -> int:
        return sum(self.windows[update - 1].sizes)

    def examples_seen(self, update: int) -> int:
        return self.windows[update - 1].examples_seen if update else 0

    def micro_steps(self, update: int) -> int:
        while len(self._steps) < update:
            done = len(self._steps)
            sizes = (cut.micro_batch_size for last, cut in self.before if done < last)
            size = next(sizes, self.micro_batch_size)
            here = sum(-(-examples // size) for examples in self.windows[done].sizes)
            self._steps.append(here + (self._steps[-1] if done else 0))
        return self._steps[update - 1] if update else 0

    def epoch(self, update: int) -> float:
        """Return the completed epochs, with their part of the current one where the length of an epoch is known."""
        epoch, index = self.place(update)
        return epoch + (min(1.0, index / self.per_epoch) if self.per_epoch else 0.0)

    def ends_epoch(self, update: int) -> bool:
        return update > 0 and self.windows[update - 1].last

    def __str__(self) -> str:
        known = "an unknown number of" if self.per_epoch is None else self.per_epoch
        length = f"{self.whole_epochs} epochs" if self.updates == ENDLESS else f"{self.updates} in all"
        first = f"{self.batching.factor} batches, the first of {self.batching.micro_batch_size}, are an update"
        what = first if self.batching.effective_batch_size != self.batching.micro_batch_size else str(self.batching)
        return f"{what}; {known} updates per epoch, {length}"


def plan(batching: Batching, horizon: Horizon, windows: Sequence[Window], per_epoch: int | None, cut: bool) -> Plan:
    """Return the plan of a run over a stream, of `per_epoch` updates an epoch if that is known, or `ENDLESS`."""
    if horizon.unit == "examples":
        rule = "must be null: batches that the data cut have no known number of examples; set training.updates"
        raise ConfigError("training.examples", rule, horizon.length)
    in_epochs = horizon.unit == "epochs"
    if per_epoch == ENDLESS:
        if in_epochs:
            rule = "must be null where the training split repeats without an end; set training.updates"
            raise ConfigError("training.epochs", rule, horizon.length)
        per_epoch = None
    updates = horizon.length * (per_epoch or ENDLESS) if in_epochs else horizon.length
    of_data: dict[str, Any] = {"windows": windows, "per_epoch": per_epoch, "cut": cut}
    whole_epochs = horizon.length if in_epochs else None
    return StreamPlan(batching, 0, min(updates, ENDLESS), whole_epochs=whole_epochs, **of_data)
