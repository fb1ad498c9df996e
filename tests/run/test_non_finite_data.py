"""A loss that is not finite because the data are not: the line says so."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation.internals import Batches
from pipeline.dataset.non_finite import non_finite_part, warning_of_evaluation
from tests.running import ROOT, pipeline

MODULE = """
import keras, numpy as np, tensorflow as tf

def numbers(training=None, validation=None):
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    held_out = y.copy()
    if training is not None:
        x[training, 1] = np.nan
    if validation is not None:
        held_out[validation] = np.inf
    splits = (x, y), (np.zeros_like(x), held_out)
    return tuple(map(tf.data.Dataset.from_tensor_slices, splits))

def batches(training, validation=None):
    return tuple(split.batch(8) for split in numbers(training, validation))

def network():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
"""


@pytest.mark.parametrize(
    ("wrong", "part"),
    [(None, ""), (0, "inputs"), (1, "labels"), (2, "sample weights")],
)
def test_the_part_of_a_batch_that_is_not_finite_is_named(wrong, part):
    values = [np.ones((4, 2), "float32"), np.arange(4), np.ones(4, "float32")]
    if wrong == 1:
        values[1] = np.array([0, 1, np.inf, 2])
    elif wrong is not None:
        values[wrong][2] = np.nan
    batch = tuple(tf.constant(value) for value in values)
    assert non_finite_part(batch) == part
    assert non_finite_part(Batches(batch, tf.constant([3, 1]))) == part


def test_an_evaluation_that_is_not_finite_gets_a_line_with_its_reason():
    batches = tf.data.Dataset.from_tensors(
        (tf.ones([2, 1]), tf.constant([1.0, np.nan]))
    )
    assert warning_of_evaluation("test", {"loss": 0.5}, batches) == ""
    line = warning_of_evaluation("test", {"loss": float("nan")}, batches)
    assert line == (
        "the test split gives loss=nan: its labels contain a value that is NaN or infinite"
    )
    finite = batches.map(lambda x, y: (x, x))
    line = warning_of_evaluation("test", {"loss": float("inf")}, finite)
    assert line == "the test split gives loss=inf"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (
            ("accumulation.effective_batch_size=8", "dataset.training=20"),
            1,
            "contain a value that is NaN or infinite (traceback",
        ),
        # A loader cannot be read again, so its batch is not examined.
        (
            ("dataset=batches",),
            1,
            "loss=nan and gradient_norm=nan at update 2, found when updates 1 to 2 were",
        ),
        (
            ("accumulation.effective_batch_size=8", "dataset.validation=20"),
            0,
            "the validation split gives loss=inf",
        ),
    ],
)
def test_a_run_says_that_its_data_are_not_finite(tmp_path, arguments, status, line):
    (tmp_path / "numbers_of_mine.py").write_text(MODULE)
    for group, node in (
        (
            "dataset",
            "_target_: numbers_of_mine.numbers\ntraining: null\nvalidation: null",
        ),
        ("model", "_target_: numbers_of_mine.network"),
    ):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(node)
    (tmp_path / "conf" / "dataset" / "batches.yaml").write_text(
        "_target_: numbers_of_mine.batches\ntraining: 20\nbatched: true"
    )
    done = pipeline(
        "train",
        "dataset=mine",
        "model=mine",
        "objective=regression",
        "accumulation.factor=2",
        "training.epochs=1",
        "tracking.log_model=false",
        "tracking.system_metrics=false",
        *arguments,
        cwd=tmp_path,
        status=status,
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    assert line in done.stderr
