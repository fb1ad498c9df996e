"""Batch-size schedules: how many examples an update has, from which update on.

A stage begins where it is asked to, in updates, examples or epochs, with the first update that begins there or later.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from pipeline.common.errors import ConfigError

SCHEDULE = "accumulation.schedule"
SEESAW_MAX = "accumulation.seesaw_max"
CLOCK = "schedule.clock"
SEESAW = "seesaw"
UNITS = ("updates", "examples", "epochs")
LARGEST = 2**31 - 1  # of a count
STAGES = "accumulation.stages"  # the tag of a run with its stages as JSON, [[updates before, effective batch size], …]


class Asked(NamedTuple):
    """A stage as the config asks for it."""

    unit: str  # one of `UNITS`
    start: int | float
    size: int  # the effective batch size

    def examples(self, in_epoch: int) -> int:
        """Return the examples before it, of `in_epoch` in an epoch; a decimal share of an epoch is exact."""
        return -int(-Fraction(str(self.start)) * (in_epoch if self.unit == "epochs" else 1) // 1)


class Place(NamedTuple):
    """Where an update begins."""

    epoch: int  # from 0 on
    first: int  # examples of the epoch before it
    index: int  # updates of the epoch before it


@dataclass(frozen=True)
class Stage:
    """Updates of one effective batch size, from one on until the next stage."""

    size: int
    examples: int  # in one epoch
    after: int = 0  # updates before it
    begin: Place = Place(0, 0, 0)

    @property
    def in_first_epoch(self) -> int:
        """Return the updates that it has to the end of the epoch in which it begins."""
        return -(-(self.examples - self.begin.first) // self.size)

    @property
    def per_epoch(self) -> int:
        return -(-self.examples // self.size)

    def place(self, done: int) -> Place:
        """Return where the update after `done` ones begins."""
        here = done - self.after
        if here < self.in_first_epoch:
            return Place(self.begin.epoch, self.begin.first + here * self.size, self.begin.index + here)
        epochs, index = divmod(here - self.in_first_epoch, self.per_epoch)
        return Place(self.begin.epoch + 1 + epochs, index * self.size, index)

    def updates_at(self, examples: int) -> int:
        """Return the least number of updates after which so many examples were seen."""
        epoch, rest = divmod(examples, self.examples)
        if epoch == self.begin.epoch:
            return self.after - (self.begin.first - rest) // self.size
        epochs = epoch - self.begin.epoch - 1
        return self.after + self.in_first_epoch + epochs * self.per_epoch - (-rest // self.size)

    def micro_steps(self, done: int, of: Callable[[int], int]) -> int:
        """Return its micro-steps up to update `done`, where an update of so many examples has `of` them."""

        def to_the_end(updates: int, examples: int) -> int:  # of an epoch
            return (updates - 1) * of(self.size) + of(examples - (updates - 1) * self.size)

        here = max(0, done - self.after)
        if here < self.in_first_epoch:
            return here * of(self.size)
        epochs, rest = divmod(here - self.in_first_epoch, self.per_epoch)
        head = to_the_end(self.in_first_epoch, self.examples - self.begin.first)
        return head + epochs * to_the_end(self.per_epoch, self.examples) + rest * of(self.size)


class EpochCut(NamedTuple):
    """How some epochs are cut into effective batches."""

    epoch: int  # the first one; only of it examples are left out, or batches of several sizes
    end: int  # the first one that is cut otherwise
    sizes: tuple[tuple[int, int], ...]  # from which example on batches have so many examples


def asked(schedule: Any) -> list[Asked]:
    """Return the stages of `accumulation.schedule`; none where it is null or follows from the learning rate."""
    if schedule is None or schedule == SEESAW:
        return []
    if not isinstance(schedule, list) or not schedule:
        raise ConfigError(SCHEDULE, "must be null, seesaw or a list of stages", schedule)
    found = [_asked(f"{SCHEDULE}[{number}]", stage) for number, stage in enumerate(schedule)]
    if found[0].start != 0:
        raise ConfigError(f"{SCHEDULE}[0].start", "must be 0, as the run begins with it", found[0].start)
    for number, (before, stage) in enumerate(zip(found, found[1:], strict=False), 1):
        if stage.start <= (before.start if before.unit == stage.unit else 0):
            raise ConfigError(f"{SCHEDULE}[{number}].start.{stage.unit}", "must rise from stage to stage", stage.start)
    return found


def _asked(key: str, stage: Any) -> Asked:
    if not isinstance(stage, Mapping) or {*stage} != {"start", "effective_batch_size"}:
        rule = "must have a start and an effective_batch_size: {start: {updates: 400}, effective_batch_size: 128}"
        raise ConfigError(key, rule, stage)
    start, size = stage["start"], stage["effective_batch_size"]
    if not isinstance(start, Mapping) or len(start) != 1 or {*start} - {*UNITS}:
        raise ConfigError(f"{key}.start", "must have one unit, such as {updates: 400}", start, UNITS)
    ((unit, value),) = start.items()
    kinds = int | float if unit == "epochs" else int
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= LARGEST:
        words = "a number of at least 0" if unit == "epochs" else "a whole number of at least 0"
        raise ConfigError(f"{key}.start.{unit}", f"must be {words}", value)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LARGEST:
        raise ConfigError(f"{key}.effective_batch_size", "must be at least 1", size)
    return Asked(str(unit), value, size)


def largest(accumulation: Mapping[str, Any], first: int) -> int:
    """Return the most examples of an update, where the `first` stage has so many; of `seesaw` the most it may reach."""
    if accumulation["schedule"] == SEESAW:
        while 2 * first <= accumulation["seesaw_max"]:
            first *= 2
    return max([first, *(stage.size for stage in asked(accumulation["schedule"]))])


def resolved(config: Mapping[str, Any], unit: str, replicas: int, named: Container[str]) -> dict[str, Any]:
    """Return the values by dotted key that a batch-size schedule sets; refuse what it cannot be combined with.

    `config` is plain, `unit` that of the horizon, and `named` are the keys of the command line.
    """
    accumulation, clock, batched = config["accumulation"], config["schedule"].get("clock"), "dataset.batched=true"
    schedule, most, size_key = accumulation["schedule"], accumulation["seesaw_max"], "accumulation.effective_batch_size"
    if config["dataset"].get("batched") and (schedule is not None or clock == "examples"):
        key, must = (CLOCK, "updates") if schedule is None else (SCHEDULE, "null")
        raise ConfigError(key, f"must be {must} with {batched}: batches have any size", schedule or clock)
    if schedule != SEESAW and most is not None:
        raise ConfigError(SEESAW_MAX, f"must be null without {SCHEDULE}={SEESAW}", most)
    stages = asked(schedule)
    for number, stage in enumerate(stages):
        if stage.size < replicas:
            rule = f"must be at least the number of replicas, {replicas}"
            raise ConfigError(f"{SCHEDULE}[{number}].effective_batch_size", rule, stage.size)
    if stages:
        given = accumulation["effective_batch_size"] if size_key in named else None
        if given not in (None, stages[0].size):
            raise ConfigError(size_key, f"must be left out, or that of the first stage, {stages[0].size}", given)
        return {size_key: stages[0].size}
    if schedule != SEESAW:
        return {}
    if most is None:
        raise ConfigError(SEESAW_MAX, f"must be given with {SCHEDULE}={SEESAW}: the largest effective batch")
    if unit == "updates":
        rule = f"must be null with {SCHEDULE}={SEESAW}, whose updates follow: set training.epochs or training.examples"
        raise ConfigError("training.updates", rule, config["training"]["updates"])
    if clock == "updates" and CLOCK in named:
        raise ConfigError(CLOCK, f"must be examples with {SCHEDULE}={SEESAW}", clock)
    if accumulation["scale_rate"] is not True:
        raise ConfigError("accumulation.scale_rate", f"must be true with {SCHEDULE}={SEESAW}", False)
    return {CLOCK: "examples"}
