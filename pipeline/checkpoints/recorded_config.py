"""Reads the config that a run directory records."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.common import recorded, secrets
from pipeline.common.errors import ConfigError, as_config_error
from pipeline.config import former_names, key_kinds, plain
from pipeline.tracking import provenance
from pipeline.tracking.journal_file import CONFIG_RECORD, Past

_GROUPS = (
    "dataset",
    "model",
    "optimizer",
    "schedule",
    "scaling",
    "accumulation",
    "training",
    "hardware",
    "tracking",
)
FORM = dict.fromkeys(_GROUPS, dict)  # the form of config.yaml
# Hint in the error about an unreadable record in a run directory.
COPY = "MLflow has a copy among the artifacts of the run"


def read(run_dir: Path, past: Past, key: str) -> dict[str, Any]:
    """Return the resolved config with which the run in `run_dir` began.

    If the directory was moved or copied, paths into the old one are replaced.

    Args:
        run_dir: the run directory.
        past: the state of the run according to its journal.
        key: the argument or config key that names the run in errors.

    Raises:
        ConfigError: the config cannot be read, or it was edited after the run began.
    """
    rule = f"must have a {CONFIG_RECORD} that can be read"
    with as_config_error(key, rule, str(run_dir), COPY):
        config = recorded.read(run_dir / CONFIG_RECORD, FORM)
    recorded_path = _recorded_path(run_dir, key)
    if not _has_recorded_hash(config, run_dir, past, recorded_path):
        raise ConfigError(key, _rule_against_edits(config, past), str(run_dir))
    with as_config_error(key, rule, str(run_dir), COPY):
        migrated = former_names.migrated(config)
    return with_moved_paths(migrated, recorded_path, run_dir)


def with_moved_paths(
    config: Mapping[str, Any], before: str, run_dir: Path
) -> dict[str, Any]:
    """Return a config with the paths in an earlier run directory moved to `run_dir`.

    Args:
        config: a plain config.
        before: the absolute path of the earlier directory. If it is not absolute, as it
            is unknown, the config is returned unchanged.
        run_dir: the run directory.
    """
    old_dir = before.rstrip("/")

    def move(text: str) -> str:
        if old_dir.startswith("/") and f"{text}/".startswith(f"{old_dir}/"):
            return f"{run_dir.absolute()}{text[len(old_dir) :]}"
        return text

    return dict(plain.mapped(config, move))


def complete(config: dict[str, Any], past: Past, keys: set[str]) -> None:
    """Set the store of a recorded config to the store of the run, in place.

    The store is not set if its URI in the journal has a masked secret.

    Raises:
        ConfigError: the config has a masked secret at a key that is not in `keys`, the
            keys that overrides set.
    """
    # Use the store in the journal, which has the absolute path of a local store.
    if secrets.HIDDEN not in past.store:
        config["tracking"] = {**config["tracking"], "uri": past.store}
    for key, value in plain.leaves(config).items():
        if secrets.HIDDEN in str(value) and key not in keys:
            rule = (
                "was a secret and is not in the run directory: "
                "give it again as an override"
            )
            raise ConfigError(key, rule, value)


def _has_recorded_hash(
    config: Mapping[str, Any], run_dir: Path, past: Past, recorded_path: str
) -> bool:
    """Return whether the keys that decide what the run computes are as they were.

    If one of them was edited, the continued run would differ from its params in MLflow.

    Args:
        config: the config, as it is now.
        run_dir: the run directory.
        past: the state of the run according to its journal.
        recorded_path: the path of the run directory when the run began, or "".
    """
    recorded_hash = past.start.tags.get(provenance.HASH_TAG)
    # Schema 0 was hashed in another way.
    if recorded_hash is None or not config.get("schema"):
        return True
    # The hash does not depend on the run directory, whose path may be part of values.
    # It may have been moved since, or its recorded path may be masked.
    paths = {str(run_dir.absolute()), recorded_path}
    return any(provenance.has_hash(config, path, recorded_hash) for path in paths)


def _recorded_path(run_dir: Path, key: str) -> str:
    """Return the path of the run directory when the run began, or "" if unknown."""
    rule = "must have an environment.json that can be read"
    file = run_dir / "environment.json"
    # A run that was killed as it began has no such file.
    if not file.exists():
        return ""
    with as_config_error(key, rule, str(run_dir), COPY):
        environment = recorded.read(file, {"run_dir?": str})
    return environment.get("run_dir") or ""


def _rule_against_edits(config: Mapping[str, Any], past: Past) -> str:
    """Return the rule of the error about a config that was edited."""
    edits = _edits(past.start.params, plain.leaf_texts(config))
    rule = (
        f"must have the {CONFIG_RECORD} with which the run began; undo your edits of "
        "it, and give what a resumed run may change as overrides (KEY=VALUE)"
    )
    if edits:
        rule += f". Edited: {'; '.join(edits)}"
    return rule


def _edits(before: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """Return one line per edited key that decides what a run computes.

    Args:
        before: the params with which the run began.
        now: the params of the edited config.
    """
    lines = []
    for key in [*now, *(key for key in before if key not in now)]:
        # The params of derived sizes are not in the config.
        is_derived = key.startswith("derived.")
        if is_derived or key_kinds.kind_of(key) not in key_kinds.WHAT_RUNS:
            continue
        if key not in before:
            lines.append(f"{key} {now[key]} (was not set)")
        elif key not in now:
            lines.append(f"{key} is missing (was {before[key]})")
        elif before[key] != now[key]:
            lines.append(f"{key} {now[key]} (was {before[key]})")
    return lines
