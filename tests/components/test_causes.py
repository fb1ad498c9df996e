"""The one line of an error names the cause, not where Keras or TensorFlow met it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.common.errors import first_line


class Failing(layers.Layer):
    def call(self, inputs):
        raise RuntimeError("the layer is wrong.\nwith a second line")


def compiled(function):
    return tf.function(function, autograph=False)


def divided_by_zero(number):
    return number // 0


def wrong_input():
    keras.Sequential([keras.Input((4,)), layers.Dense(3)])(np.zeros((2, 3)))


def wrong_input_of_an_inner_model():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    keras.Sequential([inner, layers.Dense(3)])(np.zeros((2, 3)))


def index_out_of_range():
    keras.Sequential([layers.Embedding(10, 2)])(np.array([[99]]))


def label_out_of_range():
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits
    compiled(lambda labels: loss(labels, tf.ones([1, 10])))(tf.constant([99]))


def failed_assertion():
    @tf.function(autograph=False)
    def checked(x):
        with tf.control_dependencies([tf.debugging.Assert(x < 1, ["too large:", x])]):
            return tf.identity(x)

    checked(tf.constant(2.0))


def layer_of_the_user():
    keras.Sequential([Failing()])(np.zeros((2, 3)))


class Unsaved(keras.Model):
    def __init__(self, activation):
        super().__init__()
        self.dense = layers.Dense(3, activation=activation)

    def call(self, inputs):
        return self.dense(inputs)


def model_without_a_config():
    keras.saving.serialize_keras_object(Unsaved(lambda x: 2 * x))


def python_in_the_data():
    numbers = tf.data.Dataset.range(2).map(
        lambda number: tf.py_function(divided_by_zero, [number], tf.int64)
    )
    next(iter(numbers))


@pytest.mark.parametrize(
    ("fail", "line"),
    [
        (wrong_input, "expected axis -1 of input shape to have value 4"),
        (wrong_input_of_an_inner_model, "expected axis -1 of input shape to have"),
        (index_out_of_range, "indices[0,0] = 99 is not in [0, 10) (in Embedding)"),
        (label_out_of_range, "Received a label value of 99 which is outside"),
        (failed_assertion, "too large:"),
        (layer_of_the_user, "the layer is wrong (in Failing)"),
        (
            model_without_a_config,
            "Object Unsaved was created by passing non-serializable argument values in "
            "`__init__()`, and therefore the object must override `get_config()` in "
            "order to be serializable. Please implement `get_config()`",
        ),
        (python_in_the_data, "division"),
    ],
)
def test_the_line_of_an_error_names_its_cause(fail, line):
    with pytest.raises(Exception) as caught:
        fail()
    shown = first_line(caught.value)
    assert line in shown
    for noise in (
        "Exception encountered",
        "Graph execution",
        "\x1b",
        "{{node",
        "Label",
    ):
        assert noise not in shown


def test_a_plain_error_is_its_first_line_and_an_empty_one_its_type():
    assert first_line(ValueError("first.\nsecond")) == "first"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
