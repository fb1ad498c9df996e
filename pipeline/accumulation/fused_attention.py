"""Attention computed by cuDNN's fused kernels, in a step that XLA compiles.

    S = scale·Q·Kᵀ        P = softmax(S)        O = P·V

Keras' attention writes S and P, which have time² elements per head, to memory several
times, and again for the gradients. cuDNN's kernels keep S and P on the chip. For the
gradients, they compute P again, from S and the logarithm of each row's sum.

`keras.layers.MultiHeadAttention` and `GroupQueryAttention` without dropout call
`keras.ops.dot_product_attention`. Users' own code may call it, too. Inside the `with`
block of `attention_fused`, this module handles each call. It leaves an attention to
Keras if cuDNN cannot compute it, or if cuDNN has not been tested on a GPU with such an
attention: `why_not_fused` checks the conditions.

cuDNN's gradient with respect to Q is not bit-identical from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from numbers import Real
from typing import Any

import keras
import tensorflow as tf

from . import xla_internals
from .batch import Share
from .keras_internals import (
    attending,
    pack_tangents,
    record_operation,
    stop_recording,
)
from .loss_sums import float32_at_least
from .xla_internals import Attention

# In cuDNN for GPUs before Blackwell: the maximum width of a head, and the number that
# must divide the width.
MAX_WIDTH = 128
WIDTH_MULTIPLE = 8


def attention_fused(examples: int) -> AbstractContextManager[None]:
    """Inside the `with` block, let cuDNN compute Keras' attention where possible.

    The block must be in a function that XLA compiles for an NVIDIA GPU of the Hopper
    generation. cuDNN needs shapes that are known during tracing. So an axis 0 of
    unknown size is taken to have the size `examples`, the micro-batch size.
    """
    return attending(partial(_attend, examples))


def why_attention_is_not_fused(
    model: keras.Model, batch_spec: Any, micro_batch_size: int
) -> list[str]:
    """Return, for each attention in a forward pass, why it would not be fused.

    The reason is empty for an attention that would be fused. The forward pass is traced
    but not run. If axis 0 of some attention does not hold the examples, as in attention
    within windows of an image, no attention is fused: in the compiled step, where each
    axis 0 has an unknown size, such an axis could not be distinguished.

    Args:
        model: a built model.
        batch_spec: the spec of an effective batch, such as a dataset's `element_spec`.
        micro_batch_size: examples per micro-batch.
    """
    reasons: list[str] = []
    sizes = set()

    def note(keras_attention: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        reasons.append(why_not_fused(arguments, micro_batch_size))
        sizes.add(arguments["query"].shape[0])
        return keras_attention(**arguments)

    def micro_batch_spec(spec: tf.TypeSpec) -> tf.TypeSpec:
        if not isinstance(spec, tf.TensorSpec):
            return spec
        return tf.TensorSpec([micro_batch_size, *spec.shape[1:]], spec.dtype)

    def forward(x: Any) -> None:
        with attending(note):
            model(x, training=True)

    if isinstance(batch_spec, Share):
        batch_spec = batch_spec.batch
    x, *_ = keras.utils.unpack_x_y_sample_weight(batch_spec)
    x_spec = tf.nest.map_structure(micro_batch_spec, x)
    # Trace in a scope that discards the values assigned to variables.
    with keras.StatelessScope():
        tf.function(forward, autograph=False).get_concrete_function(x_spec)
    if sizes - {micro_batch_size}:
        return ["axis 0 of an attention is not the axis of the examples"] * len(reasons)
    return reasons


def why_not_fused(arguments: Mapping[str, Any], examples: int) -> str:
    """Return the reason why Keras computes an attention, or "" if cuDNN does.

    A layer that is called with `use_causal_mask=True` passes `is_causal` and no mask,
    unless there is another mask.

    Args:
        arguments: the arguments of `keras.ops.dot_product_attention`, by name.
        examples: the micro-batch size; see `attention_fused`.
    """
    options = {"mask": "mask", "bias": "bias", "attn_logits_soft_cap": "soft cap"}
    for name, description in options.items():
        if arguments.get(name) is not None:
            return f"it has a {description}"
    flash_attention = arguments.get("flash_attention")
    if flash_attention is not None:
        return f"flash_attention is {flash_attention}"
    scale = arguments.get("scale")
    if scale is not None and not isinstance(scale, Real):
        return "its scale is a tensor"
    tensors = [arguments[name] for name in ("query", "key", "value")]
    if not all(map(tf.is_tensor, tensors)):
        return "its arguments are not tensors"
    # A `ForwardAccumulator` needs a forward derivative, which cuDNN does not compute.
    if pack_tangents(tensors).tangents:
        return "a forward-mode derivative is taken"
    return _why_not_by_cudnn(tensors, examples)


def _why_not_by_cudnn(tensors: list[tf.Tensor], examples: int) -> str:
    """Return the reason why cuDNN does not support the tensors, or "" if it does."""
    query, *_ = tensors
    dtype = query.dtype.name
    if dtype not in xla_internals.ELEMENT_TYPES:
        return f"it computes in {dtype}"
    if len({tensor.dtype for tensor in tensors}) > 1:
        return "query, key and value have different dtypes"
    for tensor in tensors:
        shape = tensor.shape
        if shape.rank != 4 or not shape[1:].is_fully_defined():
            return f"its shape is not known when it is traced: {shape}"
        if shape[0] not in (None, examples):
            return f"it has {shape[0]} examples on axis 0, not {examples}"
        # Reject different numbers of keys and queries, which were not tested on a GPU.
        if shape[1:] != query.shape[1:]:
            return "query, key and value have different shapes"
    width = query.shape[-1]
    if width > MAX_WIDTH or width % WIDTH_MULTIPLE:
        rule = f"at most {MAX_WIDTH} and a multiple of {WIDTH_MULTIPLE}"
        return f"its heads are {width} wide, but the width must be {rule}"
    return ""


def _attend(
    examples: int,
    keras_attention: Callable[..., tf.Tensor],
    arguments: dict[str, Any],
) -> tf.Tensor:
    """Compute an attention with cuDNN if possible, otherwise with Keras."""
    if why_not_fused(arguments, examples):
        return keras_attention(**arguments)
    query = arguments["query"]
    scale = arguments.get("scale")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    shape = [examples, *query.shape[1:]]
    attention = Attention(
        query=tf.ensure_shape(query, shape),
        key=tf.ensure_shape(arguments["key"], shape),
        value=tf.ensure_shape(arguments["value"], shape),
        scale=float(scale),
        causal=bool(arguments.get("is_causal")),
    )
    output = fused(attention)
    # Make the size of axis 0 unknown again. An unknown size marks the axis of examples:
    # without it, losses that a layer adds per example would not be weighted.
    if query.shape[0] is None:
        output = output[: tf.shape(query)[0]]
    return output


def fused(attention: Attention) -> tf.Tensor:
    """Compute an attention with cuDNN, and register its gradient with every tape.

    The shapes of query, key and value must be known.
    """
    inputs = [attention.query, attention.key, attention.value]
    with stop_recording():
        result = xla_internals.cudnn_attention(attention)

    def gradient(by_output: tf.Tensor) -> list[tf.Tensor]:
        by_output = tf.ensure_shape(by_output, result.output.shape)
        with stop_recording():
            gradients = xla_internals.cudnn_attention_gradient(
                attention, result, by_output
            )

        def second_gradient(*by_gradients: tf.Tensor) -> list[tf.Tensor]:
            return _second_gradient(attention, by_output, by_gradients)

        record_operation(
            "AttentionGradient", gradients, [*inputs, by_output], second_gradient
        )
        return gradients

    record_operation("Attention", [result.output], inputs, gradient)
    return result.output


def reference(attention: Attention) -> tf.Tensor:
    """Return the output of the formula, computed in at least float32.

    It has the dtype of the query.
    """
    value = _precise(attention.value)
    output = tf.einsum("bnts,bsnh->btnh", _probabilities(attention), value)
    return tf.cast(output, attention.query.dtype)


def reference_gradient(attention: Attention, by_output: tf.Tensor) -> list[tf.Tensor]:
    """Return the gradients with respect to query, key and value.

        dV = Pᵀ·dO        dP = dO·Vᵀ        dS = P∘(dP − Σₛ P∘dP)
        dQ = scale·dS·K        dK = scale·dSᵀ·Q

    Σₛ is the sum over the keys. The gradients are computed in at least float32, and
    have the dtype of the query.

    Args:
        attention: the arguments of the attention.
        by_output: dO, the gradient with respect to the output.
    """
    probabilities = _probabilities(attention)
    by_output = _precise(by_output)
    by_value = tf.einsum("bnts,btnh->bsnh", probabilities, by_output)
    by_probabilities = tf.einsum(
        "btnh,bsnh->bnts", by_output, _precise(attention.value)
    )

    weighted = probabilities * by_probabilities
    by_scores = weighted - probabilities * tf.reduce_sum(weighted, -1, keepdims=True)
    by_scores *= attention.scale
    by_query = tf.einsum("bnts,bsnh->btnh", by_scores, _precise(attention.key))
    by_key = tf.einsum("bnts,btnh->bsnh", by_scores, _precise(attention.query))
    gradients = [by_query, by_key, by_value]
    return [tf.cast(gradient, attention.query.dtype) for gradient in gradients]


def _probabilities(attention: Attention) -> tf.Tensor:
    """Return P, of shape (batch, heads, time, time), in at least float32."""
    query = _precise(attention.query)
    scores = tf.einsum("btnh,bsnh->bnts", query, _precise(attention.key))
    scores *= attention.scale
    if attention.causal:
        time = query.shape[1]
        attended = tf.linalg.band_part(tf.ones([time, time], tf.bool), -1, 0)
        scores = tf.where(attended, scores, scores.dtype.min)
    return tf.nn.softmax(scores)


def _precise(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, float32_at_least(tensor.dtype))


def _second_gradient(
    attention: Attention, by_output: tf.Tensor, by_gradients: tuple[tf.Tensor, ...]
) -> list[tf.Tensor]:
    """Return the gradients with respect to the arguments of `reference_gradient`.

    These are query, key, value and `by_output`. cuDNN cannot compute these gradients. A
    model with a gradient penalty needs them.
    """
    inputs = [attention.query, attention.key, attention.value, by_output]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        gradients = reference_gradient(attention, by_output)
    return tape.gradient(gradients, inputs, by_gradients)
