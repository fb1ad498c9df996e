"""The shipper: what is optional never keeps it from shipping."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from pipeline.tracking import journal_file, shipper, system_metrics
from pipeline.tracking.journal_file import JOURNAL_NAME
from pipeline.tracking.system_metrics import SystemSampler
from pipeline.tracking.uploader import Uploader
from tests.tracking.memory_store import UPDATES, MemoryStore, lines


@pytest.fixture
def path(tmp_path):
    """The journal of a run that has ended."""
    (tmp_path / "note.txt").write_text("a note")
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in lines():
        writer.write(line)
    writer.close()
    return tmp_path / JOURNAL_NAME


def followed(store, path, sampler, monkeypatch):
    """Ship a journal as the shipper does once its trainer has ended."""
    reading, writing = os.pipe()
    os.close(writing)
    with open(reading) as stdin, closing(Uploader(store, path, may_exist=False)) as run:
        monkeypatch.setattr("sys.stdin", stdin)
        shipper._follow(run, sampler)
        run.finish(60.0)


@pytest.mark.parametrize("fails", ["made", "read"])
def test_a_sampler_that_raises_does_not_end_shipping(path, monkeypatch, capsys, fails):
    """The error ended the shipper before the first row, and each one after it."""

    def broken(*_):
        raise RuntimeError("the driver is gone")

    def system_sampler(*_):
        if fails == "made":
            broken()
        return broken

    monkeypatch.setattr(system_metrics, "system_sampler", system_sampler)
    store = MemoryStore()
    sampler = SystemSampler("memory", "r", None)
    followed(store, path, sampler, monkeypatch)
    assert sampler.sample() == {}
    assert (store.run["status"], len(store.points)) == ("FINISHED", 2 * UPDATES)
    said = "system metrics cannot be sampled: the driver is gone\n"
    assert capsys.readouterr().err == said  # once


def test_a_sampler_that_works_again_is_read_again(monkeypatch):
    answers = [RuntimeError("not now"), {"cpu": 1.0}]

    def read():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(system_metrics, "system_sampler", lambda *_: read)
    sampler = SystemSampler("memory", "r", None)
    assert [sampler.sample(), sampler.sample()] == [{}, {"cpu": 1.0}]


def test_samples_are_points_with_their_number_as_the_step(path, monkeypatch):
    monkeypatch.setattr(system_metrics, "system_sampler", lambda *_: lambda: {"cpu": 1})
    store = MemoryStore()
    followed(store, path, SystemSampler("memory", "r", None), monkeypatch)
    steps = [step for key, step, _ in store.points if key == "system/cpu"]
    assert steps == list(range(len(steps)))
    assert steps
