"""What `verify` takes as the training does, and what it blames when only one part differs."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from pipeline.accumulation import Evaluation, Update
from pipeline.accumulation.internals import Objective
from pipeline.verify import command, engine
from tests.verify.test_hidden import Last, OwnLoss, kept_mean, own

pytestmark = pytest.mark.usefixtures("float64")

EXAMPLES = 12
MICRO = 5


class Growing(keras.regularizers.Regularizer):
    """Adds more with each call."""

    def __init__(self):
        self.calls = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def __call__(self, weights):
        calls = self.calls.assign_add(1.0)
        return 0.1 * calls * ops.sum(ops.square(weights))


class InFloat32(keras.metrics.Sum):
    """The sum of the errors, computed in float32 in every precision."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = ops.cast(ops.abs(y_true - y_pred), "float32")
        super().update_state(ops.cast(ops.sum(errors), self.dtype))


def by_its_mean(y, outputs):
    """Return losses whose sum over any batch is the number of its examples."""
    errors = 0.1 + ops.square(y - outputs)[:, 0]
    return errors / ops.mean(errors)


def fault_of(loss=None, metrics=(), regularizer=None, middle=()) -> str:
    """Return what `verify` says is at fault; empty if nothing differs."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, "tanh", name="first"),
            *middle,
            layers.Dense(1, kernel_regularizer=regularizer, name="last"),
        ]
    )
    loss = loss or keras.losses.MeanSquaredError()
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss, metrics=list(metrics))
    optimizer.build(model.trainable_variables)
    objective = Objective(loss, metrics=list(metrics))
    update = Update(model, objective, optimizer, MICRO)
    evaluation = Evaluation(model, objective, MICRO)

    numbers = np.random.default_rng(0)
    batch = (numbers.normal(size=(EXAMPLES, 6)), numbers.normal(size=(EXAMPLES, 1)))
    (findings,) = engine.compare(update, [batch])
    findings += engine.compare_evaluation(evaluation, batch)
    differing = [finding for finding in findings if not finding.holds]
    if not differing:
        return ""
    cut = SimpleNamespace(micro_batch_size=MICRO, micro_batch_tokens=None)
    parts = SimpleNamespace(model=model, plan=SimpleNamespace(batching=cut))
    return command._fault(parts, update, batch, differing)


def test_nothing_is_blamed_where_nothing_differs():
    assert fault_of(metrics=[keras.metrics.MeanAbsoluteError()], regularizer="l2") == ""


@pytest.mark.slow
def test_a_loss_that_is_divided_by_its_mean_over_the_batch():
    assert fault_of(OwnLoss(by_its_mean)) == (
        "own_loss (OwnLoss): the gradient of its loss for an example depends on the other examples"
    )


def test_a_metric_that_alone_differs():
    assert fault_of(metrics=[Last()]) == "the metric last (Last)"


def test_a_metric_that_computes_in_float32():
    assert fault_of(metrics=[InFloat32(name="errors")]) == (
        "the metric errors (InFloat32): it seems to compute in float32, although the "
        "comparison is in float64 (use self.dtype in the metric); everything else is "
        "equal within rounding, including the update of the weights"
    )


def test_a_layer_that_only_updates_its_state():
    fault = fault_of(middle=[own(kept_mean, 0.0)()])
    assert fault.startswith("the state ")
    assert fault.endswith(
        ": it is updated in every forward pass, so once per micro-batch"
    )


@pytest.mark.slow
def test_a_regularizer_that_alone_differs():
    fault = fault_of(regularizer=Growing())
    assert fault.endswith(
        "last/kernel: its regularizer has a different value in each call"
    )


@pytest.mark.slow
def test_losses_of_outputs_in_nested_dicts():
    inputs = keras.Input((6,))
    hidden = layers.Dense(4, "tanh")(inputs)
    outputs = {"a": layers.Dense(1)(hidden), "b": {"c": layers.Dense(1)(hidden)}}
    model = keras.Model(inputs, outputs)
    losses = {name: keras.losses.MeanSquaredError() for name in ("a", "b/c")}
    weights = {"a": 0.5, "b/c": 2.0}
    metrics = {"b/c": [keras.metrics.MeanAbsoluteError(name="error")]}
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, losses, loss_weights=weights, metrics=metrics)
    optimizer.build(model.trainable_variables)
    update = Update(model, Objective(losses, weights, metrics), optimizer, MICRO)

    numbers = np.random.default_rng(0)
    first, second = numbers.normal(size=(2, EXAMPLES, 1))
    y = {"a": first, "b": {"c": second}}
    (findings,) = engine.compare(update, [(numbers.normal(size=(EXAMPLES, 6)), y)])
    assert all(finding.holds for finding in findings)
    assert {"loss", "a_loss", "b/c_loss"} <= {finding.what for finding in findings}

    wrong = Objective(losses, {"a": 0.5, "b/c": 1.0}, metrics)
    update = Update(model, wrong, optimizer, MICRO)
    (findings,) = engine.compare(update, [(numbers.normal(size=(EXAMPLES, 6)), y)])
    assert not all(finding.holds for finding in findings)
