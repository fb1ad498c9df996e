"""Contenders take turns: what the machine does to one of them it does to all.

A machine that is shared or that changes its clock drifts by a factor of two within a minute. So every round runs
each contender for a fraction of a second, and only what was measured in the same round is compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import tensorflow as tf


class Stopped(BaseException):
    """Raised in a body that is to end; no `except Exception` of Keras swallows it."""


class Coroutine:
    """Runs `body(pause)` in a thread of its own, from one call of `pause` to the next at each call of this object.

    So a loop that somebody else wrote, with its start and its tracing behind it, can be measured in turns. Handing
    over takes some ten microseconds.
    """

    def __init__(self, body: Callable[[Callable[[], None]], object]):
        self._body = body
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
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


def alternate(contenders: Mapping[str, Callable[[], object]], rounds: int, rest: float = 0.0) -> dict[str, list[float]]:
    """Seconds of every contender in every round; every other round runs them backwards.

    Args:
        rest: seconds before each turn, in which the threads of the one before it fall asleep.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders) if number % 2 == 0 else reversed(list(contenders)):
            tf.test.experimental.sync_devices()
            time.sleep(rest)
            begun = time.perf_counter()
            contenders[name]()
            tf.test.experimental.sync_devices()
            seconds[name].append(time.perf_counter() - begun)
    return seconds


def repeats(call: Callable[[], object], seconds: float) -> int:
    """How often to run `call` for a turn of at least `seconds`; the first call, which traces, does not count."""
    call()
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        call()
        tf.test.experimental.sync_devices()
        times.append(time.perf_counter() - begun)
    return max(1, -int(-seconds // min(times)))
