"""Undocumented parts of `multiprocessing` and `atexit` that sweeps rely on.

They were checked in the source of Python 3.11 to 3.13.

ensure_running  in `multiprocessing.forkserver`: starts the server. The server imports
                the preloaded modules before it forks the first process.
255             the `exitcode` of a process whose forkserver has died. Only the
                forkserver could read the exit status; the process may still run.
cmdline         the command line of the server names `multiprocessing.forkserver`.
_run_exitfuncs  in `atexit`: calls the registered functions. A forked process ends with
                `os._exit`, which does not call them.
"""

import atexit
import contextlib
import multiprocessing
from multiprocessing import forkserver

import psutil

UNKNOWN_STATUS = 255


def start(module: str) -> None:
    """Start the forkserver, which imports `module` in the background."""
    multiprocessing.set_forkserver_preload([module])
    forkserver.ensure_running()


def kill() -> None:
    """Kill this process's forkserver at once, if there is one."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(process.cmdline()):
                process.kill()


def call_exit_functions() -> None:
    """Call the functions registered with `atexit`, at the end of a forked process."""
    atexit._run_exitfuncs()
