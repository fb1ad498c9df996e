"""Writes files so that they survive a power cut.

The operating system writes files to the disk in any order, so after a power cut a file
may be empty or incomplete. `sync` waits until the written data is on the disk.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of a folder's files, is on disk."""
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
    """Write a file; after a power cut it has its old content or the whole `text`."""
    new = file.with_name(f".{file.name}")
    with new.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
    sync(file.parent)


def write_new(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files that nothing refers to yet, and wait until they are on the disk.

    Args:
        folder: the folder, which exists.
        contents: the content of each file, by its path in the folder. Folders that are
            missing are created.

    Raises:
        OSError: a file cannot be written. Then none of the files is left.
    """
    paths = [folder / name for name in contents]
    try:
        for path, content in zip(paths, contents.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        folders = {path.parent for path in paths} | {folder}
        _sync_together([*paths, *folders])
    except OSError:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def _sync_together(paths: Sequence[Path]) -> None:
    """Call `sync` for files and folders at the same time.

    Most file systems then wait once for all: ten files took 6 ms on ext4, and 36 ms one
    after another.
    """
    with ThreadPoolExecutor(len(paths)) as pool:
        for waiting in [pool.submit(sync, path) for path in paths]:
            waiting.result()
