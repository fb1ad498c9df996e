"""What pipeline/tracking/system_metrics.py uses of MLflow is still as it was read."""

from __future__ import annotations

import inspect

import pytest
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from pipeline.tracking import store, system_metrics

WHERE = "see pipeline/tracking/system_metrics.py"


def test_the_signatures_are_those_that_were_read():
    assert {"run_id", "tracking_uri"} <= set(
        inspect.signature(SystemMetricsMonitor).parameters
    ), WHERE
    for name in ("collect_metrics", "aggregate_metrics"):
        assert list(
            inspect.signature(getattr(SystemMetricsMonitor, name)).parameters
        ) == ["self"], WHERE


@pytest.mark.slow
def test_a_sample_is_of_this_moment(tmp_path):
    new = store.Store(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = new.client().create_run(new.experiment("it")).info.run_id
    sample = system_metrics.system_sampler(new.uri, run_id)
    for _ in range(2):
        values = sample()
        assert values["cpu_utilization_percentage"] >= 0, WHERE
        assert values["system_memory_usage_megabytes"] > 0, WHERE


class Nvml:
    """NVIDIA's library, on a machine with any GPUs."""

    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: ("number", index))
    nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: ("uuid", uuid))


@pytest.mark.parametrize(
    ("visible", "gpus", "handles"),
    [
        (["0", "1", "2"], [0], [("number", 0)]),  # the run has one of three
        (["2", "3"], [0, 1], [("number", 2), ("number", 3)]),  # a job of a sweep
        (["GPU-a", "GPU-b"], [1], [("uuid", "GPU-b")]),
        (["0", "1"], [], []),  # a run on the CPU
        (["0"], [1], []),  # resumed on a machine with fewer
    ],
)
def test_the_gpus_that_are_sampled_are_those_of_the_run(visible, gpus, handles):
    assert system_metrics.gpu_handles(Nvml, visible, gpus) == handles


def test_mlflow_samples_the_handles_that_it_is_given():
    assert "enumerate(self.gpu_handles)" in inspect.getsource(
        GPUMonitor.collect_metrics
    ), WHERE
