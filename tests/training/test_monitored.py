"""A callback that monitors a metric which an epoch does not have is named."""

from __future__ import annotations

import keras
import pytest

from tests.training.test_loop import Rows, Run


class Taking(Rows):
    """Rows that take those of callbacks, too."""

    def user_metric(self, update, name, value) -> bool:
        return True


class Adds(keras.callbacks.Callback):
    """Adds a metric to the logs, for the callbacks after this one."""

    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = 1.0


def stops(monitor):
    return keras.callbacks.EarlyStopping(monitor, mode="min", patience=9)


@pytest.mark.filterwarnings("ignore:Early stopping conditioned")
@pytest.mark.parametrize(
    ("monitor", "options", "line"),
    [
        ("val_loss", {}, ""),
        pytest.param("mine", {}, "", marks=pytest.mark.slow),
        (
            "val_loss",
            {"evaluate_every": 7},
            "training.callbacks.1 monitors val_loss, which is missing at the end of "
            "epoch 1: set training.evaluate_every=epoch to evaluate at each epoch's end",
        ),
        pytest.param(
            "val_los",
            {},
            "training.callbacks.1 monitors val_los, which is missing at the end of "
            "epoch 1: the logs have gradient_norm, learning_rate, loss, mine, val_loss",
            marks=pytest.mark.slow,
        ),
        (
            "val_loss",
            {"validate": False},
            "training.callbacks.1 monitors val_loss, which is missing at the end of "
            "epoch 1: the logs have gradient_norm, learning_rate, loss, mine",
        ),
    ],
)
def test_it_is_named_once(monitor, options, line, capsys):
    Run([Adds(), stops(monitor)], epochs=3, rows=Taking(), **options)
    lines = capsys.readouterr().err.splitlines()
    assert "".join(text for text in lines if " monitors " in text) == line


@pytest.mark.filterwarnings("ignore:Can save best model only")
def test_what_is_saved_as_the_best_is_named(tmp_path, capsys):
    keep = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.weights.h5", save_best_only=True, save_weights_only=True
    )
    Run([keep], epochs=2, evaluate_every=7)
    line = "missing at the end of epoch 1, so the callback saves as if the epoch were "
    assert capsys.readouterr().err.count(line) == 1


def test_the_end_of_a_run_that_stops_within_an_epoch_has_a_validation(capsys):
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    stop = keras.callbacks.EarlyStopping(restore_best_weights=True)
    run = Run([Stops(), stop], epochs=2)
    assert [update for update, _ in run.rows.validations] == [3]
    assert stop.best == run.loss
    assert " monitors " not in capsys.readouterr().err
