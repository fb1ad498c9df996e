"""What the tests start as jobs, in the place of `JobCall`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.sweep.job_call import Ending


@dataclass(frozen=True)
class Call:
    """Job `number`, which calls `function` with `arguments`."""

    function: Callable
    arguments: tuple = ()
    number: int = 0

    def __call__(self) -> Ending:
        return Ending("finished", self.function(*self.arguments))


def pid() -> float:
    return float(os.getpid())


def parent() -> float:
    return float(os.getppid())


def raising() -> float:
    raise ValueError("the job is cursed")


def dying() -> float:
    print("so long")
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def exiting() -> float:
    sys.exit(7)


def lasting(file: Path) -> float:
    file.write_text(str(os.getpid()))
    time.sleep(60)
    return 0.0


def stubborn(file: Path) -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return lasting(file)


def finishing(file: Path) -> float:
    """Return a second after `file` is there."""
    file.write_text(str(os.getpid()))
    time.sleep(1)
    return 3.0


def registered(file: Path) -> float:
    atexit.register(file.write_text, "at exit")
    return 0.0
