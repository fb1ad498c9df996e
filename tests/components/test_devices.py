"""What is asked of TensorFlow for the GPUs of a run; the GPUs are made up, so that none is needed."""

from __future__ import annotations

import fcntl
import os
import tempfile
from types import SimpleNamespace

import pytest
import tensorflow as tf

from pipeline.common import nvidia
from pipeline.common.errors import ConfigError
from pipeline.components import devices, fitting
from pipeline.config.schema import HardwareConfig


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Three GPUs, and what is asked of TensorFlow: the visible ones, and for each the MiB, or None if it grows."""
    gpus = [
        tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU")
        for number in range(3)
    ]
    made = SimpleNamespace(visible=[], limits={}, reset=[])
    config, grow = tf.config, tf.config.experimental
    monkeypatch.setattr(
        config, "list_physical_devices", lambda kind: gpus if kind == "GPU" else []
    )
    monkeypatch.setattr(
        config, "set_visible_devices", lambda used, kind: made.visible.extend(used)
    )
    monkeypatch.setattr(config, "get_visible_devices", lambda kind: made.visible)
    monkeypatch.setattr(
        grow,
        "set_memory_growth",
        lambda gpu, grows: made.limits.update({gpu.name[-5:]: None}),
    )
    monkeypatch.setattr(
        config,
        "set_logical_device_configuration",
        lambda gpu, logical: made.limits.update(
            {gpu.name[-5:]: [each.memory_limit for each in logical]}
        ),
    )
    monkeypatch.setattr(
        grow, "get_device_details", lambda gpu: {"device_name": f"Card {gpu.name[-1]}"}
    )
    monkeypatch.setattr(grow, "reset_memory_stats", made.reset.append)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-beef,6")
    monkeypatch.setenv(nvidia.LOCKED, "")
    return made


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
    asked, precision, settings, limits
):
    if "device" in settings:
        settings = settings | {"device": devices.Device.cpu}
    used = devices.setup(HardwareConfig(**settings), seed=0)
    assert asked.limits == limits
    assert [gpu.name[-5:] for gpu in asked.visible] == list(limits)
    assert used.description.startswith(
        f"Card {next(iter(limits))[-1]}" if limits else "CPU"
    )


def test_the_replicas_are_on_the_gpus_that_are_named(asked):
    gpus = tf.config.list_physical_devices("GPU")
    assert devices._gpus_of_process(devices._named_gpus(gpus, [2, 0]), 2, None) == [
        gpus[2],
        gpus[0],
    ]
    with pytest.raises(
        ConfigError,
        match=r"hardware\.gpu must be of the 3 GPUs of this machine, counted from 0\. Rec",
    ):
        devices.setup(HardwareConfig(gpu=3), seed=0)


def test_a_gpu_is_not_asked_for_where_there_is_none(monkeypatch):
    monkeypatch.setattr(nvidia, "gpus_of_driver", lambda: 0)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    with pytest.raises(
        ConfigError,
        match=r"hardware\.gpu must be null \(no GPU answers\)\. Received: 0",
    ):
        devices.setup(HardwareConfig(gpu=0), seed=0)


def test_two_runs_on_one_gpu_are_told(asked, precision, capsys, tmp_path):
    with (tmp_path / f"pipeline-{os.getuid()}-gpu-GPU-beef.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run
        devices.setup(HardwareConfig(), seed=0)
        assert "has another run on it" not in capsys.readouterr().err
        devices.setup(HardwareConfig(gpu=1), seed=0)
        assert (
            capsys.readouterr().err.count("GPU GPU-beef has another run on it, too\n")
            == 1
        )
        devices.setup(
            HardwareConfig(gpu=1), seed=0
        )  # as the jobs of a sweep in one process
        assert "has another run on it" not in capsys.readouterr().err
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
        assert "GPU 5 has another run on it, too" in capsys.readouterr().err


def test_the_peak_begins_with_the_first_update(asked, monkeypatch):
    """`fit` does so last, just before it trains."""

    class Trains:
        def __init__(self, *_, **__):
            pass

        def fit(self, start):
            return list(asked.reset)

    monkeypatch.setattr(fitting, "Trainer", Trains)
    for on_gpu, reset in ((True, ["GPU:0"]), (False, [])):
        asked.reset.clear()
        used = devices.Devices(tf.distribute.get_strategy(), on_gpu, "")
        training = SimpleNamespace(evaluate_every="epoch")
        parts = SimpleNamespace(
            spec=SimpleNamespace(config=SimpleNamespace(training=training)),
            data=SimpleNamespace(splits={}),
            files=None,
            best=None,
            batches=None,
            reader=None,
            devices=used,
            objective=SimpleNamespace(callbacks={}),
            evaluation_batches=lambda *_: None,
            assigned_by_forward=list,
        )
        assert (
            fitting.fit(parts, None, SimpleNamespace(tracker=None), None, None) == reset
        )
