"""Computes checksums of data files, while the run trains.

A checksum is cached until the size, a date or the inode of the file changes.

TFDS may write the same examples as different bytes when it prepares them again, as on
another machine. So small TFRecord files have a second checksum, of their examples.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeline.common import disk_cache
from pipeline.common.errors import DataError, described, say

# A checksum is cached only if the file has not changed for this many seconds: file
# dates may have so coarse a resolution that they miss a later change.
SETTLED = 2.0
SILENCE = 10.0  # seconds of waiting before a message is printed
# TFRecord files have checksums of their examples if they have at most this many bytes
# in total. An example takes about 30 µs.
MOST_BYTES_OF_RECORDS = 2**28
# Recorded in place of a checksum; it equals no checksum.
CHANGED = "changed while the run began"


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

    def compute() -> str:
        begun_with_size = hashlib.sha256(str(path.stat().st_size).encode())
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: begun_with_size).hexdigest()

    return _cached("checksums", path, compute)


def sha256_of_records(path: Path) -> str:
    """Return the SHA-256 of the examples in a TFRecord file, from a cache if it is valid.

    The order of the examples counts, but not that of the features of an example, which
    protobuf chooses freely. The result is empty if the file cannot be read, or if a
    record is not a `tf.train.Example`.
    """
    return _cached("record_checksums", path, lambda: _of_records(path))


def _of_records(path: Path) -> str:
    """Compute the checksum that `sha256_of_records` describes."""
    import tensorflow as tf

    checksum = hashlib.sha256()
    try:
        with tf.device("CPU:0"):
            batches = tf.data.TFRecordDataset(str(path)).batch(256)
            for record in itertools.chain.from_iterable(batches.as_numpy_iterator()):
                example = tf.train.Example.FromString(record)
                # Other messages are parsed, too, as fields that are not known.
                example.DiscardUnknownFields()
                if example.ByteSize() != len(record):
                    return ""
                features = example.features.feature
                for name in sorted(features):
                    values = features[name].SerializeToString()
                    # The lengths keep names and values apart.
                    checksum.update(f"{len(name)} {len(values)} {name}".encode())
                    checksum.update(values)
                checksum.update(b"end")
    except Exception:  # TensorFlow does not export the error of protobuf
        return ""
    return checksum.hexdigest()


def _cached(kind: str, path: Path, compute: Callable[[], str]) -> str:
    """Return a checksum of a file from the cache of this kind, or compute it.

    An empty one is not cached, since it may come from an error that passes.
    """
    state = _file_state(path)
    entry_file = disk_cache.place(kind, str(path.absolute()))
    entry = disk_cache.recall(entry_file, {"stat": [int], "sha256": str})
    if entry.get("stat") == state.as_list():
        return str(entry["sha256"])

    checksum = compute()
    if not checksum:
        return ""
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
        checksums: the checksums by file name, or {} before they are computed. Files of
            the same name have their paths below their common folder as keys. A file
            that has changed has `CHANGED` in place of its checksum.
        record_checksums: the checksums of the examples in TFRecord files, by file name;
            empty if the files are larger than `MOST_BYTES_OF_RECORDS` in total.
    """

    def __init__(self, paths: Sequence[Path] = ()):
        self.paths = tuple(dict.fromkeys(paths))
        self.reread = self.paths
        self.checksums: dict[str, str] = {}
        self.record_checksums: dict[str, str] = {}
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
        changed = self._changed(self.reread)
        if changed:
            raise DataError(
                f"{changed[0]} has changed since the run began, so not all of the run "
                "used the same data"
            )

    def compute_now(self) -> None:
        """Compute the checksums now, in the calling thread."""
        self.checksums = self._computed()

    def _compute(self, then: Callable[[dict[str, str]], None]) -> None:
        try:
            checksums = self._computed()
            then(checksums)
            # Set the attribute last: it shows that `then` has recorded the checksums.
            self.checksums = checksums
        except Exception as error:  # Training does not need checksums.
            say(f"the data have no checksums: {described(error)}")

    def _computed(self) -> dict[str, str]:
        for path in self.paths:
            checksum = sha256_of(path)
            # Do not keep the checksum of a file that has already changed: it is not
            # that of the data on which the run began, and would hide the change.
            if self._looks_unchanged(path):
                self._checksums_by_path[path] = checksum

        changed = self._changed(self.paths)
        for path in changed:
            say(
                f"{path} has changed since the run began, so the record has no "
                "checksum of it"
            )

        names = _unique_names(self.paths)
        checksums = {}
        for path in self.paths:
            checksum = CHANGED
            if path not in changed:
                checksum = self._checksums_by_path.get(path, CHANGED)
            checksums[names[path]] = checksum
        unchanged = [path for path in self.paths if path not in changed]
        self.record_checksums = _record_checksums(unchanged, names)
        return checksums

    def _changed(self, paths: Sequence[Path]) -> list[Path]:
        """Return the files that have changed since this object was created.

        A file has changed if its size or modification time differs and, if its checksum
        is known, that differs, too. Files that cannot be accessed are skipped.
        """
        changed = []
        for path in paths:
            # Skip a file that cannot be accessed, such as a deleted one.
            with suppress(OSError):
                if self._looks_unchanged(path):
                    continue
                known = self._checksums_by_path.get(path)
                if known is None or sha256_of(path) != known:
                    changed.append(path)
        return changed

    def _looks_unchanged(self, path: Path) -> bool:
        """Return whether a file has the size and the modification time that it had.

        A file whose state could not be read at first counts as unchanged.
        """
        before = self._states.get(path)
        return before is None or _file_state(path).looks_like(before)


def _record_checksums(
    paths: Sequence[Path], names: Mapping[Path, str]
) -> dict[str, str]:
    """Return the checksums of the examples in TFRecord files, by the names of files."""
    record_files = []
    size = 0
    for path in paths:
        # Skip a file that only TensorFlow can access.
        with suppress(OSError):
            if ".tfrecord" in path.name:
                size += path.stat().st_size
                record_files.append(path)
    if size > MOST_BYTES_OF_RECORDS:
        return {}

    checksums = {}
    for path in record_files:
        checksum = sha256_of_records(path)
        if checksum:
            checksums[names[path]] = checksum
    return checksums


def _unique_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each file: for equal names, the path below a common folder.

    Unlike the whole path, this path stays the same if the data are moved.
    """
    paths_by_name: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        paths_by_name[path.name].append(path)

    names = {}
    for name, namesakes in paths_by_name.items():
        if len(namesakes) == 1:
            names[namesakes[0]] = name
            continue
        folders = [path.absolute().parent for path in namesakes]
        common_folder = os.path.commonpath(folders)
        for path in namesakes:
            names[path] = path.absolute().relative_to(common_folder).as_posix()
    return names


def _file_state(path: Path) -> _FileState:
    stat = path.stat()
    return _FileState(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
