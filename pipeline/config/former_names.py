"""Names in configs and records of earlier versions: what is renamed, and what is removed.

A dotted name is replaced by the current one: `pipeline.model.mlp` by `pipeline.components.model.mlp`. A removed key, or
a removed value of a key, is rejected in one line that says what to use instead. In a record, a removed key with its
default, which had no effect, is left out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.plain import mapped

MODULES = {  # of `pipeline`; `pipeline.dataset` is a room, whose door has what it had
    "augmentation": "dataset.augmentation",
    "compose": "config.compose",
    "datasets": "dataset.builtin",
    "metrics": "components.metrics",
    "model": "components.model",
    "optimizer": "components.optimizer",
}
_FREE_TEXT = (
    "tracking",
    "start",
)  # a run may be called as it likes, also `pipeline.model.v2`


@dataclass(frozen=True)
class RemovedKey:
    """A key of the config that earlier versions had."""

    version: str  # the first one without the key
    default: Any  # had no effect
    default_text: str  # the same in an override
    instead: str


@dataclass(frozen=True)
class RemovedValue:
    """A value of a key of the config, or an option of a group, that earlier versions had."""

    version: str  # the first one without the value
    instead: str


_OTHER_RULE = "use scaling=linear, scaling=sqrt or another rule"
REMOVED_KEYS = {
    "accumulation.scale_rate": RemovedKey(
        "0.2.0",
        True,
        "true",
        "the scaling rule follows the stages; use scaling=none for a rate that does not",
    ),
    "accumulation.seesaw_max": RemovedKey(
        "0.2.0", None, "null", "give each stage of the effective batch its size"
    ),
}
REMOVED_VALUES = {
    ("accumulation.schedule", "seesaw"): RemovedValue(
        "0.2.0", "use a list of stages, with schedule.clock=examples"
    ),
    ("scaling", "adascale"): RemovedValue("0.2.0", _OTHER_RULE),
    ("scaling.rule", "adascale"): RemovedValue("0.2.0", _OTHER_RULE),
}
_FORMER = re.compile(rf"pipeline\.({'|'.join(MODULES)})((?:\.\w+)*)", re.ASCII)


def current(name: str) -> str:
    """Return a dotted name as it is now; any other text as it is."""
    found = _FORMER.fullmatch(name)
    return f"pipeline.{MODULES[found[1]]}{found[2]}" if found else name


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain config with current names for former ones, and without removed keys.

    Raises:
        ConfigError: a removed key has another value than its default, or a value was removed.
    """
    return {
        key: value if key in _FREE_TEXT else mapped(value, current)
        for key, value in _without_removed(config).items()
    }


def removal(key: str, value: Any = None) -> ConfigError | None:
    """Return the error for a removed key, or for a removed value of a key; None if this version has both."""
    removed: RemovedKey | RemovedValue
    if key in REMOVED_KEYS:
        removed = REMOVED_KEYS[key]
        subject = key
    elif isinstance(value, str) and (key, value) in REMOVED_VALUES:
        removed = REMOVED_VALUES[key, value]
        subject = f"{key}={value}"
    else:
        return None
    return ConfigError(
        subject, f"was removed in version {removed.version}: {removed.instead}"
    )


def without_removed(overrides: Sequence[str]) -> list[str]:
    """Return recorded overrides without those that set a removed key to its default.

    Raises:
        ConfigError: a removed key has another value, or a value was removed, which may be one of several in a sweep.
    """
    kept = []
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        removed = REMOVED_KEYS.get(key)
        if removed is not None and text == removed.default_text:
            continue
        for value in text.split(","):
            error = removal(key, value.strip())
            if error is not None:
                raise error
        kept.append(override)
    return kept


def _without_removed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain config without removed keys; raise a ConfigError for a removed value."""
    for key, _ in REMOVED_VALUES:
        error = removal(key, _value_at(config, key))
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


def _value_at(config: Any, key: str) -> Any:
    """Return the value of a plain config at a dotted key; None without one."""
    for name in key.split("."):
        if not isinstance(config, dict):
            return None
        config = config.get(name)
    return config


def rename(config: DictConfig) -> None:
    """Replace former names among the values of a composed config, in place."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    config.merge_with(
        {key: value for key, value in renamed(plain).items() if value != plain[key]}
    )
