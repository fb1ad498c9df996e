"""Makes the batches that need the most memory: those of the longest examples."""

import functools
from dataclasses import replace
from typing import Any

import tensorflow as tf

from pipeline.common.errors import ConfigError
from pipeline.config.resolve import RunSpec
from pipeline.config.sizes import MICRO
from pipeline.config.stages import Slice
from pipeline.dataset.batches import effective_batches, in_order
from pipeline.dataset.class_weights import weigher
from pipeline.dataset.splits import Data


def for_update(spec: RunSpec, data: Data, effective_batch_size: int) -> tf.data.Dataset:
    """Return an endless dataset of effective batches of the longest training examples.

    The examples are augmented, padded and weighted as in training. If all have the same
    size, ordinary effective batches are returned.
    """
    longest = _longest(spec, data.train, effective_batch_size)
    if longest is not None:
        data = replace(data, train=longest, shuffled=None)
    slices = [Slice(effective_batch_size, end=1)]
    weigh = weigher(spec.config.training, data)
    batches = effective_batches(spec.dataset, data, slices, spec.config.seed, weigh)
    return batches.repeat()


def for_evaluation(
    spec: RunSpec, split: tf.data.Dataset, batch_size: int
) -> tf.data.Dataset:
    """Return a dataset with one evaluation batch of the longest examples of a split."""
    examples = _longest(spec, split, batch_size)
    if examples is None:
        examples = split
    return in_order(examples, batch_size, spec.dataset.get("pad")).take(1)


def _longest(
    spec: RunSpec, split: tf.data.Dataset, count: int
) -> tf.data.Dataset | None:
    """Return `count` examples, which repeat the longest examples of a split.

    With `dataset.pad`, the longest examples are those with the maximum length along
    some axis, or with the most elements. Otherwise, the longest example is the one with
    the most elements. Return None if all examples have the same size.

    Raises:
        ConfigError: the examples are streamed, so the longest ones are unknown.
    """
    part_specs = tf.nest.flatten(split.element_spec)
    if not any(_varies(part_spec) for part_spec in part_specs):
        return None
    if not spec.dataset.get("in_memory", True):
        rule = (
            "must be a number if examples of unequal length are streamed, because the "
            "longest one is not known in advance"
        )
        raise ConfigError(MICRO, rule, spec.config.accumulation.micro_batch_size)

    padded = spec.dataset.get("pad") is not None
    numbers = _numbers_of_longest(split, part_specs, padded)
    longest_examples = [split.skip(number).take(1).cache() for number in numbers]
    examples = functools.reduce(tf.data.Dataset.concatenate, longest_examples)
    copies = examples.repeat().take(count)
    return copies.apply(tf.data.experimental.assert_cardinality(count))


def _numbers_of_longest(
    split: tf.data.Dataset, part_specs: list[tf.TypeSpec], padded: bool
) -> list[int]:
    """Return the indices of the longest examples: for each length, the first maximum.

    For a `padded` split, the lengths are the number of elements and the size of each
    axis, for each part of varying size. Otherwise, the only length is the total number
    of elements in these parts.
    """

    def lengths_of(example: Any) -> tf.Tensor:
        lengths_of_parts = []
        for leaf, part_spec in zip(tf.nest.flatten(example), part_specs, strict=True):
            if _varies(part_spec):
                lengths_of_parts.append(_lengths(leaf))
        if padded:
            return tf.concat(lengths_of_parts, 0)
        elements = tf.add_n([lengths[0] for lengths in lengths_of_parts])
        return tf.stack([elements])

    @tf.autograph.experimental.do_not_convert
    def longer(
        longest: tuple[tf.Tensor, tf.Tensor], numbered: tuple[tf.Tensor, Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        longest_numbers, longest_lengths = longest
        number, example = numbered
        lengths = lengths_of(example)
        return (
            tf.where(lengths > longest_lengths, number, longest_numbers),
            tf.maximum(lengths, longest_lengths),
        )

    length_count = 1
    if padded:
        varying = [part_spec for part_spec in part_specs if _varies(part_spec)]
        length_count = sum(1 + _rank(part_spec) for part_spec in varying)
    none_yet = (
        tf.zeros(length_count, tf.int64),
        tf.fill([length_count], tf.constant(-1, tf.int64)),
    )
    numbers, _ = split.enumerate().reduce(none_yet, longer)
    return sorted({int(number) for number in numbers})


def _varies(spec: tf.TypeSpec) -> bool:
    """Return whether the size of a part may differ between examples."""
    if isinstance(spec, tf.TensorSpec):
        return bool(spec.dtype == tf.string or not spec.shape.is_fully_defined())
    return isinstance(spec, tf.RaggedTensorSpec)


def _rank(spec: Any) -> int:
    """Return the number of axes of a part. An unknown number counts as 0."""
    if spec.shape.rank is None:
        return 0
    return int(spec.shape.rank)


def _lengths(leaf: Any) -> tf.Tensor:
    """Return the number of elements in a part, then the length of each of its axes.

    Each byte of a string counts as an element.
    """
    if isinstance(leaf, tf.RaggedTensor):
        values = leaf.flat_values
        lengths_of_axes = leaf.bounding_shape(out_type=tf.int64)
    else:
        values = leaf
        lengths_of_axes = tf.shape(leaf, tf.int64)

    if values.dtype == tf.string:
        bytes_of_values = tf.cast(tf.strings.length(values), tf.int64)
        elements = tf.reduce_sum(bytes_of_values)
    else:
        elements = tf.size(values, tf.int64)
    return tf.concat([[elements], lengths_of_axes], 0)
