"""The port at which the chief accepts connections of workers.

The chief sends a challenge over each new connection. The other side is accepted as a
worker if its answer proves that it knows the secret of the run. Until then, it is
called a stranger.
"""

import errno
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from pipeline.common.errors import as_config_error
from pipeline.distributed.json_socket import (
    LONGEST,
    JsonSocket,
    readable,
    sealed,
    unsealed,
)

ANSWERING = 5.0  # seconds within which a stranger must answer the challenge
LONGEST_GREETING = 2**20  # maximum bytes of the answer
# Maximum number of connections that have not answered; the oldest ones are closed.
MOST_STRANGERS = 128
FREE = "must have a free address of its own"


class WorkerConnection(JsonSocket):
    """A connection to the chief, from a worker or from a stranger.

    Attributes:
        challenge: the random text that the proof in the answer must cover.
        until: the time by which the answer must arrive, by `time.monotonic`.
        greeting: the answer of a worker: its index, its statement and a challenge for
            the chief. Empty for a stranger.
    """

    def __init__(self, connection: socket.socket):
        super().__init__(connection, LONGEST_GREETING)
        self.challenge = secrets.token_hex(16)
        self.until = self.heard + ANSWERING
        self.greeting: dict[str, Any] = {}
        self.write({"challenge": self.challenge})

    def tell(self, message: dict[str, Any], secret: bytes) -> None:
        """Send the worker a message, sealed with the secret."""
        self.write(sealed(message, secret, "chief", self.greeting["challenge"]))


class Listener:
    """Listens at an address for the workers of a run.

    Args:
        address: `host:port`; port 0 selects a free port.
        count: number of workers in the run, including the chief.
        secret: the secret of the run.

    Attributes:
        address: `host:port`, with the selected port.

    Raises:
        ConfigError: the address is taken.
    """

    def __init__(self, address: str, count: int, secret: bytes):
        self._count = count
        self._secret = secret
        self._strangers: dict[socket.socket, WorkerConnection] = {}
        host, _, port = address.rpartition(":")
        with as_config_error("worker 0", FREE, address):
            self._server = _create_server(host, int(port))
        self.address = f"{host}:{self._server.getsockname()[1]}"

    def arrivals(self, seconds: float) -> Iterator[WorkerConnection]:
        """Wait up to `seconds` for events, and yield workers that have answered.

        Strangers are read only when bytes have arrived, so a silent stranger does not
        delay the workers.
        """
        for connection in readable([self._server, *self._strangers], seconds):
            if connection is self._server:
                self._accept()
                continue
            worker = self._read_greeting(connection)
            if worker is not None:
                yield worker
        self._close_silent_strangers()

    def close(self) -> None:
        """Close the port and the strangers' connections. Workers stay connected."""
        self._server.close()
        for connection in self._strangers:
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the other side has already disconnected
            connection, _ = self._server.accept()
            self._strangers[connection] = WorkerConnection(connection)

    def _read_greeting(self, connection: socket.socket) -> WorkerConnection | None:
        """Return the stranger at `connection` if its answer proves that it is a worker.

        Return None if the answer is incomplete or wrong. After a wrong answer, the
        connection is closed.
        """
        messages = self._strangers[connection].received()
        if messages == []:
            return None  # the answer is incomplete
        stranger = self._strangers.pop(connection)
        if messages is None:
            connection.close()
            return None

        greeting = unsealed(messages[0], self._secret, "worker", stranger.challenge)
        if greeting is None or not _is_greeting(greeting, self._count):
            stranger.write({})  # a worker with another secret then reports this error
            connection.close()
            return None
        stranger.greeting = greeting
        stranger.longest = LONGEST
        return stranger

    def _close_silent_strangers(self) -> None:
        """Close strangers whose time to answer is over.

        If there are none, close the oldest strangers beyond `MOST_STRANGERS`.
        """
        now = time.monotonic()
        closed = [
            connection
            for connection, stranger in self._strangers.items()
            if now > stranger.until
        ]
        if not closed:
            closed = list(self._strangers)[:-MOST_STRANGERS]
        for connection in closed:
            del self._strangers[connection]
            connection.close()


def _create_server(host: str, port: int) -> socket.socket:
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    try:
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # Listen at all addresses: in a container, the host's address may not exist.
        return socket.create_server(("", port), family=family)


def reserve_port(key: str, address: str) -> socket.socket:
    """Return a socket that reserves the port of an address for TensorFlow.

    Port 0 selects a free port. The port is reserved until the socket is closed.

    Raises:
        ConfigError: the port is taken; the message begins with `key`.
    """
    with as_config_error(key, FREE, address), ExitStack() as close_on_error:
        port = int(address.rpartition(":")[2])
        reserved = close_on_error.enter_context(socket.socket())
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bind but do not listen: TensorFlow accepts only a port number, and listens at
        # the port itself.
        reserved.bind(("", port))
        close_on_error.pop_all()
    return reserved


def _is_greeting(message: dict[str, Any], count: int) -> bool:
    """Return whether a message is the greeting of a worker with a valid index."""
    match message:
        case {"index": int(index), "challenge": str(), "refused": str()}:
            return _is_index(index, count)
        case {
            "index": int(index),
            "challenge": str(),
            "port": int(port),
            "versions": dict(),
            "config": dict(),
        }:
            return _is_index(index, count) and type(port) is int and 0 < port < 2**16
    return False


def _is_index(index: int, count: int) -> bool:
    return type(index) is int and 0 < index < count
