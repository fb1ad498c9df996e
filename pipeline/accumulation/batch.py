"""A batch: its parts, its slices, and the share of it that a process or a replica takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

Nest = Any  # a tensor, dense or ragged, or a nest of them with the examples on axis 0


class Share(NamedTuple):
    """What one of several processes has read of an effective batch: the examples of its own replicas.

    Attributes:
        batch: `(x, y)` or `(x, y, sample_weight)`, each a nest with the examples on axis 0; it may have no examples.
        start: position of the first of them in the effective batch, scalar of int32.
        examples: number of examples in the effective batch, scalar of int32.
    """

    batch: Nest
    start: tf.Tensor
    examples: tf.Tensor

    @classmethod
    def of(cls, batch: Nest, first: int, count: int, replicas: int) -> Share:
        """Return the share of `count` of all `replicas`, from replica `first` on.

        `batch` is an effective batch, or whatever its examples are to be made from.
        """
        examples = examples_in(batch)
        start, stop = (replica * _share_size(examples, replicas) for replica in (first, first + count))
        return cls(slice_of(batch, start, stop), start, examples)


def share_of(batch: Nest | Share, replicas: int) -> tuple[Nest, Any]:
    """Return this replica's share of an effective batch, and the position of its first example.

    Each replica takes ⌈examples / replicas⌉ consecutive examples, the last replicas fewer.
    """
    parts = parts_of(batch)
    if replicas == 1:
        return parts, 0
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    # On the host, so that a device receives its share and not the whole batch.
    with tf.device("CPU:0"):
        start, examples = (batch.start, batch.examples) if isinstance(batch, Share) else (0, examples_in(parts))
        size = _share_size(examples, replicas)
        place = replica * size
        return slice_of(parts, place - start, place - start + size), place


def _share_size(examples: tf.Tensor, replicas: int) -> tf.Tensor:
    return -(-examples // replicas)


def parts_of(batch: Nest | Share) -> tuple[Nest, Nest, Nest]:
    """Return `(x, y, sample_weight)` with arrays as tensors, which a traced loop can slice; None stays None."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf),
        keras.utils.unpack_x_y_sample_weight(batch.batch if isinstance(batch, Share) else batch),
    )


def examples_in(nest: Nest) -> tf.Tensor:
    """Return the number of examples, scalar of int32."""
    first = tf.nest.flatten(nest)[0]
    return tf.cast(first.nrows(), tf.int32) if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]


def slice_of(nest: Nest, start: Any, stop: Any) -> Nest:
    """Return the examples from `start` to before `stop`."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], nest)


def slice_specs(nest: Nest) -> Nest:
    """Return the specs of slices with any number of examples."""

    def spec(leaf: Any) -> tf.TypeSpec:
        shape = tf.TensorShape([None, *leaf.shape[1:]])
        if isinstance(leaf, tf.RaggedTensor):
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
        return tf.TensorSpec(shape, leaf.dtype)

    return tf.nest.map_structure(spec, nest)
