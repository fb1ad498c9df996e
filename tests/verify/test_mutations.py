"""`verify` finds mistakes that are often made in accumulation, and names the fault."""

from __future__ import annotations

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update
from pipeline.verify import engine
from pipeline.verify.layers import culprit, without_noise
from tests.running import python
from tests.verify.mutations import MUTATIONS

pytestmark = pytest.mark.usefixtures("float64")


SOME = ["mean_of_means"]
NAMES = ["none", *(mutation.__name__ for mutation in MUTATIONS)]
OTHERS = [name for name in NAMES if name not in SOME]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [SOME, pytest.param(OTHERS, marks=pytest.mark.soak)],
    ids=["some", "the others"],
)
def test_the_command_ends_with_3_for_each_mutation_and_with_0_without_one(
    tmp_path, names
):
    process = python("-m", "tests.verify.mutations", *names, cwd=tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    results = json.loads(out)
    assert sorted(results) == sorted(names)
    for name, result in results.items():
        if name == "none":
            status = 0
            verdict = "equal within rounding"
        elif "validation" in name:
            status = 3
            verdict = "different; the cause is the evaluation"
        elif name in ("stale_metric", "wrong_labels"):
            status = 3
            verdict = "different; the cause is the metric "
        else:
            status = 3
            fault = "the update itself, not a layer or a loss"
            verdict = f"different; the cause is {fault}"
        assert result["status"] == status
        sentence = f"micro-batches of 4 and one of the whole batch are {verdict}"
        assert sentence in result["out"].partition("apart")[0]
        assert result["changed"] == []

    for mutation, kinds in MUTATIONS.items():
        if mutation.__name__ in names:
            printed = results[mutation.__name__]["out"]
            differing = re.findall(r"^  (\S+) .* DIFFERENT$", printed, re.MULTILINE)
            assert kinds <= set(differing)


class Centred(layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class Powered(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sqrt(keras.ops.mean(keras.ops.square(x))))
        return x


class Shared(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.square(y_pred[:, 0] - keras.ops.mean(y_true))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "loss", "named"),
    [
        (
            lambda: Centred(name="centred"),
            None,
            "centred (Centred): its output for an example depends on the other",
        ),
        (
            lambda: layers.BatchNormalization(name="normal"),
            None,
            "normal (BatchNormalization): it normalizes with",
        ),
        (
            lambda: Powered(name="powered"),
            None,
            "verified/powered: what it adds to the loss for a batch is not the mean",
        ),
        (
            lambda: layers.Identity(),
            Shared,
            "shared (Shared): its loss for an example depends on the other examples",
        ),
    ],
)
def test_what_is_at_fault_is_named(layer, loss, named):
    stack = [keras.Input((6,)), layers.Dense(4, "tanh"), layer(), layers.Dense(1)]
    model = keras.Sequential(stack, name="verified")
    if loss is None:
        loss = keras.losses.MeanSquaredError
    loss = loss()
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    batch = (random.normal(size=(12, 6)), random.normal(size=(12, 1)))
    assert differing_in(model, loss, optimizer, batch)
    assert culprit(model, loss, batch, 4).startswith(named)


def differing_in(model, loss, optimizer, batch):
    (findings,) = engine.compare(Update(model, loss, optimizer, 4), [batch])
    return differing(findings)


def differing(findings):
    return [finding for finding in findings if not finding.holds]


@pytest.mark.slow
def test_batches_that_are_padded_to_different_lengths():
    tokens = keras.Input((None,), dtype="int64")
    read = layers.GlobalAveragePooling1D()(
        layers.Embedding(9, 4, mask_zero=True)(tokens)
    )
    model = keras.Model(tokens, layers.Dense(1)(read))
    loss = keras.losses.MeanSquaredError()
    model.compile("sgd", loss)
    model.optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    batches = []
    for shape in ((8, 5), (3, 7)):
        x = random.integers(0, 9, shape)
        batches.append((x, random.normal(size=(shape[0], 1))))
    update = Update(model, loss, model.optimizer, 4)
    comparisons = engine.compare(update, batches, other_weights=True)
    assert [differing(findings) for findings in comparisons] == [[], [], []]


@pytest.mark.slow
def test_weights_of_one_output_alone():
    inputs = keras.Input((6,))
    model = keras.Model(
        inputs,
        {name: layers.Dense(1, name=name)(inputs) for name in ("first", "second")},
    )
    goal = dict.fromkeys(("first", "second"), keras.losses.MeanSquaredError())
    model.compile("sgd", goal)
    model.optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 6))
    first = random.normal(size=(8, 1))
    second = random.normal(size=(8, 1))
    batch = (
        x,
        {"first": first, "second": second},
        {"first": np.linspace(0, 1, 8), "second": None},
    )
    assert differing_in(model, goal, model.optimizer, batch) == []


class Scarce(layers.Layer):
    """Has memory for five examples."""

    def call(self, x):
        def check(count):
            if count > 5:
                # TensorFlow makes a ResourceExhaustedError of it.
                raise MemoryError("out of memory")
            return count

        with tf.control_dependencies(
            [tf.py_function(check, [tf.shape(x)[0]], tf.int32)]
        ):
            return tf.identity(x)


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_compared_with_its_examples():
    model = keras.Sequential([keras.Input((6,)), Scarce(), layers.Dense(1)])
    loss = keras.losses.MeanSquaredError()
    model.compile("sgd", loss)
    model.optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    batch = (random.normal(size=(12, 6)), random.normal(size=(12, 1)))
    assert differing_in(model, loss, model.optimizer, batch) == []


@pytest.mark.slow
def test_what_the_optimizer_scales_and_a_loss_in_float32_are_no_fault():
    """A scaled loss has scaled gradients on both sides.

    The bound is that of the lowest precision.
    """
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)]
    )
    loss = keras.losses.MeanSquaredError(dtype="float32")
    optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    batch = (random.normal(size=(12, 6)), random.normal(size=(12, 1)))
    assert differing_in(model, loss, optimizer, batch) == []


@pytest.mark.slow
def test_noise_is_switched_off_and_on_again():
    model = keras.Sequential(
        [
            keras.Input((5, 6)),
            layers.LSTM(4, dropout=0.3),
            layers.Dropout(0.5),
            layers.GaussianNoise(0.1),
            layers.Dense(1),
        ]
    )
    loss = keras.losses.MeanSquaredError()
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    batch = (random.normal(size=(12, 5, 6)), random.normal(size=(12, 1)))
    before = model.get_weights()
    with without_noise(model) as quiet:
        assert differing_in(model, loss, optimizer, batch) == []
    assert len(quiet) == 3
    assert differing_in(model, loss, optimizer, batch) != []
    assert culprit(model, loss, batch, 4).endswith(
        "it draws its own noise for every micro-batch"
    )
    for expected, weight in zip(before, model.get_weights(), strict=True):
        assert np.array_equal(weight, expected)
