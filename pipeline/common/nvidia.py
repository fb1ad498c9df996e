"""This machine's NVIDIA GPUs, as its driver lists them and as this process may use them."""

import glob
import itertools
import os
import subprocess


def gpus_of_driver() -> int:
    """Return how many GPUs the driver lists."""
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30)
        return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        return len(glob.glob("/dev/nvidia[0-9]*"))


def visible() -> list[str]:
    """Return the GPUs that this process may use, by number or UUID as in CUDA_VISIBLE_DEVICES."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(gpus_of_driver())]
    names = (gpu.strip() for gpu in listed.split(","))
    return list(itertools.takewhile(lambda gpu: gpu and not gpu.startswith("-"), names))  # as CUDA reads it


def computes_in_tf32() -> bool:
    """Return whether TensorFlow computes products of float32 in TF32 on a GPU of this process."""
    import tensorflow as tf  # takes seconds

    known = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    on = tf.config.experimental.tensor_float_32_execution_enabled()
    return bool(on and any(of.get("compute_capability", (0, 0)) >= (8, 0) for of in known))  # Ampere and later
