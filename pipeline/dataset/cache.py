"""Which splits are cached in memory, and which are streamed (`dataset.in_memory`); the source of a cached one."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from omegaconf import DictConfig

from pipeline.common.errors import ConfigError
from pipeline.common.memory_budget import limit, readable
from pipeline.dataset.source import Source, SourceOf, batched, fixed
from pipeline.dataset.splits import Data

SHARE = 4  # the training split is cached if it fits in 1/4 of the memory
EVALUATED = 32  # and then the validation split too, if it fits in 1/32, which is less than a trial leaves free
BUFFER = 128 * 2**20  # bytes of the shuffle buffer of streamed examples
_SAMPLE = 64  # examples that are read if their size does not follow from their shapes


def resolve(
    node: DictConfig, data: Data, agreed: Callable = bool, processes: int = 1
) -> tuple[dict[str, Any], str]:
    """Decide whether the training split is kept in memory where the `dataset` group has `in_memory: auto`.

    `agreed` returns whether something holds for each of several workers; `processes` of the run share the memory.
    Return the values that replace those of the group, as the order depends on them, and a line for the user.
    """
    if node.get("in_memory") != "auto" or data.loaders:
        return {}, ""
    size, part = _example_bytes(data.train), limit() / SHARE / processes
    what = f"{readable(size * data.examples)} of training examples"
    if agreed(size * data.examples <= part):
        return {"in_memory": True}, f"{what} are kept in memory"
    buffer = node.get("shuffle_buffer") or max(
        1, min(data.examples, int(BUFFER / size))
    )
    shared = "" if processes == 1 else f", shared by {processes} workers,"
    how = f"shuffled by file and in a buffer of {buffer} examples"
    line = f"{what} are streamed, as a quarter of the memory{shared} is {readable(part)}; {how}"
    return {"in_memory": False, "shuffle_buffer": buffer}, line


def keeps_validation(node: DictConfig, data: Data, processes: int = 1) -> bool:
    """Return whether the validation split is kept in memory once it was read: it is read for each evaluation."""
    if (
        not node.get("in_memory", True)
        or data.validation is None
        or "validation" in data.loaders
    ):
        return False
    return (
        _example_bytes(data.validation) * int(data.validation.cardinality())
        <= limit() / EVALUATED / processes
    )


def in_memory(data: Data) -> SourceOf:
    """Return what gives the source of an epoch where the examples are kept in memory: keys are their numbers."""
    count = data.examples
    split = batched(data.train, count).get_single_element()
    for weights in (leaf for leaf in tf.nest.flatten(split[2:]) if leaf is not None):
        total = float(tf.reduce_sum(tf.cast(weights, tf.float64)))
        if not 0 < total < math.inf:  # a sum of NaN is one too
            raise ConfigError(
                "dataset",
                "must give sample weights with a positive and finite sum",
                total,
            )

    def gather(numbers: tf.Tensor) -> tuple:
        """Return the examples of numbers or of one number: twenty times as fast as one by one for a batch."""
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.gather(leaf, numbers), split
        )

    def source_of(seed: tf.Tensor, left_out: tf.Tensor) -> Source:
        shuffled = tf.random.experimental.stateless_shuffle(
            tf.range(count, dtype=tf.int64), seed=seed
        )
        return Source(
            tf.data.Dataset.from_tensor_slices(shuffled[left_out:]), gather, gather
        )

    return source_of


def _example_bytes(split: tf.data.Dataset) -> float:
    """Return the bytes of an example: by its shapes, or as the mean of the first examples."""
    specs = tf.nest.flatten(split.element_spec)
    if fixed(specs) and all(spec.dtype != tf.string for spec in specs):
        return max(
            1.0,
            float(sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)),
        )
    parts = (
        [*tf.nest.flatten(example, expand_composites=True)]
        for example in split.take(_SAMPLE)
    )
    sizes = [
        sum(_bytes(np.asarray(leaf)) for leaf in leaves if leaf is not None)
        for leaves in parts
    ]
    return max(1.0, sum(sizes) / len(sizes))


def _bytes(array: np.ndarray) -> int:
    return (
        sum(map(len, array.ravel().tolist())) if array.dtype.hasobject else array.nbytes
    )
