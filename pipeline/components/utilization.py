"""Computes `perf/model_flops_utilization`, achieved ÷ peak FLOP/s of the GPUs."""

import re
from typing import NamedTuple

import tensorflow as tf

from pipeline.accumulation import training_flops
from pipeline.common.errors import say
from pipeline.components.assembly import Parts
from pipeline.dataset.batches import in_order
from pipeline.dataset.source import fixed


class Peaks(NamedTuple):
    """Peak dense TFLOP/s of a GPU, on tensor cores where the GPU has them."""

    half: float  # float16 or bfloat16, accumulated in float32
    tf32: float  # 0 for a GPU without TF32
    float32: float
    float64: float


# Peaks by a pattern of the GPU's name. The first match counts. For the sources, see
# docs/logging.md.
PEAKS = {
    "B200": Peaks(2250, 1125, 75, 37),
    "H200 NVL|H100 NVL": Peaks(835, 417, 60, 60),
    "H100 PCIe": Peaks(756, 378, 51, 51),
    "GH200|H200|H100": Peaks(989, 494, 67, 67),
    "A100": Peaks(312, 156, 19.5, 19.5),
    "A10": Peaks(125, 62.5, 31.2, 0.98),
    "L40S": Peaks(362, 183, 91.6, 1.43),
    "L4": Peaks(121, 60, 30.3, 0.47),
    "RTX 4090": Peaks(165.2, 82.6, 82.6, 1.29),
    "RTX 3090": Peaks(71, 35.6, 35.6, 0.56),
    "V100-SXM2": Peaks(125, 0, 15.7, 7.8),
    "V100-PCIE": Peaks(112, 0, 14, 7),
    "T4": Peaks(65, 0, 8.1, 0.25),
}


def peak_flops(name: str, precision: str, tf32: bool = True) -> float:
    """Return the peak FLOP/s of a GPU, or 0 if it is unknown.

    Args:
        name: the GPU's name in TensorFlow. The peak of a MIG partition is unknown.
        precision: the value of `hardware.precision`.
        tf32: whether products of float32 are computed in TF32.
    """
    peaks = Peaks(0.0, 0.0, 0.0, 0.0)
    for pattern, known in PEAKS.items():
        if re.search(rf"\b({pattern})\b(?!.*\bMIG\b)", name):
            peaks = known
            break
    teraflops = peaks.float64
    if precision == "mixed_float16":
        teraflops = peaks.half
    elif precision == "mixed_bfloat16":
        # GPUs without TF32 do not support bfloat16 either.
        teraflops = peaks.half if peaks.tf32 else 0
    elif precision == "float32":
        teraflops = peaks.tf32 if tf32 and peaks.tf32 else peaks.float32
    return 1e12 * teraflops


def share_of_peak(parts: Parts, names: list[str]) -> float:
    """Return the utilization at a speed of one example per second.

    This is the number of FLOPs per example divided by the peak FLOP/s of all GPUs. If
    a peak is unknown, return 0. If the FLOPs are unknown, return 0 and print why.

    Args:
        parts: the parts of the run.
        names: names of the GPUs of this process. All workers have the same GPUs.
    """
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    precision = parts.spec.config.hardware.precision.name
    peaks = [peak_flops(name, precision, tf32) for name in names]
    if not peaks or 0 in peaks:
        return 0.0

    split = parts.data.train
    unknown = ["examples of unequal length"]
    if _has_fixed_shapes(split):
        batch = next(iter(in_order(split, 2, parts.spec.dataset.get("pad"))))
        flops, unknown = training_flops(parts.model, parts.objective.training, batch)
        if not unknown:
            return flops / (sum(peaks) * parts.devices.workers)
    say(
        "perf/model_flops_utilization is left out, as FLOPs are not known for "
        f"{', '.join(unknown)}"
    )
    return 0.0


def _has_fixed_shapes(split: tf.data.Dataset) -> bool:
    leaves = tf.nest.flatten(split.element_spec)
    return fixed([leaf for leaf in leaves if not isinstance(leaf, tf.NoneTensorSpec)])
