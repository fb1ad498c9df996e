"""The file `sweep.json` in the folder of a sweep: where the sweep is recorded.

It is locked while a process runs the sweep. An unlocked file whose parent run is still
RUNNING belongs to a sweep whose process died, or could not reach the store at its end.
"""

import json
import os
from pathlib import Path
from typing import Any

from pipeline.common.secrets import mask
from pipeline.common.sqlite_uri import absolute
from pipeline.tracking.foreign_store import SweepRecord
from pipeline.tracking.journal_file import WRITER, is_locked, lock

NAME = "sweep.json"


def write_locked(folder: Path, parent: SweepRecord) -> None:
    """Write the file, and keep it locked until this process ends."""
    content = {
        "store": mask(absolute(parent.uri)),
        "run_id": parent.run_id,
        "experiment_id": parent.experiment_id,
        "pid": os.getpid(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Keep the descriptor open, since closing it would release the lock.
    descriptor = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    lock(descriptor, WRITER)
    os.write(descriptor, f"{json.dumps(content)}\n".encode())
    os.fsync(descriptor)


def read_unlocked(folder: Path) -> dict[str, Any] | None:
    """Return the content of the file; None if it is locked, missing or malformed."""
    if is_locked(folder / NAME):
        return None
    return read(folder)


def read(folder: Path) -> dict[str, Any] | None:
    """Return the content of the file; None if it is missing or malformed."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def id_of(name: str) -> str:
    """Return the ID of the sweep whose folder `name` is, or else `name` itself."""
    content = read(Path(name)) or {}
    return str(content.get("run_id") or name)
