"""`hardware.tf32`, as TensorFlow describes a GPU of Ampere; no GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from pipeline.accumulation import Update
from pipeline.common import nvidia
from pipeline.components import devices
from pipeline.config.compose import composed
from pipeline.config.schema import HardwareConfig
from pipeline.rerun import agreement
from pipeline.rerun.recorded_run import RecordedRun
from pipeline.tracking import provenance
from pipeline.verify import engine


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that TensorFlow lists, with what it says of it, which a test may change."""
    details = {"device_name": "A100", "compute_capability": (8, 0)}
    config = tf.config

    def one_device(kind=None):
        return [SimpleNamespace(name=f"{kind}:0")]

    for listing in (config, config.experimental):
        for name in ("list_physical_devices", "get_visible_devices"):
            monkeypatch.setattr(listing, name, one_device)
    monkeypatch.setattr(config, "set_visible_devices", lambda *_: None)
    monkeypatch.setattr(config.experimental, "set_memory_growth", lambda *_: None)
    monkeypatch.setattr(config.experimental, "get_device_details", lambda _: details)
    yield details
    config.experimental.enable_tensor_float_32_execution(True)


def test_the_first_line_says_it_where_float32_is_computed_in_it(gpu):
    assert (
        devices.setup(HardwareConfig(), 0).description
        == "A100, float32 (products in TF32)"
    )
    assert provenance.environment(Path())["tf32"] is True
    assert devices.setup(HardwareConfig(tf32=False), 0).description == "A100, float32"
    assert not tf.config.experimental.tensor_float_32_execution_enabled()
    # As in a process that has several runs:
    assert devices.setup(HardwareConfig(), 0).description.endswith("TF32)")
    gpu["compute_capability"] = (7, 5)
    assert devices.setup(HardwareConfig(), 0).description == "A100, float32"


def test_only_on_a_gpu():
    assert not nvidia.computes_in_tf32()


@pytest.mark.slow
def test_no_library_speaks_where_it_is_asked():
    program = """
from pipeline.common import imports, nvidia
with imports.without_chatter():
    import tensorflow
nvidia.computes_in_tf32()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_what_is_exact_does_without():
    assert composed(["experiment=quick"]).hardware.tf32 is True
    assert composed(["experiment=exact"]).hardware.tf32 is False


@pytest.mark.parametrize(
    ("params", "environment", "in_tf32"),
    [
        ({}, {"tf32": True}, True),
        ({}, {"tf32": False, "gpus": ["A100"]}, False),
        ({}, {"gpus": ["A100"]}, True),  # before there was the key
        ({"hardware.device": "cpu"}, {"gpus": ["A100"]}, False),
        ({}, {"gpus": []}, False),
        ({}, {}, False),
        ({"hardware.precision": "float64"}, {"tf32": True}, False),
    ],
)
def test_whether_a_record_is_of_tf32(params, environment, in_tf32):
    run = SimpleNamespace(
        data=SimpleNamespace(params={"hardware.precision": "float32", **params})
    )
    assert RecordedRun(run, {}, environment, {}, {}).is_in_tf32() is in_tf32


@pytest.mark.parametrize("step", [1, 500])
def test_a_rerun_has_bounds_of_its_own(step):
    losses = {"recorded": 2.0, "rerun": 2.0 * (1 - 0.9e-2)}

    def run(name):
        data = SimpleNamespace(
            metrics={"train/loss": 0.0},
            params={"hardware.precision": "float32"},
            tags={},
        )
        return SimpleNamespace(
            info=SimpleNamespace(run_id=name, status="FINISHED"), data=data
        )

    def get_metric_history(run_id, _):
        return [SimpleNamespace(step=step, value=losses[run_id])]

    client = SimpleNamespace(get_metric_history=get_metric_history)
    runs = [run(name) for name in losses]
    in_tf32, _ = agreement.compare_runs(client, *runs, {}, True)
    in_float32, _ = agreement.compare_runs(client, *runs, {}, False)
    assert in_tf32.verdict == "equal within rounding"
    assert "TF32" in str(in_tf32)
    assert in_float32.verdict == "different"
    assert "TF32" not in str(in_float32)
    losses["rerun"] = 2.0 * (1 - 1.1e-2)
    assert agreement.compare_runs(client, *runs, {}, True)[0].verdict == "different"


def test_what_is_verified_rounds_as_tf32_does(gpu):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    update = Update(model, keras.losses.MeanSquaredError(), keras.optimizers.SGD(), 1)
    assert engine.unit(update) == 2**-11
    tf.config.experimental.enable_tensor_float_32_execution(False)
    assert engine.unit(update) == 2**-24
