"""Checksums of data files, computed while the run trains.

A checksum is remembered until the file's size, dates or inode change.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeline.common import disk_cache
from pipeline.common.errors import DataError, described, say

# Seconds for which a file must not have changed before its checksum is remembered: the
# resolution of its date may be that coarse.
SETTLED = 2.0
SILENCE = 10.0  # seconds of waiting before a line says why


class _FileState(NamedTuple):
    """Attributes that change with a file; times are in nanoseconds since the epoch."""

    size: int  # in bytes
    modified_ns: int
    changed_ns: int  # of the inode
    inode: int

    def as_list(self) -> list[int]:
        return list(self)

    def looks_like(self, other: _FileState) -> bool:
        """Return whether size and time of modification are equal."""
        return (self.size, self.modified_ns) == (other.size, other.modified_ns)


def sha256_of(path: Path) -> str:
    """Return a SHA-256 of a file's size and content.

    A GiB in the page cache takes 0.7 s on two busy cores.
    """
    state = _file_state(path)
    entry_file = disk_cache.place("checksums", str(path.absolute()))
    entry = disk_cache.recall(entry_file, {"stat": [int], "sha256": str})
    if entry.get("stat") == state.as_list():
        return str(entry["sha256"])

    # The content follows the size in one hash.
    begun_with_size = hashlib.sha256(str(state.size).encode())
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, lambda: begun_with_size).hexdigest()

    seconds_unchanged = time.time() - state.modified_ns / 1e9
    if _file_state(path) == state and seconds_unchanged > SETTLED:
        entry = {
            "file": str(path.absolute()),
            "stat": state.as_list(),
            "sha256": checksum,
        }
        disk_cache.remember(entry_file, entry)
    return checksum


class DataFiles:
    """The files of a run's data, in their state when the object is created.

    Attributes:
        paths: all of the files.
        reread: the files that are read again while the run trains.
        checksums: the checksums, by the files' names; empty until they are known.
    """

    def __init__(self, paths: Sequence[Path] = ()):
        self.paths = tuple(paths)
        self.reread = self.paths
        self.checksums: dict[str, str] = {}
        self._checksums_by_path: dict[Path, str] = {}
        self._states: dict[Path, _FileState] = {}
        self._thread: threading.Thread | None = None
        for path in self.paths:
            with suppress(OSError):  # only TensorFlow may be able to read it
                self._states[path] = _file_state(path)

    def compute(self, then: Callable[[dict[str, str]], None]) -> None:
        """Compute the checksums in a thread, which then calls `then` with them."""
        self._thread = threading.Thread(
            target=self._compute, args=(then,), name="checksums", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checksums are computed, or could not be."""
        if self._thread is None:
            return
        self._thread.join(SILENCE)
        if self._thread.is_alive():
            say(
                "waiting for the checksums of the data: "
                "dataset.checksum=none leaves them out"
            )
            self._thread.join()

    def check(self) -> None:
        """Raise a `DataError` if a file in `reread` has changed."""
        changed = self._first_changed(self.reread)
        if changed is not None:
            raise DataError(
                f"{changed} has changed since the run began: "
                "not all of it was on the same data"
            )

    def known(self) -> None:
        """Compute the checksums in this thread."""
        self.checksums = self._computed()

    def _computed(self) -> dict[str, str]:
        self._checksums_by_path = {path: sha256_of(path) for path in self.paths}
        return {
            path.name: checksum for path, checksum in self._checksums_by_path.items()
        }

    def _compute(self, then: Callable[[dict[str, str]], None]) -> None:
        try:
            checksums = self._computed()
            # The checksum of a file that changed may not be that of the data that the
            # run trains on. The text that is recorded then is no file's checksum.
            changed = self._first_changed(self.paths)
            if changed is not None:
                say(
                    f"{changed} has changed since the run began: "
                    "its checksum is not known"
                )
                checksums[changed.name] = "changed while the run began"
            then(checksums)
            # This comes last, so that a run that ends now logs what `then` has written.
            self.checksums = checksums
        except Exception as error:  # training does not need checksums
            say(f"the data have no checksums: {described(error)}")

    def _first_changed(self, paths: Sequence[Path]) -> Path | None:
        """Return the first file that has changed since this object was created.

        A file has changed if its size or date differs, and also its checksum if that is
        known.
        """
        for path in paths:
            # A deleted file has been read for the last time.
            with suppress(OSError):
                before = self._states.get(path)
                if before is None or _file_state(path).looks_like(before):
                    continue
                known = self._checksums_by_path.get(path)
                if known is None or sha256_of(path) != known:
                    return path
        return None


def _file_state(path: Path) -> _FileState:
    stat = path.stat()
    return _FileState(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
