"""A faster input gradient of wide dense layers on a CPU.

    Y = X·W        dW = Xᵀ·dY        dX = dY·Wᵀ = (W·dYᵀ)ᵀ

TensorFlow computes dX as dY·Wᵀ. On a CPU in float32, this is slow for the few rows of a
micro-batch. The table shows the speedup of (W·dYᵀ)ᵀ on two cores, by the shape of the
kernel and the number of rows of dY:

    rows             8    12    15    16    32    64   128   256   512
    256×256        0.8   0.8         0.8   0.8   0.8   0.8   0.8   0.8
    8192×128       0.7   0.8         1.2   1.1   0.9   0.9   0.8   0.7
    512×512        0.7   0.7         1.1   1.2   1.1   1.0   1.0   0.9
    1024×512       0.7   0.8   0.7   1.6   1.5   1.3   1.2   1.0   0.9
    1024×1024      0.6   0.7   0.7   2.9   2.6   1.9   1.5   1.1   0.8
    4096×4096      1.0   1.2         5.1   3.5   2.0   1.5   1.1   0.9

Measured with oneDNN, TensorFlow's default; without it the speedup of 1024×1024 is 3.9
at 16 rows and 1.5 at 128.

Each element of dX is the same sum, but the order of its terms may differ. The forward
pass remains that of Keras, and dW that of TensorFlow.
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

# Sizes at which nearly all measurements show a speedup, also at numbers of rows that
# are not multiples of 16. The worst is 0.9, for 768×768 at 100 rows.
LARGE = 1 << 19  # minimum number of elements in a kernel
# Minimum length of the kernel's shorter axis. The transpose is a pass over rows ×
# inputs, which is too expensive for few units.
WIDE = 512
ROWS = range(16, 129)  # examples per micro-batch


def wide_layers(model: keras.Model, micro_batch_size: int) -> list[keras.layers.Dense]:
    """Return the layers that `transposed_gradients` makes faster.

    They are Keras' own dense layers with large float32 kernels on a CPU. There are none
    if the micro-batch size is not in `ROWS`.
    """
    if micro_batch_size not in ROWS:
        return []
    return [layer for layer in layers_of(model) if _is_wide(layer)]


def transposed_gradients(
    layers: Sequence[keras.layers.Dense],
) -> AbstractContextManager[None]:
    """Compute the layers' gradients with respect to rank-2 inputs as (W·dYᵀ)ᵀ.

    This applies to calls of the layers inside the `with` block.
    """
    return calling((layer, _call(layer)) for layer in layers)


def _is_wide(layer: keras.Layer) -> bool:
    if not keeps_call_of(layer, keras.layers.Dense):
        return False
    if layer.compute_dtype != "float32":
        return False
    # Do not use `layer.kernel`: LoRA computes it, and an unbuilt layer has none.
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
        # Leave calls in another graph to Keras, such as those in a layer's own loop.
        if graph() is not traced_graph:
            return type(layer).call(layer, inputs, training=training)
        kernel = tf.convert_to_tensor(layer.kernel)
        # Leave calls to Keras if a `ForwardAccumulator` needs their derivatives.
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
    """Return X·W, and record its gradient on every active tape.

    The gradient consists of plain operations, so it can be differentiated again.
    """
    with stop_recording():
        product = keras.ops.matmul(x, kernel)

    def gradient(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        by_inputs = tf.transpose(tf.matmul(kernel, dy, transpose_b=True))
        by_kernel = tf.matmul(x, dy, transpose_a=True)
        return by_inputs, by_kernel

    record_operation("MatMul", [product], [x, kernel], gradient)
    return product
