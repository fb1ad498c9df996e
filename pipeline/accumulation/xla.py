"""Which micro-steps XLA compiles, for which shapes, and what their layers do without."""

from __future__ import annotations

from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from .batch import Nest, Share, parts_of
from .keras_internals import layers_of, model_supports_jit, replaced


def compiled_by_xla(
    jit_compile: bool | str, model: keras.Model, batch: Nest | Share
) -> bool:
    """Return whether XLA compiles the micro-steps of `batch`; call it where they are traced.

    "auto" is what `fit` makes of it: not on a CPU or under a strategy, nor where a layer says no by `supports_jit`, or
    operations are deterministic. Nor is ragged input compiled, which `fit` tries and XLA refuses.
    """
    if jit_compile != "auto":
        return bool(jit_compile)
    on_cpu = all(
        device.device_type == "CPU" for device in tf.config.get_visible_devices()
    )
    ragged = any(
        isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(parts_of(batch))
    )
    return not (
        on_cpu or ragged or tf.distribute.has_strategy()
    ) and model_supports_jit(model)


def shapes_compiled(batch: Nest | Share) -> tf.Tensor:
    """Return a number for the shapes that XLA compiles micro-batches of `batch` for, scalar of int64."""
    leaves = [
        leaf
        for leaf in tf.nest.flatten(parts_of(batch), expand_composites=True)
        if leaf is not None
    ]
    with tf.device("CPU:0"):
        sizes = tf.concat([tf.shape(leaf)[1:] for leaf in leaves], 0)
        text = tf.strings.reduce_join(tf.strings.as_string(sizes), separator=" ")
        return tf.strings.to_hash_bucket_fast(text, 2**52)  # exact in float64


def without_cudnn(
    model: keras.Model | None, jit_compile: bool
) -> AbstractContextManager[None]:
    """Have the model's LSTM and GRU do without cuDNN in the `with` block if XLA compiles, which cannot call it."""
    layers = layers_of(model) if jit_compile and model is not None else []
    recurrent = (
        layer
        for layer in layers
        if isinstance(layer, keras.layers.LSTM | keras.layers.GRU)
    )
    return replaced((layer, "use_cudnn", False) for layer in recurrent)
