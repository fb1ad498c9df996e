"""The diffs of docs/coming_from.md: both sides train, and come to the same weights.

Their examples are in equal micro-batches, as otherwise the left side is wrong.
"""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import AccumulatingModel, accumulate_gradients
from tests.docs.pages import side
from tests.running import ROOT

PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
DIFFS = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def weights_after(code: str) -> list[np.ndarray]:
    """Run code with a model and data in its namespace; return the model's weights."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    numbers = np.random.default_rng(0)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    names = {
        "keras": keras,
        "tf": tf,
        "AccumulatingModel": AccumulatingModel,
        "accumulate_gradients": accumulate_gradients,
        "model": model,
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "optimizer": optimizer,
        "x": numbers.normal(size=(256, 5)),
        "y": numbers.integers(0, 3, 256),
    }
    exec(code, names)
    if "update" in names:
        names["update"](tf.constant(names["x"][:128]), tf.constant(names["y"][:128]))
    return model.get_weights()


def test_the_diffs_were_read():
    assert len(DIFFS) == 2


@pytest.mark.parametrize("diff", DIFFS, ids=["keras", "tape"])
def test_both_sides_come_to_the_same_weights(float64, diff):
    there = weights_after(side(diff, "+"))
    here = weights_after(side(diff, "-"))
    before = weights_after("")
    for old, new, initial in zip(there, here, before, strict=True):
        # The order of the examples is drawn for batches of 32 and of 128: `fit` shuffles
        # the same numbers in the same way, and cuts them afterwards.
        np.testing.assert_allclose(old, new, rtol=1e-12, atol=1e-12)
        assert not np.allclose(old, initial)
