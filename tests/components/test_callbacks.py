"""Callbacks of the config that would undo what the pipeline does itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from omegaconf import OmegaConf

from pipeline.accumulation import internals
from pipeline.common.errors import ConfigError
from pipeline.components import monitored_names, objective
from pipeline.components.objective import RunObjective
from pipeline.config.validation_sets import ValidationSet


class MyBackup(keras.callbacks.BackupAndRestore):
    """A user's own."""


def build(**node):
    config = {
        "loss": {"_target_": "keras.losses.MeanSquaredError"},
        "loss_weights": None,
        "added_losses": "mean",
        "loss_over": "example",
        "metrics": {},
        "weighted_metrics": {},
        "callbacks": {"mine": node},
        "shown": {},
    }
    return objective.build(OmegaConf.create(config)).callbacks["mine"]


@pytest.mark.parametrize(
    ("node", "use_instead"),
    [
        ({"_target_": "keras.callbacks.SwapEMAWeights"}, "optimizer.use_ema=true"),
        (
            {"_target_": "keras.callbacks.SwapEMAWeights", "swap_on_epoch": True},
            "optimizer.use_ema=true",
        ),
        (
            {"_target_": "keras.callbacks.BackupAndRestore", "backup_dir": "there"},
            "pipeline resume",
        ),
        ({"_target_": f"{__name__}.MyBackup", "backup_dir": "there"}, "resume"),
    ],
)
def test_what_the_pipeline_does_itself_is_rejected(node, use_instead):
    rule = r"training\.callbacks\.mine\._target_ must be left out: "
    with pytest.raises(ConfigError, match=rule) as raised:
        build(**node)
    assert use_instead in str(raised.value)


def test_another_callback_of_keras_is_built():
    built = build(_target_="keras.callbacks.EarlyStopping", restore_best_weights=True)
    assert built.restore_best_weights


KEEP = {
    "_target_": "keras.callbacks.ModelCheckpoint",
    "filepath": "best.keras",
    "save_best_only": True,
}


def test_the_best_by_the_validation_is_not_known_after_an_update():
    with pytest.raises(ConfigError) as raised:
        build(**KEEP, save_freq=5)
    assert str(raised.value) == (
        "training.callbacks.mine.save_freq must be epoch: a single update has no "
        "val_loss. Received: 5."
    )
    assert build(**KEEP).save_best_only
    assert build(**KEEP, monitor="loss", save_freq=5).save_freq == 5
    assert build(**KEEP | {"save_best_only": False}, save_freq=5).save_freq == 5


class BestSaver(keras.callbacks.Callback):
    """A callback of a user's own, with names that Keras' has too."""

    save_best_only = True
    save_freq = 5


def test_a_callback_of_your_own_need_not_monitor_anything():
    target = f"{__name__}.{BestSaver.__name__}"
    assert type(build(_target_=target)).__name__ == "BestSaver"


def test_a_callback_that_writes_into_the_working_folder_is_named(tmp_path):
    callbacks = {
        "best": keras.callbacks.ModelCheckpoint("best.keras"),
        "rows": keras.callbacks.CSVLogger(f"{tmp_path}/rows.csv"),
        "stop": keras.callbacks.EarlyStopping(),
        "board": keras.callbacks.TensorBoard("gs://bucket/logs"),
    }
    assert objective.notes_on_files(callbacks) == [
        "training.callbacks.best writes to best.keras in the working folder, where "
        "another run overwrites it; set filepath: ${hydra:runtime.output_dir}/best.keras"
    ]


class Unsaved(keras.Model):
    """A model that Keras cannot save, as it has no `get_config`."""

    def __init__(self, activation):
        super().__init__()
        self.dense = keras.layers.Dense(1, activation=activation)

    def call(self, inputs):
        return self.dense(inputs)


def compiled_with(callback):
    """Compile a model that cannot be saved with the callback."""
    model = Unsaved(lambda x: 2 * x)
    y = np.zeros((2, 1), "float32")
    goal = RunObjective(
        training=internals.Objective(keras.losses.MeanSquaredError()),
        evaluation=internals.Objective(keras.losses.MeanSquaredError()),
        callbacks={"save": callback},
    )
    objective.compile(goal, model, keras.optimizers.SGD(), y, model(y))


def test_a_model_that_cannot_be_saved_is_rejected_before_the_first_epoch():
    rule = (
        r"training\.callbacks\.save must be able to run \(Object Unsaved was created .* "
        r"Please implement `get_config\(\)`\. To save only the weights, set "
        r"save_weights_only: true and a filepath that ends in \.weights\.h5\)"
    )
    with pytest.raises(ConfigError, match=rule):
        compiled_with(keras.callbacks.ModelCheckpoint("last.keras"))
    weights = keras.callbacks.ModelCheckpoint("it.weights.h5", save_weights_only=True)
    compiled_with(weights)


def check_monitors(monitor, *others, validation=True, **options):
    stop = keras.callbacks.EarlyStopping(monitor, **options)
    callbacks = {"stop": stop} | dict(enumerate(others))
    sets = [ValidationSet("late", "test", None, None)]
    split = object() if validation else None
    data = SimpleNamespace(validation=split)
    return monitored_names.check(callbacks, data, sets, ["loss", "accuracy"])


def test_a_monitored_metric_that_no_epoch_has_is_rejected():
    with pytest.raises(ConfigError) as raised:
        check_monitors("val/accuracy", mode="max")
    assert str(raised.value) == (
        "training.callbacks.stop.monitor must be a name in the logs of Keras' callbacks. "
        "Received: 'val/accuracy'. Choices: val_loss, val_accuracy, val_late_loss, "
        "val_late_accuracy, loss, accuracy, gradient_norm, learning_rate. "
        "Did you mean 'val_accuracy'?"
    )
    with pytest.raises(ConfigError, match="Choices: val_late_loss"):
        check_monitors("val_loss", validation=False)
    for known in ("val_loss", "val_late_loss", "accuracy", "skipped_updates"):
        assert check_monitors(known) == []


def test_a_callback_of_your_own_may_add_the_monitored_metric():
    assert check_monitors("mine", BestSaver()) == [
        "training.callbacks.stop.monitor: only a callback of your own can add mine to "
        "the logs, which have val_loss, val_accuracy, val_late_loss, val_late_accuracy, "
        "loss, accuracy, gradient_norm, learning_rate"
    ]
    with pytest.raises(ConfigError, match="Did you mean 'val_loss'"):
        check_monitors("val/loss", BestSaver())
    # Without save_best_only, ModelCheckpoint does not read the metric.
    save = keras.callbacks.ModelCheckpoint("it.keras", monitor="none")
    check_monitors("loss", save, validation=False)


def test_tensorboard_needs_its_package_before_the_run_begins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    rule = "must be able to run .it needs the package tensorboard, which the extra"
    with pytest.raises(ConfigError, match=rule):
        compiled_with(keras.callbacks.TensorBoard(tmp_path))
