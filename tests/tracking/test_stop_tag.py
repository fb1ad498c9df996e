"""The tag `stop` of a run in the store reaches its trainer, and does not remain."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest

from pipeline.common.signals import STOP_TAG
from pipeline.tracking import journal_file, shipper
from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_file import JOURNAL_NAME, LockedPast
from pipeline.tracking.journal_lines import Row
from pipeline.tracking.shipper_protocol import Attached, Ship, StopRequested
from pipeline.tracking.uploader import Uploader
from tests.running import Store, wait
from tests.tracking.memory_store import UPDATES, MemoryStore, lines
from tests.tracking.shipped import opened, train
from tests.tracking.test_journal import begun, write


class TaggedStore(MemoryStore):
    """A store in which the run gets the tag `stop` after some questions for it.

    Attributes:
        questions: how often the run was read so far.
        unanswered: how many of the first questions fail.
    """

    questions = 0
    unanswered = 0

    def get_run(self, run_id):
        self.questions += 1
        if self.questions <= self.unanswered:
            raise OSError("the store is away")
        if self.questions == 4:
            self.run["tags"][STOP_TAG] = ""
        return super().get_run(run_id)


def test_the_trainer_is_told_once_and_the_tag_is_removed_at_the_end(
    tmp_path, monkeypatch
):
    """Questions that fail neither end the shipper nor keep it from shipping."""
    (tmp_path / "note.txt").write_text("a note")
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in lines(end=False):
        writer.write(line)
    writer.close()
    store = TaggedStore()
    store.unanswered = 2
    reading, writing = os.pipe()
    answers = []

    def answer(message):
        answers.append(message)
        if message == StopRequested():
            assert store.questions == 4
            os.close(writing)  # the trainer ends

    monkeypatch.setattr(shipper, "_answer", answer)
    monkeypatch.setattr(shipper, "INTERVAL", 0.01)
    with (
        open(reading) as stdin,
        closing(Uploader(store, tmp_path / JOURNAL_NAME, may_exist=False)) as uploader,
    ):
        monkeypatch.setattr("sys.stdin", stdin)
        shipper._follow(uploader, None)
        assert STOP_TAG in store.run["tags"]
        assert len(store.points) == 2 * UPDATES
        uploader.finish(60.0)
    assert answers.count(StopRequested()) == 1
    assert STOP_TAG not in store.run["tags"]
    assert store.run["status"] == "KILLED"


@pytest.mark.parametrize("resumes", [True, False])
def test_a_resumed_run_loses_the_tag_before_it_trains(tmp_path, monkeypatch, resumes):
    """A shipper that replaces another one keeps the tag: it is for the running trainer."""
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in lines(end=False):
        writer.write(line)
    store = MemoryStore()
    with closing(Uploader(store, tmp_path / JOURNAL_NAME, may_exist=False)):
        store.run["tags"][STOP_TAG] = "true"
    is_tagged = []

    def answer(message):
        if isinstance(message, Attached):
            is_tagged.append(STOP_TAG in store.run["tags"])

    reading, writing = os.pipe()
    os.close(writing)
    command = Ship(str(tmp_path / JOURNAL_NAME), True, "r", resumes)
    monkeypatch.setattr(shipper, "_answer", answer)
    with open(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        shipper._ship(store, command, 60.0)
    writer.close()
    assert is_tagged == [not resumes]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_shippers")
def test_a_tag_from_before_a_run_was_resumed_does_not_end_it(tmp_path):
    journal = begun(tmp_path)
    write(journal, 1)
    assert journal.close("KILLED") is None
    store = Store(tmp_path)
    run_id = store.run().info.run_id
    store.client.set_tag(run_id, STOP_TAG, "too late")

    journal = begun_again(tmp_path)
    assert STOP_TAG not in store.run().data.tags
    write(journal, 2)
    journal.ship_now()
    wait(lambda: store.run().data.metrics["train/loss"] == 0.5, 30)
    assert not journal.stop_requested()
    store.client.set_tag(run_id, STOP_TAG, "now")
    wait(journal.stop_requested, 30)
    assert journal.close("KILLED") is None
    assert STOP_TAG not in store.run().data.tags
    assert store.run().info.status == "KILLED"


def begun_again(folder):
    """Return the journal of the run in `folder`, which is resumed."""
    past = LockedPast.open(folder)
    journal = Journal(f"sqlite:///{folder}/mlruns/mlflow.db", "pipeline")
    journal.ready()
    journal.resume(past, {"after": 1})
    return journal


@pytest.mark.slow
@pytest.mark.usefixtures("impatient_requests", "forked_shippers")
def test_a_store_that_hangs_slows_no_update(tmp_path, proxy, request):
    journal = opened(proxy.address, tmp_path, request.node.name)
    train(journal, 1, 5)
    proxy.harm("hanging")
    time.sleep(6)  # the shipper is in a request
    begin = time.monotonic()
    for step in range(6, 1006):
        journal.write(Row(step, {"train/loss": 1.0}))
        assert not journal.stop_requested()
    assert time.monotonic() - begin < 1
    proxy.heal()
    assert journal.close("FINISHED") is None
