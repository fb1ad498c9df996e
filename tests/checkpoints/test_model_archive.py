"""The weights of a registered model are loaded as a whole, or not at all."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers

from pipeline.checkpoints.fork import ModelStart
from pipeline.checkpoints.model_archive import load_weights
from pipeline.common.errors import ConfigError


def built(model: keras.Model) -> keras.Model:
    model.compile("sgd", "mse")
    model(np.zeros((1, 3), "float32"))
    return model


def dense(*widths: int) -> keras.Model:
    return built(keras.Sequential([layers.Dense(width) for width in widths]))


class Nested(keras.Model):
    """Has layers in lists of lists, for which an archive of `dense` has no weights."""

    def __init__(self):
        super().__init__()
        self.blocks = [[layers.Dense(3)]]
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(self.blocks[0][0](x))


@pytest.fixture
def archive(tmp_path):
    dense(4, 2).save(tmp_path / "model.keras")
    return tmp_path / "model.keras"


def test_the_weights_are_those_of_the_archive(archive):
    model = dense(4, 2)
    optimizer = model.optimizer
    load_weights(model, archive, "start.run", "models:/it/1")
    saved = keras.models.load_model(archive)
    for value, expected in zip(model.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
    assert model.optimizer is optimizer


def test_weights_that_do_not_fit_are_rejected_with_the_reason(archive):
    with pytest.raises(ConfigError, match=r"fit the model \(.*shape.*\(3, 5\)"):
        load_weights(dense(5, 2), archive, "start.run", "models:/it/1")


def test_a_layer_that_would_keep_its_new_weights_is_rejected(archive):
    with pytest.raises(ConfigError, match="must have weights that fit the model"):
        load_weights(built(Nested()), archive, "start.run", "models:/it/1")


def test_a_model_with_lora_does_not_begin_with_a_registered_model():
    model = dense(4, 2)
    model.layers[0].enable_lora(2)
    start = ModelStart(SimpleNamespace(name="models:/it/1"))
    with pytest.raises(ConfigError, match="must be left out for a model with LoRA"):
        start.check(SimpleNamespace(model=model), None)
