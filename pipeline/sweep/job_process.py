"""Runs in the process of a job on this machine: receives the job and sends its ending.

sweep ─► the pickled `JobTask` ─► this process ─► its pickled `Ending` ─► sweep
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from pipeline.common import nvidia, signals
from pipeline.common.errors import described
from pipeline.sweep import forkserver_internals
from pipeline.sweep.ending import Ending, Outcome


@dataclass(frozen=True)
class ProcessSettings:
    """Settings that a job's process applies before it receives its job."""

    log: Path  # the file for standard output and standard error
    variables: dict[str, str]  # the environment variables
    shares_gpus: bool  # whether other jobs may use the same GPUs
    start_method: str | None  # `multiprocessing` start method for the job's processes


def main(pipe: connection.Connection, settings: ProcessSettings) -> None:
    """Run the job that the sweep sends through `pipe`, and send back its `Ending`."""
    _apply(settings)
    try:
        task = pipe.recv_bytes()
    except EOFError:
        return

    threading.Thread(target=_end_with_sweep, args=[pipe], daemon=True).start()
    nvidia.lock(nvidia.visible(), shared=settings.shares_gpus)
    try:
        ending = pickle.loads(task)()
    except Exception as error:
        traceback.print_exc()
        ending = Ending(Outcome.FAILED, reason=described(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except signals.Terminated:
        sys.exit(128 + signal.SIGTERM)
    finally:
        forkserver_internals.call_exit_functions()
    with contextlib.suppress(OSError):  # the sweep was killed
        pipe.send(ending)


def _apply(settings: ProcessSettings) -> None:
    """Prepare this process for its job.

    Start a new session, replace the environment variables, redirect standard output and
    standard error to the log, and set the start method of `multiprocessing`.
    """
    os.setsid()
    os.environ.clear()
    os.environ.update(settings.variables)
    with open(settings.log, "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    multiprocessing.set_start_method(settings.start_method, force=True)


def _end_with_sweep(pipe: connection.Connection) -> None:
    """Send SIGTERM to this process when the sweep's process has ended.

    Only the sweep's process holds the other end of the pipe, so the pipe is closed when
    that process ends.
    """
    with contextlib.suppress(OSError):
        pipe.poll(None)
    os.kill(os.getpid(), signal.SIGTERM)
