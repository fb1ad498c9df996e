"""What pipeline/accumulation/keras_internals.py uses of Keras still is what it was read as."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from pipeline.accumulation import keras_internals

WHERE = "see pipeline/accumulation/keras_internals.py"


def test_a_mask_stays_on_the_output():
    masked = layers.Embedding(3, 2, mask_zero=True)(np.array([[1, 0]]))
    assert np.array(keras_internals.mask_of(masked)).tolist() == [[True, False]], WHERE
    assert keras_internals.mask_of(layers.Dense(2)(np.ones((1, 2)))) is None


def test_the_logits_stay_on_the_output():
    inner = layers.Dense(2, use_bias=False, kernel_initializer="ones")
    for activation in ("softmax", "sigmoid"):
        inner.activation = keras.activations.get(activation)
        assert np.array(keras_internals.logits_of(inner(np.ones((1, 3))))).tolist() == [[3, 3]], WHERE


def test_layers_inside_of_layers_are_found():
    inside = layers.Dense(2, name="inside")
    model = keras.Sequential([keras.Input((2,)), keras.Sequential([inside, layers.Dense(1)])])
    assert inside in keras_internals.layers_of(model), WHERE
    assert model not in keras_internals.layers_of(model), WHERE
