"""Finds run directories."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.common.errors import ConfigError
from pipeline.config.overrides import hydra_quoted
from pipeline.tracking import run_paths
from pipeline.tracking.journal_file import JOURNAL_NAME, Past

# Matches a path and an update that need no quotes in Hydra's grammar.
_PLAIN_START = re.compile(r"[\w./@-]+", re.ASCII)
SHORTEST_ID = 4  # minimum length of an abbreviated run ID


def find(start: str, key: str, excluding: Path | None = None) -> Path:
    """Return the only run directory that `start` names.

    Args:
        start: a run directory, or the start of the ID of its run in MLflow.
        key: the config key or argument that an error names.
        excluding: a run directory to skip. Its journal is not opened, since closing the
            journal would release this process's lock.

    Raises:
        ConfigError: no run directory or several run directories match.
    """
    folder = Path(start)
    if (folder / JOURNAL_NAME).exists() and not _is_same(folder, excluding):
        return folder
    matching = []
    # A copy of a run directory has the same ID: either may be meant.
    for run_id, run_dir in _ids_and_dirs(key, excluding):
        if len(start) >= SHORTEST_ID and run_id.startswith(start):
            matching.append(run_dir)
    if len(matching) != 1:
        rule = (
            "must be one run directory, or the start of the ID of one run whose "
            f"directory lies below {Path.cwd()}"
        )
        if len(start) < SHORTEST_ID:
            rule += f" (at least {SHORTEST_ID} characters)"
        meant = None
        if not matching:
            meant = run_paths.run_dir_around(start)
        if meant is not None and not _is_same(meant, excluding):
            raise ConfigError(key, rule, start, meant=str(meant))
        if folder.is_dir() and not matching and not _is_same(folder, excluding):
            rule += (
                f". A run directory has a {JOURNAL_NAME}: a run that was killed before "
                "it began has none, so train it again"
            )
        choices = [str(run_dir) for run_dir in matching] or None
        raise ConfigError(key, rule, start, choices)
    return matching[0]


def by_id(key: str) -> dict[str, Path]:
    """Return the run directories below the working directory, by run ID.

    The IDs are read from the journals. Runs without an ID are left out, since they have
    never been in a store. `key` is as in `find`.
    """
    return dict(_ids_and_dirs(key))


def _ids_and_dirs(
    key: str, excluding: Path | None = None
) -> Iterator[tuple[str, Path]]:
    """Yield the run directories below the working directory, each with its run ID.

    For the arguments, see `find`.
    """
    for run_dir in run_dirs([]):
        if _is_same(run_dir, excluding):
            continue
        # Skip the journal of another version, which raises a ConfigError.
        with suppress(ConfigError):
            past = Past.read(run_dir, key, running=True)
            if past.run_id:
                yield past.run_id, run_dir


def run_dirs(folders: Sequence[str]) -> list[Path]:
    """Return the run directories among `folders` and below them.

    Without `folders`, return those below the working directory.

    Raises:
        ConfigError: one of `folders` contains no run directory.
    """
    found: dict[Path, None] = {}  # an ordered set
    for folder in folders or ["."]:
        inside = []
        for path, _, files in os.walk(folder):
            if JOURNAL_NAME in files:
                inside.append(Path(os.path.normpath(path)))
        if folders and not inside:
            rule = f"must be a folder with a {JOURNAL_NAME} in it"
            raise ConfigError("RUN_DIR", rule, folder)
        found |= dict.fromkeys(sorted(inside))
    return list(found)


def resume_command(run_dir: Path, *, from_start: bool = False) -> str:
    """Return the command that resumes the run in a run directory.

    Args:
        run_dir: the run directory.
        from_start: whether the run has no checkpoint, and is trained from the start.
    """
    command = ["pipeline", "resume", str(run_dir)]
    if from_start:
        command.append("training.resume=auto")
    return shlex.join(command)


def start_override(run_dir: Path, update: int) -> str:
    """Return the override with which a new run begins at a checkpoint of a run."""
    start = f"{run_dir}@{update}"
    if not _PLAIN_START.fullmatch(start):
        start = hydra_quoted(start)
    return shlex.quote(f"start.run={start}")


def _is_same(folder: Path, other: Path | None) -> bool:
    return other is not None and folder.resolve() == other.resolve()
