"""The saved view of a running sweep: its charts have the range of its values."""

from __future__ import annotations

import base64
import json
import threading
import time
import zlib

import pytest

from pipeline.sweep import mlflow_view, view_settings
from pipeline.tracking.foreign_store import LONGEST_TAG, NOTE
from tests import synthetic
from tests.running import wait


@pytest.fixture
def sweep(tmp_path):
    names = ["factor=1 seed=0", "factor=1 seed=1"]
    varied = ["accumulation.factor", "seed"]
    return synthetic.PlantedSweep(synthetic.store(tmp_path), names, varied)


def ranges_of(sweep):
    """Return the lower ends of the charts' ranges, by metric."""
    tags = sweep.client.get_experiment(sweep.experiment_id).tags
    view = json.loads(tags[mlflow_view.VIEW_TAG + sweep.run_id])
    packed = base64.b64decode(view["state"].removeprefix("deflate;"))
    state = json.loads(zlib.decompress(packed))
    charts = [chart for chart in state["compareRunCharts"] if "range" in chart]
    return {chart["metricKey"]: chart["range"]["yMin"] for chart in charts}


def test_charts_do_not_begin_at_0_while_the_sweep_runs(sweep, monkeypatch):
    monkeypatch.setattr(mlflow_view, "RANGES_EVERY", 0.1)
    closed = threading.Event()
    mlflow_view.announce(sweep.planned, closed)
    assert ranges_of(sweep) == {}  # there are no values yet

    curves = {"train/loss": [2.0, 1.5, 1.0], "val/loss": {3: 1.2}}
    run_id = sweep.job(sweep.names[0], curves, status="RUNNING")
    wait(lambda: ranges_of(sweep), 20)
    assert list(ranges_of(sweep)) == ["train/loss"]  # one evaluation has no range
    assert 0.9 < ranges_of(sweep)["train/loss"] < 1.0

    sweep.client.log_metric(run_id, "train/loss", 0.5, step=4)
    wait(lambda: ranges_of(sweep)["train/loss"] < 0.5, 20)
    closed.set()


def test_the_view_of_a_sweep_that_has_ended_is_left_alone(sweep, monkeypatch):
    monkeypatch.setattr(mlflow_view, "RANGES_EVERY", 0.1)
    closed = threading.Event()
    mlflow_view.announce(sweep.planned, closed)
    closed.set()
    sweep.job(sweep.names[0], {"train/loss": [2.0, 1.0]})
    time.sleep(1)
    assert ranges_of(sweep) == {}


def test_two_charts_are_side_by_side():
    """Three were 200 pixels wide in a window of 1600 with MLflow's assistant open."""
    sections = view_settings._sections()
    own = [section for section in sections if section["display"]]
    assert [section["columns"] for section in own] == [2, 2, 2]


def test_a_description_keeps_what_a_user_wrote_around_it(sweep):
    mlflow_view.announce(sweep.planned, threading.Event())
    written = note_of(sweep)
    assert written.startswith("[Compare the runs of this sweep]")
    assert "will appear here when all jobs have ended" in written

    sweep.client.set_tag(sweep.run_id, NOTE, f"Mine first.\n\n{written}\nMine last.")
    sweep.job(sweep.names[0], {"train/loss": [2.0, 1.0]})
    mlflow_view.complete(sweep.planned)
    note = note_of(sweep)
    assert note.startswith("Mine first.\n\n[Compare the runs of this sweep]")
    assert note.endswith("\nMine last.")
    assert "will appear here when" not in note
    assert "| factor=1 seed=0 | FINISHED | 1 |" in note

    # A second time, as after --again, changes nothing.
    mlflow_view.complete(sweep.planned)
    assert note_of(sweep) == note


def test_a_verdict_before_the_description_is_replaced_with_it(sweep):
    mlflow_view.announce(sweep.planned, threading.Event())
    written = note_of(sweep)
    sweep.client.set_tag(sweep.run_id, NOTE, f"**Factor 4 pays.** {written}\nMine.")
    mlflow_view.announce(sweep.planned, threading.Event())
    assert note_of(sweep) == f"{written}\nMine."


def test_a_long_text_of_a_user_leaves_the_table_less_space(sweep):
    mlflow_view.announce(sweep.planned, threading.Event())
    written = note_of(sweep)
    of_user = "x" * 2000
    sweep.client.set_tag(sweep.run_id, NOTE, written + of_user)
    sweep.planned.job_names = [f"factor={number}" for number in range(1000)]
    mlflow_view.complete(sweep.planned)
    note = note_of(sweep)
    assert note.endswith(of_user)
    assert len(note) <= LONGEST_TAG
    assert " more\n" in note


def note_of(sweep):
    return sweep.client.get_run(sweep.run_id).data.tags[NOTE]
