"""The workers of a run meet before they join in TensorFlow, whose errors would come late and be long.

    each worker ─ its config and versions, or why it refuses ─► the chief ─ with what to begin, or a refusal ─► each

The connections, to the chief's own address, stay open to the end of the run: over them a worker says why it fails, sees
that the chief is gone, and each says how far it is, so that who hangs is known. One line of JSON is one message.
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

from omegaconf import DictConfig

from pipeline import __version__
from pipeline.common.errors import ConfigError
from pipeline.common.secrets import masked
from pipeline.config import validate as configuration
from pipeline.config.cluster import KEY, Cluster
from pipeline.distributed.json_socket import Line, readable
from pipeline.distributed.straggler import HANGS, Lag

PATIENCE = 300.0  # seconds for all workers to come: a cluster starts them one after the other
INTERVAL = 2.0  # seconds between two looks at the others
TOLD = 10.0  # seconds in which a chief that refuses its config waits for workers to tell
FINISHED = 60.0  # the same of one whose run has finished: they import TensorFlow before they come
_OWN = ("tracking.", "trust.", "start.", "training.resume", "dataset.data_dir", "dataset.download", "hardware.memory")


def statement(config: DictConfig) -> dict[str, Any]:
    """Return what all workers must have in common: the config without what is a machine's own, and the versions."""
    leaves = configuration.leaves(masked(configuration.plain(config)))
    packages = ("tensorflow", "keras", "numpy", "tensorflow-datasets", "scikit-learn")
    versions = {name: importlib.metadata.version(name) for name in packages} | {"pipeline": __version__}
    return {
        "config": {key: value for key, value in leaves.items() if not key.startswith(_OWN)},
        "versions": {"python": platform.python_version(), **versions},
    }


class Chief:
    """The chief's side.

    Raises:
        ConfigError: its port is taken.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._workers: dict[int, Line] = {}
        self._failed: dict[int, dict[str, Any]] = {}
        self._closed = False
        self._server = _listening(cluster)

    def gather(self, own: Mapping[str, Any], answer: Mapping[str, Any], look: Callable[[], None]) -> None:
        """Wait for all others, compare what they say with the chief's `own` statement, and give each the `answer`.

        `look` is called meanwhile, and may raise.

        Raises:
            ConfigError: a worker refuses its config, or has another one, or did not come. All have been told.
        """
        until = time.monotonic() + PATIENCE
        try:
            while len(self._workers) + 1 < len(self.cluster.addresses):
                self._accept(until, look)
                for index, line in self._workers.items():
                    _compare(line.said, own, index)
        except ConfigError as error:
            self.refuse(error)
            raise
        finally:
            self._server.close()  # the port is TensorFlow's from now on
        for line in self._workers.values():
            line.write({"answer": answer})

    def refuse(self, error: ConfigError) -> None:
        """Tell all others that the chief refuses."""
        self._dismiss({"refused": str(error)}, TOLD)

    def finished(self) -> None:
        """Tell all others that the run has finished, so that nothing is left to do."""
        self._dismiss({"finished": True}, FINISHED)

    def _dismiss(self, word: Mapping[str, Any], patience: float) -> None:
        """Say a last word to all others, those too that come within `patience` seconds."""
        until = time.monotonic() + patience
        with suppress(ConfigError, OSError):
            while len(self._workers) + 1 < len(self.cluster.addresses):
                self._accept(until, lambda: None)
        for line in self._workers.values():
            line.write(word)
        self.close()

    def watch(self, arrived: Callable[[], int], lost: Callable[[int, Mapping[str, Any]], None]) -> None:
        """Look after all others from now on, in a thread.

        Args:
            arrived: returns how many sums this worker had ready for the others.
            lost: called with the index of a worker that is gone, or lets all others wait, and with what it said of it.
        """
        threading.Thread(target=self._watch, args=(arrived, lost), daemon=True).start()

    def failed(self, patience: float = 3.0) -> tuple[int, dict[str, Any]]:
        """Return which worker has failed or refused, and why, as it says itself; 0 and nothing where none says so."""
        until = time.monotonic() + patience
        while not self._failed and time.monotonic() < until:
            time.sleep(0.05)  # the thread reads
        return next(iter(self._failed.items()), (0, {}))

    def close(self) -> None:
        """Let all others go."""
        self._closed = True
        self._server.close()
        for line in self._workers.values():
            line.socket.close()

    def _watch(self, arrived: Callable[[], int], lost: Callable[[int, Mapping[str, Any]], None]) -> None:
        try:
            self._look_after(dict(self._workers), arrived, lost)
        except (OSError, ValueError):
            if not self._closed:  # else a connection was closed in the middle
                raise

    def _look_after(
        self,
        lines: dict[int, Line],
        arrived: Callable[[], int],
        lost: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        lag, beat = Lag(len(self.cluster.addresses)), 0.0
        while lines and not self._closed:
            left = max(0.0, beat - time.monotonic())
            for index in readable(lines, left):
                messages = lines[index].received()
                said = {} if messages is None else next((each for each in messages if "arrived" not in each), None)
                for each in messages or ():
                    lag.note(index, each.get("arrived", 0))
                if said is not None and not self._closed:
                    del lines[index]
                    self._failed |= {index: said} if said else {}
                    lost(index, said)
            if time.monotonic() >= beat:
                lag.note(0, count := arrived())
                for line in lines.values():
                    line.write({"arrived": count})
                beat = time.monotonic() + INTERVAL
            if late := lag.late():  # not 0: where this worker is late, the others end
                self._failed[late] = {"failed": f"it has let the others wait for {HANGS:.0f} s", "late": True}
                lines.pop(late).socket.close()
                lost(late, self._failed[late])

    def _accept(self, until: float, look: Callable[[], None]) -> None:
        """Let one more worker come."""
        while True:
            look()
            self._server.settimeout(0.5)
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                if time.monotonic() < until:
                    continue
                missing = [number for number in range(1, len(self.cluster.addresses)) if number not in self._workers]
                places = ", ".join(f"{number} at {self.cluster.addresses[number]}" for number in missing)
                raise ConfigError(KEY, "must all be started, at about one time", f"no {places}") from None
            line = Line(connection)
            said = line.read(min(until, time.monotonic() + 5.0))
            if said is not None and said.get("index") in range(1, len(self.cluster.addresses)):
                line.said = said
                self._workers[said["index"]] = line
                return
            connection.close()  # of somebody else


class Member:
    """The side of another worker."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._line: Line | None = None
        self.told = False  # whether the chief knows why this worker, or another one, refuses
        self._done, self._over = False, threading.Event()

    def join(self, own: Mapping[str, Any], patience: float = PATIENCE) -> dict[str, Any] | None:
        """Say what is this worker's `own`, and return what the chief answers; None where the run has finished.

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
            with suppress(OSError):  # it is not there yet
                line = Line(socket.create_connection((host.strip("[]"), int(port)), timeout=5.0))
                line.write({"index": self.cluster.index, **own})
                said = line.read(float("inf"))  # it may search for a micro-batch size meanwhile
                if said is not None and "answer" in said:
                    self._line = line
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
        """Tell the chief that this worker refuses its config; return whether it knows."""
        with suppress(ConfigError):
            self.join({"refused": str(error)}, TOLD)
        return self.told

    def watch(self, arrived: Callable[[], int]) -> None:
        """Look after the chief from now on, in a thread: this process ends where it is gone, or hangs.

        `arrived` returns how many sums this worker had ready for the others.
        """
        threading.Thread(target=self._watch, args=(arrived,), daemon=True).start()

    def fail(self, why: Mapping[str, str]) -> None:
        """Tell the chief why this worker has `failed`, or `refused`."""
        if self._line is not None:
            self._line.write(why)
            self.told = True

    def wait(self) -> None:
        """Return when the chief has ended, as the run has."""
        self._done = True
        self._over.wait()

    def _watch(self, arrived: Callable[[], int]) -> None:
        assert self._line is not None
        lag, beat = Lag(2), 0.0
        while True:
            messages = self._line.received(max(0.0, beat - time.monotonic()))
            if messages is None and self._done:
                self._over.set()
                return
            for said in messages or ():
                lag.note(0, said.get("arrived", 0))
            lag.note(1, arrived())
            refused = any("refused" in said for said in messages or ())
            if messages is None or refused or (lag.late() == 0 and not self._done):
                os._exit(2 if refused else 1)  # the main thread could not be woken: it waits in TensorFlow
            if time.monotonic() >= beat:
                self._line.write({"arrived": arrived()})
                beat = time.monotonic() + INTERVAL


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
