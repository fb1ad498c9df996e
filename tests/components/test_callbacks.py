"""Callbacks of the config that would undo what the pipeline does itself."""

from __future__ import annotations

import keras
import pytest
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.components import objective


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
        "another run overwrites it: filepath: ${hydra:runtime.output_dir}/best.keras"
    ]
