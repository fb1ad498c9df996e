"""Finds NaN and infinite values in the data, once a loss or a metric is not finite."""

import math
from typing import Any

import tensorflow as tf

from pipeline.accumulation import internals

_PARTS = ("inputs", "labels", "sample weights")


def non_finite_part(batch: Any) -> str:
    """Return the name of the first part of a batch that has a NaN or infinite value.

    Args:
        batch: the batch of an update or of an evaluation.

    Returns:
        `inputs`, `labels` or `sample weights`, or "" if all values are finite.
    """
    for name, part in zip(_PARTS, internals.parts_of(batch), strict=True):
        for leaf in tf.nest.flatten(part, expand_composites=True):
            if leaf is None or not leaf.dtype.is_floating:
                continue
            if not tf.reduce_all(tf.math.is_finite(leaf)):
                return name
    return ""


def warning_of_evaluation(
    split: str, results: dict[str, float], batches: tf.data.Dataset
) -> str:
    """Return a line about an evaluation whose loss or metrics are not finite.

    Args:
        split: the name of the split.
        results: the loss and the metrics by name.
        batches: the batches of the split, which are searched if a result is not finite.

    Returns:
        A line with the non-finite results, and with the first non-finite part of the
        data, if there is any. The line is empty if all results are finite.
    """
    wrong = []
    for name, value in results.items():
        if not math.isfinite(value):
            wrong.append(f"{name}={value}")
    if not wrong:
        return ""
    line = f"the {split} split gives {' and '.join(wrong)}"
    for batch in batches:
        part = non_finite_part(batch)
        if part:
            return f"{line}: its {part} contain a value that is NaN or infinite"
    return line
