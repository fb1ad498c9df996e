"""Computes sample weights from the class of each label, for `training.class_weight`."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.config.objective_nodes import by_output
from pipeline.config.schema import TrainingConfig
from pipeline.dataset.splits import Data

KEY = "training.class_weight"
Weigh = Callable[..., tuple]  # adds sample weights to a batch


def weigher(training: TrainingConfig, data: Data) -> Weigh | None:
    """Return a function that adds sample weights to a batch `(x, y)`.

    Classes that are not in `training.class_weight` have a weight of 1. One-hot labels
    get one weight per vector; other labels get one weight per element, such as per
    pixel of a label map. Without `training.class_weight`, return None.

    Raises:
        ConfigError: an example is not `(x, y)` with a single `y` of fixed shape, or the
            axis of the classes is ambiguous.
    """
    weights_by_class = training.class_weight
    if weights_by_class is None:
        return None
    labels = _labels_spec(data)
    one_hot = _one_hot(labels.shape, training.loss, data.classes)
    has_unit_axis = labels.shape[-1:] == [1]

    classes = tf.constant([*weights_by_class], tf.int64)
    weights = tf.constant([*weights_by_class.values()], keras.config.floatx())
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(classes, weights), default_value=1.0
    )

    @tf.autograph.experimental.do_not_convert
    def weigh(x: Any, y: tf.Tensor) -> tuple:
        if one_hot:
            return x, y, table.lookup(tf.argmax(y, axis=-1))
        class_of_label = y
        if y.dtype.is_floating:
            class_of_label = tf.round(y)
        class_of_label = tf.cast(class_of_label, tf.int64)
        if has_unit_axis:
            class_of_label = tf.squeeze(class_of_label, -1)
        return x, y, table.lookup(class_of_label)

    return weigh


def _labels_spec(data: Data) -> tf.TensorSpec:
    """Return the spec of an example's labels.

    Raises:
        ConfigError: labels of this form cannot be weighted by class.
    """
    parts = data.train.element_spec
    if len(parts) == 2 and isinstance(parts[1], tf.TensorSpec):
        if None not in (parts[1].shape or ()):
            return parts[1]
    rule = (
        "needs examples (x, y), where y has the labels of one output, all of the same "
        "length; for other examples, use sample weights"
    )
    raise ConfigError(KEY, rule, [type(part).__name__ for part in parts])


def _one_hot(shape: tf.TensorShape, loss: Any, classes: int | None) -> bool:
    """Return whether labels of this shape are one-hot on their last axis.

    Raises:
        ConfigError: neither the loss nor the dataset shows whether the labels are
            one-hot.
    """
    names = [
        str(node["_target_"]).rpartition(".")[2].lower()
        for _, node in by_output(loss)
        if node is not None
    ]
    if shape[-1:] in ([], [1]) or any("sparse" in name for name in names):
        return False
    if classes is None and not any("categorical" in name for name in names):
        rule = (
            f"cannot be applied to labels of shape {tuple(shape)}, which may be "
            "one-hot or a class per element: let the dataset give its `classes`, or "
            "use a loss whose name begins with Sparse or Categorical"
        )
        raise ConfigError(KEY, rule)
    return classes in (None, shape[-1])
