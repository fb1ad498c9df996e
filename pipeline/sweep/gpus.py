"""The GPUs of this machine: which job may use which, and no two jobs one."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from pipeline.common.errors import ConfigError, say
from pipeline.config import cluster
from pipeline.config.schema import HardwareConfig

LOCKED = "PIPELINE_GPUS"  # environment variable of a job: the GPUs that it has locked
DEVICES = "/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/vfio"


def slots(hardware: Sequence[HardwareConfig], at_once: int | None) -> list[list[str]]:
    """Return one entry for each job that may run at once: the GPUs of that job.

    There are `at_once` of them at most; by default one a GPU, or one where there is no GPU.
    """
    gpus, size = visible(), per_job(hardware)
    if not gpus and any(h.device.name == "gpu" for h in hardware):
        rule = "must be a device of this machine, which has no GPU"
        raise ConfigError("hardware.device", rule, "gpu", ["auto", "cpu"])
    if not gpus or not size:
        return [[] for _ in range(at_once or 1)]
    if size > len(gpus):
        raise ConfigError("hardware.gpus_per_job", f"must be at most the {len(gpus)} GPUs of this machine", size)
    return [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)][:at_once]


def per_job(hardware: Sequence[HardwareConfig]) -> int:
    """Return how many GPUs a job may use: the most that one of them asks for."""
    here = not cluster.is_named(os.environ)  # else each worker has GPUs of its own
    asking = [h for h in hardware if h.device.name != "cpu"]
    return max((max(h.gpus_per_job, h.replicas * (h.workers or 1) if here else h.replicas) for h in asking), default=0)


def visible() -> list[str]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: by number or UUID."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = (gpu.strip() for gpu in listed.split(","))
        return list(itertools.takewhile(lambda gpu: gpu and not gpu.startswith("-"), names))  # as CUDA reads it
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30)
        count = sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        count = len(glob.glob("/dev/nvidia[0-9]*"))
    return [str(number) for number in range(count)]


def lock(gpus: Sequence[str]) -> None:
    """Wait until no job of another sweep of this user has any of `gpus`, then keep them until this process ends."""
    import fcntl

    ours = os.environ.get(LOCKED, "").split(",")  # where this sweep was itself started by a job
    for gpu in sorted(set(gpus) - set(ours)):  # in the same order everywhere, so that no two wait for each other
        path = Path(tempfile.gettempdir()) / f"pipeline-{os.getuid()}-gpu-{quote(gpu, safe='')}.lock"
        with contextlib.suppress(OSError):  # where no file can be written
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waits for GPU {gpu}, which a job of another sweep has")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.environ[LOCKED] = ",".join(gpus)
