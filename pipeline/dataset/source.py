"""Makes examples from keys, and batches or a worker's shares of batches from examples.

A key identifies an example: it is the number of an example in memory, the record of an
example in a file, or a streamed example itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.accumulation.internals import Batches, Share

# Number of effective batches to prepare ahead. It is fixed, because the autotuning of
# tf.data buffered 3 GB of batches of 6 MB.
AHEAD = 2

# Takes the seed of an epoch, of shape (2,), and the number of keys to skip, and returns
# the source of the epoch.
SourceOfEpoch = Callable[[tf.Tensor, tf.Tensor], "Source"]


class ShareReader(NamedTuple):
    """Reads one worker's share of each batch: the examples of the worker's replicas.

    Attributes:
        first: number of the worker's first replica among all replicas.
        replicas: number of the worker's replicas.
        all_replicas: number of the replicas of all workers.
    """

    first: int
    replicas: int
    all_replicas: int

    def share(self, *batch: Any) -> Share:
        """Return this worker's share of an effective batch."""
        return Share.for_replicas(batch, self.first, self.replicas, self.all_replicas)


@dataclass(frozen=True)
class Source:
    """Keys in the order of the batches, and functions that make examples from keys.

    Attributes:
        keys: a dataset of keys, the arguments of `make`.
        make: a function from a key to an example, or None if the keys are the examples.
        make_batch: a function from a batch of keys to a batch of examples, or None to
            call `make` for each key.
        parallel: number of concurrent calls of `make_batch`, or None for a single call
            at a time.
    """

    keys: tf.data.Dataset
    make: Callable[..., tuple] | None = None
    make_batch: Callable[..., tuple] | None = None
    parallel: int | None = None

    def batches(self, size: int, reader: ShareReader | None) -> tf.data.Dataset:
        """Return batches of `size` examples.

        With a `reader`, if all examples have the same fixed shape, each element is the
        reader's share of a batch, and only the examples of that share are made.
        """
        make_batch = self.make_batch
        parallel = self.parallel
        if make_batch is None and reader is not None:
            spec = self._example_spec()
            if fixed((self.keys.element_spec, spec)):
                make_batch = one_by_one(self.make, spec)
                parallel = AHEAD

        if make_batch is None:
            examples = self.keys
            if self.make is not None:
                examples = examples.map(self.make, tf.data.AUTOTUNE)
            return batched(examples, size)

        batches_of_keys = self.keys.batch(size)
        if reader is not None:
            batches_of_keys = batches_of_keys.map(reader.share)
        return map_batches(batches_of_keys, make_batch, parallel)

    def _example_spec(self) -> Any:
        """Return the spec of an example.

        Trace `make` for this instead of reading the spec of `keys.map(make)`, since
        tf.data cannot fuse a `map` whose spec was read.
        """
        key = self.keys.element_spec
        if self.make is None:
            return key
        arguments = key if isinstance(key, tuple) else (key,)
        traced = tf.function(self.make).get_concrete_function(*arguments)
        return tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)


def fixed(spec: Any) -> bool:
    """Return whether a spec consists of dense tensors of fixed shape."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()
        for leaf in tf.nest.flatten(spec)
    )


def compatible(spec: Any, other: Any) -> bool:
    """Return whether tensors, or another spec, have the structure and form of a spec.

    The form is the dtype and the shape; an axis without a fixed size fits any size.
    """
    try:
        leaves_agree = tf.nest.map_structure(
            lambda leaf, other_leaf: leaf.is_compatible_with(other_leaf), spec, other
        )
    except (TypeError, ValueError):  # the nests have different structures
        return False
    return all(tf.nest.flatten(leaves_agree))


def bytes_of_spec(spec: Any) -> int:
    """Return the size of an example in bytes.

    `spec` is its spec, which must consist of dense tensors of fixed shape.
    """
    return sum(
        leaf.shape.num_elements() * leaf.dtype.size for leaf in tf.nest.flatten(spec)
    )


def one_by_one(make: Callable[..., tuple] | None, spec: tuple) -> Callable[..., tuple]:
    """Return a function that turns a batch of keys into a batch of examples.

    The function calls `make` for each key, all in one tf.data step. `spec` is the spec
    of an example. If `make` is None, the keys are returned as the examples.
    """
    if make is None:
        return lambda *examples: examples
    parallel = max(10, os.cpu_count() or 1)

    def make_batch(*keys: Any) -> Any:
        return tf.map_fn(
            lambda key: make(*key),
            keys,
            fn_output_signature=spec,
            parallel_iterations=parallel,
        )

    return make_batch


def batched(examples: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Return batches of `size` examples, ragged unless all sizes are fixed."""
    for leaf in tf.nest.flatten(examples.element_spec):
        if isinstance(leaf, tf.NoneTensorSpec):
            continue
        if leaf.shape.rank is None or None in leaf.shape.as_list():
            return examples.ragged_batch(size)
    return examples.batch(size)


def map_batches(
    batches: tf.data.Dataset,
    apply: Callable[..., tuple],
    parallel: int | None = AHEAD,
) -> tf.data.Dataset:
    """Apply a function to the `(x, y, sample_weight)` of each element.

    An element is a batch, a worker's `Share` of a batch, or a `Batches`.
    """
    if isinstance(batches.element_spec, Share | Batches):
        return batches.map(
            lambda element: element._replace(batch=apply(*element.batch)), parallel
        )
    return batches.map(apply, parallel)
