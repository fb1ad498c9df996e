"""`pipeline critical RUN@UPDATE`: measure the critical batch from a checkpoint.

the run's config ─► one more stage, which begins after UPDATE
    ─► a sweep over its effective batch ─► report/critical_batch.py
"""

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.checkpoints import fork, recorded_config
from pipeline.checkpoints.files import Checkpoint
from pipeline.cli.train import train_composed
from pipeline.common.errors import ConfigError, Parser, count, say
from pipeline.config import compose, key_kinds
from pipeline.config.overrides import hydra_quoted, keys_set
from pipeline.launch import recorded_job
from pipeline.sweep import again
from pipeline.tracking.foreign_store import CRITICAL, ForeignStore, listed
from pipeline.tracking.journal_file import Past

RUN = "RUN@UPDATE"
LARGEST = 64  # maximum effective batch of a branch, as a multiple of the run's
LEAST_UPDATES = 3  # minimum number of updates at the largest effective batch
UPDATES = 200  # default length of a branch, in updates at the run's effective batch
_NEVER = 2**31 - 1  # `evaluate_every` for an evaluation after the last update only
# Config values of all branches, which replace those of the run.
_BRANCH: dict[str, dict[str, Any]] = {
    "accumulation": {"factor": None},
    "training": {
        "epochs": None,
        "updates": None,
        "resume": None,
        "callbacks": {},
        "keep_best": {},
        "evaluate_at_start": False,
    },
    "tracking": {
        **key_kinds.outside_a_sweep(),
        "run_name": None,
        "log_model": False,
        "register": None,
        "log_every": 1,
    },
    "hardware": {"gpu": None},
    "start": {"weights_only": False},
}


class _Stage(NamedTuple):
    """An effective batch size, and the number of updates before it."""

    after: int
    effective_batch_size: int


def critical(arguments: Sequence[str]) -> int:
    """Measure the critical batch size with branches of a checkpoint.

    The branches are trained at 1, 2, 4, … times the effective batch of the run.

    The run directory is trusted like your own files: what its config names is imported.
    """
    options, overrides = _parser().parse_known_args(list(arguments))
    run_dir, start = fork.named(options.run, RUN)
    run_dir = run_dir.absolute()
    # Require that the run has ended, as a running one could remove the checkpoint.
    past = Past.read(run_dir, RUN)
    config = recorded_config.read(run_dir, past, RUN)
    recorded_config.complete(config, past, keys_set(overrides))

    stages = _stages(past, start)
    examples_before = _examples_before(stages, start)
    sizes, examples = _branches(
        batch=stages[-1].effective_batch_size,
        training_examples=start.meta.examples,
        examples=options.examples,
    )
    last = len(stages) - 1
    swept = ",".join(str(size) for size in sizes)
    branch_overrides = [
        f"start.run={hydra_quoted(f'{run_dir}@{start.updates_done}')}",
        f"training.examples={examples_before + examples}",
        f"accumulation.batch_schedule.{last}.effective_batch_size={swept}",
    ]

    def command_again(run_id: str) -> list[str]:
        command = ["critical", options.run, f"--examples={examples}"]
        return [*command, "--again", run_id, *overrides]

    # Create the folder in the run directory, where jobs on other machines can read it.
    # A `TemporaryDirectory` is not used, as any forked process removes it at its end.
    folder = tempfile.mkdtemp(dir=run_dir, prefix=".critical-")
    try:
        branch = _branch_config(config, past, start, stages)
        file = recorded_job.recorded_file(branch, Path(folder), CRITICAL)
        if options.again is not None:
            sweep_id = _interrupted_sweep(options, file, overrides, branch_overrides)
            branch_overrides.append(f"tracking.sweep={sweep_id}")
        say(
            f"branches after update {start.updates_done}: "
            f"{count(examples, 'example')} each, "
            f"at effective batches {sizes}"
        )
        line = ["-m", *file, *branch_overrides, *overrides]
        return train_composed(line, command_again)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parser() -> Parser:
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
        help="the number of examples per branch; default: the examples of "
        f"{UPDATES} updates",
    )
    parser.add_argument(
        "--again",
        metavar="SWEEP",
        help="continue an interrupted measurement, given the ID of its sweep",
    )
    return parser


def _interrupted_sweep(
    options: argparse.Namespace,
    file: list[str],
    overrides: list[str],
    branch_overrides: list[str],
) -> str:
    """Return the run ID of the sweep `options.again`.

    Raises:
        ConfigError: no sweep or several sweeps match, or the sweep does not have the
            same branches.
    """
    place = [text for text in overrides if text.startswith(("tracking.", "trust."))]
    config = compose.composed([*file, *place])
    store = ForeignStore.open(config.tracking.uri, config.trust.allow)
    parent = store.sweep(options.again)
    recorded = set(listed(parent.data.tags, "sweep.overrides"))
    if not recorded.issuperset(again.recordable(branch_overrides)):
        rule = f"must be a sweep of the same branches, {' '.join(branch_overrides)}"
        raise ConfigError("--again", rule, options.again)
    run_id: str = parent.info.run_id
    return run_id


def _stages(past: Past, start: Checkpoint) -> list[_Stage]:
    """Return the stages of a branch.

    The last stage is the branch's own and begins at the checkpoint. Its size, which the
    sweep replaces, is the run's effective batch size at the checkpoint.
    """
    first = past.start.segment["cut"]["effective_batch_size"]
    recorded = past.start.tags.get("accumulation.stages", f"[[0, {first}]]")
    stages = []
    for after, size in json.loads(recorded):
        if after < start.updates_done:
            stages.append(_Stage(after, size))
    return [*stages, _Stage(start.updates_done, stages[-1].effective_batch_size)]


def _examples_before(stages: list[_Stage], start: Checkpoint) -> int:
    """Return the number of examples that the run had seen at the checkpoint."""
    training_examples = start.meta.examples
    seen = 0
    for update in range(start.updates_done):
        sizes = [
            stage.effective_batch_size for stage in stages if stage.after <= update
        ]
        # The last batch of an epoch, the tail, may be smaller.
        seen += min(sizes[-1], training_examples - seen % training_examples)
    return seen


def _branches(
    batch: int, training_examples: int, examples: int | None
) -> tuple[list[int], int]:
    """Return the effective batch sizes of the branches, and the examples per branch.

    The number of examples is a multiple of each size.

    Args:
        batch: the effective batch of the run.
        training_examples: number of examples in the training split.
        examples: minimum number of examples per branch, or None for the default.

    Raises:
        ConfigError: there are not enough examples for a branch at twice the effective
            batch of the run.
    """
    if examples is None:
        examples = UPDATES * batch
    most = min(LARGEST * batch, training_examples, examples // LEAST_UPDATES)
    if most < 2 * batch:
        rule = (
            f"must be at least {2 * LEAST_UPDATES * batch}, with at least {2 * batch} "
            f"training examples (there are {training_examples})"
        )
        raise ConfigError("--examples", rule, examples)
    sizes = [batch]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes, math.ceil(examples / sizes[-1]) * sizes[-1]


def _branch_config(
    config: dict[str, Any], past: Past, start: Checkpoint, stages: list[_Stage]
) -> dict[str, Any]:
    """Return the config of a branch.

    This is the run's config with the `stages`, a constant learning rate, and no
    callbacks. At k times the run's effective batch, the learning rate is √k times that
    at the checkpoint.

    Raises:
        ConfigError: the run's scaling rule does not allow this.
    """
    batch = stages[-1].effective_batch_size
    scaling = config.get("scaling") or {}
    rule = scaling.get("rule", "none")
    if rule not in ("none", "sqrt"):
        reason = (
            "must have scaling.rule=none or sqrt: at k times the effective batch, the "
            "learning rate of a branch is multiplied by √k"
        )
        raise ConfigError(RUN, reason, rule)
    sizes = [stage.effective_batch_size for stage in stages]
    if rule == "none" and set(sizes) != {batch}:
        # The branches have `scaling.rule=sqrt`, which would also scale the rate of the
        # earlier stages.
        reason = "must have one effective batch up to UPDATE, or scaling.rule=sqrt"
        raise ConfigError(RUN, reason, sizes[:-1])
    reference = scaling["reference_batch_size"] if rule == "sqrt" else batch

    branch = dict(config)
    for group, values in _BRANCH.items():
        branch[group] = {**(config.get(group) or {}), **values}
    schedule = []
    for stage in stages:
        schedule.append(
            {
                "start": {"updates": stage.after},
                "effective_batch_size": stage.effective_batch_size,
            }
        )
    branch["accumulation"] |= {
        "effective_batch_size": sizes[0],
        "micro_batch_size": _micro_batch_size(config, past),
        "batch_schedule": schedule,
    }
    branch["training"]["evaluate_every"] = _NEVER
    branch["dataset"] = {**config["dataset"], "validations": None}
    rate = start.meta.values["recorder"]["last"]["learning_rate"]
    branch["schedule"] = {
        "_target_": "pipeline.components.optimizer.constant",
        "learning_rate": rate / math.sqrt(batch / reference),
    }
    branch["scaling"] = {"rule": "sqrt", "reference_batch_size": reference}
    return branch


def _micro_batch_size(config: dict[str, Any], past: Past) -> int | None:
    """Return the micro-batch size of a run; in a cut by tokens, that of its config."""
    if config["accumulation"].get("micro_batch_tokens") is not None:
        limit: int | None = config["accumulation"]["micro_batch_size"]
        return limit
    size: int = past.start.segment["cut"]["micro_batch_size"]
    return size
