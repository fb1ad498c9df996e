"""Assigns this machine's GPUs to jobs."""

import os
from collections.abc import Sequence

from pipeline.common import nvidia
from pipeline.common.errors import ConfigError, say
from pipeline.config import cluster, schema

DEVICES = "/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio"


def slots(
    hardware: Sequence[schema.HardwareConfig], at_once: int | None
) -> list[list[str]]:
    """Return the GPUs of each job at once, of those that TensorFlow lists: by default one a job; no GPU, one job."""
    for each in hardware:
        if each.gpu is not None:
            rule = "must be null in a sweep, which gives each job its GPUs: CUDA_VISIBLE_DEVICES says which it has"
            raise ConfigError("hardware.gpu", rule, each.gpu)
    size, required = per_job(hardware), any(h.device.name == "gpu" for h in hardware)
    gpus = nvidia.visible() if size else []
    if required and not gpus:
        nvidia.why_no_gpu(required)
    if gpus and not (gpus := gpus[: nvidia.of_tensorflow()[0]]):
        say(f"jobs run on the CPU: {nvidia.why_no_gpu(required)}")
    if not gpus:
        return [[] for _ in range(at_once or 1)]
    if size > len(gpus):
        raise ConfigError(
            "hardware.gpus_per_job",
            f"must be at most the {len(gpus)} GPUs of this machine",
            size,
        )
    apart = [
        gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)
    ]
    return (apart * min(h.jobs_per_gpu for h in hardware))[:at_once]


def per_job(hardware: Sequence[schema.HardwareConfig]) -> int:
    """Return the largest number of GPUs that a job asks for."""
    here = not cluster.is_named(os.environ)  # otherwise each worker has GPUs of its own
    asking = [h for h in hardware if h.device.name != "cpu"]
    return max(
        (
            max(h.gpus_per_job, h.replicas * (h.workers or 1) if here else h.replicas)
            for h in asking
        ),
        default=0,
    )
