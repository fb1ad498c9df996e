"""The gradient of wide dense layers with respect to their inputs, as the matrix product that a CPU computes faster.

    Y = X·W        dW = Xᵀ·dY        dX = dY·Wᵀ = (W·dYᵀ)ᵀ

TensorFlow computes dX as dY·Wᵀ. On a CPU in float32 that is slow for the few rows of a micro-batch. The
speedup of (W·dYᵀ)ᵀ by kernel and rows of dY, on two cores:

    rows             8    12    15    16    32    64   128   256   512
    256×256        0.8   0.8         0.8   0.8   0.8   0.8   0.8   0.8
    8192×128       0.7   0.8         1.2   1.1   0.9   0.9   0.8   0.7
    512×512        0.7   0.7         1.1   1.2   1.1   1.0   1.0   0.9
    1024×512       0.7   0.8   0.7   1.6   1.5   1.3   1.2   1.0   0.9
    1024×1024      0.6   0.7   0.7   2.9   2.6   1.9   1.5   1.1   0.8
    4096×4096      1.0   1.2         5.1   3.5   2.0   1.5   1.1   0.9

Measured with oneDNN, TensorFlow's default; without it the speedup of 1024×1024 is 3.9 at 16 rows and 1.5 at 128.

Each element is the same sum; the order of its terms may differ. The forward pass is Keras', dW is TensorFlow's.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from .keras_internals import (
    calling,
    graph,
    keeps_call_of,
    layers_of,
    pack_tangents,
    record_operation,
    stop_recording,
)

# Where nearly all measurements gain, also for rows that are no multiple of 16: the worst is 0.9, 768×768 at 100 rows.
LARGE = 1 << 19  # elements of a kernel
WIDE = 512  # of its shorter axis: the transpose is a pass over rows × inputs, too expensive for few units
ROWS = range(16, 129)  # examples of a micro-batch


def wide_layers(model: keras.Model, micro_batch_size: int) -> list[keras.layers.Dense]:
    """Return the layers that `transposed_gradients` makes faster: Keras' own with large kernels, float32 on a CPU."""
    dense = [
        layer for layer in layers_of(model) if keeps_call_of(layer, keras.layers.Dense)
    ]
    return (
        [layer for layer in dense if _is_wide(layer)]
        if micro_batch_size in ROWS
        else []
    )


def transposed_gradients(
    layers: Sequence[keras.layers.Dense],
) -> AbstractContextManager[None]:
    """Compute gradients by inputs of rank 2 as (W·dYᵀ)ᵀ where the layers are called inside the `with` block."""
    return calling((layer, _call(layer)) for layer in layers)


def _is_wide(layer: keras.layers.Dense) -> bool:
    # Not `layer.kernel`: with LoRA it is computed, and an unbuilt layer has none.
    kernels = [
        weight
        for weight in layer.weights
        if len(weight.shape) == 2 and weight.dtype == "float32"
    ]
    large = [
        kernel
        for kernel in kernels
        if math.prod(kernel.shape) >= LARGE and min(kernel.shape) >= WIDE
    ]
    return layer.compute_dtype == "float32" and any(
        "GPU" not in kernel.value.device for kernel in large
    )


def _call(layer: keras.layers.Dense) -> Callable[..., tf.Tensor]:
    here = graph()

    def call(inputs: Any, training: Any = None) -> Any:
        fits = (
            isinstance(inputs, tf.Tensor)
            and inputs.dtype == tf.float32
            and inputs.shape.rank == 2
        )
        kernel = (
            tf.convert_to_tensor(layer.kernel) if fits and graph() is here else None
        )
        # Keras' own, in a layer's own loop or function, and where a `ForwardAccumulator` has a derivative to carry on.
        if kernel is None or pack_tangents([inputs, kernel]).tangents:
            return type(layer).call(layer, inputs, training=training)
        outputs = _product(inputs, kernel)
        if layer.bias is not None:
            outputs = keras.ops.add(outputs, layer.bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    return call


def _product(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Return X·W with a gradient declared to every tape; it is of plain operations, so it has one itself."""
    with stop_recording():
        product = keras.ops.matmul(x, kernel)

    def gradient(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.transpose(tf.matmul(kernel, dy, transpose_b=True)), tf.matmul(
            x, dy, transpose_a=True
        )

    record_operation("MatMul", [product], [x, kernel], gradient)
    return product
