"""Data, a model, loss, metric, schedule, callback and table of your own, in a folder of your own.

Command:   cd examples/own_project && pipeline train --config-dir conf experiment=moons
Run time:  about 15 seconds on two CPU cores
Expect:    val/accuracy above 0.9, and a metric val/confidence
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import make_moons

import pipeline
from pipeline.dataset import Data


def moons(noise):
    x, y = make_moons(1200, noise=noise, random_state=0)
    examples = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y))
    return Data(examples.take(1000), examples.skip(1000), classes=2)


def arrays(file):
    """Arrays of examples and labels that `numpy.savez(file, x=x, y=y)` has written."""
    stored = np.load(file)
    examples = tf.data.Dataset.from_tensor_slices((stored["x"], stored["y"]))
    held_out = len(stored["y"]) // 10
    validation = examples.take(held_out)
    test = examples.skip(held_out).take(held_out)
    train = examples.skip(2 * held_out)
    return Data(train, validation, classes=10, test=test)


def windows(length):
    """Windows of a series, each with the value that follows it as its label."""
    series = np.sin(np.arange(1000 + length, dtype="float32"))[:, None]
    labels = series[length:]
    batches = keras.utils.timeseries_dataset_from_array(series, labels, length)
    examples = batches.unbatch().map(lambda x, y: (tf.ensure_shape(x, (length, 1)), y))
    examples = examples.apply(tf.data.experimental.assert_cardinality(1000))
    return examples.take(800), examples.skip(800)


def tiny(input_shape, classes, units):
    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Dense(units, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(x))


def focal(y_true, y_pred, from_logits, gamma):
    entropy = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits)
    return (1 - keras.ops.exp(-entropy)) ** gamma * entropy


class Confidence(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        confidence = keras.ops.max(keras.ops.softmax(y_pred), axis=-1)
        return super().update_state(confidence, sample_weight)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate, every):
        self.rate = rate
        self.every = every

    def __call__(self, step):
        return self.rate * 0.5 ** keras.ops.cast(step // self.every, "float32")


class WeightNorm(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pipeline.log("weight_norm", self.norm())

    def on_epoch_end(self, epoch, logs=None):
        logs["weight_norm_of_epoch"] = self.norm()

    def norm(self):
        return tf.linalg.global_norm(self.model.trainable_weights)


def margins(x, y, outputs):
    ordered = np.sort(outputs, axis=-1)
    return {"label": y, "margin": ordered[:, -1] - ordered[:, -2]}
