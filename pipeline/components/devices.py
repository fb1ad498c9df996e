"""Device, replicas, precision and determinism: what must be set before TensorFlow builds anything."""

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
from pipeline.common.errors import ConfigError
from pipeline.config.cluster import KEY, Cluster
from pipeline.config.schema import Device, HardwareConfig
from pipeline.config.sizes import REPLICAS


@dataclass(frozen=True)
class Devices:
    """The devices that a run computes on."""

    strategy: tf.distribute.Strategy  # mirrored where there are several devices
    on_gpu: bool
    description: str  # one line for a person
    workers: int = 1  # processes
    reductions_ready: tf.Variable | None = (
        None  # of several workers: the all-reduces that this one was ready for
    )
    gpus: Sequence[int] = ()  # places among those that this process sees

    def agree(self, holds: bool) -> bool:
        """Return whether `holds` is true on every worker; all workers have to call it."""
        return (
            holds
            if self.workers == 1
            else self._sum(int(holds)) == self.strategy.num_replicas_in_sync
        )

    def same(self, number: int) -> bool:
        """Return whether a number of up to 24 bits is the same on every worker; all workers have to call it."""
        # N·Σv² = (Σv)² holds only if all v are equal.
        return (
            self.strategy.num_replicas_in_sync * self._sum(number**2)
            == self._sum(number) ** 2
        )

    @cached_property
    def _sum(self) -> Callable[[int], int]:
        run, reduce = self.strategy.run, self.strategy.reduce
        total = tf.function(
            lambda number: reduce("SUM", run(lambda: number), axis=None),
            autograph=False,
        )
        return lambda number: int(total(tf.constant(number, tf.int64)))


def setup(config: HardwareConfig, seed: int, workers: Cluster | None = None) -> Devices:
    """Choose the devices and set this process' global state, such as the seeds of Python, NumPy and TensorFlow.

    Call it once, before any other TensorFlow call; with several `workers` it waits until all have joined. It raises a
    ConfigError if the machine lacks the devices that the config asks for.
    """
    load_cuda_libraries()
    with (
        imports.without_chatter()
    ):  # on a machine without a driver, the libraries say that they cannot start CUDA
        replicas, gpus = config.replicas, tf.config.list_physical_devices("GPU")
    missing = (
        ""
        if gpus or config.device == Device.cpu
        else nvidia.why_no_gpu(config.device == Device.gpu)
    )
    if missing and config.gpu is not None:
        raise ConfigError("hardware.gpu", f"must be null ({missing})", config.gpu)
    used = (
        _gpus(_named(gpus, config.gpu), replicas, workers) if uses_gpu(config) else []
    )
    tf.config.set_visible_devices(used, "GPU")
    for gpu in used:
        if config.gpu_memory is None:
            tf.config.experimental.set_memory_growth(gpu, True)
        else:  # TensorFlow counts it in MiB, and takes all of it at once
            limit = max(1, (memory_budget.parsed(config.gpu_memory) or 0) // 2**20)
            tf.config.set_logical_device_configuration(
                gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=limit)]
            )
    if used:
        numbers, names = (
            (int(gpu.name.rpartition(":")[2]) for gpu in used),
            nvidia.visible(),
        )
        nvidia.lock(
            [
                names[number] if number < len(names) else str(number)
                for number in numbers
            ],
            wait=False,
        )
    if replicas > 1 and not used:
        if workers is not None:
            raise ConfigError(
                REPLICAS, "must be 1 with several workers on CPUs", replicas
            )
        (cpu,) = tf.config.list_physical_devices("CPU")
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
        tf.config.set_logical_device_configuration(cpu, logical)
    precision = config.precision.name
    # A checkpoint knows a variable by its name, in which Keras counts the layers of all models that a process has had.
    keras.utils.clear_session(free_memory=False)
    # Losses and layers that have no policy follow floatx.
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_tensor_float_32_execution(config.tf32)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    what = ", ".join(gpu_names()) or (
        "CPU" if replicas == 1 else f"{replicas} logical CPU devices"
    )
    products = (
        " (products in TF32)"
        if precision == "float32" and nvidia.computes_in_tf32()
        else ""
    )
    what = f"{what}{missing and f' ({missing})'}, {precision}{products}"
    strategy, places = (
        _strategy(replicas, bool(used), workers),
        [gpus.index(gpu) for gpu in used],
    )
    if workers is None:
        return Devices(strategy, bool(used), what, gpus=places)
    with tf.device("CPU:0"):
        reductions_ready = tf.Variable(0, dtype=tf.int64, trainable=False)
    count = len(workers.addresses)
    return Devices(
        strategy,
        bool(used),
        f"{count} workers, each with {what}",
        count,
        reductions_ready,
        places,
    )


def _named(gpus: list[Any], named: int | list[int] | None) -> list[Any]:
    """Return the GPUs of `hardware.gpu`, of all that TensorFlow lists."""
    if named is None:
        return gpus
    numbers = [named] if isinstance(named, int) else named
    if max(numbers) >= len(gpus):
        raise ConfigError(
            "hardware.gpu",
            f"must be of the {len(gpus)} GPUs of this machine, counted from 0",
            named,
        )
    return [gpus[number] for number in numbers]


def _gpus(gpus: list[Any], replicas: int, workers: Cluster | None) -> list[Any]:
    if replicas > len(gpus):
        raise ConfigError(
            REPLICAS, f"must be at most the {len(gpus)} GPUs of this machine", replicas
        )
    if (
        workers is not None
        and workers.started
        and len(workers.addresses) * replicas > len(gpus)
    ):
        rule = f"must be at most {len(gpus) // replicas}: each has {replicas} of the {len(gpus)} GPUs of this machine"
        raise ConfigError(KEY, rule, len(workers.addresses))
    # Workers on one machine share its GPUs, unless each sees its own alone.
    first = 0 if workers is None else workers.index_on_machine * replicas
    return (
        gpus[first : first + replicas]
        if len(gpus) >= first + replicas
        else gpus[:replicas]
    )


def _strategy(
    replicas: int, on_gpu: bool, workers: Cluster | None
) -> tf.distribute.Strategy:
    if workers is not None:
        servers = tf.train.ClusterSpec({"worker": list(workers.addresses)})
        own = {
            "task_type": "worker",
            "task_id": workers.index,
            "num_accelerators": {"GPU": replicas} if on_gpu else {},
        }
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            servers, rpc_layer="grpc", **own
        )
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
        # TensorFlow has replaced the handler of SIGTERM, for a notice of preemption that is not used here.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        return strategy
    if replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy(
        [f"/{'GPU' if on_gpu else 'CPU'}:{index}" for index in range(replicas)]
    )


def uses_gpu(config: HardwareConfig) -> bool:
    """Return whether a run with this `hardware` group computes on a GPU."""
    return config.device != Device.cpu and bool(tf.config.list_physical_devices("GPU"))


def gpu_names() -> list[str]:
    """Return TensorFlow's names of the GPUs that this process uses."""
    used = tf.config.get_visible_devices("GPU")
    return [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in used
    ]


def peak_memory(used: Devices) -> int:
    """Return the peak in bytes: of TensorFlow's tensors on the first GPU, or of resident memory on a CPU."""
    if used.on_gpu:
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    if (
        peak := status_bytes("VmHWM")
    ) is not None:  # ru_maxrss begins with that of the process that started this one
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def status_bytes(name: str) -> int | None:
    """Return a size that Linux keeps of this process, such as `VmHWM`; None elsewhere."""
    with suppress(OSError):
        if found := re.search(
            rf"^{name}:\s+(\d+) kB$",
            Path("/proc/self/status").read_text(),
            re.MULTILINE,
        ):
            return int(found[1]) * 1024
    return None
