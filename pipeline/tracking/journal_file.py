"""The file of a journal: lines with a running checksum, one writer and one shipper.

One line is one JSON object on one line of text, which begins with its checksum:

    {"crc":"9a0b1c2d","time":1700000000000,"step":7,"metrics":{…}}

`crc` is a running CRC-32, in hexadecimal: it covers the rest of this line with its
newline, and the same part of all earlier lines. So a changed byte or a lost line is
detected wherever it is, and what precedes it stays valid. `time` is in milliseconds
since 1970. `pipeline.tracking.journal` lists what else a line may hold.

What a crash leaves:

- A process died while it wrote a line: the line has no newline. It is not read, and it
  is overwritten when the run is resumed. Without a first line there is no run yet, and
  another run may begin in the folder.
- A process died after `LineWriter.write`: the operating system has the line, and every
  process reads it. The machine died: what followed the last `LineWriter.sync` may be
  missing. Each checkpoint follows a sync, and knows its `Position` in the journal.
- The disk is full: the lines wait in the memory of the writer. They are lost if it dies
  before there is space again, unless they were handed to the shipper.

The writer and the shipper each lock one byte of the file. The operating system releases
a lock when its process ends, however it ends, and a forked process never has it.
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

from pipeline.common.errors import ConfigError, as_config_error, say
from pipeline.common.recorded import FormError, check

# Names of files in the run directory.
JOURNAL_NAME = "journal.jsonl"
DESCRIBED = "dataset.json"  # the last artifact that a run logs before it trains
MODEL = "logged_model-{}"  # a trained model, from its saving until the store has it

FORMAT = 1  # of the lines; the first line has it as `{"start": {"format": …}}`

# The bytes of the file that are locked.
WRITER = 0
SHIPPER = 1

MOST_WAITING = 2**28  # bytes kept in memory while the disk is full

_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps makes it anew
_FORM = {
    "time?": int,
    "start?": {"store?": str, "tags?": {"journal?": str}},
    "run?": {"run_id": str},
    "dataset?": dict,
    "context?": str,
    "metrics?": dict,
    "logged?": bool,  # by the user's own code
    "tags?": {str: str},
    "fork_of?": str,
    "resume?": dict,
    "end?": str,
    "step?": int,
}
# Keys that a line with another key has to have, too.
_COMPANIONS = {
    "metrics": ("step", "time"),
    "dataset": ("context",),
    "end": ("time",),
}
_HEAD_LENGTH = len('{"crc":"00000000",')
_CHUNK = 2**16  # bytes read at a time
_LOCK_INTERVAL = 0.1  # seconds between two tries to lock a byte


def lock(descriptor: int, byte: int, seconds: float = 0.0) -> bool:
    """Lock one byte of the file until the file is closed.

    Closing any descriptor of the file releases all locks that this process has on it.

    Returns:
        False if another process still has the lock after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return True
        except (BlockingIOError, PermissionError):  # which one depends on the system
            if time.monotonic() >= deadline:
                return False
        time.sleep(_LOCK_INTERVAL)


def create(path: Path) -> "LineWriter":
    """Return the writer of a new journal, locked.

    Raises:
        ConfigError: there is a journal already, or another process is writing one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    rule = ""
    if not lock(descriptor, WRITER):
        rule = "must be a folder that no other process trains in"
    elif b"\n" in os.pread(descriptor, os.fstat(descriptor).st_size, 0):
        rule = "must be a folder without a run in it"
    if rule:
        os.close(descriptor)
        raise ConfigError("hydra.run.dir", rule, str(path.parent))
    return LineWriter(descriptor)


def has_begun(path: Path) -> bool:
    """Return whether a journal has its first line.

    A trainer that was killed before it wrote the first line has no run.
    """
    return path.exists() and b"\n" in path.read_bytes()


@dataclass(frozen=True)
class Position:
    """The end of a complete line: the lines up to it, and no others, end there.

    Attributes:
        offset: their bytes.
        crc: their checksum.
    """

    offset: int
    crc: int


class LineReader:
    """Reads the lines of a journal, even while they are being written.

    A line that was changed raises a `FormError`.

    Attributes:
        offset: the number of bytes in the complete lines that were read.
        crc: the checksum of these lines.
    """

    def __init__(self, descriptor: int):
        self.offset = 0
        self.crc = 0
        self._lines_read = 0
        self._descriptor = descriptor

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that follow."""
        size = _CHUNK
        while True:
            chunk = os.pread(self._descriptor, size, self.offset)
            complete = chunk[: chunk.rfind(b"\n") + 1]
            if complete:
                for text in complete.splitlines(keepends=True):
                    yield self._parse(text)
            elif len(chunk) < size:
                return
            else:
                size *= 2  # the line is longer than what was read

    def continued(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the lines that follow in the file, and then those in `text`.

        A line may begin in the file and end in the text.
        """
        yield from self.lines()
        size = os.fstat(self._descriptor).st_size
        beginning = os.pread(self._descriptor, size, self.offset)
        for line in (beginning + text.encode()).splitlines(keepends=True):
            yield self._parse(line)

    def _parse(self, text: bytes) -> dict[str, Any]:
        crc = zlib.crc32(text[_HEAD_LENGTH:], self.crc)
        if text[:_HEAD_LENGTH] != _head(crc):
            if self._lines_read == 0 and text.startswith(b'{"time":'):
                raise FormError("it is of a version before this one")
            raise FormError(f"line {self._lines_read + 1} is not as it was written")

        self.offset += len(text)
        self.crc = crc
        self._lines_read += 1
        try:
            line: dict[str, Any] = json.loads(text)
            _check_line(line)
        # Somebody wrote it, with a correct checksum.
        except (ValueError, RecursionError) as error:
            raise FormError(f"line {self._lines_read}: {error}") from error
        return line


def _check_line(line: dict[str, Any]) -> None:
    """Raise a `FormError` if a line lacks something, or is of another form."""
    check(line, _FORM, [])
    for key, companions in _COMPANIONS.items():
        for companion in companions:
            if key in line and companion not in line:
                raise FormError(f"{companion} is missing")
    for value in line.get("metrics", {}).values():
        if not isinstance(value, int | float):
            raise FormError("metrics must be numbers")


class LineWriter:
    """Appends lines to a journal.

    Lines that a full disk does not take are kept in memory, and are written when there
    is space again.

    Args:
        descriptor: the file, opened for writing and locked.
        offset: the number of bytes that are kept; what follows them is cut off.
        crc: the checksum of the lines in these bytes.
    """

    def __init__(self, descriptor: int, offset: int = 0, crc: int = 0):
        self._descriptor = descriptor
        self._offset = offset
        self._crc = crc
        self._waiting = bytearray()
        os.ftruncate(descriptor, offset)
        os.lseek(descriptor, offset, os.SEEK_SET)

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, with the current time unless it has one.

        Raises:
            OSError: the file cannot be written, or the disk is full and more than
                `MOST_WAITING` bytes wait in memory.
        """
        now = int(time.time() * 1000)
        body = (_encode({"time": now, **line})[1:] + "\n").encode()
        was_waiting = bool(self._waiting)
        self._crc = zlib.crc32(body, self._crc)
        text = _head(self._crc) + body
        self._offset += len(text)
        self._waiting += text
        try:
            self._drain()
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or len(self._waiting) > MOST_WAITING:
                raise
            if not was_waiting:
                say(
                    f"the journal cannot be written ({error.strerror}): "
                    "its lines wait in memory"
                )

    @property
    def position(self) -> Position:
        """The end of all lines, of which some may wait in memory."""
        return Position(self._offset, self._crc)

    def flush(self) -> None:
        """Write what waits in memory; raise an `OSError` if the disk is full."""
        self._drain()

    def sync(self) -> None:
        """Wait until the lines in the file are on the disk; any thread may call it."""
        os.fsync(self._descriptor)

    def unwritten(self) -> str:
        """Return what waits in memory.

        The beginning of its first line may already be in the file.
        """
        return self._waiting.decode()

    def close(self) -> bool:
        """Close the file, which releases the lock; return whether it has all lines."""
        with contextlib.suppress(OSError):
            self._drain()
            self.sync()
        os.close(self._descriptor)
        return not self._waiting

    def _drain(self) -> None:
        while self._waiting:
            written = os.write(self._descriptor, self._waiting)
            del self._waiting[:written]


def _head(crc: int) -> bytes:
    """Return the beginning of a line, `_HEAD_LENGTH` bytes."""
    return f'{{"crc":"{crc:08x}",'.encode()


@dataclass
class Past:
    """What a journal says about its run so far.

    The file stays locked for the process that resumes the run, until `close`.

    Attributes:
        path: the file.
        descriptor: the open file.
        start: what the run was created with.
        run: its `run_id` and `experiment_id`; empty if it was never in a store.
        steps: the steps that have a row, by the kind of the row, such as `val`.
        logged: the steps of each metric that the user's own code has logged.
        last: the latest value of each metric.
        tags: the tags that were set while the run was running.
        resumed: what each segment after the first one began with.
        positions: the ends of its lines.
        described: whether the run has logged everything that precedes the training.
        status: FINISHED, FAILED or KILLED; None if the run ended without a line.
        damage: which line is not as it was written; empty if there is none.
    """

    path: Path
    descriptor: int
    start: dict[str, Any] = field(default_factory=dict)
    run: dict[str, str] = field(default_factory=dict)
    steps: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    logged: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    last: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    resumed: list[dict[str, Any]] = field(default_factory=list)
    positions: set[Position] = field(default_factory=set)
    described: bool = False
    status: str | None = None
    damage: str = ""

    @classmethod
    def read(
        cls,
        run_dir: Path,
        key: str = "RUN",
        *,
        running: bool = False,
        seconds: float = 0.0,
    ) -> Self:
        """Return the past of the run in `run_dir`.

        Args:
            run_dir: a directory with a journal of this version.
            key: the argument that names the run in an error.
            running: whether to accept a run that has not ended; then nothing is locked.
            seconds: how long to wait for the lock.

        Raises:
            ConfigError: there is no such journal, or its run is still running.
        """
        path = run_dir / JOURNAL_NAME
        with as_config_error(key, f"must have a {JOURNAL_NAME}", str(run_dir)):
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
        """Return the updates that have a row."""
        return self.steps["train"]

    def writer(self) -> LineWriter:
        """Return a writer that continues after the last complete line."""
        return LineWriter(self.descriptor, self._reader.offset, self._reader.crc)

    def close(self) -> None:
        """Close the file, which releases its lock."""
        os.close(self.descriptor)

    def _read(self, key: str) -> None:
        self._reader = LineReader(self.descriptor)
        try:
            for line in self._reader.lines():
                self._add(line)
                position = Position(self._reader.offset, self._reader.crc)
                self.positions.add(position)
        except (FormError, OSError) as error:
            self.damage = str(error)

        version = self.start.get("format")
        tags = self.start.get("tags", {})
        is_complete = "store" in self.start and "journal" in tags
        if version != FORMAT or not is_complete:
            problem = f"format {version}"
            if not self.start:
                problem = self.damage or "it is empty"
            elif not is_complete:
                problem = "its first line lacks the store or the tags"
            rule = f"must have a journal of format {FORMAT} ({problem})"
            raise ConfigError(key, rule, str(self.path.parent))

    def _add(self, line: dict[str, Any]) -> None:
        if "metrics" in line:
            for name in line["metrics"]:
                if line.get("logged"):
                    self.logged[name].add(line["step"])
                else:
                    kind = name.partition("/")[0]
                    self.steps[kind].add(line["step"])
            self.last |= line["metrics"]
        elif "resume" in line:
            self.resumed.append(line["resume"])
            self.status = None

        if line.get("artifact") == DESCRIBED:
            self.described = True
        self.tags |= line.get("tags", {})
        self.start = line.get("start", self.start)
        self.run = line.get("run", self.run)
        self.status = line.get("end", self.status)
