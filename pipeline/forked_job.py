"""A job of submitit that is forked from a process which has TensorFlow; see `pipeline.forkserver`.

Submitit has two processes for a job on this machine: a controller, with the job's log files and its time limit, and
the job. Here the server forks the controller, and the controller the job; all else of both is submitit's.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from submitit.core import submission
from submitit.core.utils import JobPaths
from submitit.local.local import Controller, LocalExecutor, LocalJob

from pipeline.forkserver import Forked, Server

FOLDER = "SUBMITIT_FOLDER"  # submitit's own variable of a job
DEVICES = "/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio"


class Executor(LocalExecutor):
    """Submitit's, of one job, which it has `server` fork; without an answer from there it starts the job itself.

    Args:
        folder: of the job's files.
        server: of this module.
    """

    def __init__(self, folder: str, server: Server):
        super().__init__(folder)
        self._server: Server | None = server
        self._forked: Forked | None = None

    def _submit_command(self, command: str) -> LocalJob[Any]:
        environment = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1" if self.parameters.get("stderr_to_stdout") else "",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            FOLDER: str(self.folder),
        }
        self._forked = self._server.fork({**os.environ, **environment}) if self._server is not None else None
        if self._forked is None:
            return super()._submit_command(command)
        return LocalJob(self.folder, str(self._forked.pid), process=self._forked)  # type: ignore[arg-type]

    def _internal_process_submissions(self, delayed_submissions: Any) -> Any:
        jobs = super()._internal_process_submissions(delayed_submissions)
        if self._forked is not None:  # by now its function is where it looks for it
            try:
                self._forked.stdin.write("\n")
                self._forked.stdin.flush()
            except BrokenPipeError:  # it was killed before it had begun
                self._server = None
                return self._internal_process_submissions(delayed_submissions)
        return jobs


class _Job(BaseException):
    """This process is the job, no more the controller."""


class _Task:
    """A child of the controller, as `subprocess.Popen` has it."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class _Controller(Controller):
    def start_tasks(self) -> None:
        self.folder.mkdir(exist_ok=True)
        paths = JobPaths(self.folder, self.pid, 0)
        with paths.stdout.open("a") as out, out if self.stderr_to_stdout else paths.stderr.open("a") as err:
            pid = os.fork()
            if pid:
                self.tasks = [_Task(pid)]  # type: ignore[list-item]
                return
            nothing = os.open(os.devnull, os.O_RDONLY)
            for number, descriptor in enumerate((nothing, out.fileno(), err.fileno())):
                os.dup2(descriptor, number)
            os.close(nothing)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(SUBMITIT_LOCAL_JOB_ID=self.pid, SUBMITIT_LOCAL_LOCALID="0", SUBMITIT_LOCAL_GLOBALID="0")
        raise _Job  # through the controller's own end, which here has no task to end


def prepare() -> None:
    """Imports what a job needs.

    Raises:
        SystemExit: that has opened a device, which a process that is forked cannot use.
    """
    from hydra_plugins import pipeline_launcher  # noqa: F401  # of which the job's function is a method
    from pipeline import composing, imports, job  # noqa: F401  # which is that function

    with imports.without_chatter():
        job.import_libraries()
        importlib.import_module("tensorflow_datasets")
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    if any(path.startswith(DEVICES) for path in opened):
        sys.exit("pipeline: importing TensorFlow has opened a device: each job imports it for itself")


def main() -> None:
    """Is the controller until it has forked the job, and then in the one process still, in the other the job."""
    if not sys.stdin.readline():  # who asked for the job has started it in another way
        return
    folder = Path(os.environ[FOLDER])
    is_job = False
    try:
        _Controller(folder).run()
    except _Job:
        is_job = True
    if not is_job:
        os._exit(0)  # nothing is left to be written, and TensorFlow takes its time to end
    submission.process_job(folder)
