"""The whole update as one program of XLA: what it computes, where, and when.

The same update in steps, without XLA, is the reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update, micro_batches
from pipeline.accumulation.compiled_apply import ApplyProgram
from pipeline.accumulation.internals import Objective

MICRO = 4
# Rounding of 1e-16 in each sum, which the division by √v of AdamW stretches.
TOLERANCE = 1e-11


class Half(layers.Layer):
    """Adds a loss per example, and passes its input on."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(x**2, axis=1))
        return x


def model_with_state() -> keras.Model:
    """Return a model whose update assigns more than weights."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            Half(),
            layers.Dense(3),
        ]
    )


def model_of_words() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(11, 4),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def update_of(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, **options: Any
) -> Update:
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    objective = Objective(loss, None, [metric])
    return Update(model, objective, optimizer, MICRO, **options)


def batch_of(model: keras.Model, examples: int, random: np.random.Generator) -> tuple:
    shape = (examples, *model.input_shape[1:])
    if model.inputs[0].dtype == "int32":
        x = random.integers(0, 11, shape).astype("int32")
    else:
        x = random.normal(size=shape).astype(keras.config.floatx())
    return x, random.integers(0, 3, examples)


def traced(update: Update) -> Any:
    """Return one trace for batches of every size."""
    shape = [None, *update.model.input_shape[1:]]
    dtype = update.model.inputs[0].dtype
    specs = (tf.TensorSpec(shape, dtype), tf.TensorSpec([None], tf.int64))
    return tf.function(lambda *batch: update(batch), specs, autograph=False)


def trained(
    sizes: Sequence[int], built: Any = model_with_state, **options: Any
) -> tuple[Update, list[np.ndarray], list[dict[str, float]]]:
    """Return an update, all variables that it has trained, and the results."""
    keras.utils.set_random_seed(0)
    model = built()
    optimizer = keras.optimizers.AdamW(0.01, use_ema=True)
    options = {"same_noise": "auto", "noise_every": 2} | options
    update = update_of(model, optimizer, **options)
    step = traced(update)
    random = np.random.default_rng(0)
    results = []
    for examples in sizes:
        row = step(*batch_of(model, examples, random))
        results.append({name: float(value) for name, value in row.items()})
    variables = [*model.variables, *optimizer.variables]
    return update, [variable.numpy() for variable in variables], results


def deviation(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """Return the largest difference of the floating values, relative to 1."""
    largest = 0.0
    for value, other in zip(values, others, strict=True):
        if value.dtype.kind == "f":
            difference = np.abs(value - other) / np.maximum(1, np.abs(other))
            largest = max(largest, float(difference.max()))
        else:
            np.testing.assert_array_equal(value, other)
    return largest


ONE_PROGRAM = {"jit_compile": True, "xla_scope": "update"}
# All micro-batches are full; the last one is short; a batch smaller than one.
SIZES = (16, 16, 12, 14, 3, 16)


@pytest.mark.slow
def test_all_state_is_that_of_the_update_in_steps(float64):
    update, values, results = trained(SIZES, **ONE_PROGRAM)
    assert update.update_compiled
    _, expected, expected_results = trained(SIZES)
    assert deviation(values, expected) < TOLERANCE
    for row, expected_row in zip(results, expected_results, strict=True):
        assert row == pytest.approx(expected_row, rel=TOLERANCE, nan_ok=True)

    # The control: one example less is seen.
    _, wrong, _ = trained((15, *SIZES[1:]))
    assert deviation(values, wrong) > 1e-4


@pytest.mark.slow
def test_it_runs_as_one_program_where_it_fits(float64, monkeypatch):
    """The batches that do not fit are computed in steps, as all are with no room."""
    programs = []
    run = ApplyProgram.run

    def counted(program: ApplyProgram) -> Any:
        applied = run(program)
        with tf.control_dependencies([applied.norm]):
            tf.py_function(lambda: programs.append(id(program)), [], [])
        return applied

    monkeypatch.setattr(ApplyProgram, "run", counted)
    _, values, _ = trained(SIZES, **ONE_PROGRAM)
    in_program = set(programs[:3])
    in_steps = set(programs[3:5])
    assert len(programs) == len(SIZES)
    assert len(in_program) == len(in_steps) == 1
    assert in_program != in_steps
    assert programs[5] in in_program

    monkeypatch.setattr(micro_batches, "MOST_BYTES", 0)
    programs.clear()
    _, others, _ = trained(SIZES, **ONE_PROGRAM)
    assert len(set(programs)) == 1
    assert deviation(values, others) < TOLERANCE


# In `make test`, the rule is in test_compiled_apply.py.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "compiled"), [("AdamW", True), ("SGD", False)])
def test_rows_are_compiled_where_they_become_dense_anyway(float64, name, compiled):
    weights = []
    for options in (ONE_PROGRAM, {}):
        keras.utils.set_random_seed(0)
        optimizer = getattr(keras.optimizers, name)(0.01)
        update = update_of(model_of_words(), optimizer, **options)
        step = traced(update)
        random = np.random.default_rng(0)
        for examples in (16, 8):
            step(*batch_of(update.model, examples, random))
        assert update.update_compiled is (compiled and bool(options))
        weights.append(update.model.get_weights())
    assert deviation(*weights) < TOLERANCE


# In `make test`, the step of the optimizer does, in test_compiled_apply.py.
@pytest.mark.slow
def test_one_program_updates_in_place():
    """The loop, the norm and the step are in one program of XLA, as are all weights."""
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(8, activation="tanh")
    model = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(3)])
    update = update_of(model, keras.optimizers.AdamW(0.01), **ONE_PROGRAM)
    batch = batch_of(update.model, 16, np.random.default_rng(0))

    @tf.function(autograph=False, jit_compile=True)
    def program(x: tf.Tensor, y: tf.Tensor) -> Any:
        loop = update._loop_of_replica((x, y), update._context((x, y), False))
        return update._applied(loop.run_in_program())

    compiler_ir = program.experimental_get_compiler_ir(*map(tf.constant, batch))
    hlo = compiler_ir(stage="optimized_hlo")
    assert " while(" in hlo
    assert "global_norm" in hlo
    (aliases,) = re.findall(r"input_output_alias=\{ (.*?) \}, \w+=", hlo)
    inputs = re.findall(r"\{\d+\}: \((\d+), \{\}, may-alias\)", aliases)
    # Each weight has two moments.
    assert len(set(inputs)) >= 3 * len(update.model.trainable_variables)


def test_a_loss_over_the_effective_batch_is_computed_in_steps():
    keras.utils.set_random_seed(0)
    options = ONE_PROGRAM | {"loss_over": "effective_batch"}
    update = update_of(model_of_words(), keras.optimizers.Adam(0.1), **options)
    traced(update).get_concrete_function()
    assert update.compiled
    assert not update.update_compiled
