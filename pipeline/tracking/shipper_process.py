"""The trainer's handle of its shipper: commands to it, and its answers as they come."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from typing import Any

from pipeline.common import imports


class ShipperProcess:
    """The process, and its answers as they come."""

    def __init__(self, opening: dict[str, Any]):
        # -P: a file of the user's folder with a module's name is not for the shipper, which runs none of their code.
        # A session of its own: Ctrl-C in the terminal is the trainer's, which then says how the run ended.
        self._process: Any = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.tracking.shipper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": imports.path_of_processes()},
            text=True,
            start_new_session=True,
        )
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.send(opening)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def send(self, command: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the answer, which is then an error, says so
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer; None where there is none within `seconds`."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=max(0.0, seconds))
        return None

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Tell the shipper that nothing follows."""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def wait(self) -> None:
        """Wait for the process, which has answered for the last time."""
        self._process.wait()

    def terminate(self) -> None:
        """End the process; kill it where it does not end, stopped or hanging."""
        self.close()
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        with contextlib.suppress(ValueError), self._process.stdout as answers:  # half a line of one that was killed
            for line in answers:
                self._answers.put(json.loads(line))
        self._answers.put({"error": "the shipper ended without an answer", "died": True})
