"""Runs each piece of a benchmark in a process of its own with a time limit, so that one that crashes fails alone.

    parent ─► forkserver of Python's `multiprocessing`, which has imported TensorFlow ─► each piece

Within a process, TensorFlow does not release GPU memory, and has one precision and one setting of determinism. If the
forkserver or its forked processes cannot use the GPU, each piece is a new process.
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

GRACE = 3.0  # seconds between SIGTERM and SIGKILL
methods = (
    ["forkserver", "spawn"] if sys.platform == "linux" else ["spawn"]
)  # the first one is used


def prepare() -> None:
    """Start the forkserver, which imports TensorFlow in the background."""
    if methods[0] == "forkserver":
        multiprocessing.set_forkserver_preload(["pipeline.sweep.warm"])
        with importing_only_this_package():
            forkserver.ensure_running()


def run(
    function: str, arguments: Mapping[str, Any], seconds: float
) -> tuple[list[Any], str]:
    """Call a generator in a process of its own.

    Args:
        function: as `module:name`; imported in that process.
        arguments: of the function, by name.
        seconds: time limit.

    Returns:
        The values that it yielded, and why there are no more; empty if it completed.
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
    except (EOFError, OSError):  # it ended, maybe while sending
        process.join(GRACE)
        status = process.exitcode or 0
        return (
            found,
            f"killed by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with status {status}",
        )
    finally:
        ours.close()
        _end(process)


def _started(
    theirs: Connection, function: str, arguments: Mapping[str, Any], seconds: float
) -> Any:
    context: Any = multiprocessing.get_context(methods[0])
    process = context.Process(
        target=_main, args=(theirs, function, dict(arguments), seconds)
    )
    try:
        with importing_only_this_package():
            process.start()
    except (EOFError, OSError):  # the forkserver failed to import, or may not be forked
        if len(methods) == 1:
            raise
        del methods[0]
        return _started(theirs, function, arguments, seconds)
    return process


def _main(
    connection: Connection, function: str, arguments: dict[str, Any], seconds: float
) -> None:
    """Run in the child: send (False, value) for each value, then (True, error message)."""
    os.setsid()  # a process group, to be killed with its own children
    signal.alarm(math.ceil(seconds + GRACE))  # in case the parent was killed
    os.dup2(2, 1)  # standard output is for the table
    why = ""
    try:
        for value in pkgutil.resolve_name(function)(**arguments):
            connection.send((False, value))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        why = f"{type(error).__name__}: {lines[0][:400]}"
    connection.send((True, why))


def _end(process: Any) -> None:
    """Kill the process and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):  # all of them have ended
            os.killpg(process.pid, number)
        process.join(GRACE)
    process.kill()  # in case it had no process group yet
    process.join(GRACE)
