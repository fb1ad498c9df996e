"""The workers of a run meet before they join in TensorFlow, whose errors would come late and be long.

    each worker ─ its config and versions, or why it refuses ─► chief ─ the spec and the start, or a refusal ─► each

The connections, to the chief's own address, stay open to the end of the run. Over them a worker reports why it fails
and notices that the chief is gone. Heartbeats carry the number of all-reduces that a worker was ready for: the lowest
one names the straggler.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pipeline import __version__
from pipeline.common.errors import ConfigError
from pipeline.config.cluster import KEY, Cluster
from pipeline.config.resolve import RunSpec, comparable
from pipeline.distributed.json_socket import JsonSocket, readable
from pipeline.distributed.straggler import TIMEOUT, ReductionCounts

PATIENCE = 300.0  # seconds for all workers to come: a cluster starts them one after the other
INTERVAL = 2.0  # seconds between two heartbeats
REFUSING = 10.0  # seconds for which a chief that refuses its config waits for workers to tell them
FINISHED = 60.0  # the same if its run has finished: they import TensorFlow before they come

Count = Callable[[], int]  # returns the number of all-reduces that this process was ready for
Lost = Callable[[int, dict[str, Any]], None]  # takes the index of a worker and its last message


def statement(spec: RunSpec) -> dict[str, Any]:
    """Return what all workers must have in common: the config without what is a machine's own, and the versions."""
    packages = ("tensorflow", "keras", "numpy", "tensorflow-datasets", "scikit-learn")
    versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
    return {"config": comparable(spec), "versions": {**versions, "pipeline": __version__}}


class Server:
    """The chief's side of the connections; a `ConfigError` says that its port is taken."""

    def __init__(self, cluster: Cluster):
        self.cluster, self._server, self._closed = cluster, _listening(cluster), False
        self._workers: dict[int, JsonSocket] = {}
        self._failed: dict[int, dict[str, Any]] = {}

    def gather(self, own: Mapping[str, Any], answer: Mapping[str, Any], check: Callable[[], None]) -> None:
        """Wait for all workers, compare their statements with the chief's `own`, and send each the `answer`.

        `check` is called meanwhile, and may raise. If a worker refuses, differs or does not come, all are told.
        """
        until = time.monotonic() + PATIENCE
        try:
            while len(self._workers) + 1 < len(self.cluster.addresses):
                _compare(*self._accept(until, check), own)
        except ConfigError as error:
            self.dismiss(error)
            raise
        finally:
            self._server.close()  # the port is TensorFlow's from now on
        for connection in self._workers.values():
            connection.write({"answer": answer})

    def dismiss(self, error: ConfigError | None = None) -> None:
        """Tell all workers, also those that come soon, that the chief refuses; without an error, that all is done."""
        until = time.monotonic() + (FINISHED if error is None else REFUSING)
        with suppress(ConfigError, OSError):
            while len(self._workers) + 1 < len(self.cluster.addresses):
                self._accept(until, lambda: None)
        for connection in self._workers.values():
            connection.write({"finished": True} if error is None else {"refused": str(error)})
        self.close()

    def watch(self, reductions: Count, lost: Lost) -> None:
        """Watch all workers from now on, in a thread, which calls `lost` for one that is gone or a straggler."""

        def noted(index: int, last: dict[str, Any]) -> None:
            if not self._closed:
                self._failed |= {index: last} if last else {}
                lost(index, last)

        arguments = (dict(self._workers), 0, reductions, noted)
        threading.Thread(target=_exchange_heartbeats, args=arguments, daemon=True).start()

    def failed(self, patience: float = 3.0) -> tuple[int, dict[str, Any]]:
        """Return the worker that reported to have failed or refused, with its message; 0 and nothing without one."""
        until = time.monotonic() + patience
        while not self._failed and time.monotonic() < until:
            time.sleep(0.05)  # the thread reads
        return next(iter(self._failed.items()), (0, {}))

    def close(self) -> None:
        self._closed = True
        self._server.close()
        for connection in self._workers.values():
            connection.socket.close()

    def _accept(self, until: float, check: Callable[[], None]) -> tuple[int, dict[str, Any]]:
        """Wait for one more worker; return its index and its statement."""
        while True:
            check()
            self._server.settimeout(0.5)
            try:
                accepted, _ = self._server.accept()
            except TimeoutError:
                if time.monotonic() < until:
                    continue
                missing = [
                    f"{n} at {at}" for n, at in enumerate(self.cluster.addresses) if n not in {0, *self._workers}
                ]
                raise ConfigError(KEY, "must all be started, at about one time", f"no {', '.join(missing)}") from None
            connection = JsonSocket(accepted)
            greeting = connection.read(min(until, time.monotonic() + 5.0))
            if greeting is not None and greeting.get("index") in range(1, len(self.cluster.addresses)):
                self._workers[greeting["index"]] = connection
                return greeting["index"], greeting
            accepted.close()  # no worker of this run


class Client:
    """The side of a worker other than the chief."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.told = False  # whether the chief knows why this worker, or another one, refuses
        self._connection: JsonSocket | None = None
        self._done, self._chief_ended = False, threading.Event()

    def join(self, own: Mapping[str, Any], patience: float = PATIENCE) -> dict[str, Any] | None:
        """Send this worker's `own` statement, and return the chief's answer; None if the run has finished."""
        try:
            _listening(self.cluster).close()
        except ConfigError as error:
            own = {"refused": str(error)}
        host, _, port = self.cluster.addresses[0].rpartition(":")
        until = time.monotonic() + patience
        while time.monotonic() < until:
            with suppress(OSError):  # the chief does not listen yet
                connection = JsonSocket(socket.create_connection((host.strip("[]"), int(port)), timeout=5.0))
                connection.write({"index": self.cluster.index, **own})
                match connection.read(float("inf")):  # it may search for a micro-batch size meanwhile
                    case {"answer": dict(answer)}:
                        self._connection = connection
                        return answer
                    case {"finished": _}:
                        return None
                    case dict(said):
                        self.told = True
                        raise ConfigError(KEY, f"must all take part; refused: {said.get('refused')}")
            time.sleep(0.2)
        raise ConfigError(KEY, "must include a chief that answers", self.cluster.addresses[0])

    def refuse(self, error: ConfigError) -> bool:
        """Tell the chief that this worker refuses its config; return whether the chief knows."""
        with suppress(ConfigError):
            self.join({"refused": str(error)}, REFUSING)
        return self.told

    def watch(self, reductions: Count) -> None:
        """Watch the chief from now on, in a thread: this process ends when the chief is gone, or the straggler."""
        assert self._connection is not None

        def lost(_: int, last: dict[str, Any]) -> None:
            if self._done and "refused" not in last:
                self._chief_ended.set()
            else:
                os._exit(2 if "refused" in last else 1)  # the main thread waits in TensorFlow, and cannot be woken

        arguments = ({0: self._connection}, 1, reductions, lost, lambda: not self._done)
        threading.Thread(target=_exchange_heartbeats, args=arguments, daemon=True).start()

    def fail(self, why: Mapping[str, str]) -> None:
        """Tell the chief why this worker has `failed`, or `refused`."""
        if self._connection is not None:
            self._connection.write(why)
            self.told = True

    def wait(self) -> None:
        """Wait until the chief has closed the run and ended."""
        self._done = True
        self._chief_ended.wait()


def _exchange_heartbeats(
    connections: dict[int, JsonSocket],
    own: int,
    reductions: Count,
    lost: Lost,
    waits: Callable[[], bool] = lambda: True,
) -> None:
    """Tell all how far this process is, of index `own`; call `lost` for one that is gone or, if it `waits`, late."""
    counts, next_beat = ReductionCounts(max(own, *connections) + 1), 0.0
    while connections:
        for index in readable(connections, max(0.0, next_beat - time.monotonic())):
            messages = connections[index].received()
            last = {} if messages is None else next((each for each in messages if "reductions" not in each), None)
            for each in messages or ():
                counts.note(index, each.get("reductions", 0))
            if last is not None:
                del connections[index]
                lost(index, last)
        if time.monotonic() >= next_beat:
            counts.note(own, count := reductions())
            for connection in connections.values():
                connection.write({"reductions": count})
            next_beat = time.monotonic() + INTERVAL
        late = counts.straggler() if waits() else None
        if late is not None and late in connections:  # not `own`: then the others end
            connections.pop(late).socket.close()
            lost(late, {"failed": f"it has let the others wait for {TIMEOUT:.0f} s", "late": True})


def _listening(cluster: Cluster) -> socket.socket:
    address = cluster.addresses[cluster.index]
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        try:
            return socket.create_server((host.strip("[]"), int(port)), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return socket.create_server(("", int(port)), family=family)  # a name from outside, as of a container
    except OSError as error:
        rule = f"must have an address of its own that is free ({error.strerror})"
        raise ConfigError(f"worker {cluster.index}", rule, address) from error


def _compare(index: int, said: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if "refused" in said:
        raise ConfigError(f"worker {index}", f"refuses: {str(said['refused']).rstrip('.')}")
    for what in ("versions", "config"):
        here, there = own[what], said.get(what)
        there = there if isinstance(there, dict) else {}
        for key in here | there:
            if repr(here.get(key)) != repr(there.get(key)):  # NaN is not equal to itself
                rule = f"must be the same for all workers, and is {there.get(key)!r} on worker {index}"
                raise ConfigError(key, rule, here.get(key))
