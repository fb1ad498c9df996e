"""The trainer's handle on its shipper: sends commands, and queues the answers."""

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
    """A running shipper.

    Args:
        opening: its first command.
    """

    def __init__(self, opening: dict[str, Any]):
        # -P: the shipper runs none of the user's code, so no file in their folder may shadow a module.
        # A session of its own: Ctrl-C in the terminal reaches the trainer alone, which then says how the run ended.
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
        with contextlib.suppress(OSError, ValueError):  # then the answer is an error
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer; None if there is none within `seconds`."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=max(0.0, seconds))
        return None

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Tell the shipper that no command follows."""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def wait(self) -> None:
        """Wait for the process to end after its last answer."""
        self._process.wait()

    def terminate(self) -> None:
        """End the process; kill it if it is stopped or does not end within 2 s."""
        self.close()
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        with contextlib.suppress(ValueError), self._process.stdout as answers:  # half a line, if it was killed
            for line in answers:
                self._answers.put(json.loads(line))
        self._answers.put({"error": "the shipper ended without an answer", "died": True})
