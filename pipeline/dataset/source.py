"""Keys → examples → batches, of all examples or of a worker's share.

A key is what an example is made from: its number if the examples are kept in memory,
its record in a file, or the streamed example itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.accumulation.internals import Batches, Share

# Effective batches that are prepared ahead. A constant, because tf.data's own tuning
# kept 3 GB of batches of 6 MB.
AHEAD = 2

# The seed of an epoch, (2,), and how many of its keys are skipped → its source.
SourceOfEpoch = Callable[[tf.Tensor, tf.Tensor], "Source"]


class ShareReader(NamedTuple):
    """A worker that reads its share of each batch: the examples of its replicas.

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
    """Keys of the examples in the order of the batches, and how to make examples.

    Attributes:
        keys: elements are the arguments of `make`.
        make: one key → one example; None if the keys are the examples.
        make_batch: a batch of keys → its examples, if that is faster than one by one.
        parallel: concurrent calls of `make_batch`; None for one at a time.
    """

    keys: tf.data.Dataset
    make: Callable[..., tuple] | None = None
    make_batch: Callable[..., tuple] | None = None
    parallel: int | None = None

    def batches(self, size: int, reader: ShareReader | None) -> tf.data.Dataset:
        """Return batches of `size` examples.

        With a `reader`, an element is its share of the batch if all examples have one
        shape, so that the reader can make its own examples only.
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

        The spec is not taken from `keys.map(make)`: tf.data cannot fuse a `map` whose
        spec was read.
        """
        key = self.keys.element_spec
        if self.make is None:
            return key
        arguments = key if isinstance(key, tuple) else (key,)
        traced = tf.function(self.make).get_concrete_function(*arguments)
        return tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)


def fixed(spec: Any) -> bool:
    """Return whether all examples have the same shape."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()
        for leaf in tf.nest.flatten(spec)
    )


def bytes_of_spec(spec: Any) -> int:
    """Return the bytes of an example whose shape is `fixed`."""
    return sum(
        leaf.shape.num_elements() * leaf.dtype.size for leaf in tf.nest.flatten(spec)
    )


def one_by_one(make: Callable[..., tuple] | None, spec: tuple) -> Callable[..., tuple]:
    """Return a function that turns a batch of keys into a batch of examples.

    It calls `make` for one key after the other, in one step of tf.data. `spec` is the
    spec of an example.
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
    """Return batches of `size`, ragged if the shapes of the examples differ."""
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

    An element is a batch, a worker's `Share` of one, or several `Batches`.
    """
    if isinstance(batches.element_spec, Share | Batches):
        return batches.map(
            lambda element: element._replace(batch=apply(*element.batch)), parallel
        )
    return batches.map(apply, parallel)
