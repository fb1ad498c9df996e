"""Heartbeats between workers, which detect lost workers and stragglers.

TensorFlow detects a worker that was killed or stopped, but not a worker that hangs. Its
time limit for all-reduces is not used, since it starts a sleeping thread per
all-reduce, which amounts to thousands of threads within seconds. Instead, each
heartbeat carries the number of all-reduces for which its sender was ready. The worker
with the lowest number is the straggler.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.distributed.json_socket import JsonSocket, readable

INTERVAL = 2.0  # seconds between two heartbeats
# Seconds without a heartbeat after which a worker counts as hanging or disconnected.
SILENCE = 3 * INTERVAL
# Seconds for which a worker may keep the others waiting for its first two all-reduces.
# A store may be slow, and TensorFlow compiles.
STARTUP_TIMEOUT = 600.0
TIMEOUT = 90.0  # seconds for which a worker may keep the others waiting later
LONGEST = 300  # maximum characters of a text from another worker


@dataclass(frozen=True)
class LostWorker:
    """A worker that no longer takes part in the run.

    Attributes:
        index: index of the worker; 0 is the chief.
        rejected: why the worker rejects its config or data, or None if it does not.
        failed: why the worker failed, or None if no reason is known.
        late: whether the worker has kept the others waiting for too long.
    """

    index: int
    rejected: str | None = None
    failed: str | None = None
    late: bool = False


# Returns the number of all-reduces for which this process was ready.
CountReductions = Callable[[], Any]
OnLost = Callable[[LostWorker], None]


class ReductionCounts:
    """Stores each worker's number of all-reduces, and since when a worker is behind."""

    def __init__(self, workers: int):
        self._counts = [0] * workers
        self._since = time.monotonic()

    def note(self, worker: int, count: int) -> None:
        """Record the number of all-reduces of a worker."""
        if self._counts[worker] == count:
            return
        least = min(self._counts)
        were_even = least == max(self._counts)
        self._counts[worker] = count
        # Restart the time when workers begin to wait, or when the slowest one advances.
        if were_even or min(self._counts) > least:
            self._since = time.monotonic()

    def straggler(self) -> int | None:
        """Return the worker that keeps the others waiting for too long, if any."""
        least = min(self._counts)
        if least == max(self._counts):
            return None
        if time.monotonic() - self._since <= self.timeout():
            return None
        return self._counts.index(least)

    def timeout(self) -> float:
        """Return the seconds for which the slowest worker may keep the others waiting."""
        # An update may take two all-reduces.
        return STARTUP_TIMEOUT if min(self._counts) < 2 else TIMEOUT


class Heartbeats:
    """Exchanges heartbeats with other workers until all of them are lost.

    Args:
        others: connections to the other workers, by index. Lost workers are removed
            from this dict.
        index: index of this worker.
        reductions: returns the number of all-reduces for which this process was ready.
        on_lost: called for a worker that has disconnected, reported an error, or is the
            straggler.
        waits: returns whether this process still takes part in all-reduces. If not,
            this process does not look for stragglers.
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
            messages = [{}]  # the worker has disconnected without a reason
        for message in messages:
            match message:
                case {"reductions": int(count)}:
                    self._counts.note(index, count)
                case _:  # the reason why the worker ends, or {}
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
        # If this process is the straggler, the other workers handle it.
        if straggler is None or straggler not in self._others:
            return
        self._others.pop(straggler).socket.close()
        failed = f"it has kept the others waiting for {self._counts.timeout():g} s"
        self._on_lost(LostWorker(straggler, failed=failed, late=True))


def _lost_worker(index: int, last_message: dict[str, Any]) -> LostWorker:
    """Return the `LostWorker` for a last message; reasons are cut to `LONGEST`."""
    rejected = None
    failed = None
    if "refused" in last_message:
        rejected = str(last_message["refused"])[:LONGEST]
    if "failed" in last_message:
        failed = str(last_message["failed"])[:LONGEST]
    return LostWorker(index, rejected, failed)
