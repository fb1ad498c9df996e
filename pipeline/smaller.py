"""An update that does not fit into memory: the same one again, on the same batch, in micro-batches of half the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipeline.accumulation import Evaluation, Update
from pipeline.errors import OutOfMemoryError, cause, say

Step = Callable[[Any], tf.Tensor]  # an effective batch → the results of its update


class Smaller:
    """Lets an update be tried again as if it had not been begun.

    Args:
        update: tried.
        changed: the variables that a forward pass changes: moving statistics and the seeds of layers.
        spec: of an effective batch.
    """

    def __init__(self, update: Update, changed: Sequence[tf.Variable], spec: Any):
        self._update, self._spec = update, spec
        self._now = [update.applying, *changed]
        self._before = [_copy(variable) for variable in self._now]
        parts = tf.nest.flatten(spec, expand_composites=True)
        # Holds the batch from when it was read until its gradient is whole: an update that fails meanwhile has changed
        # nothing but what is kept, and one that fails with nothing in here has failed to read.
        self._batch = tf.queue.FIFOQueue(1, [part.dtype for part in parts])

    def begin(self, iterator: Any, step: Step) -> tf.Tensor:
        """Return what `step` gives for the next batch; call it inside a `tf.function`."""
        kept = [before.assign(now) for before, now in zip(self._before, self._now, strict=True)]
        with tf.control_dependencies(kept):
            batch = next(iterator)
            parts = [part for part in tf.nest.flatten(batch, expand_composites=True) if part is not None]
            held = self._batch.enqueue(parts)
        with tf.control_dependencies([held]):
            results = step(batch)
        with tf.control_dependencies([self._update.applying.read_value()]):
            self._batch.dequeue()
        return results

    def again(self, error: tf.errors.ResourceExhaustedError, number: int, step: Step) -> tf.Tensor:
        """Return what `step` gives for the batch of update `number`, which failed, in micro-batches that fit.

        Raises:
            ResourceExhaustedError: the one that is given, where it is of reading the batch.
            OutOfMemoryError: not even one example fits, or some of the update may be applied.
        """
        self._check(error, number)
        if int(self._batch.size()) == 0:
            raise error
        held = self._batch.dequeue()
        batch = tf.nest.pack_sequence_as(self._spec, held if isinstance(held, list) else [held], expand_composites=True)
        while True:
            halved(self._update, f"update {number}", error)
            for before, now in zip(self._before, self._now, strict=True):
                now.assign(before)
            try:
                return tf.function(step, autograph=False, input_signature=[self._spec])(batch)
            except tf.errors.ResourceExhaustedError as another:
                error = another
                self._check(error, number)

    def _check(self, error: tf.errors.ResourceExhaustedError, number: int) -> None:
        if int(self._before[0]) != int(self._now[0]):
            raise OutOfMemoryError(f"memory ran out while update {number} was applied: {cause(error)}") from error


def halved(what: Update | Evaluation, name: str, error: tf.errors.ResourceExhaustedError) -> int:
    """Halve the micro-batches of `what`, which is traced anew then, and say so; return their size.

    Raises:
        OutOfMemoryError: they are of one example.
    """
    size = what.micro_batch_size
    if size == 1:
        line = f"not even a micro-batch of one example fits into memory in {name}: {cause(error)}"
        raise OutOfMemoryError(line) from error
    what.micro_batch_size = -(-size // 2)
    say(f"{name} does not fit into memory: again, in micro-batches of {what.micro_batch_size} in place of {size}")
    return what.micro_batch_size


def _copy(variable: tf.Variable) -> tf.Variable:
    with tf.device(variable.device):
        return tf.Variable(variable, trainable=False)
