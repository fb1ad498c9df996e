"""A loss that depends on no weight is named in one line, in place of TensorFlow's."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

from pipeline.accumulation import Update
from pipeline.verify import engine
from tests.parameters import mostly_slow

BATCH = (np.ones((4, 3)), np.ones((4, 1)))
LINE = (
    "no gradient reaches any trainable variable of 'cut': the loss depends on none of "
    "them"
)


class Constant(keras.losses.Loss):
    """A loss that is 1 whatever the model returns."""

    def call(self, y_true, y_pred):
        return keras.ops.ones_like(y_true)


class Cut(keras.layers.Layer):
    """Lets no gradient through."""

    def call(self, inputs):
        return keras.ops.stop_gradient(inputs)


def update_of(loss, *layers):
    """Return an update of a model of one weight matrix and further layers."""
    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1)(inputs)
    for layer in layers:
        outputs = layer(outputs)
    model = keras.Model(inputs, outputs, name="cut")
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss)
    return Update(model, loss, optimizer, 2)


@pytest.mark.parametrize(
    ("cut_outputs", "noise_every"),
    mostly_slow(itertools.product([False, True], [0, 1]), [(False, 0), (True, 1)]),
)
def test_one_line_names_the_loss(float64, cut_outputs, noise_every):
    update = update_of(Constant())
    if cut_outputs:
        update = update_of(keras.losses.MeanSquaredError(), Cut())
    update.noise_every = noise_every
    with pytest.raises(ValueError, match="no gradient") as error:
        engine.compare(update, [BATCH])
    assert str(error.value) == LINE


def test_a_variable_without_a_gradient_beside_another_is_left_alone(float64):
    update = update_of(keras.losses.MeanSquaredError())
    unused = keras.layers.Dense(2)
    unused.build((None, 3))
    update.model.unused = unused  # its weights become the model's
    (findings,) = engine.compare(update, [BATCH])
    assert all(finding.holds for finding in findings)
