"""Class weights: the sample weight of an example by its label, `training.class_weight`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from pipeline.common.errors import ConfigError


def weigher(class_weight: Mapping[int, float], spec: tuple) -> Callable[..., tuple]:
    """Return a function that adds the sample weights of its classes to a batch `(x, y)`.

    Args:
        class_weight: weights by class; 1 for a class that has none.
        spec: of an example.

    Raises:
        ConfigError: an example has weights, or labels of several outputs.
    """
    if len(spec) != 2 or not isinstance(spec[1], tf.TensorSpec) or None in (spec[1].shape or ()):
        rule = "must be null where an example is not (x, y) with labels of one output, and of one length"
        raise ConfigError("training.class_weight", rule, [type(part).__name__ for part in spec])
    one_hot = spec[1].shape.rank >= 1 and spec[1].shape[-1] != 1
    labels, weights = list(class_weight), [float(weight) for weight in class_weight.values()]
    floatx = keras.config.floatx()
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant(labels, tf.int64), tf.constant(weights, floatx)), 1.0
    )

    @tf.autograph.experimental.do_not_convert
    def weigh(x: Any, y: tf.Tensor) -> tuple:
        if one_hot:
            found = tf.argmax(y, axis=-1)
        else:
            found = tf.cast(tf.round(y) if y.dtype.is_floating else y, tf.int64)
            found = found if found.shape.rank == 1 else tf.squeeze(found, -1)
        return x, y, table.lookup(found)

    return weigh
