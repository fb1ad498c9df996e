"""What sweeps use of `multiprocessing` and `atexit` beyond their documentation.

It was read in Python 3.11 to 3.13.

ensure_running  of `multiprocessing.forkserver`: starts the server, which imports what
                is to be preloaded, before the first process is forked from it
255             `exitcode` of a process whose forkserver has died, as that one alone
                could learn its status; the process may still run
cmdline         of the server: it names the module `multiprocessing.forkserver`
_run_exitfuncs  of `atexit`: a forked process ends by `os._exit`, which does not call
                what is registered
"""

import atexit
import contextlib
import multiprocessing
from multiprocessing import forkserver

import psutil

LOST = 255


def start(module: str) -> None:
    """Start the forkserver, which imports `module` while this process goes on."""
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
