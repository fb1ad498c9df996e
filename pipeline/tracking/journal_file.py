"""The file of a journal: lines with a running checksum.

Each line begins with a checksum of itself and of all lines before it. A changed byte or
a lost line is detected wherever it is, and what precedes it stays valid.

What is left after a crash:

    amid a line         The line has no newline. It is ignored, and overwritten when the
                        run is resumed.
    between two lines   All lines written so far are valid.

There is one writer and one shipper at a time. Each locks one byte of the file. The
operating system releases these locks when a process ends, however it ends, and no forked
process has them.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pipeline.common.errors import ConfigError, refused, say
from pipeline.common.recorded import FormError, check

NAME = "journal.jsonl"  # in the run directory
DESCRIBED = "dataset.json"  # the last artifact that a run logs before it trains
# A trained model in the run directory, from when it is saved until the store has it.
MODEL = "logged_model-{}"
FORMAT = 1  # of the lines; `{"start": {"format": …}}` has it
# The bytes of the file that are locked.
WRITER = 0
SHIPPER = 1
MOST_WAITING = 2**28  # bytes that are kept in memory while the disk is full
# The encoder is made once: json.dumps makes one per call.
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_LINE = {
    "end?": str,
    "step?": int,
    "start?": dict,
    "run?": dict,
    "metrics?": dict,
    "tags?": dict,
}
_HEAD = len('{"crc":"00000000",')
_CHUNK = 2**16  # bytes that are read at a time


def lock(descriptor: int, byte: int, seconds: float = 0.0) -> bool:
    """Lock one byte of a file until the file is closed.

    Closing any descriptor of the file releases all locks that this process has on it.

    Returns:
        False if the byte is not free within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return True
        except (BlockingIOError, PermissionError):
            # Which of the two is raised differs between systems.
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.1)


class Reader:
    """Reads the lines of a journal, even while they are being written.

    A line that was changed raises a `FormError`.

    Attributes:
        offset: Bytes of the complete lines that were read.
        crc: The checksum of these lines.
    """

    def __init__(self, descriptor: int):
        self.offset = 0
        self.crc = 0
        self._line_count = 0
        self._descriptor = descriptor

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that follow."""
        size = _CHUNK
        while chunk := os.pread(self._descriptor, size, self.offset):
            complete = chunk[: chunk.rfind(b"\n") + 1]
            if not complete:
                if len(chunk) < size:
                    return
                size *= 2  # The line is longer than what was read.
            for text in complete.splitlines(keepends=True):
                yield self._parsed(text)

    def continued(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the lines that follow in the file and then in `text`.

        A line may begin in the file and end in the text.
        """
        yield from self.lines()
        size = os.fstat(self._descriptor).st_size
        beginning = os.pread(self._descriptor, size, self.offset)
        for line in (beginning + text.encode()).splitlines(keepends=True):
            yield self._parsed(line)

    def _parsed(self, text: bytes) -> dict[str, Any]:
        crc = zlib.crc32(text[_HEAD:], self.crc)
        if text[:_HEAD] != _head(crc):
            if self._line_count == 0 and text.startswith(b'{"time":'):
                raise FormError("it is of a version before this one")
            number = self._line_count + 1
            raise FormError(f"line {number} is not as it was written")
        self.offset += len(text)
        self.crc = crc
        self._line_count += 1
        try:
            line: dict[str, Any] = json.loads(text)
            check(line, _LINE, [])
        except ValueError as error:
            # The checksum is right: somebody has written the line.
            raise FormError(f"line {self._line_count}: {error}") from error
        return line


class Writer:
    """Appends lines to a journal.

    What a full disk does not take is kept in memory, and written when it has space again.

    Args:
        descriptor: Of the file, whose byte `WRITER` this process has locked.
        offset: Bytes of the file that are kept.
        crc: The checksum of the lines in them.
    """

    def __init__(self, descriptor: int, offset: int = 0, crc: int = 0):
        self._descriptor = descriptor
        self._crc = crc
        self._waiting = bytearray()
        os.ftruncate(descriptor, offset)
        os.lseek(descriptor, offset, os.SEEK_SET)

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, with the current time unless it has one.

        Raises:
            OSError: The file cannot be written, or too much waits in memory already.
        """
        milliseconds = int(time.time() * 1000)
        # Without its first brace, for which the checksum stands.
        rest = (_ENCODE({"time": milliseconds, **line})[1:] + "\n").encode()
        self._crc = zlib.crc32(rest, self._crc)
        was_waiting = bool(self._waiting)
        self._waiting += _head(self._crc) + rest
        try:
            self._drain()
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or len(self._waiting) > MOST_WAITING:
                raise
            if not was_waiting:
                reason = error.strerror
                say(
                    f"the journal cannot be written ({reason}): "
                    "its lines wait in memory"
                )

    def sync(self) -> None:
        """Flush all lines to the disk.

        Raises:
            OSError: The disk is full.
        """
        self._drain()
        os.fsync(self._descriptor)

    def unwritten(self) -> str:
        """Return what is kept in memory.

        The beginning of its first line may be in the file.
        """
        return self._waiting.decode()

    def close(self) -> bool:
        """Close the file, which releases its lock; return whether all lines are in it."""
        with contextlib.suppress(OSError):
            self._drain()
        os.close(self._descriptor)
        return not self._waiting

    def _drain(self) -> None:
        while self._waiting:
            written = os.write(self._descriptor, self._waiting)
            del self._waiting[:written]


def create(path: Path) -> Writer:
    """Return the writer of a new journal, which is locked.

    Raises:
        ConfigError: There is one already.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    is_locked = lock(descriptor, WRITER)
    if not is_locked or b"\n" in os.pread(descriptor, os.fstat(descriptor).st_size, 0):
        os.close(descriptor)
        rule = "must be a folder without a run in it"
        raise ConfigError("hydra.run.dir", rule, str(path.parent))
    return Writer(descriptor)


def has_begun(path: Path) -> bool:
    """Return whether there is a journal with a first line.

    A trainer that was killed before that line has no run.
    """
    return path.exists() and b"\n" in path.read_bytes()


@dataclass
class Past:
    """What a journal says of its run so far.

    The file is locked for the process that resumes the run.

    Attributes:
        path: Of the journal.
        descriptor: Of the open file.
        start: What the run was created with.
        run: `run_id` and `experiment_id`; empty if the run was never in a store.
        steps: The steps of its rows by kind, such as `val`.
        last: The latest value of each metric.
        tags: Set while the run was running.
        resumed: What each segment after the first began with.
        described: Whether all is logged that a run logs before it trains.
        status: FINISHED, FAILED or KILLED; None if the run ended without a word.
        damage: Which line is not as it was written; empty if there is none.
    """

    path: Path
    descriptor: int
    start: dict[str, Any] = field(default_factory=dict)
    run: dict[str, str] = field(default_factory=dict)
    steps: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    last: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    resumed: list[dict[str, Any]] = field(default_factory=list)
    described: bool = False
    status: str | None = None
    damage: str = ""

    @classmethod
    def of(
        cls,
        run_dir: Path,
        key: str = "RUN",
        *,
        running: bool = False,
        seconds: float = 0.0,
    ) -> Self:
        """Return the past of the run in `run_dir`.

        Args:
            run_dir: With a journal of this version.
            key: The argument that an error names.
            running: Whether the run may be running. Then nothing is locked. Else the
                run must have ended.
            seconds: For which to wait until the run has ended.

        Raises:
            ConfigError: There is no such journal, or the run is running.
        """
        path = run_dir / NAME
        with refused(key, f"must have a {NAME}", str(run_dir)):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        past = cls(path, descriptor)
        try:
            if not running and not lock(descriptor, WRITER, seconds):
                raise ConfigError(key, "is still running", str(run_dir))
            past._read(key)
            return past
        except BaseException:
            past.close()
            raise

    @property
    def updates(self) -> set[int]:
        """The updates whose rows are in the journal."""
        return self.steps["train"]

    def writer(self) -> Writer:
        """Return a writer that continues after the last complete line."""
        return Writer(self.descriptor, self._reader.offset, self._reader.crc)

    def close(self) -> None:
        """Close the file, which releases its lock."""
        os.close(self.descriptor)

    def _read(self, key: str) -> None:
        self._reader = Reader(self.descriptor)
        try:
            for line in self._reader.lines():
                self._add(line)
        except (FormError, OSError) as error:
            self.damage = str(error)
        version = self.start.get("format")
        if version == FORMAT:
            return
        if self.start:
            reason = f"format {version}"
        else:
            reason = self.damage or "it is empty"
        rule = f"must have a journal of format {FORMAT} ({reason})"
        raise ConfigError(key, rule, str(self.path.parent))

    def _add(self, line: dict[str, Any]) -> None:
        if "metrics" in line:
            for key in line["metrics"]:
                kind = key.partition("/")[0]
                self.steps[kind].add(line["step"])
            self.last |= line["metrics"]
        elif "resume" in line:
            self.resumed.append(line["resume"])
            self.status = None
        self.tags |= line.get("tags", {})
        if line.get("artifact") == DESCRIBED:
            self.described = True
        self.start = line.get("start", self.start)
        self.run = line.get("run", self.run)
        self.status = line.get("end", self.status)


def absolute(uri: str) -> str:
    """Return the URI of a store, with the absolute path of a SQLite file."""
    prefix = "sqlite:///"
    if not uri.startswith(prefix):
        return uri
    return prefix + os.path.abspath(uri.removeprefix(prefix))


def _head(crc: int) -> bytes:
    """Return what a line begins with."""
    return f'{{"crc":"{crc:08x}",'.encode()
