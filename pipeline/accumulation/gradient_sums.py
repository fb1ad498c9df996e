"""Sums over micro-batches, also of gradients: of weights in half precision in float32, of embeddings row by row.

An embedding's gradient is `tf.IndexedSlices`. Its sum has each looked-up row once: never more than the dense sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .batch import (
    Batches,
    Nest,
    to_dense,
    examples_in,
    of_first_replica,
    parts_of,
    reduce,
    slice_of,
    slice_specs,
)
from .loss_sums import LossSum, divide
from .moving_statistics import Moves

Gradients = tuple[
    Any, ...
]  # of each variable a tensor; `()` for one that the losses do not depend on


class GradientSums(NamedTuple):
    """The sums over one effective batch, or over one replica's share of it; an evaluation has the first three alone.

    A weight of zero divides by one: its sum is zero too, or the loss' reduction is `sum`, which divides by nothing.

    Attributes:
        losses: of each output that has a loss, by its name.
        added: Σₖ nₖ·Aₖ, scalar: the model's own losses on micro-batch k times its examples; of those that have one
            value per example, N·Σᵢ aᵢ, because Keras sums them over the batch.
        examples: Σₖ nₖ, scalar.
        gradient_sums: the gradient of each group of losses that are divided by one weight.
        weights: that weight, scalar, of each group; `()` where the losses were divided by it before.
        noise: what `noise_scale.estimate` takes of the micro-batches; empty where it is never measured.
        moves: by how much BatchNormalization would have moved its statistics; empty where it has moved them itself.
    """

    losses: dict[str, LossSum]
    added: tf.Tensor
    examples: tf.Tensor
    gradient_sums: tuple[Gradients, ...] = ()
    weights: tuple[Any, ...] = ()
    noise: tuple[tf.Tensor, ...] = ()
    moves: Moves = ()

    def with_losses(self, losses: dict[str, LossSum]) -> GradientSums:
        """Return the sums with losses that are known for the whole effective batch."""
        return self._replace(
            losses=losses,
            added=tf.cast(self.added, next(iter(losses.values())).total.dtype),
        )

    def mean_loss(self) -> tf.Tensor:
        """Return the loss that one large batch would have shown, scalar."""
        means = [divide(loss.scaled, loss.weight) for loss in self.losses.values()]
        return sum(means, divide(self.added, self.examples))

    def output_losses(self) -> dict[str, tf.Tensor]:
        """Return the loss of each of several outputs, as `<output>_loss`, before `loss_weights` scale it."""
        means = {
            f"{name}_loss": divide(loss.total, loss.weight)
            for name, loss in self.losses.items()
        }
        return means if len(means) > 1 else {}

    def results(
        self, measured: Mapping[str, keras.metrics.Metric]
    ) -> dict[str, tf.Tensor]:
        """Return the losses and the results of metrics by name, scalars."""
        losses = {"loss": self.mean_loss(), **self.output_losses()}
        return losses | {name: metric.result() for name, metric in measured.items()}

    def gradients(self) -> list[tf.Tensor | None]:
        """Return the gradients of one large batch, in the order and shapes of `model.trainable_variables`.

        Of an embedding `tf.IndexedSlices`, each row that was looked up once; None where no loss depends on a variable.
        """
        return means(self.gradient_sums, self.weights)

    def divided(self, weights: tuple[Any, ...]) -> GradientSums:
        """Return the sums with one gradient, that of all groups, each divided by its weight."""
        gradients = tuple(
            () if each is None else each for each in means(self.gradient_sums, weights)
        )
        return self._replace(gradient_sums=(gradients,), weights=((),))


def means(sums: Sequence[Gradients], weights: Sequence[Any]) -> list[tf.Tensor | None]:
    """Return Σ sum/weight for each variable, where `()` divides by nothing; None where no sum depends on it."""
    found: list[tf.Tensor | None] = []
    for of_variable in zip(*sums, strict=True):
        both = zip(of_variable, weights, strict=True)
        terms = [
            divide(value, weight)
            for value, weight in both
            if not isinstance(value, tuple)
        ]
        found.append(tf.add_n(terms) if len(terms) > 1 else next(iter(terms), None))
    return found


def gradients_by(
    tape: tf.GradientTape,
    target: tf.Tensor,
    times: Any,
    variables: Sequence[tf.Variable],
    outputs: Sequence[Any] = (),
) -> Gradients:
    """Return the gradient of `target` by each variable, in float32 at least, times a scalar unless it is `()`.

    To the target's is added that of a loss of the `outputs`, each of which comes with the loss' gradient by it.
    """
    targets = [target, *(output for output, _ in outputs)]
    by_target = [
        tf.ones_like(target),
        *(gradient for _, gradient in outputs),
    ]  # None would count for zero

    def scaled(gradient: tf.Tensor) -> tf.Tensor:
        gradient = (
            tf.cast(gradient, tf.float32)
            if gradient.dtype in (tf.float16, tf.bfloat16)
            else gradient
        )
        return (
            gradient
            if isinstance(times, tuple)
            else gradient * tf.cast(times, gradient.dtype)
        )

    def shaped(gradient: Any, variable: tf.Variable) -> Any:
        if gradient is None:
            return ()
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                scaled(gradient.values),
                gradient.indices,
                tf.constant(variable.shape.as_list()),
            )
        gradient.set_shape(
            variable.shape
        )  # not known where it was summed over an axis of unknown length
        return scaled(gradient)

    return tuple(
        map(
            shaped,
            tape.gradient(targets, variables, output_gradients=by_target),
            variables,
        )
    )


def empty_sum(output: Any) -> tuple[Any, Any]:
    """Return the sum of no micro-batches, and the shapes of a sum: of rows and their indices, or of a dense tensor."""
    if (
        isinstance(output, tf.Tensor) and output.shape.rank and output.shape[0] is None
    ):  # examples are concatenated
        rows = tf.TensorArray(
            output.dtype,
            0,
            dynamic_size=True,
            infer_shape=False,
            element_shape=output.shape,
        )
        return rows, tf.TensorShape([])
    if not isinstance(
        output, tf.IndexedSlices
    ):  # zeros of its size would take the memory of a second gradient
        rank = output.shape.rank
        return tf.zeros([1] * rank, output.dtype), tf.TensorShape([None] * rank)
    row = output.shape[1:]
    rows = tf.zeros([0, *row], output.dtype), tf.zeros([0], output.indices.dtype)
    return rows, (tf.TensorShape([None, *row]), tf.TensorShape([None]))


def add(total: Any, value: Any) -> Any:
    """Return a sum, as `empty_sum` began it, with one micro-batch more."""
    if isinstance(total, tf.TensorArray):
        return total.write(total.size(), value)
    if not isinstance(value, tf.IndexedSlices):
        return total + value
    rows, indices = total
    return rows_once(
        tf.concat([rows, value.values], 0), tf.concat([indices, value.indices], 0)
    )


def rows_once(rows: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return rows and their indices, the rows of one index added."""
    indices, places = tf.unique(indices)
    return tf.math.unsorted_segment_sum(rows, places, tf.size(indices)), indices


def over_replicas(
    strategy: tf.distribute.Strategy,
    sums: GradientSums,
    variables: Sequence[Any],
    ready: tf.Variable | None,
) -> GradientSums:
    """Return the sums over replicas, with the gradients on each of them; arguments as for `reduce`."""
    if strategy.num_replicas_in_sync == 1:
        return reduce(strategy, sums, ready)
    if tf.nest.flatten(
        sums.weights
    ):  # before the gradients, which each replica divides: they go over once
        sums = strategy.run(
            GradientSums.divided, (sums, reduce(strategy, sums.weights, ready))
        )
    sums = reduce(strategy, sums, ready)
    first = of_first_replica(strategy, sums)

    def gradient(of_each: Any, of_first: Any, variable: keras.Variable) -> Any:
        """Return the gradient on each replica, which applies it there, or rows that the first one has added."""
        if not isinstance(of_first, tf.IndexedSlices):
            return of_each
        rows, indices = rows_once(of_first.values, of_first.indices)
        rows = tf.ensure_shape(rows, [None, *variable.shape[1:]])
        return tf.IndexedSlices(rows, indices, tf.constant(list(variable.shape)))

    groups = zip(sums.gradient_sums, first.gradient_sums, strict=True)
    return first._replace(
        gradient_sums=tuple(tuple(map(gradient, *group, variables)) for group in groups)
    )


def as_output(output: Any, total: Any) -> Any:
    """Return a sum in the form of the outputs that were summed."""
    if isinstance(total, tf.TensorArray):
        return total.concat()
    if not isinstance(output, tf.IndexedSlices):
        return tf.broadcast_to(
            total, output.shape
        )  # for a share without an example: else it has that shape
    return tf.IndexedSlices(*total, tf.constant(output.shape.as_list()))


def sum_over_micro_batches(
    micro_step: Callable[..., Nest],
    batch: Nest,
    micro_batch_size: int,
    jit_compile: bool = False,
) -> Nest:
    """Sum `micro_step(start, x, y, sample_weight)`, tensors of known shapes, over the micro-batches of `batch`.

    Tensors with an unknown number of examples on axis 0 are concatenated. `start` is the position of a micro-batch's
    first example in `batch`, which stays on the host. While one micro-batch is computed, the next is copied to the
    device, which holds two of them; 32-bit integers stay on the host until they are used. The micro-batches of
    `Batches` end where its batches do.

    With `jit_compile` XLA compiles the step for whole micro-batches, and not for each size that a last one may have.
    """
    if micro_batch_size < 1:
        raise ValueError(
            f"micro_batch_size must be at least 1. Received: {micro_batch_size}"
        )
    parts = parts_of(batch)
    with tf.device("CPU:0"):  # a GPU asks for the shape of what it holds
        count = examples_in(parts)
        ends = (
            tf.concat([tf.cumsum(batch.sizes), [count]], 0)
            if isinstance(batch, Batches)
            else None
        )
        # TensorFlow holds what a loop captures on the device that its operation asks for: on a GPU if it asks for none.
        leaves = [
            tf.identity(leaf) for leaf in tf.nest.flatten(parts) if leaf is not None
        ]

    def on_leaves(start: tf.Tensor, *slices: tf.Tensor) -> Nest:
        left = iter(slices)
        return micro_step(
            start,
            *tf.nest.map_structure(
                lambda leaf: None if leaf is None else next(left), parts
            ),
        )

    # A function of its own, so that its outputs are known before the loop and XLA sees whole micro-batches.
    specs = slice_specs(leaves)
    if isinstance(batch, Batches):
        specs = [tf.TensorSpec(spec.shape, spec.dtype) for spec in specs]
    signature = [tf.TensorSpec([], tf.int32), *specs]
    step = tf.function(on_leaves, input_signature=signature, autograph=False)
    structure = step.get_concrete_function().structured_outputs
    outputs = tf.nest.flatten(structure)
    steps = [(step, count)]  # each with where it stops
    if (
        jit_compile
    ):  # around the function that was traced, so that nothing is traced twice
        compiled = tf.function(
            lambda *given: step(*given), signature, autograph=False, jit_compile=True
        )
        steps.insert(0, (compiled, count - count % micro_batch_size))

    def stop_of(start: tf.Tensor) -> tf.Tensor:
        if ends is None:
            return tf.minimum(start + micro_batch_size, count)
        with tf.device("CPU:0"):
            return tf.minimum(
                start + micro_batch_size,
                ends[tf.searchsorted(ends[:-1], [start], "right")[0]],
            )

    def on_device(start: tf.Tensor) -> list[Any]:
        with tf.device("CPU:0"):
            micro_batch = slice_of(leaves, start, stop_of(start))
            if isinstance(batch, Batches):
                pairs = zip(micro_batch, specs, strict=True)
                micro_batch = [
                    tf.ensure_shape(to_dense(leaf), spec.shape) for leaf, spec in pairs
                ]
        return [
            tf.identity(leaf) for leaf in micro_batch
        ]  # outside of the block: on the device that computes

    def body(
        run: Any, start: tf.Tensor, now: list[Any], sums: list[Any]
    ) -> tuple[tf.Tensor, list[Any], list[Any]]:
        stop = stop_of(start)
        ahead, made = on_device(stop), tf.nest.flatten(run(start, *now))
        return (
            stop,
            ahead,
            [add(total, value) for total, value in zip(sums, made, strict=True)],
        )

    zeros, shapes = zip(*map(empty_sum, outputs), strict=True)
    state: Any = (tf.constant(0), on_device(tf.constant(0)), list(zeros))
    for run, end in steps:
        state = tf.while_loop(
            lambda start, *_, end=end: start < end,
            partial(body, run),
            state,
            shape_invariants=(tf.TensorShape([]), specs, list(shapes)),
            parallel_iterations=1,  # two at once were faster on a CPU, and held up to 1.7 times the activations
        )
    *_, sums = state
    return tf.nest.pack_sequence_as(
        structure, [as_output(*each) for each in zip(outputs, sums, strict=True)]
    )
