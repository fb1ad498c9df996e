"""Which micro-steps XLA compiles, for which shapes, and without which kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from .batch import Nest, Share, parts_of
from .keras_internals import layers_of, model_supports_jit, replaced


def compiled_by_xla(
    jit_compile: bool | str, model: keras.Model, batch: Nest | Share
) -> bool:
    """Return whether XLA compiles the micro-steps of `batch`.

    Call it where they are traced. With "auto" XLA compiles what `fit` would have it
    compile: nothing on a CPU or under a strategy, nor where a layer rejects it by
    `supports_jit`, or where operations are deterministic. Ragged input is not compiled
    either, which `fit` tries and XLA rejects.
    """
    if jit_compile != "auto":
        return bool(jit_compile)
    if tf.distribute.has_strategy():
        return False
    devices = tf.config.get_visible_devices()
    if all(device.device_type == "CPU" for device in devices):
        return False
    leaves = tf.nest.flatten(parts_of(batch))
    if any(isinstance(leaf, tf.RaggedTensor) for leaf in leaves):
        return False
    return model_supports_jit(model)


def shapes_compiled(batch: Nest | Share) -> tf.Tensor:
    """Return a number for the shapes that XLA compiles micro-batches of `batch` for.

    The number is a scalar of int64.
    """
    leaves = tf.nest.flatten(parts_of(batch), expand_composites=True)
    with tf.device("CPU:0"):
        shapes = [tf.shape(leaf)[1:] for leaf in leaves if leaf is not None]
        sizes = tf.concat(shapes, 0)
        text = tf.strings.reduce_join(tf.strings.as_string(sizes), separator=" ")
        return tf.strings.to_hash_bucket_fast(text, 2**52)  # exact in float64


def without_cudnn(
    model: keras.Model | None, jit_compile: bool
) -> AbstractContextManager[None]:
    """Have the model's LSTM and GRU do without cuDNN, which XLA cannot call.

    This holds inside the `with` block, if XLA compiles.
    """
    if model is None or not jit_compile:
        return replaced([])
    changes = []
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.LSTM | keras.layers.GRU):
            changes.append((layer, "use_cudnn", False))
    return replaced(changes)
