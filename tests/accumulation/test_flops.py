"""FLOPs of forward and backward are those that are counted by hand: two for a multiply-add, nothing for the rest."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, layers

from pipeline.accumulation import flops, training_flops
from pipeline.accumulation.keras_internals import function_graph


def counted(layer, *shapes, dtype="float32"):
    inputs = [Input(shape, dtype=dtype) for shape in shapes]
    model = Model(inputs, layer(*inputs))
    x = [np.ones((3, *shape), dtype) for shape in shapes]
    return training_flops(
        model,
        "mse",
        (x if len(x) > 1 else x[0], np.zeros((3, *model.output.shape[1:]))),
    )


def stack(*parts):
    return keras.Sequential(parts)


COUNTED = {
    # The first layer has a gradient by its weights alone: 2 times the forward pass, the others 3 times.
    "Dense": (
        lambda: counted(stack(layers.Dense(5), layers.Dense(2)), (3,)),
        2 * (2 * 3 * 5 + 3 * 5 * 2),
    ),
    "Dense at each place": (
        lambda: counted(layers.Dense(5), (7, 3)),
        2 * 2 * 7 * 3 * 5,
    ),
    "frozen": (
        lambda: counted(stack(layers.Dense(5, trainable=False), layers.Dense(2)), (3,)),
        2 * (3 * 5 + 2 * 5 * 2),
    ),
    "EinsumDense": (
        lambda: counted(layers.EinsumDense("abc,cde->abde", (7, 2, 3)), (7, 4)),
        2 * 2 * 7 * 4 * 2 * 3,
    ),
    "EinsumDense of all axes": (
        lambda: counted(layers.EinsumDense("...x,xy->...y", 6), (7, 4)),
        2 * 2 * 7 * 4 * 6,
    ),
    # 5 queries of width 8 to 7 values of width 6, two heads of 3 and 4. Both inputs are the model's: the projections of
    # queries, keys and values have a gradient by their weights alone.
    "MultiHeadAttention": (
        lambda: counted(layers.MultiHeadAttention(2, 3, value_dim=4), (5, 8), (7, 6)),
        2
        * (
            2 * (5 * 8 * 6 + 7 * 6 * 6 + 7 * 6 * 8)
            + 3 * (2 * 5 * 7 * 3 + 2 * 5 * 7 * 4 + 5 * 8 * 8)
        ),
    ),
    # 9 × 8 at strides 2, padded: 5 × 4 places; then 3 × 3 of them, 3 × 2 places.
    "Conv2D": (
        lambda: counted(
            stack(layers.Conv2D(6, 3, strides=2, padding="same"), layers.Conv2D(5, 3)),
            (9, 8, 4),
        ),
        2 * (2 * 5 * 4 * 6 * 9 * 4 + 3 * 3 * 2 * 5 * 9 * 6),
    ),
    # A function of its own, which computes both gradients.
    "grouped Conv2D": (
        lambda: counted(layers.Conv2D(6, 3, groups=2), (5, 5, 4)),
        2 * 3 * 3 * 3 * 6 * 9 * 2,
    ),
    "DepthwiseConv2D": (
        lambda: counted(layers.DepthwiseConv2D(3), (5, 5, 4)),
        2 * 2 * 3 * 3 * 4 * 9,
    ),
    "Conv1D": (lambda: counted(layers.Conv1D(6, 3), (5, 4)), 2 * 2 * 3 * 6 * 3 * 4),
    # Each voxel of the input is spread over a cube of 2 × 2 × 2.
    "Conv3DTranspose": (
        lambda: counted(layers.Conv3DTranspose(3, 2), (2, 3, 4, 5)),
        2 * 2 * 24 * 5 * 3 * 8,
    ),
    # 5 steps of 4 gates of 4 units, from 3 inputs and 4 states; the inputs are the model's.
    "LSTM": (lambda: counted(layers.LSTM(4), (5, 3)), 2 * 5 * 4 * 4 * (2 * 3 + 3 * 4)),
    "two GRUs": (
        lambda: counted(
            stack(layers.GRU(4, return_sequences=True), layers.GRU(2)), (5, 3)
        ),
        2 * 5 * 3 * (4 * (2 * 3 + 3 * 4) + 2 * (3 * 4 + 3 * 2)),
    ),
    "no product": (
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
    count, expected = COUNTED[what]
    assert count() == (expected, [])


@keras.saving.register_keras_serializable("tests")
class Unknown(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4))

    def call(self, x):
        return tf.linalg.matmul(x, tf.linalg.inv(tf.eye(4) + self.kernel))


@keras.saving.register_keras_serializable("tests")
class Endless(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4))

    def call(self, x):
        until = tf.reduce_sum(x) > 0
        return tf.while_loop(
            lambda y: until,
            lambda y: (tf.matmul(y, tf.convert_to_tensor(self.kernel)),),
            (x,),
        )[0]


def test_what_cannot_be_counted_is_named():
    _, unknown = counted(Unknown(), (4,))
    assert unknown == ["MatrixInverse"]
    _, unknown = counted(Endless(), (4,))
    assert unknown in (["StatelessWhile", "While"], ["StatelessWhile"])


def test_a_condition_counts_its_larger_branch():
    made = tf.function(
        lambda x: tf.cond(
            tf.reduce_sum(x) > 0,
            lambda: tf.matmul(x, x, transpose_b=True),
            lambda: tf.zeros((2, 2)),
        )
    ).get_concrete_function(tf.TensorSpec((2, 3)))
    assert flops.FlopCounter().count_graph(made.graph) == 2 * 2 * 3 * 2
    (branch,) = [
        operation
        for operation in made.graph.get_operations()
        if operation.type.endswith("If")
    ]
    assert [
        each.type for each in function_graph(branch, "then_branch").get_operations()
    ].count("MatMul") == 1


@pytest.mark.parametrize(("mode", "gates"), [("lstm", 4), ("gru", 3)])
def test_recurrent_layers_of_cudnn_count_as_the_loops_do(mode, gates):
    steps, examples, width, units = 5, 3, 2, 4
    with tf.Graph().as_default() as graph:
        given = (
            tf.zeros((steps, examples, width)),
            *[tf.zeros((1, examples, units))] * 2,
        )
        made = tf.raw_ops.CudnnRNNV3(
            input=given[0], input_h=given[1], input_c=given[2], params=tf.zeros([999]), rnn_mode=mode,
            sequence_lengths=tf.fill([examples], steps),
        )  # fmt: skip
    kinds = [each for each in graph.get_operations() if each.type.startswith("Cudnn")]
    expected = 2 * steps * examples * gates * units * (width + units)
    assert flops.FlopCounter().count(kinds[0]) == expected
    assert made is not None


def test_what_regularises_weights_counts_nothing():
    plain, regularised = (
        counted(layers.Dense(3, kernel_regularizer=by), (4,)) for by in (None, "l2")
    )
    assert regularised == plain


def test_tracing_changes_nothing():
    model = stack(
        Input((4,)),
        layers.Dense(3),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        layers.Dense(1),
    )
    before = [keras.ops.convert_to_numpy(variable) for variable in model.variables]
    state = keras.ops.convert_to_numpy(model.layers[2].seed_generator.state)
    training_flops(
        model, "mse", (np.ones((2, 4), "float32"), np.ones((2, 1), "float32"))
    )
    assert all(
        np.array_equal(old, keras.ops.convert_to_numpy(new))
        for old, new in zip(before, model.variables, strict=True)
    )
    assert np.array_equal(
        state, keras.ops.convert_to_numpy(model.layers[2].seed_generator.state)
    )
