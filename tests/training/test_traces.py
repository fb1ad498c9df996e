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
    "Writes a line for each time that it is traced; built on symbolic tensors of Keras' own first."

    def call(self, x, training=False):
        if not isinstance(x, keras.KerasTensor):
            with open(os.environ["TRACES"], "a") as file:
                print(json.dumps([bool(training), list(x.shape), tf.inside_function()]), file=file)
        return x * 1.0


def examples():
    "60 sequences of 4 to 16 numbers, and 12 to validate with."
    lengths = 4 + 4 * (np.arange(60) // 8 % 4)

    def split(lengths):
        def each():
            for length in lengths:
                yield np.linspace(0.0, 1.0, length, dtype="float32")[:, None], np.float32([length])

        spec = (tf.TensorSpec((None, 1)), tf.TensorSpec((1,)))
        made = tf.data.Dataset.from_generator(each, output_signature=spec)
        return made.apply(tf.data.experimental.assert_cardinality(len(lengths)))

    return split(lengths), split(lengths[:12])


def model(input_shape):
    parts = [Traced(), keras.layers.Dense(8, activation="relu"), keras.layers.GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input((None, 1)), *parts, keras.layers.Dense(1)])
"""
PADDED = (
    *(
        "~dataset",
        "+dataset={_target_: traced.examples, in_memory: true, pad: {multiple: 4, value: 0}}",
    ),
    *(
        "~model",
        "+model={_target_: traced.model}",
        "objective=regression",
        "training.metrics={}",
    ),
    *(
        "accumulation={effective_batch_size: 8, factor: 2}",
        "training.epochs=3",
        "tracking.log_model=false",
    ),
)


def traces(tmp_path, *overrides, **environment):
    (tmp_path / "traced.py").write_text(TRACING)
    environment |= {"PYTHONPATH": str(tmp_path), "TRACES": str(tmp_path / "traces")}
    pipeline("train", *PADDED, *overrides, cwd=tmp_path, **environment)
    return [json.loads(line) for line in (tmp_path / "traces").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_traces_the_model_three_times_whatever_the_lengths(tmp_path):
    """Four lengths, a smaller last update of each epoch, a checkpoint, and three evaluations."""
    found = [
        (training, shape) for training, shape, inside in traces(tmp_path) if inside
    ]
    any_size = [None, None, 1]
    assert found == [
        (False, any_size),  # Keras itself, when the model is built
        (True, [None, 4, 1]),  # which variables a forward pass changes
        (True, any_size),  # the update
        (False, any_size),  # the evaluation
    ]


@pytest.mark.slow
def test_xla_compiles_once_a_padded_length(tmp_path):
    """Micro-batches of 4 and 3, of which the former are compiled: one module a length, and one more for evaluations."""
    dump, sizes = tmp_path / "xla", "accumulation.effective_batch_size=7"
    found = traces(
        tmp_path,
        "hardware.xla=true",
        sizes,
        XLA_FLAGS=f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
    )
    assert (
        sum(
            training and shape == [None, None, 1]
            for training, shape, inside in found
            if inside
        )
        == 1
    )
    modules = [path.read_text() for path in dump.glob("*before_optimizations.txt")]
    shapes = [
        tuple(
            map(int, re.search(r"f32\[(\d+),(\d+),1\]\S* parameter\(", each).groups())
        )
        for each in modules
    ]
    assert {size for size, _ in shapes} == {4}
    lengths = [length for _, length in shapes]
    assert {4, 8} <= set(lengths) <= {4, 8, 12, 16}
    # That of an update gives more than that of an evaluation.
    assert len(set(lengths)) < len(lengths) <= 2 * len(set(lengths))
    assert max(map(lengths.count, lengths)) == 2
