"""`train/loss` is Keras' own, with two outputs and with class weights.

The two outputs have losses, weights, masks and metrics.
"""

from __future__ import annotations

import json
import shutil

import pytest

from tests.examples.commands import command_on_top_of
from tests.running import ROOT, Store, pipeline, python

PROJECT = ROOT / "examples" / "two_outputs"
ONE_UPDATE = (
    "hardware.precision=float64",
    "tracking.system_metrics=false",
    "tracking.log_model=false",
)
# The same update by `train_on_batch`, on the whole dataset.
BY_KERAS = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
keras.utils.set_random_seed(0)
{lines}
print(json.dumps({{name: float(value) for name, value in results.items()}}))
"""
TAGGER = """
import tagger
data = tagger.texts(500, 0)
model = tagger.tagger(16)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="mean_with_sample_weight"
)
model.compile(
    keras.optimizers.SGD(0.1),
    loss={"kind": cross_entropy, "length": keras.losses.Huber()},
    loss_weights={"kind": 1.0, "length": 0.5},
    metrics={"kind": [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]},
    weighted_metrics={"length": [keras.metrics.MeanAbsoluteError(name="error")]},
)
x, y, weights = data.train.batch(400).get_single_element()
results = model.train_on_batch(x, y, weights, return_dict=True)
"""
MINE = """
import keras, numpy as np, tensorflow as tf

def examples():
    random = np.random.default_rng(0)
    x = random.normal(size=(90, 6))
    data = tf.data.Dataset.from_tensor_slices((x, (x[:, :1] > 0.7).astype("float64")))
    return data, None

def yes_or_no():
    hidden = keras.layers.Dense(5, "tanh")
    probability = keras.layers.Dense(1, "sigmoid")
    return keras.Sequential([keras.Input((6,)), hidden, probability])
"""
YES_OR_NO = """
import mine
model = mine.yes_or_no()
model.compile(keras.optimizers.SGD(0.1), loss=keras.losses.BinaryCrossentropy())
x, y = mine.examples()[0].batch(90).get_single_element()
results = model.train_on_batch(
    x.numpy(), y.numpy(), class_weight={0: 0.5, 1: 4.0}, return_dict=True
)
"""


def run_equal_to_keras(folder, lines, factor, size, *overrides):
    """Train one update, check its loss and metrics, and return the run.

    Args:
        folder: where it is trained.
        lines: Python that trains the same update, and assigns its `results`.
        factor: of accumulation.
        size: the effective batch size.
        overrides: of the run.
    """
    pipeline(
        "train",
        *overrides,
        *ONE_UPDATE,
        f"accumulation.effective_batch_size={size}",
        f"accumulation.factor={factor}",
        "optimizer=sgd",
        "schedule=constant",
        "training.epochs=1",
        cwd=folder,
    )
    run = Store(folder).run()
    # The initial weights follow from the seed alone.
    code = BY_KERAS.format(lines=lines)
    out, err = python("-c", code, cwd=folder).communicate()
    assert out, err
    expected = json.loads(out.splitlines()[-1])
    logged = {name: run.data.metrics[f"train/{name}"] for name in expected}
    assert logged == pytest.approx(expected, rel=1e-12)
    return run


@pytest.mark.slow
def test_the_example_of_two_outputs(tmp_path):
    folder = tmp_path / "two_outputs"
    shutil.copytree(PROJECT, folder)
    verb, *overrides = command_on_top_of(PROJECT / "tagger.py")
    assert verb == "train"
    run = run_equal_to_keras(folder, TAGGER, 3, 400, *overrides)
    assert run.data.metrics.keys() > {
        "train/kind_loss",
        "train/length_loss",
        "val/kind_accuracy",
        "val/length_error",
    }
    assert run.data.params["training.loss_weights.length"] == "0.5"


@pytest.mark.slow
def test_a_sigmoid_with_class_weights(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    for group, target in (("dataset", "examples"), ("model", "yes_or_no")):
        config = tmp_path / "conf" / group / "mine.yaml"
        config.parent.mkdir(parents=True)
        config.write_text(f"_target_: mine.{target}\n")
    mine = ("--config-dir", "conf", "dataset=mine", "model=mine", "objective=binary")
    class_weight = "training.class_weight={0: 0.5, 1: 4.0}"
    run = run_equal_to_keras(tmp_path, YES_OR_NO, 4, 90, *mine, class_weight)
    assert run.data.params["training.class_weight.1"] == "4.0"
