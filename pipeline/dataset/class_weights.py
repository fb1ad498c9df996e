"""`training.class_weight`: sample weights by the class of each label."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.config.objective_nodes import by_output
from pipeline.config.schema import TrainingConfig
from pipeline.dataset.splits import Data

KEY = "training.class_weight"
Weigh = Callable[..., tuple] | None  # adds sample weights to a batch


def weigher(training: TrainingConfig, data: Data) -> Weigh:
    """Return a function that adds the sample weights of its classes, 1 by default, to a batch `(x, y)`.

    One-hot labels get a weight per vector, others one per element, as a label map has a class per pixel.
    """
    if (given := training.class_weight) is None:
        return None
    spec = data.train.element_spec
    if (
        len(spec) != 2
        or not isinstance(spec[1], tf.TensorSpec)
        or None in (spec[1].shape or ())
    ):
        rule = "must be null where an example is not (x, y) with labels of one output, and of one length"
        raise ConfigError(KEY, rule, [type(part).__name__ for part in spec])
    one_hot, last = (
        _one_hot(spec[1].shape, training.loss, data.classes),
        spec[1].shape[-1:],
    )
    of_class = (
        tf.constant([*given], tf.int64),
        tf.constant([*given.values()], keras.config.floatx()),
    )
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(*of_class), 1.0
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
    names = [
        str(node["_target_"]).rpartition(".")[2].lower()
        for _, node in by_output(loss)
        if node is not None
    ]
    if shape[-1:] in ([], [1]) or any("sparse" in name for name in names):
        return False
    if classes is None and not any("categorical" in name for name in names):
        rule = f"must be null where labels {tuple(shape)} may be one-hot or a class per element: let the dataset give "
        rule += (
            "its `classes`, or take a loss whose name begins with Sparse or Categorical"
        )
        raise ConfigError(KEY, rule)
    return classes in (None, shape[-1])
