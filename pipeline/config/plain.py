"""Conversions between OmegaConf's nodes and plain Python values."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

# Matches a recorded link: `${another.key}`, or a product of two terms, each of which is
# a link or a number.
_TERM = r"(\$\{\w[\w.]*\}|[\d.e+\-]+)"
LINK = re.compile(rf"\$\{{\w[\w.]*\}}|\$\{{times: ?{_TERM}, ?{_TERM}\}}", re.ASCII)

# Short forms of keys, for the names of runs and jobs.
SHORT = {
    "effective_batch_size": "batch",
    "micro_batch_size": "micro",
    "micro_batch_tokens": "tokens",
    "learning_rate": "rate",
    # Keep the former keys here, as a sweep finds its existing jobs by their names.
    "batch_schedule": "schedule",
    "noise_scale_every": "noise_every",
}

# Short forms that have a meaning in reports, with the groups of the config whose keys
# have this meaning.
_GROUPS_OF_SHORT = {
    "seed": ("seed",),
    "rate": ("optimizer", "schedule", "scaling"),
    "factor": ("accumulation",),
    "batch": ("accumulation",),
    "micro": ("accumulation",),
    "tokens": ("accumulation",),
}


def short(key: str, value: object) -> str:
    """Return a setting in the form for names of runs and jobs, such as `rate=0.1`.

    A key keeps its full name if a report would take its short form for another key:
    `model.rate`, for example, is not a learning rate.
    """
    words = key.split(".")
    name = SHORT.get(words[-1], words[-1])
    groups = _GROUPS_OF_SHORT.get(name)
    if groups is not None and words[0] not in groups:
        name = key
    return f"{name}={value}"


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the resolved config as plain dicts, lists and scalars."""
    container: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    return {str(key): value for key, value in container.items()}


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a plain config, keyed by dotted name.

    A list is a leaf if it contains no dict or list. An empty dict is also a leaf.
    """
    if isinstance(node, list) and any(isinstance(value, dict | list) for value in node):
        node = dict(enumerate(node))
    if not (isinstance(node, Mapping) and node):
        return {prefix: node}
    dot = f"{prefix}." if prefix else ""
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= leaves(value, f"{dot}{key}")
    return found


def leaf_texts(node: Any) -> dict[str, str]:
    """Return the leaves of a plain config as texts, as the params of a run show them.

    Strings stay as they are. All other values are written as JSON.
    """
    texts = {}
    for key, value in leaves(node).items():
        texts[key] = value if isinstance(value, str) else json.dumps(value)
    return texts


def value_at(config: Any, key: str) -> Any:
    """Return the value at a dotted key of a plain config, or None if there is none."""
    for name in key.split("."):
        if not isinstance(config, dict):
            return None
        config = config.get(name)
    return config


def links(config: DictConfig) -> dict[str, str]:
    """Return the links between keys, such as `${another.key}`.

    The result is keyed by the dotted name of the key whose value is the link. An entry
    of a list is named by its index.
    """
    written = leaves(OmegaConf.to_container(config, resolve=False))
    for key, entry in list(written.items()):
        if isinstance(entry, list):
            for number, part in enumerate(entry):
                written[f"{key}.{number}"] = part

    links_by_key = {}
    for key, entry in written.items():
        if isinstance(entry, str) and LINK.fullmatch(entry):
            links_by_key[key] = entry
    return links_by_key


def mapped(value: Any, function: Callable[[str], str]) -> Any:
    """Return a copy of a plain value with `function` applied to each string value.

    Keys are not changed. Tuples become lists.
    """
    if isinstance(value, Mapping):
        return {key: mapped(entry, function) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(entry, function) for entry in value]
    if isinstance(value, str):
        return function(value)
    return value


def escaped(value: Any) -> Any:
    """Return a copy of a plain value with each `${` escaped for OmegaConf."""
    return mapped(value, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def without_seed(name: str) -> str:
    """Return a job's name without its seed.

    Jobs that differ only in the seed form a group with this name. A name that consists
    of the seed alone is returned unchanged.
    """
    return re.sub(r"(^| )seed=\S+", "", name).strip() or name
