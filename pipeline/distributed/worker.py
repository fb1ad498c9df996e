"""A worker other than the chief.

A worker trains like the chief, but only the chief logs, writes checkpoints and prints.
The chief may start workers as `python -m pipeline.distributed.worker`. Such a worker
reads the cluster and the spec from standard input, as a line of JSON.
"""

import json
import os
import signal
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.checkpoints import files, fork
from pipeline.common import imports, secrets
from pipeline.common.errors import ConfigError, described, say
from pipeline.config import cluster, resolve, session
from pipeline.distributed import rendezvous
from pipeline.trust import gate

if TYPE_CHECKING:  # not at run time, since the import takes seconds
    from pipeline.components.assembly import Parts

TRAIN = "pipeline.distributed.worker.train"


def run(spec: resolve.RunSpec, task: str = TRAIN) -> None:
    """Take part in the chief's run until it ends.

    If this worker rejects its config or data, the process ends with status 2; if it
    fails otherwise, with status 1. The reason is sent to the chief. The function
    returns only if the run was already finished; otherwise, the process ends with the
    run.

    Args:
        spec: this worker's own spec.
        task: dotted name of the function to call, with the arguments of `train`.
    """
    assert spec.workers is not None
    secrets.remember(spec.config.tracking.uri)
    secret = cluster.secret(spec.config.hardware.secret_file, os.environ)
    client = rendezvous.Client(spec.workers, secret)
    try:
        finished = _run_task(spec, task, client)
    except BaseException as error:
        _end_with(error, client, started=spec.workers.started)
    if not finished:
        client.wait()


def _run_task(spec: resolve.RunSpec, task: str, client: rendezvous.Client) -> bool:
    """Join the chief and run the task; return whether the run was already finished."""
    assert spec.workers is not None
    with imports.without_chatter():
        from pipeline.components import assembly
    answer = client.join(rendezvous.statement(spec))
    if answer is None:
        return True

    # Ignore signals: the chief handles them, and ends the run on all workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    workers = replace(spec.workers, addresses=tuple(answer["addresses"]))
    spec = replace(spec.adopting(answer["spec"]), workers=workers)

    # Holds the variable that counts all-reduces; empty until the devices are set up.
    reductions_ready: list[Any] = []

    def count_reductions() -> Any:
        if not reductions_ready:
            return 0
        return reductions_ready[0]

    client.watch(count_reductions)
    start = _start_from_json(answer["start"])
    first_update = 0
    if start is not None:
        first_update = start.updates_done
    parts = assembly.assemble(spec, None, first_update)
    reductions_ready.append(parts.devices.reductions_ready)
    resolve_name(task)(parts, Path(answer["run_dir"]), start)
    return False


def _end_with(
    error: BaseException, client: rendezvous.Client, started: bool
) -> NoReturn:
    """Report the error to the chief, and end this process with status 1 or 2.

    Args:
        error: why the worker ends.
        client: the connection to the chief.
        started: whether the chief has started this worker. If so, its output is a log,
            and the traceback is always printed.
    """
    rejects = isinstance(error, ConfigError)
    if started or not rejects:
        say(*secrets.mask(traceback.format_exc()).splitlines())
    if rejects:
        client.fail({"refused": str(error)})
    else:
        client.fail({"failed": described(error)})
    if rejects and not (started or client.told):
        say(f"pipeline: {error}")
    sys.stderr.flush()
    session.session().remove_empty_folders()
    if rejects:
        os._exit(2)
    os._exit(1)


def train(
    parts: "Parts", run_dir: Path, start: files.Checkpoint | fork.Fork | None
) -> None:
    """Train like the chief, but without logging or writing files.

    Args:
        parts: the parts of the run.
        run_dir: the directory of the run.
        start: the checkpoint from which training starts, or None to start anew.
    """
    from pipeline.components import fitting

    update = parts.update()
    if isinstance(start, fork.Fork):
        start.check(update, parts.plan)
        start.load()
    recorder = fitting.recorder(parts)
    checkpoints = fitting.checkpoints(parts, run_dir)
    fitting.fit(parts, update, recorder, checkpoints, start)


def _start_from_json(
    message: dict[str, Any] | None,
) -> files.Checkpoint | fork.Fork | None:
    """Return the start of the run from the JSON object of `chief._start_as_json`."""
    if message is None:
        return None
    checkpoint = files.at(Path(message["folder"]), message["update"])
    if message["fork"] is None:
        return checkpoint
    run_id, run_dir, weights_only, own_rate = message["fork"]
    return fork.Fork(run_id, Path(run_dir), checkpoint, weights_only, own_rate)


def _gate_of(passed: dict[str, Any] | None) -> AbstractContextManager[Any]:
    """Return a context manager that applies the chief's gate, if it has one."""
    if not passed:
        return nullcontext()
    paths = {}
    for name in ("run_dir", "data_dir"):
        if passed.get(name):
            paths[name] = Path(passed[name])
    return gate.strict(gate.Gate(**{**passed, **paths}))


def main() -> None:
    """Run the task that the chief writes to standard input."""
    sys.path.append(os.getcwd())  # to import the user's own modules, like the chief
    message = json.loads(sys.stdin.readline())
    workers = cluster.Cluster(
        tuple(message["addresses"]),
        message["index"],
        started=True,
        rendezvous=message["rendezvous"],
    )
    with _gate_of(message["gate"]):
        run(resolve.from_text(message["spec"], workers), message["task"])


if __name__ == "__main__":
    main()
