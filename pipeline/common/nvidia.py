"""This machine's NVIDIA GPUs: as its driver lists them, as this process may use them, and as TensorFlow sees them."""

import contextlib
import fcntl
import functools
import glob
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from pipeline.common import imports, rounding
from pipeline.common.errors import ConfigError, say

LOCKED = "PIPELINE_GPUS"  # environment variable: the GPUs that this process, or the one that started it, has locked
_LIST = "from pipeline import accumulation; import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"


def gpus_of_driver() -> int:
    """Return how many GPUs the driver lists."""
    if (listed := imports.said("nvidia-smi", "-L")) is not None:
        return sum(line.startswith("GPU ") for line in listed.splitlines())
    return len(glob.glob("/dev/nvidia[0-9]*"))


def visible() -> list[str]:
    """Return the GPUs that this process may use, by number or UUID as in CUDA_VISIBLE_DEVICES."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(gpus_of_driver())]
    names = (gpu.strip() for gpu in listed.split(","))
    return list(
        itertools.takewhile(lambda gpu: gpu and not gpu.startswith("-"), names)
    )  # as CUDA reads it


@functools.cache
def of_tensorflow() -> tuple[int, list[str]]:
    """Return how many GPUs TensorFlow lists, in a process that shows its messages, and the libraries that it lacks."""
    shown = {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "dso_loader=1",
        "PYTHONPATH": imports.path_of_processes(),
    }
    said = subprocess.run(
        [sys.executable, "-c", _LIST],
        capture_output=True,
        text=True,
        env={**os.environ, **shown},
    )
    missing = sorted(
        set(re.findall(r"Could not load dynamic library '([^']+)'", said.stderr))
    )
    return int(
        next(reversed(said.stdout.split()), 0)
    ) if said.returncode == 0 else 0, missing


def why_no_gpu(required: bool) -> str:
    """Say why TensorFlow lists no GPU; refuse the CPU where it should have listed one, or where one is `required`."""
    count, rule = gpus_of_driver(), ""
    if not count:
        why, rule = (
            "no GPU answers",
            "must be a device of this machine, which has no GPU",
        )
    elif not visible():
        why = "CUDA_VISIBLE_DEVICES hides the GPUs"
    elif listed := of_tensorflow()[0]:
        why, required = (
            f"TensorFlow lists {listed} GPUs in a new process and none in this one",
            True,
        )
    elif importlib.util.find_spec("nvidia") is None:
        why = "TensorFlow's CUDA libraries are not installed: see requirements-gpu.lock"
    else:  # also where none is required: hours on a CPU are not what was meant
        missing = ", ".join(of_tensorflow()[1]) or "their driver"
        why, required = (
            f"TensorFlow uses none of {count} GPUs, and could not open {missing}",
            True,
        )
    if required:
        raise ConfigError(
            "hardware.device", rule or f"must be cpu ({why})", "gpu", ["auto", "cpu"]
        )
    return why


def lock(gpus: Sequence[str], *, shared: bool = False, wait: bool = True) -> None:
    """Lock `gpus` until this process ends, `shared` with others that share them; `wait` for another run, or say so."""
    ours = os.environ.get(LOCKED, "").split(",")
    for gpu in sorted(
        set(gpus) - set(ours)
    ):  # sorted, so that no two processes deadlock
        path = (
            Path(tempfile.gettempdir())
            / f"pipeline-{os.getuid()}-gpu-{quote(gpu, safe='')}.lock"
        )
        with contextlib.suppress(OSError):  # if no file can be written
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                say(
                    f"waits for GPU {gpu}, which another run has"
                    if wait
                    else f"GPU {gpu} has another run on it, too"
                )
                if wait:
                    fcntl.flock(descriptor, kind)
    os.environ[LOCKED] = ",".join(gpus)


def computes_in_tf32() -> bool:
    """Return whether TensorFlow computes products of float32 in TF32 on a GPU of this process."""
    import tensorflow as tf  # takes seconds

    with imports.without_chatter():  # the libraries say if they cannot start CUDA
        known = map(
            tf.config.experimental.get_device_details,
            tf.config.get_visible_devices("GPU"),
        )
    on = tf.config.experimental.tensor_float_32_execution_enabled()
    return bool(
        on and any(of.get("compute_capability", (0, 0)) >= (8, 0) for of in known)
    )  # Ampere and later


def unit_roundoff(dtypes: Iterable[str]) -> float:
    """Return the largest unit roundoff of the floating-point ones of `dtypes`, as this process computes in them."""
    in_tf32 = computes_in_tf32()
    largest = 0.0
    for dtype in dtypes:
        if "float" in dtype:
            of_dtype = rounding.of_dtype(dtype, in_tf32=in_tf32)
            largest = max(largest, of_dtype.unit_roundoff)
    return largest
