"""Verbs that look into a store take the user's own configs by `--config-dir`."""

from __future__ import annotations

import json

import pytest
from mlflow.tracking import MlflowClient

from pipeline.__main__ import main
from tests.shared import place_store


@pytest.fixture
def run_id(tmp_path, monkeypatch):
    """A finished run in the store that the user's own config `tracking=lab` names."""
    place_store(tmp_path / "lab")
    uri = f"sqlite:///{tmp_path}/lab/mlruns/mlflow.db"
    client = MlflowClient(uri)
    artifacts = tmp_path / "lab" / "mlruns" / "artifacts"
    experiment = client.create_experiment("pipeline", artifacts.as_uri())
    run = client.create_run(experiment)
    client.set_terminated(run.info.run_id, "FINISHED")

    file = tmp_path / "mine" / "tracking" / "lab.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"defaults: [local, _self_]\nuri: {uri}\n")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return run.info.run_id


def test_runs_lists_the_store_of_the_users_own_config(run_id, capsys):
    assert main(["runs", "--config-dir", "../mine", "tracking=lab", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["run_id"] == run_id


def test_stop_asks_the_store_of_the_users_own_config(run_id, capsys):
    command = ["stop", "--config-dir", "../mine", run_id, "tracking=lab"]
    assert main(command) == 2
    assert "must be running; it is FINISHED" in capsys.readouterr().err


def test_a_config_folder_has_to_exist(run_id, capsys):
    assert main(["runs", "--config-dir", "nowhere", "tracking=lab"]) == 2
    assert "--config-dir must be a folder that exists" in capsys.readouterr().err
