"""Every ready optimizer and schedule builds, and its lengths are counted in updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.components import optimizer
from pipeline.config.compose import directory
from pipeline.config.plan import ENDLESS
from pipeline.config.resolve import resolve
from pipeline.config.sizes import derive
from tests.composing import config_of
from tests.parameters import mostly_slow

HORIZON = 200


def build(config, effective_batch_size):
    spec = resolve(config)
    return optimizer.build(
        replace(spec, batching=derive(effective_batch_size, 1, None)), HORIZON
    )[0]


def test_the_counter_is_on_the_host_and_the_moments_are_with_the_weights():
    with tf.device("CPU:1"):
        made = build(config_of(), 128)
        made.build([keras.Variable(np.ones(2))])
    moments = [variable for variable in made.variables if variable.shape == (2,)]
    assert made.iterations.value.device.endswith("CPU:0")
    assert [moment.value.device[-5:] for moment in moments] == ["CPU:1", "CPU:1"]


def rates(*overrides):
    schedule = optimizer.build_schedule(config_of(*overrides).schedule, HORIZON)
    return [float(schedule(update)) for update in range(HORIZON + 1)]


READY = sorted(path.stem for path in Path(directory(), "optimizer").glob("*.yaml"))
EXPECTED = {
    "adafactor": keras.optimizers.Adafactor,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "lion": keras.optimizers.Lion,
    "momentum": keras.optimizers.SGD,
    "muon": keras.optimizers.Muon,
    "rmsprop": keras.optimizers.RMSprop,
    "sgd": keras.optimizers.SGD,
}


@pytest.mark.parametrize("name", mostly_slow(READY, ["adamw"]))
def test_every_ready_optimizer_builds(name):
    config = config_of(
        f"optimizer={name}", "schedule=constant", "optimizer.global_clipnorm=0.5"
    )
    made = build(config, 128)
    assert type(made) is EXPECTED[name]
    assert made.global_clipnorm == 0.5
    assert float(made.learning_rate) == np.float32(config.optimizer.learning_rate)
    ours = {"_target_", "learning_rate", "exclude_from_decay"}
    for key in set(config.optimizer) - ours:
        assert getattr(made, key) == config.optimizer[key]


def test_muon_takes_the_rate_of_any_schedule_in_float64(float64):
    """Keras computes the rate in float32, and Muon alone does not cast it."""
    weights = keras.Variable(np.ones((3, 2)), dtype="float64")
    made = build(config_of("optimizer=muon", "schedule=cosine"), 128)
    made.build([weights])
    optimizer.check(made, [weights])
    in_float32 = optimizer.build_schedule(
        config_of("schedule=cosine").schedule, HORIZON
    )
    assert float(made.learning_rate) == float(in_float32(0))

    again = keras.optimizers.schedules.deserialize(
        keras.optimizers.schedules.serialize(made._learning_rate)
    )
    assert float(again(3)) == float(made._learning_rate(3))

    # The control: Keras' own.
    plain = keras.optimizers.Muon(in_float32)
    plain.build([weights])
    with pytest.raises(ConfigError, match="must be able to apply a gradient"):
        optimizer.check(plain, [weights])


def test_adafactor_survives_inputs_and_units_that_are_always_zero():
    gradient = np.full((4, 4), 1e-2, "float32")
    gradient[0] = 0  # of an input
    gradient[:, 0] = 0  # of a unit

    def stepped(*overrides):
        weights = keras.Variable(np.ones((4, 4)), dtype="float32")
        made = build(config_of("optimizer=adafactor", *overrides), 128)
        made.build([weights])
        made.apply([tf.constant(gradient)], [weights])
        return weights.numpy()

    assert np.isfinite(stepped()).all()
    assert np.isnan(stepped("optimizer.epsilon_1=1e-30")).any()  # as Keras has it


def test_half_precision_gets_a_loss_scale():
    made = build(config_of("hardware.precision=mixed_float16", "optimizer=adamw"), 128)
    assert type(made) is keras.optimizers.LossScaleOptimizer
    assert type(made.inner_optimizer) is keras.optimizers.AdamW


# At a rate of 1 and 200 updates. Cosine: 5% = 10 of warm-up from a tenth, then half a
# cosine over 95% = 190.
RATES = {
    "cosine": {0: 0.1, 5: 0.55, 10: 1.0, 10 + 95: 0.5, 200: 0.0},
    "exponential": {0: 1.0, 66: 0.1, 132: 0.01},  # 33% are 66 updates
    "inverse_sqrt": {0: 0.1, 4: 0.5, 9: 1.0, 39: 0.5, 159: 0.25},  # √(10/40), √(10/160)
    "piecewise": {0: 1.0, 100: 1.0, 101: 0.1, 150: 0.1, 151: 0.01},
    "wsd": {0: 0.1, 9: 1.0, 160: 1.0, 180: 0.5, 199: 0.025, 200: 0.0},  # 20% are 40
}


@pytest.mark.parametrize("name", mostly_slow(RATES, ["cosine"]))
def test_lengths_are_shares_of_the_horizon(name):
    made = rates(f"schedule={name}", "optimizer.learning_rate=1.0")
    assert {update: made[update] for update in RATES[name]} == pytest.approx(
        RATES[name], abs=1e-6
    )  # float32


SCHEDULES = sorted(path.stem for path in Path(directory(), "schedule").glob("*.yaml"))


@pytest.mark.parametrize("schedule", mostly_slow(SCHEDULES, ["constant"]))
def test_a_whole_number_is_a_learning_rate_as_the_float_is(schedule):
    def rates_of(rate):
        config = config_of(
            "optimizer=momentum",
            f"optimizer.learning_rate={rate}",
            f"schedule={schedule}",
        )
        made = build(config, 128)
        made.build([keras.Variable(np.ones(2))])
        found = []
        for update in (0, 50, HORIZON):
            made.iterations.assign(update)
            found.append(float(made.learning_rate))
        return found

    assert rates_of("1") == rates_of("1.0")


def test_a_whole_number_is_a_momentum():
    made = build(config_of("optimizer=momentum", "optimizer.momentum=0"), 128)
    assert made.momentum == 0.0


def test_inverse_square_root_is_its_formula():
    made = rates(
        "schedule=inverse_sqrt",
        "optimizer.learning_rate=0.3",
        "schedule.warmup_steps=7",
    )
    expected = []
    for update in range(1, HORIZON + 2):
        expected.append(0.3 * min(update / 7, (7 / update) ** 0.5))
    assert made == pytest.approx(expected, rel=1e-6)  # float32

    schedule = optimizer.InverseSquareRoot(0.3, 7)
    again = keras.optimizers.schedules.deserialize(
        keras.optimizers.schedules.serialize(schedule)
    )
    assert float(again(20)) == float(schedule(20))


def wsd(done, warmup, decay, total):
    """Return the rate after `done` updates, by the three phases in turn."""
    if done >= total:
        return 0.0
    rate = 0.3
    if done < warmup:
        rate = 0.3 * (done + 1) / warmup
    if done > total - decay:
        rate = min(rate, 0.3 * (total - done) / decay)
    return rate


@pytest.mark.parametrize(
    ("warmup", "decay", "total"),
    [
        pytest.param(7, 30, 200, marks=pytest.mark.slow),
        pytest.param(0, 1, 200, marks=pytest.mark.slow),  # stable to the end
        (30, 190, 200),  # no stable phase: the lower line counts
        (7, 30, 150),  # the horizon is beyond the decay
    ],
)
def test_warmup_stable_decay_is_its_formula(float64, warmup, decay, total):
    overrides = (
        "schedule=wsd",
        "optimizer.learning_rate=0.3",
        f"schedule.warmup_steps={warmup}",
        f"schedule.decay_steps={decay}",
        f"schedule.total_steps={total}",
    )
    expected = []
    for done in range(HORIZON + 1):
        expected.append(wsd(done, warmup, decay, total))
    assert rates(*overrides) == pytest.approx(expected, rel=1e-14, abs=1e-15)

    schedule = optimizer.build_schedule(config_of(*overrides).schedule, HORIZON)
    again = keras.optimizers.schedules.deserialize(
        keras.optimizers.schedules.serialize(schedule)
    )
    assert [float(again(done)) for done in (0, 100, 149)] == [
        float(schedule(done)) for done in (0, 100, 149)
    ]


@pytest.mark.parametrize("updates", mostly_slow([1, 2, 3], [2]))
def test_no_update_of_a_short_run_is_lost_by_warmup_stable_decay(updates):
    schedule = optimizer.build_schedule(config_of("schedule=wsd").schedule, updates)
    assert all(float(schedule(done)) > 0 for done in range(updates))


@pytest.mark.parametrize(
    "overrides",
    mostly_slow(
        [
            *([f"schedule={name}"] for name in RATES),
            ["scaling=linear"],
            ["scaling=sqrt", "schedule=inverse_sqrt"],
        ],
        [["schedule=exponential"], ["scaling=linear"]],
    ),
    ids=" ".join,
)
def test_a_traced_update_uses_the_rate_that_a_reader_computes(overrides):
    """To one unit in the last place of float32.

    TensorFlow's graph optimizer turns x / c into x · (1/c). In an exponential, x is an
    exponent: its 1.5 units move rate = r₀·dˣ by 1.5·|ln dˣ| = 1.5·|ln(rate / r₀)|
    units, and the power and the product round once each.
    """
    config = config_of(*overrides, "optimizer.learning_rate=0.007")
    made = build(config, 96)
    traced = tf.function(lambda: tf.convert_to_tensor(made.learning_rate))
    for update in range(HORIZON):
        made.iterations.assign(update)
        expected = np.float32(made.learning_rate)
        units = 1
        if "schedule=exponential" in overrides:
            units = 2 + 1.5 * abs(np.log(expected / 0.007))
        difference = abs(np.float32(traced()) - expected)
        assert difference <= units * np.spacing(expected), update


@pytest.mark.parametrize(
    ("rule", "batch", "first", "middle", "last"),
    [
        pytest.param("none", 512, 1, 1, 1, marks=pytest.mark.slow),
        (
            "linear",
            512,
            1 + 3 / 10,
            1 + 3 * 5 / 10,
            4,
        ),  # from the rate of the reference batch to four times that
        ("sqrt", 512, 1 + 1 / 10, 1 + 5 / 10, 2),
        ("linear", 32, 1 / 4, 1 / 4, 1 / 4),  # no detour over the larger rate
        pytest.param("sqrt", 32, 1 / 2, 1 / 2, 1 / 2, marks=pytest.mark.slow),
        pytest.param("linear", 128, 1, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_the_rate_is_scaled_for_the_batch(rule, batch, first, middle, last):
    """The reference is 128, and the warm-up 5% of 200 updates.

    The rate is a tenth of the way after the first update, half of it after five.
    """
    config = config_of(
        f"scaling={rule}", "schedule=constant", "optimizer.learning_rate=1.0"
    )
    schedule = build(config, batch)._learning_rate
    rates_at = []
    for update in (0, 4, 9, 10, HORIZON - 1):
        rate = schedule(update) if callable(schedule) else schedule
        rates_at.append(float(rate))
    expected = [first, middle, last, last, last]
    assert rates_at == pytest.approx(expected, rel=1e-6)  # float32


@pytest.mark.parametrize(
    ("share", "updates"),
    mostly_slow(
        [("50%", 100), ("2.5%", 5), ("0.1%", 1), ("100%", 200)],
        [("2.5%", 5), ("0.1%", 1)],
    ),
)
def test_a_share_is_at_least_one_update(share, updates):
    schedule = optimizer.build_schedule(
        config_of("schedule=exponential", f"schedule.decay_steps={share}").schedule, 200
    )
    assert schedule.decay_steps == updates


@pytest.mark.parametrize(
    ("overrides", "warmup", "decay"),
    [
        ([], 6, 114),
        (["schedule.warmup_steps=50"], 50, 70),
        (["schedule.warmup_steps=5e1"], 50, 70),
        (["schedule.warmup_steps=10%"], 12, 108),
        (["schedule.warmup_steps=120"], 120, 1),
        (["schedule=wsd", "schedule.decay_steps=rest"], 6, 114),
    ],
)
def test_a_decay_takes_the_updates_that_the_warm_up_leaves(overrides, warmup, decay):
    """With a warm-up of 50 updates, the cosine ended far above zero."""
    node = config_of(*overrides).schedule
    schedule = optimizer.build_schedule(node, 120)
    assert (schedule.warmup_steps, schedule.decay_steps) == (warmup, decay)
    with pytest.raises(ConfigError, match="must be a number of updates if the length"):
        optimizer.build_schedule(node, ENDLESS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["schedule.warmup_steps=x%"],
            "schedule.warmup_steps must be a share of the horizon such as 5%",
        ),
        (
            ["schedule.warmup_steps=101%"],
            "schedule.warmup_steps must be from 0% to 100%. Received: '101%'.",
        ),
        (
            ["schedule=inverse_sqrt", "schedule.warmup_steps=0"],
            "warmup_steps must be at least 1. Received: 0",
        ),
        (
            ["schedule=wsd", "schedule.decay_steps=0"],
            "schedule.decay_steps must be a whole number of updates from 1 on.",
        ),
        (
            ["schedule=wsd", "schedule.total_steps=90.5"],
            "schedule.total_steps must be a whole number of updates from 1 on.",
        ),
        (
            ["schedule=wsd", "schedule.warmup_steps=201"],
            "schedule.warmup_steps must be a whole number of updates from 0 to the "
            "horizon's 200. Received: 201.",
        ),
        (
            ["schedule._target_=builtins.dict"],
            "schedule._target_ must name a Keras schedule or give a number",
        ),
        (
            ["optimizer._target_=builtins.dict"],
            "optimizer._target_ must name a keras.optimizers.Optimizer",
        ),
        (
            ["+optimizer.beta_3=1"],
            "optimizer is rejected by keras.optimizers.AdamW "
            "(ValueError: Argument(s) not recognized",
        ),
        (
            ["+optimizer.gradient_accumulation_steps=2"],
            "the pipeline accumulates; set accumulation.factor",
        ),
    ],
)
def test_what_is_no_optimizer_or_schedule_is_rejected(overrides, message):
    with pytest.raises(ConfigError) as error:
        build(config_of(*overrides), 128)
    assert message in str(error.value)
