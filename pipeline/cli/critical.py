"""`pipeline critical RUN@UPDATE`: measure the critical batch by branches of a checkpoint.

the run's config ─► one stage more, from UPDATE on ─► a sweep over its effective batch ─► report/critical_batch.py
"""

import json
import math
import shutil
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
from pipeline.config import compose, key_kinds
from pipeline.config.sizes import HORIZONS
from pipeline.launch import record
from pipeline.sweep import again
from pipeline.tracking.foreign_store import CRITICAL, ForeignStore, listed
from pipeline.tracking.journal_file import Past

RUN = "RUN@UPDATE"
MOST = 64  # the largest batch, in batches of the run
LEAST = 3  # updates of the largest batch
UPDATES = 200  # of the run's batch: the default length of a branch
_NEVER = 2**31 - 1  # only the last update is evaluated
_BRANCH: dict[str, dict[str, Any]] = {  # what all branches do otherwise than their run
    "accumulation": {"factor": None, "seesaw_max": None, "scale_rate": True},
    "training": {
        **dict.fromkeys((*HORIZONS, "resume")),
        "callbacks": {},
        "keep_best": {},
    },
    "tracking": {
        **key_kinds.outside_a_sweep(),
        "run_name": None,
        "log_model": False,
        "log_every": 1,
    },
    "hardware": {"gpu": None},
    "start": {"weights_only": False},
}


def critical(arguments: Sequence[str]) -> int:
    """Measure the critical batch: train branches of a checkpoint at 1, 2, 4, … times the batch of its run.

    The run directory is trusted like your own files: what its config names is imported.
    """
    parser = Parser(
        prog="pipeline critical", description=critical.__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "run",
        metavar=RUN,
        help="a run directory or the start of a run's ID, and its checkpoint",
    )
    parser.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help=f"of each branch; default: of {UPDATES} updates",
    )
    parser.add_argument(
        "--again",
        metavar="SWEEP",
        help="go on with an interrupted measurement, by its sweep's ID",
    )
    options, overrides = parser.parse_known_args(list(arguments))
    source, start = fork.named(options.run, RUN)
    source = source.absolute()
    past = Past.of(source, RUN)  # a run that goes on would remove the checkpoint
    past.close()
    config = recorded_config(source, RUN)
    complete(config, past, {text.lstrip("+").split("=")[0] for text in overrides})
    stages, seen = _stages(past, start)
    sizes, examples = _sizes(stages[-1][1], start.meta["examples"], options.examples)
    given = [
        f"start.run={quoted(f'{source}@{start.update}')}",
        f"training.examples={seen + examples}",
    ]
    given.append(
        f"accumulation.batch_schedule.{len(stages) - 1}.effective_batch_size={','.join(map(str, sizes))}"
    )
    command = ["critical", options.run, f"--examples={examples}"]
    # Jobs on other machines find it too. A `TemporaryDirectory` would be removed by a forked process that ends.
    folder = tempfile.mkdtemp(dir=source, prefix=".critical-")
    try:
        file = record.recorded_file(
            _branch(config, past, start, stages), Path(folder), CRITICAL
        )
        if options.again is not None:
            own = compose.composed(
                [
                    *file,
                    *(
                        text
                        for text in overrides
                        if text.startswith(("tracking.", "trust."))
                    ),
                ]
            )
            parent = ForeignStore.open(own.tracking.uri, own.trust.allow).sweep(
                options.again
            )
            if not {*again.recordable(given)} <= {
                *listed(parent.data.tags, "sweep.overrides")
            }:
                raise ConfigError(
                    "--again",
                    f"must be a sweep of the same branches, {' '.join(given)}",
                    options.again,
                )
            given.append(f"tracking.sweep={parent.info.run_id}")
        say(
            f"branches after update {start.update}: {examples} examples each, at effective batches {sizes}"
        )
        line = ["-m", *file, *given, *overrides]
        return train_composed(
            line, lambda run_id: [*command, "--again", run_id, *overrides]
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _stages(past: Past, start: Checkpoint) -> tuple[list[list[int]], int]:
    """Return the stages as `[updates before, effective batch size]`, the branches' last, and the examples before it."""
    first, recorded = (
        past.start["segment"]["cut"]["effective_batch_size"],
        "accumulation.stages",
    )
    stages = json.loads(past.start["tags"].get(recorded, f"[[0, {first}]]"))
    stages, seen, in_epoch = (
        [stage for stage in stages if stage[0] < start.update],
        0,
        start.meta["examples"],
    )
    for update in range(start.update):
        batch = next(size for after, size in reversed(stages) if after <= update)
        seen += min(batch, in_epoch - seen % in_epoch)  # a tail ends each epoch
    return [*stages, [start.update, stages[-1][1]]], seen


def _sizes(batch: int, in_epoch: int, given: int | None) -> tuple[list[int], int]:
    """Return the effective batches of the branches, and the examples of each branch, a multiple of all."""
    examples = UPDATES * batch if given is None else given
    most = min(MOST * batch, in_epoch, examples // LEAST)
    if most < 2 * batch:
        rule = f"must be at least {2 * LEAST * batch}, and the training split at least {2 * batch} ({in_epoch})"
        raise ConfigError("--examples", rule, examples)
    sizes = [batch << n for n in range(MOST.bit_length()) if batch << n <= most]
    return sizes, math.ceil(examples / sizes[-1]) * sizes[-1]


def _branch(
    config: dict[str, Any], past: Past, start: Checkpoint, stages: list[list[int]]
) -> dict[str, Any]:
    """Return the config of a branch: that of its run with the `stages`, a constant rate, and no callbacks."""
    scaling, batch = config.get("scaling") or {}, stages[-1][1]
    if (rule := scaling.get("rule", "none")) not in ("none", "sqrt"):
        raise ConfigError(
            RUN,
            "must have scaling.rule none or sqrt: the rate of the branches follows √k",
            rule,
        )
    if rule == "none" and {size for _, size in stages} != {
        batch
    }:  # the rule would scale the earlier ones
        rule = "must have one effective batch up to UPDATE, or scaling.rule=sqrt"
        raise ConfigError(RUN, rule, [size for _, size in stages[:-1]])
    reference = scaling["reference_batch_size"] if rule == "sqrt" else batch
    rate = start.meta["values"]["recorder"]["last"]["learning_rate"] / math.sqrt(
        batch / reference
    )
    new = {
        group: {**(config.get(group) or {}), **values}
        for group, values in _BRANCH.items()
    }
    schedule = [
        {"start": {"updates": after}, "effective_batch_size": size}
        for after, size in stages
    ]
    micro = past.start["segment"]["cut"]["micro_batch_size"]
    new["accumulation"] |= {
        "effective_batch_size": stages[0][1],
        "micro_batch_size": micro,
        "batch_schedule": schedule,
    }
    new["training"]["evaluate_every"] = _NEVER
    new["schedule"] = {
        "_target_": "pipeline.components.optimizer.constant",
        "learning_rate": rate,
    }
    return {
        **config,
        **new,
        "scaling": {"rule": "sqrt", "reference_batch_size": reference},
    }
