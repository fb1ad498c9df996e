"""Counts and locks the NVIDIA GPUs on this machine.

Three numbers may differ: the GPUs that the driver lists, those that this process may
use, and those that TensorFlow can use.
"""

import contextlib
import fcntl
import functools
import glob
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from pipeline.common import imports, rounding
from pipeline.common.errors import ConfigError, count, say

# Environment variable with the GPUs that this process or its parent has locked.
LOCKED = "PIPELINE_GPUS"
_COUNT_GPUS = (
    "from pipeline import accumulation; import tensorflow as tf; "
    "print(len(tf.config.list_physical_devices('GPU')))"
)
_AMPERE = (8, 0)  # compute capability
_HOPPER = 9  # major number of the compute capability


class TensorFlowGpus(NamedTuple):
    """The GPUs that TensorFlow finds in a new process.

    Attributes:
        listed: the number of GPUs that TensorFlow lists.
        missing_libraries: sorted names of the libraries that TensorFlow could not open.
    """

    listed: int
    missing_libraries: list[str]


def gpus_of_driver() -> int:
    """Return the number of GPUs that the driver lists."""
    listing = imports.output_of("nvidia-smi", "-L")
    if listing is None:
        return len(glob.glob("/dev/nvidia[0-9]*"))
    return len([line for line in listing.splitlines() if line.startswith("GPU ")])


def visible() -> list[str]:
    """Return the GPUs that this process may use.

    Each GPU is given by its number or UUID, as in CUDA_VISIBLE_DEVICES.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(gpus_of_driver())]
    gpus = []
    for name in listed.split(","):
        gpu = name.strip()
        if not gpu or gpu.startswith("-"):
            break  # CUDA ignores the rest of the list.
        gpus.append(gpu)
    return gpus


@functools.cache
def gpus_of_tensorflow() -> TensorFlowGpus:
    """Return the GPUs that TensorFlow finds in a new process.

    The missing libraries are read from the process's messages. If the process fails,
    the number of GPUs is 0.
    """
    variables = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "dso_loader=1",
        "PYTHONPATH": imports.path_of_processes(),
    }
    process = subprocess.run(
        [sys.executable, "-c", _COUNT_GPUS],
        capture_output=True,
        text=True,
        env=variables,
    )
    pattern = r"Could not load dynamic library '([^']+)'"
    missing = sorted(set(re.findall(pattern, process.stderr)))
    words = process.stdout.split()
    if process.returncode != 0 or not words:
        return TensorFlowGpus(0, missing)
    return TensorFlowGpus(int(words[-1]), missing)


def why_no_gpu() -> str:
    """Return the reason why TensorFlow lists no GPU, for a run that can use the CPU.

    Raises:
        ConfigError: TensorFlow should have listed a GPU. The run would otherwise take
            hours on the CPU, unnoticed.
    """
    missing_gpu = _missing_gpu()
    if missing_gpu.is_fault:
        raise missing_gpu.error()
    return missing_gpu.reason


def no_gpu_error() -> ConfigError:
    """Return the error, with the reason, for a run that requires a GPU and has none."""
    return _missing_gpu().error()


class _MissingGpu(NamedTuple):
    """Why TensorFlow lists no GPU.

    Attributes:
        reason: the reason.
        rule: the rule for `hardware.device` that follows from the reason.
        is_fault: whether TensorFlow should have listed a GPU.
    """

    reason: str
    rule: str
    is_fault: bool

    def error(self) -> ConfigError:
        return ConfigError("hardware.device", self.rule, "gpu", ["auto", "cpu"])


def _missing_gpu() -> _MissingGpu:
    gpus = gpus_of_driver()
    if gpus == 0:
        rule = "must be a device of this machine, which has no GPU"
        return _MissingGpu("no GPU answers", rule, is_fault=False)

    is_fault = False
    if not visible():
        reason = "CUDA_VISIBLE_DEVICES hides the GPUs"
    else:
        listed, missing_libraries = gpus_of_tensorflow()
        if listed:
            reason = (
                f"TensorFlow lists {count(listed, 'GPU')} in a new process and none in "
                "this one"
            )
            is_fault = True
        elif importlib.util.find_spec("nvidia") is None:
            reason = (
                "TensorFlow's CUDA libraries are not installed: "
                "see requirements-gpu.lock"
            )
        else:
            missing = ", ".join(missing_libraries) or "their driver"
            reason = f"TensorFlow uses none of {count(gpus, 'GPU')}, and could not open {missing}"
            is_fault = True
    return _MissingGpu(
        reason, f"asks for a GPU, but this run can use none ({reason})", is_fault
    )


def lock(gpus: Sequence[str], *, shared: bool = False, wait: bool = True) -> None:
    """Lock GPUs until this process ends.

    Args:
        gpus: the GPUs, in the form that `visible` returns.
        shared: whether processes that also pass `shared` may lock the same GPUs.
        wait: whether to wait until another run unlocks a GPU. Otherwise, print that
            another run has locked the GPU, and do not lock it.
    """
    locked_before = os.environ.get(LOCKED, "").split(",")
    # Lock in sorted order, so that two processes cannot wait for each other.
    for gpu in sorted(set(gpus) - set(locked_before)):
        with contextlib.suppress(OSError):  # The lock file may not be writable.
            _lock_one(gpu, shared=shared, wait=wait)
    os.environ[LOCKED] = ",".join(gpus)


def _lock_one(gpu: str, *, shared: bool, wait: bool) -> None:
    name = f"pipeline-{os.getuid()}-gpu-{quote(gpu, safe='')}.lock"
    path = Path(tempfile.gettempdir()) / name
    # Keep the descriptor open, as closing it would release the lock.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        if wait:
            say(f"waits for GPU {gpu}, which another run is using")
            fcntl.flock(descriptor, kind)
        else:
            say(f"GPU {gpu} is also in use by another run")


def computes_in_tf32() -> bool:
    """Return whether TensorFlow multiplies float32 matrices in TF32 in this process.

    This requires that TF32 is enabled and a visible GPU supports it.
    """
    import tensorflow as tf  # takes seconds

    if not tf.config.experimental.tensor_float_32_execution_enabled():
        return False
    return any(capability >= _AMPERE for capability in _compute_capabilities())


def all_are_hopper() -> bool:
    """Return whether this process has GPUs, all of NVIDIA's Hopper generation."""
    return {major for major, _ in _compute_capabilities()} == {_HOPPER}


def _compute_capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each visible GPU; (0, 0) if it is not known."""
    import tensorflow as tf  # takes seconds

    capabilities = []
    with imports.without_chatter():  # The libraries report if they cannot start CUDA.
        for gpu in tf.config.get_visible_devices("GPU"):
            details = tf.config.experimental.get_device_details(gpu)
            capabilities.append(details.get("compute_capability", (0, 0)))
    return capabilities


def unit_roundoff(dtypes: Iterable[str]) -> float:
    """Return the largest unit roundoff among the floating-point types in `dtypes`.

    The unit roundoff is 2⁻ᵖ for a significand of p bits. For float32, it is that of
    TF32 if this process computes in TF32. Without a floating-point type, return 0.
    """
    in_tf32 = computes_in_tf32()
    largest = 0.0
    for dtype in dtypes:
        if "float" in dtype:
            of_dtype = rounding.of_dtype(dtype, in_tf32=in_tf32)
            largest = max(largest, of_dtype.unit_roundoff)
    return largest
