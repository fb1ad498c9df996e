"""Decides whether XLA compiles the micro-steps, and adapts the model to XLA."""

from __future__ import annotations

from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from .batch import Nest, Share, parts_of
from .choices import check_choice
from .keras_internals import layers_of, model_supports_jit, replaced
from .token_cut import TokenLimit


def check_jit_compile(jit_compile: bool | str) -> None:
    """Reject a value that `compiled_by_xla` does not take."""
    check_choice("jit_compile", jit_compile, (True, False, "auto"))


def compiled_by_xla(
    jit_compile: bool | str,
    model: keras.Model,
    batch: Nest | Share,
    limit: int | TokenLimit = 1,
) -> bool:
    """Return whether XLA compiles the micro-steps of `batch`.

    Call this where the micro-steps are traced. With "auto", the decision is that of
    `fit`: nothing is compiled on a CPU, under a strategy, with deterministic
    operations, or if `supports_jit` of a layer is false. For ragged input nothing is
    compiled either, whereas `fit` would try and XLA would raise an error. In a cut by
    tokens, which pads such input, micro-steps are compiled only if the limit has
    `xla_lengths`.
    """
    by_tokens = isinstance(limit, TokenLimit)
    if isinstance(limit, TokenLimit) and not limit.xla_lengths:
        return False
    if isinstance(jit_compile, bool):
        return jit_compile
    if tf.distribute.has_strategy():
        return False
    devices = tf.config.get_visible_devices()
    if all(device.device_type == "CPU" for device in devices):
        return False
    leaves = tf.nest.flatten(parts_of(batch))
    is_ragged = any(isinstance(leaf, tf.RaggedTensor) for leaf in leaves)
    if is_ragged and not by_tokens:
        return False
    return model_supports_jit(model)


def shapes_compiled(batch: Nest | Share, whole_batch: bool = False) -> tf.Tensor:
    """Return a hash of the shapes for which XLA compiles micro-batches of `batch`.

    The hash is a scalar of int64, below 2⁵². With `whole_batch`, XLA compiles for the
    number of examples in the batch, too.
    """
    leaves = tf.nest.flatten(parts_of(batch), expand_composites=True)
    first_axis = 0 if whole_batch else 1
    with tf.device("CPU:0"):
        shapes = [tf.shape(leaf)[first_axis:] for leaf in leaves if leaf is not None]
        sizes = tf.concat(shapes, 0)
        text = tf.strings.reduce_join(tf.strings.as_string(sizes), separator=" ")
        return tf.strings.to_hash_bucket_fast(text, 2**52)  # exact in float64


def without_cudnn(
    model: keras.Model | None, jit_compile: bool
) -> AbstractContextManager[None]:
    """Prevent the model's LSTM and GRU layers from using cuDNN, which XLA cannot call.

    This applies inside the `with` block, if `jit_compile` is true.
    """
    if model is None or not jit_compile:
        return replaced([])
    changes = []
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.LSTM | keras.layers.GRU):
            changes.append((layer, "use_cudnn", False))
    return replaced(changes)
