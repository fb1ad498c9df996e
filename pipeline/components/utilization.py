"""What one example a second takes of the peak of the devices: `perf/model_flops_utilization`."""

import re

import tensorflow as tf

from pipeline.accumulation import training_flops
from pipeline.common.errors import say
from pipeline.components.assembly import Parts
from pipeline.dataset.batches import in_order
from pipeline.dataset.source import fixed

# Dense TFLOP/s of half precision summed in float32, of TF32, float32 and float64, on tensor cores where there are some;
# by a part of the device's name, the first that fits; docs/logging.md says what they were compared with.
PEAKS = {
    "B200": (2250, 1125, 75, 37),
    "H200 NVL|H100 NVL": (835, 417, 60, 60),
    "H100 PCIe": (756, 378, 51, 51),
    "GH200|H200|H100": (989, 494, 67, 67),
    "A100": (312, 156, 19.5, 19.5),
    "A10": (125, 62.5, 31.2, 0.98),
    "L40S": (362, 183, 91.6, 1.43),
    "L4": (121, 60, 30.3, 0.47),
    "RTX 4090": (165.2, 82.6, 82.6, 1.29),
    "RTX 3090": (71, 35.6, 35.6, 0.56),
    "V100-SXM2": (125, 0, 15.7, 7.8),
    "V100-PCIE": (112, 0, 14, 7),
    "T4": (65, 0, 8.1, 0.25),
}


def peak_flops(name: str, precision: str, tf32: bool = True) -> float:
    """Return FLOP/s of a GPU at most, by TensorFlow's name of it and `hardware.precision`; 0 if it is not known."""
    found = (
        peaks
        for known, peaks in PEAKS.items()
        if re.search(rf"\b({known})\b(?!.*\bMIG\b)", name)
    )
    half, tensor, single, double = next(found, (0.0,) * 4)
    of_bfloat16 = half if tensor else 0  # GPUs without TF32 have no bfloat16 either
    of_float32 = tensor if tf32 and tensor else single
    peaks = {
        "mixed_float16": half,
        "mixed_bfloat16": of_bfloat16,
        "float32": of_float32,
        "float64": double,
    }
    return 1e12 * peaks[precision]


def share_of_peak(parts: Parts, names: list[str]) -> float:
    """Return the share of the peak that one example a second takes; 0 if unknown, and then why is printed once.

    `names` are those of this process' GPUs, and of each worker's.
    """
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    peaks = [
        peak_flops(name, parts.spec.config.hardware.precision.name, tf32)
        for name in names
    ]
    if not peaks or 0 in peaks:
        return 0.0
    data, why = parts.data.train, "examples of unequal length"
    if fixed(
        [
            leaf
            for leaf in tf.nest.flatten(data.element_spec)
            if not isinstance(leaf, tf.NoneTensorSpec)
        ]
    ):
        batch = next(iter(in_order(data, 2, parts.spec.dataset.get("pad"))))
        flops, unknown = training_flops(parts.model, parts.objective.training, batch)
        if not unknown:
            return flops / (sum(peaks) * parts.devices.workers)
        why = ", ".join(unknown)
    say(
        f"perf/model_flops_utilization is left out, as the FLOPs are not known of {why}"
    )
    return 0.0
