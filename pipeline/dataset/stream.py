"""Batches that the user's own loader makes → effective batches; epochs end where the loader does.

    loader ─► epoch after epoch, K batches at a time ─► put together on the host, with their sizes ─► one update

The loader is iterated in one thread, from the first epoch on and once an epoch, also where a run is resumed: its state
is its own. So its order is what it would be in a loop of the user's, and what was read for each update is remembered.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation.internals import Batches, examples_in, parts_of
from pipeline.common.errors import ConfigError
from pipeline.config.plan import ENDLESS, Window

KEY = "dataset._target_"


class Loader:
    """The batches of a split, made by a `tf.data.Dataset`, a `keras.utils.PyDataset` or a generator function."""

    def __init__(self, source: Any, split: str):
        self._source, self._split = source, split
        self._begun: Any = None
        iterator = self.epoch()
        first = next(iterator, None)
        if first is None:
            raise ConfigError(
                KEY, f"must give at least one batch in its {split} split", 0
            )
        self.first, self._begun = (
            first,
            iterator,
        )  # of the first epoch; the rest of it follows when it is trained on
        of_tf = isinstance(source, tf.data.Dataset)
        parts = keras.utils.unpack_x_y_sample_weight(
            source.element_spec if of_tf else first
        )
        of_any = lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)  # noqa: E731
        self.spec = tf.nest.map_structure(
            of_any, tuple(part for part in parts if part is not None)
        )  # of a batch
        known = (
            int(source.cardinality()) if of_tf else getattr(source, "num_batches", None)
        )
        self.count = (
            None if known is None or known < 0 else known
        )  # batches in an epoch
        # Whether the first epoch is known not to end.
        self.endless = known == (
            None
            if isinstance(source, keras.utils.PyDataset)
            else tf.data.INFINITE_CARDINALITY
        )
        if self.endless and split != "train":
            raise ConfigError(KEY, f"must give a {split} split that ends")

    def epoch(self) -> Iterator[tuple]:
        """Return the batches of the next epoch."""
        if (begun := self._begun) is not None:
            self._begun = None
            return itertools.chain([self.first], begun)
        source = self._source
        with tf.device("CPU:0"):
            made = (
                _items(source) if isinstance(source, keras.utils.PyDataset) else source
            )
            return map(self._checked, iter(made() if callable(made) else made))

    def examples(self) -> tf.data.Dataset:
        """Return the examples of the first batch."""
        batch = tf.data.Dataset.from_generator(
            lambda: [self.first], output_signature=self.spec
        )
        return batch.unbatch().apply(
            tf.data.experimental.assert_cardinality(int(examples_in(self.first)))
        )

    def _checked(self, batch: Any) -> tuple:
        """Return a batch as tensors `(x, y, sample_weight)`, without what is None."""
        parts = tuple(part for part in parts_of(batch) if part is not None)
        leaves = tf.nest.flatten(parts)
        if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
            rule = f"must give batches of dense arrays in its {self._split} split"
            raise ConfigError(KEY, rule, type(batch).__name__)
        if (numbers := {leaf.shape[0] for leaf in leaves}) == {0} or len(numbers) > 1:
            rule = f"must give as many examples in each part of a batch of its {self._split} split, at least one"
            raise ConfigError(KEY, rule, sorted(numbers))
        return parts


def _items(source: keras.utils.PyDataset) -> Iterator[Any]:
    yield from (
        source[place]
        for place in (
            itertools.count() if source.num_batches is None else range(len(source))
        )
    )
    source.on_epoch_end()


class Stream:
    """Effective batches of `factor` batches of a loader, and what was read for each update, in `windows`."""

    def __init__(self, loader: Loader, factor: int):
        self._loader, self._factor, self.windows = loader, factor, list[Window]()
        known = None if loader.count is None else -(-loader.count // factor)
        self.per_epoch = ENDLESS if loader.endless else known

    def batches(self, first_update: int) -> tf.data.Dataset:
        """Return the effective batches from `first_update` on, for one iteration; those before are read here."""
        made = self._made()
        for _ in range(first_update):
            next(made)
        spec = Batches(
            tf.nest.map_structure(_joined_spec, self._loader.spec),
            tf.TensorSpec([None], tf.int32),
        )
        return tf.data.Dataset.from_generator(lambda: made, output_signature=spec)

    def _made(self) -> Iterator[Batches]:
        seen = 0
        for epoch in itertools.count():
            batches = self._loader.epoch()
            window = list(itertools.islice(batches, self._factor))
            if not window:
                raise ValueError(
                    f"{KEY} must give the training split anew in each epoch. Received: none in {epoch}"
                )
            for index in itertools.count():
                ahead = list(itertools.islice(batches, self._factor))
                joined = tf.nest.map_structure(_joined, self._loader.spec, *window)
                sizes = tuple(int(examples_in(batch)) for batch in window)
                seen += sum(sizes)
                self.windows.append(
                    Window(sizes, seen, epoch, index, not ahead, digest(joined))
                )
                yield Batches(joined, tf.constant(sizes, tf.int32))
                if not (window := ahead):
                    break


def _varying(spec: tf.TensorSpec) -> int:
    """Return the last axis whose size differs between batches; 0 if only their number of examples does."""
    return max(axis for axis, size in enumerate(spec.shape) if size is None)


def _joined_spec(spec: tf.TensorSpec) -> tf.TypeSpec:
    axis = _varying(spec)
    return tf.RaggedTensorSpec(spec.shape, spec.dtype, axis, tf.int64) if axis else spec


def _joined(spec: tf.TensorSpec, *leaves: tf.Tensor) -> Any:
    with tf.device("CPU:0"):
        if axis := _varying(spec):
            leaves = tuple(
                tf.RaggedTensor.from_tensor(leaf, ragged_rank=axis) for leaf in leaves
            )
        return tf.concat(leaves, 0)


def digest(nest: Any, found: int = 0) -> int:
    """Return a checksum of the content of tensors, which goes on from one that was `found` before."""
    for leaf in tf.nest.flatten(nest, expand_composites=True):
        array = np.asarray(leaf)
        found = zlib.crc32(
            repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes(),
            found,
        )
    return found
