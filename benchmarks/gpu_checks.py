"""Pieces of `benchmarks/gpu.py`: weights after some updates, and peak memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import keras
import numpy as np

from benchmarks import keras_models
from benchmarks.gpu_comparisons import MemoryUse, Trained
from benchmarks.gpu_device import setup, updates
from benchmarks.workloads import on_gpu
from pipeline.components import devices

EXAMPLES = 16
UNEVEN_MICRO = 6  # the last micro-batch is smaller
NETWORKS = ("resnet18", "transformer")
# Examples of a micro-batch; its activations are still larger than 64 times its inputs.
SMALL_MICRO = 16


def trajectory(
    device: str,
    precision: str,
    tiny: bool,
    update_count: int,
    deterministic: bool = False,
    in_one_batch: bool = False,
) -> Iterator[Trained]:
    """Yield each network of `NETWORKS` with its weights after some updates.

    With `in_one_batch` the effective batch is one micro-batch, except for networks with
    BatchNormalization.
    """
    setup(precision, device, deterministic)
    names = ("transformer",) if tiny else NETWORKS
    for name in names:
        workload = on_gpu(name, tiny)
        model = keras_models.build(workload)
        _set_initial_weights(model)

        micro = UNEVEN_MICRO
        if in_one_batch and workload.tokens:
            micro = EXAMPLES
        step = updates(model, workload.examples(EXAMPLES), micro)
        for _ in range(update_count):
            step()
        yield Trained(name, model.get_weights())


def peak_memory(
    name: str, factor: int, update_count: int, tiny: bool
) -> Iterator[MemoryUse]:
    """Yield the peak of this process after some updates, and the size of the batch."""
    machine = setup("float32")
    workload = on_gpu(name, tiny)
    micro = min(workload.micro, SMALL_MICRO)
    batch = workload.examples(micro * factor)
    step = updates(keras_models.build(workload), batch, micro, xla=True)
    for _ in range(update_count):
        step()["loss"].numpy()
    batch_bytes = sum(array.nbytes for array in batch)
    yield MemoryUse(devices.peak_memory(machine), batch_bytes)


def _set_initial_weights(model: keras.Model) -> None:
    """Set weights by NumPy: Keras' initial weights are rounded differently on a GPU."""
    generator = np.random.default_rng(0)
    weights = []
    for weight in model.get_weights():
        if weight.ndim > 1:
            inputs = weight.size / weight.shape[-1]
            weights.append(generator.normal(size=weight.shape) / math.sqrt(inputs))
        else:
            weights.append(weight)
    model.set_weights(weights)
