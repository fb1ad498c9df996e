"""A store in a database that is locked, moved, deleted, full or restarted.

Nothing of the run is missing in the end.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from pipeline.tracking.journal import Journal
from tests import programs, shared
from tests.disks import disk, fill, free
from tests.parameters import mostly_slow
from tests.running import wait
from tests.tracking.shipped import BUSY, UPDATES, begin, fields, opened, sync, train

HALF = UPDATES // 2
pytestmark = pytest.mark.usefixtures("forked_shippers")


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
    """A shipper that ended is replaced at the next row."""
    monkeypatch.setattr("pipeline.tracking.journal.REVIVE", 0.0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    shared.place_store(folder)
    journal = opened(uri_in(folder), folder / "run", "e")
    train(journal, 1, UPDATES)
    assert journal.close("FINISHED") is None
    return fields(uri_in(folder), "e")


def uri_in(folder: Path) -> str:
    return f"sqlite:///{folder}/mlruns/mlflow.db"


def half_shipped(folder):
    """A journal in `folder`/run whose store has the first half of the run."""
    shared.place_store(folder)
    journal = opened(uri_in(folder), folder / "run", "e", patience=30.0)
    train(journal, 1, HALF)
    wait(lambda: rows_in(folder) == HALF, BUSY)
    return journal


def rows_in(folder):
    """Count the rows without MLflow, which would keep the file open in this process."""
    with contextlib.closing(
        sqlite3.connect(folder / "mlruns" / "mlflow.db")
    ) as database:
        return database.execute(
            "SELECT COUNT(*) FROM metrics WHERE key = 'train/loss'"
        ).fetchone()[0]


@pytest.mark.soak
def test_locked_in_the_middle(tmp_path, undisturbed):
    """For longer than the 5 s that SQLite waits by itself."""
    journal = half_shipped(tmp_path)
    with contextlib.closing(
        sqlite3.connect(tmp_path / "mlruns" / "mlflow.db", isolation_level=None)
    ) as other:
        other.execute("BEGIN EXCLUSIVE")
        train(journal, HALF + 1, UPDATES)
        time.sleep(15)
    assert journal.close("FINISHED") is None
    assert fields(uri_in(tmp_path), "e") == undisturbed


@pytest.mark.slow
def test_locked_at_the_end(tmp_path, undisturbed):
    journal = half_shipped(tmp_path)
    journal.patience = 3.0
    with contextlib.closing(
        sqlite3.connect(tmp_path / "mlruns" / "mlflow.db", isolation_level=None)
    ) as other:
        other.execute("BEGIN EXCLUSIVE")
        train(journal, HALF + 1, UPDATES)
        began = time.monotonic()
        assert journal.close("FINISHED")
        assert (
            time.monotonic() - began < 3 + 2 + BUSY
        )  # the patience, and the grace of the shipper
        assert sync(tmp_path, "tracking.patience=1") == 4
    assert sync(tmp_path) == 0
    assert fields(uri_in(tmp_path), "e") == undisturbed


@pytest.mark.parametrize("how", mostly_slow(["moved", "deleted"], [], ["moved"]))
def test_gone_in_the_middle(tmp_path, undisturbed, how):
    journal = half_shipped(tmp_path)
    store = tmp_path / "mlruns"
    if how == "moved":
        store.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(store)
    train(journal, HALF + 1, UPDATES)
    assert journal.close("FINISHED") is None
    assert fields(uri_in(tmp_path), "e") == undisturbed


@pytest.mark.soak
@pytest.mark.parametrize("until", ["the end", "after it"])
def test_full(tmp_path, undisturbed, until):
    with disk(tmp_path / "mlruns"):
        journal = half_shipped(tmp_path)
        fill(tmp_path / "mlruns")
        train(journal, HALF + 1, UPDATES)
        time.sleep(8)  # longer than the shipper's interval, so that it has tried
        if until == "the end":
            free(tmp_path / "mlruns")
            assert journal.close("FINISHED") is None
        else:
            journal.patience = 2.0
            why = journal.close("FINISHED") or ""
            assert (
                "full" in why or "No space left" in why
            )  # SQLite's word, or the system's for an artifact
            assert sync(tmp_path, "tracking.patience=1") == 4
            free(tmp_path / "mlruns")
            assert sync(tmp_path) == 0
        assert fields(uri_in(tmp_path), "e") == undisturbed


@pytest.mark.slow
def test_the_end_of_a_run_whose_journal_finds_no_room(tmp_path, undisturbed, capsys):
    """The store gets all lines from memory.

    The run keeps its status though the journal has no end.
    """
    shared.place_store(tmp_path)
    with disk(tmp_path / "run"):
        journal = opened(uri_in(tmp_path), tmp_path / "run", "e")
        train(journal, 1, HALF)
        fill(tmp_path / "run")
        train(journal, HALF + 1, UPDATES)
        assert journal.close("FINISHED") is None
        assert "journal.jsonl, which only the store has" in capsys.readouterr().err
        free(tmp_path / "run")
        for _ in range(2):
            found = fields(uri_in(tmp_path), "e")
            assert found["tags"].pop("journal.unwritten") == "0"
            assert found == undisturbed
            assert sync(tmp_path / "run") == 0


class Postgres:
    """A PostgreSQL server of Debian's package on a free port, with its data in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        self.uri = f"postgresql://postgres@127.0.0.1:{self._port}/postgres"
        self._call(
            "initdb",
            "--auth=trust",
            "--username=postgres",
            "--no-sync",
            "--pgdata",
            str(folder / "data"),
        )

    def start(self) -> None:
        options = f"-p {self._port} -h 127.0.0.1 -k {self.folder}"
        data = str(self.folder / "data")
        log = str(self.folder / "log")
        self._call("pg_ctl", "-D", data, "-l", log, "-w", "-o", options, "start")

    def stop(self) -> None:
        self._call(
            "pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", "immediate", "stop"
        )

    def _call(self, program: str, *arguments: str) -> None:
        account = (
            {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
        )  # it refuses to run as root
        command = [str(_programs() / program), *arguments]
        subprocess.run(
            command,
            check=True,
            cwd="/",
            stdout=subprocess.DEVNULL,
            timeout=120,
            **account,
        )


def _folders() -> list[Path]:
    return [Path("/usr/bin"), *Path("/usr/lib/postgresql").glob("*/bin")]


def _programs() -> Path:
    return next(folder for folder in _folders() if (folder / "initdb").exists())


@pytest.fixture(scope="module")
def postgres(tmp_path_factory):
    programs.need("initdb", path=os.pathsep.join(map(str, _folders())))
    pytest.importorskip("psycopg")
    with tempfile.TemporaryDirectory(
        prefix="pipeline-postgres-"
    ) as name:  # pytest's are root's alone
        if os.geteuid() == 0:
            os.chown(name, *pwd.getpwnam("postgres")[2:4])
        server = Postgres(Path(name))
        server.start()
        yield server
        server.stop()


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(1, id="at once", marks=pytest.mark.slow),
        pytest.param(12, id="longer", marks=pytest.mark.soak),
    ],
)
def test_postgresql_restarted_in_the_middle(
    tmp_path, undisturbed, postgres, monkeypatch, seconds
):
    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts of such a store here
    experiment = f"restarted {seconds}"
    journal = opened(postgres.uri, tmp_path / "run", experiment, patience=90.0)
    train(journal, 1, HALF)
    wait(
        lambda: (
            len(fields(postgres.uri, experiment)["metrics"].get("train/loss", ()))
            == HALF
        ),
        2 * BUSY,
    )
    postgres.stop()
    train(journal, HALF + 1, UPDATES - 1)
    time.sleep(seconds)
    postgres.start()
    train(journal, UPDATES, UPDATES)
    assert journal.close("FINISHED") is None
    assert fields(postgres.uri, experiment) == undisturbed
    assert (
        sync(tmp_path, f"tracking.uri={postgres.uri}") == 0
    )  # which may hold a password: no journal has it
    assert fields(postgres.uri, experiment) == undisturbed


@pytest.mark.soak
def test_postgresql_away_from_before_the_end(
    tmp_path, undisturbed, postgres, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    journal = Journal(postgres.uri, "away", patience=90.0)
    journal.ready()
    begin(journal, tmp_path / "run")
    train(journal, 1, UPDATES)
    postgres.stop()
    try:
        journal.patience = 4.0
        assert journal.close("FINISHED")
        assert (
            sync(tmp_path, f"tracking.uri={postgres.uri}", "tracking.patience=1") == 4
        )
        assert "Traceback" not in capsys.readouterr().err
    finally:
        postgres.start()
    assert sync(tmp_path, f"tracking.uri={postgres.uri}") == 0
    assert fields(postgres.uri, "away") == undisturbed
