"""How a process of `benchmarks/gpu.py` sets up its device and updates a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import keras_models
from benchmarks.figures import Figure
from pipeline.accumulation import Update
from pipeline.common import nvidia
from pipeline.components import devices
from pipeline.config.schema import Device, HardwareConfig, Precision


def setup(
    precision: str, device: str = "auto", deterministic: bool = False
) -> devices.Devices:
    """Set this process' global state as a run does.

    `precision` is one of a GPU's, such as `bfloat16`.
    """
    policy = precision
    if precision not in ("float32", "float64"):
        policy = f"mixed_{precision}"
    config = HardwareConfig(
        device=Device[device], precision=Precision[policy], deterministic=deterministic
    )
    return devices.setup(config, seed=0)


def facts() -> Iterator[dict[str, Any]]:
    """Yield what is known of the device, once it has computed something."""
    machine = setup("float32")
    matrix = tf.random.normal([64, 64])
    tf.linalg.matmul(matrix, matrix).numpy()
    images = tf.random.normal([1, 8, 8, 4])
    filters = tf.random.normal([3, 3, 4, 4])
    tf.nn.conv2d(images, filters, 1, "SAME").numpy()

    details = {}
    if machine.on_gpu:
        first = tf.config.list_physical_devices("GPU")[0]
        details = tf.config.experimental.get_device_details(first)
    yield {
        "device": machine.description.partition(",")[0],
        "on_gpu": machine.on_gpu,
        "details": details,
    }


def found(tiny: bool) -> Iterator[Figure]:
    """Yield the device's name, and the seconds until it had computed something."""
    begun = time.perf_counter()
    (device,) = facts()
    seconds = time.perf_counter() - begun
    yield Figure(
        "found",
        device["device"],
        "first result",
        [seconds],
        unit="s",
        note=str(device["details"]),
    )


def optimizer() -> keras.optimizers.Optimizer:
    """Return Adam, with a scaled loss in float16."""
    adam = keras_models.optimizer_of_update()
    if keras.config.dtype_policy().compute_dtype == "float16":
        return keras.optimizers.LossScaleOptimizer(adam)
    return adam


def updates(
    model: keras.Model,
    batch: tuple[np.ndarray, np.ndarray],
    micro_batch_size: int,
    xla: bool = False,
    same_noise: bool = False,
    xla_scope: str = "step",
) -> Callable[[], dict[str, tf.Tensor]]:
    """Return a function that makes one update of `batch`.

    The batch comes from the host each time, as in training.
    """
    built_optimizer = optimizer()
    built_optimizer.build(model.trainable_variables)
    update = Update(
        model,
        keras_models.loss(),
        built_optimizer,
        micro_batch_size,
        jit_compile=xla,
        xla_scope=xla_scope,
        fused_attention=nvidia.all_are_hopper(),  # as a run with `auto`
        same_noise=same_noise,
    )
    batches = iter(repeated_batch(batch))

    @tf.function(autograph=False)
    def step(batches: Iterator[Any]) -> dict[str, tf.Tensor]:
        return update(next(batches))

    return lambda: step(batches)


def repeated_batch(batch: tuple[np.ndarray, np.ndarray]) -> tf.data.Dataset:
    """Return a dataset that yields one batch without end, from the host's memory."""
    x, y = batch
    with tf.device("CPU:0"):
        tensors = (tf.constant(x), tf.constant(y))
        return tf.data.Dataset.from_tensors(tensors).repeat()
