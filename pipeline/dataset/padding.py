"""Examples of unequal length → dense batches, with sample weights that mask the padding: `dataset.pad`."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from pipeline.common.errors import ConfigError


def padder(pad: Mapping[str, Any], spec: tuple) -> Callable[..., tuple]:
    """Return a function that pads a batch `(x, y, sample_weight)`, whose last two may be missing.

    Each ragged part is padded to the longest of the batch, rounded up to a multiple of `pad.multiple`: inputs with
    `pad.value`, texts with "", labels with 0 and sample weights with 0. Ragged labels without sample weights get some,
    1 for each of their steps; a weight for each example is spread over its steps. `spec` is that of an example: an axis
    that has a size there keeps it.
    """
    multiple, value = int(pad["multiple"]), pad["value"]

    def weights(labels: Any, given: Any) -> Any:
        if not isinstance(labels, tf.RaggedTensor) or isinstance(
            given, tf.RaggedTensor
        ):
            return _dense(given, multiple)
        steps = tf.ones(
            tf.shape(labels.flat_values)[:1], keras.config.floatx()
        )  # one each, whatever its shape
        counting = _dense(labels.with_flat_values(steps), multiple)
        if given is None:
            return counting
        return counting * tf.reshape(
            tf.cast(given, counting.dtype), [-1] + [1] * (counting.shape.rank - 1)
        )

    @tf.autograph.experimental.do_not_convert
    def padded(x: Any, y: Any = None, sample_weight: Any = None) -> tuple:
        inputs = tf.nest.map_structure(
            lambda leaf, of: _dense(_without(value, leaf), multiple, value, of),
            x,
            spec[0],
        )
        if y is None:
            return (inputs,)
        labels = tf.nest.map_structure(lambda leaf: _dense(leaf, multiple), y)
        if sample_weight is None and not any(
            isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(y)
        ):
            return inputs, labels
        if isinstance(y, dict):
            given = (
                sample_weight
                if isinstance(sample_weight, dict)
                else dict.fromkeys(y, sample_weight)
            )
            return (
                inputs,
                labels,
                {name: weights(y[name], given.get(name)) for name in y},
            )
        if isinstance(y, tuple):
            several = (
                sample_weight
                if isinstance(sample_weight, tuple)
                else (sample_weight,) * len(y)
            )
            return (
                inputs,
                labels,
                tuple(weights(*each) for each in zip(y, several, strict=True)),
            )
        return inputs, labels, weights(y, sample_weight)

    return padded


def _dense(leaf: Any, multiple: int, filling: Any = 0, of_one: Any = None) -> Any:
    """Return a ragged part of a batch padded with `filling`; `of_one` is the spec of that part of an example."""
    if not isinstance(leaf, tf.RaggedTensor):
        return leaf
    longest, one = leaf.bounding_shape(), tf.cast(1, leaf.row_splits.dtype)
    sizes = (
        leaf.shape[1:]
        if of_one is None or of_one.shape.rank is None
        else of_one.shape[: leaf.shape.rank - 1]
    )
    rounded = [
        multiple * tf.maximum(one, -(-longest[axis] // multiple))
        if size is None
        else tf.cast(size, one.dtype)
        for axis, size in enumerate(sizes, start=1)
    ]
    made = leaf.to_tensor(
        _as(filling, leaf.dtype), shape=tf.stack([longest[0], *rounded])
    )
    return tf.ensure_shape(made, [None, *sizes])


def _without(value: Any, leaf: Any) -> Any:
    """Return a part of the inputs; reading it fails where a ragged one of integers has the value of the padding."""
    if not isinstance(leaf, tf.RaggedTensor) or not leaf.dtype.is_integer:
        return leaf
    message = f"dataset.pad.value must not be a value of the inputs, which a mask could not tell from it: {value}"
    check = tf.debugging.assert_none_equal(
        leaf.flat_values, _as(value, leaf.dtype), message=message
    )
    with tf.control_dependencies([] if check is None else [check]):
        return leaf.with_flat_values(tf.identity(leaf.flat_values))


def _as(value: Any, dtype: tf.DType) -> tf.Tensor:
    if dtype == tf.string:
        return tf.constant("")
    if dtype.is_integer and not (
        dtype.min <= value <= dtype.max and value == int(value)
    ):
        raise ConfigError(
            "dataset.pad.value",
            f"must be a value of the inputs' type, {dtype.name}",
            value,
        )
    return tf.cast(value, dtype)
