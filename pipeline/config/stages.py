"""Batch-size schedules, which change the effective batch size during a run."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from pipeline.common.errors import ConfigError
from pipeline.config import former_names
from pipeline.config.sizes import EFFECTIVE, LARGEST, ceil_div

SCHEDULE = "accumulation.batch_schedule"
CLOCK = "schedule.clock"
UNITS = ("updates", "examples", "epochs")
# Tag with the stages of a run as JSON: [[updates before, effective batch size], …].
STAGES = "accumulation.stages"
# Value of `Slice.read` for all examples up to the end of an epoch.
ALL = -1


class ScheduledStage(NamedTuple):
    """A stage of the schedule in the config.

    The first update of the stage is the first update that begins at `start` or later.
    """

    unit: str  # the unit of `start`, one of `UNITS`
    start: int | float
    size: int  # the effective batch size


class Stage(NamedTuple):
    """A stage of a plan: successive updates with the same effective batch size.

    A stage consists of whole epochs, or of the rest of the epoch in which it begins.
    """

    size: int  # the effective batch size
    examples: int  # number of examples per epoch
    after: int = 0  # number of updates before the stage
    epoch: int = 0  # the epoch in which the stage begins, counted from 0
    first: int = 0  # number of examples in that epoch before the stage
    number: int = 0  # number of updates in that epoch before the stage

    @property
    def in_epoch(self) -> int:
        """The number of updates per epoch in this stage."""
        return ceil_div(self.examples - self.first, self.size)

    def place(self, done: int) -> tuple[int, int, int]:
        """Return the place where the next update after `done` updates begins.

        Returns:
            The epoch, and the numbers of examples and of updates in that epoch before
            the update.
        """
        epochs, rest = divmod(done - self.after, self.in_epoch)
        return self.epoch + epochs, self.first + rest * self.size, self.number + rest

    def updates_at(self, epoch: int, first: int) -> int:
        """Return the minimum number of updates after which a place is reached.

        The place lies in `epoch`, after the first `first` examples of that epoch.
        """
        whole_epochs = (epoch - self.epoch) * self.in_epoch
        return self.after + whole_epochs - (self.first - first) // self.size

    def micro_steps(self, done: int, steps_of_batch: Callable[[int], int]) -> int:
        """Return the number of micro-steps of this stage in the first `done` updates.

        Args:
            done: number of updates since the start of the run.
            steps_of_batch: returns the number of micro-steps for a number of examples
                in an update.
        """
        epochs, rest = divmod(max(0, done - self.after), self.in_epoch)
        before_tail = self.in_epoch - 1
        tail = steps_of_batch(self.examples - self.first - before_tail * self.size)
        full_updates = epochs * before_tail + rest
        return full_updates * steps_of_batch(self.size) + epochs * tail


class Slice(NamedTuple):
    """Examples of successive epochs that are read in batches of the same size."""

    size: int  # number of examples per batch
    end: int  # the epoch after the last one
    epoch: int = 0  # the first epoch
    first: int = 0  # number of examples that are skipped in the first epoch
    read: int = ALL  # number of examples that are read per epoch


def parse_schedule(schedule: Any) -> list[ScheduledStage]:
    """Return the stages in `accumulation.batch_schedule`, or [] if it is null.

    Raises:
        ConfigError: the schedule is not a list of stages whose starts rise from 0.
    """
    if schedule is None:
        return []
    removed = former_names.removal(SCHEDULE, schedule)
    if removed is not None:
        raise removed
    if not isinstance(schedule, list) or not schedule:
        raise ConfigError(SCHEDULE, "must be null or a list of stages", schedule)

    stages: list[ScheduledStage] = []
    for number, node in enumerate(schedule):
        key = f"{SCHEDULE}[{number}]"
        stage = _asked_stage(key, node)
        start_key = f"{key}.start.{stage.unit}"
        if not stages:
            if stage.start != 0:
                rule = "must be 0, as the run begins with this stage"
                raise ConfigError(start_key, rule, stage.start)
        elif stage.start <= _least_start(stages[-1], stage.unit):
            raise ConfigError(start_key, "must rise from stage to stage", stage.start)
        stages.append(stage)
    return stages


def largest(accumulation: Mapping[str, Any], first: int) -> int:
    """Return the largest number of examples in an update.

    Args:
        accumulation: the config group.
        first: number of examples in the first update.
    """
    stages = parse_schedule(accumulation["batch_schedule"])
    return max([first, *(stage.size for stage in stages)])


def implied_values(
    config: Mapping[str, Any], replicas: int, named: Container[str]
) -> dict[str, Any]:
    """Return the config values that follow from a batch-size schedule, by dotted key.

    Args:
        config: the plain config.
        replicas: number of replicas, over all workers.
        named: keys that the command line sets.

    Raises:
        ConfigError: another key does not fit the schedule, or the schedule or the clock
            does not fit `dataset.batched`.
    """
    accumulation = config["accumulation"]
    schedule = accumulation["batch_schedule"]
    stages = parse_schedule(schedule)
    if config["dataset"].get("batched"):
        with_batches = "with dataset.batched=true"
        if schedule is not None:
            rule = f"cannot be set {with_batches}, as the batches come from the data"
            raise ConfigError(SCHEDULE, rule, schedule)
        clock = config["schedule"].get("clock")
        if clock == "examples":
            raise ConfigError(CLOCK, f"must be updates {with_batches}", clock)
    if not stages:
        return {}

    first = stages[0].size
    effective = accumulation["effective_batch_size"]
    if EFFECTIVE in named and effective not in (None, first):
        rule = f"must be left out, or be that of the first stage, {first}"
        raise ConfigError(EFFECTIVE, rule, effective)
    for number, stage in enumerate(stages):
        if stage.size < replicas:
            key = f"{SCHEDULE}[{number}].effective_batch_size"
            rule = f"must be at least the number of replicas, {replicas}"
            raise ConfigError(key, rule, stage.size)
    return {EFFECTIVE: first}


def _asked_stage(key: str, stage: Any) -> ScheduledStage:
    """Parse one entry of the schedule; `key` is the dotted name of the entry.

    Raises:
        ConfigError: the entry is not a stage, or its start or size is invalid.
    """
    start = None
    if isinstance(stage, Mapping) and {*stage} == {"start", "effective_batch_size"}:
        start = stage["start"]
    if not isinstance(start, Mapping) or len(start) != 1:
        rule = "must have the form {start: {updates: 400}, effective_batch_size: 128}"
        raise ConfigError(key, rule, stage)

    ((unit, value),) = start.items()
    if unit not in UNITS:
        raise ConfigError(f"{key}.start", "must be in a known unit", unit, UNITS)
    start_key = f"{key}.start.{unit}"
    is_fraction = unit == "epochs" and isinstance(value, float)
    if not (_is_integer(value) or is_fraction) or not value >= 0:
        rule = "must be a number of at least 0, and whole unless it counts epochs"
        raise ConfigError(start_key, rule, value)
    _check_largest(start_key, value)

    size_key = f"{key}.effective_batch_size"
    size = stage["effective_batch_size"]
    if not _is_integer(size):
        raise ConfigError(size_key, "must be an integer", size)
    if size < 1:
        raise ConfigError(size_key, "must be at least 1", size)
    _check_largest(size_key, size)
    return ScheduledStage(unit, value, size)


def _least_start(previous: ScheduledStage, unit: str) -> int | float:
    """Return the number that the start of the next stage must exceed."""
    # Starts in different units are compared later, when the length of an epoch is
    # known.
    if previous.unit == unit:
        return previous.start
    return 0


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_largest(key: str, value: int | float) -> None:
    if value > LARGEST:
        raise ConfigError(key, f"must be at most {LARGEST}", value)
