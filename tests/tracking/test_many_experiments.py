"""A store with more experiments than MLflow returns at a time."""

from __future__ import annotations

import sqlite3

from mlflow.tracking import MlflowClient

from pipeline.tracking.foreign_store import ForeignStore
from pipeline.tracking.store import Store
from tests.shared import place_store

EXPERIMENTS = 1_100  # MLflow returns 1,000 at a time, the newest first


def test_a_run_of_an_old_experiment_is_found(tmp_path):
    place_store(tmp_path)
    database = tmp_path / "mlruns" / "mlflow.db"
    uri = f"sqlite:///{database}"
    client = MlflowClient(uri)
    experiment = client.create_experiment("first", (tmp_path / "a").as_uri())
    run = client.create_run(experiment, tags={"journal": "the one"})
    with sqlite3.connect(database) as connection:
        connection.executemany(
            "INSERT INTO experiments (name, artifact_location, lifecycle_stage,"
            " creation_time, last_update_time) VALUES (?, ?, 'active', ?, ?)",
            [
                (f"e{number}", (tmp_path / "a").as_uri(), 2 * 10**12, 2 * 10**12)
                for number in range(EXPERIMENTS)
            ],
        )

    run_id = run.info.run_id
    assert Store(uri).find_run("the one").info.run_id == run_id
    assert ForeignStore.open(uri, [str(tmp_path)]).run(run_id[:8]).info.run_id == run_id
