"""Assigns this machine's GPUs to jobs."""

import os
from collections.abc import Sequence

from pipeline.common import nvidia
from pipeline.common.errors import ConfigError, count, say
from pipeline.config import cluster, schema

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio")


def slots(
    hardware_of_jobs: Sequence[schema.HardwareConfig], at_once: int | None
) -> list[list[str]]:
    """Return the GPUs of each concurrent job.

    Args:
        hardware_of_jobs: the `hardware` group of each job.
        at_once: maximum number of concurrent jobs. If None, as many as the GPUs allow,
            or one job without GPUs.

    Returns:
        One list of GPUs per concurrent job. The lists are empty if jobs run on the CPU.

    Raises:
        ConfigError: a job sets `hardware.gpu`, or needs more GPUs than there are.
    """
    for hardware in hardware_of_jobs:
        if hardware.gpu is not None:
            rule = (
                "must be left out in a sweep, which assigns GPUs to its jobs: select "
                "the sweep's GPUs with CUDA_VISIBLE_DEVICES"
            )
            raise ConfigError("hardware.gpu", rule, hardware.gpu)

    size = per_job(hardware_of_jobs)
    gpus = _usable_gpus(hardware_of_jobs, size)
    if not gpus:
        return [[] for _ in range(at_once or 1)]
    if size > len(gpus):
        rule = f"must be at most the {count(len(gpus), 'GPU')} of this machine"
        raise ConfigError("hardware.gpus_per_job", rule, size)

    groups = []
    for first in range(0, len(gpus) - size + 1, size):
        groups.append(gpus[first : first + size])
    jobs_per_gpu = min(hardware.jobs_per_gpu for hardware in hardware_of_jobs)
    return (groups * jobs_per_gpu)[:at_once]


def per_job(hardware_of_jobs: Sequence[schema.HardwareConfig]) -> int:
    """Return the largest number of GPUs that a job needs; 0 if all run on the CPU."""
    # On a cluster, workers run on other machines and need no GPUs of this one.
    workers_are_here = not cluster.is_named(os.environ)
    largest = 0
    for hardware in hardware_of_jobs:
        if hardware.device.name == "cpu":
            continue
        replicas = hardware.replicas
        if workers_are_here:
            replicas *= hardware.workers or 1
        largest = max(largest, hardware.gpus_per_job, replicas)
    return largest


def is_required(hardware_of_jobs: Sequence[schema.HardwareConfig]) -> bool:
    """Return whether a job must not run on the CPU."""
    return any(hardware.device.name == "gpu" for hardware in hardware_of_jobs)


def _usable_gpus(
    hardware_of_jobs: Sequence[schema.HardwareConfig], size: int
) -> list[str]:
    """Return the visible GPUs that TensorFlow can use; none if `size` is 0.

    If there are GPUs but TensorFlow can use none of them, print the reason.

    Args:
        hardware_of_jobs: the `hardware` group of each job.
        size: number of GPUs per job.

    Raises:
        ConfigError: a job requires a GPU, but none can be used.
    """
    required = is_required(hardware_of_jobs)
    gpus = []
    if size:
        gpus = nvidia.visible()
    if gpus:
        count, _ = nvidia.gpus_of_tensorflow()
        gpus = gpus[:count]
        if not gpus and not required:
            say(f"jobs run on the CPU: {nvidia.why_no_gpu()}")
    if required and not gpus:
        raise nvidia.no_gpu_error()
    return gpus
