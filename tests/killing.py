"""Kills a forked process right before or after the call that the environment names: no hook in what is tested.

`PIPELINE_TEST_KILL` holds a plan as JSON, see `Plan`. `tests.warm` arms each process that it forks; one that the plan
does not mean counts nothing. A plan kills once: who comes first makes the file FOLDER/killed, which says where it was.
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
MOMENT = "at a moment"  # the kind of call that is none: a number of milliseconds after the process began
SHIPPER = "pipeline.tracking.shipper"
# Kinds of call by who makes them, each with about how often a small run does.
CALLS = {
    "trainer": {
        **{
            "os.write": 45,
            "os.fsync": 25,
            "os.rename": 5,
            "os.ftruncate": 1,
            "os.mkdir": 6,
            "fcntl.lockf": 1,
        },
        **{
            "Path.write_text": 15,
            "shutil.rmtree": 16,
            "Checkpoint.write": 4,
            "Checkpoint.read": 5,
            MOMENT: 12_000,
        },
    },
    "shipper": {
        **{
            "client.create_run": 1,
            "client.log_batch": 4,
            "client.set_tag": 2,
            "client.log_inputs": 2,
        },
        **{
            "client.log_artifact": 6,
            "client.set_terminated": 1,
            "client.update_run": 1,
            "os.pread": 6,
        },
        **{"fcntl.lockf": 1, MOMENT: 8_000},
    },
    "sync": {
        **{
            "client.create_run": 1,
            "client.log_batch": 1,
            "client.set_tag": 2,
            "client.set_terminated": 1,
        },
        **{"client.update_run": 1, "os.pread": 3, "fcntl.lockf": 3, MOMENT: 3_000},
    },
    "parent": {
        **{
            "client.create_run": 1,
            "client.log_batch": 1,
            "client.set_tag": 8,
            "client.set_terminated": 1,
        },
        **{MOMENT: 30_000},
    },
}


@dataclass(frozen=True)
class Plan:
    """Whom to kill, and where.

    Attributes:
        folder: where what was done is noted.
        who: `trainer`, `shipper`, `sync` or `parent` of a sweep, who counts.
        call: kind of call, of `CALLS[who]`.
        count: of such calls, at which the process is killed.
        after: kill it when the call has been made.
        both: kill the shipper with the trainer, and the trainer with the shipper.
    """

    folder: str
    who: str
    call: str
    count: int
    after: bool
    both: bool

    def environment(self) -> dict[str, str]:
        """Return what arms a command."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def killed(self) -> bool:
        """Return whether the plan has killed."""
        return (Path(self.folder) / "killed").exists()

    @property
    def kind(self) -> str:
        """Return who is killed, and where, as a table has it."""
        where = (
            self.call
            if self.call == MOMENT
            else f"{'after' if self.after else 'before'} {self.call}"
        )
        return f"{self.who + (' and the other' if self.both else ''):22} {where}"

    def __str__(self) -> str:
        return f"{self.kind} {self.count}"


def arm(arguments: Sequence[str]) -> None:
    """Let this process, which is about to be `python ARGUMENTS`, kill itself where its environment says."""
    if VARIABLE not in os.environ or ("-P" in arguments and SHIPPER not in arguments):
        return
    plan = Plan(**json.loads(os.environ[VARIABLE]))
    role = (
        "shipper"
        if SHIPPER in arguments
        else "trainer"
        if plan.who == "shipper"
        else plan.who
    )
    (Path(plan.folder) / f"{role}.pid").write_text(str(os.getpid()))
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
    }
    return owners.get(place, tf.train.Checkpoint), name


def _counting(plan: Plan, function: Callable[..., Any]) -> Callable[..., Any]:
    made, process, lock = 0, os.getpid(), threading.Lock()

    @functools.wraps(function)
    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        if os.getpid() != process:  # a fork of it, such as a job
            return function(*arguments, **options)
        with lock:
            made += 1
            now = made == plan.count
        if now and not plan.after:
            _kill(plan)
        try:
            return function(*arguments, **options)
        finally:
            if now:
                _kill(plan)

    return counted


def _kill(plan: Plan) -> None:
    folder = Path(plan.folder)
    try:
        (folder / "killed").open("x").close()
    except FileExistsError:
        return
    if plan.both:
        with suppress(OSError, ValueError):
            os.kill(
                int(
                    (
                        folder
                        / f"{'trainer' if plan.who == 'shipper' else 'shipper'}.pid"
                    ).read_text()
                ),
                9,
            )
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
