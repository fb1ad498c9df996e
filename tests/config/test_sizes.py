"""Sizes to check by hand, and the counters of a plan against counting one by one."""

from __future__ import annotations

import time

import pytest

from pipeline.common.errors import ConfigError
from pipeline.config import sizes
from pipeline.config.plan import CUTS, HALVED, plan_of, recorded_cuts, stream_plan


@pytest.mark.parametrize(
    ("effective", "factor", "micro", "replicas", "expected"),
    [
        (128, 4, None, 1, (128, 32, 4)),
        (128, None, 32, 1, (128, 32, 4)),
        (None, 4, 32, 1, (128, 32, 4)),
        (128, 4, 32, 1, (128, 32, 4)),
        (128, None, 24, 1, (128, 24, 6)),  # 5 · 24 + 8
        (128, 6, 24, 1, (128, 24, 6)),
        (128, 3, None, 1, (128, 43, 3)),  # 43 + 43 + 42
        (128, 2, None, 2, (128, 32, 2)),
        (None, 2, 32, 2, (128, 32, 2)),
        (7, 2, None, 2, (7, 2, 2)),  # shares of 4 and 3
        (9, 5, None, 2, (9, 1, 5)),  # shares of 5 and 4: the larger one counts
        (9, None, 2, 2, (9, 2, 3)),  # 2 + 2 + 1
        (1, 1, None, 1, (1, 1, 1)),
    ],
)
def test_two_sizes_give_the_third(effective, factor, micro, replicas, expected):
    cut = sizes.derive(effective, factor, micro, replicas)
    assert (cut.effective_batch_size, cut.micro_batch_size, cut.factor) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((128, None, None), "accumulation must give two of"),
        (
            (0, 4, None),
            "accumulation.effective_batch_size must be at least 1. Received: 0.",
        ),
        ((128, -1, None), "accumulation.factor must be at least 1. Received: -1."),
        (
            (128, 4, 16),
            "accumulation.factor must agree with effective batch 128 and "
            "micro-batch 16",
        ),
        (
            (16, None, 32),
            "accumulation.micro_batch_size must be at most the 16 examples",
        ),
        (
            (8, None, 5, 2),
            "accumulation.micro_batch_size must be at most the 4 examples",
        ),
        (
            (1, 1, None, 2),
            "accumulation.effective_batch_size must be at least the number of "
            "replicas, 2",
        ),
        (
            (10, 6, None),
            "accumulation.factor must be a number of micro-batches that 10 examples "
            "can be cut into, all of one size except for a smaller last one. "
            "Received: 6. Choices: 3, 4, 5",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ConfigError) as refused:
        sizes.derive(*arguments)
    assert message in str(refused.value)


def nearest_of_all(share: int, factor: int) -> list[int]:
    """The three valid factors that are nearest to `factor`, out of all of them."""
    valid = {-(-share // size) for size in range(1, share + 1)}
    nearest = sorted(sorted(valid), key=lambda other: abs(other - factor))
    return sorted(nearest[:3])


@pytest.mark.parametrize("share", [*range(1, 40), 100, 128, 997])
def test_the_valid_factors_that_are_nearest_are_offered(share):
    valid = {-(-share // size) for size in range(1, share + 1)}
    for factor in range(1, share + 50):
        if factor in valid:
            continue
        with pytest.raises(ConfigError) as refused:
            sizes.derive(share, factor, None)
        assert refused.value.choices == [
            str(other) for other in nearest_of_all(share, factor)
        ]


def test_the_valid_factors_of_a_huge_batch_are_found_at_once():
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"Choices: 2500000, 2857143, 3333334\."):
        sizes.derive(20_000_000, 3_000_000, None)
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize(
    ("horizon", "length", "updates"),
    [
        ("epochs", 10, 120),
        ("updates", 7, 7),
        ("examples", 1437, 12),
        ("examples", 1438, 13),
        ("examples", 2 * 1437 + 128, 25),
        ("examples", 1, 1),
    ],
)
def test_the_horizon_is_counted_in_updates(horizon, length, updates):
    batching = sizes.derive(128, 4, None)
    plan = plan_of(batching, 1437, sizes.Horizon(horizon, length))
    assert plan.updates == updates


def test_the_sum_is_printed():
    plan = plan_of(sizes.derive(128, 4, None), 1437, sizes.Horizon("epochs", 10))
    # 1437 = 11 · 128 + 29
    assert str(plan) == (
        "effective batch 128 = 32 × 4 × 1 replica; "
        "1437 examples → 12 updates per epoch (last one 29), 120 in all"
    )


@pytest.mark.parametrize(
    ("examples", "effective", "micro", "replicas"),
    [
        (1437, 128, 24, 1),
        (1437, 128, 24, 2),
        (10, 5, 5, 1),
        (11, 5, 2, 2),
        (11, 11, 3, 3),
        (5, 1, 1, 1),
    ],
)
def test_the_counters_are_what_counting_gives(examples, effective, micro, replicas):
    batching = sizes.derive(effective, None, micro, replicas)
    plan = plan_of(batching, examples, sizes.Horizon("epochs", 3))
    epoch = [effective] * (examples // effective)
    tail = examples % effective
    if tail:
        epoch.append(tail)

    seen = micro_steps = 0
    for update, size in enumerate(epoch * 3, 1):
        share = -(-size // replicas)
        seen += size
        micro_steps += len(range(0, share, micro))
        assert plan.batch_size(update) == size
        assert plan.examples_seen(update) == seen
        assert plan.micro_steps(update) == micro_steps
        assert plan.epoch(update) == seen / examples
        assert plan.ends_epoch(update) == (seen % examples == 0)
    assert plan.updates == update
    assert plan.updates_per_epoch == len(epoch)
    assert plan.epochs == 3


def test_an_effective_batch_larger_than_the_split_is_refused():
    line = r"effective_batch_size must be at most the 100 examples .* Received: 128"
    with pytest.raises(ConfigError, match=line):
        plan_of(sizes.derive(128, 4, None), 100, sizes.Horizon("epochs", 1))


def test_the_plan_of_a_stream_has_nothing_that_needs_the_number_of_examples():
    cut = sizes.Batching(32, 32, 1)
    plan = stream_plan(cut, sizes.Horizon("updates", 9), [], None, cut=True)
    for name in ("slices", "updates_at", "stage", "stages", "all_stages"):
        assert not hasattr(plan, name), name
    assert plan.changes == []
    assert plan.halved(3, 16).micro_batch_size == 16


def test_micro_steps_of_a_run_that_was_halved_go_on_from_the_rows_that_are_written():
    batching = sizes.derive(128, None, 16)
    plan = plan_of(batching, 128 * 300, sizes.Horizon("updates", 300))
    halved = plan.halved(119, 8)
    assert halved.tags == {
        HALVED: "16 up to update 119, 8 then",
        CUTS: "[[16, 119], [8, null]]",
    }
    recorded = recorded_cuts(halved.tags)
    assert recorded == recorded_cuts({HALVED: halved.tags[HALVED]})  # of an older run
    assert [halved.micro_steps(update) for update in (1, 119, 120, 170)] == [
        8,
        952,
        968,
        1768,
    ]
    # Resumed from a checkpoint before it, with the size of the config again, while
    # rows up to 170 are written.
    resumed = plan.after(recorded, 170)
    assert resumed.tags[HALVED] == "16 up to update 119, 8 up to update 170, 16 then"
    assert [resumed.micro_steps(update) for update in (120, 170, 171)] == [
        968,
        1768,
        1776,
    ]
    # What did not fit does not fit again. The rows that are written keep their counts.
    again = resumed.halved(119, 8)
    assert again.tags[HALVED] == (
        "16 up to update 119, 8 up to update 170, 16 up to update 170, 8 then"
    )
    assert [again.micro_steps(update) for update in (119, 170, 171)] == [
        952,
        1768,
        1784,
    ]


# --- a limit of tokens ---


def by_tokens(tokens=512, **others):
    """Return the config group of a run that is cut by tokens, with conf's defaults."""
    defaults = {
        "effective_batch_size": 128,
        "factor": 4,
        "micro_batch_size": None,
        "micro_batch_tokens": tokens,
    }
    return defaults | others


def test_a_limit_of_tokens_outranks_the_default_factor():
    group = by_tokens()
    in_force = sizes.sizes_in_force(group, {sizes.TOKENS})
    assert in_force == {
        "effective_batch_size": 128,
        "factor": None,
        "micro_batch_size": None,
    }
    cut = sizes.batching(group | in_force, 2)
    assert cut == sizes.Batching(128, 64, 1, 2, 512)
    assert cut.is_cut
    assert str(cut) == (
        "effective batch 128 in micro-batches of at most 512 tokens, padding included, "
        "on 2 replicas"
    )


def test_examples_beside_tokens_are_a_limit():
    group = by_tokens(factor=None, micro_batch_size=8)
    group |= sizes.sizes_in_force(group, {sizes.TOKENS, sizes.MICRO})
    cut = sizes.batching(group, 1)
    assert cut.micro_batch_size == 8
    assert "at most 512 tokens and 8 examples, padding included" in str(cut)
    assert cut.with_effective_batch_size(256).micro_batch_size == 8
    # Without such a limit, there is none in larger batches either.
    free = sizes.batching(by_tokens(factor=None), 1)
    assert free.with_effective_batch_size(256).micro_batch_size == 256


def test_a_factor_on_the_command_line_outranks_the_tokens_of_a_file():
    in_force = sizes.sizes_in_force(by_tokens(), {sizes.FACTOR})
    assert in_force == {
        "effective_batch_size": 128,
        "factor": 4,
        "micro_batch_size": None,
        "micro_batch_tokens": None,
    }
    # A null there is no factor.
    in_force = sizes.sizes_in_force(by_tokens(factor=None), {sizes.FACTOR})
    assert "micro_batch_tokens" not in in_force


def test_cuts_by_tokens_that_were_halved_are_recorded_in_tokens():
    cut = sizes.Batching(128, 128, 1, 1, 512)
    plan = plan_of(cut, 1280, sizes.Horizon("updates", 100))
    halved = plan.halved(40, 256)
    assert halved.batching.limit == 256
    assert halved.tags == {
        HALVED: "512 tokens up to update 40, 256 tokens then",
        CUTS: "[[512, 40], [256, null]]",
    }
    resumed = plan.after(recorded_cuts(halved.tags), 60)
    assert resumed.tags[CUTS] == "[[512, 40], [256, 60], [512, null]]"
