"""Texts of unequal length → the kind of each token and one number per text.

Command:   cd examples/two_outputs && pipeline train --config-dir conf experiment=tagger
Run time:  about 20 seconds on two CPU cores
Expect:    val/kind_accuracy above 0.9, and a metric val/length_error

Each output has a loss, weights and metrics of its own.
"""

import keras
import numpy as np
import tensorflow as tf

from pipeline.dataset import Data

TIME = 12  # the longest text, in tokens
TOKENS = 20  # size of the vocabulary, the padding token included
KINDS = 4


def texts(count, seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(1, TOKENS, (count, TIME))
    lengths = random.integers(3, TIME + 1, count)
    tokens[np.arange(TIME) >= lengths[:, None]] = 0  # padding
    labels = {"kind": tokens % KINDS, "length": (tokens > 0).mean(1, keepdims=True)}
    weights = {
        "kind": np.where(tokens % KINDS == 0, 2.0, 1.0),
        "length": np.linspace(0.5, 1.5, count),
    }
    examples = tf.data.Dataset.from_tensor_slices((tokens, labels, weights))
    training = count * 4 // 5
    return Data(examples.take(training), examples.skip(training), name="texts")


def tagger(units):
    tokens = keras.Input((TIME,), dtype="int64")
    hidden = keras.layers.Embedding(TOKENS, units, mask_zero=True)(tokens)
    hidden = keras.layers.GRU(units, return_sequences=True)(hidden)
    kind = keras.layers.Dense(KINDS, name="kind")(hidden)  # has the mask of its tokens
    average = keras.layers.GlobalAveragePooling1D()(hidden)
    length = keras.layers.Dense(1, name="length")(average)
    return keras.Model(tokens, {"kind": kind, "length": length})
