"""The learning rate where the effective batch changes: by rule and by clock, against values by hand."""

from __future__ import annotations

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.components import optimizer
from pipeline.components.stage_rates import StageRates
from pipeline.config import sizes
from pipeline.config.plan import plan_of
from pipeline.config.stages import Asked, asked
from tests.config.test_stages import RAMP, resolved

EXAMPLES = 1000
ADAM = (
    "optimizer=adam",
    "schedule=constant",
    "optimizer.learning_rate=0.01",
    "scaling.reference_batch_size=64",
)
STAGES = "accumulation.schedule=[{start:{updates:0},effective_batch_size:32},{start:{updates:3},effective_batch_size:128}]"  # noqa: E501


def built(*given, examples=EXAMPLES):
    """The rates of a run by update, from the first on, what was said of them, and its plan."""
    spec = resolved(given)
    plan = plan_of(
        spec.batching, examples, spec.horizon, asked(spec.config.accumulation.schedule)
    )
    made, said = optimizer.build(spec, plan.updates, plan)
    if isinstance(made._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        rate = tf.function(
            made._learning_rate, input_signature=[tf.TensorSpec([], tf.int64)]
        )
        return [float(rate(update)) for update in range(plan.updates)], said, plan
    return [float(made.learning_rate)] * plan.updates, said, plan


@pytest.mark.parametrize(
    ("given", "first", "later"),
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
def test_the_rate_at_a_stage_follows_the_rule(given, first, later):
    rates, said, _ = built(*ADAM, *given, STAGES, "training.updates=6")
    assert rates == pytest.approx([0.01 * first] * 3 + [0.01 * later] * 3, rel=1e-6)
    assert ("after update 3" in said) == (first != later)


@pytest.mark.slow
def test_other_arguments_of_an_optimizer_do_not_follow():
    for rule in ("sde", "timescale"):
        with pytest.raises(
            ConfigError,
            match=r"^scaling.rule must not change β or the weight decay with accumulation",
        ):
            built("optimizer=adamw", f"scaling={rule}", STAGES)
    with pytest.raises(
        ConfigError, match=r"^scaling\.ema must be false with accumulation\.schedule"
    ):
        built("scaling=linear", "scaling.ema=true", "+optimizer.use_ema=true", STAGES)


def test_a_clock_of_examples_is_at_the_examples_seen():
    """In updates of 32 examples, at each place of a run whose stages begin inside of epochs."""
    given = (
        RAMP.replace("400", "7").replace("12", "1.5"),
        "training.epochs=6",
        "schedule=exponential",
    )
    rates, _, plan = built(
        *given,
        "schedule.clock=examples",
        "schedule.decay_steps=50",
        "schedule.decay_rate=0.5",
    )
    clock = np.array(
        [plan.examples_seen(update) / 32 for update in range(plan.updates)]
    )
    assert rates == pytest.approx((0.01 * 0.5 ** (clock / 50)).tolist(), rel=1e-6)
    by_updates, _, _ = built(
        *given, "schedule.decay_steps=50", "schedule.decay_rate=0.5"
    )
    assert by_updates == pytest.approx(
        [0.01 * 0.5 ** (update / 50) for update in range(plan.updates)], rel=1e-6
    )
    assert rates != pytest.approx(by_updates, rel=1e-3)
    # A share of the horizon: 6 epochs of 1000 examples are 187.5 updates of 32, rounded up.
    half, _, _ = built(
        *given,
        "schedule.clock=examples",
        "schedule.decay_steps=50%",
        "schedule.decay_rate=0.5",
    )
    assert half == pytest.approx((0.01 * 0.5 ** (clock / 94)).tolist(), rel=1e-6)


def test_the_clock_is_that_of_the_plan_at_hundreds_of_thousands_of_updates():
    asked = [Asked("updates", number * 10**5, 32 + number) for number in range(4)]
    plan = plan_of(
        sizes.derive(32, 4, None), 10**6 + 1, sizes.Horizon("updates", 10**6), asked
    )
    given = [
        [stage.after, stage.size, stage.epoch, stage.first, stage.in_epoch]
        for stage in plan.stages
    ]
    clock = tf.function(
        StageRates(lambda step: step, given, [1.0] * len(given), plan.examples)
    )
    for update in (
        0,
        1,
        31_250,
        31_251,
        99_999,
        100_000,
        100_001,
        234_567,
        300_000,
        765_432,
    ):
        assert (
            float(clock(tf.constant(update, tf.int64)))
            == plan.examples_seen(update) / 32
        )
    saved = StageRates(
        keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.5),
        given,
        [1.5] * len(given),
        1001,
    )
    again = StageRates.from_config(json.loads(json.dumps(saved.get_config())))
    assert float(again(250_000)) == float(saved(250_000))
    by_version_0_1_0 = {**saved.get_config(), "peak": None}
    assert StageRates.from_config(by_version_0_1_0).get_config() == saved.get_config()
    with pytest.raises(TypeError, match="peak"):
        StageRates.from_config({**by_version_0_1_0, "peak": [3, 0.1]})
