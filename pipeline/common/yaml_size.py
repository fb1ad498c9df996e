"""Limits the size of the user's YAML files, counted with their aliases expanded."""

import math
from contextlib import suppress
from pathlib import Path

import yaml

from pipeline.common.errors import ConfigError

MOST_VALUES = 100_000


def check_size(file: Path) -> None:
    """Reject a YAML file that holds too many values once its aliases are expanded.

    Ten lines of ten aliases each can expand to a billion values, and Hydra would create
    them all.
    """
    content = file.read_bytes()
    if b"&" not in content or b"*" not in content:
        return
    values = 0.0
    # Ignore a file that cannot be parsed: Hydra reports the error.
    with suppress(yaml.YAMLError, UnicodeDecodeError, RecursionError):
        values = _count(yaml.compose(content, yaml.SafeLoader), {})
    if values > MOST_VALUES:
        rule = f"must hold at most {MOST_VALUES:,} values with its aliases expanded"
        raise ConfigError(str(file), rule)


def _count(node: yaml.Node | None, counts: dict[yaml.Node, float]) -> float:
    """Return the number of values in a node with its aliases expanded.

    The number is infinite for a node that contains itself.
    """
    if node is None:
        return 0
    if node in counts:
        return counts[node]
    counts[node] = math.inf  # replaced below, unless the node contains itself
    count = 1.0
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            count += _count(entry, counts)
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            count += _count(value, counts)
    counts[node] = count
    return count
