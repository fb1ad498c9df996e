"""Private interfaces of TensorFlow 2.21 and its XLA, to run cuDNN's attention.

`gen_xla_ops.xla_custom_call_v2`: adds a call of a named function to the program that
    XLA compiles. The operation runs only in XLA, and needs shapes that are known during
    tracing.
`__cudnn$fmhaSoftmax`, `__cudnn$fmhaSoftmaxBackward`: names of functions for which XLA's
    compiler for GPUs builds a cuDNN graph. The operands, the results, and the fields of
    `cudnn_fmha_backend_config` are those in jax/_src/cudnn/
    fused_attention_stablehlo.py, and so are the matrix products in `FORWARD` and
    `BACKWARD`.

A prototype ran both functions on an H200, in TensorFlow 2.21.0 with cuDNN 9.28: in a
compiled while loop, with and without a causal mask, for equal numbers of queries and
keys. The gradient with respect to the query was not bit-identical from run to run; the
other results were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

# The floating-point types that cuDNN's fused attention supports here, with XLA's names
# for them.
ELEMENT_TYPES = {"bfloat16": "BF16", "float16": "F16"}

# The axes of a product of two tensors: the contracted axis of the left and of the right
# operand, then the batch axes of the left and of the right operand. In the comments
# below, B is the batch, T the queries, S the keys, N the heads, and H the width.
_Axes = tuple[int, int, tuple[int, int], tuple[int, int]]

FORWARD: Mapping[str, _Axes] = {
    "bmm1": (3, 3, (0, 2), (0, 2)),  # BTNH, BSNH → BNTS: Q·Kᵀ
    "bmm2": (3, 1, (0, 1), (0, 2)),  # BNTS, BSNH → BTNH: P·V
}
BACKWARD: Mapping[str, _Axes] = {
    "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),  # BNTS, BTNH → BSNH: dSᵀ·Q
    "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),  # BNTS, BSNH → BTNH: dS·K
    "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),  # BNTS, BTNH → BSNH: Pᵀ·dO
    "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),  # BTNH, BSNH → BNTS: dO·Vᵀ
}


class Attention(NamedTuple):
    """The arguments of an attention.

    Attributes:
        query: (batch, time, heads, width).
        key: of the same shape and dtype.
        value: of the same shape and dtype.
        scale: the factor by which the products of queries and keys are multiplied.
        causal: whether each query attends only to the keys up to its own position.
    """

    query: tf.Tensor
    key: tf.Tensor
    value: tf.Tensor
    scale: float
    causal: bool


class AttentionOutput(NamedTuple):
    """The results of an attention, which are needed for its gradients.

    Attributes:
        output: (batch, time, heads, width), of the query's dtype.
        statistics: the logarithm of the sum by which each row of the softmax is
            divided, (batch, heads, time), float32.
    """

    output: tf.Tensor
    statistics: tf.Tensor


def cudnn_attention(attention: Attention) -> AttentionOutput:
    """Compute an attention with one cuDNN kernel."""
    query = attention.query
    batch, time, heads, width = query.shape
    results = [
        tf.TensorSpec([batch, heads, time, width], query.dtype),
        tf.TensorSpec([batch, heads, time], tf.float32),
    ]
    operands = [query, attention.key, attention.value]
    config = backend_config(attention, FORWARD)
    output, statistics = _call("__cudnn$fmhaSoftmax", operands, results, config)
    return AttentionOutput(_with_time_before_heads(output), statistics)


def cudnn_attention_gradient(
    attention: Attention, result: AttentionOutput, by_output: tf.Tensor
) -> list[tf.Tensor]:
    """Return the gradients with respect to query, key and value.

    Args:
        attention: the arguments of the attention.
        result: the result of `cudnn_attention`.
        by_output: the gradient with respect to the output.
    """
    query = attention.query
    batch, time, heads, width = query.shape
    results = [tf.TensorSpec([batch, heads, time, width], query.dtype)] * 3
    operands = [
        query,
        attention.key,
        attention.value,
        result.statistics,
        by_output,
        result.output,
    ]
    config = backend_config(attention, BACKWARD)
    gradients = _call("__cudnn$fmhaSoftmaxBackward", operands, results, config)
    return [_with_time_before_heads(gradient) for gradient in gradients]


def backend_config(attention: Attention, products: Mapping[str, _Axes]) -> str:
    """Return the JSON from which XLA builds the cuDNN graph for `products`.

    64-bit integers are strings, as in the JSON format of protocol buffers.
    """
    batch, time, heads, _ = attention.query.shape
    mask_type = "CAUSAL" if attention.causal else "NO_MASK"
    layout = {
        "dim_level_types": [],
        "dim_unique": [],
        "dim_ordered": [],
        "minor_to_major": ["3", "2", "1", "0"],
        "tiles": [],
        "element_size_in_bits": "0",
        "memory_space": "0",
        "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "dynamic_shape_metadata_prefix_bytes": "0",
    }
    scores = {
        "element_type": ELEMENT_TYPES[attention.query.dtype.name],
        "dimensions": _as_texts([batch, heads, time, time]),
        "tuple_shapes": [],
        "layout": layout,
        "is_dynamic_dimension": [False] * 4,
    }
    algorithm = {
        "algo_id": "0",
        "math_type": "TENSOR_OP_MATH",
        "tuning_knobs": {"17": "1", "24": "0"},
        "is_cudnn_frontend": True,
        "workspace_size": "0",
    }
    fused: dict[str, Any] = {
        "algorithm": algorithm,
        "fmha_scale": attention.scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": mask_type,
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    for name, axes in products.items():
        left_summed, right_summed, left_shared, right_shared = axes
        fused[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": _as_texts([left_summed]),
            "rhs_contracting_dimensions": _as_texts([right_summed]),
            "lhs_batch_dimensions": _as_texts(left_shared),
            "rhs_batch_dimensions": _as_texts(right_shared),
        }
    config = {"operation_queue_id": "0", "cudnn_fmha_backend_config": fused}
    return json.dumps(config)


def _call(
    target: str,
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.TensorSpec],
    config: str,
) -> list[tf.Tensor]:
    """Return the results of a custom call, without its workspace."""
    # The last result is the workspace, whose size XLA sets.
    all_results = [*results, tf.TensorSpec([0], tf.uint8)]
    outputs = gen_xla_ops.xla_custom_call_v2(
        operands=list(operands),
        call_target_name=target,
        backend_config=config,
        has_side_effect=False,
        result_dtypes=[spec.dtype for spec in all_results],
        result_shapes=[spec.shape for spec in all_results],
    )
    return list(outputs[:-1])


def _with_time_before_heads(result: tf.Tensor) -> tf.Tensor:
    # Swap two axes: the results of XLA's operation are always row-major, and cuDNN's
    # row-major result has the shape (batch, heads, time, width).
    return tf.transpose(result, [0, 2, 1, 3])


def _as_texts(numbers: Sequence[int]) -> list[str]:
    return [str(number) for number in numbers]
