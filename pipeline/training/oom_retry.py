"""Repeats an update that does not fit into memory, in micro-batches of half the size.

The repeated update uses the same batch, random seeds and moving statistics, as if the
failed attempt had not happened.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from pipeline.accumulation import Evaluation, Update
from pipeline.common.errors import OutOfMemoryError, first_line, say

# Applies an effective batch; returns the results of the update.
Step = Callable[[Any], tf.Tensor]


class OomRetry:
    """Runs updates; can undo a failed update, or repeat it in smaller micro-batches.

    Args:
        update: the update to run.
        changed: variables that a forward pass changes: moving statistics and seeds.
        spec: a nest with the `tf.TypeSpec` of each tensor in an effective batch.
        retry: whether to repeat updates. It has to be False with several workers, since
            the other workers are still in the middle of the failed update.
    """

    def __init__(
        self,
        update: Update,
        changed: Sequence[tf.Variable],
        spec: Any,
        retry: bool = True,
    ):
        self._update = update
        self._changed = changed
        self._spec = spec
        self._retry = retry

        self._copies: list[tf.Variable] = []
        for variable in changed:
            with tf.device(variable.device):
                copy = tf.Variable(variable, trainable=False, shape=variable.shape)
                self._copies.append(copy)
        # Copy in a separate function instead of in the update: a control edge from the
        # copies to the reading of the batch would make the host wait for the GPU at
        # every update.
        self._copy_changed = tf.function(
            lambda: assign_all(self._copies, changed), autograph=False
        )

        # The values of the update's counters before the last run: a failed update may
        # have advanced the counters.
        self._counts: list[tf.Tensor] = []
        self._applying_before = int(update.applying)
        self._runs = 0
        self._completed_runs = 0

        # The queue holds the number of a run of the update, and the run's batch. If a
        # run fails and the queue is empty or holds another number, the run failed while
        # reading its batch.
        parts = tf.nest.flatten(spec, expand_composites=True)
        with tf.device("CPU:0"):
            self._run_number = tf.Variable(0, dtype=tf.int64, trainable=False)
            dtypes = [tf.int64, *(part.dtype for part in parts)]
            self._batch_queue = tf.queue.FIFOQueue(1, dtypes)
            self._no_batch = [tf.zeros((), dtype) for dtype in dtypes]
            self._batch_queue.enqueue(self._no_batch)

    def hold_batch(self, iterator: Any, step: Step) -> tf.Tensor:
        """Read the next batch, keep it for a retry, and return the results of `step`.

        Call it inside the function that is passed to `run`.
        """
        with tf.device("CPU:0"):
            number = self._run_number.assign_add(1)
            self._batch_queue.dequeue()
            batch = next(iterator)
            leaves = tf.nest.flatten(batch, expand_composites=True)
            parts = [leaf for leaf in leaves if leaf is not None]
            enqueued = self._batch_queue.enqueue([number, *parts])
        with tf.control_dependencies([enqueued]):
            return step(batch)

    def run(self, next_update: Callable[[Any], tf.Tensor], iterator: Any) -> tf.Tensor:
        """Return the results of the next update.

        Raises:
            tf.errors.ResourceExhaustedError: the update does not fit into memory;
                `retry_halved` may help.
        """
        if self._changed:
            self._copy_changed()
        self._counts = [counter.read_value() for counter in self._update.counters]
        self._runs += 1
        results = next_update(iterator)
        self._completed_runs += 1
        return results

    def retry_halved(
        self, error: tf.errors.ResourceExhaustedError, number: int, step: Step
    ) -> tf.Tensor:
        """Repeat an update that failed, in micro-batches that fit; return its results.

        Args:
            error: the error that the update raised.
            number: the update's number, counted from 1.
            step: applies the batch of the update.

        Raises:
            tf.errors.ResourceExhaustedError: the batch could not be read.
            OutOfMemoryError: not even one example fits, the update may have been
                applied in part, or updates are not to be repeated.
        """
        self._check_not_applied(error, number)
        if not self._retry:
            raise OutOfMemoryError(
                f"update {number} does not fit into memory, and with several workers "
                f"it is not retried in smaller pieces: {first_line(error)}"
            ) from error
        batch = self._batch_of_last_run(error)
        while True:
            halve(self._update, f"update {number}", error)
            self._put_back()
            self._update.begun.assign(number - 1)
            # Trace again: the micro-batch size is a constant in a trace.
            traced_anew = tf.function(
                step, autograph=False, input_signature=[self._spec]
            )
            try:
                results = traced_anew(batch)
            except tf.errors.ResourceExhaustedError as next_error:
                error = next_error
                self._check_not_applied(error, number)
            else:
                self._completed_runs += 1
                return results

    def rollback(self) -> bool:
        """Undo the changes of a failed update; return whether this was possible.

        It is not possible if no update has failed, or if the failed update may have
        been applied in part.
        """
        if self._runs == self._completed_runs or self._may_be_applied():
            return False
        self._put_back()
        return True

    def _put_back(self) -> None:
        """Undo the changes of a failed update."""
        assign_all(self._changed, self._copies)
        assign_all(self._update.counters, self._counts)

    def _batch_of_last_run(self, error: tf.errors.ResourceExhaustedError) -> Any:
        """Return the batch of the run that failed; raise `error` if it was not read."""
        if int(self._batch_queue.size()) == 0:
            raise error
        number, *parts = self._batch_queue.dequeue()
        if int(number) != self._runs:
            raise error
        self._batch_queue.enqueue(self._no_batch)
        return tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True)

    def _may_be_applied(self) -> bool:
        expected = self._applying_before + self._completed_runs
        return int(self._update.applying) != expected

    def _check_not_applied(
        self, error: tf.errors.ResourceExhaustedError, number: int
    ) -> None:
        if self._may_be_applied():
            raise OutOfMemoryError(
                f"memory ran out while update {number} was applied, so it is not "
                "repeated; try a smaller accumulation.micro_batch_size: "
                f"{first_line(error)}"
            ) from error


def halve(
    step: Update | Evaluation, name: str, error: tf.errors.ResourceExhaustedError
) -> int:
    """Halve the micro-batches of an update or an evaluation, and print a message.

    Functions that have traced `step` must be traced again.

    Args:
        step: the update or the evaluation.
        name: name of the step in messages.
        error: the error that showed a lack of memory.

    Returns:
        The new limit of a micro-batch: in tokens if `step` cuts by tokens, or in
        examples.

    Raises:
        OutOfMemoryError: the micro-batches have only one example.
    """
    limit = limit_of(step)
    tokens = step.token_limit
    smallest = 1  # each example is a micro-batch of its own
    if tokens is not None:
        smallest = tokens.pad_multiple
    if limit <= smallest:
        raise OutOfMemoryError(
            "not even a micro-batch of one example fits into memory in "
            f"{name}: {first_line(error)}"
        ) from error
    half = -(-limit // 2)  # rounded up
    unit = ""
    if tokens is None:
        step.micro_batch_size = half
    else:
        step.token_limit = replace(tokens, tokens=half)
        unit = " tokens"
    say(
        f"{name} does not fit into memory: retrying with micro-batches of {half}{unit} "
        f"instead of {limit}"
    )
    return half


def limit_of(step: Update | Evaluation) -> int:
    """Return the limit of a micro-batch: in tokens if `step` cuts so, or in examples."""
    if step.token_limit is not None:
        return step.token_limit.tokens
    return int(step.micro_batch_size)


def assign_all(variables: Iterable[tf.Variable], values: Iterable[Any]) -> None:
    """Assign each value to the variable at the same position."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
