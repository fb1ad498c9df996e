"""Contenders take turns, so that changes of the machine affect all of them.

The speed of a machine that is shared or changes its clock drifts by a factor of two
within a minute. So every round runs each contender for a fraction of a second, and only
times of the same round are compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import tensorflow as tf

from benchmarks.processes import in_turns


class Stopped(BaseException):
    """Raised in a body to end it; not an `Exception`, which Keras might catch."""


class Coroutine:
    """Runs `body(pause)` in a thread; each call continues it until it calls `pause`.

    So the training loop of a library can be measured in turns, once it has started and
    traced. Switching threads takes some ten microseconds.
    """

    def __init__(self, body: Callable[[Callable[[], None]], object]):
        self._body = body
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __call__(self) -> None:
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._stopping = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join()

    def _pause(self) -> None:
        self._paused.release()
        self._go.acquire()
        if self._stopping:
            raise Stopped

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._stopping:
                self._body(self._pause)
                raise RuntimeError("the contender ended before its last turn")
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
            self._paused.release()


def alternate(
    contenders: Mapping[str, Callable[[], object]], rounds: int, rest: float = 0.0
) -> dict[str, list[float]]:
    """Return the seconds of every contender in every round; odd rounds are in reverse.

    Args:
        contenders: by name.
        rounds: how many.
        rest: seconds before each turn, for the threads of the previous contender to go
            to sleep.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _, name in in_turns(contenders, rounds):
        tf.test.experimental.sync_devices()
        time.sleep(rest)
        begun = time.perf_counter()
        contenders[name]()
        tf.test.experimental.sync_devices()
        seconds[name].append(time.perf_counter() - begun)
    return seconds


def alternate_repeated(
    calls: Mapping[str, Callable[[], object]], count: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of turns of `count` calls, see `alternate` and `repeated`."""
    turns = {name: repeated(call, count) for name, call in calls.items()}
    return alternate(turns, rounds)


def repeated(call: Callable[[], object], count: int) -> Callable[[], None]:
    """Return a turn of `count` calls, which ends when the last result has been read."""
    call()  # traces

    def turn() -> None:
        for _ in range(count):
            result = call()
        for value in tf.nest.flatten(result)[:1]:
            if value is not None:
                value.numpy()

    return turn


def seconds_of(call: Callable[[], object], count: int, rounds: int) -> list[float]:
    """Return the seconds of `count` calls in each round, without other contenders."""
    return alternate({"": repeated(call, count)}, rounds)[""]


def repeats(call: Callable[[], object], seconds: float) -> int:
    """Return how many calls take at least `seconds`.

    The first call, which traces, does not count.
    """
    call()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        call()
        tf.test.experimental.sync_devices()
        times.append(time.perf_counter() - begun)
    return max(1, -int(-seconds // min(times)))
