"""Runs an update that does not fit into memory again, on the same batch, in micro-batches of half the size."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from pipeline.accumulation import Evaluation, Update
from pipeline.common.errors import OutOfMemoryError, cause, say

Step = Callable[[Any], tf.Tensor]  # an effective batch → the results of its update


class OomRetry:
    """Runs updates so that one which does not fit into memory can be run again as if it had not begun.

    `changed` are the variables that a forward pass changes: moving statistics and seeds; `spec` is of an effective
    batch. One of several workers does not `retry`: the others are in the middle of the update.
    """

    def __init__(
        self,
        update: Update,
        changed: Sequence[tf.Variable],
        spec: Any,
        retry: bool = True,
    ):
        self._update, self._spec, self._changed, self._retry = (
            update,
            spec,
            changed,
            retry,
        )
        self._copies: list[tf.Variable] = []
        for variable in changed:
            with tf.device(variable.device):
                self._copies.append(
                    tf.Variable(variable, trainable=False, shape=variable.shape)
                )
        # A function of its own, and only run if there is something to copy: a control edge from the copies to the
        # reading of the batch would make the host wait for a GPU at every update.
        self._copy_changed = tf.function(
            lambda: assign_all(self._copies, changed), autograph=False
        )
        self._before, self._runs, self._done = int(update.applying), 0, 0
        parts = tf.nest.flatten(spec, expand_composites=True)
        with tf.device("CPU:0"):
            self._run_number = tf.Variable(0, dtype=tf.int64, trainable=False)
            # Holds the number of a run and its batch until the next run. If a run fails and its number is not in here,
            # it failed to read its batch.
            self._held = tf.queue.FIFOQueue(
                1, [tf.int64, *(part.dtype for part in parts)]
            )
            self._nothing = [tf.zeros((), dtype) for dtype in self._held.dtypes]
            self._held.enqueue(self._nothing)

    def hold_batch(self, iterator: Any, step: Step) -> tf.Tensor:
        """Read the next batch, hold it for a retry, and return what `step` gives; inside of what `run` is given."""
        with tf.device("CPU:0"):
            number = self._run_number.assign_add(1)
            self._held.dequeue()
            batch = next(iterator)
            parts = [
                part
                for part in tf.nest.flatten(batch, expand_composites=True)
                if part is not None
            ]
            held = self._held.enqueue([number, *parts])
        with tf.control_dependencies([held]):
            return step(batch)

    def run(self, next_update: Callable[[Any], tf.Tensor], iterator: Any) -> tf.Tensor:
        """Return the results of the next update. If it raises ResourceExhaustedError, `retry_halved` may help."""
        if self._changed:
            self._copy_changed()
        self._runs += 1
        results = next_update(iterator)
        self._done += 1
        return results

    def retry_halved(
        self, error: tf.errors.ResourceExhaustedError, number: int, step: Step
    ) -> tf.Tensor:
        """Return what `step` gives for the batch of update `number`, which failed, in micro-batches that fit.

        Raise `error` if the batch could not be read; an OutOfMemoryError if not even one example fits, or some of the
        update may be applied.
        """
        self._check_not_applied(error, number)
        if not self._retry:
            line = f"update {number} does not fit into memory, and one of several workers cannot try it in smaller"
            raise OutOfMemoryError(f"{line} pieces: {cause(error)}") from error
        of_run, *parts = self._held.dequeue() if int(self._held.size()) else [0]
        if int(of_run) != self._runs:
            raise error
        self._held.enqueue(self._nothing)
        batch = tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True)
        while True:
            halve(self._update, f"update {number}", error)
            assign_all(self._changed, self._copies)
            self._update.begun.assign(number - 1)
            try:
                results = tf.function(
                    step, autograph=False, input_signature=[self._spec]
                )(batch)
            except tf.errors.ResourceExhaustedError as next_error:
                error = next_error
                self._check_not_applied(error, number)
            else:
                self._done += 1
                return results

    def rollback(self) -> bool:
        """Undo what an update that failed has changed; return False if none failed, or some of it may be applied."""
        if self._runs == self._done or self._may_be_applied():
            return False
        assign_all(self._changed, self._copies)
        return True

    def _may_be_applied(self) -> bool:
        return int(self._update.applying) != self._before + self._done

    def _check_not_applied(
        self, error: tf.errors.ResourceExhaustedError, number: int
    ) -> None:
        if self._may_be_applied():
            raise OutOfMemoryError(
                f"memory ran out while update {number} was applied: {cause(error)}"
            ) from error


def halve(
    what: Update | Evaluation, name: str, error: tf.errors.ResourceExhaustedError
) -> int:
    """Halve the micro-batches of `what`, and say so; return their size. What traced it has to trace it anew."""
    size = what.micro_batch_size
    if size == 1:
        line = f"not even a micro-batch of one example fits into memory in {name}: {cause(error)}"
        raise OutOfMemoryError(line) from error
    what.micro_batch_size = -(-size // 2)
    say(
        f"{name} does not fit into memory: again, in micro-batches of {what.micro_batch_size} in place of {size}"
    )
    return what.micro_batch_size


def assign_all(variables: Iterable[tf.Variable], values: Iterable[Any]) -> None:
    """Assign to each variable its value."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
