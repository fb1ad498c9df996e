"""Fused attention: what is computed by cuDNN, how, and that it computes the same.

No GPU is needed: the programs for cuDNN are read, and its formula runs on a CPU.
"""

from __future__ import annotations

import json
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from pipeline.accumulation import Update, fused_attention, keras_internals
from pipeline.accumulation.batch import Share
from pipeline.accumulation.fused_attention import why_attention_is_not_fused
from pipeline.accumulation.xla_internals import Attention
from tests.accumulation.attention import (
    EXAMPLES,
    computed_by_formula,
    custom_calls,
    fusing,
    transformer,
)
from tests.accumulation.replicas import strategy_on

EXACT = 1e-12
SHAPE = (EXAMPLES, 6, 3, 16)  # batch, time, heads, width; 1/√16 is exact in float32
HALF = 2e-2  # of bfloat16, whose rounding is 4e-3


def tensors(shape=SHAPE, dtype="float64", count=3):
    random = np.random.default_rng(0)
    return [tf.constant(random.normal(size=shape), dtype) for _ in range(count)]


def derivatives(function, inputs, by_output):
    """Return the output, the gradients, and those of a penalty on the gradients."""
    with tf.GradientTape() as outer:
        outer.watch([*inputs, by_output])
        with tf.GradientTape() as inner:
            inner.watch(inputs)
            output = function(*inputs)
        gradients = inner.gradient(output, inputs, by_output)
        penalty = tf.add_n([tf.reduce_sum(gradient**3) for gradient in gradients])
    second = outer.gradient(penalty, [*inputs, by_output])
    return [array.numpy() for array in (output, *gradients, *second)]


def largest_difference(arrays, others):
    return max(
        np.abs(array - other).max() for array, other in zip(arrays, others, strict=True)
    )


@pytest.mark.parametrize("causal", [True, False])
def test_the_formula_and_its_derivatives_are_those_of_keras(monkeypatch, causal):
    """Also the second ones. A control of the other mask, and one of another scale."""
    computed_by_formula(monkeypatch)
    *inputs, by_output = tensors(count=4)

    def by_keras(query, key, value):
        return ops.dot_product_attention(query, key, value, is_causal=causal)

    def by_formula(causal, scale):
        return lambda *inputs: fused_attention.fused(Attention(*inputs, scale, causal))

    expected = derivatives(by_keras, inputs, by_output)
    computed = derivatives(by_formula(causal, 0.25), inputs, by_output)
    assert largest_difference(computed, expected) < EXACT
    for control in (by_formula(not causal, 0.25), by_formula(causal, 0.26)):
        others = derivatives(control, inputs, by_output)
        assert largest_difference(others[:4], expected[:4]) > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_the_gradients_are_those_of_float64(monkeypatch, dtype):
    computed_by_formula(monkeypatch)
    *inputs, by_output = tensors(count=4, dtype=dtype)
    precise = [tf.cast(tensor, "float64") for tensor in (*inputs, by_output)]

    def gradients_of(inputs, by_output):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            with fusing():
                output = ops.dot_product_attention(*inputs, is_causal=True)
        gradients = tape.gradient(output, inputs, by_output)
        return [tf.cast(gradient, "float64").numpy() for gradient in gradients]

    computed = gradients_of(inputs, by_output)
    expected = gradients_of(precise[:3], precise[3])
    assert 0 < largest_difference(computed, expected) < HALF


def program(causal, scale=None):
    """Return the custom calls in the HLO of a compiled loop, as lines."""

    def gradient(query, key, value):
        inputs = [query, key, value]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            with fusing():
                output = ops.dot_product_attention(
                    *inputs, is_causal=causal, scale=scale
                )
        return tape.gradient(output, inputs)

    def body(index, sums, *inputs):
        gradients = gradient(*inputs)
        sums = [total + term for total, term in zip(sums, gradients, strict=True)]
        return (index + 1, sums, *inputs)

    spec = tf.TensorSpec([None, *SHAPE[1:]], tf.bfloat16)

    @tf.function(input_signature=[spec] * 3, autograph=False, jit_compile=True)
    def loop(*inputs):
        sums = [tf.zeros_like(tensor) for tensor in inputs]
        state = (tf.constant(0), sums, *inputs)
        return tf.while_loop(lambda index, *_: index < 2, body, state)[1]

    arguments = tensors(dtype="bfloat16")
    hlo = loop.experimental_get_compiler_ir(*arguments)(stage="hlo")
    return [line for line in hlo.splitlines() if "custom-call(" in line]


@pytest.mark.parametrize(
    ("causal", "scale", "mask_type"),
    [(True, None, "CAUSAL"), (False, 0.125, "NO_MASK")],
)
def test_the_program_of_xla_calls_cudnn_forward_and_backward(causal, scale, mask_type):
    forward, backward = program(causal, scale)
    heads_first = "bf16[2,3,6,16]{3,2,1,0}"
    time_first = "bf16[2,6,3,16]"
    assert '"__cudnn$fmhaSoftmax"' in forward
    assert '"__cudnn$fmhaSoftmaxBackward"' in backward

    results = forward.partition("custom-call(")[0]
    assert f"({heads_first}, f32[2,3,6]{{2,1,0}}, u8[0]{{0}})" in results
    results = backward.partition("custom-call(")[0]
    assert f"({', '.join([heads_first] * 3)}, u8[0]{{0}})" in results
    # XLA has the operands in the layout of the constraints.
    for line, shapes in (
        (forward, [time_first] * 3),
        (backward, [time_first] * 3 + ["f32[2,3,6]"] + [time_first] * 2),
    ):
        constraints = re.search(r"operand_layout_constraints={(.*?)}, api", line)[1]
        assert re.findall(r"\w+\[[\d,]+\]", constraints) == shapes
        assert set(re.findall(r"{([\d,]+)}", constraints)) <= {"3,2,1,0", "2,1,0"}
        assert "API_VERSION_STATUS_RETURNING_UNIFIED" in line

        text = line.partition("backend_config=")[2]
        config = json.loads(text)["cudnn_fmha_backend_config"]
        assert config["fmha_scale"] == (scale or 0.25)
        assert config["mask_type"] == mask_type
        assert config["dropout_rate"] == 0
        scores = config["intermediate_tensor_shape"]
        assert scores["element_type"] == "BF16"
        assert scores["dimensions"] == ["2", "3", "6", "6"]
        products = {key for key in config if key.endswith("dimension_numbers")}
        expected = 2 if line is forward else 4
        assert len(products) == expected


def replaced(dtype="bfloat16", shape=SHAPE, key_shape=None, **options):
    """Return the arguments of an attention in a table of conditions."""
    specs = [tf.TensorSpec(shape, dtype)]
    specs += [tf.TensorSpec(key_shape or shape, dtype)] * 2
    return specs, options


# By the reason that is given: what is left to Keras. Without one cuDNN computes it.
CONDITIONS = {
    "": [
        replaced(),
        replaced("float16"),
        replaced(is_causal=True),
        replaced(scale=0.5),
        replaced(shape=(None, 6, 3, 128)),
        replaced(shape=(EXAMPLES, 5, 3, 8)),
    ],
    "it has a mask": [replaced(mask=np.ones((1, 1, 6, 6), bool))],
    "it has a bias": [replaced(bias=np.ones((1, 1, 6, 6)))],
    "flash_attention is False": [replaced(flash_attention=False)],
    "its scale is a tensor": [replaced(scale=np.ones(()))],
    "it computes in float32": [replaced("float32")],
    "it computes in float64": [replaced("float64")],
    "its shape is not known when it is traced: (None, None, 3, 16)": [
        replaced(shape=(None, None, 3, 16))
    ],
    "it has 4 examples on axis 0, not 2": [replaced(shape=(4, 6, 3, 16))],
    "query, key and value have different shapes": [
        replaced(key_shape=(EXAMPLES, 7, 3, 16)),
        replaced(shape=(EXAMPLES, 6, 4, 16), key_shape=(EXAMPLES, 6, 2, 16)),
    ],
    "its heads are 12 wide, but the width must be at most 128 and a multiple of 8": [
        replaced(shape=(EXAMPLES, 6, 3, 12))
    ],
    "its heads are 136 wide, but the width must be at most 128 and a multiple of 8": [
        replaced(shape=(EXAMPLES, 6, 3, 136))
    ],
}


def cases_of_conditions():
    cases = []
    for reason, arguments_of_cases in CONDITIONS.items():
        for specs, options in arguments_of_cases:
            cases.append((reason, specs, options))
    return cases


@pytest.mark.parametrize(
    ("reason", "specs", "options"),
    cases_of_conditions(),
)
def test_what_cudnn_does_not_take_is_left_to_keras(reason, specs, options):
    """It is left to it bit for bit: the graph is that of Keras."""

    def graph(active):
        @tf.function(input_signature=specs, autograph=False)
        def attend(*inputs):
            arguments = dict(options)
            if isinstance(options.get("scale"), np.ndarray):
                arguments["scale"] = tf.constant(0.5)
            with fusing(active):
                if active:
                    named = dict(zip(("query", "key", "value"), inputs, strict=True))
                    given = {**named, **arguments}
                    why = fused_attention.why_not_fused(given, EXAMPLES)
                    assert why == reason
                return ops.dot_product_attention(*inputs, **arguments)

        traced = attend.get_concrete_function()
        # The size of axis 0 stays as unknown as it was.
        assert traced.structured_outputs.shape.as_list() == list(specs[0].shape)
        return traced.graph

    is_fused = not reason
    assert len(custom_calls(graph(True))) == is_fused
    types = [operation.type for operation in graph(True).get_operations()]
    expected = [operation.type for operation in graph(False).get_operations()]
    assert (types == expected) is not is_fused


def attentions(model, shape=(None, 6)):
    """Return why each attention of a model is not fused."""
    spec = tf.TensorSpec(shape, tf.int32)
    return why_attention_is_not_fused(model, (spec, spec), EXAMPLES)


def around(layer, **options):
    """Return a model around a layer of attention."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(5, 32, mask_zero=bool(options.pop("masked", False)))(inputs)
    return keras.Model(inputs, layer(x, x, **options))


class Windows(layers.Layer):
    """Attends in two halves of each example, as where images attend in windows."""

    def call(self, x):
        halves = ops.reshape(x, (-1, 3, 2, 16))
        return ops.dot_product_attention(halves, halves, halves)


def test_the_attentions_of_keras_are_told(precision):
    precision("mixed_bfloat16")
    model = transformer()
    for examples in (None, 1, 4):
        assert attentions(model, (examples, 6)) == ["", ""]
    # It is the same for a batch without labels and a share of one.
    batch = (tf.TensorSpec((None, 6), tf.int32), tf.NoneTensorSpec())
    scalar = tf.TensorSpec([], tf.int32)
    for batch_spec in (batch, Share(batch, scalar, scalar)):
        assert why_attention_is_not_fused(model, batch_spec, EXAMPLES) == ["", ""]

    unknown = "its shape is not known when it is traced: (2, None, 2, 16)"
    heads = layers.MultiHeadAttention(2, 16)
    assert attentions(around(heads, use_causal_mask=True)) == [""]
    assert attentions(around(heads), (None, None)) == [unknown]
    assert attentions(around(heads, masked=True)) == ["it has a mask"]
    # With dropout Keras' layers compute the scores themselves.
    assert attentions(around(layers.MultiHeadAttention(2, 16, dropout=0.1))) == []
    different = "query, key and value have different shapes"
    narrow = layers.MultiHeadAttention(2, 16, value_dim=8)
    assert attentions(around(narrow)) == [different]

    inputs = keras.Input((6,), dtype="int32")
    embedded = layers.Embedding(5, 32)(inputs)
    attended = heads(embedded, embedded)
    windows = keras.Model(inputs, [attended, Windows()(embedded)])
    axis = "axis 0 of an attention is not the axis of the examples"
    assert attentions(windows) == [axis, axis]


def test_a_causal_mask_alone_reaches_the_operation_as_is_causal():
    """As Keras 3.15 does it: see pipeline/accumulation/keras_internals.py."""
    calls = []

    def note(keras_attention, arguments):
        calls.append((arguments["is_causal"], arguments["mask"] is None))
        return keras_attention(**arguments)

    x = np.ones((2, 6, 32), "float32")
    for layer in (
        layers.MultiHeadAttention(2, 16),
        layers.GroupQueryAttention(16, 2, 1),
    ):
        layer.build(x.shape, x.shape)
        with keras_internals.attending(note):
            layer(x, x, use_causal_mask=True)
            layer(x, x, use_causal_mask=True, attention_mask=np.ones((2, 6, 6), bool))
            layer(x, x)
    assert calls == [(True, True), (False, False), (False, True)] * 2


def test_other_threads_and_what_comes_after_have_keras_own():
    def attend(*_):
        return tf.zeros(())

    inputs = tensors()
    outputs = {}

    def compute(name):
        outputs[name] = ops.dot_product_attention(*inputs).shape.rank

    with keras_internals.attending(attend):
        compute("inside")
        thread = threading.Thread(target=compute, args=["other thread"])
        thread.start()
        thread.join()
    compute("after")
    assert outputs == {"inside": 0, "other thread": 4, "after": 4}


def update_of(model, strategy=None, **options):
    with (strategy or strategy_on(1)).scope():
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Update(
        model, loss, optimizer, EXAMPLES, strategy=strategy, jit_compile=True, **options
    )


def traced(update):
    spec = tf.TensorSpec([None, 6], tf.int32)
    return tf.function(
        lambda x, y: update((x, y)), input_signature=[spec] * 2, autograph=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_compiled_step_of_an_update_has_the_calls(precision, replicas):
    precision("mixed_bfloat16")
    strategy = strategy_on(replicas)
    for is_fused in (True, False):
        with strategy.scope():
            model = transformer()
        update = update_of(model, strategy, fused_attention=is_fused)
        graph = traced(update).get_concrete_function().graph
        calls = custom_calls(graph)
        targets = sorted(node.attr["call_target_name"].s.decode() for node in calls)
        pair = ["__cudnn$fmhaSoftmax"] * 2 + ["__cudnn$fmhaSoftmaxBackward"] * 2
        assert targets == sorted(pair * replicas * is_fused)
        # Only in what is compiled: elsewhere they cannot run.
        for function in graph.as_graph_def().library.function:
            if any(node in calls for node in function.node_def):
                assert function.attr["_XlaMustCompile"].b


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_an_update_is_that_of_keras_attention(monkeypatch):
    """Weights after two updates, with tails; the control has no causal mask.

    A loss of examples, after the attentions, tells the axis of the examples by its
    unknown size.
    """
    computed_by_formula(monkeypatch)
    random = np.random.default_rng(0)
    batches = [random.integers(0, 7, (size, 6)).astype("int32") for size in (5, 4)]

    def weights_after(is_fused, causal=True):
        model = transformer(causal)
        step = traced(update_of(model, fused_attention=is_fused))
        for tokens in batches:
            step(tokens, tokens)
        return model.get_weights()

    expected = weights_after(False)
    assert largest_difference(weights_after(True), expected) < EXACT
    assert largest_difference(weights_after(True, causal=False), expected) > 1e-3


@pytest.mark.slow
def test_an_update_without_anything_to_fuse_has_the_bits_of_today():
    """In float32; the control is another micro-batch size."""
    tokens = np.random.default_rng(0).integers(0, 7, (5, 6)).astype("int32")

    def weights_after(is_fused, micro_batch_size=EXAMPLES):
        model = transformer()
        update = update_of(model, fused_attention=is_fused)
        update.micro_batch_size = micro_batch_size
        traced(update)(tokens, tokens)
        return model.get_weights()

    expected = weights_after(False)
    for weight, other in zip(weights_after(True), expected, strict=True):
        np.testing.assert_array_equal(weight, other)
    assert largest_difference(weights_after(True, 3), expected) > 0
