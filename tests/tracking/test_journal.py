"""A journal brings its run to the store once and completely.

Meanwhile the trainer, the shipper or the store is killed, stopped or away.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import sys
import threading
import time
import zlib
from contextlib import closing

import pytest
from mlflow.tracking import MlflowClient

from pipeline.common.errors import NOT_SHIPPED, ConfigError, StoreError
from pipeline.common.sqlite_uri import absolute
from pipeline.tracking import journal_file
from pipeline.tracking import store as tracking_store
from pipeline.tracking.foreign_store import DEFAULT_STORE, OwnStore, sync_command
from pipeline.tracking.journal import Journal
from pipeline.tracking.journal_file import JOURNAL_NAME
from pipeline.tracking.journal_lines import Artifact, Row, RunStart, Tags
from pipeline.tracking.shipper_protocol import Failed, Fault, Progress, Shipped
from pipeline.tracking.sync_run import sync_run
from pipeline.tracking.uploader import Uploader
from tests.running import Store, environment, one_process, pipeline, python, wait
from tests.shared import place_store, warm_address
from tests.warm import Python

pytestmark = pytest.mark.usefixtures("forked_shippers")
RUN = {
    "experiment": "pipeline",
    "name": "one",
    "params": {"a": "1"},
    "tags": {},
    "system_metrics": False,
    "segment": {"after": 0, "cut": {"effective_batch_size": 8}},
}


def begun(folder):
    """Return the journal of a run in `folder`, whose store exists.

    The test may harm its shipper.
    """
    place_store(folder)
    journal = Journal(f"sqlite:///{folder}/mlruns/mlflow.db", "pipeline")
    journal.ready()
    journal.start(folder / JOURNAL_NAME, RunStart(**RUN))
    return journal


def write(journal, *steps):
    for step in steps:
        metrics = {"train/loss": 1.0 / step, "train/learning_rate": 0.1}
        journal.write(Row(step, metrics))


def points(folder):
    store = Store(folder)
    (run,) = store.runs()
    return run.info.status, list(store.history(run, "train/loss"))


def synced(folder, *arguments, status=0):
    """Run `pipeline sync` in a process of its own, and return what it printed.

    Hydra closes the stream to which absl logs.
    """
    return pipeline("sync", str(folder), *arguments, cwd=folder, status=status).stderr


def test_a_run_that_mlflow_refuses_is_failed(tmp_path):
    place_store(tmp_path)
    journal = Journal(f"sqlite:///{tmp_path}/mlruns/mlflow.db", "pipeline")
    journal.ready()
    run = RunStart(**RUN | {"params": {"a//b": "1"}})
    with pytest.raises(
        StoreError, match=r"the store .* did not accept the run .*: pipeline sync "
    ):
        journal.start(tmp_path / JOURNAL_NAME, run)
    assert Store(tmp_path).run().info.status == "FAILED"


@pytest.mark.slow
def test_a_new_store_is_put_in_place_at_once(tmp_path):
    journal = Journal(f"sqlite:///{tmp_path}/mlruns/mlflow.db", "pipeline")
    journal.ready()
    assert not (tmp_path / "mlruns").exists()  # until a run starts
    journal.start(tmp_path / JOURNAL_NAME, RunStart(**RUN))
    assert journal.close("FINISHED") is None
    assert Store(tmp_path).run().info.status == "FINISHED"
    assert not list((tmp_path / "mlruns").glob("*.new"))


def test_a_journal_is_of_one_run(tmp_path):
    (tmp_path / JOURNAL_NAME).write_text("{}\n")
    journal = Journal(f"sqlite:///{tmp_path}/mlruns/mlflow.db", "pipeline")
    journal.ready()
    with pytest.raises(ConfigError, match="must be a folder without a run in it"):
        journal.start(tmp_path / JOURNAL_NAME, RunStart(**RUN))
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.slow
def test_a_shipper_that_is_killed_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.tracking.journal.REVIVE", 0.0)
    journal = begun(tmp_path)
    first = journal.shipper.process.pid
    write(journal, *range(1, 1500))
    wait(lambda: len(points(tmp_path)[1]) > 400, 30)  # in the middle of the rows
    os.kill(first, signal.SIGKILL)
    wait(lambda: not journal.shipper.alive(), 10)
    write(journal, *range(1500, 3000))
    assert journal.shipper.process.pid != first
    assert journal.close("FINISHED") is None
    assert points(tmp_path) == ("FINISHED", list(range(1, 3000)))


def test_a_shipper_that_is_killed_before_it_answers_is_replaced(tmp_path):
    place_store(tmp_path)
    journal = Journal(f"sqlite:///{tmp_path}/mlruns/mlflow.db", "pipeline")
    os.kill(journal.shipper.process.pid, signal.SIGKILL)
    journal.ready()
    os.kill(journal.shipper.process.pid, signal.SIGKILL)
    journal.start(tmp_path / JOURNAL_NAME, RunStart(**RUN))
    write(journal, *range(1, 50))
    assert journal.close("FINISHED") is None
    assert points(tmp_path) == ("FINISHED", list(range(1, 50)))


@pytest.mark.slow
def test_a_shipper_that_hangs_costs_no_more_than_the_patience(tmp_path):
    journal = begun(tmp_path)
    journal.patience = 3
    write(journal, *range(1, 50))
    os.kill(journal.shipper.process.pid, signal.SIGSTOP)
    assert journal.close("FINISHED") == "no answer within 3 s"
    assert not journal.shipper.alive()
    assert points(tmp_path)[0] == "RUNNING"
    synced(tmp_path)
    assert points(tmp_path) == ("FINISHED", list(range(1, 50)))


@pytest.mark.slow
def test_what_is_lost_with_its_store_is_shipped_anew(tmp_path):
    journal = begun(tmp_path)
    (tmp_path / "note.txt").write_text("here")
    for line in (
        Artifact("note.txt"),
        Artifact("nowhere.txt"),
        Tags({"mine": "1"}),
    ):
        journal.write(line)
    write(journal, *range(1, 30))
    # One artifact that cannot be read is no reason.
    assert journal.close("FINISHED") is None
    shutil.rmtree(tmp_path / "mlruns")
    place_store(tmp_path)
    statuses = []
    both = [
        threading.Thread(target=lambda: statuses.append(_sync_process(tmp_path)))
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert statuses == [0, 0]
    # MLflow keeps a database open, so this process has not looked before.
    again = Store(tmp_path).run()
    assert points(tmp_path) == ("FINISHED", list(range(1, 30)))
    assert (again.data.params, again.data.tags["mine"]) == ({"a": "1"}, "1")
    assert again.data.tags["not_shipped"] == "nowhere.txt: No such file or directory"
    lines = []
    for line in (tmp_path / JOURNAL_NAME).read_text().splitlines():
        lines.append(json.loads(line))
    (end,) = [line["time"] for line in lines if "end" in line]
    assert (again.info.start_time, again.info.end_time) == (lines[0]["time"], end)
    files = Store(tmp_path).client.list_artifacts(again.info.run_id)
    assert [file.path for file in files] == ["note.txt"]
    assert synced(tmp_path).endswith(
        f"0 points sent to the store; run {again.info.run_id} is FINISHED\n"
    )


def _sync_process(folder):
    return pipeline("sync", str(folder), cwd=folder, status=None).returncode


def test_points_that_the_store_lost_are_sent_again(tmp_path):
    journal = begun(tmp_path)
    write(journal, *range(1, 30))
    assert journal.close("FAILED") is None
    with sqlite3.connect(tmp_path / "mlruns" / "mlflow.db") as database:
        database.execute("DELETE FROM metrics WHERE step IN (7, 8, 21)")
    synced(tmp_path)
    assert points(tmp_path) == ("FAILED", list(range(1, 30)))


@pytest.mark.slow
def test_a_store_whose_file_is_moved_away_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.tracking.journal.REVIVE", 0.0)
    journal = begun(tmp_path)
    write(journal, *range(1, 30))
    (tmp_path / "mlruns").rename(tmp_path / "moved")
    write(journal, *range(30, 40))
    assert journal.close("FINISHED") is None
    assert points(tmp_path) == ("FINISHED", list(range(1, 40)))


def test_what_a_trainer_that_was_killed_has_written_is_closed_as_killed(tmp_path):
    """`pipeline sync` closes it when the shipper was killed too."""
    code = f"""
import os, signal
from tests.tracking.test_journal import begun, write
from pathlib import Path
journal = begun(Path({str(tmp_path)!r}))
write(journal, *range(1, 20))
for pid in (journal.shipper.process.pid, os.getpid()):
    os.kill(pid, signal.SIGKILL)
"""
    python("-c", code, cwd=tmp_path).communicate(timeout=120)
    assert points(tmp_path)[0] == "RUNNING"
    with (tmp_path / JOURNAL_NAME).open("a") as file:
        file.write('{"crc":"12')  # of the next row
    synced(tmp_path)
    assert points(tmp_path) == ("KILLED", list(range(1, 20)))
    failure = Store(tmp_path).run().data.tags["failure"]
    assert failure == "The process ended without a message after update 19."


@pytest.mark.slow
def test_a_damaged_journal_is_shipped_up_to_the_damage(tmp_path):
    journal = begun(tmp_path)
    os.kill(journal.shipper.process.pid, signal.SIGKILL)
    write(journal, *range(1, 20))
    journal._writer.close()
    text = (tmp_path / JOURNAL_NAME).read_text()
    damaged = text.replace('"step":11,', '"step":12,')
    assert damaged != text
    (tmp_path / JOURNAL_NAME).write_text(damaged)
    said = synced(tmp_path, status=4)
    number = [json.loads(line).get("step") for line in text.splitlines()].index(11) + 1
    assert f"line {number} is not as it was written" in said
    assert points(tmp_path) == ("KILLED", list(range(1, 11)))


@pytest.mark.slow
def test_a_run_that_never_reached_its_store(tmp_path, capsys):
    uri = "http://127.0.0.1:9"
    refused = Journal(uri, "pipeline")
    with pytest.raises(ConfigError, match="must be a store that answers"):
        refused.ready()
    refused.abandon()
    journal = Journal(uri, "pipeline", when_unreachable="offline")
    journal.ready()
    assert journal.start(tmp_path / JOURNAL_NAME, RunStart(**RUN)) is None
    write(journal, *range(1, 20))
    assert journal.close("FINISHED") == "the store was not contacted"
    assert "the run trains offline and is kept in" in capsys.readouterr().err
    place_store(tmp_path)
    # It still is not there.
    synced(tmp_path, f"tracking.uri={uri}", "tracking.patience=1", status=4)
    synced(tmp_path, f"tracking.uri=sqlite:///{tmp_path}/mlruns/mlflow.db")
    assert points(tmp_path) == ("FINISHED", list(range(1, 20)))


def test_a_sync_that_fails_keeps_no_lock(tmp_path):
    """A run that is resumed in this process has a shipper that needs the lock."""
    from pipeline.tracking.uploader import Uploader

    class Away:
        def client(self):
            raise ConnectionError("it is away")

    path = tmp_path / JOURNAL_NAME
    path.write_bytes(_shipped_journal())
    with pytest.raises(ConnectionError):
        Uploader(Away(), path, may_exist=True)
    opened = [
        os.path.realpath(f"/proc/self/fd/{descriptor}")
        for descriptor in os.listdir("/proc/self/fd")
    ]
    # Closing the file has released the lock.
    assert os.path.realpath(path) not in opened


@pytest.mark.slow
def test_a_wrong_sync_changes_nothing(tmp_path):
    old = b'{"time":1,"start":{}}\n'
    for name, text in {
        "old": old,
        "runs/lr=0.1": old,
        "here": _shipped_journal(),
    }.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / JOURNAL_NAME).write_bytes(text)
    expected = {
        "sync nowhere": "RUN_DIR must be a folder with a journal.jsonl in it. "
        "Received: 'nowhere'.",
        "sync old": "RUN_DIR must have a journal of format 1 "
        "(it was written by an earlier version). Received: 'old'.",
        "sync runs/lr=0.1": "RUN_DIR must have a journal of format 1 "
        "(it was written by an earlier version).",
        "sync --nonsense": "arguments must be those of pipeline sync: "
        "see pipeline sync --help. Received: '--nonsense'.",
        "sync here tracking.uri=sqlite:////x/y.db": "tracking.uri must be that of "
        "the journal in here, sqlite:",
    }
    for line, answer in one_process(
        {line: line for line in expected}, tmp_path
    ).items():
        assert answer["status"] == 2, answer
        assert (
            answer["err"].splitlines()[-1].startswith(f"pipeline: {expected[line]}")
        ), answer
        assert answer["changed"] == []


def _shipped_journal():
    crc = 0
    text = b""
    for line in (
        {
            "start": {
                "format": 1,
                "store": "sqlite:////a/b.db",
                "experiment": "e",
                "tags": {"journal": "1"},
            }
        },
        {"run": {"run_id": "1", "experiment_id": "1"}},
    ):
        body = (json.dumps(line)[1:] + "\n").encode()
        crc = zlib.crc32(body, crc)
        text += b'{"crc":"%08x",' % crc + body
    return text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_user_without_a_name_is_recorded():
    # Imported first: somebody without a name may not read what root may.
    asked = (
        "import os; from pipeline.tracking import provenance\n"
        "os.setuid(54321); print(provenance.origin()['mlflow.user'])"
    )
    names = ("LOGNAME", "USER", "LNAME", "USERNAME")
    process = Python(
        warm_address(),
        ["-c", asked],
        env={key: value for key, value in environment().items() if key not in names},
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "unknown\n"


def test_a_run_that_is_not_there_when_it_is_read_again_is_not_shipped(
    tmp_path, monkeypatch, capsys
):
    journal = begun(tmp_path)
    write(journal, 1)
    os.kill(journal.shipper.process.pid, signal.SIGKILL)
    journal._writer.close()
    # The store takes everything, and keeps nothing.
    monkeypatch.setattr(MlflowClient, "set_terminated", lambda *_: None)
    assert sync_run(str(tmp_path), OwnStore(journal.uri), 0.1, named=True) == 4
    assert (
        "when read again, the store has the run as RUNNING, not as KILLED"
        in capsys.readouterr().err
    )


class Slow:
    """A shipper that says every fifth of a second how many points are left."""

    process = None
    pid = 0

    def __init__(self, opening):
        self.left = 100_005

    def answer(self, seconds):
        if seconds <= 0.2:
            return None
        time.sleep(0.2)
        self.left -= 1
        return Progress(self.left) if self.left > 100_000 else Shipped(7)

    def alive(self):
        return True

    def send(self, command):
        pass

    close = terminate = lambda self: None


def test_the_end_waits_as_long_as_the_store_takes_points(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pipeline.tracking.journal.ShipperProcess", Slow)
    monkeypatch.setattr("pipeline.tracking.journal.SILENCE", 0.5)
    journal = Journal("http://127.0.0.1:9", "pipeline", patience=0.5)
    journal._writer = journal_file.create(tmp_path / JOURNAL_NAME)
    assert journal.close("FINISHED") is None  # after a second
    assert capsys.readouterr().err == "still shipping: about 100,002 points left\n"


def test_a_store_that_falls_behind_is_told_of_while_the_run_trains(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("pipeline.tracking.journal.ShipperProcess", Slow)
    monkeypatch.setattr("pipeline.tracking.journal.REVIVE", 0.0)
    journal = Journal("http://127.0.0.1:9", "pipeline")
    journal._writer = journal_file.create(tmp_path / JOURNAL_NAME)
    behind = iter([30_000, 39_000, 12, 70_000])
    monkeypatch.setattr(Slow, "answer", lambda *_: next(answers, None))
    for left in behind:
        answers = iter([Progress(left)])
        write(journal, 1)
    said = [line.split()[8] for line in capsys.readouterr().err.splitlines()]
    assert said == ["30,000", "70,000"]


def test_lines_of_several_threads_are_each_written_as_one(tmp_path, monkeypatch):
    """The user's code logs in threads of TensorFlow, while the loop writes its rows."""
    monkeypatch.setattr("pipeline.tracking.journal.ShipperProcess", Slow)
    journal = Journal("http://127.0.0.1:9", "pipeline")
    path = tmp_path / JOURNAL_NAME
    journal._writer = journal_file.create(path)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = []
        for first in range(1, 4_001, 1_000):
            steps = range(first, first + 1_000)
            threads.append(threading.Thread(target=write, args=(journal, *steps)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switching)
    journal._writer.close()
    with path.open("rb") as file:
        steps = [line.step for line in journal_file.LineReader(file.fileno()).lines()]
    assert sorted(steps) == list(range(1, 4_001))


class Dead(Slow):
    """A shipper that has ended with an error."""

    errors: tuple[str, ...] = ()

    def __init__(self, opening):
        self.answers = [Progress(3), *map(Failed, self.errors)]
        self.answers.append(Failed("without an answer", Fault.DIED))

    def answer(self, seconds):
        return self.answers.pop(0) if self.answers else None

    def alive(self):
        return False


def test_why_a_shipper_ended_while_the_run_trains_is_printed_once(
    tmp_path, monkeypatch, capsys
):
    """It was replaced every few seconds, for ever, without a word."""
    monkeypatch.setattr("pipeline.tracking.journal.ShipperProcess", Dead)
    monkeypatch.setattr("pipeline.tracking.journal.REVIVE", 0.0)
    monkeypatch.setattr(Dead, "errors", ("the store was moved",))
    journal = Journal("http://127.0.0.1:9", "pipeline")
    journal._writer = journal_file.create(tmp_path / JOURNAL_NAME)
    write(journal, 1, 2, 3)
    monkeypatch.setattr(Dead, "errors", ())
    write(journal, 4, 5, 6)
    assert capsys.readouterr().err.splitlines() == [
        "the shipper ended and is replaced: the store was moved",
        "the shipper ended and is replaced: without an answer",
    ]


@pytest.mark.slow
def test_a_sync_goes_on_as_long_as_the_store_takes_points(tmp_path, monkeypatch):
    """Every other request fails, for longer than the patience."""
    journal = begun(tmp_path)
    journal.abandon()
    write(journal, *range(1, 500))
    journal._writer.write({"end": "FINISHED"})
    monkeypatch.setattr("pipeline.tracking.uploader.RETRY", 0.01)
    monkeypatch.setattr("pipeline.tracking.uploader.POINTS_PER_REQUEST", 20)
    told = []
    log_batch = MlflowClient.log_batch
    tries = iter(range(1000))

    def harmed(*arguments, **options):
        time.sleep(0.02)
        if next(tries) % 2:
            raise ConnectionError("again")
        log_batch(*arguments, **options)

    monkeypatch.setattr(MlflowClient, "log_batch", harmed)
    uploader = Uploader(
        tracking_store.Store(journal.uri),
        tmp_path / JOURNAL_NAME,
        may_exist=True,
        tell=told.append,
    )
    uploader.finish(0.7)
    uploader.close()
    assert points(tmp_path) == ("FINISHED", list(range(1, 500)))
    assert told[0] > 500
    assert told[-1] == 0


def crafted(folder, store, **changes):
    """A journal in `folder` as somebody else might make it, with right checksums."""
    folder.mkdir()
    start = {"format": 1, "store": store, **RUN, "tags": {"journal": "j"}}
    lines = [
        {"time": 1, "start": start},
        *({"time": 2, "artifact": name} for name in changes.get("artifacts", ())),
    ]
    crc = 0
    texts = []
    for line in [*lines, {"time": 3, "end": "FINISHED"}]:
        rest = json.dumps(line, separators=(",", ":")).encode()[1:] + b"\n"
        crc = zlib.crc32(rest, crc)
        texts.append(b'{"crc":"%08x",' % crc + rest)
    (folder / JOURNAL_NAME).write_bytes(b"".join(texts))


def test_a_journal_leads_to_no_store_but_the_users(tmp_path):
    """Nothing is sent to the host that a journal or the note of a sweep names.

    No database is made where they say.
    """
    with socket.create_server(("127.0.0.1", 0)) as evil:
        uri = f"http://127.0.0.1:{evil.getsockname()[1]}"
        crafted(tmp_path / "host", uri)
        crafted(tmp_path / "file", f"sqlite:///{tmp_path}/elsewhere.db")
        crafted(
            tmp_path / "query",
            f"postgresql://127.0.0.1/db?host=x&port={evil.getsockname()[1]}",
        )
        note = {"store": uri, "run_id": "a" * 32, "experiment_id": "1"}
        (tmp_path / "sweep" / "0").mkdir(parents=True)
        (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(note))
        crafted(tmp_path / "sweep" / "0" / "run", "sqlite:///nowhere.db")
        shutil.move(
            tmp_path / "sweep" / "0" / "run" / JOURNAL_NAME, tmp_path / "sweep" / "0"
        )
        rule = "tracking.uri must be that of the journal in"
        lines = {
            "sync host": f"{rule} host, {uri}; if that store is yours, add ",
            "sync file": f"{rule} file, sqlite:",
            "sync query trust.allow=[postgresql://127.0.0.1]": f"{rule} query, pos",
            "sync host trust.allow=[http://127.0.0.1]": f"{rule} host, http:",
        }
        answers = one_process({line: line for line in [*lines, "sync sweep"]}, tmp_path)
        for line, said in lines.items():
            assert (answers[line]["status"], answers[line]["changed"]) == (2, [])
            assert answers[line]["err"].splitlines()[-1].startswith(f"pipeline: {said}")
        assert answers["sync sweep"]["status"] == 4
        problem = (
            "the sweep is not closed in the store yet: "
            f"tracking.uri must be that of the sweep in sweep, {uri}"
        )
        assert problem in answers["sync sweep"]["err"]
        evil.settimeout(0)
        with pytest.raises(BlockingIOError):  # nobody has come
            evil.accept()


def test_a_run_that_is_complete_in_another_store_is_passed_over(tmp_path, capsys):
    """It was called incomplete, with status 4."""
    journal = begun(tmp_path)
    write(journal, 1, 2)
    assert journal.close("FINISHED") is None
    capsys.readouterr()
    elsewhere = OwnStore("sqlite:///elsewhere.db", (), on_command_line=False)
    assert sync_run(str(tmp_path), elsewhere, 1.0, named=False) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match=r"tracking\.uri must be that of the journal"):
        sync_run(str(tmp_path), elsewhere, 1.0, named=True)

    # Its own store is still asked: somebody may have deleted the run there.
    own = OwnStore(journal.uri)
    assert sync_run(str(tmp_path), own, 60.0, named=True) == 0
    assert "0 points sent to the store" in capsys.readouterr().err


def test_a_run_of_another_store_is_complete_there_once_it_was_uploaded(
    tmp_path, capsys
):
    journal = begun(tmp_path)
    write(journal, 1, 2)
    journal._writer.close()
    journal.abandon()  # as if the trainer and its shipper had been killed
    elsewhere = OwnStore("sqlite:///elsewhere.db", (), on_command_line=False)
    assert sync_run(str(tmp_path), elsewhere, 1.0, named=False) == NOT_SHIPPED
    line = f"{tmp_path}: it is unknown whether its store has everything: tracking.uri "
    assert capsys.readouterr().err.startswith(line)

    assert sync_run(str(tmp_path), OwnStore(journal.uri), 60.0, named=True) == 0
    capsys.readouterr()
    assert sync_run(str(tmp_path), elsewhere, 1.0, named=False) == 0
    assert capsys.readouterr().err == ""


def test_a_store_that_is_trusted_is_followed(tmp_path):
    store = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    for own in (
        OwnStore(store, (), False),
        OwnStore("sqlite:///x.db", (str(tmp_path),), False),
    ):
        assert own.followed(store, "it") == store
    with_password = OwnStore("http://me:hush-42@host", (), False)
    assert with_password.followed("http://***@host", "it") == with_password.uri
    assert OwnStore("http://b").followed("http://a", "it", moves=True) == "http://b"
    with pytest.raises(ConfigError) as refused:
        OwnStore("http://b", ("http://a",), False).followed("http://me:word@a", "it")
    assert "add tracking.uri=http://***@a" in str(refused.value)
    assert (
        sync_command("my run", "http://me:word@a")
        == "pipeline sync 'my run' 'tracking.uri=http://***@a'"
    )


def test_a_printed_command_names_the_store_unless_it_would_find_it(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert sync_command("run", DEFAULT_STORE) == "pipeline sync run"
    # As a resumed run has it.
    assert sync_command("run", absolute(DEFAULT_STORE)) == "pipeline sync run"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://exported:80")
    assert (
        sync_command("run", DEFAULT_STORE)
        == f"pipeline sync run tracking.uri={absolute(DEFAULT_STORE)}"
    )


def test_only_files_of_the_run_directory_itself_are_sent(tmp_path, monkeypatch):
    from pipeline.tracking.store import Store as Opened
    from pipeline.tracking.stored_run import StoredRun
    from pipeline.tracking.uploader import Uploader

    place_store(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    secret = tmp_path / "secret"
    secret.write_text("secret")
    names = [
        "good.txt",
        "../secret",
        str(secret),
        "link",
        "folder/secret",
        "folder",
        "..",
        "fifo",
        "a\0b",
    ]
    crafted(tmp_path / "run", uri, artifacts=names)
    (tmp_path / "run" / "good.txt").write_text("good")
    (tmp_path / "run" / "link").symlink_to(secret)
    (tmp_path / "run" / "folder").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "run" / "fifo")
    noted = []
    monkeypatch.setattr(StoredRun, "note", lambda _, what: noted.append(what))
    with closing(
        Uploader(Opened(uri), tmp_path / "run" / JOURNAL_NAME, may_exist=True)
    ) as uploader:
        uploader.finish(0)
    run = Store(tmp_path).run()
    files = Store(tmp_path).client.list_artifacts(run.info.run_id)
    assert [file.path for file in files] == ["good.txt"]
    assert len(noted) == len(names) - 1
    assert noted[0] == "../secret: it is not a file in the run directory itself"
