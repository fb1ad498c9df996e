"""The plan of a run: its length in updates, and the counters after each update."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple, Self

from pipeline.common.errors import ConfigError, count
from pipeline.config.sizes import Batching, Horizon, ceil_div
from pipeline.config.stages import SCHEDULE, ScheduledStage, Slice, Stage

# Tag with the cuts of a run whose micro-batches were halved, in words.
HALVED = "micro_batch_size.halved"
# Tag with the same cuts as JSON: [[limit of a micro-batch, last update], …]. The limit
# is in tokens if batches are cut by tokens, else in examples. The last update of the
# last cut is null.
CUTS = f"{HALVED}.json"
# Number of updates that stands for an unknown or unlimited number.
ENDLESS = 2**31 - 1
# Micro-batch size for batches that are not cut. It is larger than any batch, and fits
# into the 32 bits in which TensorFlow counts examples.
UNCUT = 2**30


@dataclass(frozen=True)
class RunPlan(ABC):
    """The length of a run in updates, and the counters after each update.

    This is what the training loop, the record and the checkpoints need of a plan.

    Attributes:
        batching: how effective batches are currently cut. If their size changes, this
            is the cut of the first one.
        examples: number of examples per epoch; 0 if it is unknown.
        updates: number of updates in the run.
        before: earlier cuts, each as a pair: the last update with this cut, and the
            cut.
    """

    batching: Batching
    examples: int
    updates: int
    before: tuple[tuple[int, Batching], ...] = ()

    def halved(self, update: int, limit: int) -> Self:
        """Return the plan of a run whose micro-batches change after `update`.

        `limit` is their new `Batching.limit`.
        """
        # Do not change an earlier cut: updates that are repeated keep their counters.
        update = max([update, *(last for last, _ in self.before)])
        before = (*self.before, (update, self.batching))
        batching = self.batching.with_limit(limit)
        return replace(self, batching=batching, before=before)

    @property
    def tags(self) -> dict[str, str]:
        """The tags of a run whose micro-batches were halved.

        One tag has the cuts in words, the other as JSON; `recorded_cuts` reads both.
        """
        phrases = []
        cuts: list[tuple[int, int | None]] = []
        unit = "" if self.batching.micro_batch_tokens is None else " tokens"
        for last, cut in self.before:
            phrases.append(f"{cut.limit}{unit} up to update {last}")
            cuts.append((cut.limit, last))
        phrases.append(f"{self.batching.limit}{unit} then")
        cuts.append((self.batching.limit, None))
        return {HALVED: ", ".join(phrases), CUTS: json.dumps(cuts)}

    def after(self, cuts: Sequence[tuple[int, int | None]], update: int) -> Self:
        """Return the plan of a run that resumes after `update`.

        Args:
            cuts: the `recorded_cuts` of the run, which were in force up to `update`.
            update: the last update that the run has recorded.
        """
        end = max([update, *(last for _, last in cuts if last is not None)])
        before = []
        for limit, last in cuts:
            if last is None:
                last = end
            before.append((last, self.batching.with_limit(limit)))
        return replace(self, before=tuple(before))

    @property
    def micro_batch_size(self) -> int:
        """The largest number of examples in a micro-batch."""
        return self.batching.micro_batch_size

    @property
    @abstractmethod
    def changes(self) -> list[tuple[int, int]]:
        """Pairs of a number of updates and the effective batch size after them.

        The first pair is 0 and the initial size. Each further pair is a change of the
        size. Without a schedule of sizes, the list is empty.
        """

    @property
    @abstractmethod
    def updates_per_epoch(self) -> int:
        """The number of updates per epoch, in the first stage if there are several.

        It is `ENDLESS` if it is unknown.
        """

    @property
    @abstractmethod
    def epochs(self) -> int:
        """The number of epochs in the run, including an incomplete last one.

        It is `ENDLESS` if it is unknown.
        """

    @abstractmethod
    def ended(self, update: int) -> bool:
        """Return whether the run is complete after `update`."""

    @abstractmethod
    def place(self, done: int) -> tuple[int, int]:
        """Return the epoch and the index in the epoch of the next update.

        Both count from 0. The next update is the one after `done` updates.
        """

    @abstractmethod
    def digest(self, update: int) -> int | None:
        """Return a number by which a resumed run checks that its data is the same.

        Runs with different batches up to `update` have different numbers. Return None
        if there is nothing to check.
        """

    @abstractmethod
    def batch_size(self, update: int) -> int:
        """Return the number of examples in `update`; updates count from 1."""

    @abstractmethod
    def examples_seen(self, update: int) -> int:
        """Return the number of examples in the first `update` updates."""

    @abstractmethod
    def micro_steps(self, update: int) -> int:
        """Return the micro-steps per replica in the first `update` updates.

        In a cut by tokens they are counted instead: see `Recorder`.
        """

    @abstractmethod
    def epoch(self, update: int) -> float:
        """Return the number of epochs in the first `update` updates, as a fraction."""

    @abstractmethod
    def ends_epoch(self, update: int) -> bool:
        """Return whether `update` is the last update of its epoch."""


@dataclass(frozen=True)
class Plan(RunPlan):
    """A plan that follows from the config and the number of examples.

    Attributes:
        stages: the stages of the batch-size schedule; empty if there is no schedule.
    """

    stages: tuple[Stage, ...] = ()

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """The stages. Without a schedule, one stage covers the whole run."""
        if self.stages:
            return self.stages
        return (Stage(self.batching.effective_batch_size, self.examples),)

    @property
    def changes(self) -> list[tuple[int, int]]:
        changes = []
        size = 0
        for stage in self.stages:
            if stage.size != size:
                changes.append((stage.after, stage.size))
            size = stage.size
        return changes

    @property
    def updates_per_epoch(self) -> int:
        return self.all_stages[0].in_epoch

    @property
    def epochs(self) -> int:
        epoch, _ = self.place(self.updates - 1)
        return epoch + 1

    def ended(self, update: int) -> bool:
        return update >= self.updates

    def stage(self, done: int) -> Stage:
        """Return the stage of the next update after `done` updates."""
        return next(stage for stage in reversed(self.all_stages) if stage.after <= done)

    def place(self, done: int) -> tuple[int, int]:
        epoch, _, index = self.stage(done).place(done)
        return epoch, index

    def digest(self, update: int) -> int | None:
        # Without a schedule, the config alone determines the data.
        return self.examples_seen(update) if self.stages else None

    def batch_size(self, update: int) -> int:
        # The last update of an epoch, the tail, may be smaller.
        stage = self.stage(update - 1)
        return min(stage.size, self.examples - stage.place(update - 1)[1])

    def examples_seen(self, update: int) -> int:
        epoch, first, _ = self.stage(update).place(update)
        return epoch * self.examples + first

    def updates_at(self, examples: int) -> int:
        """Return the minimum number of updates that see `examples` examples."""
        place = divmod(examples, self.examples)
        stage = next(
            stage
            for stage in reversed(self.all_stages)
            if (stage.epoch, stage.first) <= place
        )
        return stage.updates_at(*place)

    def slices(self, done: int) -> list[Slice]:
        """Return the slices of the data that the run reads after `done` updates.

        All batches of a slice have the same size. At the end of the run, the list has
        one slice without examples.
        """
        # For each size, the place where it ends: the epoch, and the number of examples
        # in that epoch before the place.
        sizes = [self.stage(done).size]
        ends = []
        for after, size in self.changes:
            if done < after < self.updates:
                sizes.append(size)
                ends.append(self.stage(after).place(after)[:2])
        ends.append((self.epochs, 0))

        slices = []
        epoch, first, _ = self.stage(done).place(done)
        for size, (end_epoch, end_example) in zip(sizes, ends, strict=True):
            if epoch < end_epoch:
                slices.append(Slice(size, end_epoch, epoch, first))
                first = 0
            # The size changes within an epoch: read the epoch's beginning with this
            # size.
            if first < end_example:
                read = end_example - first
                slices.append(Slice(size, end_epoch + 1, end_epoch, first, read))
            epoch = end_epoch
            first = end_example

        if not slices:
            return [Slice(sizes[-1], epoch, epoch)]
        return slices

    def micro_steps(self, update: int) -> int:
        steps = 0
        done = 0
        for last, cut in (*self.before, (update, self.batching)):
            last = min(last, update)
            steps += self._micro_steps(last, cut) - self._micro_steps(done, cut)
            done = last
        return steps

    def _micro_steps(self, update: int, cut: Batching) -> int:
        """Return the number of micro-steps per replica in the first `update` updates.

        The result is as if `cut` applied to all of these updates.
        """

        def steps_of_batch(examples: int) -> int:
            return ceil_div(ceil_div(examples, cut.replicas), cut.micro_batch_size)

        steps = 0
        ends = [*(stage.after for stage in self.all_stages[1:]), update]
        for stage, end in zip(self.all_stages, ends, strict=True):
            steps += stage.micro_steps(min(end, update), steps_of_batch)
        return steps

    def epoch(self, update: int) -> float:
        return self.examples_seen(update) / self.examples

    def ends_epoch(self, update: int) -> bool:
        return self.stage(update).place(update)[1] == 0

    def __str__(self) -> str:
        cuts = str(self.batching)
        is_resized = False
        for after, size in self.changes[1:]:
            if after < self.updates:
                cut = self.batching.with_effective_batch_size(size)
                factor = f" (factor {cut.factor})"
                if cut.micro_batch_tokens is not None:
                    factor = ""
                cuts += f", {size}{factor} after update {after}"
                is_resized = True

        per_epoch = f"{count(self.updates_per_epoch, 'update')} per epoch"
        tail = self.examples % self.batching.effective_batch_size
        if tail:
            per_epoch += f" (last one {tail})"
        if is_resized:
            per_epoch += " at first"
        examples = count(self.examples, "example")
        return f"{cuts}; {examples} → {per_epoch}, {self.updates} in all"


def recorded_cuts(tags: Mapping[str, str]) -> list[tuple[int, int | None]]:
    """Return the limits of a recorded run's micro-batches, each with its last update.

    For the last limit, the update is None. The list is empty if micro-batches were never
    halved.
    """
    if CUTS in tags:
        return [(limit, last) for limit, last in json.loads(tags[CUTS])]
    if HALVED not in tags:
        return []

    # Old runs have no JSON: parse the words, such as `32 up to update 40, 16 then`.
    cuts: list[tuple[int, int | None]] = []
    for text in tags[HALVED].split(", "):
        size, *_, last = text.split()
        if last.isdecimal():
            cuts.append((int(size), int(last)))
        else:
            cuts.append((int(size), None))
    return cuts


def plan_of(
    batching: Batching,
    examples: int,
    horizon: Horizon,
    stages: Sequence[ScheduledStage] = (),
) -> Plan:
    """Return the plan of a run, with its horizon and stages in whole updates.

    Args:
        batching: how an effective batch of the first stage is cut.
        examples: number of examples per epoch.
        horizon: length of the run. Examples are rounded up to whole updates.
        stages: the stages of the batch-size schedule; empty without a schedule.

    Raises:
        ConfigError: an effective batch is larger than the training split, or a stage
            does not begin after the previous stage.
    """
    plan = Plan(batching, examples, 0)
    if stages:
        plan = replace(plan, stages=_stages_in_updates(plan, stages))
    else:
        _check_size("accumulation", batching.effective_batch_size, examples)

    if horizon.unit == "updates":
        return replace(plan, updates=horizon.length)
    length = horizon.length
    if horizon.unit == "epochs":
        length *= examples
    return replace(plan, updates=plan.updates_at(length))


def _stages_in_updates(
    plan: Plan, stages: Sequence[ScheduledStage]
) -> tuple[Stage, ...]:
    """Convert the stages of the config to the stages of a plan.

    A stage of the config that begins within an epoch becomes two stages of the plan:
    the rest of that epoch, and the epochs after it.

    Raises:
        ConfigError: an effective batch is larger than the training split, or a stage
            does not begin after the previous stage.
    """
    last = -1
    for number, (unit, start, size) in enumerate(stages):
        key = f"{SCHEDULE}[{number}]"
        _check_size(key, size, plan.examples)
        after = _updates_before(plan, unit, start)
        if after <= last:
            rule = (
                f"must be later than update {last + 1}, with which the previous stage "
                "begins"
            )
            raise ConfigError(f"{key}.start.{unit}", rule, start)
        last = after

        # Drop the second part of the previous stage if this stage begins before it.
        planned = [stage for stage in plan.stages if stage.after < after]
        epoch, first, index = plan.stage(after).place(after)
        stage = Stage(size, plan.examples, after, epoch, first, index)
        planned.append(stage)
        if first:
            next_epoch = after + stage.in_epoch
            planned.append(Stage(size, plan.examples, next_epoch, epoch + 1))
        plan = replace(plan, stages=tuple(planned))
    return plan.stages


def _updates_before(plan: Plan, unit: str, start: int | float) -> int:
    """Return the number of updates before a stage that begins at `start`, in `unit`."""
    if unit == "updates":
        return int(start)
    # Compute with fractions: in floats, 0.07 · 100 is more than 7.
    examples = Fraction(str(start))
    if unit == "epochs":
        examples *= plan.examples
    return plan.updates_at(math.ceil(examples))


def _check_size(key: str, size: int, examples: int) -> None:
    """Reject an effective batch that is larger than the `examples` in an epoch."""
    if size > examples:
        rule = f"must be at most the {examples} examples of the training split"
        raise ConfigError(f"{key}.effective_batch_size", rule, size)


class Window(NamedTuple):
    """The batches of one update, and the update's place in the run."""

    sizes: tuple[int, ...]  # number of examples in each batch
    examples_seen: int  # number of examples up to the end of the update
    epoch: int  # epoch of the update, counted from 0
    in_epoch: int  # index of the update in its epoch, counted from 0
    last: bool  # whether the update is the last one of its epoch
    digest: int  # checksum of the batches


@dataclass(frozen=True)
class StreamPlan(RunPlan):
    """A plan whose batch sizes and epochs become known only as the data is read.

    `batching` has the sizes of the first update. The counters of an update are
    available once its batches were read.

    Attributes:
        windows: the batches of each update so far, in order; the sequence grows.
        per_epoch: number of updates per epoch; None if it is unknown.
        whole_epochs: the horizon in epochs; None if it is in updates.
        cut: whether batches are cut into micro-batches of at most
            `batching.micro_batch_size` examples.
    """

    windows: Sequence[Window] = ()
    per_epoch: int | None = None
    whole_epochs: int | None = None
    cut: bool = True
    # `_steps[n]` is the number of micro-steps in the first n updates. The list is a
    # cache that grows as `windows` does, so it is not part of the plan's value.
    _steps: list[int] = field(default_factory=lambda: [0], init=False, compare=False)

    @property
    def changes(self) -> list[tuple[int, int]]:
        return []  # a stream has no schedule

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
        if self.whole_epochs is None:
            return update >= self.updates
        if not self.ends_epoch(update):
            return False
        return self.windows[update - 1].epoch + 1 == self.whole_epochs

    def place(self, done: int) -> tuple[int, int]:
        if not done:
            return 0, 0
        previous = self.windows[done - 1]
        if previous.last:
            return previous.epoch + 1, 0
        return previous.epoch, previous.in_epoch + 1

    def digest(self, update: int) -> int | None:
        # The checksum of the batches of the last update.
        return self.windows[update - 1].digest if update else None

    def batch_size(self, update: int) -> int:
        return sum(self.windows[update - 1].sizes)

    def examples_seen(self, update: int) -> int:
        return self.windows[update - 1].examples_seen if update else 0

    def micro_steps(self, update: int) -> int:
        for done in range(len(self._steps) - 1, update):
            size = self._micro_batch_size_after(done)
            steps = self._steps[-1]
            for examples in self.windows[done].sizes:
                steps += ceil_div(examples, size)
            self._steps.append(steps)
        return self._steps[update]

    def _micro_batch_size_after(self, done: int) -> int:
        """Return the micro-batch size of the next update after `done` updates."""
        for last, cut in self.before:
            if done < last:
                return cut.micro_batch_size
        return self.micro_batch_size

    def epoch(self, update: int) -> float:
        """Return the number of completed epochs.

        If the length of an epoch is known, the number includes the current epoch as a
        fraction.
        """
        epoch, index = self.place(update)
        if not self.per_epoch:
            return float(epoch)
        return epoch + min(1.0, index / self.per_epoch)

    def ends_epoch(self, update: int) -> bool:
        return update > 0 and self.windows[update - 1].last

    def __str__(self) -> str:
        first = self.batching
        examples = count(first.effective_batch_size // first.factor, "example")
        batches = (
            f"{count(first.factor, 'batch', 'batches')} per update, the first one with "
            f"{examples}"
        )
        if self.cut:
            limit = count(first.micro_batch_size, "example")
            batches += f", in micro-batches of at most {limit}"

        per_epoch = "an unknown number of updates"
        if self.per_epoch is not None:
            per_epoch = count(self.per_epoch, "update")
        length = f"{self.updates} in all"
        if self.updates == ENDLESS and self.whole_epochs is not None:
            length = count(self.whole_epochs, "epoch")
        return f"{batches}; {per_epoch} per epoch, {length}"


def stream_plan(
    first: Batching,
    horizon: Horizon,
    windows: Sequence[Window],
    per_epoch: int | None,
    cut: bool,
) -> StreamPlan:
    """Return the plan of a run over a stream of batches.

    Args:
        first: how the first update is cut.
        horizon: length of the run, in updates or epochs; `resolve` rejects examples.
        windows: the batches of each update so far, in order; the sequence grows.
        per_epoch: number of updates per epoch; None if it is unknown, `ENDLESS` if the
            training split repeats endlessly.
        cut: whether batches are cut into micro-batches.

    Raises:
        ConfigError: the horizon is in epochs and the training split repeats endlessly.
    """
    whole_epochs = None
    if horizon.unit == "epochs":
        whole_epochs = horizon.length
    if whole_epochs is not None and per_epoch == ENDLESS:
        rule = (
            "cannot be the horizon, as the training split repeats without an end: "
            "set training.updates"
        )
        raise ConfigError("training.epochs", rule, whole_epochs)

    if per_epoch == ENDLESS:
        per_epoch = None
    updates = horizon.length
    if whole_epochs is not None:
        updates = min(whole_epochs * (per_epoch or ENDLESS), ENDLESS)
    return StreamPlan(
        first,
        0,
        updates,
        windows=windows,
        per_epoch=per_epoch,
        whole_epochs=whole_epochs,
        cut=cut,
    )
