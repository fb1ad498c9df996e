"""The messages of a shipper, and what the trainer does after each failure."""

from __future__ import annotations

import pytest

from pipeline.common.errors import ConfigError, StoreError
from pipeline.tracking import journal, shipper_protocol
from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_file import JOURNAL_NAME
from pipeline.tracking.journal_lines import RunStart
from pipeline.tracking.shipper_protocol import (
    AddLines,
    Attached,
    Failed,
    Failing,
    Fault,
    Open,
    Opened,
    Progress,
    Ship,
    ShipNow,
    Shipped,
    StopRequested,
)

MESSAGES = [
    Open("sqlite:///x", "e", 60.0, None),
    Open("sqlite:///x", "e", 60.0, ["s3://bucket"]),
    Ship("run/journal.jsonl", may_exist=True, run_id="", resumes=True),
    ShipNow(),
    AddLines('{"crc":"…"}\n'),
    Opened(),
    Attached("r", "1"),
    Progress(3),
    Failing("no\nanswer", 3),
    StopRequested(),
    Shipped(7, "why"),
    Failed("gone", Fault.RUN_DIR, "RUN_DIR", "is deleted"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_a_message_is_one_line_and_is_read_as_it_was(message):
    line = message.encoded()
    assert "\n" not in line
    assert shipper_protocol.decoded(line) == message


@pytest.mark.parametrize(
    "line", ["", '{"message": "Ship', "[]", "3", "{}", '{"message": "Else"}']
)
def test_what_is_no_message_is_an_error(line):
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|not a message"):
        shipper_protocol.decoded(line)


class Shipper:
    """A shipper with prepared answers, one list for each process."""

    process = None
    answers: tuple[list, ...] = ()
    started = 0

    def __init__(self, opening):
        self.queue = list(Shipper.answers[Shipper.started])
        Shipper.started += 1

    def answer(self, seconds):
        return self.queue.pop(0)

    def send(self, command):
        pass

    def alive(self):
        return True

    close = terminate = lambda self: None


@pytest.fixture
def answered(monkeypatch):
    """Return a function that prepares the answers of shippers in turn."""
    monkeypatch.setattr(journal, "ShipperProcess", Shipper)
    monkeypatch.setattr(journal, "RECONNECT", 0.0)
    monkeypatch.setattr(Shipper, "started", 0)

    def prepare(*answers):
        monkeypatch.setattr(Shipper, "answers", answers)

    return prepare


def begun(tmp_path, when_unreachable="refuse"):
    journal = Journal("http://x", "e", when_unreachable=when_unreachable)
    journal.ready()
    return journal.start(tmp_path / JOURNAL_NAME, RunStart(experiment="e"))


DIED = Failed("it died", Fault.DIED)
DELETED = Failed("deleted", Fault.CONFIG, "tracking.experiment", "is deleted")


@pytest.mark.parametrize("when_unreachable", ["refuse", "wait", "offline"])
def test_a_shipper_that_dies_is_replaced_whatever_the_user_wants(
    tmp_path, answered, when_unreachable
):
    answered([DIED], [Opened(), DIED], [Opened(), Attached("r", "1")])
    assert begun(tmp_path, when_unreachable).run_id == "r"


@pytest.mark.parametrize("when_unreachable", ["refuse", "wait", "offline"])
def test_a_config_that_is_wrong_is_final(tmp_path, answered, when_unreachable):
    answered([DELETED])
    with pytest.raises(ConfigError, match=r"tracking\.experiment is deleted"):
        begun(tmp_path, when_unreachable)


def test_a_store_that_fails_is_refused_waited_for_or_left(tmp_path, answered):
    away = Failed("no route", rule="must be a store that answers (no route)")
    answered([away])
    with pytest.raises(ConfigError, match=r"tracking.uri must .*\(no route\)"):
        begun(tmp_path)
    answered([away], [away], [Opened(), Attached("r", "1")])
    Shipper.started = 0
    assert begun(tmp_path, "wait") is not None
    answered([away])
    Shipper.started = 0
    (tmp_path / "offline").mkdir()
    assert begun(tmp_path / "offline", "offline") is None


@pytest.mark.parametrize("when_unreachable", ["refuse", "wait", "offline"])
def test_a_run_directory_that_cannot_be_shipped_is_named(
    tmp_path, answered, when_unreachable
):
    answered([Opened(), Failed("deleted", Fault.RUN_DIR, "RUN_DIR", "is deleted")])
    with pytest.raises(ConfigError, match=f"RUN_DIR is deleted. .*{tmp_path.name}"):
        begun(tmp_path, when_unreachable)


def test_a_store_that_rejects_the_run_again_and_again_is_an_error(tmp_path, answered):
    rejects = [Opened(), Failed("a param is too long")]
    answered(*[rejects] * (journal.LIVES + 1))
    with pytest.raises(StoreError, match=r"accept the run \(a param is too long\)"):
        begun(tmp_path, "wait")
    assert Shipper.started == journal.LIVES + 1
