"""A batch: its parts, slices and totals, the share that a process or a replica takes, and sums over replicas."""

from __future__ import annotations

from collections.abc import Sequence
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
        """Return the share of `count` of all `replicas`, from `first` on, in a batch or in what it is made from."""
        examples = examples_in(batch)
        size = -(-examples // replicas)
        start, stop = first * size, (first + count) * size
        return cls(slice_of(batch, start, stop), start, examples)


class Batches(NamedTuple):
    """Several batches that make one update, one after the other; none is cut or joined.

    Attributes:
        batch: `(x, y)` or `(x, y, sample_weight)` of all of them, each a nest with the examples on axis 0. A part whose
            other axes differ between the batches is ragged here, and dense in each micro-batch.
        sizes: number of examples of each batch, (batches,), int32: the micro-batches.
    """

    batch: Nest
    sizes: tf.Tensor


def share_of(batch: Nest | Share) -> tuple[Nest, Any]:
    """Return this replica's share of an effective batch, ⌈examples / replicas⌉ at most, and where it begins."""
    parts, here = parts_of(batch), tf.distribute.get_replica_context()
    if here.num_replicas_in_sync == 1:
        return parts, 0
    replica = here.replica_id_in_sync_group
    # On the host, so that a device receives its share and not the whole batch.
    with tf.device("CPU:0"):
        start, examples = (
            (batch.start, batch.examples)
            if isinstance(batch, Share)
            else (0, examples_in(parts))
        )
        size = -(-examples // here.num_replicas_in_sync)
        place = replica * size
        return slice_of(parts, place - start, place - start + size), place


def parts_of(batch: Nest | Share) -> tuple[Nest, Nest, Nest]:
    """Return `(x, y, sample_weight)` with arrays as tensors, which a traced loop can slice; None stays None."""

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            rule = "a batch must be of dense or ragged tensors: see tf.sparse.to_dense"
            raise ValueError(f"{rule}. Received: SparseTensor")
        return (
            leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
        )

    parts = keras.utils.unpack_x_y_sample_weight(
        batch.batch if isinstance(batch, Share | Batches) else batch
    )
    return tf.nest.map_structure(tensor, parts)


def examples_in(nest: Nest) -> tf.Tensor:
    """Return the number of examples, scalar of int32."""
    first = tf.nest.flatten(nest)[0]
    return (
        tf.cast(first.nrows(), tf.int32)
        if isinstance(first, tf.RaggedTensor)
        else tf.shape(first)[0]
    )


def slice_of(nest: Nest, start: Any, stop: Any) -> Nest:
    """Return the examples from `start` to before `stop`."""
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else leaf[start:stop], nest
    )


def inputs_of(batch: Nest | Share | Batches) -> Nest:
    """Return x, as a micro-batch has it."""
    x, *_ = parts_of(batch)
    return tf.nest.map_structure(dense, x) if isinstance(batch, Batches) else x


def dense(leaf: Any) -> tf.Tensor:
    """Return a part of one of several `Batches`, which was dense before they were put together."""
    return leaf.to_tensor() if isinstance(leaf, tf.RaggedTensor) else leaf


def slice_specs(nest: Nest) -> Nest:
    """Return the specs of slices with any number of examples; None stays None."""

    def spec(leaf: Any) -> tf.TypeSpec:
        shape, ragged = [None, *leaf.shape[1:]], isinstance(leaf, tf.RaggedTensor)
        more = (leaf.ragged_rank, leaf.row_splits.dtype) if ragged else ()
        return (tf.RaggedTensorSpec if ragged else tf.TensorSpec)(
            shape, leaf.dtype, *more
        )

    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else spec(leaf), nest
    )


def spread(
    nest: Nest, names: Sequence[str], *, to_all: bool = False
) -> dict[str, Nest]:
    """Return what `nest` has for each of the outputs `names`: a dict by name, a list in their order, or a leaf.

    A leaf is for the only output, or with `to_all` for every output.

    Raises:
        ValueError: a name is not that of an output, or the number of entries is wrong.
    """
    if not keras.tree.is_nested(nest):
        if len(names) > 1 and nest is not None and not to_all:
            raise ValueError(
                f"must be given for each of the outputs {', '.join(names)}"
            )
        return dict.fromkeys(names, nest)
    flat = keras.tree.flatten_with_path(nest)
    if isinstance(nest, list | tuple):
        if len(flat) != len(names):
            raise ValueError(
                f"must have {len(names)} entries, one an output. Received: {len(flat)}"
            )
        return dict(zip(names, (leaf for _, leaf in flat), strict=True))
    given = {"/".join(map(str, path)): leaf for path, leaf in flat}
    if list(names) == [""] and len(given) == 1:
        return dict.fromkeys(names, *given.values())
    for name in given:
        if name not in names:
            raise ValueError(
                f"must be named as an output, one of {', '.join(names)}. Received: {name}"
            )
    return given


class BatchTotals(NamedTuple):
    """What is known of a whole effective batch before any forward pass.

    Attributes:
        examples: their number, scalar.
        weights: Σ wᵢ, scalar, of the sample weights of each output, as `fit` takes them; None where there are none.
    """

    examples: tf.Tensor
    weights: Nest


def batch_totals(batch: Nest | Share) -> BatchTotals:
    """Return the totals of an effective batch, computed on the host, so that no device receives all of it.

    The weights of a `Share` are of its own examples alone.
    """
    x, _, weights = parts_of(batch)

    def total(leaf: Any) -> tf.Tensor | None:
        if leaf is None:
            return None
        if not leaf.dtype.is_floating:
            return tf.reduce_sum(tf.cast(leaf, tf.float64))
        return tf.reduce_sum(tf.cast(leaf, tf.float32) if leaf.dtype.size < 4 else leaf)

    with tf.device("CPU:0"):
        examples = batch.examples if isinstance(batch, Share) else examples_in(x)
        return BatchTotals(examples, tf.nest.map_structure(total, weights))


def global_batch_totals(
    strategy: tf.distribute.Strategy,
    batch: Nest | Share,
    loss: Any,
    reductions_ready: tf.Variable | None = None,
) -> BatchTotals:
    """Return the totals of an effective batch, with the weights of all processes where a loss divides by them."""
    totals = batch_totals(batch)
    if not isinstance(batch, Share):
        return totals
    if all(
        getattr(each, "reduction", None) != "mean_with_sample_weight"
        for each in tf.nest.flatten(loss)
    ):
        return totals._replace(weights=None)

    def of_replica() -> tuple[tf.Tensor, ...]:
        weights = batch_totals(share_of(batch)[0]).weights
        return tuple(
            weight for weight in tf.nest.flatten(weights) if weight is not None
        )

    sums = iter(
        of_first_replica(
            strategy, reduce(strategy, strategy.run(of_replica), reductions_ready)
        )
    )
    weights = tf.nest.map_structure(
        lambda weight: None if weight is None else next(sums), totals.weights
    )
    return totals._replace(weights=weights)


def reduce(
    strategy: tf.distribute.Strategy,
    sums: Nest,
    reductions_ready: tf.Variable | None = None,
) -> Nest:
    """Sum over replicas; each of them has the sums on its own device.

    `tf.IndexedSlices` are concatenated: indices may repeat. `reductions_ready` counts the calls whose sums are ready.
    """
    values = tf.nest.flatten(sums)
    of_here = strategy.experimental_local_results(values[0])
    if reductions_ready is not None:
        with tf.control_dependencies(list(of_here)):  # the others come with it
            reductions_ready.assign_add(1)
    if strategy.num_replicas_in_sync == 1:
        return sums
    # CPUs of one process need no collective: from a second MirroredStrategy on they fail (tensorflow/tensorflow#62790).
    if len(of_here) == strategy.num_replicas_in_sync and "CPU" in of_here[0].device:
        summed = [strategy.extended.reduce_to("SUM", value, value) for value in values]
    else:
        summed = all_reduced(strategy, values)
    return tf.nest.pack_sequence_as(sums, summed)


def all_reduced(strategy: tf.distribute.Strategy, values: list[Any]) -> list[Any]:
    """Return the sums of `values` over replicas, those of one dtype by one collective, on the devices they are on."""
    dtypes = [strategy.experimental_local_results(value)[0].dtype for value in values]
    summed = list(values)
    for dtype in dict.fromkeys(dtypes):  # TensorFlow concatenates all that it is given
        places = [place for place, other in enumerate(dtypes) if other == dtype]
        pairs = [(values[place], values[place]) for place in places]
        for place, value in zip(
            places, strategy.extended.batch_reduce_to("SUM", pairs), strict=True
        ):
            summed[place] = value
    return summed


def of_first_replica(strategy: tf.distribute.Strategy, values: Nest) -> Nest:
    """Return the values that the first replica of this process has."""
    return strategy.experimental_local_results(values)[0]
