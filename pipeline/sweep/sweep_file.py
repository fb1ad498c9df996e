"""The file `sweep.json` in the folder of a sweep: where the sweep is recorded.

It is locked while a process runs the sweep. An unlocked file whose parent run is still
RUNNING belongs to a sweep whose process died, or could not reach the store at its end.
"""

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from pipeline.common.secrets import mask
from pipeline.common.sqlite_uri import absolute
from pipeline.tracking.foreign_store import CRITICAL, SweepRecord, again_command
from pipeline.tracking.journal_file import WRITER, is_locked, lock

NAME = "sweep.json"


# Tag of the parent run: the random ID, in this file, of the process that runs the sweep.
PROCESS = "sweep.process"
# A file of Linux with the random ID of the running kernel, which is new at each boot.
_KERNEL_ID = Path("/proc/sys/kernel/random/boot_id")


def write_locked(folder: Path, parent: SweepRecord, name: str) -> str:
    """Write the file, and keep it locked until this process ends.

    Args:
        folder: the folder of the sweep.
        parent: the parent run of the sweep.
        name: the name of the sweep.

    Returns:
        The random ID of this process.
    """
    process_id = uuid.uuid4().hex
    content = {
        "store": mask(absolute(parent.uri)),
        "name": name,
        "run_id": parent.run_id,
        "experiment_id": parent.experiment_id,
        "pid": os.getpid(),
        "process": process_id,
        "kernel": _kernel_id(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Keep the descriptor open, since closing it would release the lock.
    descriptor = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    lock(descriptor, WRITER)
    os.write(descriptor, f"{json.dumps(content)}\n".encode())
    os.fsync(descriptor)
    return process_id


def folders_below(folder: Path) -> Iterator[Path]:
    """Yield the folders of sweeps: those below a folder that contain the file."""
    for path, _, files in os.walk(folder):
        if NAME in files:
            yield Path(path)


def has_ended(folder: Path, process_id: str) -> bool:
    """Return whether the process that wrote the file in a folder has certainly ended.

    The process must have written the file under the kernel that runs now. Otherwise it
    may run on another machine, whose locks on a shared folder may not be seen here.

    Args:
        folder: the folder of a sweep. If this process runs the sweep, the result is
            False.
        process_id: the random ID of the process.
    """
    content = read(folder) or {}
    kernel = content.get("kernel")
    if content.get("process") != process_id or not kernel or kernel != _kernel_id():
        return False
    # Do not rely on the lock alone: a copy of the file is not locked.
    return not _is_running(content.get("pid")) and not is_locked(folder / NAME)


def _kernel_id() -> str:
    """Return the ID of the running kernel; empty if it has none."""
    try:
        return _KERNEL_ID.read_text().strip()
    except OSError:
        return ""


def _is_running(pid: Any) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, TypeError, ValueError):  # it is not known
        return True


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


def command_again(folder: Path) -> str:
    """Return the command that runs the unfinished jobs of the sweep in a folder.

    It is empty if the folder is not that of a sweep that `pipeline sweep` can continue.
    """
    content = read(folder) or {}
    name = content.get("name", CRITICAL)  # older files lack the name
    if name == CRITICAL:
        return ""
    return again_command(str(name), str(content["run_id"]), str(content["store"]))


def id_of(name: str) -> str:
    """Return the ID of the sweep whose folder `name` is, or else `name` itself."""
    content = read(Path(name)) or {}
    return str(content.get("run_id") or name)
