"""A worker other than the chief: it computes as the chief does, which alone logs, writes checkpoints and prints.

`python -m pipeline.distributed.worker` is a worker that the chief has started: it reads a line of JSON with the cluster
and the spec.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints import files
from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.fork import Fork
from pipeline.common import imports
from pipeline.common.errors import ConfigError, described, say
from pipeline.common.secrets import mask, remember
from pipeline.config import compose, resolve
from pipeline.config.cluster import Cluster
from pipeline.config.resolve import RunSpec
from pipeline.distributed import rendezvous
from pipeline.trust import gate

if TYPE_CHECKING:  # importing it takes seconds
    import tensorflow as tf

    from pipeline.components.assembly import Parts

TRAIN = "pipeline.distributed.worker.train"


def run(spec: RunSpec, task: str = TRAIN) -> None:
    """Work for the chief to the end of the run.

    If this worker refuses, it ends this process with status 2, and with 1 if it fails: the others notice at once.

    Args:
        spec: of this worker's own config.
        task: dotted name of a function of the parts of the run, its directory, and the checkpoint that it starts from.
    """
    workers = spec.workers
    assert workers is not None
    remember(spec.config.tracking.uri)
    client = rendezvous.Client(workers)
    try:
        with imports.without_chatter():
            from pipeline.components import assembly
        answer = client.join(rendezvous.statement(spec))
        if answer is None:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the chief ends the run
        spec = spec.adopting(answer["spec"])
        counted: list[tf.Variable] = []
        client.watch(lambda: int(counted[0].numpy()) if counted else 0)
        start = _from_json(answer["start"])
        first = 0 if start is None else start.update
        parts = assembly.assemble(spec, None, first)
        counted.append(parts.devices.reductions_ready)
        module, _, name = task.rpartition(".")
        getattr(import_module(module), name)(parts, Path(answer["run_dir"]), start)
    except BaseException as error:
        refuses = isinstance(error, ConfigError)
        if workers.started or not refuses:
            say(*mask(traceback.format_exc()).splitlines())
        client.fail({"refused": str(error)} if refuses else {"failed": described(error)})
        if refuses and not (workers.started or client.told):
            say(f"pipeline: {error}")
        sys.stderr.flush()
        with suppress(OSError):
            compose.session().remove_empty_folders()
        os._exit(2 if refuses else 1)
    client.wait()


def train(parts: Parts, run_dir: Path, start: Checkpoint | Fork | None) -> None:
    """Train as the chief does, without writing anything."""
    from pipeline.components import fitting

    update = parts.update()
    if isinstance(start, Fork):
        start.check(update, parts.plan)
    fitting.fit(parts, update, fitting.recorder(parts), fitting.checkpoints(parts, run_dir, writes=False), start)


def _from_json(said: dict[str, Any] | None) -> Checkpoint | Fork | None:
    if said is None:
        return None
    there = files.at(Path(said["folder"]), said["update"])
    if "fork" not in said:
        return there
    run_id, run_dir, weights_only, own_rate = said["fork"]
    return Fork(run_id, Path(run_dir), there, weights_only, own_rate)


def main() -> None:
    """Run as a worker that the chief has started."""
    sys.path.append(os.getcwd())  # the user's own modules, as for the run
    given = json.loads(sys.stdin.readline())
    own = Cluster(tuple(given["addresses"]), given["index"], started=True)
    spec = resolve.from_text(given["spec"], own)
    if (passed := given["gate"]) is None:
        run(spec, given["task"])
        return
    paths = {name: None if passed[name] is None else Path(passed[name]) for name in ("run_dir", "data_dir")}
    with gate.strict(gate.Gate(**{**passed, **paths})):
        run(spec, given["task"])


if __name__ == "__main__":
    main()
