"""What everyone who accumulates gets wrong, put into the kernel: `verify` finds each, and names what is at fault."""

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


QUICK = ["mean_of_means"]
OTHERS = ["none"] + [
    mutation.__name__ for mutation in MUTATIONS if mutation.__name__ not in QUICK
]


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param(OTHERS, marks=pytest.mark.soak)],
    ids=["some", "the others"],
)
def test_the_command_ends_with_3_for_each_mutation_and_with_0_without_one(
    tmp_path, names
):
    process = python("-m", "tests.verify.mutations", *names, cwd=tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    said = json.loads(out)
    assert {name: answer["status"] for name, answer in said.items()} == {
        name: 3 * (name != "none") for name in names
    }
    for mutation, kinds in MUTATIONS.items():
        if mutation.__name__ in names:
            found = re.findall(
                r"^  (\S+) .* DIFFERENT$", said[mutation.__name__]["out"], re.MULTILINE
            )
            assert kinds <= set(found)
    for name, answer in said.items():
        fault = (
            "the evaluation"
            if "validation" in name
            else "no layer and no loss, but the update itself"
        )
        verdict = (
            f"different; at fault is {fault}"
            if answer["status"]
            else "equal within rounding"
        )
        assert (
            f"micro-batches of 4 and one of the whole batch are {verdict}\n"
            in answer["out"].partition("apart")[0]
        )
        assert answer["changed"] == []


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
            "normal (BatchNormalization): it normalises by",
        ),
        (
            lambda: Powered(name="powered"),
            None,
            "verified/powered: what it adds to the loss is not the mean of what",
        ),
        (
            lambda: layers.Identity(),
            Shared,
            "shared (Shared): its loss of an example depends on the others",
        ),
    ],
)
def test_what_is_at_fault_is_named(layer, loss, named):
    stack = [keras.Input((6,)), layers.Dense(4, "tanh"), layer(), layers.Dense(1)]
    model = keras.Sequential(stack, name="verified")
    loss = loss() if loss else keras.losses.MeanSquaredError()
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    batch = (random.normal(size=(12, 6)), random.normal(size=(12, 1)))
    assert differing_in(model, loss, optimizer, batch)
    assert culprit(model, loss, batch, 4).startswith(named)


def differing_in(model, loss, optimizer, batch):
    (findings,) = engine.compare(Update(model, loss, optimizer, 4), [batch])
    return [found for found in findings if not found.holds]


@pytest.mark.slow
def test_batches_that_are_padded_to_different_lengths():
    tokens = keras.Input((None,), dtype="int64")
    read = layers.GlobalAveragePooling1D()(
        layers.Embedding(9, 4, mask_zero=True)(tokens)
    )
    model, loss = (
        keras.Model(tokens, layers.Dense(1)(read)),
        keras.losses.MeanSquaredError(),
    )
    model.compile("sgd", loss)
    model.optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    shapes = (8, 5), (3, 7)
    batches = [
        (random.integers(0, 9, shape), random.normal(size=(shape[0], 1)))
        for shape in shapes
    ]
    found = engine.compare(
        Update(model, loss, model.optimizer, 4), batches, other_weights=True
    )
    assert [[each for each in findings if not each.holds] for findings in found] == [
        [],
        [],
        [],
    ]


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
    x, first, second = (random.normal(size=(8, of)) for of in (6, 1, 1))
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
                raise MemoryError(
                    "no room"
                )  # which is ResourceExhaustedError to TensorFlow
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
    batch = random.normal(size=(12, 6)), random.normal(size=(12, 1))
    assert differing_in(model, loss, model.optimizer, batch) == []


@pytest.mark.slow
def test_what_the_optimizer_scales_and_a_loss_in_float32_are_no_fault():
    """A scaled loss has scaled gradients on both sides; the bound is that of the coarsest precision."""
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)]
    )
    loss, optimizer = (
        keras.losses.MeanSquaredError(dtype="float32"),
        keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    )
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    assert (
        differing_in(
            model,
            loss,
            optimizer,
            (random.normal(size=(12, 6)), random.normal(size=(12, 1))),
        )
        == []
    )


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
    loss, optimizer = keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1)
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
    assert all(
        np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)
    )
