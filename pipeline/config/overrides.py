"""Reads the keys of Hydra's overrides, and quotes values in their grammar."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

# Matches an override of the weight of one class, or of several weights for a sweep.
_CLASS_WEIGHT = re.compile(
    r"\+{0,2}training\.class_weight\.(\d+)=(\$\{[^{}]*\}|[^(){}\[\]]+)", re.ASCII
)
_OVERRIDE = re.compile(r"(\+{0,2}|~)[\w.@/-]+=.*|~[\w.@/-]+", re.DOTALL)


def names_and_overrides(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line that are names, and those that are overrides.

    A word that is a path of an existing file is a name.
    """
    names = []
    overrides = []
    for word in words:
        if _OVERRIDE.fullmatch(word) and not os.path.exists(word):
            overrides.append(word)
        else:
            names.append(word)
    return names, overrides


def with_class_index(override: str) -> str:
    """Return an override of one class's weight as a mapping: `…={1: 5}` for `….1=5`.

    Hydra reads the last part of a dotted key as text. So it would neither find class 1,
    which is a number, nor add it. Other overrides are returned unchanged.
    """
    match = _CLASS_WEIGHT.fullmatch(override)
    if match is None:
        return override
    label = int(match[1])
    mappings = [f"{{{label}: {value.strip()}}}" for value in match[2].split(",")]
    # With `++`, a class is added or replaced, and the other classes are kept.
    return f"++training.class_weight={','.join(mappings)}"


def keys_set(overrides: Iterable[str]) -> set[str]:
    """Return the dotted names of the keys and groups that overrides set or delete.

    A value that is a mapping sets the keys in it: `training={updates: 5}` sets
    `training.updates`. If Hydra cannot parse an override, the text before its `=` is
    taken as the key.
    """
    parser = OverridesParser.create()
    keys: set[str] = set()
    for text in overrides:
        try:
            override = parser.parse_override(text)
            keys.update(_keys_in(override.key_or_group, override.value()))
        except (HydraException, ValueError):  # such as an integer with too many digits
            keys.add(text.lstrip("+~").partition("=")[0])
    return keys


def named_experiment(overrides: Iterable[str], experiment: object) -> str | None:
    """Return the experiment to search: that of the command line, or None for all.

    Args:
        overrides: the overrides of the command line.
        experiment: `tracking.experiment` of the composed config.
    """
    if "tracking.experiment" in keys_set(overrides):
        return str(experiment)
    return None


def values_at(overrides: Iterable[str], key: str) -> Iterator[Any]:
    """Yield the values that overrides set a key to, by itself or in a mapping.

    Overrides that delete, or that Hydra cannot parse, are left out.
    """
    parser = OverridesParser.create()
    for text in overrides:
        with suppress(HydraException, ValueError):
            override = parser.parse_override(text)
            if override.is_delete():
                continue
            for name, value in _values_in(override.key_or_group, override.value()):
                if name == key:
                    yield value


def _values_in(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of a key, and of all keys in a mapping."""
    yield key, value
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _values_in(f"{key}.{name}", entry)


def _keys_in(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted names of the leaves in a value; a list is one leaf."""
    if not isinstance(value, Mapping) or not value:
        yield key
        return
    for name, entry in value.items():
        yield from _keys_in(f"{key}.{name}", entry)


def hydra_quoted(text: object) -> str:
    """Return `text` as a quoted value in Hydra's grammar.

    In this grammar, a backslash is an escape only before a quote. So backslashes before
    a quote are doubled, including those before the closing quote.
    """

    def escape(match: re.Match[str]) -> str:
        backslashes, quote = match.groups()
        return 2 * backslashes + quote.replace("'", "\\'")

    escaped = re.sub(r"(\\*)('|\Z)", escape, str(text))
    return f"'{escaped}'"
