"""Samples MLflow's system metrics, with only the GPUs of the run."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from pipeline.common import nvidia


def system_sampler(
    uri: str, run_id: str, gpus: Sequence[int] | None = None
) -> Callable[[], dict[str, float]]:
    """Return a function that samples MLflow's system metrics.

    MLflow's own thread would read all of the run before each write. This is private in
    MLflow 3.17.2: tests/tracking/test_mlflow_internals.py fails if another version
    differs.

    Args:
        uri: the store.
        run_id: the run.
        gpus: the GPUs of the run, as places in CUDA_VISIBLE_DEVICES; `gpu_0` is the
            first of them. None, as in an older journal, stands for all GPUs of the
            machine.

    Returns:
        A function that returns the current metrics by name.
    """
    monitor = SystemMetricsMonitor(run_id, tracking_uri=uri)
    for part in monitor.monitors:
        # Only NVIDIA's part has handles; MLflow has then imported its library.
        if gpus is not None and hasattr(part, "gpu_handles"):
            nvml = sys.modules["pynvml"]
            part.gpu_handles = gpu_handles(nvml, nvidia.visible(), gpus)

    def sample() -> dict[str, float]:
        monitor.collect_metrics()
        values: dict[str, float] = monitor.aggregate_metrics()
        for part in monitor.monitors:
            part.clear_metrics()
        return values

    return sample


def gpu_handles(nvml: Any, visible: Sequence[str], gpus: Sequence[int]) -> list[Any]:
    """Return NVML's handles of the run's GPUs.

    Args:
        nvml: NVIDIA's library.
        visible: the visible GPUs, each by its number or its UUID.
        gpus: the places of the run's GPUs among them; a run that is resumed on a
            machine with fewer GPUs may have places that do not exist.
    """
    handles = []
    for place in gpus:
        if place >= len(visible):
            continue
        gpu = visible[place]
        if gpu.isdecimal():
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(gpu)))
        else:
            handles.append(nvml.nvmlDeviceGetHandleByUUID(gpu))
    return handles
