"""The file of a journal.

A process dies, a disk fills, a byte flips: what is left of it.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import time

import pytest

from pipeline.common.errors import ConfigError
from pipeline.common.recorded import FormError
from pipeline.tracking import journal_file, journal_lines
from pipeline.tracking.journal_file import JOURNAL_NAME, LineReader, LockedPast, Past

START = {
    "start": {
        "format": 1,
        "store": "sqlite:///x",
        "experiment": "e",
        "params": {},
        "tags": {"journal": "1"},
    }
}


def lines(number):
    return [
        {"time": step, "step": step, "metrics": {"train/loss": 1 / step}}
        for step in range(1, number + 1)
    ]


def written(folder, number=20):
    folder.mkdir(exist_ok=True)
    writer = journal_file.create(folder / JOURNAL_NAME)
    for line in [START, *lines(number)]:
        writer.write(line)
    writer.close()
    return folder / JOURNAL_NAME


def read(path):
    """Return the lines that are read, and the error for the first one that is not."""
    read_lines = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for line in LineReader(descriptor).lines():
            read_lines.append(line)
    except FormError as error:
        return read_lines, str(error)
    finally:
        os.close(descriptor)
    return read_lines, ""


def test_every_byte_counts_wherever_it_is(tmp_path):
    path = written(tmp_path)
    content = path.read_bytes()
    intact, error = read(path)
    assert (len(intact), error) == (21, "")
    chance = random.Random(0)
    ends = [number for number, byte in enumerate(content) if byte == ord("\n")]
    anywhere = [chance.randrange(len(content)) for _ in range(300)]
    for place in [0, 5, 12, *ends, *anywhere]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        found, error = read(path)
        before = content[:place].count(b"\n")
        assert found == intact[:before], place
        if place != len(content) - 1:
            assert error == f"line {before + 1} is not as it was written"

        cut = place + chance.randrange(1, 200)
        path.write_bytes(content[:place] + content[cut:])
        found, _ = read(path)
        assert found == intact[: len(found)], (place, cut)
        assert len(found) <= before + 1


def test_half_a_line_is_written_over(tmp_path):
    path = written(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    past = LockedPast.open(tmp_path)
    assert (max(past.updates), past.damage) == (19, "")
    writer = past.truncated_writer()
    writer.write(lines(20)[-1])
    writer.close()
    assert path.read_bytes() == content


def test_a_line_longer_than_what_is_read_at_once(tmp_path):
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in (START, {"tags": {"long": "x" * 300_000}}, *lines(3)):
        writer.write(line)
    assert len(read(tmp_path / JOURNAL_NAME)[0]) == 5


def test_a_journal_of_before_is_refused(tmp_path):
    (tmp_path / JOURNAL_NAME).write_text(
        '{"time":1,"start":{"experiment":"e"}}\n{"time":2,"step":1,"metrics":{}}\n'
    )
    with pytest.raises(
        ConfigError,
        match=r"must have a journal of format 1 \(it was written by an earlier version\)",
    ):
        Past.read(tmp_path)


@pytest.mark.parametrize(
    "crafted",
    [
        {"start": 5},
        {"metrics": 5, "step": 1},
        {"tags": 5},
        {"metrics": {}, "step": "x"},
    ],
)
def test_a_line_of_another_form_is_damage(tmp_path, crafted):
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in (START, crafted):
        writer.write(line)
    writer.close()
    past = Past.read(tmp_path)
    assert past.damage.startswith("line 2: ")


def test_one_writer_until_it_dies(tmp_path):
    """A writer that is killed is gone, even if a process that it forked lives on."""
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    child = fork.Value("i", 0)

    def write():
        journal_file.create(tmp_path / JOURNAL_NAME).write(START)
        if pid := os.fork():
            child.value = pid
            ready.set()
        time.sleep(60)

    process = fork.Process(target=write)
    process.start()
    assert ready.wait(30)
    try:
        with pytest.raises(ConfigError, match="is still running"):
            Past.read(tmp_path)
        with pytest.raises(ConfigError, match="is still running"):
            LockedPast.open(tmp_path)
        rule = "hydra.run.dir must not be the directory of a run that is still running"
        with pytest.raises(ConfigError, match=rule):
            LockedPast.open(tmp_path, "hydra.run.dir")
        start = Past.read(tmp_path, running=True).start
        assert start == journal_lines.parsed(START).start
        process.kill()
        process.join()
        past = LockedPast.open(tmp_path)
        past.close()
        Past.read(tmp_path)
        assert os.path.exists(f"/proc/{child.value}")
    finally:
        os.kill(child.value, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_a_full_disk_keeps_lines_waiting(tmp_path, capsys):
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path], check=True
    )
    try:
        filler = tmp_path / "filler"
        writer = journal_file.create(tmp_path / JOURNAL_NAME)
        writer.write(START)
        filler.write_bytes(bytes(48 * 1024))
        rows = lines(400)
        for row in rows[:300]:
            writer.write(row)
        assert writer.unwritten()
        assert capsys.readouterr().err.count("its lines wait in memory") == 1
        on_disk, error = read(tmp_path / JOURNAL_NAME)
        for row, line in zip(rows, on_disk[1:], strict=False):
            assert line == journal_lines.parsed(row)
        assert error == ""
        filler.unlink()
        for row in rows[300:]:
            writer.write(row)
        assert not writer.unwritten()
        assert len(read(tmp_path / JOURNAL_NAME)[0]) == 401
        writer.close()
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_disk_that_stays_full_ends_the_run(tmp_path, monkeypatch):
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    monkeypatch.setattr(journal_file, "MOST_WAITING", 1000)

    def write_to_a_full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write_to_a_full_disk)
    for line in lines(8):
        writer.write(line)
    with pytest.raises(OSError, match="No space left"):
        writer.write({"tags": {"long": "x" * 1000}})


def test_a_journal_without_its_first_line_is_begun_anew(tmp_path):
    """Its trainer was killed before it had a run."""
    (tmp_path / JOURNAL_NAME).write_bytes(b'{"crc":"12')
    assert not journal_file.has_begun(tmp_path / JOURNAL_NAME)
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    writer.write(START)
    assert journal_file.has_begun(tmp_path / JOURNAL_NAME)
    writer.close()
    assert Past.read(tmp_path).damage == ""
