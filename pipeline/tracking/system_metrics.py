"""MLflow's system metrics, sampled; of the GPUs those of the run alone."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from pipeline.common import nvidia


def system_sampler(
    uri: str, run_id: str, gpus: Sequence[int] | None = None
) -> Callable[[], dict[str, float]]:
    """Return a function that samples MLflow's system metrics, by name; `gpu_0` is the first of the run's `gpus`.

    These are places in CUDA_VISIBLE_DEVICES; with None, as of an older journal, all GPUs of the machine are sampled.
    MLflow's own thread would read the whole run before each write. This is private, as of MLflow 3.17.2:
    tests/tracking/test_mlflow_internals.py fails if another version differs.
    """
    monitor = SystemMetricsMonitor(run_id, tracking_uri=uri)
    for part in monitor.monitors:
        if gpus is not None and hasattr(
            part, "gpu_handles"
        ):  # NVIDIA's, by the library that MLflow has imported
            part.gpu_handles = gpu_handles(
                sys.modules["pynvml"], nvidia.visible(), gpus
            )

    def sample() -> dict[str, float]:
        monitor.collect_metrics()
        sampled: dict[str, float] = monitor.aggregate_metrics()
        for part in monitor.monitors:
            part.clear_metrics()
        return sampled

    return sample


def gpu_handles(nvml: Any, visible: Sequence[str], gpus: Sequence[int]) -> list[Any]:
    """Return NVML's handles of some of the `visible` GPUs, which have a number or a UUID, by their places there."""
    used = [visible[place] for place in gpus if place < len(visible)]
    by_number, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    return [by_number(int(gpu)) if gpu.isdecimal() else by_uuid(gpu) for gpu in used]
