"""How much of the data is kept in memory: `dataset.in_memory=auto`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from omegaconf import DictConfig, open_dict

from pipeline.common.memory_budget import limit, readable
from pipeline.dataset.splits import Data

SHARE = 4  # the training split is kept in memory where it fits in one part of so many
BUFFER = 128 * 2**20  # bytes of examples among which those that are streamed are shuffled
_SAMPLE = 64  # examples that are read where their size is not known from their shapes


def settle(node: DictConfig, data: Data, agreed: Callable[[bool], bool] = bool, processes: int = 1) -> str:
    """Replace `in_memory: auto` of the `dataset` group by what it is for `data`; return a line that says which.

    The order of the examples depends on it, so what is recorded is true or false and the size of the buffer. `agreed`
    returns whether each of several workers says so, of which there are `processes` on this machine.
    """
    if node.get("in_memory") == "auto":
        size, part = _example_bytes(data.train), limit() / SHARE / processes
        with open_dict(node):
            node.in_memory = agreed(size * data.examples <= part)
            if not node.in_memory and node.get("shuffle_buffer") is None:
                node.shuffle_buffer = max(1, min(data.examples, int(BUFFER / size)))
        what = f"{readable(size * data.examples)} of training examples"
        if node.in_memory:
            return f"{what} are kept in memory"
        buffer = f"shuffled by file and in a buffer of {node.shuffle_buffer} examples"
        whose = (
            "a quarter of the memory" if processes == 1 else f"a quarter of the memory, shared by {processes} workers,"
        )
        return f"{what} are streamed, as {whose} is {readable(part)}; {buffer}"
    return ""


def _example_bytes(split: tf.data.Dataset) -> float:
    """Return the size of an example: by its shapes, or the mean of the first ones."""
    specs = tf.nest.flatten(split.element_spec)
    dense = all(isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string for spec in specs)
    if dense and all(spec.shape.is_fully_defined() for spec in specs):
        return max(1.0, float(sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)))
    parts = ([*tf.nest.flatten(example, expand_composites=True)] for example in split.take(_SAMPLE))
    sizes = [sum(_bytes(np.asarray(leaf)) for leaf in leaves if leaf is not None) for leaves in parts]
    return max(1.0, sum(sizes) / len(sizes))


def _bytes(array: np.ndarray) -> int:
    return sum(map(len, array.ravel().tolist())) if array.dtype.hasobject else array.nbytes
