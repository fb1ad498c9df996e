"""What pipeline/sweep/forkserver_internals.py uses of Python is as it was read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.sweep import forkserver_internals
from tests.running import environment

WHERE = "see pipeline/sweep/forkserver_internals.py"
READ_IN = ((3, 11), (3, 12), (3, 13))

# A job that outlives its forkserver, and the same job after the server was killed.
SCRIPT = """
import multiprocessing, psutil, time
from pipeline.sweep import forkserver_internals

if __name__ == "__main__":
    forkserver_internals.start("json")
    (server,) = [
        child
        for child in psutil.Process().children()
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    context = multiprocessing.get_context("forkserver")
    job = context.Process(target=time.sleep, args=(60,))
    job.start()
    assert psutil.Process(job.pid).ppid() == server.pid
    forkserver_internals.kill()
    server.wait(10)
    job.join(10)
    print(job.exitcode == forkserver_internals.UNKNOWN_STATUS, psutil.pid_exists(job.pid))
    psutil.Process(job.pid).kill()
"""
FORKED = """
import atexit, os
from pipeline.sweep import forkserver_internals

atexit.register(print, "called", flush=True)
forkserver_internals.call_exit_functions()
os._exit(0)
"""


def run(folder, script: str) -> str:
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_this_python_is_one_in_which_it_was_read():
    assert sys.version_info[:2] in READ_IN, WHERE


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no job is forked")
def test_a_forkserver_is_started_killed_and_its_process_is_lost(tmp_path):
    assert run(tmp_path, SCRIPT) == "True True\n", WHERE
    assert forkserver_internals.UNKNOWN_STATUS == 255


def test_exit_functions_are_called_before_a_process_ends_by_os_exit(tmp_path):
    assert run(tmp_path, FORKED) == "called\n", WHERE
