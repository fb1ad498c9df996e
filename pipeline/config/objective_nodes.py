"""Losses and metrics as the group `training` has them: of one output, or by output."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import ListConfig, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.metric_names import NAME_RULE, UPDATE_METRICS, is_name

NAMED = "a mapping of name → _target_, empty for none"
METRIC_GROUPS = ("metrics", "weighted_metrics")


class MetricNode(NamedTuple):
    """A metric of an output; `output` is None if there is only one output."""

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
    """Return the metrics of one of `METRIC_GROUPS`.

    Args:
        training: the group of that name, as nodes or typed.
        group: one of `METRIC_GROUPS`.
    """
    metrics = []
    for name, node in getattr(training, group).items():
        name = str(name)
        key = f"training.{group}.{name}"
        if isinstance(node, ListConfig):
            node = OmegaConf.to_container(node)
        if isinstance(node, list):
            raise ConfigError(key, f"must be {NAMED}", node)
        if isinstance(node, Mapping) and node and "_target_" not in node:
            for metric, metric_node in node.items():
                metric_key = f"{key}.{metric}"
                metrics.append(MetricNode(metric_key, name, str(metric), metric_node))
        else:
            metrics.append(MetricNode(key, None, name, node))
    return metrics


def check_names(metrics: Sequence[MetricNode]) -> None:
    """Reject a metric whose name MLflow does not accept, or that another metric has."""
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
                f"must have a name that MLflow takes ({NAME_RULE}) other than {ours} "
                "and those of other metrics"
            )
            raise ConfigError(metric.key, rule, name)


def by_output(node: Any, key: str = "training.loss") -> Iterator[tuple[str, Any]]:
    """Yield what a mapping or list holds for each output, with its key.

    A node with a target belongs to the only output.
    """
    holds_others = isinstance(node, Mapping | list | ListConfig) and node
    if not holds_others or "_target_" in node:
        yield key, node
        return
    names = node if isinstance(node, Mapping) else range(len(node))
    for name in names:
        yield from by_output(node[name], f"{key}.{name!s}")
