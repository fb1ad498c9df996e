"""FLOPs of forward and backward are those that are counted by hand.

They are two for a multiply-add, and nothing for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, layers

from pipeline.accumulation import flops, training_flops
from pipeline.accumulation.internals import Objective
from pipeline.accumulation.keras_internals import function_graph


def counted(layer, *shapes, dtype="float32"):
    """Return the FLOPs of a layer of inputs of these shapes, and what is not known."""
    inputs = [Input(shape, dtype=dtype) for shape in shapes]
    model = Model(inputs, layer(*inputs))
    x = [np.ones((3, *shape), dtype) for shape in shapes]
    if len(x) == 1:
        (x,) = x
    y = np.zeros((3, *model.output.shape[1:]))
    return training_flops(model, "mse", (x, y))


def stack(*parts):
    return keras.Sequential(parts)


class Counted(NamedTuple):
    """What is counted, and the number by hand."""

    count: Callable[[], Any]
    expected: int


COUNTED = {
    # The first layer has a gradient by its weights alone: 2 times the forward pass, the
    # others 3 times.
    "Dense": Counted(
        lambda: counted(stack(layers.Dense(5), layers.Dense(2)), (3,)),
        2 * (2 * 3 * 5 + 3 * 5 * 2),
    ),
    "Dense at each place": Counted(
        lambda: counted(layers.Dense(5), (7, 3)),
        2 * 2 * 7 * 3 * 5,
    ),
    "frozen": Counted(
        lambda: counted(stack(layers.Dense(5, trainable=False), layers.Dense(2)), (3,)),
        2 * (3 * 5 + 2 * 5 * 2),
    ),
    "EinsumDense": Counted(
        lambda: counted(layers.EinsumDense("abc,cde->abde", (7, 2, 3)), (7, 4)),
        2 * 2 * 7 * 4 * 2 * 3,
    ),
    "EinsumDense of all axes": Counted(
        lambda: counted(layers.EinsumDense("...x,xy->...y", 6), (7, 4)),
        2 * 2 * 7 * 4 * 6,
    ),
    # 5 queries of width 8 to 7 values of width 6, two heads of 3 and 4. Both inputs are
    # the model's: the projections of queries, keys and values have a gradient by their
    # weights alone.
    "MultiHeadAttention": Counted(
        lambda: counted(layers.MultiHeadAttention(2, 3, value_dim=4), (5, 8), (7, 6)),
        2 * 2 * (5 * 8 * 6 + 7 * 6 * 6 + 7 * 6 * 8)
        + 2 * 3 * (2 * 5 * 7 * 3 + 2 * 5 * 7 * 4 + 5 * 8 * 8),
    ),
    # 9 × 8 at strides 2, padded: 5 × 4 places; then 3 × 3 of them, 3 × 2 places.
    "Conv2D": Counted(
        lambda: counted(
            stack(layers.Conv2D(6, 3, strides=2, padding="same"), layers.Conv2D(5, 3)),
            (9, 8, 4),
        ),
        2 * (2 * 5 * 4 * 6 * 9 * 4 + 3 * 3 * 2 * 5 * 9 * 6),
    ),
    # A function of its own, which computes both gradients.
    "grouped Conv2D": Counted(
        lambda: counted(layers.Conv2D(6, 3, groups=2), (5, 5, 4)),
        2 * 3 * 3 * 3 * 6 * 9 * 2,
    ),
    "DepthwiseConv2D": Counted(
        lambda: counted(layers.DepthwiseConv2D(3), (5, 5, 4)),
        2 * 2 * 3 * 3 * 4 * 9,
    ),
    "Conv1D": Counted(
        lambda: counted(layers.Conv1D(6, 3), (5, 4)),
        2 * 2 * 3 * 6 * 3 * 4,
    ),
    # Each voxel of the input is spread over a cube of 2 × 2 × 2.
    "Conv3DTranspose": Counted(
        lambda: counted(layers.Conv3DTranspose(3, 2), (2, 3, 4, 5)),
        2 * 2 * 24 * 5 * 3 * 8,
    ),
    # 5 steps of 4 gates of 4 units, from 3 inputs and 4 states; the inputs are the
    # model's.
    "LSTM": Counted(
        lambda: counted(layers.LSTM(4), (5, 3)),
        2 * 5 * 4 * 4 * (2 * 3 + 3 * 4),
    ),
    "two GRUs": Counted(
        lambda: counted(
            stack(layers.GRU(4, return_sequences=True), layers.GRU(2)), (5, 3)
        ),
        2 * 5 * 3 * (4 * (2 * 3 + 3 * 4) + 2 * (3 * 4 + 3 * 2)),
    ),
    "no product": Counted(
        lambda: counted(
            stack(layers.Embedding(9, 4), layers.LayerNormalization()),
            (5,),
            dtype="int32",
        ),
        0,
    ),
}


@pytest.mark.parametrize("what", COUNTED)
def test_flops_are_those_that_are_counted_by_hand(what):
    case = COUNTED[what]
    assert case.count() == (case.expected, [])


@keras.saving.register_keras_serializable("tests")
class Unknown(layers.Layer):
    """Inverts a matrix."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4))

    def call(self, x):
        return tf.linalg.matmul(x, tf.linalg.inv(tf.eye(4) + self.kernel))


@keras.saving.register_keras_serializable("tests")
class Endless(layers.Layer):
    """Has a loop whose number of steps is not known when it is traced."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4))

    def call(self, x):
        until = tf.reduce_sum(x) > 0

        def body(y):
            return (tf.matmul(y, tf.convert_to_tensor(self.kernel)),)

        (outputs,) = tf.while_loop(lambda y: until, body, (x,))
        return outputs


def test_what_cannot_be_counted_is_named():
    _, unknown = counted(Unknown(), (4,))
    assert unknown == ["MatrixInverse"]
    _, unknown = counted(Endless(), (4,))
    assert unknown in (["StatelessWhile", "While"], ["StatelessWhile"])


def test_a_condition_counts_its_larger_branch():
    def function(x):
        return tf.cond(
            tf.reduce_sum(x) > 0,
            lambda: tf.matmul(x, x, transpose_b=True),
            lambda: tf.zeros((2, 2)),
        )

    traced = tf.function(function).get_concrete_function(tf.TensorSpec((2, 3)))
    assert flops.FlopCounter().count_graph(traced.graph) == 2 * 2 * 3 * 2

    operations = traced.graph.get_operations()
    (branch,) = [node for node in operations if node.type.endswith("If")]
    in_branch = function_graph(branch, "then_branch").get_operations()
    assert [operation.type for operation in in_branch].count("MatMul") == 1


@pytest.mark.parametrize(("mode", "gates"), [("lstm", 4), ("gru", 3)])
def test_recurrent_layers_of_cudnn_count_as_the_loops_do(mode, gates):
    steps = 5
    examples = 3
    width = 2
    units = 4
    with tf.Graph().as_default() as graph:
        outputs = tf.raw_ops.CudnnRNNV3(
            input=tf.zeros((steps, examples, width)),
            input_h=tf.zeros((1, examples, units)),
            input_c=tf.zeros((1, examples, units)),
            params=tf.zeros([999]),
            rnn_mode=mode,
            sequence_lengths=tf.fill([examples], steps),
        )
    operation = outputs.output.op
    assert operation in graph.get_operations()
    expected = 2 * steps * examples * gates * units * (width + units)
    assert flops.FlopCounter().count(operation) == expected


def test_what_regularises_weights_counts_nothing():
    plain = counted(layers.Dense(3), (4,))
    regularized = counted(layers.Dense(3, kernel_regularizer="l2"), (4,))
    assert regularized == plain


def test_a_loss_over_the_effective_batch_counts_as_one_pass():
    def total(y_true, y_pred):
        return tf.reduce_mean(tf.square(y_pred - y_true))

    model = stack(Input((4,)), layers.Dense(3))
    objective = Objective(total, loss_over="effective_batch")
    batch = (np.ones((2, 4), "float32"), np.ones((2, 3), "float32"))
    assert training_flops(model, objective, batch) == (2 * 2 * 4 * 3, [])


def test_tracing_changes_nothing():
    dropout = layers.Dropout(0.5)
    model = stack(
        Input((4,)),
        layers.Dense(3),
        layers.BatchNormalization(),
        dropout,
        layers.Dense(1),
    )

    def state():
        variables = [*model.variables, dropout.seed_generator.state]
        return [keras.ops.convert_to_numpy(variable) for variable in variables]

    before = state()
    x = np.ones((2, 4), "float32")
    y = np.ones((2, 1), "float32")
    training_flops(model, "mse", (x, y))
    for value, expected in zip(state(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
