"""`pipeline verify`, as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.running import ROOT, Store, pipeline

EXAMPLES = ROOT / "examples"
OWN = ("--config-dir", "conf")
MINE = """
import keras

@keras.saving.register_keras_serializable()
class Centred(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)

def centred(input_shape, classes):
    return keras.Sequential([
        keras.Input(input_shape),
        keras.layers.Flatten(),
        keras.layers.Dense(8),
        Centred(name="in_the_middle"),
        keras.layers.Dense(classes),
    ])
"""
POOLED = """
import keras, numpy as np, tensorflow as tf

def volumes(data_dir):
    examples = np.ones((200, 4, 4, 4, 1)), np.zeros(200, int)
    return tf.data.Dataset.from_tensor_slices(examples), None

def pooled(input_shape):
    return keras.Sequential([
        keras.Input(input_shape),
        keras.layers.MaxPooling3D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
    ])
"""


@pytest.mark.slow
def test_a_layer_that_looks_at_its_batch_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "centred.yaml").write_text(
        "_target_: mine.centred\n"
    )
    done = pipeline(
        "verify", "--config-dir", "conf", "model=centred", cwd=tmp_path, status=3
    )
    fault = "in_the_middle (Centred): its output for an example depends on the other"
    assert f"different; the cause is {fault}" in done.stdout
    assert "DIFFERENT" in done.stdout
    names = {path.name for path in tmp_path.iterdir()}
    assert names - {"__pycache__"} == {"conf", "mine.py"}


@pytest.mark.slow
def test_a_certificate_is_logged(tmp_path):
    cut = ("accumulation.effective_batch_size=100", "accumulation.factor=3")
    done = pipeline(
        "verify", "model=mlp", "model.dropout=0.5", *cut, "--log", cwd=tmp_path
    )
    _, verdict, *rows = done.stdout.splitlines()
    assert verdict == (
        "an update in 3 micro-batches of 34 and one of the whole batch "
        "are equal within rounding"
    )
    kinds = [row.split()[0] for row in rows[1:] if "float64" in row]
    one_row_each = ["count", "gradient", "loss", "metric", "val/loss", "weights"]
    assert sorted(kinds) == one_row_each
    assert any(re.match(r"  gradient \S+ \(float32\) ", row) for row in rows)
    quiet = "not compared: the noise of dropout, which every micro-batch draws anew"
    assert quiet in rows
    run = Store(tmp_path).run()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "verify")
    assert run.data.params["accumulation.factor"] == "3"
    assert run.data.metrics["verify/apart"] < 1e-9
    file = Path(unquote(urlsplit(run.info.artifact_uri).path)) / "certificate.json"
    first, last, other, evaluated, single = json.loads(file.read_text())
    assert all(entry["holds"] for entry in (*first, *last, *other, *evaluated, *single))
    assert [entry["what"] for entry in evaluated] == [
        "metric val/accuracy",
        "loss val/loss",
    ]
    compared = {entry["what"] for entry in first}
    assert {"loss loss", "gradient dense/kernel", "weights dense/kernel"} < compared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "overrides"),
    [
        (ROOT, ("experiment=quick",)),
        pytest.param(ROOT, ("experiment=exact",), marks=pytest.mark.slow),
        pytest.param(
            ROOT, ("experiment=exact", "hardware.replicas=2"), marks=pytest.mark.soak
        ),
        pytest.param(
            ROOT / "examples/own_project",
            ("--config-dir", "conf", "experiment=moons"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ROOT / "examples/two_outputs",
            ("--config-dir", "conf", "experiment=tagger"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_every_experiment_and_example_is_exact(folder, overrides):
    done = pipeline("verify", *overrides, cwd=folder)
    assert done.stdout.splitlines()[1].endswith("are equal within rounding")


TOP = "keras.metrics.SparseTopKCategoricalAccuracy"


@pytest.mark.slow
def test_a_metric_that_does_not_run_in_float64_is_left_out_and_named(tmp_path):
    done = pipeline(
        "verify",
        "--all",
        "model=mlp",
        f"+training.metrics.top._target_={TOP}",
        cwd=tmp_path,
    )
    left_out = "not compared: training.metrics.top, which does not run in float64\n"
    assert left_out in done.stdout
    assert "metric accuracy" in done.stdout
    assert "metric val/accuracy" in done.stdout
    assert done.stdout.splitlines()[1].endswith("are equal within rounding")


@pytest.mark.slow
def test_a_layer_that_does_not_run_in_float64_is_rejected_by_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(POOLED)
    own = (
        "dataset._target_=mine.volumes",
        "~model.hidden",
        "~model.dropout",
        "~model.l2",
        "model._target_=mine.pooled",
    )
    done = pipeline(
        "verify", "model=mlp", *own, "training.epochs=1", cwd=tmp_path, status=2
    )
    assert done.stderr == (
        "pipeline: model must run in float64, which verify uses "
        "(InvalidArgumentError: Value for attr 'T' of double is not in the list of "
        "allowed values: half, bfloat16, float (in MaxPooling3D)).\n"
    )


@pytest.mark.slow
def test_weights_of_another_precision_are_named_if_an_update_fails(tmp_path):
    """Keras cannot clip gradients of several precisions by their global norm."""
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "def network(input_shape, classes):\n"
        "    inputs = keras.Input(input_shape)\n"
        "    hidden = keras.layers.Dense(8)(keras.layers.Flatten()(inputs))\n"
        "    head = keras.layers.Dense(classes, dtype='float32', name='head')\n"
        "    return keras.Model(inputs, head(hidden))\n"
    )
    own = (
        "~model.hidden",
        "~model.dropout",
        "~model.l2",
        "model._target_=mine.network",
        "optimizer.global_clipnorm=1.0",
    )
    done = pipeline("verify", "model=mlp", *own, cwd=tmp_path, status=2)
    line = (
        "verify uses; head/kernel is in float32, by the dtype of its layer (TypeError"
    )
    assert line in done.stderr


def test_a_wrong_config_is_rejected(tmp_path):
    done = pipeline("verify", "accumulation.factor=0", cwd=tmp_path, status=2)
    error = "pipeline: accumulation.factor must be at least 1. Received: 0.\n"
    assert done.stderr == error


def test_a_config_may_name_the_run_directory(tmp_path):
    """The reference is resolved: verify then rejects what it does not search for."""
    callback = (
        "+training.callbacks.best._target_=keras.callbacks.ModelCheckpoint",
        "+training.callbacks.best.filepath=${hydra:runtime.output_dir}/best.keras",
    )
    size = "accumulation.micro_batch_size=auto"
    done = pipeline("verify", *callback, size, cwd=tmp_path, status=2)
    assert done.stderr == (
        "pipeline: accumulation.micro_batch_size must be a number, because verify does "
        "not search for a size. Received: 'auto'.\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_code_of_the_run_that_exits_gives_no_verdict(tmp_path):
    (tmp_path / "mine.py").write_text("def leaving(**given):\n    exit(0)\n")
    done = pipeline(
        "verify", "model=mlp", "model._target_=mine.leaving", cwd=tmp_path, status=1
    )
    assert done.stdout == ""
    assert "the run's code called exit(0)" in done.stderr
