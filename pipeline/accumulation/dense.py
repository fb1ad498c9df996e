"""The gradient of wide dense layers by their inputs, computed faster on a CPU.

    Y = X·W        dW = Xᵀ·dY        dX = dY·Wᵀ = (W·dYᵀ)ᵀ

TensorFlow computes dX as dY·Wᵀ. On a CPU in float32 that is slow for the few rows of a
micro-batch. The speedup of (W·dYᵀ)ᵀ by kernel and rows of dY, on two cores:

    rows             8    12    15    16    32    64   128   256   512
    256×256        0.8   0.8         0.8   0.8   0.8   0.8   0.8   0.8
    8192×128       0.7   0.8         1.2   1.1   0.9   0.9   0.8   0.7
    512×512        0.7   0.7         1.1   1.2   1.1   1.0   1.0   0.9
    1024×512       0.7   0.8   0.7   1.6   1.5   1.3   1.2   1.0   0.9
    1024×1024      0.6   0.7   0.7   2.9   2.6   1.9   1.5   1.1   0.8
    4096×4096      1.0   1.2         5.1   3.5   2.0   1.5   1.1   0.9

Measured with oneDNN, TensorFlow's default; without it the speedup of 1024×1024 is 3.9
at 16 rows and 1.5 at 128.

Each element is the same sum; the order of its terms may differ. The forward pass is
that of Keras, dW is that of TensorFlow.
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

# The range in which nearly all measurements gain, also those for rows that are no
# multiple of 16. The worst is 0.9, for 768×768 at 100 rows.
LARGE = 1 << 19  # elements of a kernel
# Elements of its shorter axis: the transpose is a pass over rows × inputs, too
# expensive for few units.
WIDE = 512
ROWS = range(16, 129)  # examples of a micro-batch


def wide_layers(model: keras.Model, micro_batch_size: int) -> list[keras.layers.Dense]:
    """Return the layers that `transposed_gradients` makes faster.

    They are Keras' own dense layers that have large kernels in float32, on a CPU.
    """
    if micro_batch_size not in ROWS:
        return []
    return [layer for layer in layers_of(model) if _is_wide(layer)]


def transposed_gradients(
    layers: Sequence[keras.layers.Dense],
) -> AbstractContextManager[None]:
    """Have the layers' gradients by inputs of rank 2 computed as (W·dYᵀ)ᵀ.

    This holds for calls of the layers inside the `with` block.
    """
    return calling((layer, _call(layer)) for layer in layers)


def _is_wide(layer: keras.Layer) -> bool:
    if not keeps_call_of(layer, keras.layers.Dense):
        return False
    if layer.compute_dtype != "float32":
        return False
    # Not `layer.kernel`: with LoRA it is computed, and an unbuilt layer has none.
    for weight in layer.weights:
        if len(weight.shape) != 2 or weight.dtype != "float32":
            continue
        is_large = math.prod(weight.shape) >= LARGE and min(weight.shape) >= WIDE
        if is_large and "GPU" not in weight.value.device:
            return True
    return False


def _call(layer: keras.layers.Dense) -> Callable[..., tf.Tensor]:
    traced_graph = graph()

    def call(inputs: Any, training: Any = None) -> Any:
        if not _takes(inputs):
            return type(layer).call(layer, inputs, training=training)
        # A layer's own loop or function has another graph.
        if graph() is not traced_graph:
            return type(layer).call(layer, inputs, training=training)
        kernel = tf.convert_to_tensor(layer.kernel)
        # A `ForwardAccumulator` has a derivative to carry on.
        if pack_tangents([inputs, kernel]).tangents:
            return type(layer).call(layer, inputs, training=training)

        outputs = _product(inputs, kernel)
        if layer.bias is not None:
            outputs = keras.ops.add(outputs, layer.bias)
        if layer.activation is not None:
            outputs = layer.activation(outputs)
        return outputs

    return call


def _takes(inputs: Any) -> bool:
    if not isinstance(inputs, tf.Tensor):
        return False
    return inputs.dtype == tf.float32 and inputs.shape.rank == 2


def _product(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """Return X·W with a gradient declared to every tape.

    The gradient is made of plain operations, so it has a gradient itself.
    """
    with stop_recording():
        product = keras.ops.matmul(x, kernel)

    def gradient(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        by_inputs = tf.transpose(tf.matmul(kernel, dy, transpose_b=True))
        by_kernel = tf.matmul(x, dy, transpose_a=True)
        return by_inputs, by_kernel

    record_operation("MatMul", [product], [x, kernel], gradient)
    return product
