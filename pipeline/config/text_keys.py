"""Keeps the text that a user typed for a key that holds text.

Hydra and YAML read `1e5`, `2024_01_02` and `no` as numbers and Booleans. Converted back
to text, `1e5` would become `100000.0`. So such a value on the command line is quoted.
In a file, the typed text is lost, so a value that is not text is rejected.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from types import NoneType
from typing import Any, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config import plain
from pipeline.config.schema import TEXTS, Config, keys_in

# The type hints of all keys that hold text, by dotted name.
TYPES = {key.name: key.hint for key in keys_in(Config) if key.hint in TEXTS}
# Matches an override whose value is a scalar, or several scalars for a sweep. The value
# has no quotes, escapes, interpolations, functions, lists or mappings.
_OVERRIDE = re.compile(r"(\+{0,2})([\w./-]+)=([^'\"$\\()\[\]{}]+)")
# Keys that hold a folder and are not in the schema: Hydra's own, and two of `dataset`.
_FOLDERS = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "dataset.data_dir",
    "dataset.token_cache",
)


def kept(override: str) -> str:
    """Return an override with quotes around text that Hydra would change.

    Each value of a sweep is quoted separately. A value with quotes, a list, an
    interpolation or other syntax of Hydra is not changed.
    """
    match = _OVERRIDE.fullmatch(override)
    if match is None or not _is_scalar_text(match[2]):
        return override
    values = [_kept_value(value) for value in match[3].split(",")]
    return f"{match[1]}{match[2]}={','.join(values)}"


def check(config: DictConfig) -> None:
    """Reject a value that is not text, for each key that holds text.

    A link to a number is accepted: it becomes the text of that number.
    """
    # Do not resolve links, so that they count as text.
    written = OmegaConf.to_container(config)
    for key, hint in TYPES.items():
        section, name = _place(written, key)
        if name not in section:
            continue
        value = section[name]
        if value is None and NoneType in get_args(hint):
            continue
        for entry_key, entry in _entries(key, value):
            if not isinstance(entry, str):
                raise ConfigError(entry_key, _rule(entry_key, entry), entry)


def converted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recorded config with strings for all keys that hold text."""
    texts = deepcopy(dict(config))
    for key in TYPES:
        section, name = _place(texts, key)
        if name in section:
            section[name] = _as_text(section[name])
    return texts


def _place(config: Any, key: str) -> tuple[dict[Any, Any], str]:
    """Return the group that contains a key, and the key's name in it.

    The group is an empty dict if the plain config does not have it.
    """
    group, _, name = key.rpartition(".")
    section = plain.value_at(config, group)
    if not isinstance(section, dict):
        section = {}
    return section, name


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_text(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_as_text(entry) for entry in value]
    if value is None:
        return None
    return str(value)


def _is_scalar_text(key: str) -> bool:
    """Return whether a key holds a single string.

    This includes each key in a mapping of strings.
    """
    if key in _FOLDERS:
        return True
    parent = key.rpartition(".")[0]
    return TYPES.get(key) in (str, str | None) or TYPES.get(parent) == dict[str, str]


def _kept_value(value: str) -> str:
    """Quote a value, unless Hydra reads it as the same text or as null."""
    value = value.strip()
    try:
        read = OverridesParser.create().parse_override(f"key={value}").value()
    except (HydraException, ValueError):  # such as an integer with too many digits
        return f"'{value}'"
    if read is None or read == value:
        return value
    return f"'{value}'"


def _entries(key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the entries of a value that must be text, with the keys for errors."""
    if isinstance(value, dict) and TYPES[key] == dict[str, str]:
        return [(f"{key}.{name}", entry) for name, entry in value.items()]
    if isinstance(value, list) and list[str] in (TYPES[key], *get_args(TYPES[key])):
        return [(key, entry) for entry in value]
    return [(key, value)]


def _rule(key: str, value: Any) -> str:
    """Return the rule for an error; for a number or Boolean, it shows how to quote."""
    rule = "must be text"
    if TYPES.get(key) == str | None:
        rule += ", or null"
    if not isinstance(value, bool | int | float):
        return rule

    quoted = '"…"'
    if not _is_scalar_text(key):
        quoted = '["…"]'
    name = key.rpartition(".")[2]
    return (
        f"{rule}, in quotes if it looks like something else: {name}: {quoted} "
        f"in YAML and in {{…}}, '{key}={quoted}' on the command line"
    )
