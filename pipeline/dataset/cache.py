"""Decides which splits are kept in memory (`dataset.in_memory`), and reads them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from omegaconf import DictConfig

from pipeline.common.errors import ConfigError
from pipeline.common.memory_budget import limit, readable
from pipeline.dataset.source import (
    Source,
    SourceOfEpoch,
    batched,
    bytes_of_spec,
    fixed,
)
from pipeline.dataset.splits import Data

# The training split is kept if it fits in 1/4 of the memory.
SHARE = 4
# If the training split is kept, the validation splits are kept too if together they fit
# in 1/32 of the memory, which is less than the search for a micro-batch size leaves free.
EVALUATED = 32
# Default size of the shuffle buffer for streamed examples, in bytes.
BUFFER = 128 * 2**20
_SAMPLE = 64  # number of examples to measure if the size of an example is not fixed


def decide_in_memory(
    node: DictConfig,
    data: Data,
    agreed: Callable = bool,
    processes: int = 1,
) -> tuple[dict[str, Any], str]:
    """Decide whether the training split is kept in memory, if `in_memory` is `auto`.

    Args:
        node: the `dataset` group of the config.
        data: the loaded dataset.
        agreed: returns whether a condition holds on all workers.
        processes: number of processes of the run that share the memory.

    Returns:
        The values to set in the `dataset` group, and a message for the user. The values
        must be recorded, since the order of the examples depends on them. Both are
        empty if there is nothing to decide.
    """
    if node.get("in_memory") != "auto" or data.loaders:
        return {}, ""
    example_bytes = _example_bytes(data.train)
    split_bytes = example_bytes * data.examples
    allowed_bytes = limit() / SHARE / processes

    examples = f"{readable(split_bytes)} of training examples"
    if agreed(split_bytes <= allowed_bytes):
        return {"in_memory": True}, f"{examples} are kept in memory"

    buffer = node.get("shuffle_buffer")
    if not buffer:
        buffer = max(1, min(data.examples, int(BUFFER / example_bytes)))
    shared = ""
    if processes > 1:
        shared = f", shared by {processes} workers,"
    by_file = ""
    if shuffles_files(node, data):
        by_file = "by file and "
    line = (
        f"{examples} are streamed, because a quarter of the memory{shared} is "
        f"{readable(allowed_bytes)}; shuffled {by_file}in a buffer of {buffer} examples"
    )
    return {"in_memory": False, "shuffle_buffer": buffer}, line


def shuffles_files(node: DictConfig, data: Data) -> bool:
    """Return whether streamed training examples come from files in a shuffled order.

    This requires `dataset.shuffle_files` and a dataset that can read its files in such
    an order.
    """
    if not node.get("shuffle_files"):
        return False
    stored = data.made_of("train")
    stored_in_files = stored is not None and stored.shuffled is not None
    return data.shuffled is not None or stored_in_files


def keeps_validation(
    node: DictConfig, data: Data, processes: int = 1, name: str = "validation"
) -> bool:
    """Return whether a validation split stays in memory after its first pass.

    Args:
        node: the `dataset` group of the config.
        data: the loaded dataset.
        processes: number of processes of the run that share the memory.
        name: the name of the split. It stays if it fits together with those before it.
    """
    if not node.get("in_memory", True) or name in data.loaders:
        return False
    validations = [split for split in data.splits if split not in ("train", "test")]
    if name not in validations:
        return False
    total_bytes = 0.0
    for split_name in validations[: validations.index(name) + 1]:
        split = data.splits[split_name]
        total_bytes += _example_bytes(split) * int(split.cardinality())
    return total_bytes <= limit() / EVALUATED / processes


def in_memory(data: Data) -> SourceOfEpoch:
    """Return a function that makes the source of an epoch, for data in memory.

    Each key is the number of an example.

    Raises:
        ConfigError: the sum of the sample weights is not positive and finite.
    """
    count = data.examples
    split = batched(data.train, count).get_single_element()
    _check_weights(split[2:])

    def gather(numbers: tf.Tensor) -> tuple:
        """Return one example for a scalar, or a batch of examples for a vector.

        Gathering a batch at once takes 1/20 of the time of gathering single examples.
        """

        def gather_leaf(leaf: Any) -> Any:
            if leaf is None:
                return None
            return tf.gather(leaf, numbers)

        return tf.nest.map_structure(gather_leaf, split)

    def source_of_epoch(seed: tf.Tensor, skipped: tf.Tensor) -> Source:
        numbers = tf.range(count, dtype=tf.int64)
        shuffled = tf.random.experimental.stateless_shuffle(numbers, seed=seed)
        keys = tf.data.Dataset.from_tensor_slices(shuffled[skipped:])
        return Source(keys, make=gather, make_batch=gather)

    return source_of_epoch


def _check_weights(sample_weights: Any) -> None:
    for weights in tf.nest.flatten(sample_weights):
        if weights is None:
            continue
        total = float(tf.reduce_sum(tf.cast(weights, tf.float64)))
        if not 0 < total < math.inf:  # also rejects NaN
            rule = "must give sample weights with a positive and finite sum"
            raise ConfigError("dataset", rule, total)


def _example_bytes(split: tf.data.Dataset) -> float:
    """Return the bytes per example, from the spec or as the mean of a sample."""
    specs = tf.nest.flatten(split.element_spec)
    if fixed(specs) and all(spec.dtype != tf.string for spec in specs):
        return max(1.0, float(bytes_of_spec(specs)))

    sizes = []
    for example in split.take(_SAMPLE):
        leaves = tf.nest.flatten(example, expand_composites=True)
        sizes.append(
            sum(_bytes(np.asarray(leaf)) for leaf in leaves if leaf is not None)
        )
    return max(1.0, sum(sizes) / len(sizes))


def _bytes(array: np.ndarray) -> int:
    if array.dtype.hasobject:
        return sum(map(len, array.ravel().tolist()))
    return array.nbytes
