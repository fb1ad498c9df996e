"""Examples → batches in a reproducible order: one element of what it yields is one effective batch.

    examples ─► number them ─► shuffle by (seed, epoch) ─► augment by (seed, epoch, number) ─► batch of E

The order depends on (dataset, seed, epoch) alone, never on the factor, the micro-batch, the replicas or the
device; only where it is cut depends on the effective batch size. One of several workers numbers and shuffles as all do,
and makes the examples of its own replicas alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from omegaconf import DictConfig

from pipeline.accumulation import Share
from pipeline.common.errors import ConfigError
from pipeline.dataset.padding import padder
from pipeline.dataset.splits import Data, Stored
from pipeline.trust import instantiate

SMALL = 2**16  # bytes of an example: below, a step of tf.data takes as long as to decode it
AHEAD = 2  # effective batches: tuned by itself tf.data kept 3 GB of batches of 6 MB


class Reader(NamedTuple):
    """The replicas that a worker reads for: so many, from number `first` on, of all."""

    first: int
    replicas: int
    all_replicas: int

    def share(self, batch: Any) -> Share:
        """Return what they have of an effective batch."""
        return Share.of(batch, self.first, self.replicas, self.all_replicas)


def effective_batches(
    node: DictConfig,
    data: Data,
    *,
    seed: int,
    effective_batch_size: int,
    epochs: int,
    first_update: int = 0,
    class_weight: Mapping[int, float] | None = None,
    reader: Reader | None = None,
) -> tf.data.Dataset:
    """Return the training split, epoch after epoch; one element is the batch of one update, the last one the tail.

    `node` is the `dataset` group. The order and the augmentation follow from `seed` and the epoch, which counts from 0.
    The batches of the first `first_update` updates are left out: epochs before are not read, and of the one in which
    they end nothing is gathered or augmented; what is streamed is read and shuffled as it was.
    `class_weight` is the sample weight of the examples of each class, as `fit` takes it; 1 for one that is not named.
    For a `reader` an element is a `Share`, whose examples alone are made, unless it takes the whole batch to know how
    long they are.
    """
    augment = None if node.get("augment") is None else instantiate.build(node.augment, "dataset.augment")
    whole = _batch(data.train, data.examples).get_single_element() if node.get("in_memory", True) else None
    count = data.examples
    buffer = node.get("shuffle_buffer") or count
    reader = _alone(reader, data.train.element_spec, node.get("pad"))
    read, make = _stream(node, data, reader)
    first_epoch, batches_before = divmod(first_update, -(-count // effective_batch_size))
    before = batches_before * effective_batch_size  # examples of the first epoch that is read

    @tf.autograph.experimental.do_not_convert
    def epoch_of(epoch: tf.Tensor) -> tf.data.Dataset:
        left_out = tf.where(epoch == first_epoch, tf.constant(before, tf.int64), 0)
        key = tf.random.experimental.stateless_fold_in(tf.constant([seed, 0], tf.int64), epoch)
        if whole is None:
            tf.random.set_seed(1)  # of this traced function alone: the process' seed has no say, and may not be 0
            order = key[0] ^ key[1]
            names = read(order) if augment is None else read(order).enumerate()
            names = names.shuffle(buffer, seed=order, reshuffle_each_iteration=False).skip(left_out)
        else:
            shuffled = tf.random.experimental.stateless_shuffle(tf.range(count, dtype=tf.int64), seed=key)
            names = tf.data.Dataset.from_tensor_slices(shuffled[left_out:])
            if augment is None:  # gathered a batch at a time: twenty times the speed of one example at a time
                names = names.batch(effective_batch_size)
                if reader is None:
                    return names.map(lambda batch: _take(whole, batch))
                return names.map(reader.share).map(lambda share: share._replace(batch=_take(whole, share.batch)))

        if reader is None and augment is None and make is not None and _small(data.train.element_spec):
            stored = names.batch(effective_batch_size)
            return stored.map(lambda records: _each(make, records, data.train.element_spec), tf.data.AUTOTUNE)
        if augment is None:
            return _made(names, make, effective_batch_size, reader)

        def augmented(number: tf.Tensor, name: Any = None) -> tuple:
            if whole is not None:
                x, *rest = _take(whole, number)
            else:
                x, *rest = name if make is None else make(name)
            return (augment(x, tf.random.experimental.stateless_fold_in(key, number)), *rest)

        return _made(names, augmented, effective_batch_size, reader)

    epochs_ahead = tf.data.Dataset.range(first_epoch, epochs)
    batches = _prepared(epochs_ahead.flat_map(epoch_of), node.get("pad"), data.train.element_spec)
    if class_weight is not None:
        batches = _mapped(batches, _weigher(class_weight, data))
    batches = batches.prefetch(AHEAD)
    spec = batches.element_spec
    made, *_ = spec.batch if isinstance(spec, Share) else spec
    given, *_ = in_order(data.train, 1, node.get("pad")).element_spec
    if augment is not None and not _alike(given, made):
        raise ConfigError("dataset.augment", f"must keep the shape and dtype of an input, {given}", str(made))
    return batches


def in_order(
    examples: tf.data.Dataset,
    batch_size: int,
    pad: Mapping[str, Any] | None = None,
    reader: Reader | None = None,
    made_of: Stored | None = None,
) -> tf.data.Dataset:
    """Return a split once, unshuffled, in batches of `batch_size`, the last perhaps smaller; `pad` as in the config.

    For a `reader` as `effective_batches`: it makes its examples alone where it is known what they are `made_of`.
    """
    reader = _alone(reader, examples.element_spec, pad)
    names, make = (examples, None) if reader is None or made_of is None else (made_of.records, made_of.make)
    return _prepared(_made(names, make, batch_size, reader), pad, examples.element_spec).prefetch(AHEAD)


@contextmanager
def iterating(batches: tf.data.Dataset) -> Iterator[list[Any]]:
    """Yield a list of one iterator over `batches`, whose end nobody waits for; keep no other reference to it.

    TensorFlow 2.21 wakes the thread that tunes an iterator before it notes that this is the end: one time in four to
    twenty that thread slept on, for as long as it had lived, up to a minute. A process may end in the meantime.
    """
    held = [iter(batches)]
    try:
        yield held
    finally:
        with suppress(RuntimeError):  # no thread is to be had
            threading.Thread(target=held.clear, daemon=True).start()


def one_class(node: DictConfig, data: Data, seed: int) -> str:
    """Return a line where the examples that are streamed and shuffled together at first are all of one class."""
    label = data.train.element_spec[1] if len(data.train.element_spec) > 1 else None
    if (
        node.get("in_memory", True)
        or not isinstance(label, tf.TensorSpec)
        or not label.dtype.is_integer
        or label.shape.rank
    ):
        return ""
    of_seed, make = _stream(node, data)
    read = of_seed(tf.constant(seed, tf.int64))
    read = read if make is None else read.map(make)
    count = min(node.get("shuffle_buffer") or data.examples, data.examples)
    labels = (int(example[1]) for example in read.take(count))
    first = next(labels)
    if count < 2 or any(other != first for other in labels):
        return ""
    how = "a larger dataset.shuffle_buffer, or files in which they are mixed"
    return f"the first {count} examples that are streamed are all of class {first}: classes are mixed by {how}"


def _stream(
    node: DictConfig, data: Data, reader: Reader | None = None
) -> tuple[Callable[[tf.Tensor], tf.data.Dataset], Callable[..., tuple] | None]:
    """Return what gives the training split by a seed, and what makes its examples of that; None where it gives them."""
    stored, by_files = data.made_of("train"), node.get("shuffle_files")
    if by_files and data.shuffled is not None:
        return data.shuffled, None
    if by_files and stored is not None and stored.shuffled is not None:
        return stored.shuffled, stored.make
    if reader is not None and stored is not None:
        return lambda seed: stored.records, stored.make
    return lambda seed: data.train, None


def _alone(reader: Reader | None, spec: tuple, pad: Mapping[str, Any] | None) -> Reader | None:
    """Return the reader if it can make its examples without the others: none of these say how long they are."""
    return reader if pad is None and _even(spec) else None


def _even(spec: tuple) -> bool:
    leaves = tf.nest.flatten(spec)
    return all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in leaves)


def _made(
    names: tf.data.Dataset, make: Callable[..., tuple] | None, size: int, reader: Reader | None
) -> tf.data.Dataset:
    """Return batches of what `make` makes of `names`: these are the examples where it is None."""
    of_name = names.element_spec
    several = isinstance(of_name, tuple)  # which tf.data gives as so many arguments
    spec = of_name if make is None or reader is None else _given(make, of_name if several else (of_name,))
    if reader is None or not _even((of_name, spec)):
        return _batch(names if make is None else names.map(make, tf.data.AUTOTUNE), size)
    shares = names.batch(size).map((lambda *parts: reader.share(parts)) if several else reader.share)
    if make is None:
        return shares
    one: Any = (lambda name: make(*name)) if several else make
    return shares.map(lambda share: share._replace(batch=_each(one, share.batch, spec)), AHEAD)


def _given(function: Callable[..., tuple], specs: tuple) -> tuple:
    """Return the specs of what a function of such arguments gives; tf.data cannot fuse what is mapped to see them."""
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    given: tuple = tf.nest.map_structure(tf.type_spec_from_value, traced.structured_outputs)
    return given


def _prepared(batches: tf.data.Dataset, pad: Mapping[str, Any] | None, spec: tuple) -> tf.data.Dataset:
    if pad is not None:
        batches = batches.map(padder(pad, spec), tf.data.AUTOTUNE)
    return _mapped(batches, _in_precision)


def _mapped(batches: tf.data.Dataset, function: Callable[..., tuple]) -> tf.data.Dataset:
    """Map each batch, or what is read of it."""
    if isinstance(batches.element_spec, Share):
        return batches.map(lambda share: share._replace(batch=function(*share.batch)), tf.data.AUTOTUNE)
    return batches.map(function, tf.data.AUTOTUNE)


def _weigher(class_weight: Mapping[int, float], data: Data) -> Callable[..., tuple]:
    """Return a function that gives a batch the sample weights of its classes.

    Raises:
        ConfigError: an example has weights, or labels of several outputs.
    """
    spec = data.train.element_spec
    if len(spec) != 2 or not isinstance(spec[1], tf.TensorSpec) or None in (spec[1].shape or ()):
        rule = "must be null where an example is not (x, y) with labels of one output, and of one length"
        raise ConfigError("training.class_weight", rule, [type(part).__name__ for part in spec])
    one_hot = spec[1].shape.rank >= 1 and spec[1].shape[-1] != 1
    labels, weights = list(class_weight), [float(weight) for weight in class_weight.values()]
    floatx = keras.config.floatx()
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant(labels, tf.int64), tf.constant(weights, floatx)), 1.0
    )

    @tf.autograph.experimental.do_not_convert
    def weigh(x: Any, y: tf.Tensor) -> tuple:
        if one_hot:
            found = tf.argmax(y, axis=-1)
        else:
            found = tf.cast(tf.round(y) if y.dtype.is_floating else y, tf.int64)
            found = found if found.shape.rank == 1 else tf.squeeze(found, -1)
        return x, y, table.lookup(found)

    return weigh


def _alike(given: Any, made: Any) -> bool:
    try:
        return all(tf.nest.flatten(tf.nest.map_structure(lambda a, b: a.is_compatible_with(b), given, made)))
    except (TypeError, ValueError):  # nests of other forms
        return False


def _take(nest: Any, numbers: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.gather(leaf, numbers), nest)


def _small(spec: tuple) -> bool:
    """Return whether examples cost more one by one than what is done to them."""
    return _even(spec) and sum(leaf.shape.num_elements() * leaf.dtype.size for leaf in tf.nest.flatten(spec)) <= SMALL


def _each(function: Callable[[Any], tuple], batch: Any, spec: tuple) -> Any:
    return tf.map_fn(function, batch, fn_output_signature=spec, parallel_iterations=max(10, os.cpu_count() or 1))


def _batch(examples: tf.data.Dataset, size: int) -> tf.data.Dataset:
    spec = [leaf for leaf in tf.nest.flatten(examples.element_spec) if not isinstance(leaf, tf.NoneTensorSpec)]
    uneven = any(leaf.shape.rank is None or None in leaf.shape.as_list() for leaf in spec)
    return examples.ragged_batch(size) if uneven else examples.batch(size)


@tf.autograph.experimental.do_not_convert
def _in_precision(*batch: Any) -> tuple:
    floatx = keras.config.floatx()

    def cast(leaf: Any) -> Any:  # None for the sample weights of an output without
        return tf.cast(leaf, floatx) if leaf is not None and leaf.dtype.is_floating else leaf

    return tf.nest.map_structure(cast, batch)
