"""Data, a model, a loss and a metric of your own, trained by `pipeline` from a folder of your own.

Command:   cd examples/own_project && pipeline train --config-dir conf experiment=moons
Run time:  about 15 seconds on two CPU cores
Expect:    val/accuracy above 0.9, and val/confidence beside it
"""

import keras
import tensorflow as tf
from sklearn.datasets import make_moons

from pipeline.dataset import Data


def moons(noise):
    x, y = make_moons(1200, noise=noise, random_state=0)
    examples = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y))
    return Data(examples.take(1000), examples.skip(1000), classes=2)


def tiny(input_shape, classes, units):
    layers = [keras.layers.Flatten(), keras.layers.Dense(units, "relu"), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *layers])


def focal(y_true, y_pred, from_logits, gamma):
    entropy = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits)
    return (1 - keras.ops.exp(-entropy)) ** gamma * entropy


class Confidence(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(keras.ops.max(keras.ops.softmax(y_pred), axis=-1), sample_weight)
