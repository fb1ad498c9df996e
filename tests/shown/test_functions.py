"""The user's functions of `training.shown`, and what they must not change."""

from __future__ import annotations

import random
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from pipeline.accumulation import Evaluation
from pipeline.shown.functions import Functions

# Five examples of two features, labeled by their number.
INPUTS = np.arange(10.0, dtype="float32").reshape(5, 2)
LABELS = np.arange(5)
BATCH = (INPUTS, LABELS)


class Call(NamedTuple):
    """The arguments that a function got."""

    x: np.ndarray
    y: np.ndarray
    outputs: np.ndarray


def evaluation_of(model):
    return Evaluation(model, keras.losses.MeanSquaredError(), micro_batch_size=2)


def linear():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    return evaluation_of(model)


def results(evaluation, **functions):
    """Return the pictures and the tables of functions, after one evaluation."""
    shown = Functions(functions, BATCH, evaluation)
    shown.compute_outputs()
    return shown.results()


def test_a_function_gets_the_examples_and_the_outputs_of_the_model():
    evaluation = linear()
    calls = []

    def keep(x, y, outputs):
        calls.append(Call(x, y, outputs))
        x += 1  # its own copy
        return {"y": y}

    shown = Functions({"a": keep, "b": keep}, BATCH, evaluation)
    shown.compute_outputs()
    pictures, columns = shown.results()
    assert pictures == {}
    labels = "y\n0\n1\n2\n3\n4\n"
    assert columns == {"a": labels, "b": labels}

    expected = evaluation.model(INPUTS).numpy()
    for call in calls:
        np.testing.assert_array_equal(call.y, LABELS)
        np.testing.assert_allclose(call.outputs, expected, rtol=1e-6)
    # The second function got what the first one had not changed; it has added 1 itself.
    np.testing.assert_array_equal(calls[1].x, INPUTS + 1)

    # The outputs follow the weights.
    model = evaluation.model
    zeros = [np.zeros_like(weight) for weight in model.get_weights()]
    model.set_weights(zeros)
    shown.compute_outputs()
    shown.results()
    assert not calls[-1].outputs.any()


def figure(x, y, outputs):
    import matplotlib.pyplot as plt

    plt.figure(figsize=(2, 1))
    plt.plot(y)
    return plt.gcf()


def test_each_kind_of_picture_and_table():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pictures, columns = results(
        linear(),
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


def black(x, y, outputs):
    """Return a picture, without anything that could fail."""
    return np.zeros((2, 2))


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (fails, "RuntimeError: on purpose"),
        (lambda x, y, outputs: 3, "TypeError: the function must return an array"),
        slow(
            lambda x, y, outputs: np.zeros((2, 2, 7)),
            "ValueError: a picture must have the shape",
        ),
        slow(
            lambda x, y, outputs: {"a": 3},
            "ValueError: column 'a' must be a sequence",
        ),
        (
            lambda x, y, outputs: {"a": [1], "b": [1, 2]},
            "ValueError: columns must have the same",
        ),
        slow(lambda x: x, "TypeError: "),
    ],
)
def test_an_error_is_one_line_and_the_others_are_shown(capsys, function, line):
    shown = Functions({"bad": function, "good": black}, BATCH, linear())
    for _ in range(2):
        shown.compute_outputs()
        pictures, columns = shown.results()
        assert list(pictures) == ["good"]
        assert columns == {}
    # One line for both evaluations.
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"training.shown.bad is left out: {line}")


def test_a_model_that_fails_leaves_all_functions_out(capsys):
    class Fails(keras.Layer):
        def call(self, x):
            raise RuntimeError("on purpose")

    evaluation = evaluation_of(keras.Sequential([Fails()]))
    pictures, columns = results(evaluation, good=black)
    assert pictures == {}
    assert columns == {}
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("training.shown is left out: RuntimeError: ")


class Counts(keras.Layer):
    """Counts its calls in a variable that is not trained."""

    def build(self, shape):
        self.calls = self.add_weight((), trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


def drawn_numbers():
    """Return the next number of each random state that a user may use."""
    return random.random(), np.random.rand()


def test_random_states_and_variables_are_as_before():
    """A function draws, and so does the model; the training goes on as without."""
    layer = Counts()
    model = keras.Sequential([keras.Input((2,)), layer])
    evaluation = evaluation_of(model)
    drawn = []

    def draws(x, y, outputs):
        drawn.append(drawn_numbers())
        return {"y": y}

    random.seed(0)
    np.random.seed(0)
    before = layer.calls.numpy()
    shown = Functions({"draws": draws}, BATCH, evaluation, [layer.calls.value])
    shown.compute_outputs()
    shown.results()
    assert layer.calls.numpy() == before
    assert drawn_numbers() == drawn[0]

    # Without the list of variables, the count goes on: 3 micro-batches of 2, 2 and 1.
    without_variables = Functions({"draws": draws}, BATCH, evaluation)
    without_variables.compute_outputs()
    assert layer.calls.numpy() == before + 3
