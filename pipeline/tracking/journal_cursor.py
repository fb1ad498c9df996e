"""Reads a journal from its start, and follows the state of the run line by line."""

import os
import time
from collections.abc import Iterator
from typing import Any

from pipeline.common.recorded import FormError
from pipeline.tracking.journal_file import LineReader
from pipeline.tracking.journal_lines import End, Line, Resume, Row, Start, Tags

# Tag of a run: the number of the segment whose `end` line may be missing in the
# journal because the disk was full. Segments are numbered from 0.
UNWRITTEN = "journal.unwritten"


class JournalCursor:
    """Reads the lines of a journal in order, each line once.

    The disk of the journal may be full. The lines that are missing in the file then
    come from the trainer; see `unwritten_lines`.

    Args:
        descriptor: the journal.

    Attributes:
        start: the first line.
        status: the run's final status according to the lines read so far, or None if it
            has not ended.
        damage: why the journal cannot be read further; empty if it can be read.

    Raises:
        FormError: the journal does not begin with the start of a run.
    """

    def __init__(self, descriptor: int):
        self.status: str | None = None
        self.damage = ""
        self._descriptor = descriptor
        self._reader = LineReader(descriptor)
        # The lines that came from the trainer, and those of them that `lines` still has
        # to yield because this cursor was made by `from_start`.
        self._unwritten: list[Line] = []
        self._unwritten_again: list[Line] = []
        self._last_step = 0
        self._segment = 0
        self._points_read = 0

        line = next(self._reader.lines(), None)
        if not isinstance(line, Start):
            raise FormError("the journal does not begin with the start of a run")
        self.start = line

    def from_start(self) -> "JournalCursor":
        """Return a cursor that reads all lines again, including the trainer's."""
        cursor = JournalCursor(self._descriptor)
        cursor._unwritten = list(self._unwritten)
        cursor._unwritten_again = list(self._unwritten)
        return cursor

    def lines(self) -> Iterator[Line]:
        """Yield the lines that were not read yet, up to the first damaged line."""
        yield from self._followed(self._reader.lines())
        while self._unwritten_again:
            yield from self._followed(iter([self._unwritten_again.pop(0)]))

    def unwritten_lines(self, text: str) -> Iterator[Line]:
        """Yield the rest of the journal, then the lines in `text`.

        Before an `end` line, yield the tag `UNWRITTEN`: a later process then sees that
        the journal may lack this line.
        """
        for line in self._followed(self._reader.continued(text)):
            if isinstance(line, End):
                note = Tags({UNWRITTEN: str(self._segment)})
                self._unwritten.append(note)
                yield note
            self._unwritten.append(line)
            yield line

    def metric_names(self) -> set[str]:
        """Return the names of all metrics in the file."""
        names: set[str] = set()
        cursor = JournalCursor(self._descriptor)
        for line in cursor.lines():
            if isinstance(line, Row):
                names.update(line.metrics)
        return names

    def unread_points(self) -> int:
        """Estimate the number of points in the unread part of the file."""
        unread_bytes = os.fstat(self._descriptor).st_size - self._reader.offset
        return unread_bytes * self._points_read // self._reader.offset

    def missing_end(self, run: Any) -> list[Line]:
        """Return the last lines for a trainer that died without writing them.

        If the disk was full, the end of the run may be in the store but not in the
        file. In this case, the run's status and end time are kept. Otherwise the run is
        ended as KILLED, with the reason in the tag `failure`.

        Args:
            run: the run as it was read from the store.
        """
        info = run.info
        unwritten_segment = run.data.tags.get(UNWRITTEN)
        if unwritten_segment == str(self._segment) and info.end_time is not None:
            end = End(info.status, time=info.end_time)
            self.status = end.end
            return [end]
        failure = self.damage
        if not failure:
            failure = (
                f"The process ended without a message after update {self._last_step}."
            )
        self.status = "KILLED"
        end = End(self.status, time=int(time.time() * 1000))
        return [Tags({"failure": failure}), end]

    def _followed(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Yield lines up to the first damaged one, and follow the state of the run."""
        try:
            for line in lines:
                self._follow(line)
                yield line
        except FormError as error:
            self.damage = f"The journal cannot be read further: {error}."

    def _follow(self, line: Line) -> None:
        match line:
            case Row():
                self._last_step = max(line.step, self._last_step)
                self._points_read += len(line.metrics)
            case Resume():
                self._segment += 1
                self.status = None
            case End(status):
                self.status = status
