"""Reads the config that a run directory records."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.common import recorded, secrets
from pipeline.common.errors import ConfigError, as_config_error
from pipeline.config import former_names, key_kinds, plain
from pipeline.tracking import provenance
from pipeline.tracking.journal_file import Past

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

    Args:
        run_dir: the run directory.
        past: the state of the run according to its journal.
        key: the argument or config key that names the run in errors.

    Raises:
        ConfigError: the config cannot be read, or it was edited after the run began.
    """
    rule = "must have a config.yaml that can be read"
    with as_config_error(key, rule, str(run_dir), COPY):
        config = recorded.read(run_dir / "config.yaml", FORM)
        _check_unedited(config, run_dir, past, key)
        return dict(former_names.migrated(config))


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


def _check_unedited(
    config: Mapping[str, Any], run_dir: Path, past: Past, key: str
) -> None:
    """Reject a config in which a key that decides what the run computes was edited.

    A run that continued with another value would differ from its own params in MLflow.
    For the arguments and errors, see `read`.
    """
    tag = past.start.tags.get(provenance.HASH_TAG)
    # Schema 0 was hashed in another way.
    if tag is None or not config.get("schema"):
        return
    if provenance.has_hash(config, _first_run_dir(run_dir, key), tag):
        return

    edits = _edits(past.start.params, plain.leaf_texts(config))
    rule = (
        "must have the config.yaml with which the run began; undo your edits of it, "
        "and give what a resumed run may change as overrides (KEY=VALUE)"
    )
    if edits:
        rule += f". Edited: {'; '.join(edits)}"
    raise ConfigError(key, rule, str(run_dir))


def _first_run_dir(run_dir: Path, key: str) -> str:
    """Return the directory in which the run began, which may have been moved since."""
    rule = "must have an environment.json that can be read"
    file = run_dir / "environment.json"
    # A run that was killed as it began has no such file. It was not moved.
    if not file.exists():
        return str(run_dir.absolute())
    with as_config_error(key, rule, str(run_dir), COPY):
        environment = recorded.read(file, {"run_dir?": str})
    return environment.get("run_dir") or ""


def _edits(before: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """Return one line per edited key that decides what a run computes.

    Args:
        before: the params with which the run began.
        now: the params of the edited config.
    """
    lines = []
    for key, value in now.items():
        if key_kinds.kind_of(key) not in key_kinds.WHAT_RUNS:
            continue
        if key not in before:
            lines.append(f"{key} {value} (was not set)")
        elif before[key] != value:
            lines.append(f"{key} {value} (was {before[key]})")
    for key, value in before.items():
        is_derived = key.startswith("derived.")
        if key not in now and not is_derived:
            lines.append(f"{key} is missing (was {value})")
    return lines
