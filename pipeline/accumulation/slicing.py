"""A batch in slices: each process' and each replica's share of it, and the micro-batches of a share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

Nest = Any  # a tensor, dense or ragged, or a nest of them with the examples on axis 0


class Share(NamedTuple):
    """What one of several processes has read of an effective batch: the examples of its own replicas.

    Attributes:
        batch: `(x, y)` or `(x, y, sample_weight)`, each a nest with the examples on axis 0; of any number, also none.
        start: place of the first of them in the effective batch, scalar of int32.
        examples: of the effective batch, scalar of int32.
    """

    batch: Nest
    start: tf.Tensor
    examples: tf.Tensor

    @classmethod
    def of(cls, batch: Nest, first: int, count: int, replicas: int) -> Share:
        """Return what `count` of all replicas, from number `first` on, have of an effective batch, or of its names."""
        examples = examples_in(batch)
        start, stop = (replica * _size(examples, replicas) for replica in (first, first + count))
        return cls(_slice(batch, start, stop), start, examples)


def share_of(batch: Nest | Share, replicas: int) -> tuple[Nest, Any]:
    """Return this replica's part of an effective batch, and the place of its first example in it.

    It is of ⌈examples / replicas⌉ consecutive examples, fewer on the last replicas.
    """
    parts = parts_of(batch)
    if replicas == 1:
        return parts, 0
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    # On the host, so that a device receives its share and not the whole batch.
    with tf.device("CPU:0"):
        here, examples = (batch.start, batch.examples) if isinstance(batch, Share) else (0, examples_in(parts))
        size = _size(examples, replicas)
        place = replica * size
        return _slice(parts, place - here, place - here + size), place


def _size(examples: tf.Tensor, replicas: int) -> tf.Tensor:
    return -(-examples // replicas)


def sum_over_micro_batches(
    micro_step: Callable[[tf.Tensor, Nest, Nest, Nest], Nest],
    batch: Nest,
    micro_batch_size: int,
    jit_compile: bool = False,
) -> Nest:
    """Sum `micro_step(start, x, y, sample_weight)`, tensors of known shapes, over the micro-batches of `batch`.

    `start` is the place in `batch` of a micro-batch's first example.
    The batch stays on the host. While one micro-batch is computed the next one is brought to the device, which holds
    two of them and never the batch. Integers of 32 bits TensorFlow keeps on the host until they are used.

    The sum of `tf.IndexedSlices` in it has each row once, so it is as large as the rows that were looked up, and never
    larger than the dense sum.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1. Received: {micro_batch_size}")
    parts = parts_of(batch)
    count = examples_in(parts)
    leaves = [leaf for leaf in tf.nest.flatten(parts) if leaf is not None]

    def on_leaves(start: tf.Tensor, *slices: tf.Tensor) -> Nest:
        left = iter(slices)
        return micro_step(start, *tf.nest.map_structure(lambda leaf: None if leaf is None else next(left), parts))

    # A function of its own, so that its outputs are known before the loop and XLA sees whole micro-batches.
    specs = slice_specs(leaves)
    signature = [tf.TensorSpec([], tf.int32), *specs]
    step = tf.function(on_leaves, input_signature=signature, autograph=False, jit_compile=jit_compile or None)
    outputs = tf.nest.flatten(step.get_concrete_function().structured_outputs)

    def brought(start: tf.Tensor) -> list[Any]:
        with tf.device("CPU:0"):
            cut = _slice(leaves, start, tf.minimum(start + micro_batch_size, count))
        return [tf.identity(leaf) for leaf in cut]  # outside: on the device that computes

    def body(start: tf.Tensor, now: list[Any], sums: list[Any]) -> tuple[tf.Tensor, list[Any], list[Any]]:
        stop = tf.minimum(start + micro_batch_size, count)
        ahead, made = brought(stop), tf.nest.flatten(step(start, *now))
        return stop, ahead, [_added(total, value) for total, value in zip(sums, made, strict=True)]

    zeros, shapes = zip(*map(_nothing, outputs), strict=True)
    of_slices = [spec.shape if isinstance(spec, tf.TensorSpec) else spec for spec in specs]
    *_, sums = tf.while_loop(
        lambda start, *_: start < count,
        body,
        (0, brought(tf.constant(0)), list(zeros)),
        shape_invariants=(tf.TensorShape([]), of_slices, list(shapes)),
        parallel_iterations=1,  # two at once were faster on a CPU, and held up to 1.7 times the activations
    )
    sums = [_like(output, total) for output, total in zip(outputs, sums, strict=True)]
    return tf.nest.pack_sequence_as(step.get_concrete_function().structured_outputs, sums)


def _nothing(output: Any) -> tuple[Any, Any]:
    """Return the sum of no micro-batches, and the shapes of a sum: of rows and their indices, or of a dense tensor."""
    if not isinstance(output, tf.IndexedSlices):  # zeros of its size would take the memory of a second gradient
        rank = output.shape.rank
        return tf.zeros([1] * rank, output.dtype), tf.TensorShape([None] * rank)
    row = output.shape[1:]
    rows = tf.zeros([0, *row], output.dtype), tf.zeros([0], output.indices.dtype)
    return rows, (tf.TensorShape([None, *row]), tf.TensorShape([None]))


def _added(total: Any, value: Any) -> Any:
    if not isinstance(value, tf.IndexedSlices):
        return total + value
    rows, indices = total
    indices, places = tf.unique(tf.concat([indices, value.indices], 0))
    rows = tf.math.unsorted_segment_sum(tf.concat([rows, value.values], 0), places, tf.size(indices))
    return rows, indices


def _like(output: Any, total: Any) -> Any:
    if not isinstance(output, tf.IndexedSlices):
        return tf.broadcast_to(total, output.shape)  # for a share without an example: else it has that shape
    return tf.IndexedSlices(*total, tf.constant(output.shape.as_list()))


def parts_of(batch: Nest | Share) -> tuple[Nest, Nest, Nest]:
    """Return `(x, y, sample_weight)`, its arrays as tensors: a traced loop slices only those. What is None stays so."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf),
        keras.utils.unpack_x_y_sample_weight(batch.batch if isinstance(batch, Share) else batch),
    )


def examples_in(nest: Nest) -> tf.Tensor:
    first = tf.nest.flatten(nest)[0]
    return tf.cast(first.nrows(), tf.int32) if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]


def _slice(nest: Nest, start: Any, stop: Any) -> Nest:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], nest)


def slice_specs(nest: Nest) -> Nest:
    """Return the specs of any number of examples."""

    def spec(leaf: Any) -> tf.TypeSpec:
        shape = tf.TensorShape([None, *leaf.shape[1:]])
        if isinstance(leaf, tf.RaggedTensor):
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
        return tf.TensorSpec(shape, leaf.dtype)

    return tf.nest.map_structure(spec, nest)
