"""Batch-size schedules: their arithmetic against counting, and what is rejected."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil

import pytest

from pipeline.common.errors import ConfigError
from pipeline.config import sizes, stages
from pipeline.config.compose import composed
from pipeline.config.plan import Plan, plan_of
from pipeline.config.resolve import from_text, resolve
from pipeline.config.stages import ScheduledStage
from tests.composing import spec_of

RAMP = (
    "accumulation.batch_schedule=["
    "{start:{updates:0},effective_batch_size:32},"
    "{start:{updates:400},effective_batch_size:100},"
    "{start:{epochs:12},effective_batch_size:256}]"
)


@dataclass
class Drawn:
    """A random batch-size schedule, and the plan that follows from it.

    Attributes:
        asked: the stages, whose starts rise.
        horizon: length of the run.
        halvings: updates after which micro-batches are halved.
        plan: the plan.
    """

    asked: list[ScheduledStage]
    horizon: sizes.Horizon
    halvings: list[int]
    plan: Plan


@dataclass
class CountedUpdate:
    """An update, as counting one after another gives it."""

    epoch: int
    index: int  # of the epoch's updates
    first: int  # of the epoch's examples
    size: int


def test_the_counters_of_random_stages_are_what_counting_gives():
    for seed in range(300):
        drawn = draw(random.Random(seed))
        plan = drawn.plan
        order = counted(drawn)
        seen = steps = 0
        for update, expected in enumerate(order, 1):
            share = ceil(expected.size / plan.batching.replicas)
            seen += expected.size
            steps += ceil(share / micro_batch_size(plan, update))
            assert plan.place(update - 1) == (expected.epoch, expected.index), seed
            assert plan.batch_size(update) == expected.size, seed
            assert plan.examples_seen(update) == seen, seed
            assert plan.micro_steps(update) == steps, seed
            assert plan.epoch(update) == seen / plan.examples, seed
            ends_epoch = expected.first + expected.size == plan.examples
            assert plan.ends_epoch(update) == ends_epoch, seed
            assert plan.updates_at(seen) == update, seed
        assert plan.updates == len(order), seed
        assert plan.epochs == order[-1].epoch + 1, seed
        assert bool(plan.before) == bool(drawn.halvings), seed

        batches = [(update.epoch, update.first, update.size) for update in order]
        # A run may go on from any of these.
        for done in {0, len(order) // 2, len(order) - 1}:
            remaining = len(order) - done
            assert list(read(plan, done))[:remaining] == batches[done:], seed


def draw(chance):
    """A random schedule; some updates are in halved micro-batches."""
    examples = chance.randint(3, 60)
    replicas = chance.randint(1, 3)
    asked = [ScheduledStage("updates", 0, chance.randint(replicas, examples))]
    first = sizes.Batching(asked[0].size, chance.randint(1, 9), 1, replicas)
    horizons = [("updates", 70), ("examples", 5 * examples - 1), ("epochs", 6)]
    horizon = sizes.Horizon(*chance.choice(horizons))
    for _ in range(chance.randint(1, 6)):
        unit = chance.choice(stages.UNITS)
        most = {"updates": 40, "examples": 5 * examples, "epochs": 5}[unit]
        if unit == "epochs" and chance.random() < 0.5:
            start = chance.randint(1, 50) / 10
        else:
            start = chance.randint(1, most)
        more = [*asked, ScheduledStage(unit, start, chance.randint(replicas, examples))]
        try:
            plan_of(first, examples, horizon, more)
        except ConfigError:  # it does not rise
            continue
        asked = more

    batching = first.with_effective_batch_size(asked[0].size)
    plan = plan_of(batching, examples, horizon, asked)
    halvings = sorted(chance.sample(range(1, 20), chance.randint(0, 2)))
    for update in halvings:
        plan = plan.halved(update, -(-plan.micro_batch_size // 2))
    return Drawn(asked, horizon, halvings, plan)


def counted(drawn):
    """The updates of the run, one after another."""
    examples = drawn.plan.examples
    asked = list(drawn.asked)
    updates = []
    done = seen = epoch = index = first = 0
    while True:
        counts = {
            "updates": done,
            "examples": seen,
            "epochs": Fraction(seen, examples),
        }
        if counts[drawn.horizon.unit] >= drawn.horizon.length:
            return updates
        while len(asked) > 1:
            later = asked[1]
            if counts[later.unit] < Fraction(str(later.start)):
                break
            del asked[0]

        size = min(asked[0].size, examples - first)
        updates.append(CountedUpdate(epoch, index, first, size))
        done += 1
        seen += size
        index += 1
        first += size
        if first == examples:
            epoch += 1
            index = first = 0


def micro_batch_size(plan, update):
    """The micro-batch size that was in force at an update."""
    for last, cut in plan.before:
        if update <= last:
            return cut.micro_batch_size
    return plan.micro_batch_size


def read(plan, done):
    """Epoch, first example and size of each batch that is read by `Plan.slices`."""
    for size, end, epoch, left_out, count in plan.slices(done):
        for number in range(epoch, end):
            first = left_out if number == epoch else 0
            last = plan.examples if count == stages.ALL else first + count
            while first < last:
                yield number, first, min(size, last - first)
                first += size


def test_a_ramp_to_check_by_hand():
    asked = [
        ScheduledStage("updates", 0, 32),
        ScheduledStage("examples", 500, 100),
        ScheduledStage("epochs", 2, 256),
    ]
    plan = plan_of(sizes.derive(32, 4, None), 1437, sizes.Horizon("epochs", 3), asked)
    # 16 · 32 = 512 is the first whole update from 500 on. Then
    # 512 + 9 · 100 + 25 = 1437, and 14 · 100 + 37 = 1437.
    assert plan.changes == [(0, 32), (16, 100), (41, 256)]
    expected = {  # of an update: its size, and the examples seen
        1: (32, 32),
        16: (32, 512),
        17: (100, 612),
        25: (100, 1412),
        26: (25, 1437),
        27: (100, 1537),
        41: (37, 2874),
        42: (256, 3130),
        47: (157, 4311),
    }
    for update, (size, seen) in expected.items():
        assert plan.batch_size(update) == size
        assert plan.examples_seen(update) == seen
    # Micro-batches of 8: 16 · 4, 9 · 13 + 4, 14 · 13 + 5, 5 · 32 + 20.
    for update, steps in {16: 64, 26: 185, 41: 372, 47: 552}.items():
        assert plan.micro_steps(update) == steps
    assert str(plan) == (
        "effective batch 32 = 8 × 4 × 1 replica, "
        "100 (factor 13) after update 16, 256 (factor 32) after update 41; "
        "1437 examples → 45 updates per epoch (last one 29) at first, 47 in all"
    )


def test_a_decimal_share_of_an_epoch_is_exact():
    # As floats 0.07 · 100 is more than 7.
    asked = [ScheduledStage("updates", 0, 1), ScheduledStage("epochs", 0.07, 5)]
    plan = plan_of(sizes.derive(1, 1, None), 100, sizes.Horizon("epochs", 2), asked)
    assert plan.changes == [(0, 1), (7, 5)]


def test_counters_of_a_long_run_take_no_time():
    asked = [
        ScheduledStage("updates", number * 10**5, 32 + number) for number in range(8)
    ]
    horizon = sizes.Horizon("updates", 10**6)
    plan = plan_of(sizes.derive(32, 4, None), 10**6 + 1, horizon, asked)
    seen = [plan.examples_seen(update) for update in range(699_990, 700_010)]
    assert [later - before for before, later in pairwise(seen)] == [
        plan.batch_size(update) for update in range(699_991, 700_010)
    ]
    assert plan.updates_at(plan.examples_seen(987_654)) == 987_654


def test_a_command_line_gives_the_first_stage_and_its_factor():
    spec = resolve(composed([RAMP]), [RAMP])
    assert spec.batching == sizes.Batching(32, 8, 4)
    # The default is 128.
    assert spec.config.accumulation.effective_batch_size == 32
    assert spec.largest == sizes.Batching(256, 8, 32)
    again = from_text(spec.to_text())
    assert again.batching == spec.batching
    assert again.largest == spec.largest
    assert again.resolved == spec.resolved

    overrides = [
        RAMP,
        "accumulation.micro_batch_size=64",
        "accumulation.effective_batch_size=32",
    ]
    spec = spec_of(overrides)
    assert spec.batching == sizes.Batching(32, 64, 1)
    assert spec.largest.factor == 4


def test_the_micro_batch_is_searched_for_the_largest_stage():
    spec = spec_of([RAMP, "accumulation.micro_batch_size=auto"])
    tried = from_text(spec.at_largest().to_text())
    assert tried.batching.effective_batch_size == 256
    assert tried.config.accumulation.batch_schedule is None
    found = spec.with_micro_batch(200)
    assert found.batching.effective_batch_size == 32
    assert found.batching.factor == 1
    assert found.largest.factor == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["accumulation.batch_schedule=fast"],
            "accumulation.batch_schedule must be null or a list of stages",
        ),
        (
            ["accumulation.batch_schedule=[]"],
            "accumulation.batch_schedule must be null or a list of stages",
        ),
        (
            ["accumulation.batch_schedule=[32]"],
            "accumulation.batch_schedule[0] must have the form "
            "{start: {updates: 400}, effective",
        ),
        (
            [RAMP.replace("epochs", "days")],
            "accumulation.batch_schedule[2].start must be in a known unit. "
            "Received: 'days'.",
        ),
        (
            [RAMP.replace("epochs:12", "epochs:12,updates:3")],
            "accumulation.batch_schedule[2] must have the form {start: {updates",
        ),
        (
            [RAMP.replace("updates:0", "updates:1")],
            "accumulation.batch_schedule[0].start.updates must be 0, as the run",
        ),
        (
            [RAMP.replace("400", "4.5")],
            "accumulation.batch_schedule[1].start.updates must be a number of at "
            "least 0, and whole",
        ),
        (
            [RAMP.replace("400", "0")],
            "accumulation.batch_schedule[1].start.updates must rise from stage to "
            "stage",
        ),
        (
            [RAMP.replace("epochs:12", "updates:400")],
            "accumulation.batch_schedule[2].start.updates must rise from stage",
        ),
        (
            [RAMP.replace("256", "0")],
            "accumulation.batch_schedule[2].effective_batch_size must be at least 1. "
            "Received: 0.",
        ),
        (
            [RAMP.replace("256", "2147483648")],
            "accumulation.batch_schedule[2].effective_batch_size must be at most "
            "2147483647. Received: 2147483648.",
        ),
        (
            [RAMP.replace("256", "256.0")],
            "accumulation.batch_schedule[2].effective_batch_size must be an integer. "
            "Received: 256.0.",
        ),
        (
            [RAMP.replace("256", "true")],
            "accumulation.batch_schedule[2].effective_batch_size must be an integer. "
            "Received: true.",
        ),
        (
            [RAMP.replace("400", "2147483648")],
            "accumulation.batch_schedule[1].start.updates must be at most "
            "2147483647. Received: 2147483648.",
        ),
        (
            [RAMP.replace("epochs:12", "epochs:nan")],
            "accumulation.batch_schedule[2].start.epochs must be a number of at "
            "least 0, and whole unless it counts epochs. Received: nan.",
        ),
        (
            [RAMP.replace(":32", ":1"), "hardware.replicas=2"],
            "accumulation.batch_schedule[0].effective_batch_size must be at least the "
            "number of replicas, 2. Received: 1.",
        ),
        (
            [RAMP, "accumulation.effective_batch_size=64"],
            "accumulation.effective_batch_size must be left out, or be that of the "
            "first "
            "stage, 32. Received: 64.",
        ),
        (
            [RAMP, "accumulation.micro_batch_size=257"],
            "accumulation.micro_batch_size must be at most the 256 examples",
        ),
        (
            [RAMP, "dataset.batched=true"],
            "accumulation.batch_schedule cannot be set with dataset.batched=true",
        ),
        (
            ["schedule.clock=examples", "dataset.batched=true"],
            "schedule.clock must be updates with dataset.batched=true. "
            "Received: 'examples'.",
        ),
        (
            ["schedule.clock=tokens"],
            "schedule.clock must be updates or examples. Received: 'tokens'.",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(overrides, message):
    with pytest.raises(ConfigError) as refused:
        spec_of(overrides)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked_stages", "message"),
    [
        (
            [ScheduledStage("updates", 0, 32), ScheduledStage("updates", 3, 101)],
            "accumulation.batch_schedule[1].effective_batch_size must be at most the "
            "100 examples of the training split. Received: 101.",
        ),
        (  # both in the first update
            [
                ScheduledStage("updates", 0, 32),
                ScheduledStage("examples", 5, 50),
                ScheduledStage("epochs", 0.2, 60),
            ],
            "accumulation.batch_schedule[2].start.epochs must be later than update 2, "
            "with which the previous stage begins. Received: 0.2.",
        ),
    ],
)
def test_what_does_not_fit_the_data_is_refused(asked_stages, message):
    batching = sizes.derive(32, 4, None)
    with pytest.raises(ConfigError) as refused:
        plan_of(batching, 100, sizes.Horizon("epochs", 2), asked_stages)
    assert str(refused.value) == message
