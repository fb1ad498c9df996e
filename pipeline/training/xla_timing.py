"""Times updates on one batch: the same update with XLA and without it.

    trace all ─► copy the state ─► [put the state back, one update] in turns ─► medians

Each update that runs here is the first update of the run, and has no lasting effect:
all variables that it uses, and the random states of Python and NumPy, are restored.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.accumulation import Update
from pipeline.common.errors import first_line

UNTIMED = 2  # updates of each way before the first timed one; the first is compiled
LEAST_ROUNDS = 5  # timed updates of each way, if they take less than `MOST_SECONDS`
LEAST_SECONDS = 1.0  # minimum total time of all timed updates
MOST_SECONDS = 30.0  # no round begins after this total time

Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """How long an update takes.

    Attributes:
        seconds: the median time of an update. None if the update fails, or if there is
            no other one left to compare it with.
        why: the first line of the error with which the update fails; "" if it runs.
    """

    seconds: float | None
    why: str

    @property
    def runs(self) -> bool:
        return not self.why


def time_updates(
    updates: Sequence[Update], batches: tf.data.Dataset, clock: Clock = time.monotonic
) -> list[Timing]:
    """Time each of `updates` on the first batch, in turns; return their timings.

    An update that fails, for example for lack of memory, is not timed any further.

    Args:
        updates: updates of the same model and optimizer.
        batches: the effective batches. Each update reads the first one with an iterator
            of its own.
        clock: returns the time in seconds.
    """
    first_batch = batches.take(1).cache().repeat()
    random_states = (random.getstate(), np.random.get_state())
    # Each way has its own iterator: an update that fails ends the reading of its batch.
    ways = [_Way(update, iter(first_batch)) for update in updates]
    for way in ways:
        way.trace()
    state = _State.copied(ways, *random_states)
    try:
        for _ in range(UNTIMED):
            _run_each(ways, state, clock)
        for way in ways:
            way.seconds.clear()
        while not _timed_enough(ways):
            _run_each(ways, state, clock)
            ways.reverse()  # a drift of the machine's speed favors neither
    finally:
        state.put_back()
    timing_by_update = {id(way.update): way.timing() for way in ways}
    return [timing_by_update[id(update)] for update in updates]


@dataclass(eq=False)
class _Way:
    """An update that is timed, its batches, its trace, and its times in seconds."""

    update: Update
    iterator: Any
    seconds: list[float] = field(default_factory=list)
    why: str = ""
    _program: Any = None

    def trace(self) -> None:
        """Trace the update without running it."""

        def next_update(iterator: Any) -> dict[str, tf.Tensor]:
            return self.update(next(iterator))

        function = tf.function(next_update, autograph=False)
        try:
            self._program = function.get_concrete_function(self.iterator)
        except Exception as error:  # The run reports the error if both ways fail.
            self.why = first_line(error)

    def variables(self) -> list[tf.Variable]:
        """Return all variables that the update uses."""
        if self._program is None:
            return []
        return list(self._program.variables)

    def run(self, clock: Clock) -> None:
        """Run the update, and keep its time."""
        began = clock()
        try:
            self._program(self.iterator)
            tf.test.experimental.sync_devices()
        except Exception as error:  # The run reports the error if both ways fail.
            self.why = first_line(error)
        else:
            self.seconds.append(clock() - began)

    def timing(self) -> Timing:
        if self.why or not self.seconds:
            return Timing(None, self.why)
        return Timing(statistics.median(self.seconds), "")


@dataclass(frozen=True)
class _State:
    """A copy, in host memory, of everything that an update changes."""

    variables: Sequence[tf.Variable]
    values: Sequence[np.ndarray]
    python_state: Any
    numpy_state: Any

    @classmethod
    def copied(
        cls, ways: Sequence[_Way], python_state: Any, numpy_state: Any
    ) -> "_State":
        variables: dict[int, tf.Variable] = {}
        for way in ways:
            for variable in way.variables():
                variables[id(variable)] = variable
        values = [variable.numpy() for variable in variables.values()]
        return cls(list(variables.values()), values, python_state, numpy_state)

    def put_back(self) -> None:
        for variable, value in zip(self.variables, self.values, strict=True):
            variable.assign(value)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)


def _run_each(ways: Sequence[_Way], state: _State, clock: Clock) -> None:
    """Run each update that has not failed yet, all from the same state."""
    for way in ways:
        if not way.why:
            state.put_back()
            tf.test.experimental.sync_devices()  # Do not time the copies to the device.
            way.run(clock)


def _timed_enough(ways: Sequence[_Way]) -> bool:
    if any(way.why for way in ways):
        return True
    total = sum(sum(way.seconds) for way in ways)
    rounds = min(len(way.seconds) for way in ways)
    if total >= MOST_SECONDS:
        return True
    return rounds >= LEAST_ROUNDS and total >= LEAST_SECONDS
