"""How often a run traces the model, and XLA compiles it."""

from __future__ import annotations

import json
import re

import pytest

from tests.running import pipeline

TRACING = """
import json
import os
import keras
import numpy as np
import tensorflow as tf


class Traced(keras.layers.Layer):
    "Writes a line for each time that it is traced, but for symbolic tensors of Keras."

    def call(self, x, training=False):
        if not isinstance(x, keras.KerasTensor):
            row = [bool(training), list(x.shape), tf.inside_function()]
            with open(os.environ["TRACES"], "a") as file:
                print(json.dumps(row), file=file)
        return x * 1.0


def examples():
    "60 sequences of 4 to 16 numbers, and 12 to validate with."
    lengths = 4 + 4 * (np.arange(60) // 8 % 4)

    def split(lengths):
        def sequences():
            for length in lengths:
                numbers = np.linspace(0.0, 1.0, length, dtype="float32")
                yield numbers[:, None], np.float32([length])

        spec = (tf.TensorSpec((None, 1)), tf.TensorSpec((1,)))
        dataset = tf.data.Dataset.from_generator(sequences, output_signature=spec)
        return dataset.apply(tf.data.experimental.assert_cardinality(len(lengths)))

    return split(lengths), split(lengths[:12])


def model(input_shape):
    hidden = keras.layers.Dense(8, activation="relu")
    mean = keras.layers.GlobalAveragePooling1D()
    output = keras.layers.Dense(1)
    return keras.Sequential([keras.Input((None, 1)), Traced(), hidden, mean, output])
"""
PADDED = (
    "~dataset",
    "+dataset={_target_: traced.examples, in_memory: true, "
    "pad: {multiple: 4, value: 0}}",
    "~model",
    "+model={_target_: traced.model}",
    "objective=regression",
    "accumulation={effective_batch_size: 8, factor: 2}",
    "training.epochs=3",
    "tracking.log_model=false",
)


def traces(tmp_path, *overrides, **environment):
    (tmp_path / "traced.py").write_text(TRACING)
    environment |= {"PYTHONPATH": str(tmp_path), "TRACES": str(tmp_path / "traces")}
    pipeline("train", *PADDED, *overrides, cwd=tmp_path, **environment)
    return [json.loads(line) for line in (tmp_path / "traces").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_traces_the_model_three_times_whatever_the_lengths(tmp_path):
    """There are four lengths, a smaller last update of each epoch, and a checkpoint.

    There are three evaluations, too.
    """
    in_graph = []
    for training, shape, inside_function in traces(tmp_path):
        if inside_function:
            in_graph.append((training, shape))
    any_size = [None, None, 1]
    assert in_graph == [
        (False, any_size),  # Keras itself, when the model is built
        (True, [None, 4, 1]),  # which variables a forward pass changes
        (True, any_size),  # the update
        (False, any_size),  # the evaluation
    ]


@pytest.mark.slow
def test_xla_compiles_once_a_padded_length(tmp_path):
    """Of micro-batches of 4 and 3 the former are compiled.

    There is one module a length, and one more for evaluations.
    """
    dump = tmp_path / "xla"
    rows = traces(
        tmp_path,
        "hardware.xla=true",
        "accumulation.effective_batch_size=7",
        XLA_FLAGS=f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
    )
    assert rows.count([True, [None, None, 1], True]) == 1
    parameter = re.compile(r"f32\[(\d+),(\d+),1\]\S* parameter\(")
    lengths = []
    for file in dump.glob("*before_optimizations.txt"):
        size, length = parameter.search(file.read_text()).groups()
        assert size == "4"
        lengths.append(int(length))
    assert {4, 8} <= set(lengths) <= {4, 8, 12, 16}
    # That of an update gives more than that of an evaluation.
    assert len(set(lengths)) < len(lengths) <= 2 * len(set(lengths))
    assert max(map(lengths.count, lengths)) == 2
