"""The workloads in Keras: model, loss, Adam, and batches out of memory."""

from __future__ import annotations

import keras
import tensorflow as tf
from omegaconf import OmegaConf

from benchmarks.workloads import (
    EPOCH,
    LEARNING_RATE,
    Convolutions,
    Dense,
    Embedding,
    ResNet,
    Transformer,
    Workload,
)
from pipeline.config.stages import Slice
from pipeline.dataset import Data
from pipeline.dataset import batches as batching

# The blocks in each of the four stages of a ResNet, by its depth.
RESNET_BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
BOTTLENECK_DEPTH = 50  # from this depth on, blocks are bottlenecks
IMAGENET_SIDE = 64  # pixels; from this side on, the first layers are those for ImageNet


def build(workload: Workload) -> keras.Model:
    """Build the model of a workload, with the current precision."""
    network = workload.network
    if isinstance(network, ResNet):
        return resnet(network.depth, workload.input_shape[0], workload.classes)
    if isinstance(network, Transformer):
        return transformer(
            network.layers,
            network.width,
            network.heads,
            vocabulary=workload.classes,
            length=workload.input_shape[0],
        )

    dtype = "float32" if workload.integers_below is None else "int32"
    inputs = keras.Input(workload.input_shape, dtype=dtype)
    hidden = _hidden(network, inputs)
    outputs = keras.layers.Dense(workload.classes)(hidden)
    return keras.Model(inputs, outputs, name=workload.name)


def resnet(depth: int, side: int, classes: int) -> keras.Model:
    """Build a ResNet: images (examples, side, side, 3) → logits (examples, classes)."""
    inputs = keras.Input((side, side, 3))
    if side >= IMAGENET_SIDE:
        hidden = _normed_convolution(inputs, 64, 7, strides=2, relu=True)
        hidden = keras.layers.MaxPooling2D(3, strides=2, padding="same")(hidden)
    else:
        hidden = _normed_convolution(inputs, 64, 3, relu=True)

    block = _bottleneck if depth >= BOTTLENECK_DEPTH else _basic_block
    for stage, count in enumerate(RESNET_BLOCKS[depth]):
        filters = 64 * 2**stage
        for number in range(count):
            begins_smaller_images = stage > 0 and number == 0
            strides = 2 if begins_smaller_images else 1
            hidden = block(hidden, filters, strides)

    hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    outputs = keras.layers.Dense(classes)(hidden)
    return keras.Model(inputs, outputs, name=f"resnet{depth}")


def transformer(
    layers: int, width: int, heads: int, vocabulary: int, length: int
) -> keras.Model:
    """Build a causal transformer with the norms first.

    It maps tokens (examples, length) to logits (examples, length, vocabulary).
    """
    inputs = keras.Input((length,), dtype="int32")
    hidden = keras.layers.Embedding(vocabulary, width)(inputs)
    hidden = Positions()(hidden)
    for _ in range(layers):
        normed = keras.layers.LayerNormalization()(hidden)
        attention = keras.layers.MultiHeadAttention(heads, width // heads)
        hidden += attention(normed, normed, use_causal_mask=True)

        normed = keras.layers.LayerNormalization()(hidden)
        expanded = keras.layers.Dense(4 * width, activation="gelu")(normed)
        hidden += keras.layers.Dense(width)(expanded)
    hidden = keras.layers.LayerNormalization()(hidden)
    outputs = keras.layers.Dense(vocabulary)(hidden)
    return keras.Model(inputs, outputs, name="transformer")


@keras.saving.register_keras_serializable("benchmarks")
class Positions(keras.layers.Layer):
    """Adds a learned vector to each token, by its position.

    Input and output are (examples, length, width).
    """

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(
            shape=shape[1:], initializer="random_normal", name="table"
        )

    def call(self, tokens: keras.KerasTensor) -> keras.KerasTensor:
        return tokens + keras.ops.convert_to_tensor(self.table, tokens.dtype)


def weight_count(model: keras.Model) -> int:
    """Return the number of trainable weights."""
    variables = model.trainable_variables
    return sum(variable.value.shape.num_elements() for variable in variables)


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer(
    gradient_accumulation_steps: int | None = None,
) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(
        LEARNING_RATE, gradient_accumulation_steps=gradient_accumulation_steps
    )


def optimizer_of_update() -> keras.optimizers.Optimizer:
    """Return the optimizer of our updates, which counts its steps on the host.

    Runs place the counter there, too. The host would otherwise wait for the GPU to read
    it. XLA rejects such an optimizer in Keras' `fit`.
    """
    with tf.device("CPU:0"):
        return optimizer()


def batches(workload: Workload, size: int) -> tf.data.Dataset:
    """Return shuffled batches of `size`, without end, by the `tf.data` of a run."""
    examples = workload.examples(EPOCH * workload.effective)
    data = Data(tf.data.Dataset.from_tensor_slices(examples), None)
    node = OmegaConf.create({"in_memory": True})
    return batching.effective_batches(node, data, [Slice(size, 10**9)], seed=0)


def device_name() -> str:
    """Return the name of the first GPU, or `CPU` if there is none."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU"
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    details = tf.config.experimental.get_device_details(gpus[0])
    return str(details.get("device_name", "GPU"))


def _hidden(
    network: Dense | Convolutions | Embedding, inputs: keras.KerasTensor
) -> keras.KerasTensor:
    """Return what the last dense layer gets."""
    hidden = inputs
    if isinstance(network, Dense):
        for units in network.units:
            hidden = keras.layers.Dense(units, activation="relu")(hidden)
        return hidden

    if isinstance(network, Embedding):
        hidden = keras.layers.Embedding(network.rows, network.width)(hidden)
        return keras.layers.GlobalAveragePooling1D()(hidden)

    *pooled, last = network.filters
    for filters in pooled:
        hidden = _convolution(hidden, filters)
        hidden = keras.layers.MaxPooling2D()(hidden)
    hidden = _convolution(hidden, last)
    return keras.layers.GlobalAveragePooling2D()(hidden)


def _convolution(hidden: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    layer = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")
    return layer(hidden)


def _normed_convolution(
    hidden: keras.KerasTensor,
    filters: int,
    size: int,
    strides: int = 1,
    relu: bool = False,
) -> keras.KerasTensor:
    convolution = keras.layers.Conv2D(
        filters, size, strides, padding="same", use_bias=False
    )
    hidden = keras.layers.BatchNormalization()(convolution(hidden))
    if relu:
        hidden = keras.layers.ReLU()(hidden)
    return hidden


def _basic_block(
    inputs: keras.KerasTensor, filters: int, strides: int
) -> keras.KerasTensor:
    hidden = _normed_convolution(inputs, filters, 3, strides, relu=True)
    hidden = _normed_convolution(hidden, filters, 3)
    return keras.layers.ReLU()(hidden + _shortcut(inputs, filters, strides))


def _bottleneck(
    inputs: keras.KerasTensor, filters: int, strides: int
) -> keras.KerasTensor:
    hidden = _normed_convolution(inputs, filters, 1, relu=True)
    hidden = _normed_convolution(hidden, filters, 3, strides, relu=True)
    hidden = _normed_convolution(hidden, 4 * filters, 1)
    return keras.layers.ReLU()(hidden + _shortcut(inputs, 4 * filters, strides))


def _shortcut(
    inputs: keras.KerasTensor, filters: int, strides: int
) -> keras.KerasTensor:
    if strides == 1 and inputs.shape[-1] == filters:
        return inputs
    return _normed_convolution(inputs, filters, 1, strides)
