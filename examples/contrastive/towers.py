"""Two views of each item → two towers, trained by InfoNCE: each pair against all other pairs of the effective batch.

Command:   cd examples/contrastive && pipeline train --config-dir conf experiment=towers
Run time:  about 20 seconds on two CPU cores
Expect:    val/loss below 1.0; a guess among the 64 pairs of a batch has log 64 = 4.2
"""

import keras
import numpy as np
import tensorflow as tf

from pipeline.dataset import Data

LEFT, RIGHT = 24, 16


def pairs(count, seed):
    random = np.random.default_rng(seed)
    items = random.normal(size=(count, 8))
    views = {
        "left": items @ random.normal(size=(8, LEFT)),
        "right": np.tanh(items @ random.normal(size=(8, RIGHT))),
    }
    x = {
        name: (view + 0.1 * random.normal(size=view.shape)).astype("float32")
        for name, view in views.items()
    }
    examples = tf.data.Dataset.from_tensor_slices(
        (x, np.zeros(count, "float32"))
    )  # a pair needs no label
    return Data(
        examples.take(count * 4 // 5), examples.skip(count * 4 // 5), name="pairs"
    )


def towers(units, dropout):
    views = {
        "left": keras.Input((LEFT,), name="left"),
        "right": keras.Input((RIGHT,), name="right"),
    }
    embedded = []
    for view in views.values():
        hidden = keras.layers.Dropout(dropout)(keras.layers.Dense(units, "relu")(view))
        embedded.append(
            keras.layers.UnitNormalization()(keras.layers.Dense(16)(hidden))
        )
    return keras.Model(views, keras.ops.stack(embedded, axis=1))  # (batch, 2, 16)


class InfoNCE(keras.losses.Loss):
    couples_examples = True  # refused without loss_over=effective_batch

    def __init__(self, temperature=0.1, **options):
        super().__init__(**options)
        self.temperature = temperature

    def call(self, y_true, y_pred):
        left, right = keras.ops.unstack(y_pred, 2, axis=1)
        # (batch, batch), of which the diagonal is right
        scores = left @ keras.ops.transpose(right) / self.temperature
        of_left = keras.ops.diagonal(keras.ops.log_softmax(scores, axis=1))
        of_right = keras.ops.diagonal(keras.ops.log_softmax(scores, axis=0))
        return -(of_left + of_right) / 2
