"""The learning rate where the effective batch changes: by rule, by clock, and by `seesaw`, against values by hand."""

from __future__ import annotations

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.components import optimizer, stage_rates
from pipeline.components.stage_rates import StageRates
from pipeline.config import sizes
from pipeline.config.plan import plan_of
from pipeline.config.stages import Asked
from tests.config.test_stages import RAMP, resolved

EXAMPLES = 1000
ADAM = (
    "optimizer=adam",
    "schedule=constant",
    "optimizer.learning_rate=0.01",
    "scaling.reference_batch_size=64",
)
STAGES = "accumulation.batch_schedule=[{start:{updates:0},effective_batch_size:32},{start:{updates:3},effective_batch_size:128}]"  # noqa: E501


def built(*given, examples=EXAMPLES):
    """The rates of a run by update, from the first on, what was said of them, and its plan."""
    spec = resolved(given)
    plan = plan_of(
        spec.batching, examples, spec.horizon, optimizer.stages(spec, examples)
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
        (
            ["scaling=linear", "scaling.warmup=0", "accumulation.scale_rate=false"],
            0.5,
            0.5,
        ),
    ],
    ids=["none", "linear", "sqrt", "surge", "unscaled"],
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
        built(
            "optimizer=adamw",
            f"scaling={rule}",
            STAGES,
            "accumulation.scale_rate=false",
        )
    with pytest.raises(
        ConfigError,
        match=r"^scaling\.ema must be false with accumulation\.batch_schedule",
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


SEESAW = (
    "accumulation.batch_schedule=seesaw",
    "accumulation.effective_batch_size=10",
    "accumulation.micro_batch_size=5",
)


def test_seesaw_on_a_cosine():
    given = (
        "accumulation.seesaw_max=80",
        "training.epochs=4",
        "optimizer.learning_rate=0.01",
        "schedule=cosine",
    )
    rates, _, plan = built(
        *SEESAW, *given, "schedule.warmup_steps=20", "schedule.decay_steps=380"
    )
    # ½(1 + cos πt) is ½, ¼, ⅛ at t = 0.5, 0.6667, 0.7699: 20 + 380 t is 210, 273.3, 312.6 updates of 10 examples.
    assert [(size, plan.examples_seen(after)) for after, size in plan.changes] == [
        *((10, 0), (20, 2100)),
        *(
            (40, 2740),
            (80, 3160),
        ),  # 274 · 10; 3000 + 4 · 40 is the first update from 313 · 10 on
    ]
    held = [rates[after] for after, _ in plan.changes]
    assert held[1:3] == pytest.approx([0.01 / math.sqrt(2), 0.01 / 2], rel=1e-6)
    first, second, third = (after for after, _ in plan.changes[1:])
    assert rates[20:first] == [rates[20]] * (first - 20)
    assert rates[20] == pytest.approx(0.01, rel=1e-6)
    assert rates[first:second] == [held[1]] * (second - first)
    assert rates[10] == pytest.approx(
        0.0055, rel=1e-6
    )  # the warm-up stays: from a tenth of the rate
    # The last stage follows the cosine, times √8.
    seen = np.array(
        [plan.examples_seen(update) for update in range(third, plan.updates)]
    )
    cosine = 0.005 * (1 + np.cos(np.pi * (seen / 10 - 20) / 380))
    assert rates[third:] == pytest.approx(
        (math.sqrt(8) * cosine).tolist(), rel=1e-5, abs=1e-8
    )
    assert plan.examples_seen(plan.updates) == 4000
    assert plan.updates < 300  # in place of 400


def test_seesaw_on_steps():
    """A rate that is halved at 40% and divided by eight at 70%: the batch doubles, then grows by eight at once."""
    steps = (
        "schedule=piecewise",
        "schedule.boundaries=[40%,70%]",
        "schedule.values=[0.8,0.4,0.05]",
    )
    _, _, plan = built(
        *SEESAW, *steps, "accumulation.seesaw_max=1000", "training.epochs=1"
    )
    assert [(size, plan.examples_seen(after)) for after, size in plan.changes] == [
        (10, 0),
        (20, 410),
        (160, 710),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["schedule=constant"],
            r"schedule must fall to half of its peak, and rise no more, with accumulation.batch_schedule",
        ),
        (
            [
                "schedule=piecewise",
                "schedule.boundaries=[20%,50%]",
                "schedule.values=[0.8,0.1,0.4]",
            ],
            r"schedule must fall to half of its peak, and rise no more",
        ),
        (
            ["schedule=cosine", "accumulation.seesaw_max=2000"],
            r"accumulation.seesaw_max must be at most the 1000 exam",
        ),
    ],
)
def test_seesaw_needs_a_rate_that_falls(given, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        built(*SEESAW, "accumulation.seesaw_max=80", *given)


def test_a_schedule_of_a_million_updates_is_searched_to_a_share_of_it():
    cosine = keras.optimizers.schedules.CosineDecay(
        0.0, 950_000, warmup_target=1.0, warmup_steps=50_001
    )
    found = stage_rates.seesaw(cosine, 10**6, 32, 256)
    assert [stage.size for stage in found] == [32, 64, 128, 256]
    at = [
        50_001 + 950_000 * math.acos(2 * share - 1) / math.pi
        for share in (1 / 2, 1 / 4, 1 / 8)
    ]
    assert [stage.start / 32 for stage in found[1:]] == pytest.approx(
        at, abs=10**6 / stage_rates.GRID + 1
    )
