"""Names the run to which a file or folder in its run directory belongs."""

import os
from pathlib import Path

from pipeline.common.errors import ConfigError
from pipeline.tracking.journal_file import JOURNAL_NAME, Past


def run_dir_around(path: str) -> Path | None:
    """Return the run directory that contains a file or folder, or is it.

    Return None if there is none, or if `path` does not exist.
    """
    if not os.path.lexists(path):
        return None
    for folder in (Path(path), *Path(path).parents):
        if (folder / JOURNAL_NAME).exists():
            return folder
    return None


def meant_run(path: str) -> str:
    """Return the run directory around a file or folder; empty if there is none.

    If the path is that of a checkpoint, the result names its update: `RUN_DIR@400`.
    """
    folder = run_dir_around(path)
    if folder is None:
        return ""
    parts = Path(path).relative_to(folder).parts
    if parts[:1] == ("checkpoints",):
        for part in parts[1:]:
            if part.isascii() and part.isdecimal():
                return f"{folder}@{part}"
    return str(folder)


def meant_id(path: str) -> str:
    """Return the run ID of the run directory around a file or folder.

    The result is empty if there is no run directory, or if its run has no ID.
    """
    folder = run_dir_around(path)
    if folder is None:
        return ""
    try:
        return Past.read(folder, "RUN_ID", running=True).run_id
    except ConfigError:  # the journal of another version
        return ""
