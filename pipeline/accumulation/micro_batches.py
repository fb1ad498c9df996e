"""The loop over the micro-batches of a batch, which sums the results of a step.

The sum of an embedding's gradients, which are `tf.IndexedSlices`, has each looked-up
row once, so it is never larger than the dense sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from .batch import (
    Batches,
    Nest,
    examples_in,
    parts_of,
    slice_of,
    slice_specs,
    to_dense,
)


def sum_over_micro_batches(
    micro_step: Callable[..., Nest],
    batch: Nest | Batches,
    micro_batch_size: int,
    jit_compile: bool = False,
) -> Nest:
    """Sum `micro_step(start, x, y, sample_weight)` over the micro-batches of `batch`.

    Args:
        micro_step: `start` is the position of the micro-batch's first example in
            `batch`. Its results are tensors of known shapes, which are summed. Those
            with an unknown number of examples on axis 0 are concatenated.
        batch: it stays on the host. While one micro-batch is computed, the next is
            copied to the device, which holds two of them; 32-bit integers stay on the
            host until they are used. The micro-batches of `Batches` end where its
            batches do.
        micro_batch_size: examples of a micro-batch; the last one may be smaller.
        jit_compile: whether XLA compiles the step for full micro-batches. It compiles
            nothing for the sizes that a last one may have.

    Raises:
        ValueError: the micro-batch size is not positive.
    """
    if micro_batch_size < 1:
        rule = "micro_batch_size must be at least 1"
        raise ValueError(f"{rule}. Received: {micro_batch_size}")
    cut = _Cut(batch, micro_batch_size)

    # A function of its own, so that its outputs are known before the loop and XLA sees
    # full micro-batches.
    def on_leaves(start: tf.Tensor, *slices: tf.Tensor) -> Nest:
        return micro_step(start, *cut.packed(slices))

    signature = [tf.TensorSpec([], tf.int32), *cut.specs]
    step = tf.function(on_leaves, input_signature=signature, autograph=False)
    structure = step.get_concrete_function().structured_outputs
    outputs = tf.nest.flatten(structure)

    loops = [(step, cut.examples)]  # each step with where its loop ends
    if jit_compile:
        # Around the function that was traced, so that nothing is traced twice.
        compiled = tf.function(
            lambda *arguments: step(*arguments),
            signature,
            autograph=False,
            jit_compile=True,
        )
        loops.insert(0, (compiled, cut.examples - cut.examples % micro_batch_size))

    def body(
        step: Callable[..., Nest], start: tf.Tensor, micro_batch: Nest, sums: Nest
    ) -> tuple[tf.Tensor, Nest, Nest]:
        stop = cut.stop(start)
        next_micro_batch = cut.on_device(stop)
        results = tf.nest.flatten(step(start, *micro_batch))
        pairs = zip(sums, results, strict=True)
        return stop, next_micro_batch, [_add(total, value) for total, value in pairs]

    zeros = [_empty_sum(output) for output in outputs]
    shapes = [_shape_of_sum(output) for output in outputs]
    state: Any = (tf.constant(0), cut.on_device(tf.constant(0)), zeros)
    for step_of_loop, end in loops:
        state = tf.while_loop(
            lambda start, *_, end=end: start < end,
            partial(body, step_of_loop),
            state,
            shape_invariants=(tf.TensorShape([]), cut.specs, shapes),
            # Two at once were faster on a CPU, and held up to 1.7 times the
            # activations.
            parallel_iterations=1,
        )
    *_, sums = state

    pairs = zip(outputs, sums, strict=True)
    totals = [_as_output(output, total) for output, total in pairs]
    return tf.nest.pack_sequence_as(structure, totals)


class _Cut:
    """The micro-batches of a batch, which stays on the host."""

    def __init__(self, batch: Nest | Batches, micro_batch_size: int):
        self._micro_batch_size = micro_batch_size
        self._parts = parts_of(batch)
        self._ends = None  # of the batches of `Batches`
        # On the host: a GPU would have to be asked for the shape of what it holds.
        with tf.device("CPU:0"):
            self.examples = examples_in(self._parts)
            if isinstance(batch, Batches):
                self._ends = tf.concat([tf.cumsum(batch.sizes), [self.examples]], 0)
            # TensorFlow holds what a loop captures on the device that its operation
            # asks for: on a GPU if it asks for none.
            leaves = tf.nest.flatten(self._parts)
            self._leaves = [tf.identity(leaf) for leaf in leaves if leaf is not None]
        self.specs = slice_specs(self._leaves)
        if isinstance(batch, Batches):
            self.specs = [tf.TensorSpec(spec.shape, spec.dtype) for spec in self.specs]

    def packed(self, slices: Sequence[tf.Tensor]) -> Nest:
        """Return `(x, y, sample_weight)` of a micro-batch, made of its leaves."""
        remaining = iter(slices)

        def leaf_of_slice(leaf: Any) -> Any:
            return None if leaf is None else next(remaining)

        return tf.nest.map_structure(leaf_of_slice, self._parts)

    def stop(self, start: tf.Tensor) -> tf.Tensor:
        """Return where the micro-batch that begins at `start` ends."""
        if self._ends is None:
            return tf.minimum(start + self._micro_batch_size, self.examples)
        with tf.device("CPU:0"):
            stop = start + self._micro_batch_size
            index = tf.searchsorted(self._ends[:-1], [start], "right")[0]
            return tf.minimum(stop, self._ends[index])

    def on_device(self, start: tf.Tensor) -> list[Any]:
        """Return the leaves of the micro-batch that begins at `start`."""
        with tf.device("CPU:0"):
            slices = slice_of(self._leaves, start, self.stop(start))
            if self._ends is not None:
                pairs = zip(slices, self.specs, strict=True)
                slices = [
                    tf.ensure_shape(to_dense(leaf), spec.shape) for leaf, spec in pairs
                ]
        # Outside of the block: on the device that computes.
        return [tf.identity(leaf) for leaf in slices]


def _is_concatenated(output: Any) -> bool:
    """Return whether an output has an unknown number of examples on axis 0."""
    if not isinstance(output, tf.Tensor):
        return False
    return bool(output.shape.rank) and output.shape[0] is None


def _empty_sum(output: Any) -> Any:
    """Return the sum of no micro-batches, in the form that the loop carries.

    It is a `tf.TensorArray` of rows to be concatenated, the rows of `tf.IndexedSlices`
    and their indices, or a dense tensor. Dense zeros of the output's size would take
    the memory of a second gradient, so they have one element.
    """
    if _is_concatenated(output):
        return tf.TensorArray(
            output.dtype,
            0,
            dynamic_size=True,
            infer_shape=False,
            element_shape=output.shape,
        )
    if isinstance(output, tf.IndexedSlices):
        rows = tf.zeros([0, *output.shape[1:]], output.dtype)
        return rows, tf.zeros([0], output.indices.dtype)
    return tf.zeros([1] * output.shape.rank, output.dtype)


def _shape_of_sum(output: Any) -> Any:
    """Return the shapes that a sum, as `_empty_sum` began it, has in any iteration."""
    if _is_concatenated(output):
        return tf.TensorShape([])
    if isinstance(output, tf.IndexedSlices):
        return tf.TensorShape([None, *output.shape[1:]]), tf.TensorShape([None])
    return tf.TensorShape([None] * output.shape.rank)


def _add(total: Any, value: Any) -> Any:
    """Return a sum, as `_empty_sum` began it, with one more micro-batch's value."""
    if isinstance(total, tf.TensorArray):
        return total.write(total.size(), value)
    if isinstance(value, tf.IndexedSlices):
        rows, indices = total
        all_rows = tf.concat([rows, value.values], 0)
        return rows_once(all_rows, tf.concat([indices, value.indices], 0))
    return total + value


def _as_output(output: Any, total: Any) -> Any:
    """Return a sum in the form of the outputs that were summed."""
    if isinstance(total, tf.TensorArray):
        return total.concat()
    if isinstance(output, tf.IndexedSlices):
        return tf.IndexedSlices(*total, tf.constant(output.shape.as_list()))
    # It has the output's shape already, but in a share without examples.
    return tf.broadcast_to(total, output.shape)


def rows_once(rows: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return rows and their indices, the rows of one index added."""
    indices, places = tf.unique(indices)
    return tf.math.unsorted_segment_sum(rows, places, tf.size(indices)), indices
