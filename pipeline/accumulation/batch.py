"""Splits a batch into its tensors, slices and shares, and sums values over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

Nest = Any  # a dense or ragged tensor, or a nest of them, with the examples on axis 0

# Stands for a missing value in the state of a loop, or in values that a strategy sums.
# `tf.nest.flatten` skips an empty tuple, but returns None as a leaf.
ABSENT: tuple[()] = ()


class Share(NamedTuple):
    """The part of an effective batch that one of several processes has read.

    Attributes:
        batch: `(x, y)` or `(x, y, sample_weight)` with the examples for the replicas of
            this process, each a nest with the examples on axis 0. It may be empty.
        start: position of the share's first example in the effective batch, scalar of
            int32.
        examples: number of examples in the effective batch, scalar of int32.
    """

    batch: Nest
    start: tf.Tensor
    examples: tf.Tensor

    @classmethod
    def for_replicas(cls, batch: Nest, first: int, count: int, replicas: int) -> Share:
        """Return the share of the `count` replicas from number `first` on.

        Args:
            batch: the effective batch, or a tensor that represents it, such as the
                indices of its examples.
            first: number of the first replica of this process, counted from 0.
            count: number of replicas of this process.
            replicas: number of replicas of all processes.
        """
        examples = examples_in(batch)
        size = -(-examples // replicas)
        start = first * size
        stop = (first + count) * size
        return cls(slice_of(batch, start, stop), start, examples)


class Batches(NamedTuple):
    """Several batches that make up one update. No micro-batch spans two of them.

    Attributes:
        batch: `(x, y)` or `(x, y, sample_weight)` with the examples of all batches in
            order, each a nest with the examples on axis 0. If another axis differs in
            size between the batches, the part is ragged here, and dense in each
            micro-batch.
        sizes: number of examples per batch, (batches,), int32.
    """

    batch: Nest
    sizes: tf.Tensor


class DealtBatch(NamedTuple):
    """An effective batch whose examples are ordered by replica, in unequal shares.

    Attributes:
        batch: `(x, y)` or `(x, y, sample_weight)`, each a nest with the examples on
            axis 0.
        starts: where the share of each replica starts, then the number of examples;
            (replicas + 1,), int32.
        order: the position of each example before the batch was dealt, (examples,),
            int32.
    """

    batch: Nest
    starts: tf.Tensor
    order: tf.Tensor


class BatchTotals(NamedTuple):
    """The totals of an effective batch that are known before any forward pass.

    Attributes:
        examples: number of examples, scalar.
        weights: the sums of the sample weights, scalars, nested like the sample weights
            in `fit`; None for an output without sample weights.
    """

    examples: tf.Tensor
    weights: Nest


def is_absent(value: Any) -> bool:
    """Return whether a value is `ABSENT`."""
    return isinstance(value, tuple) and not value


def parts_of(batch: Nest | Share | Batches | DealtBatch) -> tuple[Nest, Nest, Nest]:
    """Return `(x, y, sample_weight)` as tensors, which a traced loop can slice.

    A part that is None stays None.

    Raises:
        ValueError: a part is a sparse tensor.
    """
    if isinstance(batch, Share | Batches | DealtBatch):
        batch = batch.batch
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    return tf.nest.map_structure(_as_tensor, parts)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        rule = "a batch must consist of dense or ragged tensors"
        raise ValueError(f"{rule}: see tf.sparse.to_dense. Received: SparseTensor")
    if leaf is None or tf.is_tensor(leaf):
        return leaf
    return tf.convert_to_tensor(leaf)


def inputs_of(batch: Nest | Share | Batches) -> Nest:
    """Return x. For `Batches`, ragged tensors are made dense, as in a micro-batch."""
    x, *_ = parts_of(batch)
    if isinstance(batch, Batches):
        return tf.nest.map_structure(to_dense, x)
    return x


def tensors_of(batch: Nest | Share | Batches) -> list[tf.Tensor]:
    """Return the tensors that a batch consists of.

    Use them as control dependencies of assignments that do not depend on the batch. At
    the end of data of unknown length, a traced step starts once more, and fails when it
    reads the batch. Without the dependencies, the assignments would be made once more.
    """
    leaves = tf.nest.flatten(parts_of(batch), expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


def to_dense(leaf: Any) -> tf.Tensor:
    """Return a tensor of a single batch in `Batches`, made dense if it is ragged."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.to_tensor()
    return leaf


def examples_in(nest: Nest) -> tf.Tensor:
    """Return the number of examples, scalar of int32."""
    first = first_leaf(nest)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    return tf.shape(first)[0]


def first_leaf(nest: Nest) -> Any:
    """Return the first tensor of a nest. An optional input of a model may be None."""
    return next(leaf for leaf in tf.nest.flatten(nest) if leaf is not None)


def slice_of(nest: Nest, start: Any, stop: Any) -> Nest:
    """Return the examples from `start` up to, but not including, `stop`."""

    def sliced(leaf: Any) -> Any:
        return None if leaf is None else leaf[start:stop]

    return tf.nest.map_structure(sliced, nest)


def slice_specs(nest: Nest) -> Nest:
    """Return the type specs of slices with any number of examples; None stays None."""
    return tf.nest.map_structure(_slice_spec, nest)


def _slice_spec(leaf: Any) -> tf.TypeSpec | None:
    if leaf is None:
        return None
    shape = [None, *leaf.shape[1:]]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(
            shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype
        )
    return tf.TensorSpec(shape, leaf.dtype)


def spread(
    nest: Nest, names: Sequence[str], subject: str, *, to_all: bool = False
) -> dict[str, Nest]:
    """Return the entries of `nest` by output name.

    Args:
        nest: a dict by output name, a list in the order of the outputs, or a leaf for
            the only output.
        names: names of the outputs.
        subject: the name of the nest in error messages.
        to_all: whether a leaf applies to each of several outputs.

    Raises:
        ValueError: no output has the name of an entry, or the number of entries is
            wrong.
    """
    if not keras.tree.is_nested(nest):
        if len(names) > 1 and nest is not None and not to_all:
            outputs = ", ".join(names)
            raise ValueError(
                f"{subject} must be given for each of the outputs {outputs}"
            )
        return dict.fromkeys(names, nest)

    paths_and_leaves = keras.tree.flatten_with_path(nest)
    if isinstance(nest, list | tuple):
        count = len(paths_and_leaves)
        if count != len(names):
            rule = f"{subject} must have {len(names)} entries, one per output"
            raise ValueError(f"{rule}. Received: {count}")
        return dict(zip(names, keras.tree.flatten(nest), strict=True))

    entries = {"/".join(map(str, path)): leaf for path, leaf in paths_and_leaves}
    if list(names) == [""] and len(entries) == 1:
        return dict.fromkeys(names, *entries.values())
    for name in entries:
        if name not in names:
            rule = f"an entry of {subject} must have the name of an output"
            raise ValueError(f"{rule}, one of {', '.join(names)}. Received: {name}")
    return entries


def batch_totals(batch: Nest | Share) -> BatchTotals:
    """Return the totals of an effective batch.

    The totals are computed on the host, so that no device receives the effective batch.
    For a `Share`, `weights` covers only the examples of the share.
    """
    x, _, weights = parts_of(batch)
    with tf.device("CPU:0"):
        if isinstance(batch, Share):
            examples = batch.examples
        else:
            examples = examples_in(x)
        return BatchTotals(examples, tf.nest.map_structure(_sum_of_weights, weights))


def _sum_of_weights(weights: Any) -> tf.Tensor | None:
    """Return the sum, in float64 for integers and in float32 for half precision."""
    if weights is None:
        return None
    if not weights.dtype.is_floating:
        weights = tf.cast(weights, tf.float64)
    elif weights.dtype.size < 4:
        weights = tf.cast(weights, tf.float32)
    return tf.reduce_sum(weights)


def share_of(batch: Nest | Share | DealtBatch) -> tuple[Nest, Any]:
    """Return this replica's share of an effective batch, and the share's position.

    Unless the batch is dealt, a share has at most ⌈examples / replicas⌉ examples. Its
    position is the index of its first example in `batch`.
    """
    parts = parts_of(batch)
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return parts, 0
    replica = context.replica_id_in_sync_group
    # Slice on the host, so that a device does not receive the whole batch.
    with tf.device("CPU:0"):
        if isinstance(batch, DealtBatch):
            position = batch.starts[replica]
            return slice_of(parts, position, batch.starts[replica + 1]), position
        if isinstance(batch, Share):
            start = batch.start
            examples = batch.examples
        else:
            start = 0
            examples = examples_in(parts)
        size = -(-examples // context.num_replicas_in_sync)
        position = replica * size
        first = position - start
        return slice_of(parts, first, first + size), position


def positions_for_noise(batch: Nest | Share | DealtBatch, position: Any) -> Any:
    """Return the positions that determine the noise for the examples of a share.

    In a dealt batch, they are the positions that the examples from `position` on had
    before the batch was dealt. In any other batch, the position of the first example is
    enough; see `position_of`.

    Args:
        batch: the effective batch.
        position: the position of the share in it, see `share_of`.
    """
    if not isinstance(batch, DealtBatch):
        return position
    with tf.device("CPU:0"):
        return batch.order[position:]


def position_of(index: tf.Tensor, positions: Any) -> tf.Tensor:
    """Return the position of the examples at an index of a share.

    Args:
        index: the index of an example, or of several examples.
        positions: see `positions_for_noise`.
    """
    if tf.convert_to_tensor(positions).shape.rank == 0:
        return positions + index
    with tf.device("CPU:0"):
        return tf.gather(positions, index)


def global_batch_totals(
    strategy: tf.distribute.Strategy,
    batch: Nest | Share,
    loss: Any,
    reductions_ready: tf.Variable | None = None,
) -> BatchTotals:
    """Return the totals of an effective batch over all processes.

    For a `Share`, the weights are summed over the replicas if a loss divides by them,
    and left out otherwise. For `reductions_ready`, see `reduce`.
    """
    totals = batch_totals(batch)
    if not isinstance(batch, Share):
        return totals
    reductions = [getattr(leaf, "reduction", None) for leaf in tf.nest.flatten(loss)]
    if "mean_with_sample_weight" not in reductions:
        return totals._replace(weights=None)

    def weights_of_replica() -> tuple[tf.Tensor, ...]:
        weights = batch_totals(share_of(batch)[0]).weights
        leaves = tf.nest.flatten(weights)
        return tuple(leaf for leaf in leaves if leaf is not None)

    sums = reduce(strategy, strategy.run(weights_of_replica), reductions_ready)
    remaining = iter(of_first_replica(strategy, sums))

    def summed(weight: Any) -> Any:
        return None if weight is None else next(remaining)

    return totals._replace(weights=tf.nest.map_structure(summed, totals.weights))


def reduce(
    strategy: tf.distribute.Strategy,
    sums: Nest,
    reductions_ready: tf.Variable | None = None,
) -> Nest:
    """Sum over replicas; every replica gets the sums on its own device.

    `tf.IndexedSlices` are concatenated, so indices may repeat. `reductions_ready` is
    incremented once the summands are ready in this process.
    """
    values = tf.nest.flatten(sums)
    local_values = strategy.experimental_local_results(values[0])
    if reductions_ready is not None:
        # Wait for the first value only: all values of a replica are ready together.
        with tf.control_dependencies(list(local_values)):
            reductions_ready.assign_add(1)
    if strategy.num_replicas_in_sync == 1:
        return sums

    # Sum between CPUs of one process without a collective, which would fail under a
    # second MirroredStrategy: tensorflow/tensorflow#62790.
    in_this_process = len(local_values) == strategy.num_replicas_in_sync
    if in_this_process and "CPU" in local_values[0].device:
        summed = [strategy.extended.reduce_to("SUM", value, value) for value in values]
    else:
        summed = all_reduced(strategy, values)
    return tf.nest.pack_sequence_as(sums, summed)


def all_reduced(strategy: tf.distribute.Strategy, values: list[Any]) -> list[Any]:
    """Return the sums of `values` over replicas, on the devices of `values`.

    There is one collective per dtype, because TensorFlow concatenates all values that
    share a collective.
    """
    dtypes = [strategy.experimental_local_results(value)[0].dtype for value in values]
    summed = list(values)
    for dtype in dict.fromkeys(dtypes):
        indices = [index for index, other in enumerate(dtypes) if other == dtype]
        pairs = [(values[index], values[index]) for index in indices]
        sums = strategy.extended.batch_reduce_to("SUM", pairs)
        for index, value in zip(indices, sums, strict=True):
            summed[index] = value
    return summed


def of_first_replica(strategy: tf.distribute.Strategy, values: Nest) -> Nest:
    """Return the values of the first replica in this process."""
    return strategy.experimental_local_results(values)[0]
