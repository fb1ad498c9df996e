"""The trained model in MLflow, where Keras cannot save it."""

from __future__ import annotations

import shutil

import keras
import mlflow
import numpy as np
import pytest
from keras import layers

from pipeline.tracking import logged_model, model_upload
from pipeline.tracking.journal_file import MODEL
from tests.running import pipeline


class Plain(keras.Model):
    """A subclass without `get_config`."""

    def __init__(self, inner, function):
        super().__init__()
        self.inner, self.function = inner, function

    def call(self, x):
        return self.inner(self.function(x))


@pytest.mark.slow
def test_a_plain_subclassed_model_predicts_the_same_from_the_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient(uri)
    run = client.create_run(client.create_experiment("plain"))
    model = Plain(keras.Sequential([layers.Dense(3), layers.Dropout(0.5)]), lambda x: 2 * x)
    x = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
    expected = np.asarray(model(x))
    logged_model.save(tmp_path / MODEL, model, x, [])
    model_upload.ship(client, run.info.experiment_id, run.info.run_id, tmp_path / MODEL)
    loaded = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")
    np.testing.assert_allclose(loaded.predict(np.concatenate([x, x])), np.tile(expected, (2, 1)), rtol=1e-6)


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / MODEL
    (folder / "data").mkdir(parents=True)
    (folder / "MLmodel").write_text("flavors: {}\n")
    return folder


def test_a_model_that_is_shipped_twice_is_one_model_of_its_run(tmp_path, saved):
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run(client.create_experiment("twice", (tmp_path / "artifacts").as_uri()))
    ids = run.info.experiment_id, run.info.run_id
    again = tmp_path / "again"
    shutil.copytree(saved, again)
    for folder in (saved, again):  # as by a shipper that died before it removed the folder, and by the next one
        model_upload.ship(client, *ids, folder)
        assert not folder.exists()
    (found,) = client.search_logged_models([run.info.experiment_id])
    assert (found.status, found.source_run_id) == ("READY", run.info.run_id)
    assert [output.model_id for output in client.get_run(run.info.run_id).outputs.model_outputs] == [found.model_id]
    assert mlflow.models.Model.load(found.artifact_location.removeprefix("file://")).model_id == found.model_id


def test_a_model_with_a_link_in_it_is_not_shipped(tmp_path, saved):
    model_upload.check(saved)
    (tmp_path / "secret").write_text("secret")
    (saved / "data" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="logged_model/data/link is neither a file nor a folder"):
        model_upload.check(saved)


@pytest.mark.slow
def test_the_model_of_a_run_that_was_kept_offline_is_in_the_store_after_sync(tmp_path, monkeypatch):
    free = "tracking.uri=http://127.0.0.1:9"
    away = (free, "tracking.when_unreachable=offline", "tracking.log_model=true")
    pipeline("train", "experiment=quick", *away, f"hydra.run.dir={tmp_path}/run", cwd=tmp_path, status=4)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    pipeline("sync", "run", f"tracking.uri={store}", cwd=tmp_path)
    (logged,) = mlflow.MlflowClient(store).search_logged_models(["1"])
    mlflow.set_tracking_uri(store)
    assert mlflow.pyfunc.load_model(f"models:/{logged.model_id}").predict(np.zeros((2, 8, 8, 1), "float32")).shape == (
        2,
        10,
    )
    assert not (tmp_path / "run" / MODEL).exists()
