"""A worker other than the chief: it computes as the chief does, which alone logs, writes checkpoints and prints.

The chief starts `python -m pipeline.distributed.worker`, which reads a line of JSON with the cluster and the spec.
"""

import json
import os
import signal
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints import files, fork
from pipeline.common import imports, secrets
from pipeline.common.errors import ConfigError, described, say
from pipeline.config import cluster, resolve, session
from pipeline.distributed import rendezvous
from pipeline.trust import gate

if TYPE_CHECKING:  # importing it takes seconds
    from pipeline.components.assembly import Parts

TRAIN = "pipeline.distributed.worker.train"


def run(spec: resolve.RunSpec, task: str = TRAIN) -> None:
    """Work for the chief to the end of the run, given this worker's own `spec`.

    `task` names a function of the parts of the run, its directory, and the checkpoint that it starts from. A worker
    that refuses ends this process with status 2, one that fails with 1: the others notice at once.
    """
    workers = spec.workers
    assert workers is not None
    secrets.remember(spec.config.tracking.uri)
    client = rendezvous.Client(
        workers, cluster.secret(spec.config.hardware.secret_file, os.environ)
    )
    try:
        with imports.without_chatter():
            from pipeline.components import assembly
        answer = client.join(rendezvous.statement(spec))
        if answer is None:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the chief ends the run
        spec = replace(
            spec.adopting(answer["spec"]),
            workers=replace(workers, addresses=tuple(answer["addresses"])),
        )
        counted: list[Any] = []  # the variable in which all-reduces are counted
        client.watch(lambda: counted[0] if counted else 0)
        start = _from_json(answer["start"])
        parts = assembly.assemble(spec, None, 0 if start is None else start.update)
        counted.append(parts.devices.reductions_ready)
        resolve_name(task)(parts, Path(answer["run_dir"]), start)
    except BaseException as error:
        refuses = isinstance(error, ConfigError)
        if workers.started or not refuses:
            say(*secrets.mask(traceback.format_exc()).splitlines())
        client.fail(
            {"refused": str(error)} if refuses else {"failed": described(error)}
        )
        if refuses and not (workers.started or client.told):
            say(f"pipeline: {error}")
        sys.stderr.flush()
        session.session().remove_empty_folders()
        os._exit(2 if refuses else 1)
    client.wait()


def train(
    parts: "Parts", run_dir: Path, start: files.Checkpoint | fork.Fork | None
) -> None:
    """Train as the chief does, without writing anything."""
    from pipeline.components import fitting

    update = parts.update()
    if isinstance(start, fork.Fork):
        start.check(update, parts.plan)
    fitting.fit(
        parts,
        update,
        fitting.recorder(parts),
        fitting.checkpoints(parts, run_dir, writes=False),
        start,
    )


def _from_json(said: dict[str, Any] | None) -> files.Checkpoint | fork.Fork | None:
    if said is None:
        return None
    there = files.at(Path(said["folder"]), said["update"])
    if said["fork"] is None:
        return there
    run_id, run_dir, *options = said["fork"]
    return fork.Fork(run_id, Path(run_dir), there, *options)


def main() -> None:
    sys.path.append(os.getcwd())  # the user's own modules, as for the run
    given = json.loads(sys.stdin.readline())
    own = cluster.Cluster(
        tuple(given["addresses"]),
        given["index"],
        started=True,
        rendezvous=given["rendezvous"],
    )
    passed = given["gate"] or {}
    places = {
        name: Path(passed[name]) for name in ("run_dir", "data_dir") if passed.get(name)
    }
    with gate.strict(gate.Gate(**passed | places)) if passed else nullcontext():
        run(resolve.from_text(given["spec"], own), given["task"])


if __name__ == "__main__":
    main()
