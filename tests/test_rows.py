"""What is written directly reads back as what MLflow's own client wrote."""

from __future__ import annotations

import math
import sqlite3

import pytest

from pipeline.rows import ClientRows, Point, SqliteRows, rows
from pipeline.store import Store

POINTS = [
    *(Point("train/loss", 1 / step, 1_700_000_000_000 + step, step) for step in range(1, 30)),
    *(Point("train/learning_rate", 0.1, 1_700_000_000_000, step) for step in range(1, 30)),
    Point("val/loss", math.nan, 1_700_000_000_001, 1),
    Point("val/loss", math.inf, 1_700_000_000_002, 2),
    Point("val/loss", -math.inf, 1_700_000_000_003, 3),
    Point("val/accuracy", 1, 1_700_000_000_003, 3),
]


@pytest.fixture
def store(tmp_path):
    return Store(f"sqlite:///{tmp_path}/mlflow.db")


def new_run(store):
    client = store.client()
    return client, client.create_run(store.experiment("rows")).info.run_id


def read(client, run_id):
    metrics = client.get_run(run_id).data.metrics
    history = {
        key: [(point.step, point.timestamp, repr(point.value)) for point in client.get_metric_history(run_id, key)]
        for key in metrics
    }
    return {key: repr(value) for key, value in metrics.items()}, history


def test_the_same_as_through_the_client(store):
    client, ours = new_run(store)
    _, theirs = new_run(store)
    writer = rows(client, store.database, ours)
    assert isinstance(writer, SqliteRows)
    writer.write(POINTS)
    ClientRows(client, theirs).write(POINTS)
    assert read(client, ours) == read(client, theirs)
    assert read(client, ours)[0]["train/loss"] == repr(1 / 29)


def test_written_again_and_out_of_order_changes_nothing(store):
    client, run_id = new_run(store)
    writer = SqliteRows(store.database, run_id)
    writer.write(POINTS[5:])
    writer.write(POINTS[:10])  # what a shipper does that died before it knew that the rows had arrived
    writer.write(POINTS)
    _, other = new_run(store)
    ClientRows(client, other).write(POINTS)
    values, history = read(client, run_id)
    assert values == read(client, other)[0]
    assert {key: sorted(points) for key, points in history.items()} == {
        key: sorted(points) for key, points in read(client, other)[1].items()
    }


def test_tables_that_are_not_known_are_left_to_the_client(store):
    client, run_id = new_run(store)
    with sqlite3.connect(store.database) as connection:
        connection.execute("ALTER TABLE metrics ADD COLUMN entity VARCHAR(50)")
    assert isinstance(rows(client, store.database, run_id), ClientRows)
    assert isinstance(rows(client, None, run_id), ClientRows)
