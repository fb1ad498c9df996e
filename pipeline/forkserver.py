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

ADDRESS = "PIPELINE_FORKSERVER"  # environment variable of the jobs: path of the server's socket
LONGEST = 107  # bytes of such a path (unix(7))


class Forked:
    """A shipper that the server forks; used as a `subprocess.Popen` with its ends of the pipes.

    Args:
        address: of the server.
        environment: of the shipper.

    Raises:
        OSError: no server answers there.
    """

    def __init__(self, address: str, environment: dict[str, str]):
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.connect(address)
        except OSError:
            self._connection.close()
            raise
        commands, to_shipper = os.pipe()
        from_shipper, answers = os.pipe()
        self.stdin, self.stdout = os.fdopen(to_shipper, "w"), os.fdopen(from_shipper)
        try:
            request = json.dumps({"environment": environment, "folder": os.getcwd()}).encode()
            socket.send_fds(self._connection, [b" "], [commands, answers, 2])
            self._connection.sendall(request)
            self._connection.shutdown(socket.SHUT_WR)
        finally:
            os.close(commands)
            os.close(answers)

    @property
    def pid(self) -> int:
        """Of the shipper's process; waits for the server to fork it."""
        if self._connection.fileno() >= 0:
            self._pid = 0
            with contextlib.suppress(OSError), self._connection, self._connection.makefile() as answer:
                self._pid = int(answer.read() or 0)
        return self._pid

    def terminate(self) -> None:
        """Sends SIGTERM."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> None:
        """Returns when the shipper has ended, and with it its end of the pipe."""
        self.stdout.read()


def forked(environment: dict[str, str]) -> Forked | None:
    """A shipper of the server that this process was told of; None where there is none."""
    address = os.environ.get(ADDRESS)
    try:
        return Forked(address, environment) if address else None
    except OSError:  # the sweep is over, or on another machine
        return None


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Has a server for the processes that are started meanwhile."""
    if sys.platform != "linux":  # elsewhere a process that was forked may not use what its libraries rely on
        yield
        return
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "socket")
        if len(os.fsencode(address)) > LONGEST:
            yield
            return
        listener.bind(address)
        listener.listen(128)  # jobs that come while it imports wait here
        paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")]
        server = subprocess.Popen(
            [sys.executable, "-m", "pipeline.forkserver", str(listener.fileno())],
            stdin=subprocess.PIPE,  # which ends with this process, however it does
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        listener.close()
        outer = os.environ.get(ADDRESS)  # of a sweep whose job this is
        os.environ[ADDRESS] = address
        try:
            yield
        finally:
            if outer is None:
                del os.environ[ADDRESS]
            else:
                os.environ[ADDRESS] = outer
            server.kill()
            server.communicate()


def main() -> None:
    """Forks a shipper for each connection until standard input ends, and nobody waits any more."""
    from pipeline import shipper

    importlib.import_module("mlflow.store.tracking.sqlalchemy_store")  # which MLflow imports for a database
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a shipper ended but its trainer, by the pipe
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _take_over(*asked)
        shipper.main()


def _serve(listener: socket.socket) -> tuple[bytes, list[int]] | None:
    """What is asked of this process, which is then a fork; None in the server, at its end."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener not in ready:
            return None
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), connection:  # who asks may have been killed by now
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as request:
                asked = request.read()
            process = os.fork()
            if process == 0:
                listener.close()
                return asked, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(str(process).encode())


def _take_over(request: bytes, descriptors: list[int]) -> None:
    """Makes this process one that was started where and as the trainer was."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    asked = json.loads(request)
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])


if __name__ == "__main__":
    main()
