"""Reads the losses and metrics in the group `training`, for one output or several."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import ListConfig, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config import named_nodes
from pipeline.config.metric_names import NAME_RULE, UPDATE_METRICS, is_name

METRIC_GROUPS = ("metrics", "weighted_metrics")


class MetricNode(NamedTuple):
    """The config node of a metric; `output` is None if the config names no output."""

    key: str
    output: str | None
    name: str
    node: Any

    @property
    def full_name(self) -> str:
        if self.output:
            return f"{self.output}_{self.name}"
        return self.name


def metrics_of(training: Any, group: str) -> list[MetricNode]:
    """Return the metrics in one of `METRIC_GROUPS`.

    Args:
        training: the config group `training`, as an OmegaConf node or a dataclass.
        group: one of `METRIC_GROUPS`.

    Raises:
        ConfigError: the value of a metric is a list.
    """
    metrics = []
    for name, node in getattr(training, group).items():
        name = str(name)
        key = f"training.{group}.{name}"
        if isinstance(node, ListConfig):
            node = OmegaConf.to_container(node)
        if isinstance(node, list):
            rule = named_nodes.rule(f"training.{group}")
            raise ConfigError(key, f"must be {rule}", node)
        if isinstance(node, Mapping) and node and "_target_" not in node:
            for metric, metric_node in node.items():
                metric_key = f"{key}.{metric}"
                metrics.append(MetricNode(metric_key, name, str(metric), metric_node))
        else:
            metrics.append(MetricNode(key, None, name, node))
    return metrics


def check_names(metrics: Sequence[MetricNode]) -> None:
    """Reject a metric whose name is reserved, not unique, or not accepted by MLflow."""
    names = [metric.full_name for metric in metrics]
    ours = ", ".join(sorted(UPDATE_METRICS))
    for metric in metrics:
        name = metric.full_name
        if (
            name in UPDATE_METRICS
            or metric.name == "loss"
            or names.count(name) > 1
            or not is_name(f"train/{name}")
        ):
            rule = (
                f"must have a name that MLflow accepts ({NAME_RULE}) other than {ours} "
                "and those of other metrics"
            )
            raise ConfigError(metric.key, rule, name)


def by_output(node: Any, key: str = "training.loss") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value for each output in a mapping or list.

    Nested mappings and lists are followed. A node that has a `_target_`, is empty, or
    is a single value belongs to a single output, and is yielded with `key`.
    """
    holds_others = isinstance(node, Mapping | list | ListConfig) and node
    if not holds_others or "_target_" in node:
        yield key, node
        return
    names = node if isinstance(node, Mapping) else range(len(node))
    for name in names:
        yield from by_output(node[name], f"{key}.{name!s}")
