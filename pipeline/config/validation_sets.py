"""Reads `dataset.validations`: validation sets besides the dataset's own split.

    validations:
      late: "test[50%:]"                            # a split of the same dataset
      clean: {split: "test[:50%]", every: 100}      # evaluated at updates of its own
      photos: {_target_: photos.load, every: epoch} # a dataset of its own

The metrics of a set are `val/late/loss`, `val/late/accuracy` and so on.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import ConfigError
from pipeline.config.metric_names import UPDATE_METRICS

KEY = "dataset.validations"
EVERY = "every"
SPLIT = "split"
# Keys of the pipeline that a node may repeat, as a choice of the group `dataset` does.
# The dataset's own values apply to all of its validation sets.
_OF_DATASET = ("batched", "checksum", "lengths", "pad")
_NAME = re.compile(r"[A-Za-z]\w{0,99}", re.ASCII)


@dataclass(frozen=True)
class ValidationSet:
    """One entry of `dataset.validations`; either `split` or `node` is None.

    Attributes:
        name: the name of the set.
        split: a split of the dataset, as its target names splits.
        node: the node of a dataset of its own, a plain mapping with a `_target_`.
        every: when the set is evaluated, as `training.evaluate_every`; None for the
            same updates as the dataset's own validation split.
    """

    name: str
    split: str | None
    node: Mapping[str, Any] | None
    every: Any

    @property
    def key(self) -> str:
        """The config key of the set."""
        return f"{KEY}.{self.name}"

    @property
    def split_key(self) -> str:
        """The name of the set among the splits of the data."""
        return split_key(self.name)


def split_key(name: str) -> str:
    """Return the name that the set `name` has among the splits of the data."""
    return f"validations.{name}"


def parse(validations: Any) -> list[ValidationSet]:
    """Return the sets in a plain `dataset.validations`; null has none.

    Raises:
        ConfigError: the value is not a mapping, or an entry is neither a split nor a
            node.
    """
    if validations is None:
        return []
    if not isinstance(validations, Mapping):
        rule = "must be null, or a mapping of name → split or node"
        raise ConfigError(KEY, rule, validations)
    return [_parsed(str(name), entry) for name, entry in validations.items()]


def _parsed(name: str, entry: Any) -> ValidationSet:
    if isinstance(entry, str):
        return ValidationSet(name, entry, None, None)
    if isinstance(entry, Mapping):
        rest = {key: value for key, value in entry.items() if key != EVERY}
        every = entry.get(EVERY)
        if isinstance(rest.get("_target_"), str):
            return ValidationSet(name, None, rest, every)
        if rest.keys() == {SPLIT} and isinstance(rest[SPLIT], str):
            return ValidationSet(name, rest[SPLIT], None, every)
    rule = (
        "must be a split of the dataset, as text or as {split: …, every: …}, "
        "or the node of another dataset, with a _target_"
    )
    raise ConfigError(f"{KEY}.{name}", rule, entry)


def check_names(sets: Sequence[ValidationSet], metrics: Collection[str]) -> None:
    """Reject names of sets that are not plain words, or could be those of metrics.

    Args:
        sets: the sets.
        metrics: the names of the metrics in the config, as they are logged.

    Raises:
        ConfigError: a name is reserved, begins the name of a metric, or is not a plain
            word.
    """
    # Metrics may have names such as `top/5`, which MLflow treats as paths.
    taken = {name.partition("/")[0] for name in metrics} | UPDATE_METRICS.keys()
    for validation_set in sets:
        name = validation_set.name
        if not _NAME.fullmatch(name):
            rule = "must have a plain word as its name: letters, digits and _"
            raise ConfigError(validation_set.key, rule, name)
        if name in taken:
            rule = (
                "must have another name: a metric of the validation split already has "
                "this one"
            )
            raise ConfigError(validation_set.key, rule, name)


def check_node(validation_set: ValidationSet, dataset: Mapping[str, Any]) -> None:
    """Reject a node with values that differ from those of the dataset, or with sets.

    Args:
        validation_set: the set.
        dataset: the plain `dataset` group of the config.

    Raises:
        ConfigError: the node has another way to make batches, or sets of its own.
    """
    node = validation_set.node or {}
    for key in _OF_DATASET:
        value = dataset.get(key)
        if key in node and node[key] != value:
            rule = f"must have the dataset's value, {value}, or be left out"
            raise ConfigError(f"{validation_set.key}.{key}", rule, node[key])
    if node.get("validations"):
        rule = "must be null: only the dataset itself has validation sets"
        raise ConfigError(
            f"{validation_set.key}.validations", rule, list(node["validations"])
        )


def check_results(sets: Sequence[ValidationSet], results: Sequence[str]) -> None:
    """Reject a set whose results could be taken for those of another set.

    This is called when the names of all results are known, including those of several
    outputs and of the metrics of layers.

    Args:
        sets: the sets.
        results: the names of the loss and the metrics of an evaluation.

    Raises:
        ConfigError: a set has the name of a metric, or its results have the names of
            others in the logs of callbacks, such as `val_late_loss`.
    """
    check_names(sets, results)
    owners = {f"val_{name}": f"val/{name}" for name in results}
    for validation_set in sets:
        for name in results:
            log_name = f"val_{validation_set.name}_{name}"
            metric = f"val/{validation_set.name}/{name}"
            if log_name in owners:
                rule = (
                    f"must have another name: in the logs of callbacks, {log_name} "
                    f"would be both {metric} and {owners[log_name]}"
                )
                raise ConfigError(validation_set.key, rule, validation_set.name)
            owners[log_name] = metric
