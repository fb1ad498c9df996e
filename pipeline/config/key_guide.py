"""Groups the keys of the config by who needs them, and describes them.

`pipeline train --help` and the config reference print these groups. The descriptions
are the comments in the schema and in `conf/`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from inspect import getsource
from pathlib import Path
from typing import Any, get_type_hints

from pipeline.config.schema import ShownConfig, group_in

# A line of a config file with a key of the group: the key, its value, its comment.
_LINE_OF_KEY = re.compile(r"(\w+):(?: (.*?))?(?: *# (.*))?")
# A field in the source of a dataclass, with the comment on its own line.
_LINE_OF_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.*))?$")
_TYPE_IN_COMMENT = re.compile(r"\((.+?)\) ")


@dataclass(frozen=True)
class KeyGroup:
    """Keys that the same users need.

    Attributes:
        title: the heading in the config reference.
        reader: who needs the keys, in one sentence.
        keys: the dotted names.
    """

    title: str
    reader: str
    keys: tuple[str, ...]


# `optimizer.learning_rate` is an argument of the chosen optimizer; all other keys of
# the groups are keys of the schema.
FIRST_KEYS = KeyGroup(
    "To begin with",
    "These twelve keys are enough for a first experiment.",
    (
        "dataset",
        "model",
        "optimizer",
        "optimizer.learning_rate",
        "accumulation.effective_batch_size",
        "accumulation.factor",
        "accumulation.micro_batch_size",
        "training.epochs",
        "hardware.precision",
        "seed",
        "tracking.uri",
        "tracking.experiment",
    ),
)
KEY_GROUPS = (
    FIRST_KEYS,
    KeyGroup(
        "Length, evaluations and checkpoints",
        "For runs whose length is not given in epochs, and for what happens during a "
        "run.",
        (
            "training.updates",
            "training.examples",
            "training.evaluate_every",
            "training.evaluate_at_start",
            "training.checkpoint_every",
            "training.keep_best.metric",
            "training.keep_best.mode",
            "training.callbacks",
        ),
    ),
    KeyGroup(
        "Loss and metrics",
        "For losses and metrics that no choice of the group `objective` provides.",
        (
            "training.loss",
            "training.loss_weights",
            "training.loss_over",
            "training.added_losses",
            "training.class_weight",
            "training.metrics",
            "training.weighted_metrics",
        ),
    ),
    KeyGroup(
        "Learning rate",
        "For schedules, and for learning rates that follow the effective batch size.",
        (
            "schedule",
            "scaling.rule",
            "scaling.reference_batch_size",
            "scaling.warmup",
            "scaling.rate",
            "scaling.peak_batch_size",
            "scaling.ema",
        ),
    ),
    KeyGroup(
        "Accumulation",
        "For models with dropout, noise or BatchNormalization, for texts of unequal "
        "length, and for batches that grow.",
        (
            "accumulation.micro_batch_tokens",
            "accumulation.same_noise",
            "accumulation.moving_statistics",
            "accumulation.batch_schedule",
            "accumulation.noise_scale_every",
        ),
    ),
    KeyGroup(
        "One device",
        "For the speed, the memory and the reproducibility of a run on one machine.",
        (
            "hardware.device",
            "hardware.gpu",
            "hardware.gpu_memory",
            "hardware.memory",
            "hardware.deterministic",
            "hardware.tf32",
            "hardware.xla",
            "hardware.xla_lengths",
            "hardware.xla_scope",
            "hardware.fused_attention",
            "hardware.profile",
        ),
    ),
    KeyGroup(
        "Several GPUs",
        "For a run on several GPUs of one machine, and for sweeps that share them.",
        (
            "hardware.replicas",
            "hardware.parallel_jobs",
            "hardware.gpus_per_job",
            "hardware.jobs_per_gpu",
        ),
    ),
    KeyGroup(
        "Several machines",
        "For a run on several workers. [Trust](trust.md#open-ports) explains the "
        "ports.",
        (
            "hardware.workers",
            "hardware.open_ports",
            "hardware.secret_file",
        ),
    ),
    KeyGroup(
        "MLflow",
        "For naming and describing runs, and for logging them differently.",
        (
            "tracking.run_name",
            "tracking.tags",
            "tracking.description",
            "tracking.log_every",
            "tracking.show",
            "training.shown",
            "tracking.log_model",
            "tracking.register",
            "tracking.code",
            "tracking.system_metrics",
            "tracking.patience",
            "tracking.when_unreachable",
        ),
    ),
    KeyGroup(
        "Resuming, branching and repeating",
        "For runs that begin from another run, or from its record.",
        (
            "training.resume",
            "training.accept_changed_code",
            "start.run",
            "start.weights_only",
            "trust.allow",
            "schema",
        ),
    ),
)


@dataclass(frozen=True)
class Description:
    """The comment of a key.

    Attributes:
        text: the meaning of the key.
        kind: the type as the comment states it, or None if the type hint is enough.
    """

    text: str
    kind: str | None = None


@dataclass(frozen=True)
class ChoiceKey:
    """A key in a config file: one that a choice of a config group sets."""

    name: str
    value: str
    comment: str


@cache
def descriptions() -> dict[str, Description]:
    """Return the description of each key of the schema, by its dotted name."""
    return dict(_described(ShownConfig, ""))


def described(key: str, config_folder: Path) -> Description:
    """Return the description of a key.

    Args:
        key: the dotted name of a key of the schema, or of an argument of a node.
        config_folder: the folder with the config groups. An argument is described in
            the first choice of its group that has it with a comment.

    Raises:
        KeyError: nothing describes the key.
    """
    if key in descriptions():
        return descriptions()[key]
    group, _, name = key.partition(".")
    for file in sorted((config_folder / group).glob("*.yaml")):
        for choice_key in choice_keys(file):
            if choice_key.name == name and choice_key.comment:
                return Description(choice_key.comment)
    raise KeyError(key)


def choice_keys(file: Path) -> list[ChoiceKey]:
    """Return the keys at the top level of a config file, without `_target_`.

    If the value of a key is on indented lines below the key, an empty text is returned
    for it.
    """
    keys = []
    for line in file.read_text(encoding="utf-8").splitlines():
        match = _LINE_OF_KEY.fullmatch(line)
        if match and match[1] not in ("_target_", "defaults"):
            keys.append(ChoiceKey(match[1], match[2] or "", match[3] or ""))
    return keys


def _described(kind: Any, prefix: str) -> Iterator[tuple[str, Description]]:
    """Yield the dotted name and the description of each key in a dataclass."""
    comments = _comments(kind)
    for name, hint in get_type_hints(kind).items():
        nested = group_in(hint)
        if nested is None:
            yield f"{prefix}{name}", _parsed(comments.get(name, ""))
        else:
            yield from _described(nested, f"{prefix}{name}.")


def _comments(kind: type) -> dict[str, str]:
    """Return the comment of each field, from its own line or from those above it."""
    comments: dict[str, str] = {}
    above: list[str] = []
    sources = [getsource(base) for base in kind.__mro__ if is_dataclass(base)]
    for line in "\n".join(sources).splitlines():
        if match := _LINE_OF_FIELD.match(line):
            comments.setdefault(match[1], match[2] or " ".join(above))
        if line.strip().startswith("#"):
            above.append(line.strip().removeprefix("# "))
        else:
            above = []
    return comments


def _parsed(comment: str) -> Description:
    """Return the description in a comment, which may begin with a type in brackets."""
    match = _TYPE_IN_COMMENT.match(comment)
    if match:
        return Description(comment[match.end() :], match[1])
    return Description(comment)
