"""Connections between processes: either side may send a line of JSON at any time.

A message can be sealed. It then proves that its sender knows a secret, which is not
sent. It also proves that it answers the challenge of this connection, so that nobody
can send it again.
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
    """A connection whose messages are lines of JSON of at most `longest` bytes.

    Attributes:
        socket: the connection.
        longest: limit of a message in bytes.
        heard: when the other side last sent something, by `time.monotonic`.
    """

    def __init__(self, connection: socket.socket, longest: int = LONGEST):
        self.socket = connection
        self.longest = longest
        self.heard = time.monotonic()
        self._unread = b""

    def write(self, message: Mapping[str, Any]) -> None:
        """Send a message. If the other side is gone, the next `read` shows it."""
        try:
            self.socket.settimeout(5.0)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the other side is gone, or got half a line
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def read(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message.

        Return None if the other side is gone, sends something else, or is silent for
        `seconds`.
        """
        while b"\n" not in self._unread:
            if not self._receive(seconds):
                return None
        text, _, self._unread = self._unread.partition(b"\n")
        return _parsed(text)

    def received(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived.

        Return None if the other side is gone, or sends something else.
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
        """Read what arrives within `seconds`; return whether the connection is good."""
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
        sender: role of the sender, so that its own messages cannot be sent back to it.
        challenge: the text of the other side that this message answers.
    """
    text = json.dumps(message)
    return {"sealed": text, "proof": _proof(text, secret, sender, challenge)}


def unsealed(
    message: Mapping[str, Any], secret: bytes, sender: str, challenge: str
) -> dict[str, Any] | None:
    """Return the message that was `sealed`.

    Return None if it is malformed, or if its sender does not know the secret.
    """
    text = str(message.get("sealed"))
    proof = str(message.get("proof")).encode(errors="replace")
    expected = _proof(text, secret, sender, challenge).encode()
    if not hmac.compare_digest(proof, expected):
        return None
    return _parsed(text)


def readable(sockets: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """Return the sockets that can be read, or are closed, within `seconds`."""
    try:
        return wait(sockets, seconds)  # type: ignore[return-value]
    except ValueError:  # one was closed, perhaps meanwhile
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
