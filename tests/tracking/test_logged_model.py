"""The trained model in MLflow, where Keras cannot save it."""

from __future__ import annotations

import keras
import mlflow
import numpy as np
import pytest
from keras import layers

from pipeline.tracking import logged_model


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
    logged_model.log(uri, run.info.experiment_id, run.info.run_id, model, x, [])
    loaded = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")
    np.testing.assert_allclose(loaded.predict(np.concatenate([x, x])), np.tile(expected, (2, 1)), rtol=1e-6)
