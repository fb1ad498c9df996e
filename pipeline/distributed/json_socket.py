"""Connections between processes over which one line of JSON is one message; whoever is there may speak."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LONGEST = 2**24  # bytes of a message


class Line:
    """A connection over which a message is a line."""

    said: Mapping[str, Any] = {}

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._rest = b""

    def write(self, message: Mapping[str, Any]) -> None:
        try:
            self.socket.settimeout(5.0)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # it is gone, or half a line is
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def read(self, until: float) -> dict[str, Any] | None:
        """Return the next message; None where the other side is gone, or speaks of something else, or is late."""
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not self._more(None if left == float("inf") else left):
                return None
        text, _, self._rest = self._rest.partition(b"\n")
        return _parsed(text)

    def received(self, seconds: float = 0.0) -> list[dict[str, Any]] | None:
        """Return what has come within `seconds`; None where the other side is gone, or speaks of something else."""
        if b"\n" not in self._rest and readable({0: self}, seconds) and not self._more(1.0):
            return None
        *texts, self._rest = self._rest.split(b"\n")
        messages = [_parsed(text) for text in texts]
        return None if None in messages else [message for message in messages if message is not None]

    def _more(self, seconds: float | None) -> bool:
        """Receive more; return whether there was any, and it may still be a message."""
        try:
            self.socket.settimeout(seconds)
            more = self.socket.recv(65536)
        except OSError:
            return False
        self._rest += more
        return bool(more) and len(self._rest) <= LONGEST


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def readable(lines: Mapping[int, Line], seconds: float) -> list[int]:
    """Return those that have something to read, or are gone, within `seconds`."""
    try:
        ready, _, _ = select.select([line.socket for line in lines.values()], [], [], seconds)
    except (OSError, ValueError):  # one was closed, perhaps meanwhile
        return [index for index, line in lines.items() if line.socket.fileno() < 0]
    return [index for index, line in lines.items() if line.socket in ready]
