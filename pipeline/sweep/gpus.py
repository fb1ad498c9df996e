"""Assigns this machine's GPUs to jobs, and locks them so that no two jobs share one."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from pipeline.common import nvidia
from pipeline.common.errors import ConfigError, say
from pipeline.config import cluster
from pipeline.config.schema import HardwareConfig

LOCKED = "PIPELINE_GPUS"  # environment variable of a job: the GPUs that it locked
DEVICES = "/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio"


def slots(hardware: Sequence[HardwareConfig], at_once: int | None) -> list[list[str]]:
    """Return the GPUs of each job that may run at once; by default one job per GPU, or a single one without a GPU."""
    gpus, size = nvidia.visible(), per_job(hardware)
    if not gpus and any(h.device.name == "gpu" for h in hardware):
        rule = "must be a device of this machine, which has no GPU"
        raise ConfigError("hardware.device", rule, "gpu", ["auto", "cpu"])
    if not gpus or not size:
        return [[] for _ in range(at_once or 1)]
    if size > len(gpus):
        raise ConfigError("hardware.gpus_per_job", f"must be at most the {len(gpus)} GPUs of this machine", size)
    return [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)][:at_once]


def per_job(hardware: Sequence[HardwareConfig]) -> int:
    """Return the largest number of GPUs that a job asks for."""
    here = not cluster.is_named(os.environ)  # otherwise each worker has GPUs of its own
    asking = [h for h in hardware if h.device.name != "cpu"]
    return max((max(h.gpus_per_job, h.replicas * (h.workers or 1) if here else h.replicas) for h in asking), default=0)


def lock(gpus: Sequence[str]) -> None:
    """Lock `gpus` until this process ends; wait while a job of another sweep of this user holds one."""
    import fcntl

    ours = os.environ.get(LOCKED, "").split(",")  # if this sweep was started by a job
    for gpu in sorted(set(gpus) - set(ours)):  # sorted, so that no two processes deadlock
        path = Path(tempfile.gettempdir()) / f"pipeline-{os.getuid()}-gpu-{quote(gpu, safe='')}.lock"
        with contextlib.suppress(OSError):  # if no file can be written
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waits for GPU {gpu}, which a job of another sweep has")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.environ[LOCKED] = ",".join(gpus)
