"""Connections between processes: either side may send a line of JSON at any time.

A message can be sealed with an HMAC. The HMAC proves that the sender knows a secret,
without revealing the secret. It covers the challenge of the connection, so that a
recorded message cannot be sent again over another connection.
"""

import hmac
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

LONGEST = 2**24  # default limit of unread bytes


class JsonSocket:
    """A connection whose messages are lines of JSON of at most `longest` bytes.

    Attributes:
        socket: the underlying socket.
        longest: maximum size of a message in bytes.
        heard: the time of the last received bytes, by `time.monotonic`.
    """

    def __init__(self, connection: socket.socket, longest: int = LONGEST):
        self.socket = connection
        self.longest = longest
        self.heard = time.monotonic()
        self._unread = b""

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a message. If sending fails, the next `read` returns None."""
        try:
            self.socket.settimeout(5.0)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the connection is closed, or an incomplete line was sent
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def read(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Wait for the next message and return it.

        Return None if the connection is closed, if nothing arrives for `seconds`, or if
        the message is too long or is not a JSON object.
        """
        while b"\n" not in self._unread:
            if not self._receive(seconds):
                return None
        text, _, self._unread = self._unread.partition(b"\n")
        return _parsed(text)

    def received(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, without waiting for more.

        Return None if the connection is closed, or if a message is too long or is not a
        JSON object.
        """
        if b"\n" not in self._unread and readable([self.socket], 0.0):
            if not self._receive(1.0):
                return None
        *texts, self._unread = self._unread.split(b"\n")
        messages = []
        for text in texts:
            message = _parsed(text)
            if message is None:
                return None
            messages.append(message)
        return messages

    def _receive(self, seconds: float | None) -> bool:
        """Read bytes within `seconds`; return whether the connection is usable."""
        try:
            self.socket.settimeout(seconds)
            content = self.socket.recv(65536)
        except OSError:
            return False
        self._unread += content
        self.heard = time.monotonic()
        return bool(content) and len(self._unread) <= self.longest


def sealed(
    message: Mapping[str, Any], secret: bytes, sender: str, challenge: str
) -> dict[str, str]:
    """Return `message` with a proof that its sender knows the secret.

    Args:
        message: the message to send.
        secret: the secret that both sides know.
        sender: role of the sender. It is part of the proof, so that a message cannot be
            sent back to its sender.
        challenge: the random text that the other side has sent.
    """
    text = json.dumps(message)
    return {"sealed": text, "proof": _proof(text, secret, sender, challenge)}


def unsealed(
    message: Mapping[str, Any], secret: bytes, sender: str, challenge: str
) -> dict[str, Any] | None:
    """Verify a message that was made by `sealed`, and return the original message.

    Return None if the proof is wrong or the message is malformed. `secret`, `sender`
    and `challenge` must be those that were passed to `sealed`.
    """
    text = str(message.get("sealed"))
    proof = str(message.get("proof")).encode(errors="replace")
    expected = _proof(text, secret, sender, challenge).encode()
    if not hmac.compare_digest(proof, expected):
        return None
    return _parsed(text)


def readable(sockets: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """Wait up to `seconds`, and return the sockets that can be read or are closed."""
    try:
        return wait(sockets, seconds)  # type: ignore[return-value]
    except ValueError:  # a socket was closed, perhaps by another thread
        return [connection for connection in sockets if connection.fileno() < 0]


def _proof(text: str, secret: bytes, sender: str, challenge: str) -> str:
    content = f"{sender} {challenge} {text}".encode(errors="replace")
    return hmac.digest(secret, content, "sha256").hex()


def _parsed(text: str | bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    return message
