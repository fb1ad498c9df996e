"""One import for all jobs of a sweep: a process that has made it forks from itself what each job needs.

    pipeline sweep ─► `python -m pipeline.forkserver ADDRESS pipeline.forked_job` ─► each job
                   ─► `python -m pipeline.forkserver ADDRESS pipeline.shipper` ─► the shipper of each job's `Journal`

Importing TensorFlow, and MLflow beside it, is the larger part of what a small job costs. A server opens no store and
no device, so that a fork of it is as good as a new process. Where there is none, as in a single run or in a Slurm job
on another machine, or where it does not answer, a new process is started in its place.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

ADDRESS = "PIPELINE_FORKSERVER"  # environment variable of the jobs: path of the socket that forks shippers
PATIENCE = 2.0  # seconds for a server to fork, which takes it a hundredth of one
IMPORT = 60.0  # seconds for it to import, which a job without it would do as well


class Forked:
    """A process that a server has forked; used as a `subprocess.Popen` with its ends of the pipes.

    Args:
        address: of the server.
        environment: of the process.

    Attributes:
        pid: of the process.
        stdin, stdout: this process' ends of the pipes; text.

    Raises:
        OSError: no server answers there, or not in time.
    """

    def __init__(self, address: str, environment: dict[str, str]):
        self._pipes = contextlib.ExitStack()
        request = json.dumps({"environment": environment, "folder": os.getcwd()}).encode()
        with contextlib.ExitStack() as opened:
            commands, self.stdin = _pipe(opened)
            self.stdout, answers = _pipe(opened)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(PATIENCE)
                connection.connect(address)
                socket.send_fds(connection, [b" "], [commands.fileno(), answers.fileno(), 2])
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(32)
            if not answer:
                raise ConnectionError(f"{address} has forked nothing")
            self._pipes = opened.pop_all()  # else all are closed: one that is forked too late finds nobody there
        commands.close()
        answers.close()
        self.pid = int(answer)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, and does not read what it was to be told
            self._pipes.close()

    def poll(self) -> int | None:
        """None until the process has ended, and with it its end of the pipe."""
        waiting = select.poll()
        waiting.register(self.stdout, 0)  # that the other end is closed is always told
        return 0 if waiting.poll(0) else None

    def send_signal(self, number: int) -> None:
        """Does nothing where the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Returns when the process has ended."""
        self.stdout.read()


def _pipe(opened: contextlib.ExitStack) -> tuple[TextIO, TextIO]:
    reader, writer = os.pipe()
    return opened.enter_context(os.fdopen(reader)), opened.enter_context(os.fdopen(writer, "w"))


class Server:
    """A process that imports a module, and then forks what runs the module's `main`.

    Attributes:
        address: of its socket, which is there once it can fork.
        forked: of what it has forked for this process, what has not ended.
    """

    def __init__(self, address: str, process: subprocess.Popen[bytes]):
        self.address, self.process = address, process
        self.forked: list[Forked] = []
        self._lock = threading.Lock()

    @property
    def imports(self) -> bool:
        """Whether it cannot fork yet."""
        return not os.path.exists(self.address)

    def fork(self, environment: dict[str, str]) -> Forked | None:
        """Waits until the server has imported; None where it has ended, or hangs."""
        until = time.monotonic() + IMPORT
        while self.imports:
            if self.process.poll() is not None:
                return None
            if time.monotonic() > until:
                self.process.kill()  # nobody else is to wait
                return None
            time.sleep(0.01)
        try:
            forked = Forked(self.address, environment)
        except OSError:
            return None
        with self._lock:
            self.forked = [*(other for other in self.forked if other.poll() is None), forked]
        return forked


def shipper_environment() -> dict[str, str]:
    """In which a shipper, that runs no other's code, finds this package where this process did."""
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def forked(environment: dict[str, str]) -> Forked | None:
    """A shipper, of the server that this process was told of; None where there is none, or it still imports."""
    address = os.environ.get(ADDRESS)
    try:
        return Forked(address, environment) if address else None
    except OSError:  # the sweep is over as well, or on another machine
        return None


@contextlib.contextmanager
def serving_shippers() -> Iterator[None]:
    """Has a server of shippers for the processes that are started meanwhile."""
    outer = os.environ.get(ADDRESS)  # of a sweep whose job this is
    with serving("pipeline.shipper", shipper_environment()) as server:
        if server is not None:
            os.environ[ADDRESS] = server.address
        try:
            yield
        finally:
            os.environ.pop(ADDRESS, None)
            if outer is not None:
                os.environ[ADDRESS] = outer


@contextlib.contextmanager
def serving(module: str, environment: Mapping[str, str] = os.environ) -> Iterator[Server | None]:
    """A server that forks what runs `main` of `module`; None where there can be none.

    Args:
        module: has `prepare`, which imports what `main` needs, and raises where that cannot be forked.
        environment: of the server. What is forked from it searches the path that it says for code.
    """
    with contextlib.ExitStack() as stack:
        server = None
        # Elsewhere a process that was forked may not use what its libraries rely on.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # without it the jobs take longer, and that is all
                server = stack.enter_context(_server(module, environment))
        yield server


@contextlib.contextmanager
def _server(module: str, environment: Mapping[str, str]) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="pipeline-", ignore_cleanup_errors=True) as folder:
        address = str(Path(folder) / "socket")
        with subprocess.Popen(
            [sys.executable, "-u", "-m", "pipeline.forkserver", address, module],
            stdin=subprocess.PIPE,  # which ends with this process, however it does
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        ) as server:
            try:
                yield Server(address, server)
            finally:
                server.kill()


def main() -> None:
    """Forks for each connection until standard input ends, and nobody waits any more."""
    inherited = set(os.environ)
    address = Path(sys.argv[1])
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(f"{address}.new")
        except OSError:  # no socket can be there: the jobs do without
            return
        module = importlib.import_module(sys.argv[2])
        module.prepare()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a process ended but who has it, by the pipe
        listener.listen(128)
        os.rename(f"{address}.new", address)
        asked = _serve(listener)
    if asked is None:
        with contextlib.suppress(OSError):  # where the process that made them could not
            address.unlink()
            address.parent.rmdir()
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors = asked
    for name in inherited - set(request["environment"]):
        os.environ.pop(name, None)
    _take_over(request, descriptors)
    module.main()


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What is asked of this process, which is then a fork; None in the server, at its end."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener not in ready:
            return None
        connection, _ = listener.accept()
        descriptors: list[int] = []
        # Who asks may have been killed by now, and there may be no process left to be had.
        with contextlib.suppress(OSError, ValueError), connection:
            connection.settimeout(PATIENCE)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as text:
                request = json.load(text)
            process = os.fork()
            if process == 0:
                return request, descriptors
            connection.sendall(str(process).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Makes this process one that was started where and as the process that asked was."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


if __name__ == "__main__":
    main()
