"""Batch-size schedules: their arithmetic against counting one by one, and what is refused."""

from __future__ import annotations

import random
from copy import deepcopy
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import ceil

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config import sizes, stages
from pipeline.config.compose import composed
from pipeline.config.plan import plan_of
from pipeline.config.resolve import from_text, resolve
from pipeline.config.stages import Asked

RAMP = (
    "accumulation.batch_schedule=[{start:{updates:0},effective_batch_size:32},"
    "{start:{updates:400},effective_batch_size:100},{start:{epochs:12},effective_batch_size:256}]"
)


@cache
def with_groups(*groups):
    return composed(list(groups))


def resolved(given):
    """The spec of these overrides, on a config that is composed once, as that takes most of the time."""
    config = deepcopy(
        with_groups(*(text for text in given if "." not in text.split("=")[0]))
    )
    for override in OverridesParser.create().parse_overrides(list(given)):
        if "." in override.key_or_group:
            OmegaConf.update(
                config,
                override.key_or_group,
                override.value(),
                merge=False,
                force_add=True,
            )
    return resolve(config, given)


def test_the_counters_of_random_stages_are_what_counting_gives():
    for seed in range(300):
        plan, cuts = drawn(random.Random(seed))
        order, seen, steps = list(counted(plan)), 0, 0
        for update, (epoch, index, first, size) in enumerate(order, 1):
            micro = next(
                (cut.micro_batch_size for last, cut in plan.before if update <= last),
                plan.micro_batch_size,
            )
            seen, steps = (
                seen + size,
                steps + ceil(ceil(size / plan.batching.replicas) / micro),
            )
            assert plan.place(update - 1) == (epoch, index), seed
            assert plan.batch_size(update) == size, seed
            assert (plan.examples_seen(update), plan.micro_steps(update)) == (
                seen,
                steps,
            ), seed
            assert plan.epoch(update) == seen / plan.examples, seed
            assert plan.ends_epoch(update) == (first + size == plan.examples), seed
            assert plan.updates_at(seen) == update, seed
        assert (plan.updates, plan.epochs) == (len(order), order[-1][0] + 1), seed
        assert bool(plan.before) == bool(cuts), seed
        for done in {0, len(order) // 2, len(order) - 1}:  # from where a run may go on
            assert list(read(plan, done))[: len(order) - done] == [
                place[:1] + place[2:] for place in order[done:]
            ]


def drawn(chance):
    """A plan of random stages whose starts rise, some of its updates in halved micro-batches; and these cuts."""
    examples, replicas = chance.randint(3, 60), chance.randint(1, 3)
    asked = [Asked("updates", 0, chance.randint(replicas, examples))]
    first = sizes.Batching(asked[0].size, chance.randint(1, 9), 1, replicas)
    horizon = sizes.Horizon(
        *chance.choice([("updates", 70), ("examples", 5 * examples - 1), ("epochs", 6)])
    )
    for _ in range(chance.randint(1, 6)):
        unit = chance.choice(stages.UNITS)
        most = {"updates": 40, "examples": 5 * examples, "epochs": 5}[unit]
        start = (
            chance.randint(1, 50) / 10
            if unit == "epochs" and chance.random() < 0.5
            else chance.randint(1, most)
        )
        more = [*asked, Asked(unit, start, chance.randint(replicas, examples))]
        try:
            plan_of(first, examples, horizon, more)
        except ConfigError:  # it does not rise
            continue
        asked = more
    plan = plan_of(first.with_effective_batch_size(asked[0].size), examples, horizon, asked)
    at = sorted(chance.sample(range(1, 20), chance.randint(0, 2)))
    for update in at:
        plan = plan.halved(update, -(-plan.micro_batch_size // 2))
    plan.__dict__["asked"], plan.__dict__["horizon"] = asked, horizon  # for `counted`
    return plan, at


def counted(plan):
    """Epoch, update of the epoch, first example and size of each update, one after another."""
    asked, (unit, length) = list(plan.asked), plan.horizon
    done = seen = epoch = index = first = 0
    while {"updates": done, "examples": seen, "epochs": epoch}[unit] < length:
        while len(asked) > 1:
            start, counts = (
                asked[1],
                {
                    "updates": done,
                    "examples": seen,
                    "epochs": Fraction(seen, plan.examples),
                },
            )
            if counts[start.unit] < Fraction(str(start.start)):
                break
            del asked[0]
        size = min(asked[0].size, plan.examples - first)
        yield epoch, index, first, size
        done, seen, index, first = done + 1, seen + size, index + 1, first + size
        if first == plan.examples:
            epoch, index, first = epoch + 1, 0, 0


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
        Asked("updates", 0, 32),
        Asked("examples", 500, 100),
        Asked("epochs", 2, 256),
    ]
    plan = plan_of(sizes.derive(32, 4, None), 1437, sizes.Horizon("epochs", 3), asked)
    # 16 · 32 = 512 is the first whole update from 500 on; 512 + 9 · 100 + 25 = 1437; 14 · 100 + 37 = 1437.
    assert plan.changes == [(0, 32), (16, 100), (41, 256)]
    at = [1, 16, 17, 25, 26, 27, 41, 42, 47]
    assert [plan.batch_size(update) for update in at] == [
        32,
        32,
        100,
        100,
        25,
        100,
        37,
        256,
        157,
    ]
    assert [plan.examples_seen(update) for update in at] == [
        32,
        512,
        612,
        1412,
        1437,
        1537,
        2874,
        3130,
        4311,
    ]
    # Micro-batches of 8: 16 · 4, 9 · 13 + 4, 14 · 13 + 5, 5 · 32 + 20.
    assert [plan.micro_steps(update) for update in (16, 26, 41, 47)] == [
        64,
        185,
        372,
        552,
    ]
    assert str(plan) == (
        "effective batch 32 = 8 × 4 × 1 replica, 100 (factor 13) after update 16, 256 (factor 32) after update 41; "
        "1437 examples → 45 updates per epoch (last one 29) at first, 47 in all"
    )


def test_a_decimal_share_of_an_epoch_is_exact():
    # As floats 0.07 · 100 is more than 7.
    asked = [Asked("updates", 0, 1), Asked("epochs", 0.07, 5)]
    plan = plan_of(sizes.derive(1, 1, None), 100, sizes.Horizon("epochs", 2), asked)
    assert plan.changes == [(0, 1), (7, 5)]


def test_counters_of_a_long_run_take_no_time():
    asked = [Asked("updates", number * 10**5, 32 + number) for number in range(8)]
    plan = plan_of(
        sizes.derive(32, 4, None), 10**6 + 1, sizes.Horizon("updates", 10**6), asked
    )
    seen = [plan.examples_seen(update) for update in range(699_990, 700_010)]
    assert [later - before for before, later in pairwise(seen)] == [
        plan.batch_size(update) for update in range(699_991, 700_010)
    ]
    assert plan.updates_at(plan.examples_seen(987_654)) == 987_654


def test_a_command_line_gives_the_first_stage_and_its_factor():
    spec = resolve(composed([RAMP]), [RAMP])
    assert (
        spec.batching.effective_batch_size,
        spec.batching.micro_batch_size,
        spec.batching.factor,
    ) == (32, 8, 4)
    assert (
        spec.config.accumulation.effective_batch_size == 32
    )  # and not the 128 of the defaults
    assert (spec.largest.effective_batch_size, spec.largest.factor) == (256, 32)
    again = from_text(spec.to_text())
    assert (again.batching, again.largest, again.resolved) == (
        spec.batching,
        spec.largest,
        spec.resolved,
    )
    given = [
        RAMP,
        "accumulation.micro_batch_size=64",
        "accumulation.effective_batch_size=32",
    ]
    spec = resolved(given)
    assert (
        spec.batching.micro_batch_size,
        spec.batching.factor,
        spec.largest.factor,
    ) == (64, 1, 4)


def test_the_micro_batch_is_searched_for_the_largest_stage():
    given = [RAMP, "accumulation.micro_batch_size=auto"]
    spec = resolved(given)
    tried = from_text(spec.at_largest().to_text())
    assert (
        tried.batching.effective_batch_size,
        tried.config.accumulation.batch_schedule,
    ) == (256, None)
    found = spec.with_micro_batch(200)
    assert (
        found.batching.effective_batch_size,
        found.batching.factor,
        found.largest.factor,
    ) == (32, 1, 2)


@pytest.mark.parametrize(
    ("given", "message"),
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
            "accumulation.batch_schedule[0] must be as {start: {updates: 400}, effective",
        ),
        (
            [RAMP.replace("epochs", "days")],
            "accumulation.batch_schedule[2].start must be in a known unit. Received: 'days'.",
        ),
        (
            [RAMP.replace("epochs:12", "epochs:12,updates:3")],
            "accumulation.batch_schedule[2] must be as {start: {updates",
        ),
        (
            [RAMP.replace("updates:0", "updates:1")],
            "accumulation.batch_schedule[0].start.updates must be 0, as the run",
        ),
        (
            [RAMP.replace("400", "4.5")],
            "accumulation.batch_schedule[1].start.updates must be a number of at least 0, whole",
        ),
        (
            [RAMP.replace("400", "0")],
            "accumulation.batch_schedule[1].start.updates must rise from stage to stage",
        ),
        (
            [RAMP.replace("epochs:12", "updates:400")],
            "accumulation.batch_schedule[2].start.updates must rise from stage",
        ),
        (
            [RAMP.replace("256", "0")],
            "accumulation.batch_schedule[2].effective_batch_size must be at least 1. Received: 0.",
        ),
        (
            [RAMP.replace(":32", ":1"), "hardware.replicas=2"],
            "accumulation.batch_schedule[0].effective_batch_size must be at least the "
            "number of replicas, 2. Received: 1.",
        ),
        (
            [RAMP, "accumulation.effective_batch_size=64"],
            "accumulation.effective_batch_size must be left out, or that of the first stage, 32. Received: 64.",
        ),
        (
            [RAMP, "accumulation.micro_batch_size=257"],
            "accumulation.micro_batch_size must be at most the 256 examples",
        ),
        (
            [RAMP, "dataset.batched=true"],
            "accumulation.batch_schedule must be null with dataset.batched=true",
        ),
        (
            ["schedule.clock=examples", "dataset.batched=true"],
            "schedule.clock must be updates with dataset.batched=true. Received: 'examples'.",
        ),
        (
            ["schedule.clock=tokens"],
            "schedule.clock must be updates or examples. Received: 'tokens'.",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given, message):
    with pytest.raises(ConfigError) as refused:
        resolved(given)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            [Asked("updates", 0, 32), Asked("updates", 3, 101)],
            "accumulation.batch_schedule[1].effective_batch_size must be at most the 100 "
            "examples of the training split. Received: 101.",
        ),
        (  # both in the first update
            [
                Asked("updates", 0, 32),
                Asked("examples", 5, 50),
                Asked("epochs", 0.2, 60),
            ],
            "accumulation.batch_schedule[2].start.epochs must be later than update 2, with "
            "which the stage before begins. Received: 0.2.",
        ),
    ],
)
def test_what_does_not_fit_the_data_is_refused(asked, message):
    with pytest.raises(ConfigError) as refused:
        plan_of(sizes.derive(32, 4, None), 100, sizes.Horizon("epochs", 2), asked)
    assert str(refused.value) == message
