"""Records what a run brings to the disk, and rebuilds the disks that power cuts may leave.

A run calls `os.fsync` for each file and folder that has to survive. At each call the
recording notes the content of the file, or the names in the folder. What was never
synced is not there after the cut. A cut amid a sync leaves any number of the bytes that
the sync would have brought.
"""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "PIPELINE_TEST_POWER_CUTS"  # names the file of the recording


@dataclass(frozen=True)
class Sync:
    """One call of `os.fsync`.

    Attributes:
        inode: of the file or the folder.
        content: of a file; None for a folder.
        names: of a folder: the inode of each name, and whether it is a folder.
        journal: the bytes of the journal by then, synced or not.
    """

    inode: int
    content: bytes | None
    names: dict[str, tuple[int, bool]]
    journal: int


def record(run_dir: Path, file: Path, journal: str) -> None:
    """Record the syncs of this process below `run_dir` from now on."""
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path != run_dir and run_dir not in path.parents:
            return
        status = os.fstat(descriptor)
        content = None
        names = {}
        if stat.S_ISDIR(status.st_mode):
            for entry in os.scandir(path):
                names[entry.name] = (entry.inode(), entry.is_dir())
        else:
            content = path.read_bytes()
        size = (run_dir / journal).stat().st_size
        with file.open("ab") as stream:
            pickle.dump(Sync(status.st_ino, content, names, size), stream)

    os.fsync = recording


def syncs(file: Path) -> list[Sync]:
    """Return what was recorded."""
    found = []
    with file.open("rb") as stream:
        while stream.peek(1):
            found.append(pickle.load(stream))
    return found


@dataclass
class Disk:
    """What is on the disk.

    Attributes:
        root: the inode of the run directory.
        files: the content of each inode.
        folders: the names in each inode.
    """

    root: int
    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)

    def apply(self, sync: Sync) -> None:
        """Bring all of a sync to the disk."""
        if sync.content is None:
            self.folders[sync.inode] = sync.names
        else:
            self.files[sync.inode] = sync.content

    def partly(self, sync: Sync) -> Iterator[tuple[int, bytes]]:
        """Yield each number of bytes of a sync, and the content of its file with them."""
        if sync.content is None:
            return
        before = self.files.get(sync.inode, b"")
        first = len(before) if sync.content.startswith(before) else 0
        for number in range(first, len(sync.content)):
            yield number, sync.content[:number]

    def tree(self) -> dict[str, bytes | None]:
        """Return the content of each file by its path; None for a folder."""
        tree: dict[str, bytes | None] = {}
        self._add(self.root, "", tree)
        return tree

    def _add(self, folder: int, path: str, tree: dict[str, bytes | None]) -> None:
        for name, (inode, is_folder) in self.folders.get(folder, {}).items():
            if is_folder:
                tree[path + name] = None
                self._add(inode, f"{path}{name}/", tree)
            else:
                tree[path + name] = self.files.get(inode, b"")


def write(tree: dict[str, bytes | None], folder: Path) -> None:
    """Write a tree to a real folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


def recording_callback() -> Any:
    """Return a callback whose making begins the recording that the environment names."""
    import keras

    from pipeline.tracking.journal_file import JOURNAL_NAME

    if VARIABLE in os.environ:
        record(Path("run").absolute(), Path(os.environ[VARIABLE]), JOURNAL_NAME)
    return keras.callbacks.Callback()
