"""The file of a journal: lines with a running checksum, one writer and one shipper at a time.

Each line begins with a checksum of itself and of all lines before it: a changed byte or a lost line is detected
wherever it is, and what precedes it stays valid. A line without a newline is one that a process was writing when it
died: it is ignored, and overwritten when the run is resumed. The writer and the shipper each lock one byte of the file;
the operating system releases these locks when their process ends, however it ends, and no forked process has them.
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
MODEL = "logged_model-{}"  # a trained model in the run directory, from when it is saved until the store has it
FORMAT = 1  # of the lines; `{"start": {"format": …}}` says it
WRITER, SHIPPER = 0, 1  # the bytes that are locked
MOST_WAITING = 2**28  # bytes kept in memory while the disk is full
_ENCODE = json.JSONEncoder(
    separators=(",", ":")
).encode  # made once: json.dumps makes one per call
_LINE = {"end?": str, "step?": int} | dict.fromkeys(
    ("start?", "run?", "metrics?", "tags?"), dict
)
_HEAD = len('{"crc":"00000000",')
_AT_ONCE = 2**16  # bytes read at a time


def lock(descriptor: int, byte: int, seconds: float = 0.0) -> bool:
    """Lock one byte of the file until the file is closed; return False if it is not free within `seconds`.

    Closing any descriptor of the file releases all locks that this process has on it.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return True
        except (
            BlockingIOError,
            PermissionError,
        ):  # which of the two it is differs between systems
            if time.monotonic() >= until:
                return False
        time.sleep(0.1)


class Reader:
    """Reads the lines of a journal, also while they are being written; one that was changed is a `FormError`."""

    def __init__(self, descriptor: int):
        self.offset = self.crc = self._number = (
            0  # bytes and lines read, which are complete, and their checksum
        )
        self._descriptor = descriptor

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that follow."""
        size = _AT_ONCE
        while chunk := os.pread(self._descriptor, size, self.offset):
            complete = chunk[: chunk.rfind(b"\n") + 1]
            if not complete:
                if len(chunk) < size:
                    return
                size *= 2  # the line is longer than what was read
            for text in complete.splitlines(keepends=True):
                yield self._parsed(text)

    def continued(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the lines that follow, in the file and then in `text`; a line may begin in one and end in the other."""
        yield from self.lines()
        beginning = os.pread(
            self._descriptor, os.fstat(self._descriptor).st_size, self.offset
        )
        for line in (beginning + text.encode()).splitlines(keepends=True):
            yield self._parsed(line)

    def _parsed(self, text: bytes) -> dict[str, Any]:
        crc = zlib.crc32(text[_HEAD:], self.crc)
        if text[:_HEAD] != f'{{"crc":"{crc:08x}",'.encode():
            older = self._number == 0 and text.startswith(b'{"time":')
            wrong = f"line {self._number + 1} is not as it was written"
            raise FormError("it is of a version before this one" if older else wrong)
        self.offset, self.crc, self._number = (
            self.offset + len(text),
            crc,
            self._number + 1,
        )
        try:
            line: dict[str, Any] = json.loads(text)
            check(line, _LINE, [])
        except ValueError as error:  # somebody has written it
            raise FormError(f"line {self._number}: {error}") from error
        return line


class Writer:
    """Appends lines. What a full disk does not take is kept in memory, and written when there is room again."""

    def __init__(self, descriptor: int, offset: int = 0, crc: int = 0):
        self._descriptor, self._crc = descriptor, crc
        self._waiting = bytearray()
        os.ftruncate(descriptor, offset)
        os.lseek(descriptor, offset, os.SEEK_SET)

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, with the current time unless it has one; an `OSError` if too much waits in memory already."""
        text = (_ENCODE({"time": int(time.time() * 1000), **line})[1:] + "\n").encode()
        self._crc = zlib.crc32(text, self._crc)
        self._waiting += f'{{"crc":"{self._crc:08x}",'.encode() + text
        was_waiting = len(self._waiting) > _HEAD + len(text)
        try:
            self._drain()
        except OSError as error:
            if (
                error.errno not in (errno.ENOSPC, errno.EDQUOT)
                or len(self._waiting) > MOST_WAITING
            ):
                raise
            if not was_waiting:
                say(
                    f"the journal cannot be written ({error.strerror}): its lines wait in memory"
                )

    def sync(self) -> None:
        """Flush all lines to the disk; an `OSError` if it has no room."""
        self._drain()
        os.fsync(self._descriptor)

    def unwritten(self) -> str:
        """Return what is kept in memory; the beginning of its first line may be in the file."""
        return self._waiting.decode()

    def close(self) -> bool:
        """Close the file, which releases its lock; return whether all lines are in it."""
        with contextlib.suppress(OSError):
            self._drain()
        os.close(self._descriptor)
        return not self._waiting

    def _drain(self) -> None:
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]


def create(path: Path) -> Writer:
    """Return the writer of a new journal, locked; a `ConfigError` if there is one already."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if not lock(descriptor, WRITER) or b"\n" in os.pread(
        descriptor, os.fstat(descriptor).st_size, 0
    ):
        os.close(descriptor)
        raise ConfigError(
            "hydra.run.dir", "must be a folder without a run in it", str(path.parent)
        )
    return Writer(descriptor)


def has_begun(path: Path) -> bool:
    """Return whether there is a journal with a first line: a trainer that was killed before it has no run."""
    return path.exists() and b"\n" in path.read_bytes()


@dataclass
class Past:
    """What a journal says of its run so far. The file is locked for the process that resumes the run."""

    path: Path
    descriptor: int
    start: dict[str, Any] = field(default_factory=dict)  # what the run was created with
    run: dict[str, str] = field(
        default_factory=dict
    )  # `run_id` and `experiment_id`; empty if it was never in a store
    steps: defaultdict[str, set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )  # of rows, by kind, as `val`
    last: dict[str, float] = field(
        default_factory=dict
    )  # the latest value of each metric
    tags: dict[str, str] = field(default_factory=dict)  # set while the run was running
    resumed: list[dict[str, Any]] = field(
        default_factory=list
    )  # what each segment after the first began with
    described: bool = (
        False  # whether everything is logged that a run logs before it trains
    )
    status: str | None = (
        None  # FINISHED, FAILED or KILLED; None if the run ended without a word
    )
    damage: str = ""  # which line is not as it was written; empty if there is none

    @classmethod
    def of(
        cls,
        run_dir: Path,
        key: str = "RUN",
        *,
        running: bool = False,
        seconds: float = 0.0,
    ) -> Self:
        """Return the past of the run in `run_dir`, which the argument `key` names; the file is locked within `seconds`.

        It must have one of this version, whose run has ended unless it may be `running`; then nothing is locked.
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
        return self.steps["train"]

    def _read(self, key: str) -> None:
        self._reader = Reader(self.descriptor)
        try:
            for line in self._reader.lines():
                self._add(line)
        except (FormError, OSError) as error:
            self.damage = str(error)
        version = self.start.get("format")
        if version != FORMAT:
            found = f"format {version}" if self.start else self.damage or "it is empty"
            raise ConfigError(
                key,
                f"must have a journal of format {FORMAT} ({found})",
                str(self.path.parent),
            )

    def _add(self, line: dict[str, Any]) -> None:
        if "metrics" in line:
            for key in line["metrics"]:
                self.steps[key.partition("/")[0]].add(line["step"])
            self.last |= line["metrics"]
        elif "resume" in line:
            self.resumed.append(line["resume"])
            self.status = None
        self.tags |= line.get("tags", {})
        self.described |= line.get("artifact") == DESCRIBED
        self.start, self.run = line.get("start", self.start), line.get("run", self.run)
        self.status = line.get("end", self.status)

    def writer(self) -> Writer:
        """Return a writer that continues after the last complete line."""
        return Writer(self.descriptor, self._reader.offset, self._reader.crc)

    def close(self) -> None:
        """Close the file, which releases its lock."""
        os.close(self.descriptor)


def absolute(uri: str) -> str:
    """Return the URI of a store, with the absolute path of a SQLite file."""
    prefix = "sqlite:///"
    return (
        prefix + os.path.abspath(uri.removeprefix(prefix))
        if uri.startswith(prefix)
        else uri
    )
