"""The loop that runs a step on each micro-batch of a batch, and joins the results.

There are four ways to join: see `_DenseSum`, `_RowSum`, `_DenseRowSum` and
`_Concatenation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from .batch import (
    ABSENT,
    Batches,
    Nest,
    examples_in,
    parts_of,
    slice_of,
    slice_specs,
    to_dense,
)
from .fused_attention import attention_fused
from .padding import padded
from .token_cut import CutCounts, TokenLimit, cut_by_tokens
from .token_cut_for_xla import cut_for_xla

# Maximum size of a batch that is copied to the device as a whole, for one program.
MOST_BYTES = 64 * 2**20

# Maximum size of an embedding's gradient that is summed as a dense tensor. A GPU reads
# and writes as much in about a millisecond. To count rows, the host would wait longer.
MOST_DENSE_BYTES = 2**30


def run_micro_batches(
    micro_step: Callable[..., Nest],
    batch: Nest | Batches,
    micro_batch_size: int | TokenLimit,
    jit_compile: bool = False,
    fused_attention: bool = False,
) -> Nest:
    """Run `micro_step(start, x, y, sample_weight)` on each micro-batch of `batch`.

    Args:
        micro_step: `start` is the position of the micro-batch's first example in
            `batch`. The step returns a nest of tensors and `tf.IndexedSlices`.
        batch: the batch, which stays on the host. While one micro-batch is computed,
            the next one is copied to the device, which holds two micro-batches at a
            time. In `Batches`, no micro-batch spans two batches.
        micro_batch_size: examples per micro-batch; the last one may be smaller. With a
            `TokenLimit`, the batch is sorted by length and cut by tokens. `start` is
            then the position of each example of the micro-batch in `batch`, of shape
            (examples,).
        jit_compile: whether XLA compiles the step for full micro-batches. A smaller
            last micro-batch is not compiled. In a cut by tokens, XLA compiles for each
            of the limit's `xla_lengths`, and not for longer examples.
        fused_attention: whether the compiled step is traced in `attention_fused`. A
            step that is not compiled cannot use it, so the step is then traced twice.

    Returns:
        A nest of results. Each is the sum over the micro-batches, or the concatenation
        if the size of its axis 0 is unknown during tracing, as the number of examples
        is. A concatenation is in the order of the examples in `batch`.

    Raises:
        ValueError: the micro-batch size is not positive.
    """
    loop = MicroBatchLoop(
        micro_step, batch, micro_batch_size, jit_compile, fused_attention
    )
    return loop.run()


class MicroBatchLoop:
    """The loop over the micro-batches of a batch, with its step traced.

    For most arguments, see `run_micro_batches`. With `dense_rows`, an embedding's
    gradient of at most `MOST_DENSE_BYTES` is summed as a dense tensor.
    """

    def __init__(
        self,
        micro_step: Callable[..., Nest],
        batch: Nest | Batches,
        micro_batch_size: int | TokenLimit,
        jit_compile: bool = False,
        fused_attention: bool = False,
        dense_rows: bool = False,
    ):
        if isinstance(micro_batch_size, TokenLimit):
            cut: _Cut = _TokenCut(batch, micro_batch_size, jit_compile)
            assert not fused_attention
        else:
            if micro_batch_size < 1:
                rule = "micro_batch_size must be at least 1"
                raise ValueError(f"{rule}. Received: {micro_batch_size}")
            cut = _Cut(batch, micro_batch_size)
            self._micro_batch_size = micro_batch_size

        # Trace the step as a separate function: its outputs are then known before the
        # loop, and XLA can compile it for full micro-batches.
        def on_leaves(positions: tf.Tensor, *slices: tf.Tensor) -> Nest:
            return micro_step(positions, *cut.packed(slices))

        signature = [cut.positions_spec, *cut.specs]
        step = tf.function(on_leaves, input_signature=signature, autograph=False)
        self._cut = cut
        self._structure = step.get_concrete_function().structured_outputs
        outputs = tf.nest.flatten(self._structure)
        self._joins = [_join_of(output, dense_rows) for output in outputs]
        self._step = step
        self._compiled_step = None
        if jit_compile:

            def on_full_leaves(*arguments: tf.Tensor) -> list[Any]:
                if fused_attention:
                    with attention_fused(self._micro_batch_size):
                        results = on_leaves(*arguments)
                else:
                    # Wrap the traced function, so that nothing is traced twice.
                    results = step(*arguments)
                return self._prepared(tf.nest.flatten(results))

            self._compiled_step = tf.function(
                on_full_leaves, signature, autograph=False, jit_compile=True
            )

    def run(self) -> Nest:
        """Run the loop; return the results."""
        cut = self._cut
        joins = self._joins
        # One loop after another: each has a step, and the example at which it ends.
        loops = []
        if self._compiled_step is not None:
            begin, end = cut.compiled_examples()
            if begin is not None:
                loops.append((self._step, begin))
            loops.append((self._compiled_step, end))
        loops.append((self._step, cut.examples))

        def body(
            step: Callable[..., Nest], start: tf.Tensor, micro_batch: Nest, totals: Nest
        ) -> tuple[tf.Tensor, Nest, Nest]:
            stop = cut.stop(start)
            next_micro_batch = cut.on_device(stop)
            results = step(cut.positions(start, stop), *micro_batch)
            results = self._prepared(tf.nest.flatten(results))
            new_totals = []
            for join, total, value in zip(joins, totals, results, strict=True):
                new_totals.append(join.add(total, value))
            return stop, next_micro_batch, new_totals

        starts = [join.start() for join in joins]
        shapes = [join.shape() for join in joins]
        state: Any = (tf.constant(0), cut.on_device(tf.constant(0)), starts)
        for step_of_loop, end in loops:
            state = tf.while_loop(
                lambda start, *_, end=end: start < end,
                partial(body, step_of_loop),
                state,
                shape_invariants=(tf.TensorShape([]), cut.specs, shapes),
                # Run one iteration at a time: two at once were faster on a CPU, but
                # needed up to 1.7 times the memory for activations.
                parallel_iterations=1,
            )
        *_, totals = state

        results = []
        for join, total in zip(joins, totals, strict=True):
            result = join.finish(total)
            if isinstance(join, _Concatenation):
                result = cut.in_order_of_batch(result)
            results.append(result)
        return self._packed(results)

    @property
    def counts(self) -> CutCounts | tuple[()]:
        """The counts of a cut by tokens, of int64, or `ABSENT` for any other cut."""
        return self._cut.counts

    def fits_program(self) -> tf.Tensor | None:
        """Return whether `run_in_program` can run the loop; a scalar of bool.

        It can if all micro-batches are full and the batch has at most `MOST_BYTES`.

        Returns:
            A tensor on the host, or None if it never can, because the step is not
            compiled, a part of the batch is ragged, or an output is not a sum.
        """
        if self._compiled_step is None or self._cut.is_ragged:
            return None
        if any(isinstance(join, _Concatenation) for join in self._joins):
            return None
        examples = self._cut.examples
        with tf.device("CPU:0"):
            is_cut_evenly = tf.equal(examples % self._micro_batch_size, 0)
            is_small = self._cut.bytes() <= MOST_BYTES
            return (examples > 0) & is_cut_evenly & is_small

    def has_rows(self) -> bool:
        """Return whether an output is `tf.IndexedSlices`: an embedding's gradient."""
        return any(isinstance(join, _RowSum) for join in self._joins)

    def run_in_program(self) -> Nest:
        """Run the loop as a part of a program that XLA compiles; return the results.

        The whole batch is copied to the device, and the gradient of an embedding is
        summed as a dense tensor. Use this only for batches that `fits_program`.
        """
        assert self._compiled_step is not None
        compiled_step = self._compiled_step
        joins: list[_DenseSum | _RowSum] = []
        for join in self._joins:
            assert not isinstance(join, _Concatenation)
            joins.append(join)

        def body(start: tf.Tensor, *totals: tf.Tensor) -> list[tf.Tensor]:
            slices = self._cut.in_program(start)
            results = tf.nest.flatten(compiled_step(start, *slices))
            new_totals = [start + self._micro_batch_size]
            for join, total, value in zip(joins, totals, results, strict=True):
                new_totals.append(total + join.dense(value))
            return new_totals

        # XLA knows the shapes of the batch when it compiles, and needs fixed shapes in
        # the loop: each sum begins at its full size.
        stop = self._cut.examples_in_program()
        zeros = [tf.zeros(join.output.shape, join.output.dtype) for join in joins]
        state = [tf.constant(0), *zeros]
        _, *totals = tf.while_loop(lambda start, *_: start < stop, body, state)
        return self._packed(totals)

    def _prepared(self, results: Sequence[Any]) -> list[Any]:
        """Return the results of a step as they are summed.

        A compiled step calls this itself. Otherwise, it would return the indices of
        rows to the host, which would wait for them.
        """
        prepared = []
        for join, result in zip(self._joins, results, strict=True):
            if isinstance(join, _DenseRowSum):
                prepared.append(join.dense(result))
            else:
                prepared.append(result)
        return prepared

    def _packed(self, results: Sequence[Any]) -> Nest:
        return tf.nest.pack_sequence_as(self._structure, results)


class _Cut:
    """Cuts a batch, which stays on the host, into micro-batches."""

    counts: CutCounts | tuple[()] = ABSENT
    positions_spec = tf.TensorSpec([], tf.int32)  # of the result of `positions`

    def __init__(self, batch: Nest | Batches, micro_batch_size: int):
        self._micro_batch_size = micro_batch_size
        self._parts = parts_of(batch)
        self._ends = None  # for `Batches`: where each batch ends
        # Get the shape on the CPU, so that the host does not wait for a GPU.
        with tf.device("CPU:0"):
            self.examples = examples_in(self._parts)
            if isinstance(batch, Batches):
                # Repeat the last end: the loop cuts one micro-batch more than it uses,
                # an empty one that starts and ends there.
                self._ends = tf.concat([tf.cumsum(batch.sizes), [self.examples]], 0)
            # Copy the leaves by an operation that is placed on the host. TensorFlow
            # keeps a captured tensor on the device of its operation, which would be a
            # GPU by default.
            leaves = tf.nest.flatten(self._parts)
            self._leaves = [tf.identity(leaf) for leaf in leaves if leaf is not None]
        self._dtypes = [leaf.dtype for leaf in self._leaves]
        self.specs = _specs_on_device(slice_specs(self._leaves))
        if isinstance(batch, Batches):
            self._make_specs_dense()

    def _make_specs_dense(self) -> None:
        """Make `specs` those of micro-batches whose ragged parts are padded."""
        dense = [tf.TensorSpec(spec.shape, spec.dtype) for spec in self.specs]
        self.specs = _specs_on_device(dense)

    @property
    def is_ragged(self) -> bool:
        """Whether a part of the batch is ragged, or the batch consists of `Batches`."""
        is_ragged = [isinstance(leaf, tf.RaggedTensor) for leaf in self._leaves]
        return any(is_ragged) or self._ends is not None

    def bytes(self) -> tf.Tensor:
        """Return the size in bytes, a scalar of int64. The batch must not be ragged."""
        sizes = []
        for leaf in self._leaves:
            sizes.append(tf.size(leaf, tf.int64) * leaf.dtype.size)
        return tf.add_n(sizes)

    def packed(self, slices: Sequence[tf.Tensor]) -> Nest:
        """Return `(x, y, sample_weight)` of a micro-batch, built from its leaves."""
        leaves = map(_with_dtype, slices, self._dtypes)

        def leaf_of_slice(leaf: Any) -> Any:
            return None if leaf is None else next(leaves)

        return tf.nest.map_structure(leaf_of_slice, self._parts)

    def stop(self, start: tf.Tensor) -> tf.Tensor:
        """Return the end of the micro-batch that begins at `start`; it is exclusive."""
        if self._ends is None:
            return tf.minimum(start + self._micro_batch_size, self.examples)
        with tf.device("CPU:0"):
            stop = start + self._micro_batch_size
            index = tf.searchsorted(self._ends[:-1], [start], "right")[0]
            return tf.minimum(stop, self._ends[index])

    def on_device(self, start: tf.Tensor) -> list[Any]:
        """Return the leaves of the micro-batch from `start` on, on the device."""
        with tf.device("CPU:0"):
            slices = slice_of(self._leaves, start, self.stop(start))
            if self._ends is not None:
                pairs = zip(slices, self.specs, strict=True)
                slices = [
                    tf.ensure_shape(to_dense(leaf), spec.shape) for leaf, spec in pairs
                ]
            slices = self._as_on_device(slices)
        # Copy to the device that computes, which is current outside of the block.
        return [tf.identity(leaf) for leaf in slices]

    def _as_on_device(self, slices: Sequence[Any]) -> list[Any]:
        """Return leaves of a micro-batch with the dtypes of `specs`."""
        pairs = zip(slices, self.specs, strict=True)
        return [_with_dtype(leaf, spec.dtype) for leaf, spec in pairs]

    def examples_in_program(self) -> tf.Tensor:
        """Return the number of examples, which XLA knows when it compiles."""
        return tf.shape(self._leaves[0])[0]

    def in_program(self, start: tf.Tensor) -> list[tf.Tensor]:
        """Return the leaves of a full micro-batch, with static sizes for XLA."""
        slices = []
        for leaf in self._leaves:
            rank = leaf.shape.rank
            begin = tf.concat([[start], tf.zeros([rank - 1], tf.int32)], 0)
            size = tf.concat([[self._micro_batch_size], tf.shape(leaf)[1:]], 0)
            slices.append(tf.slice(leaf, begin, size))
        return self._as_on_device(slices)

    def compiled_examples(self) -> tuple[tf.Tensor | None, tf.Tensor]:
        """Return where the full micro-batches begin (None for 0) and where they end."""
        return None, self.examples - self.examples % self._micro_batch_size

    def positions(self, start: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        """Return the positions in the batch that a micro-step is given."""
        return start

    def in_order_of_batch(self, values: tf.Tensor) -> tf.Tensor:
        """Return values of the examples in the order of the batch."""
        return values


class _TokenCut(_Cut):
    """Sorts a batch by length, cuts it by tokens, and pads each micro-batch."""

    positions_spec = tf.TensorSpec([None], tf.int32)

    def __init__(self, batch: Nest, limit: TokenLimit, for_xla: bool):
        super().__init__(batch, 1)  # the size is not used
        self._pad_multiple = limit.pad_multiple
        with tf.device("CPU:0"):
            if for_xla:
                cut = cut_for_xla(self._parts, limit)
            else:
                cut = cut_by_tokens(self._parts[0], limit)
            self._order = cut.order
            # Repeat the last end, as for `Batches`.
            self._ends: tf.Tensor = tf.concat([cut.ends, [self.examples]], 0)
            minimum_lengths = tf.zeros_like(cut.ends, tf.int64)
            if cut.for_xla is not None:
                minimum_lengths = cut.for_xla.minimum_lengths
            self._minimum_lengths = tf.concat([minimum_lengths, [0]], 0)
            self._leaves = [tf.gather(leaf, cut.order) for leaf in self._leaves]
        self._for_xla = cut.for_xla
        self.counts = cut.counts
        self._make_specs_dense()

    def stop(self, start: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:0"):
            return self._ends[self._number(start)]

    def on_device(self, start: tf.Tensor) -> list[Any]:
        with tf.device("CPU:0"):
            slices = slice_of(self._leaves, start, self.stop(start))
            length = self._minimum_lengths[self._number(start)]
            slices = [padded(leaf, self._pad_multiple, length) for leaf in slices]
            slices = self._as_on_device(slices)
        return [tf.identity(leaf) for leaf in slices]

    def _number(self, start: tf.Tensor) -> tf.Tensor:
        """Return the number of the micro-batch that begins at `start`."""
        return tf.searchsorted(self._ends[:-1], [start], "right")[0]

    def compiled_examples(self) -> tuple[tf.Tensor | None, tf.Tensor]:
        assert self._for_xla is not None
        return self._for_xla.begin, self._for_xla.end

    def positions(self, start: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:0"):
            return self._order[start:stop]

    def in_order_of_batch(self, values: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:0"):
            places = tf.math.invert_permutation(self._order)
        return tf.gather(values, places)


def _specs_on_device(specs: Sequence[tf.TypeSpec]) -> list[tf.TypeSpec]:
    """Return the specs of leaves as they are copied to the device.

    Dense leaves of int32 are copied as int64. TensorFlow keeps int32 in the memory of a
    GPU's host until a step uses it. The copy would then wait for the step before, and
    the step for the copy.
    """
    on_device = []
    for spec in specs:
        if isinstance(spec, tf.TensorSpec) and spec.dtype == tf.int32:
            spec = tf.TensorSpec(spec.shape, tf.int64)
        on_device.append(spec)
    return on_device


def _with_dtype(leaf: Any, dtype: tf.DType) -> Any:
    """Return a leaf with another dtype. A leaf that has it already is not changed."""
    return leaf if leaf.dtype == dtype else tf.cast(leaf, dtype)


@dataclass(frozen=True)
class _DenseSum:
    """Sums dense tensors that have the shape and dtype of `output`."""

    output: tf.Tensor

    def start(self) -> tf.Tensor:
        """Return a tensor with a single zero, which broadcasts to the output's shape.

        Zeros in the output's shape would take the memory of a second gradient.
        """
        return tf.zeros([1] * self.output.shape.rank, self.output.dtype)

    def shape(self) -> tf.TensorShape:
        """Return the static shape that fits the total in every iteration."""
        return tf.TensorShape([None] * self.output.shape.rank)

    def add(self, total: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        return total + value

    def dense(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def finish(self, total: tf.Tensor) -> tf.Tensor:
        # If there was no micro-batch, the total still has one element.
        return tf.broadcast_to(total, self.output.shape)


@dataclass(frozen=True)
class _RowSum:
    """Sums an embedding's gradients as rows and their indices.

    The total contains each looked-up row once, so it is never larger than a dense sum.
    """

    output: tf.IndexedSlices

    def start(self) -> tuple[tf.Tensor, tf.Tensor]:
        rows = tf.zeros([0, *self.output.shape[1:]], self.output.dtype)
        return rows, tf.zeros([0], self.output.indices.dtype)

    def shape(self) -> tuple[tf.TensorShape, tf.TensorShape]:
        return tf.TensorShape([None, *self.output.shape[1:]]), tf.TensorShape([None])

    def add(
        self, total: tuple[tf.Tensor, tf.Tensor], value: tf.IndexedSlices
    ) -> tuple[tf.Tensor, tf.Tensor]:
        rows, indices = total
        all_rows = tf.concat([rows, value.values], 0)
        return rows_once(all_rows, tf.concat([indices, value.indices], 0))

    def dense(self, value: tf.IndexedSlices) -> tf.Tensor:
        return _with_all_rows(value, self.output.shape[0])

    def finish(self, total: tuple[tf.Tensor, tf.Tensor]) -> tf.IndexedSlices:
        rows, indices = total
        shape = tf.constant(self.output.shape.as_list())
        return tf.IndexedSlices(rows, indices, shape)


@dataclass(frozen=True)
class _DenseRowSum(_DenseSum):
    """Sums an embedding's gradients as dense tensors.

    Unlike `_RowSum`, it counts no rows. On a GPU, the host would have to wait for their
    number after each micro-batch.
    """

    output: tf.IndexedSlices

    def dense(self, value: tf.IndexedSlices | tf.Tensor) -> tf.Tensor:
        if isinstance(value, tf.IndexedSlices):
            return _with_all_rows(value, self.output.shape[0])
        return value


@dataclass(frozen=True)
class _Concatenation:
    """Concatenates tensors that have the micro-batch's examples on axis 0."""

    output: tf.Tensor

    def start(self) -> tf.TensorArray:
        return tf.TensorArray(
            self.output.dtype,
            0,
            dynamic_size=True,
            infer_shape=False,
            element_shape=self.output.shape,
        )

    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([])

    def add(self, total: tf.TensorArray, value: tf.Tensor) -> tf.TensorArray:
        return total.write(total.size(), value)

    def finish(self, total: tf.TensorArray) -> tf.Tensor:
        return total.concat()


def _join_of(output: Any, dense_rows: bool) -> _DenseSum | _RowSum | _Concatenation:
    """Return the object that joins an output of the step over the micro-batches."""
    if isinstance(output, tf.IndexedSlices):
        size = math.prod(output.shape) * output.dtype.size
        if dense_rows and size <= MOST_DENSE_BYTES:
            return _DenseRowSum(output)
        return _RowSum(output)
    if output.shape.rank and output.shape[0] is None:
        return _Concatenation(output)
    return _DenseSum(output)


def _with_all_rows(slices: tf.IndexedSlices, count: int) -> tf.Tensor:
    """Return slices as a dense tensor, whose shape XLA knows when it compiles.

    `count` is the number of rows of that tensor.
    """
    return tf.math.unsorted_segment_sum(slices.values, slices.indices, count)


def rows_once(rows: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Add up the rows that share an index; return the rows and their indices."""
    unique, segments = tf.unique(indices)
    return tf.math.unsorted_segment_sum(rows, segments, tf.size(unique)), unique
