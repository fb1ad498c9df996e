"""An update that does not fit into memory: the same one again, on the same batch, in micro-batches of half the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from pipeline.accumulation import Evaluation, Update
from pipeline.errors import OutOfMemoryError, cause, say


class Smaller:
    """Lets an update be tried again as if it had not been begun.

    Args:
        update: tried.
        changed: the variables that a forward pass changes: moving statistics and the seeds of layers.
        batches: gives the batches that follow so many updates.
    """

    def __init__(self, update: Update, changed: Sequence[tf.Variable], batches: Callable[[int], tf.data.Dataset]):
        self.batches = batches
        self._update, self._now = update, [update.applying, *changed]
        self._before = [_copy(variable) for variable in self._now]
        self._begun = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._tried = 0

    def trying(self) -> None:
        """Call it before each try."""
        self._tried += 1

    def begin(self) -> list[tf.Tensor]:
        """Keep what an update may change; call it inside its `tf.function`.

        Returns:
            What all of the update, the reading of its batch too, must wait for: `tf.control_dependencies`.
        """
        kept = [before.assign(now) for before, now in zip(self._before, self._now, strict=True)]
        with tf.control_dependencies(kept):
            return [tf.identity(self._begun.assign_add(1))]

    def halve(self, error: tf.errors.ResourceExhaustedError, number: int) -> int:
        """Put back what the failed update `number` has changed, and halve its micro-batches; return their size.

        Raises:
            OutOfMemoryError: that is not enough, or some of the update may be applied.
        """
        begun = int(self._begun) == self._tried  # else it has changed nothing, and what was kept is of one before
        if begun and int(self._before[0]) != int(self._now[0]):
            raise OutOfMemoryError(f"memory ran out while update {number} was applied: {cause(error)}") from error
        size = halved(self._update, f"update {number}", error)
        if begun:
            for before, now in zip(self._before, self._now, strict=True):
                now.assign(before)
        self._begun.assign(self._tried)
        return size


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
