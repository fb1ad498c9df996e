"""Checksums of data files, computed beside the training; those of files that have not changed since are remembered.

A file is the one that was read when its size, its dates and its inode are what they were, as Git and rsync have it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.errors import described, say

SETTLED = 2.0  # seconds for which a file must not have changed: its date may be as coarse
SILENCE = 10.0  # seconds of waiting, before it is said


def of(path: Path) -> str:
    """Return a SHA-256 of a file's size and content: 0.7 s for a GiB that the system still holds, on two busy cores."""
    known, stat = _entry(path), _stat(path)
    with suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(known.read_text(encoding="utf-8"))
        if entry["stat"] == stat:
            return str(entry["sha256"])
    size = hashlib.sha256(str(stat[0]).encode())
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: size).hexdigest()
    if _stat(path) == stat and time.time() - stat[1] / 1e9 > SETTLED:
        with suppress(OSError):  # no room, or no home: it is computed again
            _remember(known, {"file": str(path.absolute()), "stat": stat, "sha256": found})
    return found


class Beside:
    """Computes the checksums of some files in a thread.

    Args:
        files: to read.
        then: called in that thread with the checksums by the files' names.
    """

    def __init__(self, files: Sequence[Path], then: Callable[[dict[str, str]], None]):
        self._files, self._then, self.done = files, then, False
        self._thread = threading.Thread(target=self._compute, name="checksums", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return once they are computed, or could not be."""
        self._thread.join(SILENCE)
        if self._thread.is_alive():
            say("waiting for the checksums of the data: dataset.checksum=none leaves them out")
            self._thread.join()

    def _compute(self) -> None:
        try:
            self._then({path.name: of(path) for path in self._files})
            self.done = True
        except Exception as error:  # the training needs none
            say(f"the data have no checksums: {described(error)}")


def _stat(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _entry(path: Path) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "pipeline" / "checksums" / hashlib.sha256(str(path.absolute()).encode()).hexdigest()


def _remember(place: Path, entry: Mapping[str, object]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False, encoding="utf-8") as file:
        json.dump(entry, file)
    os.replace(file.name, place)
