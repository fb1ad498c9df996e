"""What a dataset function returns, in the one form that the package works with."""

from __future__ import annotations

import sys

import keras
import numpy as np
from omegaconf import OmegaConf

from pipeline.dataset.load import load
from pipeline.dataset.splits import Data


def loaded(function, **keys) -> Data:
    """Return the data of a function of this module."""
    return load(OmegaConf.create({"_target_": f"{__name__}.{function}", **keys}))


def photos(path):
    sys.stdout.write("a line of a function of one's own\n")
    folder = keras.utils.image_dataset_from_directory(
        path, image_size=(8, 8), batch_size=2
    )
    return folder, None


def test_a_function_may_write_to_standard_output(tmp_path, capsys):
    """As Keras' functions for folders do, with the default of `verbose`."""
    for name in "ab":
        (tmp_path / name).mkdir()
        image = np.zeros((8, 8, 3))
        keras.utils.save_img(tmp_path / name / "0.png", image, scale=False)
    data = loaded("photos", path=str(tmp_path), batched=True)
    assert data.loaders["train"].count == 1
    assert capsys.readouterr().out == ""
