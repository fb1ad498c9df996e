"""Runs each piece of a benchmark in a process with a time limit.

So a piece that crashes fails alone.

    parent ─► forkserver of Python's `multiprocessing`, which has imported TensorFlow
           ─► each piece

Within a process, TensorFlow does not release GPU memory, and has one precision and one
setting of determinism. If the forkserver or its forked processes cannot use the GPU,
each piece is a new process.
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
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from pipeline.sweep.job_task import importing_only_this_package

GRACE = 3.0  # seconds between SIGTERM and SIGKILL
LONGEST_MESSAGE = 400  # characters of an exception's message

# How processes are started: the first one is used. It is removed if it does not work.
start_methods = ["spawn"]
if sys.platform == "linux":
    start_methods.insert(0, "forkserver")


@dataclass(frozen=True)
class Message:
    """What a child sends: a value, or at the end why it failed.

    Attributes:
        value: that the generator yielded.
        is_last: the generator has ended.
        failure: the error of the last message; empty if there is none.
    """

    value: Any = None
    is_last: bool = False
    failure: str = ""


def prepare() -> None:
    """Start the forkserver, which imports TensorFlow in the background."""
    if start_methods[0] == "forkserver":
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
    values: list[Any] = []
    deadline = time.monotonic() + seconds
    try:
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            if not ours.poll(remaining):
                return values, f"took longer than {seconds:.0f} s"
            message = ours.recv()
            if message.is_last:
                return values, message.failure
            values.append(message.value)
    except (EOFError, OSError):  # it ended, maybe while sending
        process.join(GRACE)
        return values, _exit_reason(process.exitcode or 0)
    finally:
        ours.close()
        _end(process)


def _exit_reason(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _started(
    theirs: Connection, function: str, arguments: Mapping[str, Any], seconds: float
) -> Any:
    context: Any = multiprocessing.get_context(start_methods[0])
    process = context.Process(
        target=_main, args=(theirs, function, dict(arguments), seconds)
    )
    try:
        with importing_only_this_package():
            process.start()
    except (EOFError, OSError):  # the forkserver failed to import, or may not be forked
        if len(start_methods) == 1:
            raise
        del start_methods[0]
        return _started(theirs, function, arguments, seconds)
    return process


def _main(
    connection: Connection, function: str, arguments: dict[str, Any], seconds: float
) -> None:
    """Run in the child: send a message for each value, and a last one."""
    os.setsid()  # a process group, to be killed with its own children
    signal.alarm(math.ceil(seconds + GRACE))  # in case the parent was killed
    os.dup2(2, 1)  # standard output is for the table
    failure = ""
    try:
        for value in pkgutil.resolve_name(function)(**arguments):
            connection.send(Message(value))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        failure = f"{type(error).__name__}: {lines[0][:LONGEST_MESSAGE]}"
    connection.send(Message(is_last=True, failure=failure))


def _end(process: Any) -> None:
    """Kill the process and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):  # all of them have ended
            os.killpg(process.pid, number)
        process.join(GRACE)
    process.kill()  # in case it had no process group yet
    process.join(GRACE)
