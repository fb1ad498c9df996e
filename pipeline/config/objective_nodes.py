"""Losses and metrics as the `training` group has them: of a single output, or by the name of an output."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import ListConfig, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.metric_names import NAME_RULE, UPDATE_METRICS, is_name

NAMED = "a mapping of name → _target_, empty for none"
METRIC_GROUPS = ("metrics", "weighted_metrics")


class MetricNode(NamedTuple):
    """A metric: of the only output, where `output` is None, or of the output that it stands under."""

    key: str
    output: str | None
    name: str
    node: Any

    @property
    def full_name(self) -> str:
        return f"{self.output}_{self.name}" if self.output else self.name


def metrics_of(training: Any, group: str) -> list[MetricNode]:
    """Return the metrics of one of `METRIC_GROUPS`; `training` is that section as nodes, or typed."""
    found = []
    for name, node in (
        (str(name), node) for name, node in getattr(training, group).items()
    ):
        key = f"training.{group}.{name}"
        if isinstance(node, list | ListConfig):
            received = node if isinstance(node, list) else OmegaConf.to_container(node)
            raise ConfigError(key, f"must be {NAMED}", received)
        if isinstance(node, Mapping) and node and "_target_" not in node:
            found += [
                MetricNode(f"{key}.{each}", name, str(each), of_output)
                for each, of_output in node.items()
            ]
        else:
            found.append(MetricNode(key, None, name, node))
    return found


def check_names(metrics: Sequence[MetricNode]) -> None:
    """Refuse a metric whose name MLflow does not take, or that is the name of another metric."""
    names = [metric.full_name for metric in metrics]
    for metric in metrics:
        name, ours = metric.full_name, ", ".join(sorted(UPDATE_METRICS))
        if (
            name in UPDATE_METRICS
            or metric.name == "loss"
            or names.count(name) > 1
            or not is_name(f"train/{name}")
        ):
            rule = f"must have a name that MLflow takes ({NAME_RULE}) other than {ours} and those of other metrics"
            raise ConfigError(metric.key, rule, name)


def by_output(node: Any, key: str = "training.loss") -> Iterator[tuple[str, Any]]:
    """Yield what a mapping or list holds for the outputs, with its key; a node with a target is one itself."""
    if (
        isinstance(node, Mapping | list | ListConfig)
        and node
        and "_target_" not in node
    ):
        for name in node if isinstance(node, Mapping) else range(len(node)):
            yield from by_output(node[name], f"{key}.{name!s}")
    else:
        yield key, node
