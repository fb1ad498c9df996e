"""Samples MLflow's system metrics, restricted to the GPUs of the run."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from pipeline.common import nvidia
from pipeline.common.errors import first_line, say


class SystemSampler:
    """Samples the system metrics of a run. If this fails, only samples are missing.

    Args:
        uri: the URI of the store.
        run_id: the ID of the run.
        gpus: the GPUs of the run; see `system_sampler`.
    """

    def __init__(self, uri: str, run_id: str, gpus: Sequence[int] | None):
        self._uri = uri
        self._run_id = run_id
        self._gpus = gpus
        self._read: Callable[[], dict[str, float]] | None = None
        self._has_failed = False

    def sample(self) -> dict[str, float]:
        """Return the current metrics by name; empty if they cannot be read.

        The first error is printed.
        """
        try:
            if self._read is None:
                self._read = system_sampler(self._uri, self._run_id, self._gpus)
            return self._read()
        except Exception as error:  # for example, the driver of a GPU has failed
            # Create new monitors for the next sample, since these may hold part of a
            # sample.
            self._read = None
            if not self._has_failed:
                self._has_failed = True
                say(f"system metrics cannot be sampled: {first_line(error)}")
            return {}


def system_sampler(
    uri: str, run_id: str, gpus: Sequence[int] | None = None
) -> Callable[[], dict[str, float]]:
    """Return a function that samples MLflow's system metrics.

    MLflow's own sampling thread is not used, since it reads the whole run before each
    write. The attributes used here are private in MLflow 3.17.2;
    tests/tracking/test_mlflow_internals.py fails if another version differs.

    Args:
        uri: the URI of the store.
        run_id: the ID of the run.
        gpus: the GPUs of the run, as indices into CUDA_VISIBLE_DEVICES. The metrics of
            the first GPU are named `gpu_0_…`. None, as in journals of older versions,
            selects all GPUs of the machine.

    Returns:
        A function that returns the current metrics by name.
    """
    monitor = SystemMetricsMonitor(run_id, tracking_uri=uri)
    for part in monitor.monitors:
        # Only the monitor of NVIDIA GPUs has handles. If it exists, MLflow has imported
        # `pynvml`.
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
        visible: the number or UUID of each visible GPU.
        gpus: the indices of the run's GPUs in `visible`. Indices that are out of range
            are ignored: the run may be resumed on a machine with fewer GPUs.
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
