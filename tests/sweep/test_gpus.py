"""Which job uses which GPU."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config.schema import HardwareConfig
from pipeline.sweep import gpus


def slots(monkeypatch, listed, settings):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
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
    ],
)
def test_each_job_has_gpus_of_its_own(monkeypatch, listed, settings, expected):
    assert slots(monkeypatch, listed, settings) == expected


def test_more_gpus_than_there_are_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"gpus_per_job must be at most the 1 GPUs of this machine. Received: 2"):
        slots(monkeypatch, "4", {"gpus_per_job": 2})
