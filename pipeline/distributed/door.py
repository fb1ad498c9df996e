"""The port where the chief waits: who connects is challenged, and is a worker if the answer proves the run's secret."""

import errno
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from pipeline.common.errors import refused
from pipeline.distributed.json_socket import (
    LONGEST,
    JsonSocket,
    readable,
    sealed,
    unsealed,
)

ANSWERING = 5.0  # seconds for the answer
LONGEST_GREETING = 2**20  # bytes of it
MOST_STRANGERS = (
    128  # who have not answered; for one more the first of them is turned away
)
FREE = "must have an address of its own that is free"


class Visitor(JsonSocket):
    """Who has connected; `greeting` is a worker's index, statement and challenge, once it has answered."""

    def __init__(self, connection: socket.socket):
        super().__init__(connection, LONGEST_GREETING)
        self.challenge, self.until = secrets.token_hex(16), self.heard + ANSWERING
        self.greeting: dict[str, Any] = {}
        self.write({"challenge": self.challenge})

    def tell(self, message: dict[str, Any], secret: bytes) -> None:
        """Tell a worker, which then knows that the chief knows the secret."""
        self.write(sealed(message, secret, "chief", self.greeting["challenge"]))


class Door:
    """Listens at `address`, a `host:port`, for workers below index `count`; a `ConfigError` says that it is taken."""

    def __init__(self, address: str, count: int, secret: bytes):
        self._count, self._secret = count, secret
        self._strangers: dict[socket.socket, Visitor] = {}
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with refused("worker 0", FREE, address):
            try:
                self._server = socket.create_server(
                    (host.strip("[]"), int(port)), family=family
                )
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                self._server = socket.create_server(
                    ("", int(port)), family=family
                )  # a name from outside a container
        self.address = f"{host}:{self._server.getsockname()[1]}"

    def arrivals(self, seconds: float) -> Iterator[Visitor]:
        """Yield the workers that answer within `seconds`; strangers are read at once: none is waited for."""
        for ready in readable([self._server, *self._strangers], seconds):
            if ready is self._server:
                with suppress(OSError):  # it is gone again
                    accepted, _ = self._server.accept()
                    self._strangers[accepted] = Visitor(accepted)
            elif messages := self._strangers[ready].received():
                visitor = self._strangers.pop(ready)
                said = unsealed(messages[0], self._secret, "worker", visitor.challenge)
                if said is not None and _is_greeting(said, self._count):
                    visitor.greeting, visitor.longest = said, LONGEST
                    yield visitor
                else:
                    visitor.write({})  # a worker without the secret then says so
                    ready.close()
            elif messages is None:
                self._strangers.pop(ready).socket.close()
        late = [
            each
            for each, stranger in self._strangers.items()
            if time.monotonic() > stranger.until
        ]
        for each in late or list(self._strangers)[:-MOST_STRANGERS]:
            self._strangers.pop(each).socket.close()

    def close(self) -> None:
        for each in (self._server, *self._strangers):
            each.close()


def hold(key: str, address: str) -> socket.socket:
    """Return a socket that keeps the port of `address` for TensorFlow, any free one for port 0, until it is closed."""
    with refused(key, FREE, address), ExitStack() as held:
        kept = held.enter_context(socket.socket())
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Without listening, which TensorFlow does there: its server takes a number and no socket.
        kept.bind(("", int(address.rpartition(":")[2])))
        held.pop_all()
    return kept


def _is_greeting(said: dict[str, Any], count: int) -> bool:
    match said:
        case {"index": int(index), "challenge": str(), "refused": str()}:
            return type(index) is int and 0 < index < count
        case {
            "index": int(index),
            "challenge": str(),
            "port": int(port),
            "versions": dict(),
            "config": dict(),
        }:
            return (
                type(index) is type(port) is int
                and 0 < index < count
                and 0 < port < 2**16
            )
    return False
