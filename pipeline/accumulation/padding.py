"""Pads ragged batches after they are cut, and keeps padding out of the update.

An update must not depend on the padded length of a micro-batch. So padded labels get
sample weights of 0, and losses and metrics that would still count padded positions are
rejected.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from .batch import Batches, Nest, Share, parts_of

# The remedy in messages about losses and metrics.
_REMEDY = (
    "ragged labels with reduction='mean_with_sample_weight' or 'sum', or a mask of "
    "the output"
)


def padded_length(lengths: tf.Tensor, multiple: int) -> tf.Tensor:
    """Return lengths rounded up to a multiple, which is at least one `multiple`."""
    one = tf.ones((), lengths.dtype)
    return multiple * tf.maximum(one, -(-lengths // multiple))


def padded(leaf: Any, multiple: int, minimum_length: tf.Tensor | int = 0) -> Any:
    """Return a part of a batch, padded with zeros to its longest example.

    The length is rounded up to a multiple, and is at least `minimum_length`. A dense
    part is returned as it is.
    """
    if not isinstance(leaf, tf.RaggedTensor):
        return leaf
    longest = leaf.bounding_shape(axis=1)
    length = padded_length(longest, multiple)
    length = tf.maximum(length, tf.cast(minimum_length, length.dtype))
    sizes = leaf.shape[1:].as_list()
    shape = [leaf.nrows(), length, *sizes[1:]]
    shape = tf.stack([tf.cast(size, length.dtype) for size in shape])
    return tf.ensure_shape(leaf.to_tensor(shape=shape), [None, *sizes])


def padded_inputs(batch: Nest | Share, multiple: int = 1) -> Nest:
    """Return the inputs of a batch, padded to the longest example in the batch."""
    return padded_parts(batch, multiple)[0]


def padded_parts(batch: Nest | Share, multiple: int = 1) -> tuple[Nest, Nest, Nest]:
    """Return `(x, y, sample_weight)`, padded to the longest example in the batch."""

    def padded_part(leaf: Any) -> Any:
        return padded(leaf, multiple)

    return tf.nest.map_structure(padded_part, parts_of(batch))


def sequences_in(x: Nest) -> list[tf.RaggedTensor]:
    """Return the ragged inputs, whose lengths are those of the examples.

    Raises:
        ValueError: no input is ragged, or more than one axis of an input is.
    """
    sequences = []
    for leaf in tf.nest.flatten(x):
        if isinstance(leaf, tf.RaggedTensor):
            sequences.append(leaf)
    if not sequences:
        rule = "with micro_batch_tokens, at least one input must be a ragged tensor"
        reason = "because the lengths of dense inputs are not known"
        way = "tf.RaggedTensor.from_tensor(x, lengths) cuts off their padding"
        raise ValueError(f"{rule}, {reason}. {way}")
    return sequences


def check_ragged(batch: Nest | Share | Batches) -> None:
    """Reject a batch that cannot be cut by tokens.

    Raises:
        ValueError: no input is ragged, a part has several ragged axes, or the batch
            consists of `Batches`.
    """
    if isinstance(batch, Batches):
        rule = "micro_batch_tokens must be None for Batches"
        raise ValueError(f"{rule}, because no micro-batch spans two of them")
    parts = parts_of(batch)
    sequences_in(parts[0])
    for leaf in tf.nest.flatten(parts):
        if isinstance(leaf, tf.RaggedTensor) and not _has_one_ragged_axis(leaf):
            rule = "with micro_batch_tokens, tensors must be ragged along axis 1 alone"
            raise ValueError(f"{rule}. Received: shape {leaf.shape}")


def _has_one_ragged_axis(leaf: tf.RaggedTensor) -> bool:
    return leaf.ragged_rank == 1 and None not in leaf.shape[2:].as_list()


def with_position_weights(batch: Nest | Share) -> Nest | Share:
    """Return the batch with a sample weight for each position of ragged labels.

    The weight of a position is that of its example, or 1 without sample weights. Ragged
    sample weights remain as they are; evaluating them raises an error unless there is
    one for each position of the labels. When the labels are padded, the padding gets 0.

    Raises:
        ValueError: there are dense sample weights for single positions.
    """
    x, y, sample_weight = parts_of(batch)
    if not any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(y)):
        return batch
    if sample_weight is None or not keras.tree.is_nested(sample_weight):

        def from_one(labels: Any) -> Any:
            return _position_weights(labels, sample_weight)

        sample_weight = tf.nest.map_structure(from_one, y)
    elif _same_structure(y, sample_weight):
        sample_weight = keras.tree.map_structure(_position_weights, y, sample_weight)
    weighted = (x, y, sample_weight)
    if isinstance(batch, Share):
        return batch._replace(batch=weighted)
    return weighted


def _same_structure(y: Nest, sample_weight: Nest) -> bool:
    """Return whether there are sample weights, or None, for each part of the labels."""
    try:
        tf.nest.assert_same_structure(y, sample_weight, expand_composites=False)
    except (TypeError, ValueError):
        return False
    return True


def _position_weights(labels: Any, weights: Any) -> Any:
    """Return the weights of ragged labels, one per position."""
    if not isinstance(labels, tf.RaggedTensor):
        return weights
    if isinstance(weights, tf.RaggedTensor):
        return _of_lengths_of(labels, weights)
    positions = tf.shape(labels.flat_values)[:1]
    if weights is None:
        flat_weights = tf.ones(positions, keras.config.floatx())
    else:
        if weights.shape.rank != 1:
            rule = "sample weights of ragged labels must be ragged or one per example"
            raise ValueError(f"{rule}. Received: shape {weights.shape}")
        flat_weights = tf.gather(weights, labels.value_rowids())
    return tf.RaggedTensor.from_row_splits(
        flat_weights, labels.row_splits, validate=False
    )


def _of_lengths_of(
    labels: tf.RaggedTensor, weights: tf.RaggedTensor
) -> tf.RaggedTensor:
    """Return the weights. Evaluating them raises an error if lengths differ."""
    with tf.device("CPU:0"):
        lengths = tf.cast(labels.row_lengths(), tf.int64)
        lengths_of_weights = tf.cast(weights.row_lengths(), tf.int64)
        rule = "ragged sample weights must be one per position of their labels"
        check = tf.debugging.Assert(
            tf.reduce_all(lengths_of_weights == lengths),
            [rule, lengths_of_weights, lengths],
        )
    with tf.control_dependencies([check]):
        return weights.with_flat_values(tf.identity(weights.flat_values))


def check_loss(
    loss: keras.losses.Loss, parts: tuple[Nest, Nest, Any], values: Any, masked: bool
) -> None:
    """Reject a loss whose mean or sum over a micro-batch counts padded positions.

    Args:
        loss: the loss of an output.
        parts: the labels, the output, and its sample weights or None.
        values: the values that the loss has computed for `parts`.
        masked: whether a mask leaves values out.

    Raises:
        ValueError: the loss counts padded positions.
    """
    y, output, sample_weight = parts
    if not has_padded_axis((y, output)):
        return
    if not has_padded_axis(values):
        rule = "must have a value for each position, not a mean over padded positions"
        raise ValueError(
            f"with micro_batch_tokens, the loss {loss.name} {rule}: labels and outputs "
            "of shape (examples, positions) need a last axis of size 1"
        )
    is_weighted = has_padded_axis(sample_weight)
    if masked or (is_weighted and loss.reduction in ("mean_with_sample_weight", "sum")):
        return
    raise ValueError(
        f"with micro_batch_tokens, the loss {loss.name} must not count padded "
        f"positions: use {_REMEDY}. Received: reduction={loss.reduction!r}"
    )


def check_metric(
    metric: keras.metrics.Metric, y: Nest, output: Nest, weight: Any
) -> None:
    """Reject a metric that counts padded positions.

    Args:
        metric: the metric of an output.
        y: the labels.
        output: the output.
        weight: sample weights, the mask of the output, or None.

    Raises:
        ValueError: the metric counts padded positions.
    """
    if not has_padded_axis((y, output)):
        return
    if isinstance(output, tf.Tensor) and output.shape[-1] is None:
        raise ValueError(
            f"with micro_batch_tokens, the metric {metric.name} must not be a mean "
            "over padded positions: outputs of shape (examples, positions) need a last "
            "axis of size 1"
        )
    if not has_padded_axis(weight):
        raise ValueError(
            f"with micro_batch_tokens, the metric {metric.name} must not count padded "
            "positions: use weighted_metrics with ragged labels, or a mask of the "
            "output"
        )


def metric_weight(metric: keras.metrics.Metric, weight: tf.Tensor) -> tf.Tensor:
    """Return the weights with which a metric is exact although positions are padded.

    Keras' means average the weights over the positions of an example before they sum
    over examples. With the original weights, a position in a longer micro-batch would
    count less.
    """
    if not isinstance(metric, keras.metrics.Mean) or not has_padded_axis(weight):
        return weight
    weight = tf.cast(weight, metric.dtype)
    return weight * tf.cast(tf.shape(weight)[1], weight.dtype)


def has_padded_axis(nest: Nest) -> bool:
    """Return whether an axis other than that of the examples has no fixed size."""
    for leaf in tf.nest.flatten(nest):
        if leaf is None:
            continue
        if leaf.shape.rank is None or None in leaf.shape[1:].as_list():
            return True
    return False
