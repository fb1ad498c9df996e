"""Two outputs with losses, weights, masks and metrics, and a sigmoid with class weights: `train/loss` is Keras' own."""

from __future__ import annotations

import ast
import json
import shlex
import shutil

import pytest

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
keras.config.set_floatx("float64"); keras.config.set_dtype_policy("float64")
keras.utils.set_random_seed(0)
{lines}
print(json.dumps({{name: float(value) for name, value in results.items()}}))
"""
TAGGER = """
import tagger
data = tagger.texts(500, 0)
model = tagger.tagger(16)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
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
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1, "sigmoid")])
"""
YES_OR_NO = """
import mine
model = mine.yes_or_no()
model.compile(keras.optimizers.SGD(0.1), loss=keras.losses.BinaryCrossentropy())
x, y = mine.examples()[0].batch(90).get_single_element()
results = model.train_on_batch(x.numpy(), y.numpy(), class_weight={0: 0.5, 1: 4.0}, return_dict=True)
"""


def equal_to_keras(folder, lines, factor, size, *overrides):
    more = (
        f"accumulation.effective_batch_size={size}",
        f"accumulation.factor={factor}",
        "optimizer=sgd",
    )
    pipeline(
        "train",
        *overrides,
        *ONE_UPDATE,
        *more,
        "schedule=constant",
        "training.epochs=1",
        cwd=folder,
    )
    run = Store(folder).run()
    # The initial weights follow from the seed alone.
    code = BY_KERAS.format(lines=lines)
    theirs = json.loads(
        python("-c", code, cwd=folder).communicate()[0].splitlines()[-1]
    )
    ours = {name: run.data.metrics[f"train/{name}"] for name in theirs}
    assert ours == pytest.approx(theirs, rel=1e-12)
    return run


@pytest.mark.slow
def test_the_example_of_two_outputs(tmp_path):
    folder = tmp_path / "two_outputs"
    shutil.copytree(PROJECT, folder)
    command = (
        (
            ast.get_docstring(
                ast.parse((PROJECT / "tagger.py").read_text(encoding="utf-8"))
            )
            or ""
        )
        .split("&& pipeline train ")[1]
        .splitlines()[0]
    )
    overrides = shlex.split(command)
    run = equal_to_keras(folder, TAGGER, 3, 400, *overrides)
    assert {
        "train/kind_loss",
        "train/length_loss",
        "val/kind_accuracy",
        "val/length_error",
    } < run.data.metrics.keys()
    assert run.data.params["training.loss_weights.length"] == "0.5"


@pytest.mark.slow
def test_a_sigmoid_with_class_weights(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    for group, target in (("dataset", "examples"), ("model", "yes_or_no")):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(
            f"_target_: mine.{target}\n"
        )
    mine = ("--config-dir", "conf", "dataset=mine", "model=mine", "objective=binary")
    run = equal_to_keras(
        tmp_path, YES_OR_NO, 4, 90, *mine, "training.class_weight={0: 0.5, 1: 4.0}"
    )
    assert run.data.params["training.class_weight.1"] == "4.0"
