"""Connects the workers of a run, and compares their configs, before TensorFlow starts.

Without this, a difference would cause a late and long error of TensorFlow.

    each worker ─ its config and versions, or why it rejects its config ─► chief
    chief ─ the spec and the start, or why it rejects the config ─► each worker

Each side proves to the other that it knows the run's secret (`cluster.secret`). The
workers connect to the chief's address, and the connections stay open until the run
ends. A worker uses its connection to report why it fails and to detect that the chief
has died. Heartbeats carry the number of all-reduces for which a worker was ready; the
worker with the lowest number is the straggler.
"""

import importlib.metadata
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pipeline import __version__
from pipeline.common.errors import ConfigError
from pipeline.config.cluster import KEY, Cluster
from pipeline.config.resolve import RunSpec, comparable
from pipeline.distributed.heartbeats import (
    LONGEST,
    SILENCE,
    CountReductions,
    Heartbeats,
    LostWorker,
    OnLost,
)
from pipeline.distributed.json_socket import JsonSocket, sealed, unsealed
from pipeline.distributed.listener import Listener, WorkerConnection, reserve_port

# Seconds within which all workers must connect; a cluster may start them one by one.
PATIENCE = 300.0
# Seconds for which a process that rejects its config tries to notify the other side.
REJECTING = 10.0
# Seconds for which the chief of a finished run waits for workers, to notify them. The
# time is longer, since workers import TensorFlow before they connect.
FINISHED = 60.0


def statement(spec: RunSpec) -> dict[str, Any]:
    """Return the versions and settings that must be equal on all workers.

    The settings are the config without the keys that may differ between machines.
    """
    versions = {"python": platform.python_version()}
    for name in ("tensorflow", "keras", "numpy", "tensorflow-datasets", "scikit-learn"):
        versions[name] = importlib.metadata.version(name)
    versions["pipeline"] = __version__
    return {"config": comparable(spec), "versions": versions}


class Server:
    """The chief's side of the connections.

    Attributes:
        cluster: the workers of the run.
        address: `host:port` at which the chief waits for the workers.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, cluster: Cluster, secret: bytes):
        self.cluster = cluster
        self._secret = secret
        address = cluster.rendezvous or cluster.addresses[0]
        self._listener = Listener(address, len(cluster.addresses), secret)
        self.address = self._listener.address
        self._reserved_port: socket.socket | None = None  # the port for TensorFlow
        self._workers: dict[int, WorkerConnection] = {}
        self._lost: dict[int, LostWorker] = {}
        self._closed = False

    def gather(
        self,
        chief_statement: Mapping[str, Any],
        answer: Mapping[str, Any],
        check: Callable[[], None],
    ) -> Cluster:
        """Wait for all workers and send them the `answer`.

        Args:
            chief_statement: the statement that every worker must match, see
                `statement`.
            answer: the message to all workers, to which the addresses are added.
            check: called repeatedly while the chief waits. It may raise an error.

        Returns:
            The cluster with the ports at which TensorFlow listens.

        Raises:
            ConfigError: a worker is missing, rejects its config, or has a different
                statement; all connected workers are notified. Or the port for
                TensorFlow is taken.
        """

        def check_statement(worker: WorkerConnection) -> None:
            _check_statement(worker.greeting, chief_statement)

        try:
            self._wait(time.monotonic() + PATIENCE, check, check_statement)
        except ConfigError as error:
            self.dismiss(error)
            raise
        finally:
            self._listener.close()  # its port may be TensorFlow's from now on
        self._reserved_port = reserve_port("worker 0", self.cluster.addresses[0])

        addresses = self._addresses(self._reserved_port.getsockname()[1])
        self._tell({"answer": {**answer, "addresses": addresses}})
        return replace(self.cluster, addresses=addresses)

    def dismiss(self, error: ConfigError | None = None) -> None:
        """Notify all workers that this run will not train; close all connections.

        Workers that have not connected are waited for, for up to `REJECTING` or
        `FINISHED` seconds.

        Args:
            error: why the chief rejects the config, or None if the run has finished.
        """
        if not self._closed:
            message: dict[str, Any] = {"finished": True}
            patience = FINISHED
            if error is not None:
                message = {"refused": str(error)}
                patience = REJECTING
            with suppress(ConfigError, OSError):
                self._wait(
                    time.monotonic() + patience,
                    check=lambda: None,
                    check_statement=lambda worker: None,
                )
            self._tell(message)
        self.close()

    def watch(self, reductions: CountReductions, on_lost: OnLost) -> None:
        """Start a thread that exchanges heartbeats with all workers.

        Args:
            reductions: returns the number of all-reduces for which this process was
                ready.
            on_lost: called for a worker that has disconnected or is a straggler.
        """

        def note_lost(worker: LostWorker) -> None:
            if not self._closed:
                self._lost[worker.index] = worker
                on_lost(worker)

        heartbeats = Heartbeats(dict(self._workers), 0, reductions, note_lost)
        threading.Thread(target=heartbeats.exchange, daemon=True).start()

    def lost(self, patience: float = 3.0) -> LostWorker | None:
        """Return a worker that is silent, or else the first one that was lost.

        Return None if there is no such worker within `patience` seconds.
        """
        until = time.monotonic() + patience
        while True:
            now = time.monotonic()
            # Check for silent workers first: a silent worker is the cause if the other
            # workers lose it, fail, and disconnect before it does.
            for index, worker in self._workers.items():
                if now - worker.heard > SILENCE and index not in self._lost:
                    return LostWorker(index)
            if self._lost or now > until:
                return next(iter(self._lost.values()), None)
            time.sleep(0.05)  # meanwhile, the thread of `watch` reads messages

    def close(self) -> None:
        """Close all connections; the workers then end."""
        self._closed = True
        self._listener.close()
        if self._reserved_port is not None:
            self._reserved_port.close()
        for worker in self._workers.values():
            worker.socket.close()

    def _wait(
        self,
        until: float,
        check: Callable[[], None],
        check_statement: Callable[[WorkerConnection], None],
    ) -> None:
        """Wait for all workers to connect; raise a `ConfigError` after `until`.

        `check` is called repeatedly, and `check_statement` with each new worker. Both
        may raise an error.
        """
        while len(self._workers) + 1 < len(self.cluster.addresses):
            check()
            if time.monotonic() >= until:
                rule = (
                    "must all be started at about the same time, with the same secret"
                )
                raise ConfigError(KEY, rule, f"no {', '.join(self._missing())}")
            for worker in self._listener.arrivals(0.5):
                index = worker.greeting["index"]
                if self._is_connected(index):
                    text = f"another worker {index} has already joined"
                    worker.tell({"refused": text}, self._secret)
                    worker.socket.close()
                else:
                    self._workers[index] = worker
                    check_statement(worker)

    def _is_connected(self, index: int) -> bool:
        worker = self._workers.get(index)
        return worker is not None and worker.received() is not None

    def _missing(self) -> list[str]:
        missing = []
        for index, address in enumerate(self.cluster.addresses):
            if index != 0 and index not in self._workers:
                missing.append(f"{index} at {address}")
        return missing

    def _addresses(self, chief_port: int) -> tuple[str, ...]:
        """Return the addresses of all workers, with the ports that they reserved."""
        addresses = []
        for index, address in enumerate(self.cluster.addresses):
            host = address.rpartition(":")[0]
            port = chief_port
            if index != 0:
                port = self._workers[index].greeting["port"]
            addresses.append(f"{host}:{port}")
        return tuple(addresses)

    def _tell(self, message: dict[str, Any]) -> None:
        for worker in self._workers.values():
            worker.tell(message, self._secret)


class Client:
    """The side of a worker other than the chief.

    Attributes:
        cluster: the workers of the run.
        told: whether the chief was notified why this worker ends, or has sent the
            reason why the run is rejected.
    """

    def __init__(self, cluster: Cluster, secret: bytes):
        self.cluster = cluster
        self.told = False
        self._secret = secret
        self._reserved_port: socket.socket | None = None  # for TensorFlow
        self._connection: JsonSocket | None = None
        self._done = False

    def join(
        self, worker_statement: Mapping[str, Any], patience: float = PATIENCE
    ) -> dict[str, Any] | None:
        """Send this worker's statement, and return the chief's answer.

        Args:
            worker_statement: the result of `statement`, or a dict with the key
                `refused` and the reason why this worker rejects its config.
            patience: seconds for which to try to reach the chief.

        Returns:
            The answer, or None if the run has finished.

        Raises:
            ConfigError: a worker or the chief rejects the config, the chief cannot be
                reached, or the chief has a different secret.
        """
        challenge = secrets.token_hex(16)
        until = time.monotonic() + patience
        greeting = {
            **self._with_port(worker_statement),
            "index": self.cluster.index,
            "challenge": challenge,
        }
        chief = self.cluster.rendezvous or self.cluster.addresses[0]
        while time.monotonic() < until:
            with suppress(OSError):  # the chief does not listen yet
                connection = _connect(chief)
                reply = self._greet(connection, greeting)
                if reply is not None:
                    message = unsealed(reply, self._secret, "chief", challenge)
                    answer = self._answer(message)
                    self._connection = connection
                    return answer
            time.sleep(0.2)
        raise ConfigError(KEY, "must include a chief that answers", chief)

    def reject(self, error: ConfigError) -> bool:
        """Notify the chief that this worker rejects its config.

        Returns:
            Whether the chief has confirmed the message.
        """
        with suppress(ConfigError):
            self.join({"refused": str(error)}, REJECTING)
        return self.told

    def watch(self, reductions: CountReductions) -> None:
        """Start a thread that exchanges heartbeats with the chief.

        The thread ends this process when the chief has disconnected or is the
        straggler.
        """
        assert self._connection is not None

        def end(chief: LostWorker) -> None:
            # Exit without cleanup: the main thread is blocked in TensorFlow.
            if chief.rejected is not None:
                os._exit(2)
            if not self._done:
                os._exit(1)
            os._exit(0)

        heartbeats = Heartbeats(
            {0: self._connection},
            1,
            reductions,
            end,
            waits=lambda: not self._done,
        )
        threading.Thread(target=heartbeats.exchange, daemon=True).start()

    def fail(self, reason: Mapping[str, str]) -> None:
        """Tell the chief why this worker ends.

        Args:
            reason: a dict with the key `failed` or `refused` and the reason.
        """
        if self._connection is not None:
            self._connection.write(reason)
            self.told = True

    def wait(self) -> None:
        """Block until the chief ends and the thread of `watch` ends this process."""
        self._done = True
        sys.stderr.flush()
        # Discard error messages of TensorFlow about the end of the chief.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        threading.Event().wait()

    def _with_port(self, worker_statement: Mapping[str, Any]) -> Mapping[str, Any]:
        """Reserve a port for TensorFlow, and return the statement with this port.

        If the port is taken, return a dict with the reason as `refused` instead.
        """
        index = self.cluster.index
        try:
            self._reserved_port = reserve_port(
                f"worker {index}", self.cluster.addresses[index]
            )
        except ConfigError as error:
            return {"refused": str(error)}
        return {"port": self._reserved_port.getsockname()[1], **worker_statement}

    def _greet(
        self, connection: JsonSocket, greeting: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Answer the chief's challenge; return the reply, or None if there is none."""
        # Wait without a time limit: the chief may first search for a micro-batch size.
        message = connection.read()
        if message is None:
            return None
        challenge = str(message.get("challenge"))
        connection.write(sealed(greeting, self._secret, "worker", challenge))
        return connection.read()

    def _answer(self, message: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the answer in the chief's message, or None if the run has finished.

        Raises:
            ConfigError: the chief rejects the config, or the proof was wrong.
        """
        match message:
            case {"answer": dict(answer)}:
                return answer
            case {"finished": _}:
                return None
            case {"refused": str(reason)}:
                self.told = True
                rule = f"must all take part; rejected: {reason[:LONGEST]}"
                raise ConfigError(KEY, rule)
        where = "in PIPELINE_SECRET or in hardware.secret_file"
        rule = (
            f"must all know the same secret, {where}; the chief knows a different one, "
            "or none"
        )
        raise ConfigError(KEY, rule)


def _connect(address: str) -> JsonSocket:
    host, _, port = address.rpartition(":")
    return JsonSocket(
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0)
    )


def _check_statement(
    greeting: Mapping[str, Any], chief_statement: Mapping[str, Any]
) -> None:
    """Raise a `ConfigError` if a worker rejects its config, or has different values."""
    index = greeting["index"]
    if "refused" in greeting:
        reason = greeting["refused"][:LONGEST].rstrip(".")
        raise ConfigError(f"worker {index}", f"refuses to train: {reason}")
    for part in ("versions", "config"):
        chief_values = chief_statement[part]
        worker_values = greeting[part]
        for key in chief_values | worker_values:
            # Compare the `repr`, since NaN is not equal to itself.
            chief_text = repr(chief_values.get(key))
            worker_text = repr(worker_values.get(key))
            if chief_text != worker_text:
                rule = (
                    "must be the same for all workers, but is "
                    f"{worker_text[:LONGEST]} on worker {index}"
                )
                raise ConfigError(key[:LONGEST], rule, chief_values.get(key))
