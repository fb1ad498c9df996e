"""Connections between processes: one line of JSON is one message, in either direction at any time."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LONGEST = 2**24  # bytes of a message


class JsonSocket:
    """A connection whose messages are lines of JSON."""

    def __init__(self, connection: socket.socket):
        self.socket, self._rest = connection, b""

    def write(self, message: Mapping[str, Any]) -> None:
        try:
            self.socket.settimeout(5.0)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the other side is gone, or got half a line
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def read(self, until: float) -> dict[str, Any] | None:
        """Return the next message; None if the other side is gone, sends something else, or is later than `until`."""
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not self._more(None if left == float("inf") else left):
                return None
        text, _, self._rest = self._rest.partition(b"\n")
        return _parsed(text)

    def received(self, seconds: float = 0.0) -> list[dict[str, Any]] | None:
        """Return the messages of the next `seconds`; None if the other side is gone, or sends something else."""
        if b"\n" not in self._rest and readable({0: self}, seconds) and not self._more(1.0):
            return None
        *texts, self._rest = self._rest.split(b"\n")
        messages = [_parsed(text) for text in texts]
        return None if None in messages else [message for message in messages if message is not None]

    def _more(self, seconds: float | None) -> bool:
        """Receive more; return whether there was any, and it is not too long for a message."""
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


def readable(connections: Mapping[int, JsonSocket], seconds: float) -> list[int]:
    """Return the connections that have something to read, or are closed, within `seconds`."""
    try:
        ready, _, _ = select.select([each.socket for each in connections.values()], [], [], seconds)
    except (OSError, ValueError):  # one was closed, perhaps meanwhile
        return [index for index, each in connections.items() if each.socket.fileno() < 0]
    return [index for index, each in connections.items() if each.socket in ready]
