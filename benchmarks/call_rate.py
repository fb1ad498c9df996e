"""How often a function can be called, without importing any library of arrays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

ROUNDS = 5


def calls_per_second(
    call: Callable[[], Any], finish: Callable[[Any], object], seconds: float
) -> list[float]:
    """Return calls per second in each round of about `seconds`.

    `finish` gets the result of the last call of a round, and waits for it.
    """

    def turn(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            result = call()
        finish(result)
        return time.perf_counter() - begun

    turn(3)
    count = max(1, int(3 * seconds / turn(3)))
    return [count / turn(count) for _ in range(ROUNDS)]
