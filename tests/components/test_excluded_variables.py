"""Variables that a config excludes from weight decay, against plain Keras."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update
from pipeline.checkpoints import resume_rules
from pipeline.common.errors import ConfigError
from pipeline.components import optimizer
from pipeline.config.sizes import derive
from pipeline.tracking.journal_file import Past, RunStart
from tests.accumulation.matrix import deviation
from tests.accumulation.replicas import strategy_on
from tests.composing import spec_of

EXAMPLES = 12
MICRO_BATCH = 5  # does not divide the batch
UPDATES = 5
WIDTH = 256  # the kernel of the hidden layer is large enough for the fused Adam
BIAS_AND_NORM = "optimizer.exclude_from_decay=[bias,norm]"


def new_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH,))
    hidden = layers.Dense(WIDTH, "tanh", name="hidden", bias_initializer="ones")
    normed = layers.LayerNormalization(name="norm")(hidden(inputs))
    logits = layers.Dense(3, name="logits", bias_initializer="ones")
    return keras.Model(inputs, logits(normed))


def batches():
    random = np.random.default_rng(0)
    for _ in range(UPDATES):
        x = tf.constant(random.normal(size=(EXAMPLES, WIDTH)))
        yield x, tf.constant(random.integers(0, 3, EXAMPLES))


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def built(*overrides):
    """Return a model, and its optimizer from a config, both built."""
    spec = spec_of([*overrides, "schedule=constant"])
    spec = replace(spec, batching=derive(128, 1, None))
    model = new_model()
    made, _ = optimizer.build(spec, UPDATES)
    optimizer.build_variables(made, spec, model.trainable_variables)
    return model, made


def accumulated(strategy, *overrides):
    """Return the weights after updates in micro-batches."""
    with strategy.scope():
        model, made = built(*overrides)
    update = Update(model, loss(), made, MICRO_BATCH, strategy=strategy)
    step = tf.function(lambda *batch: update(batch), autograph=False)
    for batch in batches():
        step(*batch)
    return model.get_weights()


def by_keras(made, excluded):
    """Return the weights before and after updates of plain Keras on whole batches."""
    model = new_model()
    before = model.get_weights()
    by_path = {variable.path: variable for variable in model.trainable_variables}
    made.exclude_from_weight_decay(var_list=[by_path[path] for path in excluded])
    made.build(model.trainable_variables)
    goal = loss()
    for x, y in batches():
        with tf.GradientTape() as tape:
            value = goal(y, model(x, training=True))
        variables = [variable.value for variable in model.trainable_variables]
        gradients = tape.gradient(value, variables)
        made.apply(gradients, model.trainable_variables)
    return before, model.get_weights()


EXCLUDED = ("hidden/bias", "norm/gamma", "norm/beta", "logits/bias")
MORE = {
    "muon": (
        "optimizer.weight_decay=0.2",
        "optimizer.adam_weight_decay=0.2",
        "optimizer.exclude_layers=[logits]",
    ),
    "adafactor": ("+optimizer.weight_decay=0.2",),
}
# Keras' arguments beside those of the config, which its comments call the same.
PLAIN = {
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.2),
    "muon": lambda: keras.optimizers.Muon(
        0.01, weight_decay=0.2, exclude_layers=["logits"], adam_weight_decay=0.2
    ),
    "adafactor": lambda: keras.optimizers.Adafactor(
        0.01, weight_decay=0.2, epsilon_1=1e-16
    ),
    "lion": lambda: keras.optimizers.Lion(0.01, beta_2=0.99, weight_decay=0.2),
}


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("adamw", 1),
        pytest.param("adamw", 2, marks=pytest.mark.slow),
        pytest.param("lion", 1, marks=pytest.mark.slow),
        pytest.param("muon", 2, marks=pytest.mark.slow),
        pytest.param("adafactor", 2, marks=pytest.mark.slow),
    ],
)
def test_excluded_variables_do_not_decay(float64, name, devices):
    arguments = (
        f"optimizer={name}",
        "optimizer.learning_rate=0.01",
        *MORE.get(name, ("optimizer.weight_decay=0.2",)),
    )
    before, expected = by_keras(PLAIN[name](), EXCLUDED)
    strategy = strategy_on(devices)
    trained = accumulated(strategy, *arguments, f"++{BIAS_AND_NORM}")
    assert deviation(trained, expected, before) < 1e-12

    # The control: without the key, all of them decay, as with Keras by default.
    decayed = accumulated(strategy, *arguments)
    for ours, theirs, start in zip(decayed, expected, before, strict=True):
        differs = deviation([ours], [theirs], [start]) > 1e-4
        assert differs or ours.ndim == 2
    _, by_default = by_keras(PLAIN[name](), ())
    assert deviation(decayed, by_default, before) < 1e-12


def test_half_precision_excludes_them_from_the_inner_optimizer():
    model, made = built("hardware.precision=mixed_float16", BIAS_AND_NORM)
    inner = made.inner_optimizer
    decaying = []
    for variable in model.trainable_variables:
        if inner._use_weight_decay(variable):
            decaying.append(variable.path)
    assert decaying == ["hidden/kernel", "logits/kernel"]


PATHS = "hidden/kernel, hidden/bias, norm/gamma, norm/beta, logits/kernel, logits/bias"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer.exclude_from_decay=[bias,scale]"],
            "optimizer.exclude_from_decay must match the path of a trainable variable "
            f"({PATHS}). Received: 'scale'.",
        ),
        (
            ["optimizer=adam", "+optimizer.exclude_from_decay=[bias]"],
            "optimizer.exclude_from_decay must be [] if optimizer.weight_decay is "
            "null, as for this Adam. Received: ['bias'].",
        ),
    ],
)
def test_what_excludes_nothing_is_rejected(overrides, message):
    with pytest.raises(ConfigError) as error:
        built(*overrides)
    assert str(error.value) == message


def test_a_layer_that_muon_would_not_find_is_rejected():
    with pytest.raises(ConfigError) as error:
        built("optimizer=muon", "optimizer.exclude_layers=[logits,head]")
    assert str(error.value) == (
        "optimizer.exclude_layers must match the path of a trainable variable "
        f"({PATHS}). Received: 'head'."
    )


def test_a_pattern_is_searched_in_the_whole_path():
    def decaying(*patterns):
        listed = ",".join(patterns)
        model, made = built(f"optimizer.exclude_from_decay=['{listed}']")
        variables = model.trainable_variables
        return [item.path for item in variables if made._use_weight_decay(item)]

    assert decaying("^logits/|gamma$") == ["hidden/kernel", "hidden/bias", "norm/beta"]


def test_a_run_of_before_the_key_resumes():
    spec = spec_of([])
    recorded = spec.recorded
    del recorded["optimizer"]["exclude_from_decay"]
    start = RunStart(
        store=spec.config.tracking.uri,
        segment={"cut": {"effective_batch_size": 128, "micro_batch_size": 32}},
    )
    past = Past(Path("journal.jsonl"), start=start)
    resumed = resume_rules._with_recorded_choices(spec, recorded, past)
    assert resume_rules.changes(recorded, resumed, past) == []

    # The control: variables that did decay may not stop to in the middle of a run.
    other = spec_of([BIAS_AND_NORM])
    other = resume_rules._with_recorded_choices(other, recorded, past)
    with pytest.raises(ConfigError, match="must be that of the run, None"):
        resume_rules.changes(recorded, other, past)
