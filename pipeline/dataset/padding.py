"""Pads examples of unequal length to dense batches, for `dataset.pad`.

Padded labels are masked by sample weights of 0.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.dataset import elements


def padder(pad: Mapping[str, Any], spec: tuple) -> Callable[..., tuple]:
    """Return a function that pads a batch `(x, y, sample_weight)`.

    `y` and `sample_weight` may be missing. Each ragged part is padded to its maximum
    length in the batch, rounded up to a multiple of `pad.multiple`. Inputs are padded
    with `pad.value`, strings with "", labels and sample weights with 0.

    With ragged labels, each step gets a sample weight: its own if the sample weights
    are ragged, else that of its example, or 1 if there are none. Padding gets 0.

    Args:
        pad: the node of the config, with `multiple` and `value`.
        spec: the spec of an example. Axes of the inputs with a fixed size keep it.
    """
    multiple = int(pad["multiple"])
    value = pad["value"]

    def padded_input(leaf: Any, leaf_spec: Any) -> Any:
        return _dense(_with_check(leaf, value), multiple, value, leaf_spec)

    def padded_labels(leaf: Any) -> Any:
        return _dense(leaf, multiple)

    @tf.autograph.experimental.do_not_convert
    def padded(x: Any, y: Any = None, sample_weight: Any = None) -> tuple:
        inputs = tf.nest.map_structure(padded_input, x, spec[0])
        if y is None:
            return (inputs,)
        labels = tf.nest.map_structure(padded_labels, y)
        if sample_weight is None and not _has_ragged_part(y):
            return inputs, labels
        return inputs, labels, _padded_weights(y, sample_weight, multiple)

    return padded


def value_checker(pad: Mapping[str, Any]) -> Callable[..., tuple]:
    """Return a function that leaves a batch ragged, to be padded after it is cut.

    Like the function of `padder`, it rejects inputs that contain `pad.value`.
    """
    value = pad["value"]

    @tf.autograph.experimental.do_not_convert
    def checked(x: Any, *others: Any) -> tuple:
        return tf.nest.map_structure(lambda leaf: _with_check(leaf, value), x), *others

    return checked


def weights_checker(spec: tuple) -> Callable[..., tuple] | None:
    """Return a function that checks the sample weights of an example.

    It returns the example. Labels must have one weight, or as many as they have
    positions: otherwise, evaluating the weights raises an error. The result is None if
    there is nothing to check, as for sample weights and labels of fixed sizes.

    Args:
        spec: the spec of an example.
    """
    names = elements.part_names(spec)
    specs = dict(zip(names, tf.nest.flatten(spec), strict=True))
    pairs = []
    for labels, weights in elements.weighted_labels(names):
        if _may_differ(specs[labels], specs[weights]):
            pairs.append((labels, weights))
    if not pairs:
        return None

    @tf.autograph.experimental.do_not_convert
    def checked(*example: Any) -> tuple:
        parts = dict(zip(names, tf.nest.flatten(example), strict=True))
        for labels, weights in pairs:
            rule = f"{weights} must be one value, or one for each position of {labels}"
            parts[weights] = _with_length_of(parts[labels], parts[weights], rule)
        packed: tuple = tf.nest.pack_sequence_as(example, list(parts.values()))
        return packed

    return checked


def _may_differ(labels: Any, weights: Any) -> bool:
    """Return whether an example may have a wrong number of sample weights.

    The arguments are the specs of the labels and of the sample weights.
    """
    kinds = (tf.TensorSpec, tf.RaggedTensorSpec)
    if not isinstance(labels, kinds) or not isinstance(weights, kinds):
        return False
    if not weights.shape.rank or not labels.shape.rank:
        return False
    sizes = (labels.shape[0], weights.shape[0])
    return None in sizes and weights.shape[0] != 1


def _with_length_of(labels: Any, weights: Any, rule: str) -> Any:
    """Return the weights. Evaluating them raises an error if the lengths differ."""
    length = _positions(weights)
    positions = _positions(labels)
    received = f"{rule}. Received: {{}} for {{}} positions"
    check = tf.debugging.Assert(
        length == positions, [tf.strings.format(received, (length, positions))]
    )
    with tf.control_dependencies([check]):
        if isinstance(weights, tf.RaggedTensor):
            return weights.with_flat_values(tf.identity(weights.flat_values))
        return tf.identity(weights)


def _positions(leaf: Any) -> tf.Tensor:
    """Return the number of positions of a part of an example."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    return tf.shape(leaf, tf.int64)[0]


def _has_ragged_part(nest: Any) -> bool:
    return any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(nest))


def _padded_weights(labels: Any, sample_weight: Any, multiple: int) -> Any:
    """Return padded sample weights in the structure of the labels.

    If the labels are a dict or a tuple and `sample_weight` is not, each output gets the
    same weights.
    """
    if isinstance(labels, dict):
        weights_by_output = sample_weight
        if not isinstance(sample_weight, dict):
            weights_by_output = dict.fromkeys(labels, sample_weight)
        return {
            name: _weights_of_output(leaf, weights_by_output.get(name), multiple)
            for name, leaf in labels.items()
        }
    if isinstance(labels, tuple):
        weights_of_outputs = sample_weight
        if not isinstance(sample_weight, tuple):
            weights_of_outputs = (sample_weight,) * len(labels)
        return tuple(
            _weights_of_output(leaf, weights, multiple)
            for leaf, weights in zip(labels, weights_of_outputs, strict=True)
        )
    return _weights_of_output(labels, sample_weight, multiple)


def _weights_of_output(labels: Any, weights: Any, multiple: int) -> Any:
    if not isinstance(labels, tf.RaggedTensor) or isinstance(weights, tf.RaggedTensor):
        return _dense(weights, multiple)
    if weights is not None and weights.shape.rank > 1 and weights.shape[1] != 1:
        # One weight for each step: all labels of the batch have the same length.
        spec = tf.TensorSpec([None, *weights.shape[2:]])
        return _dense(tf.RaggedTensor.from_tensor(weights), multiple, spec=spec)

    # Give each step one weight: ignore further axes of its labels.
    steps = tf.shape(labels.flat_values)[:1]
    ones = tf.ones(steps, keras.config.floatx())
    mask = _dense(labels.with_flat_values(ones), multiple)
    if weights is None:
        return mask
    shape_to_broadcast = [-1] + [1] * (mask.shape.rank - 1)
    return mask * tf.reshape(tf.cast(weights, mask.dtype), shape_to_broadcast)


def _dense(leaf: Any, multiple: int, filling: Any = 0, spec: Any = None) -> Any:
    """Return a part of a batch as a dense tensor; pad ragged parts with `filling`.

    Axes with a fixed size in `spec`, the spec of the part in an example, keep it.
    Without `spec`, the fixed sizes are those in the shape of `leaf`.
    """
    if not isinstance(leaf, tf.RaggedTensor):
        return leaf
    if spec is None or spec.shape.rank is None:
        sizes = leaf.shape[1:]
    else:
        sizes = spec.shape[: leaf.shape.rank - 1]

    longest = leaf.bounding_shape()
    one = tf.cast(1, leaf.row_splits.dtype)
    shape = [longest[0]]
    for axis, size in enumerate(sizes, start=1):
        if size is None:
            multiples = tf.maximum(one, -(-longest[axis] // multiple))
            shape.append(multiple * multiples)
        else:
            shape.append(tf.cast(size, one.dtype))

    default = _in_dtype(filling, leaf.dtype)
    return tf.ensure_shape(
        leaf.to_tensor(default, shape=tf.stack(shape)), [None, *sizes]
    )


def _with_check(leaf: Any, value: Any) -> Any:
    """Return a part of the inputs with a check that it does not contain `value`.

    `value` is the padding value. Only ragged integers are checked. Evaluating the
    returned tensor raises an error if the check fails.
    """
    if not isinstance(leaf, tf.RaggedTensor) or not leaf.dtype.is_integer:
        return leaf
    message = (
        "dataset.pad.value must not occur in the inputs, because a mask could not "
        f"tell it from padding: {value}"
    )
    check = tf.debugging.assert_none_equal(
        leaf.flat_values, _in_dtype(value, leaf.dtype), message=message
    )
    checks = [] if check is None else [check]
    with tf.control_dependencies(checks):
        return leaf.with_flat_values(tf.identity(leaf.flat_values))


def _in_dtype(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Return the padding value in the dtype of a part; for strings, return "".

    Raises:
        ConfigError: the part has integers, and the value is not an integer of their
            type.
    """
    if dtype == tf.string:
        return tf.constant("")
    if dtype.is_integer:
        is_in_range = dtype.min <= value <= dtype.max
        if not is_in_range or value != int(value):
            rule = f"must be a value of the inputs' type, {dtype.name}"
            raise ConfigError("dataset.pad.value", rule, value)
    return tf.cast(value, dtype)
