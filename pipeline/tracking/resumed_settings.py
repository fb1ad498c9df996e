"""The settings that a resumed run may change without becoming a different run.

`config.yaml` and the params of a run in MLflow keep the values with which it began. For
a resumed segment with other values, `segments.json` has these, in its `settings`:

    {"training.keep_best.mode": "min"}
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.config.plain import value_at

KEYS = (
    "accumulation.same_noise",
    "accumulation.moving_statistics",
    "training.evaluate_every",
    "training.evaluate_at_start",
    "training.keep_best.metric",
    "training.keep_best.mode",
    "training.callbacks",
)


def changed(
    first: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that differ from those with which a run began.

    Args:
        first: the recorded config of the run.
        now: the resolved config of a resumed segment.
        defaults: the values of keys that an older recorded config lacks.
    """
    settings = {}
    for key in KEYS:
        value = value_at(now, key)
        if value != _first_value(first, key, defaults):
            settings[key] = value
    return settings


def with_last(
    config: Mapping[str, Any], segments: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a recorded config with the settings of the last segment of its run.

    Args:
        config: the recorded config.
        segments: the segments after the first one; see `provenance.segment`.
    """
    changed_config = dict(config)
    if segments:
        for key, value in segments[-1].get("settings", {}).items():
            changed_config = _with_value(changed_config, key.split("."), value)
    return changed_config


def differences(segments: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line per segment with settings that a rerun of the run does not use.

    Args:
        segments: the segments of the run, from a store that is not trusted.
    """
    lines = []
    for segment in segments:
        settings = segment.get("settings") or {}
        keys = [key for key in KEYS if key in settings]
        if keys:
            lines.append(
                f"config: the run was resumed after update {segment['after']} with "
                f"other values of {', '.join(keys)}; the rerun uses the first values"
            )
    return lines


def _first_value(
    first: Mapping[str, Any], key: str, defaults: Mapping[str, Any]
) -> Any:
    group = value_at(first, key.rpartition(".")[0])
    name = key.rpartition(".")[2]
    if isinstance(group, Mapping) and name in group:
        return group[name]
    return value_at(defaults, key)


def _with_value(node: Any, path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of a plain mapping with another value at a path of names."""
    copy = dict(node) if isinstance(node, Mapping) else {}
    name = path[0]
    if len(path) > 1:
        value = _with_value(copy.get(name), path[1:], value)
    copy[name] = value
    return copy
