"""The plan of a run: epochs and examples → updates, with the counters of each update."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from pipeline.common.errors import ConfigError
from pipeline.config.sizes import Batching, Horizon, ceil_div
from pipeline.config.stages import SCHEDULE, Asked, Slice, Stage

HALVED = "micro_batch_size.halved"  # the tag, in prose, of a run whose micro-batches were halved
CUTS = f"{HALVED}.json"  # the same as JSON: [[micro-batch size, last update], …], the last one without an end
ENDLESS = 2**31 - 1  # updates of a run whose epochs have no known length
UNCUT = (
    2**30
)  # micro-batch size of batches that are not cut; TensorFlow counts examples in 32 bits


@dataclass(frozen=True)
class Plan:
    """A run counted in updates."""

    batching: Batching
    examples: int  # in one epoch
    updates: int  # in the whole run
    before: tuple[
        tuple[int, Batching], ...
    ] = ()  # up to which update another cut was in force, the earliest first
    stages: tuple[
        Stage, ...
    ] = ()  # where the effective batch changes; the first one has that of `batching`

    def halved(self, update: int, micro_batch_size: int) -> Plan:
        """Return the plan of a run that from after `update` on is cut into other micro-batches."""
        update = max(
            [update, *(last for last, _ in self.before)]
        )  # updates that are done again keep their counts
        before = (*self.before, (update, self.batching))
        return replace(self, batching=self.batching.of(micro_batch_size), before=before)

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags of a run whose micro-batches were halved, in prose and as JSON; see `recorded_cuts`."""
        cuts = [(cut.micro_batch_size, last) for last, cut in self.before]
        sizes, now = (
            [f"{size} up to update {last}" for size, last in cuts],
            self.batching.micro_batch_size,
        )
        return {
            HALVED: ", ".join([*sizes, f"{now} then"]),
            CUTS: json.dumps([*cuts, (now, None)]),
        }

    def after(self, cuts: Sequence[tuple[int, int | None]], update: int) -> Plan:
        """Return the plan of a run that was cut by the recorded `cuts` up to `update`, then by this one."""
        end = max([update, *(last for _, last in cuts if last is not None)])
        before = (
            (end if last is None else last, self.batching.of(size))
            for size, last in cuts
        )
        return replace(self, before=tuple(before))

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        return self.stages or (
            Stage(self.batching.effective_batch_size, self.examples),
        )

    @property
    def changes(self) -> list[tuple[int, int]]:
        """Return after which updates the effective batch has which size; empty if it never changes."""
        sizes = [0, *(stage.size for stage in self.stages)]
        return [
            (s.after, s.size)
            for s, before in zip(self.stages, sizes, strict=False)
            if s.size != before
        ]

    @property
    def updates_per_epoch(self) -> int:
        """Return the updates of an epoch of the first stage."""
        return self.all_stages[0].in_epoch

    @property
    def epochs(self) -> int:
        return self.place(self.updates - 1)[0] + 1

    def ended(self, update: int) -> bool:
        """Return whether the run ends with `update`."""
        return update >= self.updates

    def stage(self, done: int) -> Stage:
        """Return the stage of the update after `done` ones."""
        return next(stage for stage in reversed(self.all_stages) if stage.after <= done)

    def place(self, done: int) -> tuple[int, int]:
        """Return the epoch of the update after `done` ones, and which of its updates that is, both from 0 on."""
        epoch, _, index = self.stage(done).place(done)
        return epoch, index

    @property
    def micro_batch_size(self) -> int:
        """Return the most examples of a micro-batch."""
        return self.batching.micro_batch_size

    def digest(self, update: int) -> int | None:
        """Return a checksum of the batch of `update`, or with stages what was seen, if the config does not say it."""
        return self.examples_seen(update) if self.stages else None

    def batch_size(self, update: int) -> int:
        """Return the examples in update `update`, which counts from 1: the last one of an epoch is the tail."""
        stage = self.stage(update - 1)
        return min(stage.size, self.examples - stage.place(update - 1)[1])

    def examples_seen(self, update: int) -> int:
        epoch, first, _ = self.stage(update).place(update)
        return epoch * self.examples + first

    def updates_at(self, examples: int) -> int:
        """Return the least number of updates after which so many examples were seen."""
        place = divmod(examples, self.examples)
        return next(
            s for s in reversed(self.all_stages) if (s.epoch, s.first) <= place
        ).updates_at(*place)

    def slices(self, done: int) -> list[Slice]:
        """Return what is read from the update after `done` ones on, each in batches of one size; at the end nothing."""
        (epoch, first, _), found = self.stage(done).place(done), list[Slice]()
        later = [
            (after, size) for after, size in self.changes if done < after < self.updates
        ]
        ends = [
            *(self.stage(after).place(after)[:2] for after, _ in later),
            (self.epochs, 0),
        ]
        for size, (end, last) in zip(
            [self.stage(done).size, *(size for _, size in later)], ends, strict=True
        ):
            if epoch < end:
                found.append(Slice(size, end, epoch, first))
                first = 0
            if first < last:
                found.append(Slice(size, end + 1, end, first, last - first))
            epoch, first = end, last
        return found or [Slice(size, epoch, epoch)]

    def micro_steps(self, update: int) -> int:
        """Return the micro-steps on each replica in the first `update` updates."""
        steps, done = 0, 0
        for last, cut in (*self.before, (update, self.batching)):
            steps += self._micro_steps(min(last, update), cut) - self._micro_steps(
                done, cut
            )
            done = min(last, update)
        return steps

    def _micro_steps(self, update: int, cut: Batching) -> int:
        def of(examples: int) -> int:
            return ceil_div(ceil_div(examples, cut.replicas), cut.micro_batch_size)

        ends = [*(stage.after for stage in self.all_stages[1:]), update]
        return sum(
            stage.micro_steps(min(end, update), of)
            for stage, end in zip(self.all_stages, ends, strict=True)
        )

    def epoch(self, update: int) -> float:
        return self.examples_seen(update) / self.examples

    def ends_epoch(self, update: int) -> bool:
        return self.stage(update).place(update)[1] == 0

    def __str__(self) -> str:
        tail = self.examples % self.batching.effective_batch_size
        last = f" (last one {tail})" if tail else ""
        per_epoch = f"{self.examples} examples → {self.updates_per_epoch} updates per epoch{last}"
        later = [
            (after, self.batching.at(size))
            for after, size in self.changes[1:]
            if after < self.updates
        ]
        sizes = [
            f", {cut.effective_batch_size} (factor {cut.factor}) after update {after}"
            for after, cut in later
        ]
        return f"{self.batching}{''.join(sizes)}; {per_epoch}{' at first' if later else ''}, {self.updates} in all"


def recorded_cuts(tags: Mapping[str, str]) -> list[tuple[int, int | None]]:
    """Return the micro-batch sizes of a recorded run with the last update of each; empty if they were never halved.

    Runs recorded before there was JSON have the prose alone: `32 up to update 40, 16 then`.
    """
    if CUTS in tags:
        return [(size, last) for size, last in json.loads(tags[CUTS])]
    if HALVED not in tags:
        return []
    words = [text.split() for text in tags[HALVED].split(", ")]
    return [
        (int(first), int(last) if last.isdecimal() else None)
        for first, *_, last in words
    ]


def plan_of(
    batching: Batching, examples: int, horizon: Horizon, stages: Sequence[Asked] = ()
) -> Plan:
    """Convert the horizon and the starts of the `stages` to updates, once, at the edge; examples are rounded up."""
    made, last = Plan(batching, examples, 0), -1
    for number, (unit, start, size) in enumerate(
        stages or [Asked("updates", 0, batching.effective_batch_size)]
    ):
        key = f"{SCHEDULE}[{number}]" if stages else "accumulation"
        if size > examples:
            rule = f"must be at most the {examples} examples of the training split"
            raise ConfigError(f"{key}.effective_batch_size", rule, size)
        least = Fraction(str(start)) * (
            examples if unit == "epochs" else 1
        )  # exact: 0.07 · 100 is 7
        after = int(start) if unit == "updates" else made.updates_at(math.ceil(least))
        if after <= last:
            rule = f"must be later than update {last + 1}, with which the stage before begins"
            raise ConfigError(f"{key}.start.{unit}", rule, start)
        stage, last = (
            Stage(size, examples, after, *made.stage(after).place(after)),
            after,
        )
        rest = (
            (Stage(size, examples, after + stage.in_epoch, stage.epoch + 1),)
            if stage.first
            else ()
        )
        if stages:
            made = replace(
                made,
                stages=(*(s for s in made.stages if s.after < after), stage, *rest),
            )
    if horizon.unit == "updates":
        return replace(made, updates=horizon.length)
    return replace(
        made,
        updates=made.updates_at(
            horizon.length * (examples if horizon.unit == "epochs" else 1)
        ),
    )


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
    cut: bool = (
        True  # whether micro-batches have at most `batching.micro_batch_size` examples
    )
    _steps: list[int] = field(
        default_factory=lambda: [0], init=False, compare=False
    )  # micro-steps up to each update

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
        over = (
            update > 0
            and self.ends_epoch(update)
            and self.windows[update - 1].epoch + 1 == self.whole_epochs
        )
        return over or (self.whole_epochs is None and update >= self.updates)

    def place(self, done: int) -> tuple[int, int]:
        if not done:
            return 0, 0
        before = self.windows[done - 1]
        return (
            (before.epoch + 1, 0)
            if before.last
            else (before.epoch, before.in_epoch + 1)
        )

    def digest(self, update: int) -> int | None:
        return self.windows[update - 1].digest if update else None

    def batch_size(self, update: int) -> int:
        return sum(self.windows[update - 1].sizes)

    def examples_seen(self, update: int) -> int:
        return self.windows[update - 1].examples_seen if update else 0

    def micro_steps(self, update: int) -> int:
        while (done := len(self._steps) - 1) < update:
            size = next(
                (cut.micro_batch_size for last, cut in self.before if done < last),
                self.micro_batch_size,
            )
            here = sum(-(-examples // size) for examples in self.windows[done].sizes)
            self._steps.append(self._steps[-1] + here)
        return self._steps[update]

    def epoch(self, update: int) -> float:
        """Return the completed epochs, with their part of the current one where the length of an epoch is known."""
        epoch, index = self.place(update)
        return epoch + (min(1.0, index / self.per_epoch) if self.per_epoch else 0.0)

    def ends_epoch(self, update: int) -> bool:
        return update > 0 and self.windows[update - 1].last

    def __str__(self) -> str:
        known = "an unknown number of" if self.per_epoch is None else self.per_epoch
        length = (
            f"{self.whole_epochs} epochs"
            if self.updates == ENDLESS
            else f"{self.updates} in all"
        )
        first = f"{self.batching.factor} batches, the first of {self.batching.micro_batch_size}, are an update"
        what = (
            first
            if self.batching.effective_batch_size != self.batching.micro_batch_size
            else str(self.batching)
        )
        return f"{what}; {known} updates per epoch, {length}"


def stream_plan(
    first: Batching,
    horizon: Horizon,
    windows: Sequence[Window],
    per_epoch: int | None,
    cut: bool,
) -> Plan:
    """Return the plan of a run over a stream, of `per_epoch` updates an epoch if that is known, or `ENDLESS`."""
    if horizon.unit == "examples":
        rule = "must be null: batches that the data cut have no known number of examples; set training.updates"
        raise ConfigError("training.examples", rule, horizon.length)
    whole = horizon.length if horizon.unit == "epochs" else None
    if whole and per_epoch == ENDLESS:
        rule = "must be null where the training split repeats without an end; set training.updates"
        raise ConfigError("training.epochs", rule, whole)
    known = None if per_epoch == ENDLESS else per_epoch
    updates = (
        horizon.length if whole is None else min(whole * (known or ENDLESS), ENDLESS)
    )
    return StreamPlan(
        first, 0, updates, windows=windows, per_epoch=known, whole_epochs=whole, cut=cut
    )
