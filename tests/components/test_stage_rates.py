"""The learning rate where the effective batch changes, by rule and by clock.

Expected values are computed by hand.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.components import optimizer
from pipeline.components.stage_rates import StageRates
from pipeline.config import sizes
from pipeline.config.plan import Plan, plan_of
from pipeline.config.stages import ScheduledStage, parse_schedule
from tests.composing import spec_of
from tests.config.test_stages import RAMP

EXAMPLES = 1000
ADAM = (
    "optimizer=adam",
    "schedule=constant",
    "optimizer.learning_rate=0.01",
    "scaling.reference_batch_size=64",
)
STAGES = (
    "accumulation.batch_schedule=[{start:{updates:0},effective_batch_size:32},"
    "{start:{updates:3},effective_batch_size:128}]"
)


@dataclass
class Built:
    """The learning rates of a run."""

    rates: list[float]  # by update, from the first on
    scaling: str  # the line about what the rule changed
    plan: Plan


def built(*overrides: str) -> Built:
    spec = spec_of(overrides)
    batch_schedule = parse_schedule(spec.config.accumulation.batch_schedule)
    plan = plan_of(spec.batching, EXAMPLES, spec.horizon, batch_schedule)

    built_optimizer, scaling = optimizer.build(spec, plan.updates, plan)
    schedule = built_optimizer._learning_rate
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return Built(
            [float(built_optimizer.learning_rate)] * plan.updates, scaling, plan
        )

    rate = tf.function(schedule, input_signature=[tf.TensorSpec([], tf.int64)])
    rates = [float(rate(update)) for update in range(plan.updates)]
    return Built(rates, scaling, plan)


@pytest.mark.parametrize(
    ("overrides", "first", "later"),
    [
        (["scaling=none"], 1, 1),
        (["scaling=linear", "scaling.warmup=0"], 0.5, 2),
        (["scaling=sqrt", "scaling.warmup=0"], math.sqrt(0.5), math.sqrt(2)),
        # Its peak is at 128: f(32) = 2 / (2 + ½), f(64) = 2 / (√2 + √½), f(128) = 1.
        (
            ["scaling=surge", "scaling.peak_batch_size=128"],
            0.8 / (2 / 1.5 / math.sqrt(2)),
            1.5 * math.sqrt(2) / 2,
        ),
    ],
    ids=["none", "linear", "sqrt", "surge"],
)
def test_the_rate_at_a_stage_follows_the_rule(overrides, first, later):
    run = built(*ADAM, *overrides, STAGES, "training.updates=6")
    expected = [0.01 * first] * 3 + [0.01 * later] * 3
    assert run.rates == pytest.approx(expected, rel=1e-6)
    assert ("after update 3" in run.scaling) == (first != later)


@pytest.mark.slow
def test_other_arguments_of_an_optimizer_do_not_follow():
    for rule in ("sde", "timescale"):
        message = (
            r"^scaling.rule must not change β or the weight decay with accumulation"
        )
        with pytest.raises(ConfigError, match=message):
            built("optimizer=adamw", f"scaling={rule}", STAGES)
    with pytest.raises(
        ConfigError,
        match=r"^scaling\.ema must be false with accumulation\.batch_schedule",
    ):
        built("scaling=linear", "scaling.ema=true", "+optimizer.use_ema=true", STAGES)


def test_a_clock_of_examples_is_at_the_examples_seen():
    """It counts updates of 32 examples, in a run whose stages begin within epochs."""
    overrides = (
        RAMP.replace("400", "7").replace("12", "1.5"),
        "training.epochs=6",
        "schedule=exponential",
        "schedule.decay_rate=0.5",
    )
    by_examples = built(
        *overrides, "schedule.clock=examples", "schedule.decay_steps=50"
    )
    plan = by_examples.plan
    examples = [plan.examples_seen(update) for update in range(plan.updates)]
    clock = np.array(examples) / 32
    expected = (0.01 * 0.5 ** (clock / 50)).tolist()
    assert by_examples.rates == pytest.approx(expected, rel=1e-6)

    by_updates = built(*overrides, "schedule.decay_steps=50")
    expected = (0.01 * 0.5 ** (np.arange(plan.updates) / 50)).tolist()
    assert by_updates.rates == pytest.approx(expected, rel=1e-6)
    assert by_examples.rates != pytest.approx(by_updates.rates, rel=1e-3)

    # A share of the horizon: 6 epochs of 1000 examples are 187.5 updates of 32, which
    # are rounded up.
    half = built(*overrides, "schedule.clock=examples", "schedule.decay_steps=50%")
    expected = (0.01 * 0.5 ** (clock / 94)).tolist()
    assert half.rates == pytest.approx(expected, rel=1e-6)


def test_the_clock_is_that_of_the_plan_at_hundreds_of_thousands_of_updates():
    batch_schedule = []
    for number in range(4):
        batch_schedule.append(ScheduledStage("updates", number * 10**5, 32 + number))
    horizon = sizes.Horizon("updates", 10**6)
    plan = plan_of(sizes.derive(32, 4, None), 10**6 + 1, horizon, batch_schedule)
    stages = [
        [stage.after, stage.size, stage.epoch, stage.first, stage.in_epoch]
        for stage in plan.stages
    ]

    ones = [1.0] * len(stages)
    clock = tf.function(StageRates(lambda step: step, stages, ones, plan.examples))
    updates = [0, 1, 31_250, 31_251, 99_999, 100_000, 100_001, 234_567, 300_000]
    for update in (*updates, 765_432):
        rate = float(clock(tf.constant(update, tf.int64)))
        assert rate == plan.examples_seen(update) / 32


def test_the_schedule_can_be_saved_and_loaded():
    saved = StageRates(
        keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.5),
        [[0, 32, 0, 0, 32], [100_000, 33, 3195, 160, 31], [100_031, 33, 3196, 0, 31]],
        [1.5, 1.5, 1.5],
        1001,
    )
    loaded = StageRates.from_config(json.loads(json.dumps(saved.get_config())))
    assert float(loaded(250_000)) == float(saved(250_000))

    by_version_0_1_0 = {**saved.get_config(), "peak": None}
    assert StageRates.from_config(by_version_0_1_0).get_config() == saved.get_config()
    with pytest.raises(TypeError, match="peak"):
        StageRates.from_config({**by_version_0_1_0, "peak": [3, 0.1]})
