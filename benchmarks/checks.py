"""Checks of `benchmarks/gpu.py`: weights after some updates, and peak memory at one factor."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from benchmarks import gpu_workloads
from benchmarks.gpu_workloads import setup, workload
from pipeline.components import devices

EXAMPLES, MICRO = 16, 6  # the last micro-batch is smaller
CHECKED = ("resnet18", "transformer")
SMALL = 16  # examples of a micro-batch; its activations are still larger than 64 times its inputs


def trajectory(
    device: str,
    precision: str,
    tiny: bool,
    updates: int,
    deterministic: bool = False,
    whole: bool = False,
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield each network of `CHECKED` with its weights after so many updates.

    With `whole` the effective batch is one micro-batch, except for networks with BatchNormalization.
    """
    setup(precision, device, deterministic)
    for name in CHECKED[-1:] if tiny else CHECKED:
        of = workload(name, tiny)
        model = of.build()
        generator = np.random.default_rng(
            0
        )  # Keras' initial weights are rounded differently on a GPU
        model.set_weights(
            [
                generator.normal(size=weight.shape)
                / math.sqrt(weight.size / weight.shape[-1])
                if weight.ndim > 1
                else weight
                for weight in model.get_weights()
            ]
        )
        step = gpu_workloads.updates(
            model, of.examples(EXAMPLES), EXAMPLES if whole and of.tokens else MICRO
        )
        for _ in range(updates):
            step()
        yield name, model.get_weights()


def peak_memory(
    name: str, factor: int, updates: int, tiny: bool
) -> Iterator[tuple[int, int]]:
    """Yield the peak of this process after some updates, and the size of their effective batch, in bytes."""
    machine = setup("float32")
    of = workload(name, tiny)
    micro = min(of.micro, SMALL)
    batch = of.examples(micro * factor)
    step = gpu_workloads.updates(of.build(), batch, micro)
    for _ in range(updates):
        step()["loss"].numpy()
    yield devices.peak_memory(machine), sum(array.nbytes for array in batch)
