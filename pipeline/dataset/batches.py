"""Makes batches from examples in a reproducible order.

In the training dataset, each element is one effective batch:

    keys ─► shuffle by (seed, epoch) ─► make the examples
         ─► augment by (seed, epoch, number) ─► batch of E

The order depends only on the dataset, the seed and the epoch, not on the factor, the
micro-batch size, the replicas or the device. The effective batch size E decides only
where the sequence of examples is cut. With several workers, all of them shuffle the
keys in the same way, and each makes the examples of its own replicas.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from omegaconf import DictConfig

from pipeline.accumulation.internals import Share, slice_of
from pipeline.config.stages import ALL, Slice
from pipeline.dataset import cache
from pipeline.dataset.augmentation import augmented, check_keeps_inputs
from pipeline.dataset.class_weights import Weigh
from pipeline.dataset.padding import padder, value_checker
from pipeline.dataset.source import (
    AHEAD,
    ShareReader,
    Source,
    SourceOfEpoch,
    bytes_of_spec,
    fixed,
    map_batches,
    one_by_one,
)
from pipeline.dataset.splits import Data, Stored
from pipeline.dataset.stream import Stream
from pipeline.trust import instantiate

# Maximum size of a small example in bytes. Small examples are decoded a batch at a
# time: decoding one takes no longer than the overhead of a tf.data step.
SMALL = 2**16


def effective_batches(
    node: DictConfig,
    data: Data,
    slices: Sequence[Slice],
    seed: int,
    weigh: Weigh | None = None,
    reader: ShareReader | None = None,
    padded: bool = True,
) -> tf.data.Dataset:
    """Return the effective batches of the training split, epoch after epoch.

    The last batch of an epoch may be smaller. Skipped examples before the start of a
    slice are not augmented. If the data is streamed, they are still read and shuffled.

    Args:
        node: the `dataset` group of the config.
        data: the loaded dataset.
        slices: the parts of the epochs to read, each with its batch size.
        seed: seed of the run; it determines the order and the augmentation.
        weigh: adds sample weights to a batch, or None to leave batches unchanged.
        reader: reads this worker's share of each batch, or None if there is only one
            worker. With a reader, each element is the worker's `Share`, or the whole
            batch if examples differ in shape or are padded.
        padded: whether `dataset.pad` makes the batches dense. Otherwise, parts of
            unequal length are ragged.

    Raises:
        ConfigError: the augmentation changes the shape or dtype of an input, or the
            sample weights of data in memory do not have a positive and finite sum.
    """
    spec = data.train.element_spec
    pad = node.get("pad")
    reader = _independent_reader(reader, spec, pad)
    augment = None
    if node.get("augment") is not None:
        augment = instantiate.build(node.augment, "dataset.augment")

    if node.get("in_memory", True):
        source_of_epoch = cache.in_memory(data)
    else:
        numbered = augment is not None
        source_of_epoch = _streamed(node, data, reader, numbered)

    def batches_of_slice(part: Slice) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def batches_of_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            # Only the first epoch of a slice skips examples.
            first = tf.constant(part.first, tf.int64)
            skipped = tf.where(epoch == part.epoch, first, 0)
            seed_of_epoch = epoch_seed(seed, epoch)

            source = source_of_epoch(seed_of_epoch, skipped)
            if part.read != ALL:
                source = replace(source, keys=source.keys.take(part.read))
            if augment is not None:
                source = augmented(source, augment, seed_of_epoch)
            return source.batches(part.size, reader)

        return tf.data.Dataset.range(part.epoch, part.end).flat_map(batches_of_epoch)

    batches = functools.reduce(
        tf.data.Dataset.concatenate, map(batches_of_slice, slices)
    )
    batches = _padded_and_cast(batches, pad, spec, padded)
    if weigh is not None:
        batches = map_batches(batches, weigh)
    if augment is not None:
        plain = in_order(data.train, 1, pad, padded=padded)
        plain_inputs = plain.element_spec[0]
        check_keeps_inputs(plain_inputs, _inputs_spec(batches))
    return _read_ahead(batches)


def epoch_seed(seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return the seed, of shape (2,), for the order and the augmentation of an epoch.

    Args:
        seed: seed of the run.
        epoch: number of the epoch, counted from 0, scalar of int64.
    """
    seed_of_run = tf.constant([seed, 0], tf.int64)
    return tf.random.experimental.stateless_fold_in(seed_of_run, epoch)


def in_order(
    examples: tf.data.Dataset,
    size: int,
    pad: Any = None,
    reader: ShareReader | None = None,
    made_of: Stored | None = None,
    keep: bool = False,
    padded: bool = True,
) -> tf.data.Dataset:
    """Return the batches of one unshuffled pass over a split.

    The last batch may be smaller.

    Args:
        examples: the split.
        size: number of examples per batch.
        pad: `dataset.pad` of the config.
        reader: reads this worker's share of each batch, or None if there is only one
            worker. With a reader, each element is the worker's `Share`, or the whole
            batch if examples differ in shape or are padded.
        made_of: the records from which the split is made, or None if they are unknown.
            With the records, a reader makes only the examples of its own share.
        keep: whether to keep the batches in memory after the first pass.
        padded: see `effective_batches`.
    """
    spec = examples.element_spec
    reader = _independent_reader(reader, spec, pad)
    source = Source(examples)
    if reader is not None and made_of is not None:
        source = Source(made_of.records, made_of.make)

    batches = source.batches(size, reader)
    if keep:
        batches = batches.cache()
    return _read_ahead(_padded_and_cast(batches, pad, spec, padded))


def stream_batches(
    stream: Stream, first_update: int, weigh: Weigh | None = None
) -> tf.data.Dataset:
    """Return the effective batches of a stream after the first `first_update` ones.

    Each element is a `Batches`, the batches of a user's loader that make up one update.
    """
    batches = map_batches(stream.batches(first_update), _cast_to_floatx)
    if weigh is not None:
        batches = map_batches(batches, weigh)
    return _read_ahead(batches)


def evaluation_batches(
    data: Data,
    name: str,
    batch_size: int,
    pad: Any,
    reader: ShareReader | None,
    keep: bool,
    padded: bool = True,
) -> tf.data.Dataset:
    """Return the unshuffled batches of a split, from its loader if there is one.

    With a loader, the batch sizes are those of the loader. For the other arguments, see
    `in_order`.
    """
    loader = data.loaders.get(name)
    if loader is None:
        records = data.made_of(name)
        return in_order(
            data.splits[name], batch_size, pad, reader, records, keep, padded
        )

    batches = tf.data.Dataset.from_generator(loader.epoch, output_signature=loader.spec)
    return _read_ahead(map_batches(batches, _cast_to_floatx))


def first_examples(data: Data, name: str, count: int, pad: Any) -> tuple:
    """Return the first `count` examples of a split as a batch.

    With a loader, the batch may be smaller, because it is cut from the loader's first
    batch.
    """
    if name not in data.loaders:
        return next(iter(in_order(data.splits[name], count, pad)))
    return _cast_to_floatx(*slice_of(data.loaders[name].first, 0, count))


def one_class(node: DictConfig, data: Data, seed: int) -> str:
    """Return a warning if the first shuffle buffer has examples of only one class.

    Otherwise, return "". The result is also "" for data in memory, for data without
    class labels, and for loaders.
    """
    if node.get("in_memory", True) or data.loaders or not _has_class_labels(data):
        return ""
    keys = _keys_of_train(node, data)

    # Read the keys within a function that tf.data traces, as in training: elsewhere,
    # TensorFlow's seed would be that of the process, and the order would differ.
    @tf.autograph.experimental.do_not_convert
    def keys_of_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
        return keys.by_seed(_seed_of_order(epoch_seed(seed, epoch)))

    examples = tf.data.Dataset.range(1).flat_map(keys_of_epoch)
    if keys.make is not None:
        examples = examples.map(keys.make)

    count = min(node.get("shuffle_buffer") or data.examples, data.examples)
    labels = (int(example[1]) for example in examples.take(count))
    first = next(labels)
    if count < 2 or any(label != first for label in labels):
        return ""
    remedy = "use a larger dataset.shuffle_buffer, or files with mixed classes"
    return (
        f"the first {count} examples that are streamed are all of class {first}: "
        f"to mix the classes, {remedy}"
    )


def _has_class_labels(data: Data) -> bool:
    spec = data.train.element_spec
    if len(spec) < 2 or not isinstance(spec[1], tf.TensorSpec):
        return False
    labels = spec[1]
    return bool(labels.dtype.is_integer and not labels.shape.rank)


def _independent_reader(
    reader: ShareReader | None, spec: tuple, pad: Mapping[str, Any] | None
) -> ShareReader | None:
    """Return `reader`, or None if examples differ in shape or are padded.

    The shape of a batch then depends on examples of other workers.
    """
    if pad is not None or not fixed(spec):
        return None
    return reader


class _Keys(NamedTuple):
    """Keys of the training split, before they are shuffled in a buffer.

    Attributes:
        by_seed: a function from a seed, a scalar of int64, to the keys. With
            `dataset.shuffle_files`, the order of the files follows from the seed.
        make: a function from a key to an example, or None if the keys are the examples.
    """

    by_seed: Callable[[tf.Tensor], tf.data.Dataset]
    make: Callable[..., tuple] | None


def _keys_of_train(
    node: DictConfig, data: Data, reader: ShareReader | None = None
) -> _Keys:
    """Return the keys from which training examples are made.

    The keys are the stored records if the files are shuffled by `Stored.shuffled`, or
    if a worker with a `reader` makes only its share. Otherwise, the keys are the
    examples.
    """
    stored = data.made_of("train")
    if node.get("shuffle_files"):
        if data.shuffled is not None:
            return _Keys(data.shuffled, None)
        if stored is not None and stored.shuffled is not None:
            return _Keys(stored.shuffled, stored.make)
    if reader is not None and stored is not None:
        return _Keys(lambda seed: stored.records, stored.make)
    return _Keys(lambda seed: data.train, None)


def _streamed(
    node: DictConfig, data: Data, reader: ShareReader | None, numbered: bool
) -> SourceOfEpoch:
    """Return a function that makes the source of an epoch, for streamed examples.

    If `numbered`, the first part of each key is the number of the example.
    """
    spec = data.train.element_spec
    keys = _keys_of_train(node, data, reader)
    buffer = node.get("shuffle_buffer") or data.examples

    make = keys.make
    make_batch = None
    if numbered:
        make = _make_numbered(keys.make)
    elif reader is None and make is not None and _is_small(spec):
        # With files that are shuffled by `Stored.shuffled`, on a single worker.
        make_batch = one_by_one(make, spec)

    def source_of_epoch(seed: tf.Tensor, skipped: tf.Tensor) -> Source:
        seed_of_order = _seed_of_order(seed)
        ordered = keys.by_seed(seed_of_order)
        if numbered:
            ordered = ordered.enumerate()
        shuffled = ordered.shuffle(
            buffer, seed=seed_of_order, reshuffle_each_iteration=False
        )
        return Source(shuffled.skip(skipped), make, make_batch, AHEAD)

    return source_of_epoch


def _seed_of_order(seed_of_epoch: tf.Tensor) -> tf.Tensor:
    """Return the seed for the order of the keys of an epoch, scalar of int64.

    Call this within the traced function that makes the keys, and before they are made:
    it fixes TensorFlow's seed within that function. Otherwise, the seed of the process
    would change the order.
    """
    tf.random.set_seed(1)  # may not be 0
    return seed_of_epoch[0] ^ seed_of_epoch[1]


def _make_numbered(make: Callable[..., tuple] | None) -> Callable[..., tuple]:
    """Return `make` for keys that begin with the number of the example."""

    def make_numbered(number: tf.Tensor, key: Any) -> Any:
        return key if make is None else make(key)

    return make_numbered


def _is_small(spec: tuple) -> bool:
    return fixed(spec) and bytes_of_spec(spec) <= SMALL


def _padded_and_cast(
    batches: tf.data.Dataset,
    pad: Mapping[str, Any] | None,
    spec: tuple,
    padded: bool,
) -> tf.data.Dataset:
    if pad is not None:
        prepared = padder(pad, spec) if padded else value_checker(pad)
        batches = batches.map(prepared, AHEAD)
    return map_batches(batches, _cast_to_floatx)


@tf.autograph.experimental.do_not_convert
def _cast_to_floatx(*batch: Any) -> tuple:
    floatx = keras.config.floatx()

    def cast(leaf: Any) -> Any:
        # The sample weights of an output may be None.
        if leaf is None or not leaf.dtype.is_floating:
            return leaf
        return tf.cast(leaf, floatx)

    return tf.nest.map_structure(cast, batch)


def _inputs_spec(batches: tf.data.Dataset) -> Any:
    element = batches.element_spec
    if isinstance(element, Share):
        return element.batch[0]
    return element[0]


def _read_ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Read `AHEAD` batches ahead, without autotuning.

    Without autotuning, parallel steps use all cores from the start. With autotuning in
    TensorFlow 2.21, the deletion of an iterator may miss the signal that stops the
    tuning thread: one deletion in 4 to 20 then takes as long as the iterator has
    existed, up to a minute.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return batches.prefetch(AHEAD).with_options(options)
