"""Python processes that have TensorFlow and MLflow loaded when they begin: forks of one that has imported them.

    pytest ─► `python -m tests.warm ADDRESS` ─► each `Python`, the processes that it starts itself, and its forkserver

The import is the larger part of what a small run costs. What is forked has its own session, folder, environment, pipes
and module `__main__`, as if it had been started; no code of the project has run in it but the imports, and no device
is open. What reads the environment while it is imported, and what is about starting, needs a new process.
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
from pathlib import Path
from typing import IO, Any

from tests import killing

# The first sets what MLflow reads when it is imported.
IMPORTS = (
    *(
        "pipeline.tracking.store",
        "mlflow.store.tracking.sqlalchemy_store",
        "mlflow.models",
        "mlflow.keras",
    ),
    *("tensorflow", "keras", "tensorflow_datasets", "sklearn.datasets", "hydra.main"),
    *(
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher",
        "hydra_plugins.pipeline_launcher",
    ),
    *(
        "pipeline.cli.train",
        "pipeline.run.run",
        "pipeline.components.fitting",
        "pipeline.tracking.sync_run",
    ),
)
PATIENCE = 180  # seconds for the imports, on a busy machine


class Server:
    """The process that imports and forks; it ends with the process that made it.

    Args:
        folder: for its socket and its log.
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
                # A shell's background job ignores Ctrl-C, and so would all that it starts.
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
    """`python ARGUMENTS`, forked; used as a `subprocess.Popen`.

    Args:
        address: of the server.
        arguments: `-m MODULE …` or `-c CODE …`, after `-P` where the folder is not to be searched for modules.
        cwd, env: of the process.
        stdin: None for no input, or `subprocess.PIPE`.
        stdout, stderr: `subprocess.PIPE`, an open file, or None for that of this process.
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
        self.args, self.returncode = ["python", *arguments], None
        self.stdin: IO | None = None
        self.stdout: IO | None = None
        self.stderr: IO | None = None
        request = {
            "arguments": list(arguments),
            "folder": str(cwd or Path.cwd()),
            "environment": dict(env or os.environ),
        }
        kind = "" if text else "b"
        with contextlib.ExitStack() as given:  # their ends of the pipes
            out = err = 0
            if stdin == subprocess.PIPE:
                commands, self.stdin = _pipe(given, f"w{kind}")
            else:
                commands = os.open(os.devnull, os.O_RDONLY)
                given.callback(os.close, commands)
            if stdout == subprocess.PIPE:
                out, self.stdout = _pipe(given, f"r{kind}")
            else:
                out = _number(stdout, 1)
            if stderr == subprocess.PIPE:
                err, self.stderr = _pipe(given, f"r{kind}")
            else:
                err = _number(stderr, 2)
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
        """Return the exit status, minus the signal's number where one ended it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
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
        until = None if timeout is None else time.monotonic() + timeout
        texts: list[Any] = [None, None]

        def read(index: int, stream: IO) -> None:
            texts[index] = stream.read()

        streams = [
            (index, stream)
            for index, stream in enumerate((self.stdout, self.stderr))
            if stream is not None
        ]
        readers = [
            threading.Thread(target=read, args=each, daemon=True) for each in streams
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if until is None else max(until - time.monotonic(), 0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if until is None else max(until - time.monotonic(), 0))
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _pipe(given: contextlib.ExitStack, mode: str) -> tuple[int, IO]:
    """Return the end that is given away, which `given` closes, and this process' end, opened in `mode`."""
    reader, writer = os.pipe()
    away, kept = (writer, reader) if mode.startswith("r") else (reader, writer)
    given.callback(os.close, away)
    return away, os.fdopen(kept, mode)


def _number(stream: IO | int | None, own: int) -> int:
    """Return the descriptor of an open file; that of this process, `own`, where there is none."""
    if stream is None:
        return own
    return stream if isinstance(stream, int) else stream.fileno()


def _connected(address: str) -> socket.socket:
    until = time.monotonic() + PATIENCE
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            return connection
        except OSError:  # it still imports
            connection.close()
            if time.monotonic() > until:
                raise RuntimeError(
                    f"no warm process: {Path(address).with_suffix('.log').read_text()}"
                ) from None
            time.sleep(0.05)


def main() -> None:
    """Fork for each connection until standard input ends; in a fork, become what was asked for."""
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
        asked = _serve(listener)
    if asked is not None:
        request, descriptors = asked
        request["environment"] = {**set_by_imports, **request["environment"]}
        _become(address, request, descriptors)


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return what is asked of this process, which is then a fork; None in the server, at its end."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    for other in selector.get_map().values():
                        if other.data is not None:
                            os.killpg(other.data[0], signal.SIGKILL)
                    return None
                if key.fileobj is not listener:  # a fork has ended
                    pid, connection = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _say(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    connection.close()
                    continue
                connection, _ = listener.accept()
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
                with connection.makefile("r") as text:
                    request = json.loads(text.readline())
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    for other in selector.get_map().values():
                        if other.data is not None:
                            os.close(other.fd)
                            other.data[1].close()
                    return request, descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
                _say(connection, pid)
                selector.register(
                    os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection)
                )


def _say(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked has ended
        connection.sendall(f"{number}\n".encode())


def _become(address: str, request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process `python ARGUMENTS`, started where and as was asked."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    fork_children(address)
    _fork_forkserver()
    arguments = request["arguments"]
    killing.arm(arguments)
    sys.path[0] = request["folder"]
    searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in searched if folder and folder not in sys.path]
    if arguments[0] == "-P":
        del arguments[0], sys.path[0]
    with contextlib.suppress(
        OSError
    ):  # its name in the table of processes, of 15 characters
        Path("/proc/self/comm").write_text(arguments[1][-15:])
    how, what, *rest = arguments
    sys.argv = [how, *rest]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))


def fork_children(address: str) -> None:
    """Have forked as well what this process would start of the package's own, by `python -P`.

    These are the shipper of a run, its workers, the trials of micro-batches, and the trial of a logged model: each
    imports TensorFlow or MLflow.
    """
    start = subprocess.Popen

    def popen(command: Sequence[str], *more: Any, **options: Any) -> Any:
        if isinstance(command, str) or list(command[:2]) != [sys.executable, "-P"]:
            return start(command, *more, **options)
        kept = {
            key: options.get(key) for key in ("cwd", "env", "stdin", "stdout", "stderr")
        }
        return Python(address, command[1:], **kept, text=options.get("text", False))

    subprocess.Popen = popen  # type: ignore[assignment,misc]


def _fork_forkserver() -> None:
    """Have the forkserver of a sweep forked from this process where it would be started: it imports TensorFlow."""
    start = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(
        path: bytes, arguments: Sequence[str], descriptors: Sequence[int]
    ) -> int:
        if not arguments[-1].startswith("from multiprocessing.forkserver"):
            return start(path, arguments, descriptors)
        pid = os.fork()
        if pid == 0:
            try:
                for descriptor in {
                    int(name) for name in os.listdir("/proc/self/fd")
                } - {0, 1, 2, *descriptors}:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                exec(arguments[-1], {})
            finally:
                os._exit(0)
        return pid

    multiprocessing.util.spawnv_passfds = spawnv_passfds


if __name__ == "__main__":
    main()
