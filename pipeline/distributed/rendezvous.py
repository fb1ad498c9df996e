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


def statement(spec: RunSpec) -> dict[str, Any]:
    """Return what all workers must have in common: the config without what is a machine's own, and the versions."""
    packages = ("tensorflow", "keras", "numpy", "tensorflow-datasets", "scikit-learn")
    versions = {name: importlib.metadata.version(name) for name in packages} | {"pipeline": __version__}
    return {
        "config": comparable(spec),
        "versions": {"python": platform.python_version(), **versions},
    }


class Server:
    """The chief's side of the connections.

    Raises:
        ConfigError: the chief's port is taken.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._workers: dict[int, JsonSocket] = {}
        self._failed: dict[int, dict[str, Any]] = {}
        self._closed = False
        self._server = _listening(cluster)

    def gather(self, own: Mapping[str, Any], answer: Mapping[str, Any], check: Callable[[], None]) -> None:
        """Wait for all workers, compare their statements with the chief's `own`, and send each the `answer`.

        `check` is called meanwhile, and may raise.

        Raises:
            ConfigError: a worker refuses its config, or has another one, or did not come. All have been told.
        """
        until = time.monotonic() + PATIENCE
        try:
            while len(self._workers) + 1 < len(self.cluster.addresses):
                self._accept(until, check)
                for index, connection in self._workers.items():
                    _compare(connection.greeting, own, index)
        except ConfigError as error:
            self.refuse(error)
            raise
        finally:
            self._server.close()  # the port is TensorFlow's from now on
        for connection in self._workers.values():
            connection.write({"answer": answer})

    def refuse(self, error: ConfigError) -> None:
        """Tell all workers that the chief refuses."""
        self._dismiss({"refused": str(error)}, REFUSING)

    def finished(self) -> None:
        """Tell all workers that the run has finished, so that nothing is left to do."""
        self._dismiss({"finished": True}, FINISHED)

    def _dismiss(self, word: Mapping[str, Any], patience: float) -> None:
        """Send a last message to all workers, also to those that come within `patience` seconds."""
        until = time.monotonic() + patience
        with suppress(ConfigError, OSError):
            while len(self._workers) + 1 < len(self.cluster.addresses):
                self._accept(until, lambda: None)
        for connection in self._workers.values():
            connection.write(word)
        self.close()

    def watch(self, reductions: Callable[[], int], lost: Callable[[int, Mapping[str, Any]], None]) -> None:
        """Watch all workers from now on, in a thread.

        Args:
            reductions: returns the number of all-reduces that the chief was ready for.
            lost: called with the index of a worker that is gone or a straggler, and with its last message.
        """
        threading.Thread(target=self._watch, args=(reductions, lost), daemon=True).start()

    def failed(self, patience: float = 3.0) -> tuple[int, dict[str, Any]]:
        """Return the worker that reported to have failed or refused, with its message; 0 and nothing without one."""
        until = time.monotonic() + patience
        while not self._failed and time.monotonic() < until:
            time.sleep(0.05)  # the thread reads
        return next(iter(self._failed.items()), (0, {}))

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._server.close()
        for connection in self._workers.values():
            connection.socket.close()

    def _watch(self, reductions: Callable[[], int], lost: Callable[[int, Mapping[str, Any]], None]) -> None:
        try:
            self._exchange_heartbeats(dict(self._workers), reductions, lost)
        except (OSError, ValueError):
            if not self._closed:  # else a connection was closed in the middle
                raise

    def _exchange_heartbeats(
        self,
        connections: dict[int, JsonSocket],
        reductions: Callable[[], int],
        lost: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        counts, next_beat = ReductionCounts(len(self.cluster.addresses)), 0.0
        while connections and not self._closed:
            for index in readable(connections, max(0.0, next_beat - time.monotonic())):
                messages = connections[index].received()
                last = {} if messages is None else next((each for each in messages if "reductions" not in each), None)
                for each in messages or ():
                    counts.note(index, each.get("reductions", 0))
                if last is not None and not self._closed:
                    del connections[index]
                    self._failed |= {index: last} if last else {}
                    lost(index, last)
            if time.monotonic() >= next_beat:
                counts.note(0, count := reductions())
                for connection in connections.values():
                    connection.write({"reductions": count})
                next_beat = time.monotonic() + INTERVAL
            if late := counts.straggler():  # not 0: if the chief is the straggler, the workers end
                self._failed[late] = {"failed": f"it has let the others wait for {TIMEOUT:.0f} s", "late": True}
                connections.pop(late).socket.close()
                lost(late, self._failed[late])

    def _accept(self, until: float, check: Callable[[], None]) -> None:
        """Wait for one more worker."""
        while True:
            check()
            self._server.settimeout(0.5)
            try:
                accepted, _ = self._server.accept()
            except TimeoutError:
                if time.monotonic() < until:
                    continue
                missing = [number for number in range(1, len(self.cluster.addresses)) if number not in self._workers]
                places = ", ".join(f"{number} at {self.cluster.addresses[number]}" for number in missing)
                raise ConfigError(KEY, "must all be started, at about one time", f"no {places}") from None
            connection = JsonSocket(accepted)
            greeting = connection.read(min(until, time.monotonic() + 5.0))
            if greeting is not None and greeting.get("index") in range(1, len(self.cluster.addresses)):
                connection.greeting = greeting
                self._workers[greeting["index"]] = connection
                return
            accepted.close()  # no worker of this run


class Client:
    """The side of a worker other than the chief.

    Attributes:
        told: whether the chief knows why this worker, or another one, refuses.
    """

    def __init__(self, cluster: Cluster):
        self.cluster, self.told = cluster, False
        self._connection: JsonSocket | None = None
        self._done, self._chief_ended = False, threading.Event()

    def join(self, own: Mapping[str, Any], patience: float = PATIENCE) -> dict[str, Any] | None:
        """Send this worker's `own` statement, and return the chief's answer; None if the run has finished.

        Raises:
            ConfigError: the chief refuses, or does not answer.
        """
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
                said = connection.read(float("inf"))  # it may search for a micro-batch size meanwhile
                if said is not None and "answer" in said:
                    self._connection = connection
                    answer: dict[str, Any] = said["answer"]
                    return answer
                if said is not None and "finished" in said:
                    return None
                if said is not None:
                    self.told = True
                    raise ConfigError(KEY, f"must all take part; refused: {said.get('refused')}")
            time.sleep(0.2)
        raise ConfigError(KEY, "must include a chief that answers", self.cluster.addresses[0])

    def refuse(self, error: ConfigError) -> bool:
        """Tell the chief that this worker refuses its config; return whether the chief knows."""
        with suppress(ConfigError):
            self.join({"refused": str(error)}, REFUSING)
        return self.told

    def watch(self, reductions: Callable[[], int]) -> None:
        """Watch the chief from now on, in a thread: this process ends when the chief is gone, or the straggler.

        `reductions` returns the number of all-reduces that this worker was ready for.
        """
        threading.Thread(target=self._watch, args=(reductions,), daemon=True).start()

    def fail(self, why: Mapping[str, str]) -> None:
        """Tell the chief why this worker has `failed`, or `refused`."""
        if self._connection is not None:
            self._connection.write(why)
            self.told = True

    def wait(self) -> None:
        """Wait until the chief has closed the run and ended."""
        self._done = True
        self._chief_ended.wait()

    def _watch(self, reductions: Callable[[], int]) -> None:
        assert self._connection is not None
        counts, next_beat = ReductionCounts(2), 0.0
        while True:
            messages = self._connection.received(max(0.0, next_beat - time.monotonic()))
            if messages is None and self._done:
                self._chief_ended.set()
                return
            for said in messages or ():
                counts.note(0, said.get("reductions", 0))
            counts.note(1, reductions())
            refused = any("refused" in said for said in messages or ())
            if messages is None or refused or (counts.straggler() == 0 and not self._done):
                os._exit(2 if refused else 1)  # the main thread waits in TensorFlow, and cannot be woken
            if time.monotonic() >= next_beat:
                self._connection.write({"reductions": reductions()})
                next_beat = time.monotonic() + INTERVAL


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


def _compare(said: Mapping[str, Any], own: Mapping[str, Any], index: int) -> None:
    if "refused" in said:
        raise ConfigError(f"worker {index}", f"refuses: {str(said['refused']).rstrip('.')}")
    for what in ("versions", "config"):
        here, there = own[what], said.get(what)
        there = there if isinstance(there, dict) else {}
        for key in [*here, *(key for key in there if key not in here)]:
            if repr(here.get(key)) != repr(there.get(key)):  # NaN is not equal to itself
                rule = f"must be the same for all workers, and is {there.get(key)!r} on worker {index}"
                raise ConfigError(key, rule, here.get(key))
