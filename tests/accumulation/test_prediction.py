"""`Prediction`: the outputs and the loss of each example are those of it alone."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation.internals import Objective, Prediction
from tests.accumulation.tables import table
from tests.parameters import mostly_slow

pytestmark = pytest.mark.usefixtures("float64")
EXAMPLES = 7
CLASSES = 3
FEATURES = 4
TIME = 5


def sequences() -> keras.Model:
    """Return a model with a mask: the positions of a sequence that are 0 do not count."""
    return keras.Sequential(
        [
            keras.Input((TIME,), dtype="int64"),
            layers.Embedding(11, 4, mask_zero=True),
            layers.Dense(CLASSES),
        ]
    )


def vectors() -> keras.Model:
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(CLASSES)])


MODELS = {"vectors": vectors, "sequences": sequences}


def batch_of(kind: str, weighted: bool) -> tuple:
    """Return inputs and labels for a model of `MODELS`, and weights of examples."""
    random = np.random.default_rng(0)
    if kind == "sequences":
        x = random.integers(0, 3, size=(EXAMPLES, TIME))
        x[:, 0] = 1  # no sequence is empty
        y = random.integers(0, CLASSES, size=(EXAMPLES, TIME))
    else:
        x = random.normal(size=(EXAMPLES, FEATURES))
        y = random.integers(0, CLASSES, size=EXAMPLES)

    batch = [x, y]
    if weighted:
        weights = random.uniform(0.5, 2.0, size=EXAMPLES)
        batch.append(weights)
    return tuple(tf.constant(part) for part in batch)


REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")


@pytest.mark.parametrize(
    ("reduction", "weighted", "kind"),
    mostly_slow(
        itertools.product(REDUCTIONS, [False, True], MODELS),
        [
            ("sum_over_batch_size", True, "sequences"),
            ("sum_over_batch_size", True, "vectors"),
            ("sum", False, "sequences"),
            ("mean_with_sample_weight", True, "sequences"),
        ],
    ),
)
def test_each_loss_is_that_of_the_example_alone(kind, weighted, reduction):
    model = MODELS[kind]()
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    batch = batch_of(kind, weighted)

    # Micro-batches of 3, 3 and 1 examples.
    prediction = Prediction(model, Objective(loss), micro_batch_size=3)
    predict = tf.function(prediction, autograph=False)
    predicted = predict(batch)

    expected = []
    for number in range(EXAMPLES):
        x, y, *weights = [part[number : number + 1] for part in batch]
        loss_of_example = loss(y, model(x), *weights)
        expected.append(loss_of_example.numpy())
    np.testing.assert_allclose(predicted.losses, expected, rtol=1e-12)
    # They differ, so one in the place of another would be noticed.
    assert np.ptp(expected) > 0.01

    (output,) = predicted.outputs.values()
    np.testing.assert_allclose(output, model(batch[0]), rtol=1e-12)


def test_outputs_are_weighted_as_in_the_loss():
    inputs = keras.Input((FEATURES,))
    outputs = {"a": layers.Dense(1)(inputs), "b": layers.Dense(1)(inputs)}
    model = keras.Model(inputs, outputs)
    x = tf.random.stateless_normal((EXAMPLES, FEATURES), (0, 1), dtype=tf.float64)
    y = {"a": tf.zeros((EXAMPLES, 1)), "b": tf.ones((EXAMPLES, 1))}
    squares = losses.MeanSquaredError()
    objective = Objective({"a": squares, "b": squares}, loss_weights={"a": 1, "b": 3})

    prediction = Prediction(model, objective, micro_batch_size=2)
    predicted = prediction((x, y))

    values = model(x)
    loss_of_a = tf.square(values["a"])
    loss_of_b = tf.square(values["b"] - 1)
    expected = loss_of_a + 3 * loss_of_b
    np.testing.assert_allclose(predicted.losses, expected[:, 0], rtol=1e-12)
    assert set(predicted.outputs) == {"a", "b"}


def test_without_a_loss_of_one_example_there_is_none():
    """A loss over the effective batch compares its examples."""
    loss = losses.MeanSquaredError()
    objective = Objective(loss, loss_over="effective_batch")
    prediction = Prediction(vectors(), objective, micro_batch_size=2)
    batch = batch_of("vectors", weighted=False)
    predicted = prediction(batch)
    assert predicted.losses == ()


def test_an_output_that_is_not_of_the_examples_is_refused():
    x = tf.ones((6, 1))
    prediction = Prediction(table(), Objective(None), micro_batch_size=3)
    message = "^outputs must be dense tensors with the examples on axis 0. Received: "
    with pytest.raises(ValueError, match=message):
        prediction((x, None))
