"""Heartbeats between workers: which one is lost, and which one the others wait for.

TensorFlow notices a worker that is killed or stopped, but not one that hangs. Its time limit for an all-reduce costs a
sleeping thread for each reduction of each update: thousands within seconds. So the workers tell each other how many
all-reduces they were ready for, by heartbeats; the lowest count names the straggler.
"""

import time
from collections.abc import Callable
from typing import Any

from pipeline.distributed.json_socket import JsonSocket, readable

INTERVAL = 2.0  # seconds between two heartbeats
SILENCE = (
    3 * INTERVAL
)  # seconds without a heartbeat, from a worker that hangs or is cut off
STARTUP_TIMEOUT = 600.0  # seconds for the first two all-reduces: a store may be slow, and TensorFlow compiles
TIMEOUT = 90.0  # seconds that a worker may keep the others waiting for its part of an all-reduce
LONGEST = 300  # characters of what another worker says

Count = Callable[
    [], Any
]  # returns the number of all-reduces that this process was ready for
Lost = Callable[
    [int, dict[str, Any]], None
]  # takes the index of a worker and its last message


class ReductionCounts:
    """The number of all-reduces that each of `workers` was ready for, and since when one of them is behind."""

    def __init__(self, workers: int):
        self._counts, self._since = [0] * workers, time.monotonic()

    def note(self, worker: int, count: int) -> None:
        if self._counts[worker] == count:
            return
        least, even = min(self._counts), min(self._counts) == max(self._counts)
        self._counts[worker] = count
        if (
            even or min(self._counts) > least
        ):  # the waiting begins, or the last worker has caught up
            self._since = time.monotonic()

    def straggler(self) -> int | None:
        """Return the worker that has kept the others waiting for too long; None if there is none."""
        least = min(self._counts)
        timeout = (
            STARTUP_TIMEOUT if least < 2 else TIMEOUT
        )  # an update may take two all-reduces
        waiting = least < max(self._counts) and time.monotonic() - self._since > timeout
        return self._counts.index(least) if waiting else None


def exchange_heartbeats(
    others: dict[int, JsonSocket],
    own: int,
    reductions: Count,
    lost: Lost,
    waits: Callable[[], bool] = lambda: True,
) -> None:
    """Tell all how far this process is, of index `own`; call `lost` for one that is gone or, if it `waits`, late."""
    counts, next_beat = ReductionCounts(max(own, *others) + 1), 0.0
    while others:
        ready = readable(
            [each.socket for each in others.values()],
            max(0.0, next_beat - time.monotonic()),
        )
        for index in [index for index, each in others.items() if each.socket in ready]:
            messages = others[index].received()
            for said in [{}] if messages is None else messages:
                match said:
                    case {"reductions": int(count)}:
                        counts.note(index, count)
                    case _:  # it says why it ends, or is gone
                        del others[index]
                        lost(
                            index,
                            {
                                key: str(said[key])[:LONGEST]
                                for key in ("refused", "failed")
                                if key in said
                            },
                        )
                        break
        if time.monotonic() >= next_beat:
            counts.note(own, count := int(reductions()))
            for each in others.values():
                each.write({"reductions": count})
            next_beat = time.monotonic() + INTERVAL
        late = counts.straggler() if waits() else None
        if late is not None and late in others:  # not `own`: then the others end
            others.pop(late).socket.close()
            lost(
                late,
                {
                    "failed": f"it has let the others wait for {TIMEOUT:.0f} s",
                    "late": True,
                },
            )
