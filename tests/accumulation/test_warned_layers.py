"""`fit` of an `AccumulatingModel` warns of layers for which the cut matters, once."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import AccumulatingModel

INPUTS = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
LABELS = INPUTS.sum(axis=1, keepdims=True)


class Counting(layers.Layer):
    """Counts its calls."""

    def build(self, shape):
        self.calls = self.add_weight(name="calls", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


def fitted(middle, batches=None, **options):
    """Fit a model with the layers `middle`; return the warnings."""
    inner = keras.Sequential([keras.Input((6,)), *middle, layers.Dense(1)])
    model = AccumulatingModel(inner, micro_batch_size=4, **options)
    model.compile("sgd", "mse")
    if batches is None:
        batches = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(batches, epochs=2, shuffle=False, verbose=0)
    return [str(each.message) for each in caught if each.category is UserWarning]


def test_layers_that_a_cut_changes_are_named_once():
    middle = [
        layers.BatchNormalization(name="norm"),
        layers.BatchNormalization(name="frozen", trainable=False),
        Counting(name="counting"),
        layers.Dense(4, name="hidden", trainable=False),
    ]
    assert fitted(middle) == [
        "If fit cuts a batch into micro-batches, the update differs from that of the "
        "whole batch: normalized within each micro-batch, moving statistics updated "
        "once per update: norm; state that is updated with every micro-batch: counting"
    ]


def test_noise_is_named_where_same_noise_is_auto():
    middle = [layers.Reshape((6, 1)), layers.LSTM(3, dropout=0.5, name="lstm")]
    (text,) = fitted(middle, same_noise="auto")
    assert text.endswith("noise of each micro-batch, not of the effective batch: lstm")


def plain():
    return [layers.Dense(4), layers.Dropout(0.5), layers.LayerNormalization()]


def frozen():
    return [layers.Dense(4, trainable=False)]


@pytest.mark.parametrize("make_layers", [plain, frozen])
def test_there_is_no_warning_of_other_layers(make_layers):
    assert fitted(make_layers()) == []


def test_there_is_no_warning_if_a_batch_is_not_cut():
    whole = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(
        4, drop_remainder=True
    )
    assert fitted([layers.BatchNormalization()], batches=whole) == []
