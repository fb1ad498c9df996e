"""A run is found by its ID, or by its journal: its experiment may have been renamed."""

from __future__ import annotations

import sqlite3

import pytest
from mlflow.tracking import MlflowClient

from pipeline.tracking.journal_lines import Created, Row
from tests.running import Store
from tests.shared import place_store
from tests.tracking.shipped import FIRST, begin, opened, sync

pytestmark = pytest.mark.usefixtures("forked_shippers")


def half_a_run(folder):
    """Return the store, and the ID of a run whose last row is not there yet."""
    place_store(folder)
    uri = f"sqlite:///{folder}/mlruns/mlflow.db"
    journal = opened(uri, folder / "run", "old")
    journal.write(Row(1, {"train/loss": 1.0}, time=FIRST))
    assert journal.close("FINISHED") is None
    client = MlflowClient(uri)
    old = client.get_experiment_by_name("old")
    (run,) = client.search_runs([old.experiment_id])
    with sqlite3.connect(folder / "mlruns" / "mlflow.db") as database:
        database.execute("DELETE FROM metrics")
    client.update_run(run.info.run_id, "RUNNING")
    client.rename_experiment(old.experiment_id, "new")
    return client, run.info.run_id


@pytest.mark.parametrize("knows_id", [True, False])
def test_sync_ships_to_the_renamed_experiment(tmp_path, knows_id, monkeypatch):
    client, run_id = half_a_run(tmp_path)
    if not knows_id:  # the machine lost its power before it was on the disk
        run_lines_forgotten(monkeypatch)
    assert sync(tmp_path / "run") == 0
    assert client.get_experiment_by_name("old") is None
    (run,) = Store(tmp_path).runs("new")
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert run.data.metrics == {"train/loss": 1.0}


def run_lines_forgotten(monkeypatch):
    from pipeline.tracking.journal_file import Past

    add = Past._add
    monkeypatch.setattr(
        Past, "_add", lambda self, line: isinstance(line, Created) or add(self, line)
    )


def test_a_run_is_resumed_in_the_renamed_experiment(tmp_path):
    from pipeline.tracking.journal import Journal
    from pipeline.tracking.journal_file import LockedPast

    client, run_id = half_a_run(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    journal = Journal(uri, "old")
    journal.ready()
    ids = journal.resume(LockedPast.open(tmp_path / "run"), {"after": 1})
    assert ids.run_id == run_id
    assert journal.close("FINISHED") is None
    assert client.get_experiment_by_name("old") is None
    assert len(Store(tmp_path).runs("new")) == 1


def test_without_a_run_the_experiment_is_made(tmp_path):
    """The negative control: a store that has nothing of the run."""
    place_store(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    from pipeline.tracking.journal import Journal

    journal = Journal(uri, "old")
    journal.ready()
    begin(journal, tmp_path / "run")
    assert journal.close("FINISHED") is None
    assert len(Store(tmp_path).runs("old")) == 1
