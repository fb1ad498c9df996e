"""Device, replicas, precision and determinism: what must be set before TensorFlow builds anything."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf
from omegaconf import DictConfig

from pipeline.errors import ConfigError
from pipeline.schema import Device


@dataclass(frozen=True)
class Hardware:
    """What a run computes on."""

    strategy: tf.distribute.Strategy  # mirrored where there are several devices
    on_gpu: bool
    description: str  # one line for a person


def setup(config: DictConfig, seed: int) -> Hardware:
    """Choose the devices and set this process' global state, with the seed of Python's, NumPy's and TensorFlow's draws.

    Call it once, before any other TensorFlow call. `config` is the `hardware` group.

    Raises:
        ConfigError: the machine lacks the devices that the config asks for.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if config.device == Device.gpu and not gpus:
        rule = "must be a device of this machine, which has no GPU"
        raise ConfigError("hardware.device", rule, "gpu", ["auto", "cpu"])
    on_gpu = uses_gpu(config)
    if on_gpu:
        if config.replicas > len(gpus):
            rule = f"must be at most the {len(gpus)} GPUs of this machine"
            raise ConfigError("hardware.replicas", rule, config.replicas)
        gpus = gpus[: config.replicas]
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    else:
        tf.config.set_visible_devices([], "GPU")
        if config.replicas > 1:
            (cpu,) = tf.config.list_physical_devices("CPU")
            logical = [tf.config.LogicalDeviceConfiguration() for _ in range(config.replicas)]
            tf.config.set_logical_device_configuration(cpu, logical)
    precision = config.precision.name
    # A checkpoint knows a variable by its name, in which Keras counts the layers of all models that a process has had.
    keras.utils.clear_session(free_memory=False)
    # Not every loss and layer follows the policy alone: what has no policy follows floatx.
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    devices = [f"/{'GPU' if on_gpu else 'CPU'}:{index}" for index in range(config.replicas)]
    strategy = tf.distribute.get_strategy() if config.replicas == 1 else tf.distribute.MirroredStrategy(devices)
    what = "CPU" if config.replicas == 1 else f"{config.replicas} logical CPU devices"
    if on_gpu:
        what = ", ".join(tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus)
    why = " (no GPU answers)" if config.device == Device.auto and not gpus else ""
    return Hardware(strategy, on_gpu, f"{what}{why}, {precision}")


def uses_gpu(config: DictConfig) -> bool:
    """Return whether a run with this `hardware` group computes on a GPU."""
    return config.device != Device.cpu and bool(tf.config.list_physical_devices("GPU"))


def peak_memory(hardware: Hardware) -> int:
    """Return the peak in bytes: of the first GPU's memory, or of this process' resident memory on a CPU.

    Of a forked job the libraries that were loaded before the fork count as far as it has used them.
    """
    if hardware.on_gpu:
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    with suppress(OSError):  # Linux; its ru_maxrss begins with that of the process that started this one
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
