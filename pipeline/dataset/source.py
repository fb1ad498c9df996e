"""Keys → examples → batches, of all examples or of a worker's share.

A key is what an example is made from: its number where the examples are kept in memory, its record in a file, or the
streamed example itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from pipeline.accumulation.internals import Batches, Share

AHEAD = 2  # effective batches: tuned by itself, tf.data kept 3 GB of batches of 6 MB


class Reader(NamedTuple):
    """The replicas that a worker reads for: so many, from number `first` on, of all."""

    first: int
    replicas: int
    all_replicas: int

    def share(self, *batch: Any) -> Share:
        """Return their share of an effective batch."""
        return Share.of(batch, self.first, self.replicas, self.all_replicas)


class Source(NamedTuple):
    """Keys of the examples in the order of the batches, and how examples are made from them."""

    keys: tf.data.Dataset  # the arguments of `make`
    make: Callable[..., tuple] | None = (
        None  # one key → one example; None where the keys are the examples
    )
    make_batch: Callable[..., tuple] | None = (
        None  # a batch of keys → its examples, where faster than one by one
    )
    parallel: int | None = None  # calls of `make_batch` at a time; None for one

    def augmented(
        self, augment: Callable[[Any, tf.Tensor], Any], seed: tf.Tensor
    ) -> Source:
        """Return the source of augmented examples; the first part of a key is the number of the example."""
        make = self.make
        assert make is not None

        def make_augmented(number: tf.Tensor, *key: Any) -> tuple:
            x, *rest = make(number, *key)
            return (
                augment(x, tf.random.experimental.stateless_fold_in(seed, number)),
                *rest,
            )

        return Source(self.keys, make_augmented)

    def batches(self, size: int, reader: Reader | None) -> tf.data.Dataset:
        """Return batches of the examples; for a `reader` shares of them, where it can make its examples alone."""
        keys, make, make_batch, parallel = self
        if make_batch is None and reader is not None:
            spec = (
                keys.element_spec if make is None else _spec_of(make, keys.element_spec)
            )
            if fixed((keys.element_spec, spec)):
                make_batch, parallel = one_by_one(make, spec), AHEAD
        if make_batch is None:
            return batched(
                keys if make is None else keys.map(make, tf.data.AUTOTUNE), size
            )
        batches = (
            keys.batch(size) if reader is None else keys.batch(size).map(reader.share)
        )
        return map_batches(batches, make_batch, parallel)


SourceOf = Callable[
    [tf.Tensor, tf.Tensor], Source
]  # of an epoch: its seed, (2,), and how many keys are left out


def fixed(spec: Any) -> bool:
    """Return whether all examples have the same shape."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()
        for leaf in tf.nest.flatten(spec)
    )


def one_by_one(make: Callable[..., tuple] | None, spec: tuple) -> Callable[..., tuple]:
    """Return what makes a batch of keys into examples of that spec, one by one in one step of tf.data."""
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
    """Return batches, ragged where the shapes of the examples differ."""
    spec = [
        leaf
        for leaf in tf.nest.flatten(examples.element_spec)
        if not isinstance(leaf, tf.NoneTensorSpec)
    ]
    uneven = any(
        leaf.shape.rank is None or None in leaf.shape.as_list() for leaf in spec
    )
    return examples.ragged_batch(size) if uneven else examples.batch(size)


def map_batches(
    batches: tf.data.Dataset, apply: Callable[..., tuple], parallel: int | None = AHEAD
) -> tf.data.Dataset:
    """Map each batch, or the part of it that is read, or those that are put together."""
    if isinstance(batches.element_spec, Share | Batches):
        return batches.map(
            lambda share: share._replace(batch=apply(*share.batch)), parallel
        )
    return batches.map(apply, parallel)


def _spec_of(make: Callable[..., tuple], key: Any) -> tuple:
    """Return the spec of the example of a key. Not as `map` shows it: tf.data cannot fuse a `map` that was asked."""
    traced = tf.function(make).get_concrete_function(
        *(key if isinstance(key, tuple) else (key,))
    )
    return tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)
