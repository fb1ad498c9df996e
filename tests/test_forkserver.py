"""The shippers of a sweep's jobs are forked from one process, and carry their journals as any other shipper does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline import forkserver
from pipeline.journal import Journal
from tests.running import Store, environment, wait

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each shipper is a new process")

RUN = {"experiment": "pipeline", "name": "one", "params": {}, "tags": {}, "inputs": [], "system_metrics": False}


@pytest.fixture(scope="module", autouse=True)
def server():
    with one_more() as process:
        wait(is_ready)
        yield process


@contextlib.contextmanager
def one_more():
    before = psutil.Process().children()
    with forkserver.serving_shippers():
        (process,) = [child for child in psutil.Process().children() if child not in before]
        yield process


def is_ready() -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(os.environ[forkserver.ADDRESS]) == 0


def start(folder: Path, name: str = "journal.jsonl", uri: str = "sqlite:///mlruns/mlflow.db") -> Journal:
    journal = Journal(uri, "pipeline")
    journal.ready()
    journal.start(folder / name, RUN)
    return journal


def test_a_shipper_is_forked_where_its_trainer_was(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the store is relative to it
    journal = start(tmp_path)
    shipper = psutil.Process(journal.pid)
    assert shipper.parent() == server
    assert os.getsid(shipper.pid) == shipper.pid  # Ctrl-C in the terminal is the trainer's
    journal.metrics(1, {"train/loss": 0.5})
    assert journal.close("FINISHED") is None
    wait(lambda: not shipper.is_running())
    store = Store(tmp_path)
    assert store.run().info.status == "FINISHED"
    assert store.histories(store.run()) == {"train/loss": {1: 0.5}}


def test_several_at_once_share_nothing(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    journals = [start(tmp_path, f"{number}.jsonl", uri) for number in range(3)]
    assert len({journal.pid for journal in journals}) == 3
    for number, journal in enumerate(journals):
        journal.metrics(1, {"train/loss": float(number)})
    assert [journal.close("FINISHED") for journal in journals] == [None] * 3
    store = Store(tmp_path)
    assert [store.history(run, "train/loss") for run in store.runs()] == [{1: 0.0}, {1: 1.0}, {1: 2.0}]


def test_one_that_is_let_go_leaves_nothing(tmp_path):
    journal = Journal(f"sqlite:///{tmp_path}/mlruns/mlflow.db", "pipeline")
    shipper = psutil.Process(journal.pid)
    journal.abandon()
    wait(lambda: not shipper.is_running())
    assert not list(tmp_path.iterdir())


def test_a_trainer_that_is_killed_leaves_a_closed_run(tmp_path):
    trainer = (
        "import os, signal; from pathlib import Path; from tests.test_forkserver import start;"
        "journal = start(Path.cwd()); journal.metrics(7, {'train/loss': 0.5}); journal.flush();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", trainer], cwd=tmp_path, env=environment(), timeout=60)
    assert done.returncode == -signal.SIGKILL
    store = Store(tmp_path)
    wait(lambda: store.run().info.status == "KILLED")
    assert store.history(store.run(), "train/loss") == {7: 0.5}
    assert "after update 7" in store.run().data.tags["failure"]


def test_what_is_forked_outlives_the_server_and_what_comes_later_needs_none(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    with one_more() as server:
        early = start(tmp_path, "early.jsonl", uri)  # while it imports
        assert psutil.Process(early.pid).parent() == psutil.Process()
        assert early.close("FINISHED") is None
        wait(is_ready)
        before = start(tmp_path, "before.jsonl", uri)
        assert psutil.Process(before.pid).parent() == server
        server.kill()
        server.wait()
        after = start(tmp_path, "after.jsonl", uri)
        assert psutil.Process(after.pid).parent() == psutil.Process()
        for journal in (before, after):
            journal.metrics(1, {"train/loss": 0.5})
            assert journal.close("FINISHED") is None
    assert [run.info.status for run in Store(tmp_path).runs()] == ["FINISHED"] * 3


def test_a_server_that_hangs_is_not_waited_for_and_forks_nothing_late(tmp_path):
    with one_more() as server:
        wait(is_ready)
        server.suspend()
        journal = start(tmp_path, uri=f"sqlite:///{tmp_path}/mlruns/mlflow.db")
        assert psutil.Process(journal.pid).parent() == psutil.Process()
        server.resume()
        time.sleep(0.5)
        wait(lambda: not server.children())
        assert journal.close("FINISHED") is None
    assert Store(tmp_path).run().info.status == "FINISHED"


@pytest.mark.parametrize("said", [b"", b" {", b" []"])
def test_one_who_asks_for_nothing_delays_the_others_at_most(said, server, tmp_path):
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(os.environ[forkserver.ADDRESS])
        asking.send(said)
        for number in range(2):  # the first may find the server waiting
            journal = start(tmp_path, f"{number}.jsonl", uri=f"sqlite:///{tmp_path}/mlruns/mlflow.db")
            assert journal.close("FINISHED") is None
    wait(lambda: not server.children())


def test_the_server_ends_with_the_process_that_has_it():
    script = (
        "import os, time, psutil; from pipeline import forkserver\n"
        "with forkserver.serving_shippers():\n"
        "    print(psutil.Process().children()[0].pid, os.environ[forkserver.ADDRESS], flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, address = process.stdout.readline().split()
        wait(Path(address).exists)
        process.kill()
    wait(lambda: not psutil.pid_exists(int(pid)))
    assert not Path(address).parent.exists()


def test_a_path_that_no_socket_can_have_is_no_error(monkeypatch, tmp_path):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv(forkserver.ADDRESS)
    with forkserver.serving_shippers():
        assert forkserver.forked({}) is None
