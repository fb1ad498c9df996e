"""Conversions between OmegaConf's nodes and plain Python values."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

# What a recorded link may be: `${another.key}`, or the product of two links, or of a
# link and a number.
_TERM = r"(\$\{\w[\w.]*\}|[\d.e+\-]+)"
LINK = re.compile(rf"\$\{{\w[\w.]*\}}|\$\{{times: ?{_TERM}, ?{_TERM}\}}", re.ASCII)

# Short forms of keys, for the names of runs and jobs.
SHORT = {
    "effective_batch_size": "batch",
    "micro_batch_size": "micro",
    "learning_rate": "rate",
    # A sweep finds its jobs again by their names, so these forms are the former keys.
    "batch_schedule": "schedule",
    "noise_scale_every": "noise_every",
}


def short(key: str, value: object) -> str:
    """Return a setting as names of runs and jobs show it, such as `rate=0.1`."""
    last = key.split(".")[-1]
    return f"{SHORT.get(last, last)}={value}"


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the resolved config as plain dicts, lists and scalars."""
    container: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    return {str(key): value for key, value in container.items()}


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Return every leaf of a plain config under its dotted name.

    A list of values is a leaf, as is an empty dict or list.
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


def value_at(config: Any, key: str) -> Any:
    """Return the value of a plain config at a dotted key; None without one."""
    for name in key.split("."):
        if not isinstance(config, dict):
            return None
        config = config.get(name)
    return config


def links(config: DictConfig) -> dict[str, str]:
    """Return the links between keys, such as `${another.key}`.

    They are listed by the dotted name of the key that has the link.
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
    """Return a plain value with `function` applied to each text, but not to keys."""
    if isinstance(value, Mapping):
        return {key: mapped(entry, function) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(entry, function) for entry in value]
    if isinstance(value, str):
        return function(value)
    return value


def escaped(value: Any) -> Any:
    """Return a plain value whose texts OmegaConf does not read as interpolations."""
    return mapped(value, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def without_seed(name: str) -> str:
    """Return a job's name without its seed: the name of its group."""
    return re.sub(r"(^| )seed=\S+", "", name).strip() or name
