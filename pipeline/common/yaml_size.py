"""A bound for the user's own YAML files, whose aliases may multiply a few lines."""

import math
from contextlib import suppress
from pathlib import Path

import yaml

from pipeline.common.errors import ConfigError

MOST_VALUES = 100_000


def check_size(file: Path) -> None:
    """Reject a YAML file that holds too many values once its aliases are expanded.

    Ten lines of ten aliases each are a billion values, and Hydra would make them all.
    """
    content = file.read_bytes()
    if b"&" not in content or b"*" not in content:
        return
    values = 0.0
    # Hydra says what is wrong with a file that cannot be read.
    with suppress(yaml.YAMLError, UnicodeDecodeError, RecursionError):
        values = _count(yaml.compose(content, yaml.SafeLoader), {})
    if values > MOST_VALUES:
        rule = f"must hold at most {MOST_VALUES:,} values with its aliases expanded"
        raise ConfigError(str(file), rule)


def _count(node: yaml.Node | None, counts: dict[yaml.Node, float]) -> float:
    """Return how many values a node expands to; infinity for one that holds itself."""
    if node is None:
        return 0
    if node in counts:
        return counts[node]
    counts[node] = math.inf  # until it is known: an alias inside leads back here
    count = 1.0
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            count += _count(entry, counts)
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            count += _count(value, counts)
    counts[node] = count
    return count
