"""With `use_ema`: what is evaluated, kept as best, tested and left in the model."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import keras
import numpy as np
import pytest
from keras import layers

from pipeline.training.evaluator import averaged_weights
from tests.parameters import mostly_slow
from tests.training.test_loop import PER_EPOCH, Run

EPOCHS = 5
BEST = 1  # the epoch whose validation loss the tests plant as the lowest


class Looks(keras.callbacks.Callback):
    """Keeps the weights that it sees at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[list[np.ndarray]] = []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(self.model.get_weights())


class Plants(keras.callbacks.Callback):
    """Makes one epoch the best one, for the callbacks after this one."""

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = abs(epoch - BEST)


@cache
def after(epochs: int, **options) -> list[np.ndarray]:
    """Return the weights that a run of this length ends with."""
    run = Run(epochs=epochs, validate=False, **options)
    return run.model.get_weights()


def assert_equal(weights, expected) -> None:
    for weight, expected_weight in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(weight, expected_weight)


def distance(weights, others) -> float:
    """Return the largest difference of two kernels: the first weights of each."""
    return np.abs(weights[0] - others[0]).max()


def test_a_callback_sees_the_weights_of_which_its_validation_is():
    looks = Looks()
    run = Run([looks], use_ema=True, epochs=2)
    at_first_end, _ = looks.weights
    assert_equal(at_first_end, after(1, use_ema=True))
    assert distance(at_first_end, after(1)) > 1e-3

    # The training goes on from the weights themselves.
    plain = Run(use_ema=True, epochs=2, validate=False)
    assert run.rows.updates == plain.rows.updates
    assert_equal(run.model.get_weights(), plain.model.get_weights())


@pytest.mark.parametrize("use_ema", mostly_slow([True, False], [True]))
def test_the_weights_of_the_best_epoch_are_kept_tested_and_left(use_ema, tmp_path):
    """They are the averages, as those that were evaluated."""
    file = tmp_path / "best.weights.h5"
    keep = keras.callbacks.ModelCheckpoint(
        file, "val_loss", save_best_only=True, save_weights_only=True
    )
    stop = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    run = Run([Plants(), keep, stop], epochs=EPOCHS, use_ema=use_ema, fit=False)
    weights_at_test = []

    def test(check):
        weights_at_test.append(run.model.get_weights())
        return {"loss": 0.0}

    run.trainer.evaluations = replace(run.trainer.evaluations, test=test)
    run.trainer.recorder.evaluated = lambda *_: None
    run.trainer.fit()

    # Epochs count from 0, and the patience is of two epochs.
    epochs_to_best = BEST + 1
    epochs_to_stop = epochs_to_best + 2
    assert run.trainer.done == epochs_to_stop * PER_EPOCH
    best = after(epochs_to_best, use_ema=use_ema)
    assert_equal(run.model.get_weights(), best)
    assert_equal(weights_at_test[0], best)
    run.model.load_weights(file)
    assert_equal(run.model.get_weights(), best)

    # The control: the last weights are others.
    last = after(epochs_to_stop, use_ema=use_ema)
    assert distance(best, last) > 1e-3


def test_what_a_callback_assigns_is_kept_with_a_line(capsys):
    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                kernel = self.model.layers[-1].kernel
                kernel.assign(kernel / 2)

    class Begins(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.weights = self.model.get_weights()

    begins = Begins()
    Run([Halves(), begins], use_ema=True, epochs=2)
    kernel, bias = begins.weights
    averaged_kernel, _ = after(1, use_ema=True)
    np.testing.assert_array_equal(kernel, averaged_kernel / 2)
    # The bias, which it left alone, is that of the training.
    _, trained_bias = after(1)
    np.testing.assert_array_equal(bias, trained_bias)
    lines = capsys.readouterr().err
    assert re.search(r"a callback has changed \S*kernel in on_epoch_end", lines)
    assert lines.count("training continues from the changed value") == 1


def test_each_optimizer_of_several_is_averaged_by_its_own_setting():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.Dense(1)])
    first = model.layers[0].kernel.path

    def optimizer_of(variable):
        averages = variable.path == first
        return keras.optimizers.SGD(0.1, use_ema=averages, ema_momentum=0.5)

    several = keras.optimizers.MultiOptimizer(optimizer_of)
    variables = model.trainable_variables
    several.build(variables)
    ones = [np.ones(variable.shape, "float32") for variable in variables]
    for _ in range(2):
        several.apply(ones, variables)

    before = model.get_weights()
    with averaged_weights(several, model):
        inside = model.get_weights()
    assert_equal(model.get_weights(), before)
    # The first step is the average; the second one moves it by half of −0.1.
    kernel, *others = before
    averaged_kernel, *others_inside = inside
    np.testing.assert_allclose(averaged_kernel - kernel, 0.05, rtol=1e-5)
    assert_equal(others_inside, others)
