"""What `benchmarks/gpu.py` trains: networks of a size that a GPU is for, and tiny ones for a test on a CPU.

The micro-batches of the large ones fit into 40 GB in float32; where they do not fit they are halved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import models, networks
from benchmarks.figures import Figure
from pipeline.accumulation import Update
from pipeline.components import devices
from pipeline.config.schema import Device, HardwareConfig, Precision

FACTOR = 4


@dataclass(frozen=True)
class Workload:
    """A network and its data.

    Attributes:
        build: return it, with the current precision.
        shape: of an example.
        tokens: that an example has; 0 for an image.
        classes: labels are less than this, and so are tokens.
        micro: examples of a micro-batch.
    """

    build: Callable[[], keras.Model]
    shape: tuple[int, ...]
    tokens: int
    classes: int
    micro: int

    def examples(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return noise with labels: what it is does not change how long it takes."""
        generator = np.random.default_rng(0)
        if self.tokens:
            x = generator.integers(0, self.classes, (count, *self.shape), np.int32)
        else:
            x = generator.random((count, *self.shape), np.float32)
        return x, generator.integers(
            0, self.classes, x.shape if self.tokens else count, np.int32
        )


def workload(name: str, tiny: bool) -> Workload:
    """Return one of `resnet18`, `resnet50`, `transformer`, `transformer10m` and `transformer350m`."""
    if name.startswith("resnet"):
        depth, side, classes, micro = {
            "resnet18": (18, 16, 10, 32),
            "resnet50": (50, 224, 1000, 128),
        }[name]
        if tiny:
            depth, side, classes, micro = 10, 8, 10, 2
        return Workload(
            lambda: networks.resnet(depth, side, classes),
            (side, side, 3),
            0,
            classes,
            micro,
        )
    layers, width, heads, vocabulary, length, micro = {
        "transformer": (2, 64, 4, 256, 64, 32),
        "transformer10m": (8, 256, 4, 8192, 256, 64),  # 10.6 million weights
        "transformer350m": (24, 1024, 16, 24576, 512, 8),  # 353 million weights
    }[name]
    if tiny:
        layers, width, heads, vocabulary, length, micro = 1, 16, 2, 32, 8, 2
    return Workload(
        lambda: networks.transformer(layers, width, heads, vocabulary, length),
        (length,),
        length,
        vocabulary,
        micro,
    )


def setup(
    precision: str, device: str = "auto", deterministic: bool = False
) -> devices.Devices:
    """Set this process' global state as a run does. `precision` is one of a GPU's, such as `bfloat16`."""
    policy = precision if precision in ("float32", "float64") else f"mixed_{precision}"
    config = HardwareConfig(
        device=Device[device], precision=Precision[policy], deterministic=deterministic
    )
    return devices.setup(config, seed=0)


def facts() -> Iterator[dict[str, Any]]:
    """Yield what is known of the device, once it has computed something."""
    machine = setup("float32")
    tf.linalg.matmul(*[tf.random.normal([64, 64])] * 2).numpy()
    tf.nn.conv2d(
        tf.random.normal([1, 8, 8, 4]), tf.random.normal([3, 3, 4, 4]), 1, "SAME"
    ).numpy()
    details = {}
    if machine.on_gpu:
        details = tf.config.experimental.get_device_details(
            tf.config.list_physical_devices("GPU")[0]
        )
    yield {
        "device": machine.description.partition(",")[0],
        "on_gpu": machine.on_gpu,
        "details": details,
    }


def found(tiny: bool) -> Iterator[Figure]:
    """Yield the seconds in which this process got the device and its first result, and the device's name."""
    begun = time.perf_counter()
    (seen,) = facts()
    yield Figure(
        "found",
        seen["device"],
        "first result",
        [time.perf_counter() - begun],
        "s",
        note=str(seen["details"]),
    )


def optimizer() -> keras.optimizers.Optimizer:
    """Return Adam, with a scaled loss where float16 needs it."""
    adam = models.optimizer()
    scaled = keras.config.dtype_policy().compute_dtype == "float16"
    return keras.optimizers.LossScaleOptimizer(adam) if scaled else adam


def updates(
    model: keras.Model,
    batch: tuple[np.ndarray, np.ndarray],
    micro_batch_size: int,
    xla: bool = False,
    same_noise: bool = False,
) -> Callable[[], dict[str, tf.Tensor]]:
    """Return a function that makes one update of `batch`, which comes from the host each time, as in training."""
    stepping = optimizer()
    stepping.build(model.trainable_variables)
    update = Update(
        model,
        models.loss(),
        stepping,
        micro_batch_size,
        jit_compile=xla,
        same_noise=same_noise,
    )
    with tf.device("CPU:0"):
        batches = iter(
            tf.data.Dataset.from_tensors(tuple(map(tf.constant, batch))).repeat()
        )

    @tf.function(autograph=False)
    def step(batches: Iterator[Any]) -> dict[str, tf.Tensor]:
        return update(next(batches))

    return lambda: step(batches)
