"""Starts Python processes that have TensorFlow and MLflow loaded when they begin.

They are forks of one server that has imported both:

    pytest ─► `python -m tests.warm ADDRESS` ─► each `Python`
                                                ├─► the processes that it starts itself
                                                └─► its forkserver

The import is the larger part of what a small run costs. A fork has its own session,
folder, environment, pipes and module `__main__`, as if it had been started. No code of
the project has run in it except the imports, and no device is open. A test of something
that reads the environment at import, or of the start itself, needs a new process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests import killing

# The first sets what MLflow reads when it is imported.
IMPORTS = (
    "pipeline.tracking.store",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.models",
    "mlflow.keras",
    "tensorflow",
    "keras",
    "tensorflow_datasets",
    "sklearn.datasets",
    "hydra.main",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher",
    "hydra_plugins.pipeline_launcher",
    "pipeline.cli.train",
    "pipeline.run.run",
    "pipeline.components.fitting",
    "pipeline.tracking.sync_run",
)
PATIENCE = 180  # seconds for the imports, on a busy machine


class Server:
    """The process that imports and forks. It ends with the process that made it.

    Args:
        folder: where its socket and its log are.
    """

    def __init__(self, folder: Path):
        self.address = address_in(folder)
        with (folder / "warm.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", self.address],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A shell's background job ignores Ctrl-C, and so would its children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def address_in(folder: Path) -> str:
    """Return the address of a server whose folder is `folder`."""
    return str(folder / "warm.socket")


class Python:
    """`python ARGUMENTS` as a fork of the server; used like a `subprocess.Popen`.

    Args:
        address: of the server.
        arguments: `-m MODULE …` or `-c CODE …`; with `-P` before them, modules are not
            searched in the folder.
        cwd, env: folder and environment of the process; None for those of this one.
        stdin: None for no input, or `subprocess.PIPE`.
        stdout, stderr: `subprocess.PIPE`, an open file, or None for this process's own.
        text: whether the pipes carry text, not bytes.
    """

    def __init__(
        self,
        address: str,
        arguments: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: IO | int | None = subprocess.PIPE,
        stderr: IO | int | None = subprocess.PIPE,
        text: bool = True,
    ):
        self.args = ["python", *arguments]
        self.returncode: int | None = None
        self.stdin: IO | None = None
        self.stdout: IO | None = None
        self.stderr: IO | None = None

        request = {
            "arguments": list(arguments),
            "folder": str(cwd or Path.cwd()),
            "environment": dict(env or os.environ),
        }
        kind = "" if text else "b"
        # The fork gets copies of its ends of the pipes; this process closes its own.
        with contextlib.ExitStack() as its_ends:
            out = err = 0
            if stdin == subprocess.PIPE:
                commands, self.stdin = _pipe(its_ends, f"w{kind}")
            else:
                commands = os.open(os.devnull, os.O_RDONLY)
                its_ends.callback(os.close, commands)
            if stdout == subprocess.PIPE:
                out, self.stdout = _pipe(its_ends, f"r{kind}")
            else:
                out = _descriptor(stdout, default=1)
            if stderr == subprocess.PIPE:
                err, self.stderr = _pipe(its_ends, f"r{kind}")
            else:
                err = _descriptor(stderr, default=2)

            self._connection = _connected(address)
            socket.send_fds(self._connection, [b" "], [commands, out, err])
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            self._answers = self._connection.makefile("r")
            self.pid = int(self._answers.readline())

    def __enter__(self) -> Python:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()

    def poll(self) -> int | None:
        """Return the exit status; None while it runs.

        If a signal ended it, this is minus the signal's number.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, at most `timeout` seconds, and return its exit status."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._answers.readline())
            self._connection.close()
        return self.returncode

    def communicate(
        self, input: Any = None, timeout: float | None = None
    ) -> tuple[Any, Any]:
        """Return what it wrote to its pipes once both are closed and it has ended."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                if input:
                    self.stdin.write(input)

        until = None
        if timeout is not None:
            until = time.monotonic() + timeout

        def remaining() -> float | None:
            if until is None:
                return None
            return max(until - time.monotonic(), 0)

        texts: list[Any] = [None, None]

        def read(index: int, stream: IO) -> None:
            texts[index] = stream.read()

        # Both pipes are read at once: a full one would stop the process.
        readers = []
        for index, stream in enumerate((self.stdout, self.stderr)):
            if stream is not None:
                reader = threading.Thread(
                    target=read, args=(index, stream), daemon=True
                )
                reader.start()
                readers.append(reader)
        for reader in readers:
            reader.join(remaining())
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(remaining())
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _pipe(its_ends: contextlib.ExitStack, mode: str) -> tuple[int, IO]:
    """Return the two ends of a pipe: the other process' and this one's.

    The first is closed by `its_ends`; the second is opened in `mode`.
    """
    reader, writer = os.pipe()
    if mode.startswith("r"):
        its_ends.callback(os.close, writer)
        return writer, os.fdopen(reader, mode)
    its_ends.callback(os.close, reader)
    return reader, os.fdopen(writer, mode)


def _descriptor(stream: IO | int | None, default: int) -> int:
    """Return the descriptor of an open file; `default` for None."""
    if stream is None:
        return default
    if isinstance(stream, int):
        return stream
    return stream.fileno()


def _connected(address: str) -> socket.socket:
    """Connect to the server, which may still import."""
    until = time.monotonic() + PATIENCE
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > until:
                log = Path(address).with_suffix(".log").read_text()
                raise RuntimeError(f"no warm process: {log}") from None
            time.sleep(0.05)


@dataclass(frozen=True)
class Request:
    """What `Python` sends to the server: the process that a fork has to become.

    Attributes:
        arguments: of the interpreter.
        folder: its current directory.
        environment: its variables.
        descriptors: standard input, output and error.
    """

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    descriptors: list[int]


@dataclass(frozen=True)
class Fork:
    """A process that the server has forked, and the connection of the one who asked."""

    pid: int
    connection: socket.socket


def main() -> None:
    """Fork for each connection until standard input ends; a fork runs its request."""
    (address,) = sys.argv[1:]
    before = dict(os.environ)
    for name in IMPORTS:
        importlib.import_module(name)
    set_by_imports = {
        name: value for name, value in os.environ.items() if name not in before
    }
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(128)
        os.rename(f"{address}.new", address)
        request = _serve(listener)
    if request is not None:
        _become(address, request, set_by_imports)


def _serve(listener: socket.socket) -> Request | None:
    """Fork for each connection.

    Returns:
        the request in a fork that was made for it; None in the server, at its end.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    for fork in _running_forks(selector):
                        os.killpg(fork.pid, signal.SIGKILL)
                    return None
                if key.fileobj is listener:
                    request = _fork_for_connection(listener, selector)
                    if request is not None:
                        return request
                else:
                    _report_end(key, selector)


def _fork_for_connection(
    listener: socket.socket, selector: selectors.BaseSelector
) -> Request | None:
    """Fork for the next connection; return its request in the fork, None otherwise."""
    connection, _ = listener.accept()
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("r") as text:
        request = Request(**json.loads(text.readline()), descriptors=descriptors)

    pid = os.fork()
    if pid == 0:
        connection.close()
        for key in _keys_of_forks(selector):
            os.close(key.fd)
            key.data.connection.close()
        return request

    for descriptor in descriptors:
        os.close(descriptor)
    _answer(connection, pid)
    process = os.pidfd_open(pid)
    selector.register(process, selectors.EVENT_READ, Fork(pid, connection))
    return None


def _report_end(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """Send the exit status of a fork that has ended to who asked for it."""
    selector.unregister(key.fd)
    os.close(key.fd)
    _, status = os.waitpid(key.data.pid, 0)
    _answer(key.data.connection, os.waitstatus_to_exitcode(status))
    key.data.connection.close()


def _keys_of_forks(selector: selectors.BaseSelector) -> list[selectors.SelectorKey]:
    return [key for key in selector.get_map().values() if key.data is not None]


def _running_forks(selector: selectors.BaseSelector) -> list[Fork]:
    return [key.data for key in _keys_of_forks(selector)]


def _answer(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked has ended
        connection.sendall(f"{number}\n".encode())


def _become(address: str, request: Request, set_by_imports: dict[str, str]) -> None:
    """Make this process the `python ARGUMENTS` of a request.

    Args:
        address: of the server, for the processes that this one starts.
        request: its arguments, folder, environment and streams.
        set_by_imports: variables that the imports set, as they would have here.
    """
    os.setsid()
    for number, descriptor in enumerate(request.descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(set_by_imports | request.environment)
    fork_children(address)
    _fork_forkserver()

    arguments = list(request.arguments)
    killing.arm(arguments)
    _search_modules_in(request.folder)
    if arguments[0] == "-P":
        del arguments[0], sys.path[0]
    # Its name in the table of processes has at most 15 characters.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(arguments[1][-15:])

    option, code, *rest = arguments
    sys.argv = [option, *rest]
    if option == "-m":
        runpy.run_module(code, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))


def _search_modules_in(folder: str) -> None:
    """Search modules in `folder` first, then in those of PYTHONPATH."""
    sys.path[0] = folder
    more = []
    for path in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if path and path not in sys.path:
            more.append(path)
    sys.path[1:1] = more


def fork_children(address: str) -> None:
    """Fork from the server what this process starts of the package's by `python -P`.

    These are the shipper of a run, its workers, the trials of micro-batches, and the
    trial of a logged model: each imports TensorFlow or MLflow.
    """
    popen = subprocess.Popen

    def forked_popen(command: Sequence[str], *more: Any, **options: Any) -> Any:
        if isinstance(command, str) or list(command[:2]) != [sys.executable, "-P"]:
            return popen(command, *more, **options)
        names = ("cwd", "env", "stdin", "stdout", "stderr")
        kept = {name: options.get(name) for name in names}
        return Python(address, command[1:], **kept, text=options.get("text", False))

    subprocess.Popen = forked_popen  # type: ignore[assignment,misc]


def _fork_forkserver() -> None:
    """Fork a sweep's forkserver from this process, in place of starting it.

    A new process would import TensorFlow.
    """
    spawn = multiprocessing.util.spawnv_passfds

    def forked_spawn(
        path: bytes, arguments: Sequence[str], descriptors: Sequence[int]
    ) -> int:
        code = arguments[-1]
        if not code.startswith("from multiprocessing.forkserver"):
            return spawn(path, arguments, descriptors)
        pid = os.fork()
        if pid == 0:
            try:
                _close_all_except({0, 1, 2, *descriptors})
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                exec(code, {})
            finally:
                os._exit(0)
        return pid

    multiprocessing.util.spawnv_passfds = forked_spawn


def _close_all_except(descriptors: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in descriptors:
            with contextlib.suppress(OSError):
                os.close(int(name))


if __name__ == "__main__":
    main()
