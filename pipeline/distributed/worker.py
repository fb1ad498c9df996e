"""A worker beside the chief: it computes as the chief does, and leaves it to log, write checkpoints and speak.

`python -m pipeline.distributed.worker` is one that the chief has started: it reads a line of JSON with the cluster and
the config, which is a text of YAML.
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

from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.checkpoints import files
from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.fork import Fork
from pipeline.common import imports
from pipeline.common.errors import ConfigError, described, say
from pipeline.common.secrets import mask, remember
from pipeline.config import sizes
from pipeline.config import validate as configuration
from pipeline.config.cluster import Cluster
from pipeline.config.compose import RunFolders
from pipeline.config.schema import Config
from pipeline.distributed import rendezvous
from pipeline.trust import gate

if TYPE_CHECKING:  # importing it takes seconds
    import tensorflow as tf

    from pipeline.components.assembly import Parts

TRAIN = "pipeline.distributed.worker.train"
# Callbacks of Keras' that write files, which the chief does.
WRITING = ("ModelCheckpoint", "BackupAndRestore", "CSVLogger", "TensorBoard", "RemoteMonitor")


def take_part(workers: Cluster, config: DictConfig, task: str = TRAIN) -> None:
    """Be another worker than the chief, to the end of the run.

    Args:
        workers: of the run, as this one sees them.
        config: checked.
        task: the dotted name of what each worker does with the parts of a run, its directory, and what it begins with.

    It ends this process, with 2 where it refuses and with 1 where it fails, so that the others see it at once.
    """
    remember(config.tracking.uri)
    member = rendezvous.Member(workers)
    try:
        with imports.without_chatter():
            from pipeline.components import assembly
        answer = member.join(rendezvous.statement(config))
        if answer is None:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the chief ends the run
        with open_dict(config):
            for key, value in answer["changes"].items():
                OmegaConf.update(config, key, value)
            for key in answer["gone"]:
                parent, _, name = key.rpartition(".")
                del (OmegaConf.select(config, parent) if parent else config)[name]
        counted: list[tf.Variable] = []
        member.watch(lambda: int(counted[0].numpy()) if counted else 0)
        start = _from_json(answer["start"])
        first = 0 if start is None else start.update
        parts = assembly.assemble(config, sizes.settle_sizes(config), None, first, workers)
        counted.append(parts.machine.arrived)
        module, _, name = task.rpartition(".")
        getattr(import_module(module), name)(parts, Path(answer["run_dir"]), start)
    except BaseException as error:
        refuses = isinstance(error, ConfigError)
        if workers.started or not refuses:
            say(*mask(traceback.format_exc()).splitlines())
        member.fail({"refused": str(error)} if refuses else {"failed": described(error)})
        if refuses and not (workers.started or member.told):
            say(f"pipeline: {error}")
        sys.stderr.flush()
        with suppress(OSError):
            RunFolders.take_back()
        os._exit(2 if refuses else 1)
    member.wait()


def train(parts: Parts, run_dir: Path, start: Checkpoint | Fork | None) -> None:
    """Train as the chief does, and write nothing."""
    from pipeline.checkpoints.files import Checkpoints
    from pipeline.dataset import bad_example
    from pipeline.training import loop
    from pipeline.training.progress import Progress
    from pipeline.training.recorder import Nowhere, Recorder

    config, plan, update = parts.config, parts.plan, parts.update()
    if isinstance(start, Fork):
        start.check(update, plan)
    recorder = Recorder(
        Nowhere(),
        plan,
        config.tracking.log_every,
        lambda: 0,
        Progress(plan.updates, shown=False),
        skips=config.hardware.precision.name == "mixed_float16",
        raises=False,
    )
    parts.changed()
    with bad_example.located(parts.data, parts.files):
        loop.train(
            parts.model,
            parts.batches,
            update,
            plan,
            recorder,
            evaluate=parts.evaluate("validation"),
            test=parts.evaluate("test"),
            evaluate_every=config.training.evaluate_every,
            callbacks={
                name: callback
                for name, callback in parts.objective.callbacks.items()
                if not any(kind.__name__ in WRITING for kind in type(callback).__mro__)
            },
            checkpoints=Checkpoints(run_dir / "checkpoints", None, plan, writes=False),
            start=start,
            best=parts.best,
            agreed=parts.machine.agree,
        )


def _from_json(said: dict[str, Any] | None) -> Checkpoint | Fork | None:
    if said is None:
        return None
    there = files.at(Path(said["folder"]), said["update"])
    if "fork" not in said:
        return there
    run_id, run_dir, weights_only, own_rate = said["fork"]
    return Fork(run_id, Path(run_dir), there, weights_only, own_rate)


def main() -> None:
    """Be a worker that the chief has started."""
    sys.path.append(os.getcwd())  # the user's own modules, as for the run
    configuration.register()
    given = json.loads(sys.stdin.readline())
    config: Any = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(given["config"]))
    own = Cluster(tuple(given["addresses"]), given["index"], started=True)
    if (passed := given["gate"]) is None:
        take_part(own, config, given["task"])
        return
    paths = {name: None if passed[name] is None else Path(passed[name]) for name in ("run_dir", "data_dir")}
    with gate.strict(gate.Gate(**{**passed, **paths})):
        take_part(own, config, given["task"])


if __name__ == "__main__":
    main()
