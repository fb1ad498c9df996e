"""Sets up devices, precision, seeds and determinism, before TensorFlow is used."""

import re
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation.internals import load_cuda_libraries
from pipeline.common import imports, memory_budget, nvidia
from pipeline.common.errors import ConfigError, count
from pipeline.config.cluster import KEY, Cluster
from pipeline.config.schema import Device, HardwareConfig
from pipeline.config.sizes import REPLICAS


@dataclass(frozen=True)
class Devices:
    """The devices of a run, and its distribution strategy."""

    strategy: tf.distribute.Strategy  # mirrored if there are several devices
    on_gpu: bool
    description: str  # one line for the user
    workers: int = 1  # number of processes
    # Counts the all-reduces for which this worker was ready. None with a single worker.
    reductions_ready: tf.Variable | None = None
    gpus: Sequence[int] = ()  # indices into the GPUs that TensorFlow lists

    def agree(self, holds: bool) -> bool:
        """Return whether `holds` is true on all workers. All must call this."""
        if self.workers == 1:
            return holds
        return self._sum(int(holds)) == self.strategy.num_replicas_in_sync

    def same(self, number: int) -> bool:
        """Return whether `number` is the same on all workers. All must call this.

        Args:
            number: an integer of up to 24 bits; larger ones could overflow the
                sums of squares.
        """
        # N·Σv² = (Σv)² holds only if all N values v are equal.
        replicas = self.strategy.num_replicas_in_sync
        return replicas * self._sum(number**2) == self._sum(number) ** 2

    @cached_property
    def _sum(self) -> Callable[[int], int]:
        """A function that sums an integer over all replicas.

        The replicas of a worker all contribute the worker's integer.
        """
        strategy = self.strategy

        @tf.function(autograph=False)
        def total(number: tf.Tensor) -> tf.Tensor:
            values = strategy.run(lambda: number)
            return strategy.reduce("SUM", values, axis=None)

        return lambda number: int(total(tf.constant(number, tf.int64)))


def setup(config: HardwareConfig, seed: int, workers: Cluster | None = None) -> Devices:
    """Choose the devices, and set the precision, the seeds and the determinism.

    Call this once per process, before any other use of TensorFlow. With several
    workers, the call returns once all of them have joined.

    Args:
        config: the `hardware` group of the config.
        seed: seed for Python, NumPy and TensorFlow.
        workers: the workers of the run, or None for a single process.

    Raises:
        ConfigError: the machine lacks the devices that the config asks for.
    """
    load_cuda_libraries()
    # Without a driver, the CUDA libraries print notices here; suppress them.
    with imports.without_chatter():
        gpus = tf.config.list_physical_devices("GPU")
    why_no_gpu = ""
    if not gpus and config.device != Device.cpu:
        if config.device == Device.gpu:
            raise nvidia.no_gpu_error()
        why_no_gpu = nvidia.why_no_gpu()
        if why_no_gpu and config.gpu is not None:
            rule = f"selects GPUs, but this run can use none ({why_no_gpu})"
            raise ConfigError("hardware.gpu", rule, config.gpu)

    used_gpus = []
    if uses_gpu(config):
        used_gpus = _gpus_of_process(
            _named_gpus(gpus, config.gpu), config.replicas, workers
        )
    tf.config.set_visible_devices(used_gpus, "GPU")
    for gpu in used_gpus:
        _limit_memory(gpu, config.gpu_memory)
    if used_gpus:
        _lock(used_gpus)
    elif config.replicas > 1:
        _split_cpu(config.replicas, workers)
    _set_precision_and_seed(config, seed)

    description = _description(config, why_no_gpu)
    on_gpu = bool(used_gpus)
    strategy = _strategy(config.replicas, on_gpu, workers)
    indices = [gpus.index(gpu) for gpu in used_gpus]
    if workers is None:
        return Devices(strategy, on_gpu, description, gpus=indices)
    with tf.device("CPU:0"):
        reductions_ready = tf.Variable(0, dtype=tf.int64, trainable=False)
    processes = len(workers.addresses)
    return Devices(
        strategy,
        on_gpu,
        f"{processes} workers, each with {description}",
        processes,
        reductions_ready,
        indices,
    )


def uses_gpu(config: HardwareConfig) -> bool:
    """Return whether a run with the `hardware` group `config` uses a GPU."""
    return config.device != Device.cpu and bool(tf.config.list_physical_devices("GPU"))


def gpu_names() -> list[str]:
    """Return the model names of the GPUs that this process uses."""
    names = []
    for gpu in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        names.append(details.get("device_name", "GPU"))
    return names


def peak_memory(devices: Devices) -> int:
    """Return the peak memory of this process in bytes.

    On GPUs, this is the peak memory of TensorFlow's tensors on the first GPU since the
    last reset. On a CPU, it is the peak resident memory.
    """
    if devices.on_gpu:
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    peak = status_bytes("VmHWM")
    if peak is not None:
        return peak
    # A fallback: this peak may be inherited from the parent process.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def status_bytes(name: str) -> int | None:
    """Return a size that Linux reports for this process, in bytes, or None if unknown.

    Args:
        name: the field of `/proc/self/status`, such as `VmHWM`.
    """
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        match = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
        if match is not None:
            return int(match[1]) * 1024
    return None


def _named_gpus(gpus: list[Any], names: int | list[int] | None) -> list[Any]:
    """Return the GPUs that `hardware.gpu` selects.

    Args:
        gpus: all GPUs that TensorFlow lists.
        names: one index or several indices into `gpus`, or None for all GPUs.

    Raises:
        ConfigError: an index is too large.
    """
    if names is None:
        return gpus
    indices = [names] if isinstance(names, int) else names
    if max(indices) >= len(gpus):
        listed = count(len(gpus), "GPU")
        rule = f"must be among the {listed} of this machine, counted from 0"
        raise ConfigError("hardware.gpu", rule, names)
    return [gpus[index] for index in indices]


def _gpus_of_process(
    gpus: list[Any], replicas: int, workers: Cluster | None
) -> list[Any]:
    """Select one of `gpus` for each replica of this process.

    Raises:
        ConfigError: there are too few GPUs for the replicas or the workers.
    """
    available = len(gpus)
    listed = count(available, "GPU")
    if replicas > available:
        rule = f"must be at most the {listed} of this machine"
        raise ConfigError(REPLICAS, rule, replicas)
    if workers is None:
        return gpus[:replicas]
    processes = len(workers.addresses)
    if workers.started and processes * replicas > available:
        rule = (
            f"must be at most {available // replicas}: "
            f"each worker needs {replicas} of the {listed} of this machine"
        )
        raise ConfigError(KEY, rule, processes)
    # Take this worker's slice if it exists: the GPUs may be shared by all workers on
    # the machine. Otherwise, assume that the visible GPUs are this process's own.
    first = workers.index_on_machine * replicas
    if available < first + replicas:
        return gpus[:replicas]
    return gpus[first : first + replicas]


def _limit_memory(gpu: Any, size: Any) -> None:
    """Limit TensorFlow's memory on a GPU to `size`, which is allocated at once.

    If `size` is None, TensorFlow allocates memory as needed.
    """
    if size is None:
        tf.config.experimental.set_memory_growth(gpu, True)
        return
    mebibytes = max(1, (memory_budget.parsed(size) or 0) // 2**20)
    tf.config.set_logical_device_configuration(
        gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=mebibytes)]
    )


def _lock(gpus: list[Any]) -> None:
    """Lock the GPUs without waiting; print a line if another run has locked one."""
    visible = nvidia.visible()
    names = []
    for gpu in gpus:
        index = int(gpu.name.rpartition(":")[2])
        if index < len(visible):
            names.append(visible[index])
        else:
            names.append(str(index))
    nvidia.lock(names, wait=False)


def _split_cpu(replicas: int, workers: Cluster | None) -> None:
    """Split the CPU into one logical device per replica.

    Raises:
        ConfigError: there are several workers.
    """
    if workers is not None:
        raise ConfigError(REPLICAS, "must be 1 with several workers on CPUs", replicas)
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    tf.config.set_logical_device_configuration(cpu, logical)


def _set_precision_and_seed(config: HardwareConfig, seed: int) -> None:
    # Reset Keras' numbering of layers, which otherwise continues across all models in a
    # process: a checkpoint identifies a variable by its name, so each run needs the
    # same names.
    keras.utils.clear_session(free_memory=False)
    precision = config.precision.name
    # Losses and layers without a dtype policy use floatx.
    floatx = "float64" if precision == "float64" else "float32"
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_tensor_float_32_execution(config.tf32)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()


def _description(config: HardwareConfig, why_no_gpu: str) -> str:
    """Return the line that names the devices of this process and their precision."""
    names = ", ".join(gpu_names())
    if not names and config.replicas == 1:
        names = "CPU"
    elif not names:
        names = f"{config.replicas} logical CPU devices"
    if why_no_gpu:
        names += f" ({why_no_gpu})"
    line = f"{names}, {config.precision.name}"
    if config.precision.name == "float32" and nvidia.computes_in_tf32():
        line += " (products in TF32)"
    return line


def _strategy(
    replicas: int, on_gpu: bool, workers: Cluster | None
) -> tf.distribute.Strategy:
    if workers is not None:
        return _strategy_of_workers(replicas, on_gpu, workers)
    if replicas == 1:
        return tf.distribute.get_strategy()
    kind = "GPU" if on_gpu else "CPU"
    names = [f"/{kind}:{index}" for index in range(replicas)]
    return tf.distribute.MirroredStrategy(names)


def _strategy_of_workers(
    replicas: int, on_gpu: bool, workers: Cluster
) -> tf.distribute.Strategy:
    """Wait until all workers have joined; return their strategy."""
    accelerators = {"GPU": replicas} if on_gpu else {}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(workers.addresses)}),
        task_type="worker",
        task_id=workers.index,
        num_accelerators=accelerators,
        rpc_layer="grpc",
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    # TensorFlow has installed its own SIGTERM handler, for preemption notices that are
    # not used here. Restore the handler that Python had.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return strategy
