"""The user's functions of `training.shown`, and what they must not change."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from pipeline.accumulation import Evaluation
from pipeline.shown.functions import Functions

BATCH = (np.arange(10.0, dtype="float32").reshape(5, 2), np.arange(5))


def linear():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    return Evaluation(model, keras.losses.MeanSquaredError(), 2)


def results(evaluation=None, **functions):
    shown = Functions(functions, BATCH, evaluation or linear())
    shown.compute_outputs()
    return shown.results()


def test_a_function_gets_the_examples_and_the_outputs_of_the_model():
    evaluation = linear()
    calls = []

    def keep(x, y, outputs):
        calls.append((x, y, outputs))
        x += 1  # its own copy
        return {"y": y}

    shown = Functions({"a": keep, "b": keep}, BATCH, evaluation)
    shown.compute_outputs()
    assert shown.results() == ({}, dict.fromkeys("ab", "y\n0\n1\n2\n3\n4\n"))
    expected = evaluation.model(BATCH[0]).numpy()
    for _, y, outputs in calls:
        np.testing.assert_array_equal(y, BATCH[1])
        np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    np.testing.assert_array_equal(calls[1][0], BATCH[0] + 1)

    # The outputs follow the weights.
    model = evaluation.model
    model.set_weights([0 * weight for weight in model.get_weights()])
    shown.compute_outputs()
    shown.results()
    assert not calls[-1][2].any()


def figure(x, y, outputs):
    import matplotlib.pyplot as plt

    plt.figure(figsize=(2, 1))
    plt.plot(y)
    return plt.gcf()


def test_each_kind_of_picture_and_table():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pictures, columns = results(
        array=lambda x, y, outputs: np.zeros((4, 6, 3)),
        tensor=lambda x, y, outputs: tf.zeros((4, 6)),
        pillow=lambda x, y, outputs: Image.new("P", (6, 4)),
        figure=figure,
        table=lambda x, y, outputs: {"x": x[:, 0], "text": list("abcde")},
    )
    assert list(pictures) == ["array", "tensor", "pillow", "figure"]
    assert columns["table"].splitlines()[:2] == ["x,text", "0,a"]
    import matplotlib.pyplot as plt

    assert plt.get_fignums() == []  # it would stay in memory


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def fails(x, y, outputs):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (fails, "RuntimeError: on purpose"),
        (lambda x, y, outputs: 3, "TypeError: it must return an array"),
        slow(
            lambda x, y, outputs: np.zeros((2, 2, 7)),
            "ValueError: a picture must be of",
        ),
        slow(
            lambda x, y, outputs: {"a": 3},
            "ValueError: column 'a' must be a sequence",
        ),
        (
            lambda x, y, outputs: {"a": [1], "b": [1, 2]},
            "ValueError: columns must be of",
        ),
        slow(lambda x: x, "TypeError: "),
    ],
)
def test_an_error_is_one_line_and_the_others_are_shown(capsys, function, line):
    shown = Functions({"bad": function, "good": figureless}, BATCH, linear())
    for _ in range(2):
        shown.compute_outputs()
        pictures, columns = shown.results()
        assert (list(pictures), columns) == (["good"], {})
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"training.shown.bad is left out: {line}")


def figureless(x, y, outputs):
    return np.zeros((2, 2))


def test_a_model_that_fails_leaves_all_functions_out(capsys):
    class Fails(keras.Layer):
        def call(self, x):
            raise RuntimeError("on purpose")

    model = keras.Sequential([Fails()])
    evaluation = Evaluation(model, keras.losses.MeanSquaredError(), 2)
    assert results(evaluation, good=figureless) == ({}, {})
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("training.shown is left out: RuntimeError: ")


def test_random_states_and_variables_are_as_before():
    """A function draws, and so does the model; the training goes on as without."""

    class Counts(keras.Layer):
        def build(self, shape):
            self.calls = self.add_weight((), trainable=False)

        def call(self, x):
            self.calls.assign_add(1.0)
            return x

    layer = Counts()
    model = keras.Sequential([keras.Input((2,)), layer])
    evaluation = Evaluation(model, keras.losses.MeanSquaredError(), 2)
    drawn = []

    def draws(x, y, outputs):
        drawn.append((random.random(), np.random.rand()))
        return {"y": y}

    random.seed(0)
    np.random.seed(0)
    before = layer.calls.numpy()
    shown = Functions({"draws": draws}, BATCH, evaluation, [layer.calls.value])
    shown.compute_outputs()
    shown.results()
    assert layer.calls.numpy() == before
    assert (random.random(), np.random.rand()) == drawn[0]
    # Without the list of variables, the count goes on.
    Functions({"draws": draws}, BATCH, evaluation).compute_outputs()
    assert layer.calls.numpy() == before + 3
