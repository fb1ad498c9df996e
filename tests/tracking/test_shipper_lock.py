"""A run is resumed while the shipper of its earlier trainer still ships it."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
from contextlib import closing

import pytest

from pipeline.__main__ import main
from pipeline.common.errors import NOT_SHIPPED, StoreError
from pipeline.tracking import journal as journal_module
from pipeline.tracking import journal_file
from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_file import JOURNAL_NAME, SHIPPER, LockedPast
from pipeline.tracking.journal_lines import Resume
from pipeline.tracking.run_creation import RunDirError
from pipeline.tracking.shipper_lock import NO_ROWS, lock_as_shipper
from pipeline.tracking.shipper_protocol import (
    Attached,
    Failed,
    Failing,
    Opened,
    Progress,
)
from pipeline.tracking.uploader import Uploader
from tests.tracking.memory_store import MemoryStore, lines

LIMIT = 0.4  # seconds without progress


@pytest.fixture
def path(tmp_path):
    """The journal of a run whose trainer was killed."""
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in lines(end=False):
        writer.write(line)
    writer.close()
    return tmp_path / JOURNAL_NAME


@pytest.fixture
def other_shipper(path):
    """A process that has locked the journal as its shipper; it ends if it is killed."""
    fork = multiprocessing.get_context("fork")
    is_locked = fork.Event()

    def hold():
        descriptor = os.open(path, os.O_RDWR)
        assert journal_file.lock(descriptor, SHIPPER)
        is_locked.set()
        fork.Event().wait(60)

    process = fork.Process(target=hold)
    process.start()
    assert is_locked.wait(30)
    yield process
    process.kill()
    process.join()


def locked(path, stored):
    """Return whether the journal could be locked, and what was told and reported."""
    told = []
    reported = []
    descriptor = os.open(path, os.O_RDWR)
    try:
        is_locked = lock_as_shipper(
            descriptor, stored, LIMIT, told.append, reported.append
        )
    finally:
        os.close(descriptor)
    return is_locked, told, set(reported)


def test_it_waits_as_long_as_rows_arrive(path, other_shipper):
    looks = itertools.count()

    def stored():
        look = next(looks)
        if look == 30:  # far beyond the limit
            other_shipper.kill()
        return str(look)

    is_locked, told, reported = locked(path, stored)
    assert is_locked
    assert len(told) >= 25
    assert reported == set()


def test_it_gives_up_once_no_more_rows_arrive(path, other_shipper):
    looks = itertools.chain(["1", "2"], itertools.repeat("3"))
    is_locked, told, reported = locked(path, lambda: next(looks))
    assert (is_locked, told, reported) == (False, [None, None], {NO_ROWS})


def test_a_store_that_does_not_answer_is_the_reason(path, other_shipper):
    def stored():
        raise OSError("no route")

    assert locked(path, stored) == (False, [], {"no route"})


def test_a_value_that_is_no_number_is_no_progress(path, other_shipper):
    """NaN is not equal to itself, so it looked like a new value."""
    store = MemoryStore()
    store.create_run("1", 1, {"journal": "j"}, "one")
    snapshot = store._snapshot

    def with_nan():
        run = snapshot()
        run.data.metrics = {"train/loss": math.nan * len(run.data.tags)}
        return run

    store._snapshot = with_nan
    told = []
    with pytest.raises(RunDirError, match="is being shipped by another process"):
        Uploader(store, path, may_exist=True, seconds=LIMIT, tell=told.append)
    assert told == []


def test_an_upload_waits_for_another_one_whose_rows_arrive(path, other_shipper):
    store = MemoryStore()
    store.create_run("1", 1, {"journal": "j"}, "one")
    find_run = store.find_run
    looks = itertools.count()

    def more(*arguments):
        look = next(looks)
        store.set_tag("r", "look", str(look))
        if look == 20:
            other_shipper.kill()
        return find_run(*arguments)

    store.find_run = more
    told = []
    uploader = Uploader(store, path, may_exist=True, seconds=LIMIT, tell=told.append)
    with closing(uploader):
        assert told.count(None) >= 15


class Waiting:
    """A shipper that waits for another one: one answer per tenth of a second."""

    answers: tuple = ()

    def __init__(self, opening):
        self.queue = [Opened(), *Waiting.answers]

    def answer(self, seconds):
        journal_module.time.sleep(min(0.1, seconds))
        return self.queue.pop(0) if self.queue else None

    def send(self, command):
        pass

    close = terminate = lambda self: None


def resumed(path, monkeypatch, answers):
    """Resume the run; return the journal."""
    monkeypatch.setattr(journal_module, "ShipperProcess", Waiting)
    monkeypatch.setattr(Waiting, "answers", answers)
    past = LockedPast.open(path.parent)
    try:
        journal = Journal("http://me:word@x", "e", patience=0.5)
        journal.ready()
        journal.resume(past, {})
    except BaseException:
        past.close()
        raise
    return journal


def test_a_resume_waits_as_long_as_rows_arrive(path, monkeypatch, capsys):
    monkeypatch.setattr(journal_module, "SILENCE", 0.2)
    answers = [*[Progress(None)] * 10, Attached("r", "1")]
    journal = resumed(path, monkeypatch, answers)
    journal._writer.close()
    lines = capsys.readouterr().err.splitlines()
    assert set(lines) == {
        "still waiting: another process ships earlier rows of this run"
    }
    with path.open("rb") as file:
        *_, last = journal_file.LineReader(file.fileno()).lines()
    assert isinstance(last, Resume)


def test_a_resume_without_rows_ends_in_a_line(path, monkeypatch):
    before = path.read_bytes()
    with pytest.raises(StoreError) as caught:
        resumed(path, monkeypatch, [Progress(None), Failing(NO_ROWS)])
    assert str(caught.value) == (
        f"the store http://***@x did not accept the run ({NO_ROWS}), so it does not "
        "continue; upload what the run directory has with: pipeline sync "
        f"{path.parent} 'tracking.uri=http://***@x'"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize(("has_trained", "status"), [(True, NOT_SHIPPED), (False, 1)])
def test_the_exit_status_says_whether_the_run_has_trained(
    monkeypatch, capsys, has_trained, status
):
    def fails(arguments):
        raise StoreError("the store did not accept the run", has_trained=has_trained)

    monkeypatch.setattr("pipeline.cli.resume.resume", fails)
    assert main(["resume", "run"]) == status
    assert capsys.readouterr().err == "pipeline: the store did not accept the run\n"


def test_a_new_run_that_is_not_accepted_does_not_train(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "ShipperProcess", Waiting)
    monkeypatch.setattr(Waiting, "answers", [Failed("no route")])
    journal = Journal("http://x", "e")
    journal.ready()
    with pytest.raises(StoreError, match=r"\(no route\), so it does not train") as told:
        journal.start(tmp_path / JOURNAL_NAME, journal_module.RunStart(experiment="e"))
    assert not told.value.has_trained
