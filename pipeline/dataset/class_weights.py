"""The weights of classes, as sample weights of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.config.objective_nodes import by_output
from pipeline.dataset.splits import Data

KEY = "training.class_weight"


def weigher(class_weight: Mapping[int, float] | None, loss: Any, data: Data) -> Callable[..., tuple] | None:
    """Return a function that adds the sample weights of its classes, 1 by default, to a batch `(x, y)`.

    One-hot labels get a weight per vector, others one per element, as a label map has a class per pixel.

    Args:
        class_weight: class → weight; None gives None.
        loss: the node of the loss, or the nodes of several outputs.
        data: whose labels are weighed.
    """
    if class_weight is None:
        return None
    spec = data.train.element_spec
    if len(spec) != 2 or not isinstance(spec[1], tf.TensorSpec) or None in (spec[1].shape or ()):
        rule = "must be null where an example is not (x, y) with labels of one output, and of one length"
        raise ConfigError(KEY, rule, [type(part).__name__ for part in spec])
    one_hot, last = _one_hot(spec[1].shape, loss, data.classes), spec[1].shape[-1:]
    labels, weights = list(class_weight), [float(weight) for weight in class_weight.values()]
    floatx = keras.config.floatx()
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant(labels, tf.int64), tf.constant(weights, floatx)), 1.0
    )

    @tf.autograph.experimental.do_not_convert
    def weigh(x: Any, y: tf.Tensor) -> tuple:
        if one_hot:
            return x, y, table.lookup(tf.argmax(y, axis=-1))
        found = tf.cast(tf.round(y) if y.dtype.is_floating else y, tf.int64)
        return x, y, table.lookup(tf.squeeze(found, -1) if last == [1] else found)

    return weigh


def _one_hot(shape: tf.TensorShape, loss: Any, classes: int | None) -> bool:
    """Return whether the last axis of labels holds classes; refuse where that cannot be decided."""
    names = [str(node["_target_"]).rpartition(".")[2].lower() for _, node in by_output(loss) if node is not None]
    if shape[-1:] in ([], [1]) or any("sparse" in name for name in names):
        return False
    if classes is None and not any("categorical" in name for name in names):
        rule = f"must be null where labels {tuple(shape)} may be one-hot or a class per element: let the dataset give "
        raise ConfigError(KEY, f"{rule}its `classes`, or take a loss whose name begins with Sparse or Categorical")
    return classes in (None, shape[-1])
