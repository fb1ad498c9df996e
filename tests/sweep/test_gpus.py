"""Which job uses which GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from pipeline.common import nvidia
from pipeline.common.errors import ConfigError
from pipeline.config.schema import HardwareConfig
from pipeline.sweep import gpus
from pipeline.sweep.slurm import SlurmLauncher


def slots(monkeypatch, listed, settings, of_tensorflow=(8, [])):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setattr(nvidia, "gpus_of_tensorflow", lambda: of_tensorflow)
    hardware = OmegaConf.structured(HardwareConfig(**settings))
    return gpus.slots([hardware], hardware.parallel_jobs)


@pytest.mark.parametrize(
    ("listed", "settings", "expected"),
    [
        ("0,1", {}, [["0"], ["1"]]),
        ("2,5,7", {"gpus_per_job": 2}, [["2", "5"]]),
        ("0,1,2,3", {"replicas": 2}, [["0", "1"], ["2", "3"]]),
        ("0,1", {"parallel_jobs": 1}, [["0"]]),
        ("0,1", {"parallel_jobs": 8}, [["0"], ["1"]]),  # never two on one
        ("0,1", {"parallel_jobs": 3, "device": "cpu"}, [[], [], []]),
        ("GPU-a,MIG-b", {}, [["GPU-a"], ["MIG-b"]]),
        ("", {}, [[]]),
        ("-1", {"parallel_jobs": 2}, [[], []]),
        ("0,1", {"jobs_per_gpu": 2}, [["0"], ["1"], ["0"], ["1"]]),
        ("0,1", {"jobs_per_gpu": 2, "parallel_jobs": 3}, [["0"], ["1"], ["0"]]),
        ("0,1,2,3", {"jobs_per_gpu": 2, "gpus_per_job": 4}, [["0", "1", "2", "3"]] * 2),
        ("", {"jobs_per_gpu": 2}, [[]]),
    ],
)
def test_each_job_has_gpus_of_its_own_or_shares_them_as_asked(
    monkeypatch, listed, settings, expected
):
    assert slots(monkeypatch, listed, settings) == expected


def test_more_gpus_than_there_are_is_refused(monkeypatch):
    error = r"gpus_per_job must be at most the 1 GPU of this machine. Received: 2"
    with pytest.raises(ConfigError, match=error):
        slots(monkeypatch, "4", {"gpus_per_job": 2})


def test_a_job_gets_the_gpus_that_tensorflow_lists(monkeypatch, capsys):
    """A driver alone trains nothing: four jobs would compete for the processors."""
    monkeypatch.setattr(nvidia, "gpus_of_driver", lambda: 4)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert slots(monkeypatch, "0,1,2,3", {}, (3, [])) == [["0"], ["1"], ["2"]]
    assert slots(monkeypatch, "0,1,2,3", {}, (0, ["libcudart.so.12"])) == [[]]
    reason = "TensorFlow's CUDA libraries are not installed: see requ"
    assert f"jobs run on the CPU: {reason}" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    error = r"uses none of 4 GPUs, and could not open libcusolver\.so\.11"
    with pytest.raises(ConfigError, match=error):
        slots(monkeypatch, "0,1,2,3", {}, (0, ["libcusolver.so.11"]))


def test_a_sweep_rejects_the_key_that_names_the_gpu_of_a_run(monkeypatch):
    rule = r"must be left out in a sweep, .* CUDA_VISIBLE_DEVICES. Received: 1"
    with pytest.raises(ConfigError, match=rf"hardware\.gpu {rule}"):
        slots(monkeypatch, "0,1", {"gpu": 1})


def test_each_batch_on_slurm_requests_the_gpus_of_its_own_jobs():
    """A search has several batches, and its launcher stays the same."""
    launcher = SlurmLauncher(nodes=1)
    sweep = SimpleNamespace(parent=SimpleNamespace(run_id="2" * 32))

    def requested(**settings):
        hardware = OmegaConf.structured(HardwareConfig(**settings))
        return launcher._backend(sweep, [hardware]).params.get("gpus_per_node")

    assert requested(device="gpu", gpus_per_job=4) == 4
    assert requested(device="gpu", gpus_per_job=1) == 1
    assert requested(device="cpu", gpus_per_job=1) is None
