"""Heartbeats between workers: which one is lost, and for which one the others wait.

TensorFlow notices a worker that is killed or stopped, but not one that hangs. Its time
limit for an all-reduce costs a sleeping thread for each reduction of each update, which
is thousands within seconds. So the workers tell each other by heartbeats for how many
all-reduces they were ready. The lowest count names the straggler.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.distributed.json_socket import JsonSocket, readable

INTERVAL = 2.0  # seconds between two heartbeats
# Seconds without a heartbeat, from a worker that hangs or is cut off.
SILENCE = 3 * INTERVAL
# Seconds for the first two all-reduces: a store may be slow, and TensorFlow compiles.
STARTUP_TIMEOUT = 600.0
TIMEOUT = 90.0  # seconds for which a worker may keep the others waiting
LONGEST = 300  # characters of another worker's text


@dataclass(frozen=True)
class LostWorker:
    """A worker that no longer takes part in the run.

    Attributes:
        index: index of the worker; 0 is the chief.
        rejected: why it rejects its config or data; None if it does not.
        failed: why it fails; None if it gave no reason.
        late: whether it has kept the others waiting for too long.
    """

    index: int
    rejected: str | None = None
    failed: str | None = None
    late: bool = False


# Returns the number of all-reduces for which this process was ready.
CountReductions = Callable[[], Any]
OnLost = Callable[[LostWorker], None]


class ReductionCounts:
    """Tracks each worker's count of all-reduces, and since when one is behind."""

    def __init__(self, workers: int):
        self._counts = [0] * workers
        self._since = time.monotonic()

    def note(self, worker: int, count: int) -> None:
        """Record the count of a worker."""
        if self._counts[worker] == count:
            return
        least = min(self._counts)
        were_even = least == max(self._counts)
        self._counts[worker] = count
        # The waiting begins, or the last worker has caught up.
        if were_even or min(self._counts) > least:
            self._since = time.monotonic()

    def straggler(self) -> int | None:
        """Return the worker that has kept the others waiting for too long, if any."""
        least = min(self._counts)
        if least == max(self._counts):
            return None
        # An update may take two all-reduces.
        timeout = STARTUP_TIMEOUT if least < 2 else TIMEOUT
        if time.monotonic() - self._since <= timeout:
            return None
        return self._counts.index(least)


class Heartbeats:
    """Exchanges heartbeats with other workers until all of them are lost.

    Args:
        others: connections to the other workers, by index. A lost one is removed.
        index: index of this worker.
        reductions: returns the number of all-reduces for which this process was ready.
        on_lost: called for a worker that is gone, or late if this process `waits`.
        waits: returns whether this process still takes part in all-reduces.
    """

    def __init__(
        self,
        others: dict[int, JsonSocket],
        index: int,
        reductions: CountReductions,
        on_lost: OnLost,
        waits: Callable[[], bool] = lambda: True,
    ):
        self._others = others
        self._index = index
        self._reductions = reductions
        self._on_lost = on_lost
        self._waits = waits
        self._counts = ReductionCounts(max(index, *others) + 1)

    def exchange(self) -> None:
        """Send and read heartbeats until all other workers are lost."""
        next_beat = 0.0
        while self._others:
            self._read(until=next_beat)
            if time.monotonic() >= next_beat:
                self._send()
                next_beat = time.monotonic() + INTERVAL
            self._check_straggler()

    def _read(self, until: float) -> None:
        sockets = [other.socket for other in self._others.values()]
        ready = readable(sockets, max(0.0, until - time.monotonic()))
        for index, other in list(self._others.items()):
            if other.socket in ready:
                self._read_worker(index, other)

    def _read_worker(self, index: int, other: JsonSocket) -> None:
        messages = other.received()
        if messages is None:
            messages = [{}]  # it is gone without a reason
        for message in messages:
            match message:
                case {"reductions": int(count)}:
                    self._counts.note(index, count)
                case _:  # it tells why it ends, or is gone
                    del self._others[index]
                    self._on_lost(_lost_worker(index, message))
                    return

    def _send(self) -> None:
        count = int(self._reductions())
        self._counts.note(self._index, count)
        for other in self._others.values():
            other.write({"reductions": count})

    def _check_straggler(self) -> None:
        if not self._waits():
            return
        straggler = self._counts.straggler()
        # If it is this process, the others end it.
        if straggler is None or straggler not in self._others:
            return
        self._others.pop(straggler).socket.close()
        failed = f"it has let the others wait for {TIMEOUT:.0f} s"
        self._on_lost(LostWorker(straggler, failed=failed, late=True))


def _lost_worker(index: int, last_message: dict[str, Any]) -> LostWorker:
    """Return the worker that is lost after its last message, with its texts cut."""
    rejected = None
    failed = None
    if "refused" in last_message:
        rejected = str(last_message["refused"])[:LONGEST]
    if "failed" in last_message:
        failed = str(last_message["failed"])[:LONGEST]
    return LostWorker(index, rejected, failed)
