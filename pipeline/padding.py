"""Examples of unequal length → dense batches, with weights that leave the padding out: `dataset.pad`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf


def padder(pad: Mapping[str, Any]) -> Callable[..., tuple]:
    """Return a function that pads a batch `(x, y, sample_weight)`, whose last two may be missing.

    Each ragged part is padded to the longest of the batch, rounded up to a multiple of `pad.multiple`: inputs with
    `pad.value`, labels with 0 and sample weights with 0. Ragged labels without sample weights get some, 1 for each of
    their elements; a weight for each example is spread over its elements.
    """
    multiple, value = int(pad["multiple"]), pad["value"]

    def dense(leaf: Any, filling: Any) -> Any:
        if not isinstance(leaf, tf.RaggedTensor):
            return leaf
        longest = leaf.bounding_shape()
        length = multiple * tf.maximum(tf.cast(1, longest.dtype), -(-longest[1] // multiple))
        shape = tf.concat([longest[:1], [length], longest[2:]], 0)
        made = leaf.to_tensor(tf.cast(filling, leaf.dtype) if leaf.dtype != tf.string else str(filling), shape=shape)
        return tf.ensure_shape(made, [None, None, *leaf.shape[2:]])

    def input_(leaf: Any) -> Any:
        if isinstance(leaf, tf.RaggedTensor) and leaf.dtype.is_integer:
            message = (
                f"dataset.pad.value must not be a value of the inputs, which a mask could not tell from it: {value}"
            )
            check = tf.debugging.assert_none_equal(leaf.flat_values, tf.cast(value, leaf.dtype), message=message)
            with tf.control_dependencies([] if check is None else [check]):
                return dense(leaf, value)
        return dense(leaf, value)

    def weights(labels: Any, given: Any) -> Any:
        if not isinstance(labels, tf.RaggedTensor):
            return dense(given, 0)
        if isinstance(given, tf.RaggedTensor):
            return dense(given, 0)
        counting = dense(tf.ones_like(labels, keras.config.floatx()), 0)
        if given is None:
            return counting
        return counting * tf.reshape(tf.cast(given, counting.dtype), [-1] + [1] * (counting.shape.rank - 1))

    @tf.autograph.experimental.do_not_convert
    def padded(x: Any, y: Any = None, sample_weight: Any = None) -> tuple:
        inputs = tf.nest.map_structure(input_, x)
        if y is None:
            return (inputs,)
        labels = tf.nest.map_structure(lambda leaf: dense(leaf, 0), y)
        ragged = any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(y))
        if sample_weight is None and not ragged:
            return inputs, labels
        if isinstance(y, dict):
            given = sample_weight if isinstance(sample_weight, dict) else dict.fromkeys(y, sample_weight)
            return inputs, labels, {name: weights(y[name], given.get(name)) for name in y}
        if isinstance(y, tuple):
            several = sample_weight if isinstance(sample_weight, tuple) else (sample_weight,) * len(y)
            return inputs, labels, tuple(weights(*each) for each in zip(y, several, strict=True))
        return inputs, labels, weights(y, sample_weight)

    return padded
