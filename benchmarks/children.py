"""A piece of a benchmark in a process of its own, with a time limit: one that dies, or hangs, takes no other with it.

    parent ─► the forkserver of Python's `multiprocessing`, which has imported TensorFlow ─► each piece

TensorFlow gives no memory of a GPU back inside a process, and its precision and determinism are of a process. Where
the forkserver cannot be used, or its forks cannot use the GPU, each piece is a new process that imports for itself.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from pipeline.sweep.job_call import importing_only_this_package

GRACE = 3.0  # seconds in which a piece that is ended can end what it has started
methods = ["forkserver", "spawn"] if sys.platform == "linux" else ["spawn"]  # the first one is used


def prepare() -> None:
    """Let the forkserver import TensorFlow meanwhile."""
    if methods[0] == "forkserver":
        multiprocessing.set_forkserver_preload(["pipeline.sweep.warm"])
        with importing_only_this_package():
            forkserver.ensure_running()


def run(function: str, arguments: Mapping[str, Any], seconds: float) -> tuple[list[Any], str]:
    """Call a generator in a process of its own.

    Args:
        function: as `module:name`; the module is imported there.
        arguments: of it, by name.
        seconds: after which it is ended.

    Returns:
        What it has yielded, and why that is not all of it: empty where it is.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = _started(theirs, function, arguments, seconds)
    theirs.close()
    found: list[Any] = []
    deadline = time.monotonic() + seconds
    try:
        while True:
            if not ours.poll(max(0.0, deadline - time.monotonic())):
                return found, f"took longer than {seconds:.0f} s"
            done, value = ours.recv()
            if done:
                return found, value
            found.append(value)
    except (EOFError, OSError):  # it ended, perhaps while it was sending
        process.join(GRACE)
        status = process.exitcode or 0
        return found, f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    finally:
        ours.close()
        _end(process)


def _started(theirs: Connection, function: str, arguments: Mapping[str, Any], seconds: float) -> Any:
    context: Any = multiprocessing.get_context(methods[0])
    process = context.Process(target=_main, args=(theirs, function, dict(arguments), seconds))
    try:
        with importing_only_this_package():
            process.start()
    except (EOFError, OSError):  # the forkserver could not import, or must not be forked
        if len(methods) == 1:
            raise
        del methods[0]
        return _started(theirs, function, arguments, seconds)
    return process


def _main(connection: Connection, function: str, arguments: dict[str, Any], seconds: float) -> None:
    """Be the process: send (False, value) for each value, then (True, what went wrong)."""
    os.setsid()  # so that it is ended with all that it has started
    signal.alarm(math.ceil(seconds + GRACE))  # where nobody is left to end it
    os.dup2(2, 1)  # standard output is for the table
    why = ""
    try:
        for value in pkgutil.resolve_name(function)(**arguments):
            connection.send((False, value))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0][:120]}"
    connection.send((True, why))


def _end(process: Any) -> None:
    """End a piece and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):  # there is none of them any more
            os.killpg(process.pid, number)
        process.join(GRACE)
    process.kill()  # where it was not yet a group of its own
    process.join(GRACE)
