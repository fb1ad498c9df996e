"""Kills a forked process right before or after a call that the environment names.

Nothing in the tested code has a hook for it. `PIPELINE_TEST_KILL` holds a `Plan` as
JSON, and `tests.warm` arms each process that it forks. A process that the plan does not
mean counts nothing. A plan kills once: the first process to get there makes the file
FOLDER/killed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "PIPELINE_TEST_KILL"
SHIPPER = "pipeline.tracking.shipper"

# In place of a call: a number of milliseconds after the process began.
MOMENT = "at a moment"

# The kinds of call of each process, with about how often a small run makes them.
CALLS = {
    "trainer": {
        "os.write": 45,
        "os.fsync": 25,
        "os.rename": 5,
        "os.ftruncate": 1,
        "os.mkdir": 6,
        "fcntl.lockf": 1,
        "Path.write_text": 15,
        "shutil.rmtree": 16,
        "Checkpoint.write": 4,
        "Checkpoint.read": 5,
        MOMENT: 12_000,
    },
    "shipper": {
        "client.create_run": 1,
        "client.log_batch": 4,
        "client.set_tag": 2,
        "client.log_inputs": 2,
        "client.log_artifact": 6,
        "client.set_terminated": 1,
        "client.update_run": 1,
        "os.pread": 6,
        "fcntl.lockf": 1,
        MOMENT: 8_000,
    },
    "sync": {
        "client.create_run": 1,
        "client.log_batch": 1,
        "client.set_tag": 2,
        "client.set_terminated": 1,
        "client.update_run": 1,
        "os.pread": 3,
        "fcntl.lockf": 3,
        MOMENT: 3_000,
    },
    "parent": {
        "client.create_run": 1,
        "client.log_batch": 1,
        "client.set_tag": 8,
        "client.set_terminated": 1,
        MOMENT: 30_000,
    },
}


@dataclass(frozen=True)
class Plan:
    """Which process to kill, and where.

    Attributes:
        folder: where the kill and the IDs of the processes are noted.
        who: the process that counts and is killed: `trainer`, `shipper`, `sync`, or
            `parent` of a sweep.
        call: kind of call, a key of `CALLS[who]`.
        count: number of the call that it is killed at; milliseconds for MOMENT.
        after: kill it when the call has returned, not before the call.
        both: kill the shipper with the trainer, and the trainer with the shipper.
    """

    folder: str
    who: str
    call: str
    count: int
    after: bool
    both: bool

    def environment(self) -> dict[str, str]:
        """Return the variables that arm a command."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def killed(self) -> bool:
        """Return whether the plan has killed."""
        return (Path(self.folder) / "killed").exists()

    @property
    def kind(self) -> str:
        """Return which process is killed, and where, for a table."""
        process = self.who
        if self.both:
            process += " and the other"
        if self.call == MOMENT:
            return f"{process:22} {MOMENT}"
        when = "after" if self.after else "before"
        return f"{process:22} {when} {self.call}"

    def __str__(self) -> str:
        return f"{self.kind} {self.count}"


def arm(arguments: Sequence[str]) -> None:
    """Let this process kill itself where its environment says.

    Args:
        arguments: of the `python ARGUMENTS` that this process is about to be.
    """
    is_shipper = SHIPPER in arguments
    is_other_child = "-P" in arguments and not is_shipper
    if VARIABLE not in os.environ or is_other_child:
        return

    plan = Plan(**json.loads(os.environ[VARIABLE]))
    if is_shipper:
        role = "shipper"
    elif plan.who == "shipper":
        role = "trainer"
    else:
        role = plan.who
    _file_of_pid(plan, role).write_text(str(os.getpid()))
    if role != plan.who:
        return

    if plan.call == MOMENT:
        timer = threading.Timer(plan.count / 1000, _kill, [plan])
        timer.daemon = True
        timer.start()
        return
    owner, name = _owner(plan.call)
    setattr(owner, name, _counting(plan, getattr(owner, name)))


def _owner(call: str) -> tuple[Any, str]:
    """Return the module or class that a kind of call belongs to, and the name there."""
    import fcntl
    import shutil

    import mlflow.tracking
    import tensorflow as tf

    place, name = call.split(".")
    owners = {
        "os": os,
        "fcntl": fcntl,
        "shutil": shutil,
        "Path": Path,
        "client": mlflow.tracking.MlflowClient,
        "Checkpoint": tf.train.Checkpoint,
    }
    return owners[place], name


def _counting(plan: Plan, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with a count of its calls, which kills at the planned one."""
    calls = 0
    process = os.getpid()
    lock = threading.Lock()

    @functools.wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        if os.getpid() != process:  # a fork of it, such as a job
            return function(*arguments, **options)

        with lock:
            calls += 1
            is_planned = calls == plan.count
        if is_planned and not plan.after:
            _kill(plan)
        try:
            return function(*arguments, **options)
        finally:
            if is_planned:
                _kill(plan)

    return counted


def _kill(plan: Plan) -> None:
    """Kill this process, unless the plan has killed already."""
    try:
        (Path(plan.folder) / "killed").open("x").close()
    except FileExistsError:
        return

    if plan.both:
        other = "trainer" if plan.who == "shipper" else "shipper"
        with suppress(OSError, ValueError):  # it has not begun, or has ended
            os.kill(int(_file_of_pid(plan, other).read_text()), signal.SIGKILL)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _file_of_pid(plan: Plan, role: str) -> Path:
    return Path(plan.folder) / f"{role}.pid"
