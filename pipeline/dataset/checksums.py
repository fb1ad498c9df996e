"""Computes checksums of data files, while the run trains.

A checksum is cached until the size, a date or the inode of the file changes.
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

# A checksum is cached only if the file has not changed for this many seconds: file
# dates may have so coarse a resolution that they miss a later change.
SETTLED = 2.0
SILENCE = 10.0  # seconds of waiting before a message is printed


class _FileState(NamedTuple):
    """File attributes that reveal a change; times are in ns since the Unix epoch."""

    size: int  # in bytes
    modified_ns: int
    changed_ns: int  # when the inode was changed
    inode: int

    def as_list(self) -> list[int]:
        return list(self)

    def looks_like(self, other: _FileState) -> bool:
        """Return whether the sizes and the times of modification are equal."""
        return (self.size, self.modified_ns) == (other.size, other.modified_ns)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's size and content, from a cache if it is valid.

    Hashing a GiB from the page cache takes 0.7 s on two busy cores.
    """
    state = _file_state(path)
    entry_file = disk_cache.place("checksums", str(path.absolute()))
    entry = disk_cache.recall(entry_file, {"stat": [int], "sha256": str})
    if entry.get("stat") == state.as_list():
        return str(entry["sha256"])

    # Hash the size, then the content.
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
    """The data files of a run, and their checksums.

    The state of each file is noted when the object is created, to detect changes.

    Attributes:
        paths: all files.
        reread: the files that are read during training.
        checksums: the checksums by file name, or {} before they are computed.
    """

    def __init__(self, paths: Sequence[Path] = ()):
        self.paths = tuple(paths)
        self.reread = self.paths
        self.checksums: dict[str, str] = {}
        self._checksums_by_path: dict[Path, str] = {}
        self._states: dict[Path, _FileState] = {}
        self._thread: threading.Thread | None = None
        for path in self.paths:
            with suppress(OSError):  # Only TensorFlow may be able to access the file.
                self._states[path] = _file_state(path)

    def compute(self, then: Callable[[dict[str, str]], None]) -> None:
        """Start a thread that computes the checksums and passes them to `then`."""
        self._thread = threading.Thread(
            target=self._compute, args=(then,), name="checksums", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread that computes the checksums has ended."""
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
        """Compute the checksums now, in the calling thread."""
        self.checksums = self._computed()

    def _computed(self) -> dict[str, str]:
        self._checksums_by_path = {path: sha256_of(path) for path in self.paths}
        return {
            path.name: checksum for path, checksum in self._checksums_by_path.items()
        }

    def _compute(self, then: Callable[[dict[str, str]], None]) -> None:
        try:
            checksums = self._computed()
            # For a changed file, record a text that cannot equal a checksum: the file's
            # checksum may differ from that of the data on which the run trains.
            changed = self._first_changed(self.paths)
            if changed is not None:
                say(
                    f"{changed} has changed since the run began: "
                    "its checksum is not known"
                )
                checksums[changed.name] = "changed while the run began"
            then(checksums)
            # Set the attribute last: it shows that `then` has recorded the checksums.
            self.checksums = checksums
        except Exception as error:  # Training does not need checksums.
            say(f"the data have no checksums: {described(error)}")

    def _first_changed(self, paths: Sequence[Path]) -> Path | None:
        """Return the first file that has changed since this object was created.

        A file has changed if its size or modification time differs and, if its checksum
        is known, that differs, too. Files that cannot be accessed are skipped. Return
        None if no file has changed.
        """
        for path in paths:
            # Skip a file that cannot be accessed, such as a deleted one.
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
