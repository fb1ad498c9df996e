"""Ctrl-C at any point of `LineWriter.write`: no line is lost, doubled or damaged."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from pipeline.tracking import journal_file
from pipeline.tracking.journal_file import JOURNAL_NAME, Past
from tests.tracking.test_journal_file import START, lines, read

FILE = journal_file.__file__
PARTS = 6  # bytes of a line that a disk takes at once, in these tests


class CtrlC:
    """Raises a KeyboardInterrupt at the n-th step of Python in journal_file.py.

    A step is a line or the return of a function.
    """

    def __init__(self, step: int):
        self.left = step

    def __call__(self, frame, event, _argument):
        if frame.f_code.co_filename != FILE:
            return None
        if event in ("line", "return"):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(folder, step):
    """Write four rows, with an interrupt in the third; return whether there was one."""
    folder.mkdir()
    writer = journal_file.create(folder / JOURNAL_NAME)
    first, second, third, fourth = lines(4)
    for line in (START, first, second):
        writer.write(line)
    tracer = CtrlC(step)
    sys.settrace(tracer)
    try:
        writer.write(third)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    writer.write(fourth)
    assert writer.close()
    return tracer.left <= 0


def steps_of(folder):
    """Return the steps of the rows in the file; it must have no damage."""
    past = Past.read(folder)
    assert past.damage == ""
    return [line.step for line in read(folder / JOURNAL_NAME)[0][1:]]


@pytest.mark.parametrize("parts", [False, True], ids=["whole lines", "parts of lines"])
def test_a_line_is_there_once_or_not_at_all(tmp_path, monkeypatch, parts):
    write = os.write
    if parts:
        monkeypatch.setattr(os, "write", lambda file, text: write(file, text[:PARTS]))
    found = []
    step = 1
    while interrupted(tmp_path / str(step), step):
        found.append(steps_of(tmp_path / str(step)))
        step += 1
    assert len(found) > 10
    # Once the line is kept, it is in the file, whatever comes in between.
    kept = found.index([1, 2, 3, 4])
    assert found == kept * [[1, 2, 4]] + (len(found) - kept) * [[1, 2, 3, 4]]
    assert kept < len(found)


def test_an_interrupt_after_the_bytes_are_written_does_not_double_them(
    tmp_path, monkeypatch
):
    write = os.write
    left = [1]

    def then_ctrl_c(file, text):
        count = write(file, text)
        if left.pop():
            raise KeyboardInterrupt
        return count

    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    writer.write(START)
    monkeypatch.setattr(os, "write", then_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        writer.write(lines(2)[0])
    monkeypatch.setattr(os, "write", write)
    writer.write(lines(2)[1])
    assert writer.close()
    assert steps_of(tmp_path) == [1, 2]


def test_a_line_of_which_the_disk_took_a_part_is_written_in_its_place(
    tmp_path, monkeypatch
):
    write = os.write
    space = [100]

    def full(file, text):
        count = min(len(text), space[0])
        space[0] -= count
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, text[:count])

    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    writer.write(START)
    monkeypatch.setattr(os, "write", full)
    for line in lines(3):
        writer.write(line)
    in_file = (tmp_path / JOURNAL_NAME).read_text()
    waiting = writer.unwritten()
    position = writer.position
    monkeypatch.setattr(os, "write", write)
    writer.flush()
    assert writer.position == position
    content = (tmp_path / JOURNAL_NAME).read_text()
    assert len(content) == position.offset
    # The text that waited began within a line.
    assert content == in_file + waiting
    assert not in_file.endswith("\n")
    assert steps_of(tmp_path) == [1, 2, 3]
