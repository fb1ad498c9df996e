"""Connections between processes: one line of JSON is one message, in either direction at any time.

A message can be sealed: it then proves that its sender knows a secret, which is not sent, and that it answers the
challenge of this connection, so that nobody can send it again.
"""

import hmac
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

LONGEST = 2**24  # bytes of a message


class JsonSocket:
    """A connection whose messages are lines of JSON of at most `longest` bytes."""

    def __init__(self, connection: socket.socket, longest: int = LONGEST):
        self.socket, self._rest, self.longest = connection, b"", longest
        self.heard = time.monotonic()  # when the other side has sent something

    def write(self, message: Mapping[str, Any]) -> None:
        try:
            self.socket.settimeout(5.0)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the other side is gone, or got half a line
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def read(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None if the other side is gone, sends something else, or is silent for `seconds`."""
        while b"\n" not in self._rest:
            if not self._more(seconds):
                return None
        text, _, self._rest = self._rest.partition(b"\n")
        return _parsed(text)

    def received(self) -> list[dict[str, Any]] | None:
        """Return the messages that are there; None if the other side is gone, or sends something else."""
        if (
            b"\n" not in self._rest
            and readable([self.socket], 0.0)
            and not self._more(1.0)
        ):
            return None
        *texts, self._rest = self._rest.split(b"\n")
        messages = [_parsed(text) for text in texts]
        return (
            None
            if None in messages
            else [message for message in messages if message is not None]
        )

    def _more(self, seconds: float | None) -> bool:
        try:
            self.socket.settimeout(seconds)
            more = self.socket.recv(65536)
        except OSError:
            return False
        self._rest, self.heard = self._rest + more, time.monotonic()
        return bool(more) and len(self._rest) <= self.longest


def sealed(
    message: Mapping[str, Any], secret: bytes, sender: str, challenge: str
) -> dict[str, str]:
    """Return `message` with the proof that a `sender` who knows the `secret` answers the `challenge` with it."""
    text = json.dumps(message)
    return {"sealed": text, "proof": _proof(text, secret, sender, challenge)}


def unsealed(
    message: Mapping[str, Any], secret: bytes, sender: str, challenge: str
) -> dict[str, Any] | None:
    """Return what was `sealed`; None if it is malformed, or its sender does not know the secret."""
    text, proof = (str(message.get(name)) for name in ("sealed", "proof"))
    expected = _proof(text, secret, sender, challenge)
    return (
        _parsed(text)
        if hmac.compare_digest(proof.encode(errors="replace"), expected.encode())
        else None
    )


def _proof(text: str, secret: bytes, sender: str, challenge: str) -> str:
    return hmac.digest(
        secret, f"{sender} {challenge} {text}".encode(errors="replace"), "sha256"
    ).hex()


def _parsed(text: str | bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def readable(sockets: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """Return the sockets that have something to read, or are closed, within `seconds`."""
    try:
        return wait(sockets, seconds)  # type: ignore[return-value]
    except ValueError:  # one was closed, perhaps meanwhile
        return [each for each in sockets if each.fileno() < 0]
