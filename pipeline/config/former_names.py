"""Names of earlier versions, in configs and in records, and what they are called now.

Two tables: dotted names of code, such as `pipeline.model.mlp`, and keys of the config,
such as `tracking.noise_every`.
"""

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.config import plain, schema

# Modules of `pipeline`. The package `pipeline.dataset` still has the names that it had.
MODULES = {
    "augmentation": "dataset.augmentation",
    "compose": "config.compose",
    "datasets": "dataset.builtin",
    "metrics": "components.metrics",
    "model": "components.model",
    "optimizer": "components.optimizer",
}
KEYS = {
    "accumulation.schedule": "accumulation.batch_schedule",
    "tracking.noise_every": "accumulation.noise_scale_every",
}
# The schema up to which records have the former keys, and need nothing else.
_LAST_WITH_FORMER_KEYS = 2
# A run may be called as it likes, such as `pipeline.model.v2`.
_FREE_TEXT = ("tracking", "start")
_FORMER_MODULE = re.compile(rf"pipeline\.({'|'.join(MODULES)})((?:\.\w+)*)", re.ASCII)
_FORMER_KEY = "|".join(re.escape(key) for key in KEYS)
_BEFORE_KEY = r"\A([+~]{0,2}(?:hydra\.sweeper\.params\.[+~]{0,2})?)"
_OVERRIDE = re.compile(rf"{_BEFORE_KEY}({_FORMER_KEY})(?=[.=]|\Z)")
_REFERENCE = re.compile(rf"(\$\{{)({_FORMER_KEY})(?=[.}}])")


def current(name: str) -> str:
    """Return a dotted name of code as it is now; any other text as it is."""
    match = _FORMER_MODULE.fullmatch(name)
    if match is None:
        return name
    return f"pipeline.{MODULES[match[1]]}{match[2]}"


def current_key(key: str) -> str:
    """Return a key of the config, or a name below one, as it is called now."""
    return current_override(key)


def current_override(text: str) -> str:
    """Return an override of Hydra's grammar with the current name of its key."""
    return _OVERRIDE.sub(lambda match: match[1] + KEYS[match[2]], text)


def current_links(links: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded links between keys with the current names of the keys."""
    return {current_key(key): _current_link(link) for key, link in links.items()}


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain config with the current names of its keys and values."""
    config = _with_current_keys(config)
    by_group = {}
    for group, value in config.items():
        if group in _FREE_TEXT:
            by_group[group] = value
        else:
            by_group[group] = plain.mapped(value, current)
    return by_group


def migrated(record: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded config as one of this version, if nothing but names changed.

    A record of an older schema keeps its version: whoever reads it decides.
    """
    config = renamed(record)
    if config.get("schema") == _LAST_WITH_FORMER_KEYS:
        config["schema"] = schema.SCHEMA
    return config


def rename(config: DictConfig) -> None:
    """Replace former names among the values of a composed config, in place."""
    before: Any = OmegaConf.to_container(config, resolve=False)
    changed = {}
    for group, value in renamed(before).items():
        if value != before[group]:
            changed[group] = value
    config.merge_with(changed)


def _current_link(link: str) -> str:
    return _REFERENCE.sub(lambda match: match[1] + KEYS[match[2]], link)


def _with_current_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain config, in which a value stands under its current key.

    A value that already stands there wins.
    """
    config = dict(config)
    for former, key in KEYS.items():
        group, _, name = former.partition(".")
        if not isinstance(config.get(group), dict) or name not in config[group]:
            continue
        config[group] = dict(config[group])
        value = config[group].pop(name)
        new_group, _, new_name = key.partition(".")
        section = config.get(new_group) or {}
        if isinstance(section, dict):
            config[new_group] = {new_name: value, **section}
    return config
