"""The example of a project of one's own trains by the command on its top.

Data, model, loss and metric are its own.
"""

from __future__ import annotations

import ast
import shutil

import pytest

from tests.examples.commands import command_on_top_of
from tests.running import ROOT, Store, pipeline

PROJECT = ROOT / "examples" / "own_project"


@pytest.mark.slow
def test_it_trains_what_it_brings(tmp_path):
    folder = tmp_path / "own_project"
    shutil.copytree(PROJECT, folder)
    command = command_on_top_of(PROJECT / "mine.py")
    callback = "+training.callbacks.norm._target_=mine.WeightNorm"
    pipeline(*command, "tracking.system_metrics=false", callback, cwd=folder)
    store = Store(folder)
    run = store.run()
    assert run.data.params["dataset._target_"] == "mine.moons"
    assert run.data.params["model._target_"] == "mine.tiny"
    assert run.data.params["training.loss._target_"] == "mine.focal"
    assert run.data.params["derived.parameters"] == str(3 * 64 + 65 * 2)
    assert set(store.history(run, "train/confidence")) == set(range(1, 161))
    norms = store.history(run, "train/weight_norm")
    assert set(norms) == set(range(1, 161))
    for update, norm in store.history(run, "train/weight_norm_of_epoch").items():
        assert norm == norms[update]
    assert run.data.metrics["val/accuracy"] > 0.9
    assert 0.5 <= run.data.metrics["val/confidence"] <= 1


@pytest.mark.slow
def test_its_schedule_counts_updates_and_has_a_share_of_the_horizon(tmp_path):
    folder = tmp_path / "own_project"
    shutil.copytree(PROJECT, folder)
    call = ("experiment=moons", "schedule=halving", "training.epochs=null")
    short = ("training.updates=40", "tracking.log_model=false")
    pipeline("train", "--config-dir", "conf", *call, *short, cwd=folder)
    store = Store(folder)
    rates = store.history(store.run(), "train/learning_rate")
    # 10% of the horizon are four updates.
    for update, rate in rates.items():
        expected = rates[1] * 0.5 ** ((update - 1) // 4)
        assert rate == pytest.approx(expected, rel=1e-6)  # float32


@pytest.mark.slow
def test_its_windows_of_a_series_train(tmp_path):
    folder = tmp_path / "own_project"
    shutil.copytree(PROJECT, folder)
    call = ("dataset=windows", "model=tiny", "+model.classes=1", "objective=regression")
    short = ("training.epochs=2", "tracking.log_model=false")
    pipeline("train", "--config-dir", "conf", *call, *short, cwd=folder)
    params = Store(folder).run().data.params
    # Seven updates of at most 128 of the 800 examples, twice.
    assert params["derived.updates"] == "14"


def test_each_piece_of_it_is_under_ten_lines():
    tree = ast.parse((PROJECT / "mine.py").read_text(encoding="utf-8"))
    definitions = (ast.FunctionDef, ast.ClassDef)
    pieces = [node for node in tree.body if isinstance(node, definitions)]
    assert len(pieces) == 9
    for piece in pieces:
        lines = piece.end_lineno - piece.lineno + 1
        assert lines < 10, piece.name
