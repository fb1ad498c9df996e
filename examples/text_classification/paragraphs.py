"""Texts of unequal length → one label per text, with little padding.

Command:   cd examples/text_classification && pipeline train --config-dir conf experiment=paragraphs
Run time:  about half a minute on two CPU cores
Expect:    val/accuracy above 0.85

The texts are paragraphs of Python's own documentation: of its statements, or of its
types. For texts of your own, return pairs (text, label) from `labeled_texts`, and set
the number of `classes` in `paragraphs`.
"""

import zlib

import keras
import numpy as np
import tensorflow as tf

from pipeline.dataset import Data

TOPICS = {
    "statements": "assert assignment class compound del for function global if import "
    "nonlocal raise return try while with yield",
    "types": "booleans dict lists numeric-types objects string-methods typesfunctions "
    "typesmapping typesmethods typesseq typesseq-mutable",
}


def labeled_texts():
    from pydoc_data.topics import topics

    pairs = []
    for label, names in enumerate(TOPICS.values()):
        for name in names.split():
            paragraphs = topics[name].split("\n\n")
            pairs += [(text, label) for text in paragraphs if len(text.split()) > 5]
    return pairs


def tokens_of(text, vocabulary):
    """Number the words by a hash: 0 is the padding, and no word list is needed."""
    numbers = [zlib.crc32(word.encode()) for word in text.lower().split()]
    return [1 + number % (vocabulary - 1) for number in numbers]


def paragraphs(vocabulary, validation_share, seed):
    pairs = labeled_texts()
    np.random.default_rng(seed).shuffle(pairs)
    tokens = tf.ragged.constant([tokens_of(text, vocabulary) for text, _ in pairs])
    labels = tf.constant([label for _, label in pairs])
    examples = tf.data.Dataset.from_tensor_slices((tokens, labels))
    held_out = int(len(pairs) * validation_share)
    return Data(
        examples.skip(held_out),
        examples.take(held_out),
        name="paragraphs",
        classes=len(TOPICS),
    )


def classifier(vocabulary, units, classes):
    tokens = keras.Input((None,), dtype="int32")
    # The mask leaves the padding out of the mean.
    words = keras.layers.Embedding(vocabulary, units, mask_zero=True)(tokens)
    mean = keras.layers.GlobalAveragePooling1D()(words)
    hidden = keras.layers.Dense(units, activation="relu")(mean)
    return keras.Model(tokens, keras.layers.Dense(classes)(hidden))
