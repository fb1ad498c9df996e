"""Replaces or rejects the names of earlier versions in configs and records.

`MODULES` and `KEYS` map former names to current names: of code, such as
`pipeline.model.mlp`, and of config keys, such as `tracking.noise_every`. `REMOVED_KEYS`
and `REMOVED_VALUES` list the keys and values that were removed. Each is rejected in one
line that says what to use instead. Only a removed key with its default, which had no
effect, is dropped.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config import plain, schema

# Former module of `pipeline` → current module. The names in `pipeline.dataset` did not
# change.
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
# The last schema version with the former keys. Its records need no other change.
_LAST_WITH_FORMER_KEYS = 2
# Groups in which values are not renamed: a run may be called `pipeline.model.v2`.
_FREE_TEXT = ("tracking", "start")
_FORMER_MODULE = re.compile(rf"pipeline\.({'|'.join(MODULES)})((?:\.\w+)*)", re.ASCII)
_FORMER_KEY = "|".join(re.escape(key) for key in KEYS)
_BEFORE_KEY = r"\A([+~]{0,2}(?:hydra\.sweeper\.params\.[+~]{0,2})?)"
_OVERRIDE = re.compile(rf"{_BEFORE_KEY}({_FORMER_KEY})(?=[.=]|\Z)")
_REFERENCE = re.compile(rf"(\$\{{)({_FORMER_KEY})(?=[.}}])")


@dataclass(frozen=True)
class RemovedKey:
    """A key of the config that earlier versions had.

    Attributes:
        version: the first version without the key.
        default: the former default, which had no effect.
        default_text: the former default, as written in an override.
        instead: advice on what to use instead.
    """

    version: str
    default: Any
    default_text: str
    instead: str


@dataclass(frozen=True)
class RemovedValue:
    """A value of a key, or an option of a group, that earlier versions had.

    Attributes:
        version: the first version without the value.
        instead: advice on what to use instead.
    """

    version: str
    instead: str


_OTHER_RULE = "use scaling=linear, scaling=sqrt or another rule"
REMOVED_KEYS = {
    "accumulation.scale_rate": RemovedKey(
        "0.2.0",
        True,
        "true",
        "the scaling rule follows the stages; "
        "use scaling=none for a learning rate that does not",
    ),
    "accumulation.seesaw_max": RemovedKey(
        "0.2.0", None, "null", "give the effective batch size of each stage"
    ),
}
# Keyed by the current name of the key, and the removed value.
REMOVED_VALUES = {
    ("accumulation.batch_schedule", "seesaw"): RemovedValue(
        "0.2.0", "use a list of stages, with schedule.clock=examples"
    ),
    ("scaling", "adascale"): RemovedValue("0.2.0", _OTHER_RULE),
    ("scaling.rule", "adascale"): RemovedValue("0.2.0", _OTHER_RULE),
}


def current(name: str) -> str:
    """Return the current form of a dotted name of code; return other text unchanged."""
    match = _FORMER_MODULE.fullmatch(name)
    if match is None:
        return name
    return f"pipeline.{MODULES[match[1]]}{match[2]}"


def with_current_key(text: str) -> str:
    """Return an override of Hydra, or a key alone, with the current name of the key."""
    return _OVERRIDE.sub(lambda match: match[1] + KEYS[match[2]], text)


def current_links(links: Mapping[str, str]) -> dict[str, str]:
    """Return recorded links by key, with the current names of all keys.

    The names of keys in the links are also current.
    """
    return {with_current_key(key): _current_link(link) for key, link in links.items()}


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain config with current names, and without removed keys.

    Values in `tracking` and `start` are not changed.

    Raises:
        ConfigError: a removed key has a value other than its default, or a key has a
            removed value.
    """
    config = _without_removed(_with_current_keys(config))
    by_group = {}
    for group, value in config.items():
        if group in _FREE_TEXT:
            by_group[group] = value
        else:
            by_group[group] = plain.mapped(value, current)
    return by_group


def migrated(record: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded config with current names.

    If only names have changed since the record's schema version, the version is also
    updated. A record of an older schema keeps its version, and the caller decides how
    to handle it.
    """
    config = renamed(record)
    if config.get("schema") == _LAST_WITH_FORMER_KEYS:
        config["schema"] = schema.SCHEMA
    return config


def removal(key: str, value: Any = None) -> ConfigError | None:
    """Return the error for a removed key, or for a removed value of a key.

    Return None if neither was removed.
    """
    removed: RemovedKey | RemovedValue
    if key in REMOVED_KEYS:
        removed = REMOVED_KEYS[key]
        subject = key
    elif isinstance(value, str) and (key, value) in REMOVED_VALUES:
        removed = REMOVED_VALUES[key, value]
        subject = f"{key}={value}"
    else:
        return None
    rule = f"was removed in version {removed.version}: {removed.instead}"
    return ConfigError(subject, rule)


def without_removed(overrides: Sequence[str]) -> list[str]:
    """Return recorded overrides without those that set a removed key to its default.

    Raises:
        ConfigError: a removed key has another value, or a value was removed. In an
            override that sweeps over several values, each value is checked.
    """
    kept = []
    for override in overrides:
        key, _, text = with_current_key(override).lstrip("+").partition("=")
        removed = REMOVED_KEYS.get(key)
        if removed is not None and text == removed.default_text:
            continue
        for value in text.split(","):
            error = removal(key, value.strip())
            if error is not None:
                raise error
        kept.append(override)
    return kept


def rename(config: DictConfig) -> None:
    """Replace former names in a composed config, in place.

    Values in `tracking` and `start` are not changed.

    Raises:
        ConfigError: a removed key has a value other than its default, or a key has a
            removed value.
    """
    before: Any = OmegaConf.to_container(config, resolve=False)
    changed = {}
    for group, value in renamed(before).items():
        if value != before[group]:
            changed[group] = value
    config.merge_with(changed)


def _current_link(link: str) -> str:
    return _REFERENCE.sub(lambda match: match[1] + KEYS[match[2]], link)


def _with_current_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain config with each value under its current key.

    If both the former and the current key exist, the value of the current key is kept.
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
        # Skip a group that is not a mapping: it is rejected later.
        if isinstance(section, dict):
            section = dict(section)
            section.setdefault(new_name, value)
            config[new_group] = section
    return config


def _without_removed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain config without removed keys.

    Raises:
        ConfigError: a removed key has a value other than its default, or a key has a
            removed value.
    """
    for key, _ in REMOVED_VALUES:
        error = removal(key, plain.value_at(config, key))
        if error is not None:
            raise error

    kept = dict(config)
    for key, removed in REMOVED_KEYS.items():
        group, _, name = key.rpartition(".")
        section = kept.get(group)
        if not isinstance(section, dict) or name not in section:
            continue
        error = removal(key)
        if section[name] != removed.default and error is not None:
            raise error
        kept[group] = {
            other: value for other, value in section.items() if other != name
        }
    return kept
