"""`pipeline critical RUN@UPDATE`: measure the critical batch by branches of a checkpoint.

the run's config ─► a stage more, from UPDATE on ─► a sweep over its effective batch ─► report/branches.py
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
UPDATES = 200  # of the run's batch: the default length of a branch
LEAST = 3  # updates of the largest batch
_OFTEN = 2**31 - 1  # updates between two evaluations: only the last update is evaluated


def critical(arguments: Sequence[str]) -> int:
    """Measure the critical batch: train branches of a checkpoint at 1, 2, 4, … times the batch of its run.

    The run directory is trusted like your own files: what its config names is imported.
    """
    parser = Parser(prog="pipeline critical", description=critical.__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar=RUN, help="a run directory, or the start of a run's ID; @UPDATE: a checkpoint")
    parser.add_argument("--examples", type=int, metavar="N", help=f"of each branch; default: {UPDATES} updates' of RUN")
    parser.add_argument("--again", metavar="SWEEP", help="go on with an interrupted call: the ID of its sweep")
    options, overrides = parser.parse_known_args(list(arguments))
    source, start = fork.named(options.run, RUN)
    past = Past.of(source, RUN)  # one that still runs would remove the checkpoint
    past.close()
    config = recorded_config(source, RUN)
    complete(config, past, {text.lstrip("+").split("=")[0] for text in overrides})
    stages, seen = _stages(config, past, start)
    batch, before = stages[-1][1], len(stages) - 1
    sizes, examples = _sizes(batch, start.meta["examples"], options.examples)
    config |= _branch(config, past, start, stages)
    given = [
        f"start.run={quoted(f'{source.absolute()}@{start.update}')}",
        f"training.examples={seen + examples}",
        f"accumulation.schedule.{before}.effective_batch_size={','.join(map(str, sizes))}",
    ]
    command = ["critical", options.run, f"--examples={examples}"]
    # Below the run, where jobs on other machines find it too.
    with tempfile.TemporaryDirectory(dir=source, prefix=".critical-") as folder:
        file = compose.recorded_file(config, Path(folder), CRITICAL)
        if options.again is not None:
            given.append(f"tracking.sweep={_same_sweep(options.again, file, given, overrides)}")
        say(f"{len(sizes)} branches of {examples} examples after update {start.update}: batches {sizes}")
        arguments = ["-m", *file, *given, *overrides]
        return train_composed(arguments, lambda run_id: [*command, "--again", run_id, *overrides])


def _stages(config: dict[str, Any], past: Past, start: Checkpoint) -> tuple[list[list[int]], int]:
    """Return the stages of the run as `[updates before, effective batch size]`, that of the branches last, and the
    examples that were seen before it."""
    if config["dataset"].get("batched"):
        raise ConfigError(RUN, "must be a run without dataset.batched=true, whose batches have any size")
    sizes = [[0, past.start["segment"]["cut"]["effective_batch_size"]]]
    if "accumulation.stages" in past.start["tags"]:
        sizes = json.loads(past.start["tags"]["accumulation.stages"])
    sizes, seen = [stage for stage in sizes if stage[0] < start.update], 0
    for update in range(start.update):
        batch = next(size for after, size in reversed(sizes) if after <= update)
        seen += min(batch, start.meta["examples"] - seen % start.meta["examples"])  # a tail ends each epoch
    return [*sizes, [start.update, sizes[-1][1]]], seen


def _sizes(batch: int, in_epoch: int, examples: int | None) -> tuple[list[int], int]:
    """Return the effective batches of the branches, and the examples of each, a multiple of all."""
    asked = UPDATES * batch if examples is None else examples
    sizes = [k * batch for k in (2**n for n in range(MOST.bit_length())) if k * batch <= min(in_epoch, asked // LEAST)]
    if len(sizes) < 2:
        where = f"{RUN} is at an effective batch of {batch}, the training split has {in_epoch} examples"
        rule = f"must be at least {2 * LEAST * batch}, and twice the batch no more than the training split: {where}"
        raise ConfigError("--examples", rule, asked)
    return sizes, math.ceil(asked / sizes[-1]) * sizes[-1]


def _branch(config: dict[str, Any], past: Past, start: Checkpoint, stages: list[list[int]]) -> dict[str, Any]:
    """Return the groups of the config in which a branch differs from its run."""
    scaling = config.get("scaling") or {}
    if (rule := scaling.get("rule", "none")) not in ("none", "sqrt"):
        raise ConfigError(RUN, "must have a scaling.rule of none or sqrt, as the branches' rate follows √k", rule)
    batch = stages[-1][1]
    reference = scaling["reference_batch_size"] if rule == "sqrt" else batch
    try:
        used = float(start.meta["values"]["recorder"]["last"]["learning_rate"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(RUN, "must have a checkpoint with the learning rate of its update", start.update) from error
    rate = used / math.sqrt(batch / reference)
    schedule = [{"start": {"updates": after}, "effective_batch_size": size} for after, size in stages]
    cut = {"micro_batch_size": past.start["segment"]["cut"]["micro_batch_size"], "factor": None, "seesaw_max": None}
    cut |= {"effective_batch_size": stages[0][1], "schedule": schedule, "scale_rate": True}
    training = dict.fromkeys(("epochs", "updates", "resume")) | {"callbacks": {}, "keep_best": {}}
    training |= {"evaluate_every": _OFTEN, "checkpoint_every": "auto"}
    tracking = dict.fromkeys(("sweep", "job", "run_name")) | {"log_model": False, "log_every": 1}
    unchanged = {"dataset": {"test_split": None} if "test_split" in config["dataset"] else {}}
    changed: dict[str, dict[str, Any]] = {"accumulation": cut, "training": training, "tracking": tracking, **unchanged}
    changed |= {"hardware": {"gpu": None}, "start": {"weights_only": False}}
    constant = {"_target_": "pipeline.components.optimizer.constant", "learning_rate": rate}
    return {
        **{group: {**(config.get(group) or {}), **values} for group, values in changed.items()},
        "scaling": {"rule": "sqrt", "reference_batch_size": reference},
        "schedule": constant,
    }


def _same_sweep(start: str, file: Sequence[str], given: Sequence[str], overrides: Sequence[str]) -> str:
    """Return the ID of the sweep that `--again` names; it must be one of the same branches."""
    where = [text for text in overrides if text.startswith(("tracking.", "trust."))]
    own = compose.composed([*file, *where])
    parent = ForeignStore.open(own.tracking.uri, own.trust.allow).sweep(start)
    if not {*again.recordable(given)} <= {*listed(parent.data.tags, "sweep.overrides")}:
        raise ConfigError("--again", f"must be a sweep of these branches: {', '.join(given)}", start)
    return str(parent.info.run_id)
