"""Examples → batches in a reproducible order: one element of what it yields is one effective batch.

    examples ─► number them ─► shuffle by (seed, epoch) ─► augment by (seed, epoch, number) ─► batch of E

The order depends on (dataset, seed, epoch) alone, never on the factor, the micro-batch, the replicas or the
device; only where it is cut depends on the effective batch size.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig

from pipeline import instantiate
from pipeline.dataset import Data
from pipeline.errors import ConfigError


def effective_batches(
    node: DictConfig, data: Data, *, seed: int, effective_batch_size: int, epochs: int, first_epoch: int = 0
) -> tf.data.Dataset:
    """Return the training split, epoch after epoch; one element is the batch of one update, the last one the tail.

    `node` is the `dataset` group. The order and the augmentation follow from `seed` and the epoch, which counts from 0.
    """
    augment = None if node.get("augment") is None else instantiate.build(node.augment, "dataset.augment")
    whole = _batch(data.train, data.examples).get_single_element() if node.get("in_memory", True) else None
    count = data.examples
    buffer = node.get("shuffle_buffer") or count

    @tf.autograph.experimental.do_not_convert
    def epoch_of(epoch: tf.Tensor) -> tf.data.Dataset:
        key = tf.random.experimental.stateless_fold_in(tf.constant([seed, 0], tf.int64), epoch)
        if whole is None:
            tf.random.set_seed(1)  # of this traced function alone: the process' seed has no say, and may not be 0
            examples = data.train.enumerate().shuffle(buffer, seed=key[0] ^ key[1], reshuffle_each_iteration=False)
        else:
            shuffled = tf.random.experimental.stateless_shuffle(tf.range(count, dtype=tf.int64), seed=key)
            numbers = tf.data.Dataset.from_tensor_slices(shuffled)
            if augment is None:  # gathered a batch at a time: twenty times the speed of one example at a time
                return numbers.batch(effective_batch_size).map(lambda batch: _take(whole, batch))
            examples = numbers.map(lambda number: (number, _take(whole, number)))

        def augmented(number: tf.Tensor, example: tuple) -> tuple:
            if augment is None:
                return example
            return (augment(example[0], tf.random.experimental.stateless_fold_in(key, number)), *example[1:])

        return _batch(examples.map(augmented, tf.data.AUTOTUNE), effective_batch_size)

    epochs_ahead = tf.data.Dataset.range(first_epoch, first_epoch + epochs)
    batches = epochs_ahead.flat_map(epoch_of).map(_in_precision, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    (given, *_), (made, *_) = in_order(data.train, 1).element_spec, batches.element_spec
    if augment is not None and not _alike(given, made):
        raise ConfigError("dataset.augment", f"must keep the shape and dtype of an input, {given}", str(made))
    return batches


def in_order(examples: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    """Return a split once, unshuffled, in batches of `batch_size`; the last one may be smaller."""
    return _batch(examples, batch_size).map(_in_precision, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def _alike(given: Any, made: Any) -> bool:
    try:
        return all(tf.nest.flatten(tf.nest.map_structure(lambda a, b: a.is_compatible_with(b), given, made)))
    except (TypeError, ValueError):  # nests of other forms
        return False


def _take(nest: Any, numbers: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, numbers), nest)


def _batch(examples: tf.data.Dataset, size: int) -> tf.data.Dataset:
    spec = tf.nest.flatten(examples.element_spec)
    uneven = any(leaf.shape.rank is None or None in leaf.shape.as_list() for leaf in spec)
    return examples.ragged_batch(size) if uneven else examples.batch(size)


@tf.autograph.experimental.do_not_convert
def _in_precision(*batch: Any) -> tuple:
    floatx = keras.config.floatx()
    return tf.nest.map_structure(lambda leaf: tf.cast(leaf, floatx) if leaf.dtype.is_floating else leaf, batch)
