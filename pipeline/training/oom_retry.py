"""An update that does not fit into memory: the same one again, on the same batch, in micro-batches of half the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipeline.accumulation import Evaluation, Update
from pipeline.common.errors import OutOfMemoryError, cause, say

Step = Callable[[Any], tf.Tensor]  # an effective batch → the results of its update


class Smaller:
    """Lets an update be tried again as if it had not been begun.

    Args:
        update: tried.
        changed: the variables that a forward pass changes: moving statistics and the seeds of layers.
        spec: of an effective batch.
        tries: whether it is tried again; one of several workers cannot, as the others are in the middle of the update.
    """

    def __init__(self, update: Update, changed: Sequence[tf.Variable], spec: Any, tries: bool = True):
        self._update, self._spec, self._now, self._again = update, spec, changed, tries
        self._before = [_copy(variable) for variable in changed]
        # On its own, and only where there is something to keep: ordered by a control edge to the reading of the batch
        # it would let the host wait for a GPU at every update.
        self._keep = tf.function(self._kept, autograph=False) if changed else None
        self._applied, self._tries, self._failed = int(update.applying), 0, False
        parts = tf.nest.flatten(spec, expand_composites=True)
        with tf.device("CPU:0"):
            self._number = tf.Variable(0, dtype=tf.int64, trainable=False)
            # Holds the number of a try and its batch until the next one: a try that fails without being in here has
            # failed to read.
            self._batch = tf.queue.FIFOQueue(1, [tf.int64, *(part.dtype for part in parts)])
            self._nothing = [tf.zeros((), dtype) for dtype in self._batch.dtypes]
            self._batch.enqueue(self._nothing)

    def begin(self, iterator: Any, step: Step) -> tf.Tensor:
        """Return what `step` gives for the next batch; call it inside the `tf.function` that `tried` takes."""
        with tf.device("CPU:0"):
            number = self._number.assign_add(1)
            self._batch.dequeue()
            batch = next(iterator)
            parts = [part for part in tf.nest.flatten(batch, expand_composites=True) if part is not None]
            held = self._batch.enqueue([number, *parts])
        with tf.control_dependencies([held]):
            return step(batch)

    def tried(self, next_update: Callable[[Any], tf.Tensor], iterator: Any) -> tf.Tensor:
        """Return what the next update gives; `again` is for one that fails."""
        if self._keep is not None:
            self._keep()
        self._tries += 1
        self._failed = True
        results = next_update(iterator)
        self._applied += 1
        self._failed = False
        return results

    def again(self, error: tf.errors.ResourceExhaustedError, number: int, step: Step) -> tf.Tensor:
        """Return what `step` gives for the batch of update `number`, which failed, in micro-batches that fit.

        Raises:
            ResourceExhaustedError: the one that is given, where it is of reading the batch.
            OutOfMemoryError: not even one example fits, or some of the update may be applied.
        """
        self._check(error, number)
        if not self._again:
            line = (
                f"update {number} does not fit into memory, and one of several workers cannot try it in smaller pieces"
            )
            raise OutOfMemoryError(f"{line}: {cause(error)}") from error
        if int(self._batch.size()) == 0:
            raise error
        tried, *parts = self._batch.dequeue()
        if int(tried) != self._tries:
            raise error
        self._batch.enqueue(self._nothing)
        batch = tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True)
        while True:
            halved(self._update, f"update {number}", error)
            for before, now in zip(self._before, self._now, strict=True):
                now.assign(before)
            self._update.begun.assign(number - 1)
            try:
                results = tf.function(step, autograph=False, input_signature=[self._spec])(batch)
            except tf.errors.ResourceExhaustedError as another:
                error = another
                self._check(error, number)
            else:
                self._applied += 1
                return results

    def take_back(self) -> bool:
        """Undo what the update that has failed changed; return whether one has, and nothing of it was applied."""
        if not self._failed or int(self._update.applying) != self._applied:
            return False
        for before, now in zip(self._before, self._now, strict=True):
            now.assign(before)
        return True

    def _kept(self) -> None:
        for before, now in zip(self._before, self._now, strict=True):
            before.assign(now)

    def _check(self, error: tf.errors.ResourceExhaustedError, number: int) -> None:
        if int(self._update.applying) != self._applied:
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
        return tf.Variable(variable, trainable=False, shape=variable.shape)
