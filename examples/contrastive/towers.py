"""Two views of each item → two towers, trained by InfoNCE.

Command:   cd examples/contrastive && pipeline train --config-dir conf experiment=towers
Run time:  about 20 seconds on two CPU cores
Expect:    val/loss below 1.0; a random guess among the 64 pairs of a batch has 4.2

InfoNCE compares each pair with all other pairs of the effective batch.
"""

import keras
import numpy as np
import tensorflow as tf

from pipeline.dataset import Data

# How many numbers each view has.
LEFT = 24
RIGHT = 16


def pairs(count, seed):
    random = np.random.default_rng(seed)
    items = random.normal(size=(count, 8))
    views = {
        "left": items @ random.normal(size=(8, LEFT)),
        "right": np.tanh(items @ random.normal(size=(8, RIGHT))),
    }
    x = {}
    for name, view in views.items():
        noise = 0.1 * random.normal(size=view.shape)
        x[name] = (view + noise).astype("float32")

    no_labels = np.zeros(count, "float32")  # a pair needs none
    examples = tf.data.Dataset.from_tensor_slices((x, no_labels))
    training = count * 4 // 5
    return Data(examples.take(training), examples.skip(training), name="pairs")


def towers(units, dropout):
    views = {
        "left": keras.Input((LEFT,), name="left"),
        "right": keras.Input((RIGHT,), name="right"),
    }
    embedded = []
    for view in views.values():
        drop = keras.layers.Dropout(dropout)
        hidden = drop(keras.layers.Dense(units, "relu")(view))
        direction = keras.layers.Dense(16)(hidden)
        embedded.append(keras.layers.UnitNormalization()(direction))
    return keras.Model(views, keras.ops.stack(embedded, axis=1))  # (batch, 2, 16)


class InfoNCE(keras.losses.Loss):
    couples_examples = True  # rejected without loss_over=effective_batch

    def __init__(self, temperature=0.1, **options):
        super().__init__(**options)
        self.temperature = temperature

    def call(self, y_true, y_pred):
        left, right = keras.ops.unstack(y_pred, 2, axis=1)
        # (batch, batch); the pairs are on the diagonal.
        scores = left @ keras.ops.transpose(right) / self.temperature
        right_given_left = keras.ops.diagonal(keras.ops.log_softmax(scores, axis=1))
        left_given_right = keras.ops.diagonal(keras.ops.log_softmax(scores, axis=0))
        return -(right_given_left + left_given_right) / 2
