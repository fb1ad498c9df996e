"""Files that survive a power cut.

The operating system writes files to the disk in any order, and after a power cut a
file may be empty or end anywhere. `sync` waits until the disk has what was written.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything below it are on the disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync(Path(path) / name)
        sync(Path(path))


def write_text(file: Path, text: str) -> None:
    """Write a file; after a power cut it is as before or as written, and never cut."""
    new = file.with_name(f".{file.name}")
    with new.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
    sync(file.parent)
