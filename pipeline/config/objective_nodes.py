"""Losses and metrics as the `training` group has them: of a single output, or by the name of an output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import ListConfig, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.metric_names import NAME_RULE, UPDATE_METRICS, is_name

NAMED = "a mapping of name → _target_, empty for none"
METRIC_GROUPS = ("metrics", "weighted_metrics")


@dataclass(frozen=True)
class MetricNode:
    """A metric: of the only output, where `output` is None, or of the output that it stands under."""

    key: str
    output: str | None
    name: str
    node: Any

    @property
    def full_name(self) -> str:
        """The name that its values are logged under."""
        return f"{self.output}_{self.name}" if self.output else self.name


def metrics_of(training: Any, group: str) -> list[MetricNode]:
    """Return the metrics of one of `METRIC_GROUPS`; `training` is that section as nodes, or typed.

    Raises:
        ConfigError: those of an output are a list.
    """
    found = []
    for name, node in ((str(name), node) for name, node in getattr(training, group).items()):
        key = f"training.{group}.{name}"
        if isinstance(node, list | ListConfig):
            received = node if isinstance(node, list) else OmegaConf.to_container(node)
            raise ConfigError(key, f"must be {NAMED}", received)
        if isinstance(node, Mapping) and node and "_target_" not in node:
            inner = {str(each): of_output for each, of_output in node.items()}
            found += [MetricNode(f"{key}.{each}", name, each, of_output) for each, of_output in inner.items()]
        else:
            found.append(MetricNode(key, None, name, node))
    return found


def check_names(metrics: Sequence[MetricNode]) -> None:
    """Refuse a metric whose name MLflow does not take, or that is the name of another metric."""
    names = [metric.full_name for metric in metrics]
    for metric in metrics:
        name = metric.full_name
        taken = name in UPDATE_METRICS or metric.name == "loss" or names.count(name) > 1
        if taken or not is_name(f"train/{name}"):
            ours = ", ".join(sorted(UPDATE_METRICS))
            rule = f"must have a name that MLflow takes ({NAME_RULE}) other than {ours} and those of other metrics"
            raise ConfigError(metric.key, rule, name)


def by_output(node: Any, key: str = "training.loss") -> Iterator[tuple[str, Any]]:
    """Yield what a mapping or list holds for the outputs, with its key; a node with a target is one itself."""
    several = isinstance(node, Mapping | list | ListConfig) and node and "_target_" not in node
    if not several:
        yield key, node
        return
    for name in node if isinstance(node, Mapping) else range(len(node)):
        yield from by_output(node[name], f"{key}.{name!s}")


def are_loss_weights(node: Any) -> bool:
    """Return whether `node` is null, or has numbers alone."""
    return all(value is None or (_is_number(value) and math.isfinite(value)) for _, value in by_output(node))


def are_class_weights(node: Any) -> bool:
    """Return whether `node` is null, or maps classes, whole numbers from 0 on, to numbers of at least 0."""
    if not isinstance(node, Mapping):
        return node is None
    counted = all(isinstance(label, int) and not isinstance(label, bool) and label >= 0 for label in node)
    return len(node) > 0 and counted and all(_is_number(each) and 0 <= each < math.inf for each in node.values())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
