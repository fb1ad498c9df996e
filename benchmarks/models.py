"""The workloads in Keras: model, loss, Adam, and batches out of memory."""

from __future__ import annotations

import keras
import tensorflow as tf
from omegaconf import OmegaConf

from benchmarks import networks
from benchmarks.workloads import (
    CLASSES,
    EPOCH,
    INTEGERS,
    RATE,
    ROWS,
    SHAPES,
    TRANSFORMER,
    examples,
    sizes,
)
from pipeline.config.stages import Slice
from pipeline.dataset import Data
from pipeline.dataset import batches as batching


def build(name: str) -> keras.Model:
    """Build the model of a workload."""
    if name == "resnet18":
        return networks.resnet(18, SHAPES[name][0], CLASSES)
    if name == "transformer10m":
        return networks.transformer(**TRANSFORMER)
    inputs = keras.Input(SHAPES[name], dtype="int32" if name in INTEGERS else "float32")
    hidden = inputs
    if name == "embedding":
        hidden = keras.layers.GlobalAveragePooling1D()(
            keras.layers.Embedding(ROWS, 64)(hidden)
        )
    elif name == "cnn":
        for filters in (32, 64):
            hidden = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(
                hidden
            )
            hidden = keras.layers.MaxPooling2D()(hidden)
        hidden = keras.layers.Conv2D(64, 3, padding="same", activation="relu")(hidden)
        hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    else:
        for units in {"mlp": (128, 128), "wide": (2048, 2048, 2048)}[name]:
            hidden = keras.layers.Dense(units, activation="relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(hidden), name=name)


def weights(model: keras.Model) -> int:
    """Count the trainable weights."""
    return sum(
        variable.value.shape.num_elements() for variable in model.trainable_variables
    )


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer(
    gradient_accumulation_steps: int | None = None,
) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(
        RATE, gradient_accumulation_steps=gradient_accumulation_steps
    )


def batches(name: str, size: int) -> tf.data.Dataset:
    """Shuffled batches of `size` out of memory, epoch after epoch, by the pipeline's own `tf.data`, without end."""
    data = Data(
        tf.data.Dataset.from_tensor_slices(
            examples(name, EPOCH * sizes(name).effective)
        ),
        None,
    )
    node = OmegaConf.create({"in_memory": True})
    return batching.effective_batches(node, data, [Slice(size, 10**9)], seed=0)


def device() -> str:
    """What TensorFlow computes on: the first GPU, where there is one."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU"
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    return str(
        tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
    )
