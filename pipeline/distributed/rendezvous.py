"""The workers of a run meet before they join in TensorFlow, whose errors would come late and be long.

    each worker ─ its config and versions, or why it refuses ─► chief ─ the spec and the start, or a refusal ─► each

Each side proves to the other that it knows the run's secret (`cluster.secret`). The connections, to the chief's own
address, stay open to the end of the run. Over them a worker reports why it fails and notices that the chief is gone.
Heartbeats carry the number of all-reduces that a worker was ready for: the lowest one names the straggler.
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
from pipeline.distributed.door import Door, Visitor, hold
from pipeline.distributed.json_socket import JsonSocket, sealed, unsealed
from pipeline.distributed.straggler import (
    LONGEST,
    SILENCE,
    Count,
    Lost,
    exchange_heartbeats,
)

PATIENCE = (
    300.0  # seconds for all workers to come: a cluster starts them one after the other
)
REFUSING = 10.0  # seconds for which a chief that refuses its config waits for workers to tell them
FINISHED = (
    60.0  # the same if its run has finished: they import TensorFlow before they come
)


def statement(spec: RunSpec) -> dict[str, Any]:
    """Return what all workers must have in common: the config without what is a machine's own, and the versions."""
    packages = ("tensorflow", "keras", "numpy", "tensorflow-datasets", "scikit-learn")
    versions = {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
    return {
        "config": comparable(spec),
        "versions": {**versions, "pipeline": __version__},
    }


class Server:
    """The chief's side of the connections; a `ConfigError` says that its port is taken."""

    def __init__(self, cluster: Cluster, secret: bytes):
        self.cluster, self._secret, self._closed = cluster, secret, False
        self._door = Door(
            cluster.rendezvous or cluster.addresses[0], len(cluster.addresses), secret
        )
        self.address = self._door.address
        self._port: socket.socket | None = None  # kept for TensorFlow
        self._arrived: dict[int, Visitor] = {}
        self._lost: dict[int, dict[str, Any]] = {}  # what each said last

    def gather(
        self,
        own: Mapping[str, Any],
        answer: Mapping[str, Any],
        check: Callable[[], None],
    ) -> Cluster:
        """Wait for all workers, while `check` may raise; send them the `answer`, if all state what the chief states.

        Return the cluster with its ports.
        """
        try:
            self._wait(
                time.monotonic() + PATIENCE,
                check,
                lambda worker: _compare(worker.greeting, own),
            )
        except ConfigError as error:
            self.dismiss(error)
            raise
        finally:
            self._door.close()  # its port may be TensorFlow's from now on
        self._port = hold("worker 0", self.cluster.addresses[0])
        ports = {
            0: self._port.getsockname()[1],
            **{n: each.greeting["port"] for n, each in self._arrived.items()},
        }
        addresses = tuple(
            f"{at.rpartition(':')[0]}:{ports[n]}"
            for n, at in enumerate(self.cluster.addresses)
        )
        self._tell({"answer": {**answer, "addresses": addresses}})
        return replace(self.cluster, addresses=addresses)

    def dismiss(self, error: ConfigError | None = None) -> None:
        """Tell all workers, also those that come soon, that the chief refuses; without an error, that all is done."""
        if not self._closed:
            with suppress(ConfigError, OSError):
                self._wait(
                    time.monotonic() + (FINISHED if error is None else REFUSING),
                    lambda: None,
                    lambda _: None,
                )
            self._tell({"finished": True} if error is None else {"refused": str(error)})
        self.close()

    def watch(self, reductions: Count, lost: Lost) -> None:
        """Watch all workers from now on, in a thread, which calls `lost` for one that is gone or a straggler."""

        def noted(index: int, last: dict[str, Any]) -> None:
            if not self._closed:
                self._lost[index] = last
                lost(index, last)

        arguments = (dict(self._arrived), 0, reductions, noted)
        threading.Thread(
            target=exchange_heartbeats, args=arguments, daemon=True
        ).start()

    def lost(self, patience: float = 3.0) -> tuple[int, dict[str, Any]]:
        """Return the first worker that is silent or gone, and what it said last; 0 if none is within `patience`."""
        until = time.monotonic() + patience
        while True:
            now = time.monotonic()
            silent = (
                n for n, each in self._arrived.items() if now - each.heard > SILENCE
            )
            # The others lose a silent one too, and end before it does.
            if first := next((n for n in silent if n not in self._lost), 0):
                return first, {}
            if self._lost or now > until:
                return next(iter(self._lost.items()), (0, {}))
            time.sleep(0.05)  # the thread reads

    def close(self) -> None:
        self._closed = True
        self._door.close()
        if self._port is not None:
            self._port.close()
        for each in self._arrived.values():
            each.socket.close()

    def _wait(
        self,
        until: float,
        check: Callable[[], None],
        compare: Callable[[Visitor], None],
    ) -> None:
        addresses = self.cluster.addresses
        while len(self._arrived) + 1 < len(addresses):
            check()
            if time.monotonic() >= until:
                missing = [
                    f"{n} at {at}"
                    for n, at in enumerate(addresses)
                    if n not in {0, *self._arrived}
                ]
                rule = "must all be started, at about one time, with one secret"
                raise ConfigError(KEY, rule, f"no {', '.join(missing)}")
            for worker in self._door.arrivals(0.5):
                index = worker.greeting["index"]
                if (
                    index in self._arrived
                    and self._arrived[index].received() is not None
                ):
                    worker.tell(
                        {"refused": f"another worker {index} is there already"},
                        self._secret,
                    )
                    worker.socket.close()
                else:
                    self._arrived[index] = worker
                    compare(worker)

    def _tell(self, message: dict[str, Any]) -> None:
        for each in self._arrived.values():
            each.tell(message, self._secret)


class Client:
    """The side of a worker other than the chief."""

    def __init__(self, cluster: Cluster, secret: bytes):
        self.cluster, self._secret = cluster, secret
        self.told = (
            False  # whether the chief knows why this worker, or another one, refuses
        )
        self._port: socket.socket | None = None  # kept for TensorFlow
        self._connection: JsonSocket | None = None
        self._done = False

    def join(
        self, own: Mapping[str, Any], patience: float = PATIENCE
    ) -> dict[str, Any] | None:
        """Send this worker's `own` statement, and return the chief's answer; None if the run has finished."""
        try:
            self._port = hold(
                f"worker {self.cluster.index}",
                self.cluster.addresses[self.cluster.index],
            )
            own = {"port": self._port.getsockname()[1], **own}
        except ConfigError as error:
            own = {"refused": str(error)}
        challenge, until = secrets.token_hex(16), time.monotonic() + patience
        chief = self.cluster.rendezvous or self.cluster.addresses[0]
        host, _, port = chief.rpartition(":")
        while time.monotonic() < until:
            with suppress(OSError):  # the chief does not listen yet
                connection = JsonSocket(
                    socket.create_connection((host.strip("[]"), int(port)), timeout=5.0)
                )
                if (
                    asked := connection.read()
                ) is not None:  # it may search for a micro-batch size first
                    greeting = {
                        **own,
                        "index": self.cluster.index,
                        "challenge": challenge,
                    }
                    connection.write(
                        sealed(
                            greeting,
                            self._secret,
                            "worker",
                            str(asked.get("challenge")),
                        )
                    )
                    if (said := connection.read()) is not None:
                        answer = self._answer(
                            unsealed(said, self._secret, "chief", challenge)
                        )
                        self._connection = connection
                        return answer
            time.sleep(0.2)
        raise ConfigError(KEY, "must include a chief that answers", chief)

    def _answer(self, said: dict[str, Any] | None) -> dict[str, Any] | None:
        match said:
            case {"answer": dict(answer)}:
                return answer
            case {"finished": _}:
                return None
            case {"refused": str(why)}:
                self.told = True
                raise ConfigError(KEY, f"must all take part; refused: {why[:LONGEST]}")
        where = "in PIPELINE_SECRET or in hardware.secret_file"
        raise ConfigError(
            KEY, f"must all know one secret, {where}; the chief knows another, or none"
        )

    def refuse(self, error: ConfigError) -> bool:
        """Tell the chief that this worker refuses its config; return whether the chief knows."""
        with suppress(ConfigError):
            self.join({"refused": str(error)}, REFUSING)
        return self.told

    def watch(self, reductions: Count) -> None:
        """Watch the chief from now on, in a thread: this process ends when the chief is gone, or the straggler."""
        assert self._connection is not None

        def lost(_: int, last: dict[str, Any]) -> None:
            os._exit(
                2 if "refused" in last else int(not self._done)
            )  # the main thread waits, and cannot be woken

        arguments = ({0: self._connection}, 1, reductions, lost, lambda: not self._done)
        threading.Thread(
            target=exchange_heartbeats, args=arguments, daemon=True
        ).start()

    def fail(self, why: Mapping[str, str]) -> None:
        """Tell the chief why this worker has `failed`, or `refused`."""
        if self._connection is not None:
            self._connection.write(why)
            self.told = True

    def wait(self) -> None:
        """Wait until the chief has closed the run and ended, and with it this process."""
        self._done = True
        sys.stderr.flush()
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 2
        )  # TensorFlow may still report that it misses the chief
        threading.Event().wait()


def _compare(said: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if "refused" in said:
        raise ConfigError(
            f"worker {said['index']}",
            f"refuses: {said['refused'][:LONGEST].rstrip('.')}",
        )
    for what in ("versions", "config"):
        here, there = own[what], said[what]
        for key in here | there:
            if repr(here.get(key)) != repr(
                there.get(key)
            ):  # NaN is not equal to itself
                value = repr(there.get(key))[:LONGEST]
                rule = f"must be the same for all workers, and is {value} on worker {said['index']}"
                raise ConfigError(key[:LONGEST], rule, here.get(key))
