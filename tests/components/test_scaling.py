"""What each rule of `scaling` makes of an optimizer, against its formula by hand."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.components import optimizer
from pipeline.config.sizes import derive
from tests.composing import spec_of

HORIZON = 200
ADAMW = (
    "optimizer=adamw",
    "optimizer.learning_rate=0.01",
    "schedule=constant",
)  # λ 0.004, β 0.9 and 0.999, ε 1e-7


def build(batch, *overrides):
    spec = spec_of(overrides)
    return optimizer.build(replace(spec, batching=derive(batch, 1, None)), HORIZON)


# By κ = 512 / 128 = 4: 1 − 4 · 0.1 = 0.6; 1 − 4 · 0.001 = 0.996; 0.004 · √4;
# 0.999⁴ = 0.996005996; surge with its peak at 512: (√4 + √¼) / (1 + 1) = 1.25.
@pytest.mark.parametrize(
    ("overrides", "rate", "arguments"),
    [
        (
            ["scaling=sde"],
            2,
            {"beta_1": 0.6, "beta_2": 0.996, "epsilon": 5e-8, "weight_decay": 0.008},
        ),
        (
            ["scaling=half_life"],
            1,
            {
                "beta_1": 0.9,
                "beta_2": 0.996005996001,
                "epsilon": 1e-7,
                "weight_decay": 0.004,
            },
        ),
        (
            ["scaling=half_life", "scaling.rate=sqrt"],
            2,
            {"beta_1": 0.9, "beta_2": 0.996005996001},
        ),
        (["scaling=timescale"], 1, {"beta_2": 0.999, "weight_decay": 0.016}),
        (
            ["scaling=timescale", "scaling.rate=sqrt"],
            2,
            {"beta_2": 0.999, "weight_decay": 0.008},
        ),
        (
            ["scaling=surge", "scaling.peak_batch_size=512"],
            1.25,
            {"beta_2": 0.999, "weight_decay": 0.004},
        ),
        (
            ["scaling=linear", "scaling.warmup=0", "+optimizer.use_ema=true"],
            4,
            {"ema_momentum": 0.96059601},
        ),  # 0.99⁴
        (
            [
                "scaling=linear",
                "scaling.warmup=0",
                "+optimizer.use_ema=true",
                "scaling.ema=false",
            ],
            4,
            {"ema_momentum": 0.99},
        ),
        (["scaling=none", "+optimizer.use_ema=true"], 1, {"ema_momentum": 0.99}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_rule_is_its_formula(overrides, rate, arguments):
    built, scaling = build(512, *ADAMW, *overrides)
    assert float(built.learning_rate) == pytest.approx(0.01 * rate, rel=1e-6)  # float32
    for key, value in arguments.items():
        assert getattr(built, key) == pytest.approx(value, rel=1e-9)

    before = {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
        "weight_decay": 0.004,
        "ema_momentum": 0.99,
    }
    named = {key for key in before if f"{key} " in scaling}
    assert named == {key for key in arguments if arguments[key] != before[key]}
    assert ("learning rate × " in scaling) == (rate != 1)


def test_both_weight_decays_of_muon_keep_the_timescale():
    built, line = build(512, "optimizer=muon", "scaling=timescale")
    assert (built.weight_decay, built.adam_weight_decay) == (0.016, 0.016)
    assert line == (
        "scaling.rule=timescale: weight_decay 0.004 → 0.016, "
        "adam_weight_decay 0.004 → 0.016"
    )


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_the_rate_of_any_optimizer_is_scaled(name):
    built, line = build(512, f"optimizer={name}", "schedule=constant", "scaling=sqrt")
    assert built._learning_rate.factor == 2
    assert line == "scaling.rule=sqrt: learning rate × 2"


@pytest.mark.slow
def test_at_the_reference_batch_nothing_changes():
    for rule in ("linear", "sqrt", "sde", "half_life", "timescale"):
        built, scaling = build(128, *ADAMW, f"scaling={rule}")
        assert (built.beta_1, built.beta_2) == (0.9, 0.999)
        assert (built.epsilon, built.weight_decay) == (1e-7, 0.004)
        assert scaling == ""


def test_rmsprop_adds_epsilon_to_the_square():
    built, _ = build(512, "optimizer=rmsprop", "scaling=sde")
    assert (built.rho, built.epsilon) == pytest.approx((0.6, 1e-7 / 4))


def test_a_warm_up_counts_updates_of_the_reference_batch():
    cosine = ("optimizer=adamw", "schedule=cosine", "scaling=sde")
    built, _ = build(512, *cosine, "schedule.warmup_steps=40")
    assert built._learning_rate.schedule.warmup_steps == 10
    built, _ = build(512, *cosine, "schedule.warmup_steps=10%")
    assert built._learning_rate.schedule.warmup_steps == 20


@pytest.mark.parametrize(
    ("batch", "overrides", "line"),
    [
        (
            512,
            ["optimizer=sgd", "scaling=sde"],
            "scaling.rule must fit the optimizer: sde is for Adam, AdamW, RMSprop; for",
        ),
        (
            512,
            ["optimizer=lion", "scaling=half_life"],
            "scaling.rule must fit the optimizer: half_life is for Adam, AdamW",
        ),
        (
            512,
            ["optimizer=sgd", "scaling=surge", "scaling.peak_batch_size=9"],
            "scaling.rule must fit the optimizer: surge",
        ),
        (
            512,
            ["optimizer=adam", "scaling=timescale"],
            "optimizer.weight_decay must be a number for scaling.rule=timescale",
        ),
        (
            512,
            ["optimizer=muon", "scaling=sde"],
            "scaling.rule must fit the optimizer: sde is for Adam, AdamW, RMSprop; for",
        ),
        (
            512,
            ["optimizer=adafactor", "scaling=timescale"],
            "optimizer.weight_decay must be a number for scaling.rule=timescale",
        ),
        (
            2048,
            ["scaling=sde"],
            "optimizer.beta_1 must be at least 0.9375 for scaling.rule=sde "
            "at κ = 16, so that κ(1 − β) ≤ 1",
        ),
        (
            512,
            ["scaling=surge"],
            "scaling.peak_batch_size must be a number of examples "
            "for scaling.rule=surge",
        ),
        (
            512,
            ["scaling.peak_batch_size=9"],
            "scaling.peak_batch_size is used only by scaling.rule=surge, not by none",
        ),
        (
            512,
            ["scaling=sqrt", "scaling.rate=sqrt"],
            "scaling.rate is used only by scaling.rule=half_life and timescale, not by",
        ),
        (512, ["scaling.rate=half"], "scaling.rate must be sqrt or null"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_rejected(batch, overrides, line):
    with pytest.raises(ConfigError) as error:
        build(batch, *overrides)
    assert str(error.value).startswith(line)


SEEDS = 200


def after(kappa: int, rule: str, seed: int) -> np.ndarray:
    """Return weights of a noisy quadratic after 1600 examples, one per seed.

    From half of them on, the noise is four times less. Adam takes the step of each
    entry by itself, so one variable holds all seeds.
    """
    overrides = [
        "optimizer=adam",
        "optimizer.learning_rate=0.02",
        "optimizer.beta_1=0.98",
        "schedule=constant",
    ]
    built, _ = build(
        kappa,
        *overrides,
        f"scaling={rule}",
        "scaling.warmup=0",
        "scaling.reference_batch_size=1",
    )

    variable = keras.Variable(np.ones(SEEDS), dtype="float64")
    built.build([variable])
    apply = tf.function(lambda gradient: built.apply([gradient], [variable]))

    random = np.random.default_rng(seed)
    updates = 1600 // kappa
    for update in range(updates):
        deviation = 40 if update < updates // 2 else 10
        noise = deviation / np.sqrt(kappa) * random.normal(size=SEEDS)
        apply(variable.value + noise)
    return keras.ops.convert_to_numpy(variable)


def test_by_sde_a_batch_leaves_the_distribution_where_it_was():
    """Mean and variance are within three standard errors.

    Those of `sqrt` and of `linear` are not.
    """
    expected = after(1, "none", 0)

    def errors(weights: np.ndarray) -> tuple[float, float]:
        variance = weights.var(ddof=1)
        expected_variance = expected.var(ddof=1)

        of_means = weights.mean() - expected.mean()
        of_means /= np.sqrt((variance + expected_variance) / SEEDS)
        # The logarithm of each variance has a variance of about 2 / (n − 1), n = SEEDS.
        of_variances = np.log(variance / expected_variance)
        of_variances /= np.sqrt(4 / (SEEDS - 1))
        return abs(of_means), abs(of_variances)

    assert max(errors(after(8, "sde", 1))) < 3
    assert max(errors(after(8, "sqrt", 1))) > 3
    assert max(errors(after(8, "linear", 1))) > 3
