"""What a run requires of TensorFlow for its GPUs.

The GPUs are made up, so that none is needed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from pipeline.common import nvidia
from pipeline.common.errors import ConfigError
from pipeline.components import devices, fitting
from pipeline.config.schema import HardwareConfig


@dataclass
class Requests:
    """What was required of TensorFlow."""

    visible: list[Any] = field(default_factory=list)  # GPUs
    # By the name of a GPU: the MiB of its logical devices, or None if its memory grows.
    limits: dict[str, Any] = field(default_factory=dict)
    reset: list[str] = field(default_factory=list)  # whose peak of memory was reset


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Three GPUs, and what is required of TensorFlow."""
    gpus = []
    for number in range(3):
        gpus.append(tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU"))
    requests = Requests()

    def list_physical_devices(kind):
        return gpus if kind == "GPU" else []

    def set_memory_growth(gpu, grows):
        requests.limits[gpu.name[-5:]] = None

    def set_logical_device_configuration(gpu, logical):
        limits = [device.memory_limit for device in logical]
        requests.limits[gpu.name[-5:]] = limits

    def get_device_details(gpu):
        return {"device_name": f"Card {gpu.name[-1]}"}

    for config, name, function in (
        (tf.config, "list_physical_devices", list_physical_devices),
        (
            tf.config,
            "set_visible_devices",
            lambda used, _: requests.visible.extend(used),
        ),
        (tf.config, "get_visible_devices", lambda _: requests.visible),
        (
            tf.config,
            "set_logical_device_configuration",
            set_logical_device_configuration,
        ),
        (tf.config.experimental, "set_memory_growth", set_memory_growth),
        (tf.config.experimental, "get_device_details", get_device_details),
        (tf.config.experimental, "reset_memory_stats", requests.reset.append),
    ):
        monkeypatch.setattr(config, name, function)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-beef,6")
    monkeypatch.setenv(nvidia.LOCKED, "")
    return requests


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, {"GPU:0": None}),
        ({"gpu": 2}, {"GPU:2": None}),
        ({"gpu": [1]}, {"GPU:1": None}),
        ({"gpu_memory": "3GiB"}, {"GPU:0": [3 * 1024]}),
        ({"gpu": 1, "gpu_memory": 2 * 2**20}, {"GPU:1": [2]}),
        ({"gpu_memory": "1kB"}, {"GPU:0": [1]}),  # 0 would be no limit
        ({"gpu_memory": "3GiB", "device": "cpu"}, {}),
    ],
)
def test_the_gpu_and_its_memory_are_those_of_the_config(
    requests, precision, settings, limits
):
    if "device" in settings:
        settings = settings | {"device": devices.Device.cpu}
    used = devices.setup(HardwareConfig(**settings), seed=0)
    assert requests.limits == limits
    assert [gpu.name[-5:] for gpu in requests.visible] == list(limits)
    name = "CPU"
    for gpu in limits:
        name = f"Card {gpu[-1]}"
    assert used.description.startswith(name)


def test_the_replicas_are_on_the_gpus_that_are_named(requests):
    gpus = tf.config.list_physical_devices("GPU")
    named = devices._named_gpus(gpus, [2, 0])
    assert devices._gpus_of_process(named, 2, None) == [gpus[2], gpus[0]]
    rule = "must be among the 3 GPUs of this machine, counted from 0"
    with pytest.raises(ConfigError, match=rf"hardware\.gpu {rule}\. Received: 3\."):
        devices.setup(HardwareConfig(gpu=3), seed=0)


def test_a_gpu_is_not_asked_for_where_there_is_none(monkeypatch):
    monkeypatch.setattr(nvidia, "gpus_of_driver", lambda: 0)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    with pytest.raises(
        ConfigError,
        match=r"hardware\.gpu selects GPUs, .* none \(no GPU answers\)\. Received: 0",
    ):
        devices.setup(HardwareConfig(gpu=0), seed=0)


def test_two_runs_on_one_gpu_are_told(requests, precision, capsys, tmp_path):
    with (tmp_path / f"pipeline-{os.getuid()}-gpu-GPU-beef.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run
        devices.setup(HardwareConfig(), seed=0)
        assert "is also in use by another run" not in capsys.readouterr().err
        devices.setup(HardwareConfig(gpu=1), seed=0)
        line = "GPU GPU-beef is also in use by another run\n"
        assert capsys.readouterr().err.count(line) == 1
        # As the jobs of a sweep in one process do:
        devices.setup(HardwareConfig(gpu=1), seed=0)
        assert "is also in use by another run" not in capsys.readouterr().err
    with (
        (tmp_path / f"pipeline-{os.getuid()}-gpu-4.lock").open("w") as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the first run here has


def test_jobs_that_share_a_gpu_do_not_wait_for_each_other(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(nvidia.LOCKED, "")
    with (tmp_path / f"pipeline-{os.getuid()}-gpu-5.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        nvidia.lock(["5"], shared=True, wait=False)
        assert capsys.readouterr().err == ""
        monkeypatch.setenv(nvidia.LOCKED, "")
        nvidia.lock(["5"], wait=False)  # one that does not share it
        assert "GPU 5 is also in use by another run" in capsys.readouterr().err


def test_the_peak_begins_with_the_first_update(requests, monkeypatch):
    """`fit` does so last, just before it trains."""

    class Trains:
        def __init__(self, *_, **__):
            pass

        def fit(self, start):
            return list(requests.reset)

    monkeypatch.setattr(fitting, "Trainer", Trains)
    monkeypatch.setattr(fitting, "_token_counter", lambda parts: None)
    for on_gpu, reset in ((True, ["GPU:0"]), (False, [])):
        requests.reset.clear()
        used = devices.Devices(tf.distribute.get_strategy(), on_gpu, "")
        training = SimpleNamespace(evaluate_every="epoch", evaluate_at_start=False)
        parts = SimpleNamespace(
            spec=SimpleNamespace(config=SimpleNamespace(training=training)),
            data=SimpleNamespace(splits={}),
            files=None,
            best=None,
            shown=None,
            validation_sets=(),
            batches=None,
            reader=None,
            devices=used,
            objective=SimpleNamespace(callbacks={}),
            evaluation_batches=lambda *_: None,
            assigned_by_forward=list,
        )
        recorder = SimpleNamespace(tracker=None)
        assert fitting.fit(parts, None, recorder, None, None) == reset
