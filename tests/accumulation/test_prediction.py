"""`Prediction`: the outputs and the loss of each example are those of it alone."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation.internals import Objective, Prediction

pytestmark = pytest.mark.usefixtures("float64")
EXAMPLES = 7


def sequences() -> keras.Model:
    """A model with a mask: of each sequence, only what is not 0 counts."""
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int64"),
            layers.Embedding(11, 4, mask_zero=True),
            layers.Dense(3),
        ]
    )


def vectors() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(3)])


def batch_of(kind: str, weighted: bool) -> tuple:
    random = np.random.default_rng(0)
    if kind == "sequences":
        x = random.integers(0, 3, size=(EXAMPLES, 5))
        x[:, 0] = 1  # no sequence is empty
        y = random.integers(0, 3, size=(EXAMPLES, 5))
    else:
        x = random.normal(size=(EXAMPLES, 4))
        y = random.integers(0, 3, size=EXAMPLES)
    weights = (random.uniform(0.5, 2.0, size=EXAMPLES),) if weighted else ()
    return tuple(map(tf.constant, (x, y, *weights)))


@pytest.mark.parametrize("kind", ["vectors", "sequences"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
)
def test_each_loss_is_that_of_the_example_alone(kind, weighted, reduction):
    model = {"vectors": vectors, "sequences": sequences}[kind]()
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    batch = batch_of(kind, weighted)
    prediction = Prediction(model, Objective(loss), micro_batch_size=3)
    predicted = tf.function(prediction, autograph=False)(batch)

    expected = []
    for number in range(EXAMPLES):
        x, *rest = (part[number : number + 1] for part in batch)
        y, *weights = rest
        expected.append(loss(y, model(x), *weights).numpy())
    np.testing.assert_allclose(predicted.losses, expected, rtol=1e-12)
    assert np.ptp(expected) > 0.01
    (output,) = predicted.outputs.values()
    np.testing.assert_allclose(output, model(batch[0]), rtol=1e-12)


def test_outputs_are_weighted_as_in_the_loss():
    inputs = keras.Input((4,))
    outputs = {"a": layers.Dense(1)(inputs), "b": layers.Dense(1)(inputs)}
    model = keras.Model(inputs, outputs)
    x = tf.random.stateless_normal((EXAMPLES, 4), (0, 1), dtype=tf.float64)
    y = {"a": tf.zeros((EXAMPLES, 1)), "b": tf.ones((EXAMPLES, 1))}
    squares = losses.MeanSquaredError()
    objective = Objective({"a": squares, "b": squares}, loss_weights={"a": 1, "b": 3})
    predicted = Prediction(model, objective, micro_batch_size=2)((x, y))
    values = model(x)
    expected = tf.square(values["a"]) + 3 * tf.square(values["b"] - 1)
    np.testing.assert_allclose(predicted.losses, expected[:, 0], rtol=1e-12)
    assert set(predicted.outputs) == {"a", "b"}


def test_without_a_loss_of_one_example_there_is_none():
    """A loss over the effective batch compares its examples."""
    loss = losses.MeanSquaredError()
    objective = Objective(loss, loss_over="effective_batch")
    predicted = Prediction(vectors(), objective, 2)(batch_of("vectors", False))
    assert predicted.losses == ()
