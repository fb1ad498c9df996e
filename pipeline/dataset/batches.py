"""Examples → batches in a reproducible order: one element of the dataset is one effective batch.

    keys ─► shuffle by (seed, epoch) ─► make the examples ─► augment by (seed, epoch, number) ─► batch of E

The order depends on (dataset, seed, epoch) alone, never on the factor, the micro-batch, the replicas or the device;
only where it is cut depends on effective batch sizes. Each of several workers shuffles the keys as all do, and makes
the examples of its own replicas alone.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig

from pipeline.accumulation.internals import Share, slice_of
from pipeline.common.errors import ConfigError
from pipeline.config.stages import ALL, Slice
from pipeline.dataset import cache
from pipeline.dataset.class_weights import Weigh
from pipeline.dataset.padding import padder
from pipeline.dataset.source import (
    AHEAD,
    Source,
    SourceOf,
    fixed,
    map_batches,
    one_by_one,
)
from pipeline.dataset.source import Reader as Reader
from pipeline.dataset.splits import Data, Stored
from pipeline.dataset.stream import Stream
from pipeline.trust import instantiate

SMALL = (
    2**16
)  # bytes of an example: below, a step of tf.data takes as long as to decode it


def effective_batches(
    node: DictConfig,
    data: Data,
    slices: Sequence[Slice],
    seed: int,
    weigh: Weigh = None,
    reader: Reader | None = None,
) -> tf.data.Dataset:
    """Return the training split, epoch after epoch; one element is the batch of one update, the last one the tail.

    The order and the augmentation follow from `seed` and the epoch; `node` is the `dataset` group. Only the `slices`,
    cut by size, are read: of what comes before in their first epoch nothing is gathered or augmented, but streamed
    examples are read and shuffled. With a `reader`, an element is a `Share`, and only its examples are made, unless its
    shape depends on the rest.
    """
    augment = (
        None
        if node.get("augment") is None
        else instantiate.build(node.augment, "dataset.augment")
    )
    spec, pad = data.train.element_spec, node.get("pad")
    reader = _alone(reader, spec, pad)
    in_memory, numbered = node.get("in_memory", True), augment is not None
    source_of = (
        cache.in_memory(data) if in_memory else _streamed(node, data, reader, numbered)
    )

    def batches_of(here: Slice) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def epoch_of(epoch: tf.Tensor) -> tf.data.Dataset:
            left_out = tf.where(
                epoch == here.epoch, tf.constant(here.first, tf.int64), 0
            )
            key = tf.random.experimental.stateless_fold_in(
                tf.constant([seed, 0], tf.int64), epoch
            )
            source = source_of(key, left_out)
            source = (
                source
                if here.read == ALL
                else source._replace(keys=source.keys.take(here.read))
            )
            source = source if augment is None else source.augmented(augment, key)
            return source.batches(here.size, reader)

        return tf.data.Dataset.range(here.epoch, here.end).flat_map(epoch_of)

    batches = _prepared(
        functools.reduce(tf.data.Dataset.concatenate, map(batches_of, slices)),
        pad,
        spec,
    )
    if weigh is not None:
        batches = map_batches(batches, weigh)
    if augment is not None:
        made = batches.element_spec
        x, *_ = made.batch if isinstance(made, Share) else made
        given, *_ = in_order(data.train, 1, pad).element_spec
        if not _compatible(given, x):
            raise ConfigError(
                "dataset.augment",
                f"must keep the shape and dtype of an input, {given}",
                str(x),
            )
    return _ahead(batches)


def in_order(
    examples: tf.data.Dataset,
    size: int,
    pad: Any = None,
    reader: Reader | None = None,
    made_of: Stored | None = None,
    keep: bool = False,
) -> tf.data.Dataset:
    """Return a split once, unshuffled, in batches, the last perhaps smaller; `pad` is as in the config.

    A `reader` gets shares, and makes its examples alone where it is known what they are `made_of`. If they are to be
    kept, the first pass puts them into memory, and others read them there.
    """
    reader = _alone(reader, examples.element_spec, pad)
    source = (
        Source(examples)
        if reader is None or made_of is None
        else Source(made_of.records, made_of.make)
    )
    batches = source.batches(size, reader)
    return _ahead(
        _prepared(batches.cache() if keep else batches, pad, examples.element_spec)
    )


def of_stream(
    stream: Stream, first_update: int, weigh: Weigh = None
) -> tf.data.Dataset:
    """Return the effective batches of a stream, as `effective_batches` does; each is `Batches`."""
    batches = map_batches(stream.batches(first_update), _in_precision)
    return _ahead(batches if weigh is None else map_batches(batches, weigh))


def evaluated(
    data: Data, name: str, batch_size: int, pad: Any, reader: Reader | None, keep: bool
) -> tf.data.Dataset:
    """Return the batches of a split in its order: those of its loader, or as `in_order` makes them."""
    if (loader := data.loaders.get(name)) is not None:
        batches = tf.data.Dataset.from_generator(
            loader.epoch, output_signature=loader.spec
        )
        return _ahead(map_batches(batches, _in_precision))
    return in_order(
        data.splits[name], batch_size, pad, reader, data.made_of(name), keep
    )


def first_examples(data: Data, name: str, count: int, pad: Any) -> tuple:
    """Return a batch of the first examples of a split, `count` at most."""
    if name not in data.loaders:
        return next(iter(in_order(data.splits[name], count, pad)))
    return _in_precision(*slice_of(data.loaders[name].first, 0, count))


def _ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Read `AHEAD` batches ahead. The parallel steps use every core at once; nothing tunes them while they run.

    TensorFlow 2.21 wakes the thread that tunes an iterator before it sets the flag to stop: deleting one iterator in
    four to twenty then takes as long as it has lived, up to a minute.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.prefetch(AHEAD).with_options(options)


def one_class(node: DictConfig, data: Data, seed: int) -> str:
    """Return a warning where the first examples that are streamed and shuffled together are all of one class."""
    label = data.train.element_spec[1] if len(data.train.element_spec) > 1 else None
    is_class = (
        isinstance(label, tf.TensorSpec)
        and label.dtype.is_integer
        and not label.shape.rank
    )
    if node.get("in_memory", True) or not is_class:
        return ""
    keys_by, make = _stored_keys(node, data)
    keys = keys_by(tf.constant(seed, tf.int64))
    examples = keys if make is None else keys.map(make)
    count = min(node.get("shuffle_buffer") or data.examples, data.examples)
    labels = (int(example[1]) for example in examples.take(count))
    first = next(labels)
    if count < 2 or any(other != first for other in labels):
        return ""
    how = "a larger dataset.shuffle_buffer, or files in which they are mixed"
    return f"the first {count} examples that are streamed are all of class {first}: classes are mixed by {how}"


def _streamed(
    node: DictConfig, data: Data, reader: Reader | None, numbered: bool
) -> SourceOf:
    """Return what gives the source of an epoch that is streamed; if `numbered`, keys begin with example numbers."""
    keys_by, make = _stored_keys(node, data, reader)
    buffer = node.get("shuffle_buffer") or data.examples
    spec, make_batch = data.train.element_spec, None
    as_stored = reader is None and make is not None and not numbered and fixed(spec)
    if (
        as_stored
        and sum(
            leaf.shape.num_elements() * leaf.dtype.size
            for leaf in tf.nest.flatten(spec)
        )
        <= SMALL
    ):
        make_batch = one_by_one(make, spec)

    def make_numbered(number: tf.Tensor, key: Any) -> Any:
        return key if make is None else make(key)

    def source_of(seed: tf.Tensor, left_out: tf.Tensor) -> Source:
        tf.random.set_seed(
            1
        )  # of this traced function alone: the process' seed has no say, and may not be 0
        order = seed[0] ^ seed[1]
        keys = keys_by(order).enumerate() if numbered else keys_by(order)
        keys = keys.shuffle(buffer, seed=order, reshuffle_each_iteration=False).skip(
            left_out
        )
        return Source(keys, make_numbered if numbered else make, make_batch, AHEAD)

    return source_of


def _stored_keys(
    node: DictConfig, data: Data, reader: Reader | None = None
) -> tuple[Callable, Callable | None]:
    """Return what gives the keys of the training split by a seed, and what makes an example of a key, if needed."""
    stored, by_files = data.made_of("train"), node.get("shuffle_files")
    if by_files and data.shuffled is not None:
        return data.shuffled, None
    if by_files and stored is not None and stored.shuffled is not None:
        return stored.shuffled, stored.make
    if reader is not None and stored is not None:
        return lambda seed: stored.records, stored.make
    return lambda seed: data.train, None


def _alone(
    reader: Reader | None, spec: tuple, pad: Mapping[str, Any] | None
) -> Reader | None:
    """Return the reader if the shape of its share does not depend on the examples of the others."""
    return reader if pad is None and fixed(spec) else None


def _prepared(
    batches: tf.data.Dataset, pad: Mapping[str, Any] | None, spec: tuple
) -> tf.data.Dataset:
    if pad is not None:
        batches = batches.map(padder(pad, spec), AHEAD)
    return map_batches(batches, _in_precision)


@tf.autograph.experimental.do_not_convert
def _in_precision(*batch: Any) -> tuple:
    floatx = keras.config.floatx()

    def cast(leaf: Any) -> Any:  # None for the sample weights of an output without
        return (
            tf.cast(leaf, floatx)
            if leaf is not None and leaf.dtype.is_floating
            else leaf
        )

    return tf.nest.map_structure(cast, batch)


def _compatible(given: Any, made: Any) -> bool:
    try:
        return all(
            tf.nest.flatten(
                tf.nest.map_structure(lambda a, b: a.is_compatible_with(b), given, made)
            )
        )
    except (TypeError, ValueError):  # nests of other forms
        return False
