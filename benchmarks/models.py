"""The models and their data, as all parts use them: Adam, micro-batch 32, factor 8."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline import batching
from pipeline.dataset import Data

MICRO, FACTOR = 32, 8
EFFECTIVE = MICRO * FACTOR
CLASSES = 10
ROWS, BYTES = 1_000_000, 256  # of the two embeddings
SHAPES = {"mlp": (64,), "wide": (256,), "cnn": (32, 32, 3), "embedding": (16,), "transformer": (64,)}
INTEGERS = {"embedding": ROWS, "transformer": BYTES}  # what the inputs of these are less than
NAMES = tuple(SHAPES)


def build(name: str) -> keras.Model:
    """Build one of `NAMES`.

    `mlp` is 64-128-128-10, `wide` 256-2048-2048-2048-10 (9 M weights), `cnn` three convolutions, `embedding` a table of
    1,000,000 × 64 of which an example reads 16 rows, `transformer` two causal blocks of width 64 over 64 bytes.
    """
    inputs = keras.Input(SHAPES[name], dtype="int32" if name in INTEGERS else "float32")
    hidden = inputs
    if name == "embedding":
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(ROWS, 64)(hidden))
        return keras.Model(inputs, keras.layers.Dense(CLASSES)(hidden), name=name)
    if name == "transformer":
        hidden = keras.layers.Embedding(BYTES, 64)(hidden)
        for _ in range(2):
            normed = keras.layers.LayerNormalization()(hidden)
            hidden += keras.layers.MultiHeadAttention(4, 16)(normed, normed, use_causal_mask=True)
            normed = keras.layers.LayerNormalization()(hidden)
            hidden += keras.layers.Dense(64)(keras.layers.Dense(256, activation="gelu")(normed))
        return keras.Model(inputs, keras.layers.Dense(BYTES)(hidden), name=name)
    if name == "cnn":
        for filters in (32, 64):
            hidden = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(hidden)
            hidden = keras.layers.MaxPooling2D()(hidden)
        hidden = keras.layers.Conv2D(64, 3, padding="same", activation="relu")(hidden)
        hidden = keras.layers.GlobalAveragePooling2D()(hidden)
    else:
        for units in {"mlp": (128, 128), "wide": (2048, 2048, 2048)}[name]:
            hidden = keras.layers.Dense(units, activation="relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(hidden), name=name)


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer(gradient_accumulation_steps: int | None = None) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-4, gradient_accumulation_steps=gradient_accumulation_steps)


def examples(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with labels: what it is does not change how long it takes."""
    generator = np.random.default_rng(0)
    if name in INTEGERS:
        x = generator.integers(0, INTEGERS[name], (count, *SHAPES[name]), np.int32)
    else:
        x = generator.random((count, *SHAPES[name]), np.float32)
    most, shape = (BYTES, x.shape) if name == "transformer" else (CLASSES, (count,))
    return x, generator.integers(0, most, shape)


def batches(name: str, size: int) -> tf.data.Dataset:
    """Shuffled batches of `size` out of memory, epoch after epoch, by the pipeline's own `tf.data`, without end."""
    data = Data(tf.data.Dataset.from_tensor_slices(examples(name, 32 * EFFECTIVE)), None)
    node = OmegaConf.create({"in_memory": True})
    return batching.effective_batches(node, data, seed=0, effective_batch_size=size, epochs=10**9)


def device() -> str:
    """What TensorFlow computes on: the first GPU, where there is one."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU"
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU"))
