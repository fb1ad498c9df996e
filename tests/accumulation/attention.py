"""What the tests of fused attention have in common."""

from __future__ import annotations

from contextlib import nullcontext

import keras
import tensorflow as tf
from keras import layers

from pipeline.accumulation import fused_attention, xla_internals

EXAMPLES = 2
CALL = "XlaCustomCallV2"


def computed_by_formula(monkeypatch, dtypes=("bfloat16", "float16", "float64")):
    """Have the formula compute what cuDNN would; it also takes float64."""

    def output(attention):
        value = fused_attention.reference(attention)
        batch, time, heads, _ = value.shape
        return xla_internals.AttentionOutput(value, tf.zeros([batch, heads, time]))

    def gradient(attention, result, by_output):
        return fused_attention.reference_gradient(attention, by_output)

    monkeypatch.setattr(xla_internals, "cudnn_attention", output)
    monkeypatch.setattr(xla_internals, "cudnn_attention_gradient", gradient)
    monkeypatch.setattr(xla_internals, "ELEMENT_TYPES", dict.fromkeys(dtypes, ""))


def custom_calls(graph):
    """Return the nodes of custom calls in a graph and the functions that it calls."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    return [node for node in nodes if node.op == CALL]


def fusing(active=True):
    return fused_attention.attention_fused(EXAMPLES) if active else nullcontext()


class PerExample(layers.Layer):
    """Adds a loss with a value for each example."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x), axis=[1, 2]))
        return x


def transformer(causal=True, time=6, tokens=7, heads=2, width=16):
    """Return a model with two attentions, of each of Keras' layers."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((time,), dtype="int32")
    x = layers.Embedding(tokens, heads * width)(inputs)
    attention = layers.MultiHeadAttention(heads, width)
    x += attention(x, x, use_causal_mask=causal)
    x += layers.GroupQueryAttention(width, heads, 1)(x, x)
    x = PerExample()(x)
    logits = layers.Dense(tokens, dtype=keras.config.floatx())(x)
    return keras.Model(inputs, logits)
