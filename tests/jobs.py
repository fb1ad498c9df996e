"""Jobs that a test gives to a launcher in place of `JobTask`: they end in every way.

Their functions are at the top of a module because a launcher pickles them by name.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.sweep.ending import Ending, Outcome


@dataclass(frozen=True)
class Task:
    """Job `number`, which calls `function` with `arguments`."""

    function: Callable
    arguments: tuple = ()
    number: int = 0

    def __call__(self) -> Ending:
        return Ending(Outcome.FINISHED, self.function(*self.arguments))


def pid() -> float:
    """Return the ID of the job's process."""
    return float(os.getpid())


def parent() -> float:
    """Return the ID of the process that started the job's."""
    return float(os.getppid())


def raising() -> float:
    """Raise an error of the job's code."""
    raise ValueError("the job is cursed")


def dying() -> float:
    """Print a line, and be killed."""
    print("so long")
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def exiting() -> float:
    """Call `sys.exit` with a status."""
    sys.exit(7)


def lasting(file: Path) -> float:
    """Write the process's ID to `file`, and run for a minute."""
    file.write_text(str(os.getpid()))
    time.sleep(60)
    return 0.0


def stubborn(file: Path) -> float:
    """Do as `lasting` does, and ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return lasting(file)


def finishing(file: Path) -> float:
    """Write the process's ID to `file`, and return a second later."""
    file.write_text(str(os.getpid()))
    time.sleep(1)
    return 3.0


def registered(file: Path) -> float:
    """Register a function that writes to `file` when the process exits."""
    atexit.register(file.write_text, "at exit")
    return 0.0
