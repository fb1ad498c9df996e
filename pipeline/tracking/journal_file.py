"""The file of a journal: lines with a running checksum, one writer and one shipper.

Each line of the file is a JSON object that begins with a checksum:

    {"crc":"9a0b1c2d","time":1700000000000,"step":7,"metrics":{…}}

`crc` is a running CRC-32 in hexadecimal. It covers the rest of this line, including the
newline, and the same part of all earlier lines. So a reader detects every changed byte,
and every line that is missing before another line. The lines before the damage stay
valid. `time` is in milliseconds since 1970. `pipeline.tracking.journal_lines` lists the
other keys of a line.

State of the file after a failure:

- The writer died while it wrote a line: the line has no newline. Readers ignore the
  line, and a resumed run removes it. If it was the first line, there is no run, and
  another run may be started in the folder.
- The writer died after `LineWriter.write`: the line is complete for all readers, unless
  the disk is full.
- The machine died: lines after the last `LineWriter.sync` may be missing. Each
  checkpoint is written after a sync, and holds its `Position` in the journal.
- The disk is full: the writer buffers the lines in memory. They are lost if the writer
  dies before there is space again, unless they were sent to the shipper.

The writer and the shipper each lock one byte of the file. The operating system releases
the locks of a process that ends in any way, and a forked process does not inherit them.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from pipeline.common.errors import ConfigError, as_config_error, say
from pipeline.common.recorded import FormError
from pipeline.tracking import journal_lines
from pipeline.tracking.journal_lines import (
    FORMAT,
    Artifact,
    Created,
    End,
    Evaluated,
    Line,
    Resume,
    Row,
    RunIds,
    RunStart,
    Shown,
    Start,
    Tags,
)

# Names of files in the run directory.
JOURNAL_NAME = "journal.jsonl"
CONFIG_RECORD = "config.yaml"  # the resolved config, which is written first
# The record of the data. It is the last file that describes a run: the first line that
# logs it marks the end of the description. It may be logged again later.
DATASET_RECORD = "dataset.json"
MODEL = "logged_model-{}"  # folder of a saved model, removed when the store has it
# Folders with the pictures and the tables that were shown at evaluations. MLflow's page
# looks for pictures in an artifact folder of this name.
PICTURES = "images"
SHOWN = "shown"

# Offsets of the bytes that are locked.
WRITER = 0
SHIPPER = 1

MOST_WAITING = 2**28  # maximum number of bytes buffered while the disk is full

# Create the encoder once: `json.dumps` would create one per line.
_encode = json.JSONEncoder(separators=(",", ":")).encode
_HEAD_LENGTH = len('{"crc":"00000000",')
_CHUNK = 2**16  # bytes read at a time
_LOCK_INTERVAL = 0.1  # seconds between two tries to lock a byte


def lock(descriptor: int, byte: int, seconds: float = 0.0) -> bool:
    """Lock one byte of a file until this process closes the file.

    Closing any descriptor of the file releases all locks of this process on the file.

    Returns:
        Whether the byte was locked: False if another process still has it locked after
        `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            return True
        except (BlockingIOError, PermissionError):  # the type depends on the system
            if time.monotonic() >= deadline:
                return False
        time.sleep(_LOCK_INTERVAL)


def create(path: Path) -> "LineWriter":
    """Create and lock a journal, and return its writer.

    Raises:
        ConfigError: the file already has a first line, or another process has locked
            it.
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
    return LineWriter(descriptor, keep=BEGINNING)


def has_begun(path: Path) -> bool:
    """Return whether a journal has a complete first line; without it, no run exists."""
    return path.exists() and b"\n" in path.read_bytes()


def is_locked(path: Path) -> bool:
    """Return whether another process has locked a journal, or a sweep's file.

    This process must not have locked the file, since it would lose its lock.
    """
    try:
        with path.open("r+b") as file:
            return not lock(file.fileno(), WRITER)
    except OSError:  # the file is missing, or belongs to another user
        return False


@dataclass(frozen=True)
class Position:
    """A position at the end of a complete line; it identifies all lines before it.

    Attributes:
        offset: number of bytes before the position.
        crc: running checksum of the lines before the position.
    """

    offset: int
    crc: int


BEGINNING = Position(0, 0)  # the position before the first line


class LineReader:
    """Reads the lines of a journal, even while another process writes the journal.

    The methods raise a `FormError` at a line that was changed or is malformed.

    Attributes:
        offset: the number of bytes in the complete lines that were read.
        crc: the checksum of these lines.
    """

    def __init__(self, descriptor: int):
        self.offset = 0
        self.crc = 0
        self._lines_read = 0
        self._descriptor = descriptor

    def lines(self) -> Iterator[Line]:
        """Yield the complete lines after `offset`."""
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
                size *= 2  # the line is longer than the chunk

    def continued(self, text: str) -> Iterator[Line]:
        """Yield the remaining lines of the file, then the lines in `text`.

        The first line of `text` may begin in the file.
        """
        yield from self.lines()
        size = os.fstat(self._descriptor).st_size
        beginning = os.pread(self._descriptor, size, self.offset)
        for line in (beginning + text.encode()).splitlines(keepends=True):
            yield self._parse(line)

    def _parse(self, text: bytes) -> Line:
        crc = zlib.crc32(text[_HEAD_LENGTH:], self.crc)
        if text[:_HEAD_LENGTH] != _head(crc):
            if self._lines_read == 0 and text.startswith(b'{"time":'):
                raise FormError("it was written by an earlier version")
            raise FormError(f"line {self._lines_read + 1} is not as it was written")

        self.offset += len(text)
        self.crc = crc
        self._lines_read += 1
        try:
            return journal_lines.parsed(json.loads(text))
        # Reject content that this package cannot have written, despite its checksum.
        except (ValueError, RecursionError) as error:
            raise FormError(f"line {self._lines_read}: {error}") from error


class _Line(NamedTuple):
    """The text of a line, and the position after it."""

    text: bytes
    end: Position


class LineWriter:
    """Truncates a journal, and appends lines to it.

    While the disk is full, lines are buffered in memory. They are written once there is
    space again.

    A signal such as Ctrl-C may interrupt any method at any point. A line is then kept
    or not, but never damaged or duplicated: `write` adds it to the buffer in one step,
    and a line that was written in part is written again at the same position.

    Args:
        descriptor: the file, opened for writing and locked.
        keep: the position up to which the file is kept; the rest of it is removed.
    """

    def __init__(self, descriptor: int, keep: Position):
        self._descriptor = descriptor
        # The last line in the file, then the lines that are buffered.
        self._lines = deque([_Line(b"", keep)])
        os.ftruncate(descriptor, keep.offset)

    def write(self, content: Mapping[str, Any]) -> None:
        """Write one line; add the current time unless the line has a `time`.

        Args:
            content: the line as a JSON object; see `journal_lines.Line.content`.

        Raises:
            OSError: the file cannot be written, or the disk is full and more than
                `MOST_WAITING` bytes are buffered.
        """
        now = int(time.time() * 1000)
        body = (_encode({"time": now, **content})[1:] + "\n").encode()
        before = self.position
        crc = zlib.crc32(body, before.crc)
        text = _head(crc) + body

        was_waiting = len(self._lines) > 1
        self._lines.append(_Line(text, Position(before.offset + len(text), crc)))
        try:
            self._drain()
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            waiting = self.position.offset - self._lines[0].end.offset
            if not is_full or waiting > MOST_WAITING:
                raise
            if not was_waiting:
                say(
                    f"the journal cannot be written ({error.strerror}): "
                    "its lines wait in memory"
                )

    @property
    def position(self) -> Position:
        """The position after the last line, including buffered lines."""
        return self._lines[-1].end

    def flush(self) -> None:
        """Write the buffered lines to the file; raise an `OSError` if this fails."""
        self._drain()

    def sync(self) -> None:
        """Wait until the lines in the file are on the disk. Thread-safe."""
        os.fsync(self._descriptor)

    def unwritten(self) -> str:
        """Return the text of the buffered lines, without the part that is in the file.

        The file may hold the beginning of the first buffered line.
        """
        last, *waiting = self._lines
        in_file = os.fstat(self._descriptor).st_size - last.end.offset
        return b"".join(line.text for line in waiting)[in_file:].decode()

    def close(self) -> bool:
        """Write the buffered lines if possible, and close the file, which unlocks it.

        Returns:
            Whether all lines were written to the file.
        """
        with contextlib.suppress(OSError):
            self._drain()
            self.sync()
        os.close(self._descriptor)
        return len(self._lines) == 1

    def _drain(self) -> None:
        while len(self._lines) > 1:
            text = self._lines[1].text
            os.lseek(self._descriptor, self._lines[0].end.offset, os.SEEK_SET)
            while text:
                written = os.write(self._descriptor, text)
                text = text[written:]
            self._lines.popleft()


def _head(crc: int) -> bytes:
    """Return the first `_HEAD_LENGTH` bytes of a line, which hold its checksum."""
    return f'{{"crc":"{crc:08x}",'.encode()


@dataclass
class Past:
    """The state of a run according to its journal.

    Attributes:
        path: the file.
        start: the content of the first line.
        run: the run's IDs, or None if the run was never in a store.
        moved_to: the URI of the store to which the run was uploaded, or "" if it is
            that of the first line.
        uploaded: whether the last line says that the store has all of the journal.
        steps: the steps that have a row, by the prefix of its metrics, such as `val`.
            Rows from the user's own code are not included. The key `SHOWN` has the
            steps whose pictures and tables were logged.
        logged: the steps of each metric that the user's own code has logged.
        last: the latest value of each metric.
        tags: the tags that were set after the start of the run, and those of the rows
            that `pipeline evaluate` has logged.
        resumed: the description of each segment after the first one.
        interruptions: when each segment but the last one ended and the next one began,
            in milliseconds since 1970.
        last_time: when the run wrote its last line, in milliseconds since 1970.
        positions: the position after each line that can be read.
        last_position: the last of these positions.
        described: whether all inputs and artifacts that precede training were logged.
        status: FINISHED, FAILED or KILLED, or None if the last segment has no `end`
            line.
        damage: why a line cannot be read, or "" if all lines can be read.
    """

    path: Path
    start: RunStart = field(default_factory=RunStart)
    run: RunIds | None = None
    moved_to: str = ""
    uploaded: bool = False
    steps: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    logged: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    last: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    resumed: list[Mapping[str, Any]] = field(default_factory=list)
    interruptions: list[tuple[int, int]] = field(default_factory=list)
    last_time: int | None = None
    positions: set[Position] = field(default_factory=set)
    last_position: Position = BEGINNING
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
        """Read the journal in `run_dir`.

        Args:
            run_dir: a directory with a journal of this version.
            key: the argument that names the run in an error.
            running: whether to accept a run that another process is training.
            seconds: how long to wait until such a run ends, if it is not accepted.

        Raises:
            ConfigError: there is no journal of this version, or the run is running and
                not accepted.
        """
        # A lock needs write access, which a read-only disk does not give.
        flags = os.O_RDONLY if running else os.O_RDWR
        descriptor = _opened(run_dir, key, flags)
        try:
            if not running:
                _lock_to_write(descriptor, run_dir, key, seconds)
            past = cls(run_dir / JOURNAL_NAME)
            past._read(descriptor, key)
            return past
        finally:
            os.close(descriptor)

    @property
    def run_id(self) -> str:
        """The ID of the run, or "" if the run was never in a store."""
        return "" if self.run is None else self.run.run_id

    @property
    def store(self) -> str:
        """The URI of the run's store, with secrets masked."""
        return self.moved_to or self.start.store

    @property
    def pid(self) -> int | None:
        """The ID of the process that began the last segment, on its machine.

        None for a run of an older version.
        """
        pid = self._last_segment.get("pid")
        return pid if isinstance(pid, int) else None

    @property
    def last_code(self) -> Mapping[str, Any]:
        """The hashes of the user's code in the last segment, by the file's name.

        Empty for a run of an older version.
        """
        return self._last_segment.get("code") or {}

    @property
    def _last_segment(self) -> Mapping[str, Any]:
        return [self.start.segment, *self.resumed][-1]

    @property
    def updates(self) -> set[int]:
        """The updates with a row of training metrics."""
        return self.steps["train"]

    def _read(self, descriptor: int, key: str) -> None:
        reader = LineReader(descriptor)
        try:
            for line in reader.lines():
                self._add(line)
                self.last_position = Position(reader.offset, reader.crc)
                self.positions.add(self.last_position)
        except (FormError, OSError) as error:
            self.damage = str(error)

        version = self.start.format
        is_complete = self.start.store != "" and "journal" in self.start.tags
        if version != FORMAT or not is_complete:
            problem = f"format {version}"
            if self.start == RunStart():
                problem = self.damage or "it is empty"
            elif not is_complete:
                problem = "its first line lacks the store or the tags"
            rule = f"must have a journal of format {FORMAT} ({problem})"
            raise ConfigError(key, rule, str(self.path.parent))

    def _add(self, line: Line) -> None:
        self.uploaded = isinstance(line, Created) and line.complete is True
        match line:
            case Evaluated():
                self.tags |= line.tags
            case Row():
                self._add_row(line)
            case Start(start):
                self.start = start
            case Created(run, store):
                self.run = run
                self.moved_to = store or self.moved_to
            case Tags(tags):
                self.tags |= tags
            case Shown(step):
                self.steps[SHOWN].add(step)
            case Artifact(name):
                self.described = self.described or name == DATASET_RECORD
            case Resume(segment):
                self.resumed.append(segment)
                self.status = None
                if self.last_time is not None and line.time is not None:
                    self.interruptions.append((self.last_time, line.time))
            case End(status):
                self.status = status
        # `pipeline evaluate` and `pipeline sync` append these lines to a run that has
        # ended.
        if line.time is not None and not isinstance(line, Evaluated | Created):
            self.last_time = line.time

    def _add_row(self, row: Row) -> None:
        for name in row.metrics:
            if row.logged:
                self.logged[name].add(row.step)
            else:
                kind = name.partition("/")[0]
                self.steps[kind].add(row.step)
        self.last |= row.metrics


@dataclass
class LockedPast(Past):
    """The state of a run that this process may resume.

    The journal stays locked until `close`, so that no other process resumes the run.

    Attributes:
        descriptor: the open file.
    """

    descriptor: int = field(kw_only=True)

    @classmethod
    def open(cls, run_dir: Path, key: str = "RUN") -> Self:
        """Open, lock and read the journal in `run_dir`.

        Args:
            run_dir: a directory with a journal of this version.
            key: the argument that names the run in an error.

        Raises:
            ConfigError: there is no journal of this version, or the run is running.
        """
        descriptor = _opened(run_dir, key, os.O_RDWR)
        try:
            _lock_to_write(descriptor, run_dir, key)
            past = cls(run_dir / JOURNAL_NAME, descriptor=descriptor)
            past._read(descriptor, key)
            return past
        except BaseException:
            os.close(descriptor)
            raise

    def truncated_writer(self) -> LineWriter:
        """Remove all text after the last readable line; return a writer for the file.

        The writer owns the file and the lock: close the writer in place of this object.
        """
        return LineWriter(self.descriptor, keep=self.last_position)

    def close(self) -> None:
        """Close the file, which releases its lock."""
        os.close(self.descriptor)


def _opened(run_dir: Path, key: str, flags: int) -> int:
    with as_config_error(key, f"must have a {JOURNAL_NAME}", str(run_dir)):
        return os.open(run_dir / JOURNAL_NAME, flags | os.O_CLOEXEC)


def _lock_to_write(
    descriptor: int, run_dir: Path, key: str, seconds: float = 0.0
) -> None:
    """Lock a journal as its writer; raise a ConfigError if another process has."""
    if not lock(descriptor, WRITER, seconds):
        rule = "is still running"
        if key.startswith("hydra."):
            rule = "must not be the directory of a run that is still running"
        raise ConfigError(key, rule, str(run_dir))
