"""A validation set has to fit the model, and its metrics `training.keep_best`."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.components import assembly
from pipeline.dataset import Data
from tests.composing import spec_of

LATE = "dataset.validations={late: 'validation[50%:]'}"


def pictures(side, splits=1):
    """Return a dataset of four images of this size, as the digits are for 8."""
    x = np.zeros((4, side, side, 1), "float32")
    split = tf.data.Dataset.from_tensor_slices((x, np.zeros(4, "int64")))
    validation = split if splits == 2 else None
    return Data(split, validation, classes=10)


def assembled(*overrides):
    overrides = ["model=mlp", "model.hidden=[4]", "training.updates=1", *overrides]
    return assembly.assemble(spec_of(overrides))


def test_a_set_whose_inputs_the_model_does_not_take_is_refused_before_training():
    node = f"{{_target_: {__name__}.pictures, side: 9, splits: 2}}"
    with pytest.raises(ConfigError) as refused:
        assembled(f"dataset.validations={{late: {node}}}")
    rule = "dataset.validations.late must give inputs that mlp accepts"
    assert str(refused.value).startswith(rule)
    parts = assembled(f"dataset.validations={{late: {node.replace('9', '8')}}}")
    assert parts.evaluation_batches("validations.late") is not None


@pytest.mark.slow
def test_the_metrics_of_a_set_can_be_kept_the_best_of():
    def best(metric):
        return f"training.keep_best.metric={metric}", "training.keep_best.mode=max"

    parts = assembled(LATE, *best("val/late/accuracy"))
    assert parts.best.metric == "late/accuracy"
    with pytest.raises(ConfigError) as refused:
        assembled(LATE, *best("val/lat/accuracy"))
    choices = "val/loss, val/accuracy, val/late/loss, val/late/accuracy"
    assert f"Choices: {choices}." in str(refused.value)

    # The dataset has no validation split of its own.
    own = f"+dataset.validation_split=null {LATE}".split(" ", 1)
    parts = assembled(*own, *best("val/late/loss"))
    assert parts.best.metric == "late/loss"
    with pytest.raises(ConfigError, match=r"Choices: val/late/loss, val/late/acc"):
        assembled(*own, *best("val/loss"))
