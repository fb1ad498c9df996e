"""Checksums of data files, computed while the run trains, and remembered until a file's size, dates or inode change."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.common import disk_cache
from pipeline.common.errors import DataError, described, say

SETTLED = 2.0  # seconds for which a file must not have changed: the resolution of its date may be as coarse
SILENCE = 10.0  # seconds of waiting before a line says so


def of(path: Path) -> str:
    """Return a SHA-256 of a file's size and content: 0.7 s for a GiB in the page cache, on two busy cores."""
    known, stat = disk_cache.place("checksums", str(path.absolute())), _stat(path)
    entry = disk_cache.recall(known, {"stat": [int], "sha256": str})
    if entry.get("stat") == stat:
        return str(entry["sha256"])
    size = hashlib.sha256(str(stat[0]).encode())
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: size).hexdigest()
    if _stat(path) == stat and time.time() - stat[1] / 1e9 > SETTLED:
        disk_cache.remember(
            known, {"file": str(path.absolute()), "stat": stat, "sha256": found}
        )
    return found


class Files:
    """The files that a run's data are read from, as they are when the object is created."""

    def __init__(self, paths: Sequence[Path] = ()):
        self.paths = self.reread = tuple(
            paths
        )  # the latter are those that are read again while the run trains
        self.checksums: dict[str, str] = {}  # by the files' names, where they are known
        self._of: dict[Path, str] = {}
        self._stats: dict[Path, list[int]] = {}
        for path in self.paths:
            with suppress(OSError):  # it may be where TensorFlow alone can read it
                self._stats[path] = _stat(path)
        self._thread: threading.Thread | None = None

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
                "waiting for the checksums of the data: dataset.checksum=none leaves them out"
            )
            self._thread.join()

    def check(self) -> None:
        """Raise DataError if a file in `reread` has changed."""
        if changed := self._changed(self.reread):
            raise DataError(
                f"{changed} has changed since the run began: not all of it was on the same data"
            )

    def known(self) -> None:
        """Compute the checksums in this thread."""
        self.checksums = self._computed()

    def _computed(self) -> dict[str, str]:
        self._of = {path: of(path) for path in self.paths}
        return {path.name: found for path, found in self._of.items()}

    def _compute(self, then: Callable[[dict[str, str]], None]) -> None:
        try:
            found = self._computed()
            if changed := self._changed(
                self.paths
            ):  # so the checksum may not be that of the data that was trained on
                say(
                    f"{changed} has changed since the run began: its checksum is not known"
                )
                found[changed.name] = (
                    "changed while the run began"  # the checksum of no file
                )
            then(found)
            self.checksums = found  # last: a run that ends now logs what `then` wrote
        except Exception as error:  # training does not need them
            say(f"the data have no checksums: {described(error)}")

    def _changed(self, paths: Sequence[Path]) -> Path | None:
        """Return the first file that has changed, by its size and date, and by its checksum where that is known."""
        for path in paths:
            with suppress(
                OSError
            ):  # a file that was deleted has been read for the last time
                changed = (
                    path in self._stats and _stat(path)[:2] != self._stats[path][:2]
                )
                if changed and (path not in self._of or of(path) != self._of[path]):
                    return path
        return None


def _stat(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
