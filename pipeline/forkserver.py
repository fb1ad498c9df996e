"""One import of MLflow for all jobs of a sweep: a process that has it forks from itself the shipper of each job.

    pipeline sweep ─► `python -m pipeline.forkserver` ─► a shipper for each job's `pipeline.journal.Journal`

Importing MLflow is the larger part of what a small job costs beside TensorFlow. The server opens no store and starts
no thread, so that a fork of it is as good as a new process. Without a server, as in a single run or in a Slurm job on
another machine, a shipper is a new process.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ADDRESS = "PIPELINE_FORKSERVER"  # environment variable of the jobs: path of the server's socket
PATIENCE = 2.0  # seconds for the server to fork, which takes it a hundredth of one


class Forked:
    """A shipper that the server has forked; used as a `subprocess.Popen` with its ends of the pipes.

    Args:
        address: of the server.
        environment: of the shipper.

    Attributes:
        pid: of the shipper's process.

    Raises:
        OSError: no server answers there, or not in time.
    """

    def __init__(self, address: str, environment: dict[str, str]):
        commands, to_shipper = os.pipe()
        from_shipper, answers = os.pipe()
        self.stdin, self.stdout = os.fdopen(to_shipper, "w"), os.fdopen(from_shipper)
        try:
            request = json.dumps({"environment": environment, "folder": os.getcwd()}).encode()
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(PATIENCE)
                connection.connect(address)
                socket.send_fds(connection, [b" "], [commands, answers, 2])
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(32)
            if not answer:
                raise ConnectionError(f"{address} has forked nothing")
        except BaseException:
            self.stdin.close()  # a shipper that is forked too late finds that nobody wants it
            self.stdout.close()
            raise
        finally:
            os.close(commands)
            os.close(answers)
        self.pid = int(answer)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        with contextlib.suppress(OSError):  # it has ended
            os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> None:
        """Returns when the shipper has ended, and with it its end of the pipe."""
        self.stdout.read()


def forked(environment: dict[str, str]) -> Forked | None:
    """A shipper of the server that this process was told of; None where there is none."""
    address = os.environ.get(ADDRESS)
    try:
        return Forked(address, environment) if address else None
    except OSError:  # it still imports, the sweep is over, or it is on another machine
        return None


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Has a server for the processes that are started meanwhile."""
    if sys.platform != "linux":  # elsewhere a process that was forked may not use what its libraries rely on
        yield
        return
    outer = os.environ.get(ADDRESS)  # of a sweep whose job this is
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without it the jobs take longer, and that is all
            os.environ[ADDRESS] = stack.enter_context(_server())
        try:
            yield
        finally:
            os.environ.pop(ADDRESS, None)
            if outer is not None:
                os.environ[ADDRESS] = outer


@contextlib.contextmanager
def _server() -> Iterator[str]:
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]
    with tempfile.TemporaryDirectory(prefix="pipeline-", ignore_cleanup_errors=True) as folder:
        address = str(Path(folder) / "socket")
        with subprocess.Popen(
            [sys.executable, "-m", "pipeline.forkserver", address],
            stdin=subprocess.PIPE,  # which ends with this process, however it does
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        ) as server:
            try:
                yield address
            finally:
                server.kill()


def main() -> None:
    """Forks a shipper for each connection until standard input ends, and nobody waits any more."""
    inherited = set(os.environ)
    from pipeline import shipper

    importlib.import_module("mlflow.store.tracking.sqlalchemy_store")  # which MLflow imports for a database
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a shipper ended but its trainer, by the pipe
    address = Path(sys.argv[1])
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(str(address))
        except OSError:  # no socket can be there: the jobs do without
            return
        listener.listen(128)
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
    shipper.main()


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
    """Makes this process one that was started where and as the trainer was."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


if __name__ == "__main__":
    main()
