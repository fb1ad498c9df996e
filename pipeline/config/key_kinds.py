"""The facts about each config key, read from the metadata of the schema's fields.

A key is given as a dotted name, such as `hardware.precision`. A name below a key, such
as `training.metrics.bits`, has the facts of that key. A name that the schema lacks,
such as a removed key, is of the kind `TRAINING`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from pipeline.config.schema import (
    Config,
    KeyFacts,
    Kind,
    TrackingConfig,
    facts,
    keys_in,
)

# Two runs count as the same run if they agree in all keys of these kinds.
WHAT_RUNS = frozenset([Kind.TRAINING, Kind.CUT, Kind.NUMERICS])
# Keys of the other kinds decide only where a run takes place and how it is logged.
WHERE_AND_HOW = frozenset(Kind) - WHAT_RUNS
# Logged params that are derived from the keys of the kind `CUT`.
DERIVED_CUT = (
    "derived.factor",
    "derived.micro_batch_size",
    "derived.micro_batch_tokens",
    "derived.replicas",
)

_UNKNOWN = facts(Kind.TRAINING)


def facts_by_key(schema: type) -> dict[str, KeyFacts]:
    """Return the facts of all keys in a dataclass, by dotted name.

    Raises:
        TypeError: a field has no kind.
    """
    by_key: dict[str, KeyFacts] = {}
    for key in keys_in(schema):
        metadata = key.field.metadata
        if "facts" not in metadata:
            raise TypeError(f"{key.name} has no kind in the schema: see `schema.about`")
        by_key[key.name] = metadata["facts"]
        for name, key_facts in metadata["exceptions"].items():
            by_key[f"{key.name}.{name}"] = key_facts
    return by_key


_FACTS = facts_by_key(Config)


def facts_of(key: str) -> KeyFacts:
    """Return the facts of a key; a name below a key has the facts of that key."""
    name = key
    while name:
        if name in _FACTS:
            return _FACTS[name]
        name = name.rpartition(".")[0]

    # A group, such as `training.keep_best`, has the facts of its keys if they agree.
    below = set(_facts_below(key))
    if len(below) == 1:
        return below.pop()
    return _UNKNOWN


def kind_of(key: str) -> Kind:
    """Return the kind of a key."""
    return facts_of(key).kind


def decides_what_runs(key: str) -> bool:
    """Return whether a run with another value of a key or group is a different run."""
    kinds = {key_facts.kind for key_facts in _facts_below(key)}
    if not kinds or key in _FACTS:
        kinds.add(kind_of(key))
    return not kinds <= WHERE_AND_HOW


def keys_of(*kinds: Kind) -> list[str]:
    """Return the keys of the given kinds, in the order of the schema."""
    return keys_where(lambda key_facts: key_facts.kind in kinds)


def keys_where(holds: Callable[[KeyFacts], bool]) -> list[str]:
    """Return the keys whose facts meet a condition, in the order of the schema."""
    return [key for key, key_facts in _FACTS.items() if holds(key_facts)]


def groups_apart() -> list[str]:
    """Return the groups that decide only where a run takes place and how it is logged.

    Their values come from the user's own config, never from a record.
    """
    groups = dict.fromkeys(key.partition(".")[0] for key in _FACTS)
    return [group for group in groups if not decides_what_runs(group)]


def outside_a_sweep() -> dict[str, Any]:
    """Return the defaults of the `tracking` keys that only a sweep sets, by name."""
    values = {}
    for key in keys_where(lambda key_facts: key_facts.set_by_a_sweep):
        name = key.removeprefix("tracking.")
        values[name] = getattr(TrackingConfig, name)
    return values


def restricted(
    config: Mapping[Any, Any], kinds: Collection[Kind], prefix: str = ""
) -> dict[Any, Any]:
    """Return a copy of a plain config with only the keys of the given kinds.

    Groups that have no such key are left out.
    """
    kept: dict[Any, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and _has_keys_below(key):
            group = restricted(value, kinds, f"{key}.")
            if group:
                kept[name] = group
        elif kind_of(key) in kinds:
            kept[name] = value
    return kept


def _facts_below(key: str) -> Iterator[KeyFacts]:
    for name, key_facts in _FACTS.items():
        if name.startswith(f"{key}."):
            yield key_facts


def _has_keys_below(key: str) -> bool:
    return any(name.startswith(f"{key}.") for name in _FACTS)
