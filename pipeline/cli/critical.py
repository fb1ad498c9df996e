"""`pipeline critical RUN@UPDATE`: measure the critical batch by branches of a checkpoint.

the run's config ─► one stage more, from UPDATE on ─► a sweep over its effective batch ─► report/branches.py
"""

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.checkpoints import fork
from pipeline.checkpoints.files import Checkpoint
from pipeline.checkpoints.run_dirs import quoted, recorded_config
from pipeline.cli.resume import complete
from pipeline.cli.train import train_composed
from pipeline.common.errors import ConfigError, Parser, say
from pipeline.config import compose
from pipeline.sweep import again
from pipeline.tracking.foreign_store import CRITICAL, ForeignStore, listed
from pipeline.tracking.journal_file import Past

RUN = "RUN@UPDATE"
MOST = 64  # the largest batch, in batches of the run
LEAST = 3  # updates of the largest batch
UPDATES = 200  # of the run's batch: the default length of a branch
_NEVER = 2**31 - 1  # updates between two evaluations: only the last update is evaluated


def critical(arguments: Sequence[str]) -> int:
    """Measure the critical batch: train branches of a checkpoint at 1, 2, 4, … times the batch of its run.

    The run directory is trusted like your own files: what its config names is imported.
    """
    parser = Parser(prog="pipeline critical", description=critical.__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar=RUN, help="a run directory or the start of a run's ID, and its checkpoint")
    parser.add_argument(
        "--examples", type=int, metavar="N", help=f"of each branch; default: those of {UPDATES} updates"
    )
    parser.add_argument("--again", metavar="SWEEP", help="go on with an interrupted measurement, by its sweep's ID")
    options, overrides = parser.parse_known_args(list(arguments))
    source, start = fork.named(options.run, RUN)
    past = Past.of(source, RUN)  # a run that goes on would remove the checkpoint
    past.close()
    config = recorded_config(source, RUN)
    complete(config, past, {text.lstrip("+").split("=")[0] for text in overrides})
    stages, seen = _stages(config, past, start)
    sizes, examples = _sizes(stages[-1][1], start.meta["examples"], options.examples)
    config = _branch(config, past, start, stages)
    given = [f"start.run={quoted(f'{source.absolute()}@{start.update}')}", f"training.examples={seen + examples}"]
    given.append(f"accumulation.schedule.{len(stages) - 1}.effective_batch_size={','.join(map(str, sizes))}")
    command = ["critical", options.run, f"--examples={examples}"]
    with tempfile.TemporaryDirectory(dir=source, prefix=".critical-") as folder:  # jobs on other machines find it too
        file = compose.recorded_file(config, Path(folder), CRITICAL)
        if options.again is not None:
            given.append(f"tracking.sweep={_sweep(options.again, file, given, overrides)}")
        say(f"branches after update {start.update}: {examples} examples each, at effective batches {sizes}")
        return train_composed(
            ["-m", *file, *given, *overrides], lambda run_id: [*command, "--again", run_id, *overrides]
        )


def _stages(config: dict[str, Any], past: Past, start: Checkpoint) -> tuple[list[list[int]], int]:
    """Return the stages as `[updates before, effective batch size]`, the branches' last, and the examples before it."""
    if config["dataset"].get("batched"):
        raise ConfigError(
            RUN, "must be a run without dataset.batched=true, whose batches have any size", str(past.path)
        )
    recorded = past.start["tags"].get("accumulation.stages")
    first = past.start["segment"]["cut"]["effective_batch_size"]
    stages = [stage for stage in (json.loads(recorded) if recorded else [[0, first]]) if stage[0] < start.update]
    seen, in_epoch = 0, start.meta["examples"]
    for update in range(start.update):
        batch = next(size for after, size in reversed(stages) if after <= update)
        seen += min(batch, in_epoch - seen % in_epoch)  # a tail ends each epoch
    return [*stages, [start.update, stages[-1][1]]], seen


def _sizes(batch: int, in_epoch: int, given: int | None) -> tuple[list[int], int]:
    """Return the effective batches of the branches, and the examples of each branch, a multiple of all."""
    examples = UPDATES * batch if given is None else given
    most = min(MOST * batch, in_epoch, examples // LEAST)
    sizes = [batch << n for n in range(MOST.bit_length()) if batch << n <= most]
    if 2 * batch > in_epoch:
        raise ConfigError(RUN, f"must have a batch of at most half the {in_epoch} examples of an epoch", batch)
    if len(sizes) < 2:
        raise ConfigError(
            "--examples", f"must be at least {2 * LEAST * batch}: {LEAST} updates of two batches", examples
        )
    return sizes, math.ceil(examples / sizes[-1]) * sizes[-1]


def _branch(config: dict[str, Any], past: Past, start: Checkpoint, stages: list[list[int]]) -> dict[str, Any]:
    """Return the config of a branch: that of its run with the `stages`, a constant rate, and no callbacks."""
    scaling, batch = config.get("scaling") or {}, stages[-1][1]
    if (rule := scaling.get("rule", "none")) not in ("none", "sqrt"):
        raise ConfigError(RUN, "must have scaling.rule none or sqrt: the rate of the branches follows √k", rule)
    reference = scaling["reference_batch_size"] if rule == "sqrt" else batch
    rate = start.meta["values"]["recorder"]["last"]["learning_rate"] / math.sqrt(batch / reference)
    changed: dict[str, dict[str, Any]] = {
        "accumulation": {
            **{"effective_batch_size": stages[0][1], "factor": None, "seesaw_max": None, "scale_rate": True},
            "micro_batch_size": past.start["segment"]["cut"]["micro_batch_size"],
            "schedule": [{"start": {"updates": after}, "effective_batch_size": size} for after, size in stages],
        },
        "training": {
            **{"epochs": None, "updates": None, "resume": None, "callbacks": {}, "keep_best": {}},
            **{"evaluate_every": _NEVER, "checkpoint_every": "auto"},
        },
        "tracking": {"sweep": None, "job": None, "run_name": None, "log_model": False, "log_every": 1},
        "dataset": {"test_split": None} if "test_split" in config["dataset"] else {},
        "hardware": {"gpu": None},
        "start": {"weights_only": False},
    }
    merged = {group: {**(config.get(group) or {}), **values} for group, values in changed.items()}
    constant = {"_target_": "pipeline.components.optimizer.constant", "learning_rate": rate}
    return {**config, **merged, "schedule": constant, "scaling": {"rule": "sqrt", "reference_batch_size": reference}}


def _sweep(start: str, file: Sequence[str], given: Sequence[str], overrides: Sequence[str]) -> str:
    """Return the ID of the sweep that `--again` names, which must be of the same branches."""
    own = compose.composed([*file, *(text for text in overrides if text.startswith(("tracking.", "trust.")))])
    parent = ForeignStore.open(own.tracking.uri, own.trust.allow).sweep(start)
    if not {*again.recordable(given)} <= {*listed(parent.data.tags, "sweep.overrides")}:
        raise ConfigError("--again", f"must be a sweep of the same branches, {' '.join(given)}", start)
    return str(parent.info.run_id)
