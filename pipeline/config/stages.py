"""Batch-size schedules: how many examples an update has, from which update on."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from pipeline.common.errors import ConfigError
from pipeline.config import former_names

EFFECTIVE = "accumulation.effective_batch_size"
SCHEDULE = "accumulation.batch_schedule"
CLOCK = "schedule.clock"
UNITS = ("updates", "examples", "epochs")
STAGES = "accumulation.stages"  # the tag of a run with its stages as JSON: [[updates before, effective batch size], …]


class Asked(NamedTuple):
    """A stage as the config asks for it: its first update is the first one that begins at its start or later."""

    unit: str  # one of `UNITS`
    start: int | float
    size: int  # the effective batch size


class Stage(NamedTuple):
    """Updates of one size from one on: of whole epochs, or of the rest of the epoch inside of which it begins."""

    size: int
    examples: int  # in one epoch
    after: int = 0  # updates before it
    epoch: int = 0  # in which it begins, from 0 on
    first: int = 0  # examples of that epoch before it
    number: int = 0  # updates of that epoch before it

    @property
    def in_epoch(self) -> int:
        return -(-(self.examples - self.first) // self.size)

    def place(self, done: int) -> tuple[int, int, int]:
        """Return where the update after `done` ones begins: which epoch, and its examples and updates before it."""
        epochs, rest = divmod(done - self.after, self.in_epoch)
        return self.epoch + epochs, self.first + rest * self.size, self.number + rest

    def updates_at(self, epoch: int, first: int) -> int:
        """Return the least number of updates that reach an epoch's example."""
        return (
            self.after
            + (epoch - self.epoch) * self.in_epoch
            - (self.first - first) // self.size
        )

    def micro_steps(self, done: int, of: Callable[[int], int]) -> int:
        """Return its micro-steps up to update `done`, where an update of so many examples has `of` them."""
        epochs, rest = divmod(max(0, done - self.after), self.in_epoch)
        before_tail = self.in_epoch - 1
        tail = of(self.examples - self.first - before_tail * self.size)
        return (epochs * before_tail + rest) * of(self.size) + epochs * tail


ALL = -1


class Slice(NamedTuple):
    """Examples that are read in batches of one size: of the epochs from `epoch` on to before `end`."""

    size: int
    end: int
    epoch: int = 0
    first: int = 0  # examples of the first of these epochs that are left out
    read: int = ALL  # how many are read of each epoch; `ALL` to its end


def asked(schedule: Any) -> list[Asked]:
    """Return the stages of `accumulation.batch_schedule`; none if it is null."""
    if schedule is None:
        return []
    removed = former_names.removal(SCHEDULE, schedule)
    if removed is not None:
        raise removed
    if not isinstance(schedule, list) or not schedule:
        raise ConfigError(SCHEDULE, "must be null or a list of stages", schedule)
    found: list[Asked] = []
    for key, stage in (
        (f"{SCHEDULE}[{number}]", stage) for number, stage in enumerate(schedule)
    ):
        start = stage.get("start") if isinstance(stage, Mapping) else None
        if (
            not isinstance(start, Mapping)
            or {*stage} != {"start", "effective_batch_size"}
            or len(start) != 1
        ):
            raise ConfigError(
                key,
                "must be as {start: {updates: 400}, effective_batch_size: 128}",
                stage,
            )
        ((unit, value),), size = start.items(), stage["effective_batch_size"]
        if unit not in UNITS:
            raise ConfigError(f"{key}.start", "must be in a known unit", unit, UNITS)
        if not (
            _is_count(value)
            or (unit == "epochs" and isinstance(value, float) and 0 <= value < 2**31)
        ):
            raise ConfigError(
                f"{key}.start.{unit}",
                "must be a number of at least 0, whole but for epochs",
                value,
            )
        if not _is_count(size) or size < 1:
            raise ConfigError(f"{key}.effective_batch_size", "must be at least 1", size)
        if not found and value != 0:
            raise ConfigError(
                f"{key}.start.{unit}", "must be 0, as the run begins with it", value
            )
        if found and value <= (found[-1].start if found[-1].unit == unit else 0):
            raise ConfigError(
                f"{key}.start.{unit}", "must rise from stage to stage", value
            )
        found.append(Asked(unit, value, size))
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def largest(accumulation: Mapping[str, Any], first: int) -> int:
    """Return the most examples of an update, where the `first` stage has so many."""
    return max(
        [first, *(stage.size for stage in asked(accumulation["batch_schedule"]))]
    )


def resolved(
    config: Mapping[str, Any], replicas: int, named: Container[str]
) -> dict[str, Any]:
    """Return the keys that a batch-size schedule sets; refuse what does not go with it."""
    accumulation, clock = config["accumulation"], config["schedule"].get("clock")
    schedule = accumulation["batch_schedule"]
    batched = config["dataset"].get("batched")
    by_batches = "with dataset.batched=true"
    stages, given = (
        asked(schedule),
        accumulation["effective_batch_size"] if EFFECTIVE in named else None,
    )
    first = stages[0].size if stages else given
    refused = [
        (
            batched and schedule is not None,
            SCHEDULE,
            f"must be null {by_batches}",
            schedule,
        ),
        (
            batched and clock == "examples",
            CLOCK,
            f"must be updates {by_batches}",
            clock,
        ),
        (
            given not in (None, first),
            EFFECTIVE,
            f"must be left out, or that of the first stage, {first}",
            given,
        ),
    ]
    at_least = f"must be at least the number of replicas, {replicas}"
    for number, (_, _, size) in enumerate(stages):
        refused.append(
            (
                size < replicas,
                f"{SCHEDULE}[{number}].effective_batch_size",
                at_least,
                size,
            )
        )
    for wrong, *error in refused:
        if wrong:
            raise ConfigError(*error)
    return {EFFECTIVE: first} if stages else {}
