"""Which layers cannot have noise that does not depend on the cut: they are named."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation.internals import trace_forward

TIME = 6
WIDTH = 8


pytestmark = pytest.mark.usefixtures("float64")


class Own(layers.Dropout):
    """Has a call of its own."""

    def call(self, inputs, training=False):
        return super().call(inputs, training=training) + 0


class Legacy(layers.Layer):
    """Draws by an operation of TensorFlow that has a state."""

    def call(self, inputs, training=False):
        if training:
            return inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)
        return inputs


class Unseeded(layers.Layer):
    """Draws by Keras without a seed."""

    def call(self, inputs, training=False):
        if training:
            return keras.random.dropout(inputs, 0.5)
        return inputs


class Generator(layers.Layer):
    """Draws by a generator of TensorFlow."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, inputs, training=False):
        if training:
            shape = tf.shape(inputs)
            return inputs + self.generator.normal(shape, dtype=inputs.dtype)
        return inputs


class Seeds(layers.Layer):
    """Has its seed in a list."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.seeds = [keras.random.SeedGenerator(1)]

    def call(self, inputs, training=False):
        if training:
            return keras.random.dropout(inputs, 0.5, seed=self.seeds[0])
        return inputs


class Plain(layers.Layer):
    """Draws nothing, in a function of its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=())

    def call(self, inputs):
        return tf.function(lambda x: x * self.scale.value, autograph=False)(inputs)


class TimeFirst(layers.Layer):
    """Gives its dropout the time on the first axis."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.dropout = layers.Dropout(0.5)

    def call(self, inputs, training=False):
        transposed = tf.transpose(inputs, (1, 0, 2))
        return tf.transpose(self.dropout(transposed, training=training), (1, 0, 2))


class Cell(layers.Layer):
    """Is the cell of a recurrent layer, whose loop calls its dropout once a step."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.state_size = WIDTH
        self.dropout = layers.Dropout(0.5)

    def call(self, inputs, states, training=False):
        state = self.dropout(inputs, training=training) + states[0]
        return state, [state]


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (lambda: layers.Dropout(0.5), []),
        (lambda: layers.Dropout(0.0), []),
        (lambda: layers.LSTM(3, dropout=0.5, name="recurrent"), ["recurrent"]),
        (lambda: Own(0.5, name="own"), ["own"]),
        (lambda: Unseeded(), ["keras.random without a seed"]),
        (lambda: Seeds(name="listed"), ["listed"]),
        (lambda: Plain(), []),
        (lambda: TimeFirst(name="time_first"), ["time_first"]),
        (lambda: layers.RNN(Cell(), name="looping"), ["looping"]),
    ],
)
def test_what_cannot_have_it_is_named(layer, names):
    keras.utils.set_random_seed(0)
    dropout = layers.Dropout(0.1)
    model = keras.Sequential(
        [keras.Input((TIME, WIDTH)), layer(), dropout, layers.Dense(1)]
    )
    x = np.ones((2, TIME, WIDTH))
    assert trace_forward(model, x, same_noise=True).cut_dependent_noise == names
    without = set(trace_forward(model, x, same_noise=False).cut_dependent_noise)
    assert without >= {*names, dropout.name}


def test_ragged_examples_have_no_place_for_their_noise():
    inputs = keras.Input((None, WIDTH), ragged=True)
    padded = layers.Lambda(lambda x: x.to_tensor(), output_shape=(None, WIDTH))(inputs)
    hidden = layers.Dropout(0.5, name="padded")(padded)
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    x = tf.RaggedTensor.from_row_lengths(np.ones((5, WIDTH)), [2, 3])
    assert trace_forward(model, x, same_noise=True).cut_dependent_noise == ["padded"]


@pytest.mark.parametrize("kind", [Legacy, Generator])
def test_operations_of_tensorflow_that_draw_are_named(kind):
    model = keras.Sequential(
        [keras.Input((WIDTH,)), kind(name="legacy"), layers.Dense(1)]
    )
    forward = trace_forward(model, np.ones((2, WIDTH)), same_noise=True)
    (name,) = forward.cut_dependent_noise
    assert "legacy" in name
