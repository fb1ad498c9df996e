"""The rows of `pipeline predict` for examples that were padded."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf

from pipeline.accumulation.evaluation import Predicted
from pipeline.dataset import padding
from pipeline.evaluate import predicted_rows

LENGTHS = [3, 1, 2]
SPEC = tf.TensorSpec([None], tf.int32)
PAD = {"multiple": 4, "value": 0}


def ragged(first=1):
    return tf.ragged.constant([[first] * length for length in LENGTHS], tf.int32)


def outputs_for(padded):
    """Return a number and a vector of each position, and a class of each example."""
    numbers = tf.cast(padded, tf.float32)
    return {
        "number": numbers,
        "vector": tf.stack([numbers, -numbers], axis=-1),
        "class": tf.zeros([3, 4]),  # as many classes as positions with the padding
        "half": numbers[:, ::2],
    }


SEQUENCES = {"number", "vector", "half"}


def rows(batch, spec) -> pa.Table:
    padded = padding.padder(PAD, spec)(*batch)
    x = padded[0]["text"] if isinstance(padded[0], dict) else padded[0]
    outputs = outputs_for(x)
    cut = predicted_rows.without_padding(outputs, batch, padded, SEQUENCES)
    return predicted_rows.table_of(
        batch, Predicted(cut, tf.constant([1.0, 2.0, 3.0])), 0
    )


def lengths_of(table, column):
    return [len(row) for row in table[column].to_pylist()]


def test_positions_that_are_padding_are_cut_off():
    for batch, spec in (
        ((ragged(), ragged(2)), (SPEC, SPEC)),
        ((ragged(),), (SPEC,)),  # without labels, by the inputs
        # Inputs of other lengths: the labels decide.
        (
            (
                {"text": ragged(), "hint": tf.ragged.constant([[1], [1, 1], [1]])},
                {"number": ragged(), "vector": ragged()},
            ),
            (
                {"text": SPEC, "hint": SPEC},
                {"number": SPEC, "vector": SPEC},
            ),
        ),
    ):
        table = rows(batch, spec)
        assert lengths_of(table, "output.number") == LENGTHS
        assert lengths_of(table, "output.vector") == LENGTHS
        assert table["output.vector"].to_pylist()[1] == [[1.0, -1.0]]
        assert lengths_of(table, "output.class") == [4, 4, 4]
        assert lengths_of(table, "output.half") == [2, 2, 2]
        assert table["loss"].to_pylist() == [1.0, 2.0, 3.0]
        value_type = table.schema.field("output.number").type.value_type
        assert value_type == pa.float32()
    labels = rows((ragged(), ragged(2)), (SPEC, SPEC))["label"]
    assert labels.to_pylist() == [[2, 2, 2], [2], [2, 2]]
    assert labels.type.value_type == pa.int32()


def test_what_has_no_known_length_stays_whole():
    dense = tf.constant(np.ones([3, 4]), tf.int32)
    spec = (tf.TensorSpec([4], tf.int32),) * 2
    table = rows((dense, dense), spec)
    assert lengths_of(table, "output.number") == [4, 4, 4]
    # Two inputs of different lengths, and no label that tells which one counts.
    hint = tf.ragged.constant([[1], [1, 1], [1]])
    batch = ({"text": ragged(), "hint": hint},)
    table = rows(batch, ({"text": SPEC, "hint": SPEC},))
    assert lengths_of(table, "output.number") == [4, 4, 4]


def test_only_outputs_of_no_fixed_size_are_sequences():
    inputs = keras.Input([None], dtype="int32")
    vectors = keras.layers.Embedding(3, 4)(inputs)
    pooled = keras.layers.GlobalAveragePooling1D()(vectors)
    model = keras.Model(inputs, {"tokens": vectors, "pooled": pooled})
    predict = tf.function(model).get_concrete_function(
        tf.TensorSpec([None, None], tf.int32)
    )
    outputs = predict.structured_outputs
    assert predicted_rows.sequences_among(outputs) == {"tokens"}
