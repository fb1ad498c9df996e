"""Run directories: which there are, which one is meant, and what its run began with."""

import os
import re
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from pipeline.common import recorded
from pipeline.common.errors import ConfigError, refused
from pipeline.config import former_names
from pipeline.tracking.journal_file import NAME, Past

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
CONFIG = dict.fromkeys(_GROUPS, dict)  # the form of config.yaml


def find(start: str, key: str, but: Path | None = None) -> Path:
    """Return the only run directory that `start` names: itself, or the start of the ID of its run in MLflow.

    The one in `but` is passed over, and its journal is not opened: closing it would free its lock.
    """
    if (Path(start) / NAME).exists() and Path(start).resolve() != (
        but and but.resolve()
    ):
        return Path(start)
    matching = [
        folder
        for run_id, folder in by_id(key, but).items()
        if len(start) >= 4 and run_id.startswith(start)
    ]
    if len(matching) != 1:
        rule = "must be one run directory, or the start of the ID of one run whose directory lies below this one"
        raise ConfigError(key, rule, start, [*map(str, matching)] if matching else None)
    return matching[0]


def by_id(key: str, but: Path | None = None) -> dict[str, Path]:
    """Return the run directories below the working directory by the ID of their run, which their journals say."""
    found = {}
    for folder in (
        folder
        for folder in run_dirs([])
        if Path(folder).resolve() != (but and but.resolve())
    ):
        with (
            suppress(ConfigError),
            closing(Past.of(Path(folder), key, running=True)) as past,
        ):  # of another version
            if past.run:
                found[past.run["run_id"]] = Path(folder)
    return found


def run_dirs(folders: Sequence[str]) -> list[str]:
    """Return the run directories among `folders` and below them; below the working directory where none is given."""
    found: dict[str, None] = {}
    for folder in folders or ["."]:
        inside = [str(path) for path, _, files in os.walk(folder) if NAME in files]
        if folders and not inside:
            raise ConfigError(
                "RUN_DIR", f"must be a folder with a {NAME} in it", folder
            )
        found |= dict.fromkeys(sorted(map(os.path.normpath, inside)))
    return list(found)


def quoted(text: object) -> str:
    """Return `text` as a quoted value in Hydra's grammar, where a backslash escapes only before a quote."""
    return (
        "'"
        + re.sub(
            r"(\\*)('|\Z)",
            lambda found: 2 * found[1] + found[2].replace("'", "\\'"),
            str(text),
        )
        + "'"
    )


def recorded_config(run_dir: Path, key: str) -> dict[str, Any]:
    """Return the resolved config that the run in `run_dir` began with; a `ConfigError` says that it cannot be read."""
    with refused(key, "must have a config.yaml that can be read", str(run_dir)):
        return dict(
            former_names.migrated(recorded.read(run_dir / "config.yaml", CONFIG))
        )
