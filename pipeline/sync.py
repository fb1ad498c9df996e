"""`pipeline sync`: ship to MLflow whatever a run could not. Safe to call again, and from several machines at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pipeline import compose
from pipeline.errors import ConfigError, Parser, say
from pipeline.tracking.journal_file import NAME, Past
from pipeline.tracking.shipping import sync_run


def sync(arguments: Sequence[str]) -> int:
    """Ship to MLflow what is missing of the runs in RUN_DIR …; without one, of those below the working directory."""
    parser = Parser(prog="pipeline sync", description=sync.__doc__, allow_abbrev=False)
    parser.add_argument("folders", metavar="RUN_DIR", nargs="*", help="run directories, or folders that hold some")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with config groups of your own")
    options = parser.parse_args([text for text in arguments if "=" not in text])
    overrides = [text for text in arguments if "=" in text]
    config_dir = ["--config-dir", options.config_dir] if options.config_dir else []
    tracking = compose.composed([*config_dir, *overrides]).tracking
    # The journal names its store; the config's counts where it is given here, as it may hold a password.
    given = tracking.uri if any(text.startswith(("tracking.uri=", "tracking=")) for text in overrides) else None
    found = _run_dirs(options.folders)
    if not found:
        say("no run directory with a journal was found")
        return 0
    return max(sync_run(folder, given, tracking.patience, named=folder in options.folders) for folder in found)


def find(start: str, key: str) -> Path:
    """Return the run directory that `start` names: itself, or the start of the ID of its run in MLflow.

    Raises:
        ConfigError: there is none below the working directory, or there are several.
    """
    if (Path(start) / NAME).exists():
        return Path(start)
    by_id = {}
    for folder in _run_dirs([]):
        try:
            past = Past.of(Path(folder), key, running=True)
        except ConfigError:  # of another version
            continue
        past.close()
        by_id[past.run.get("run_id", "")] = Path(folder)
    matching = [folder for run_id, folder in by_id.items() if len(start) >= 4 and run_id.startswith(start)]
    if len(matching) != 1:
        rule = "must be one run directory, or the start of the ID of one run whose directory lies below this one"
        raise ConfigError(key, rule, start, [*map(str, matching)] if matching else None)
    return matching[0]


def _run_dirs(folders: Sequence[str]) -> list[str]:
    """Return the run directories among `folders` and below them; below the working directory where none is given."""
    found: dict[str, None] = {}
    for folder in folders or ["."]:
        inside = [str(path) for path, _, files in os.walk(folder) if NAME in files]
        if folders and not inside:
            raise ConfigError("RUN_DIR", f"must be a folder with a {NAME} in it", folder)
        found |= dict.fromkeys(sorted(map(os.path.normpath, inside)))
    return list(found)
