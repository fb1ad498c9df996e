"""The batch that takes the most memory: the longest examples, where they are of unequal length."""

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


def of_update(spec: RunSpec, data: Data, effective_batch_size: int) -> tf.data.Dataset:
    """Return an endless dataset of effective batches as in training, each made of the longest examples."""
    if (examples := _longest(spec, data.train, effective_batch_size)) is not None:
        data = replace(data, train=examples, shuffled=None)
    slices, weigh = (
        [Slice(effective_batch_size, 1)],
        weigher(spec.config.training, data),
    )
    return effective_batches(
        spec.dataset, data, slices, spec.config.seed, weigh
    ).repeat()


def of_evaluation(
    spec: RunSpec, split: tf.data.Dataset, batch_size: int
) -> tf.data.Dataset:
    """Return one batch of a split as it is evaluated, made of the longest examples."""
    examples = _longest(spec, split, batch_size)
    return in_order(
        split if examples is None else examples, batch_size, spec.dataset.get("pad")
    ).take(1)


def _longest(
    spec: RunSpec, split: tf.data.Dataset, count: int
) -> tf.data.Dataset | None:
    """Return `count` copies of the longest examples of a split; None where all are of one size.

    With `dataset.pad` these are the examples with the longest of any axis, alternating; else that of most elements.
    """
    specs = tf.nest.flatten(split.element_spec)
    if not any(map(_varies, specs)):
        return None
    if not spec.dataset.get("in_memory", True):
        rule = "must be a number where examples of unequal length are streamed, as the longest is not known before"
        raise ConfigError(MICRO, rule, spec.config.accumulation.micro_batch_size)
    padded = spec.dataset.get("pad") is not None

    @tf.autograph.experimental.do_not_convert
    def longer(
        best: tuple[tf.Tensor, tf.Tensor], numbered: tuple[tf.Tensor, Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        numbers, lengths = best
        number, example = numbered
        found = [
            _lengths(leaf)
            for leaf, spec in zip(tf.nest.flatten(example), specs, strict=True)
            if _varies(spec)
        ]
        now = (
            tf.concat(found, 0)
            if padded
            else tf.stack([tf.add_n([part[0] for part in found])])
        )
        return tf.where(now > lengths, number, numbers), tf.maximum(now, lengths)

    counted = sum(1 + _rank(spec) for spec in specs if _varies(spec)) if padded else 1
    nothing = tf.zeros(counted, tf.int64), tf.fill([counted], tf.constant(-1, tf.int64))
    numbers, _ = split.enumerate().reduce(nothing, longer)
    each = [
        split.skip(number).take(1).cache()
        for number in sorted({int(number) for number in numbers})
    ]
    examples = functools.reduce(tf.data.Dataset.concatenate, each)
    return (
        examples.repeat()
        .take(count)
        .apply(tf.data.experimental.assert_cardinality(count))
    )


def _varies(spec: tf.TypeSpec) -> bool:
    if isinstance(spec, tf.TensorSpec):
        return bool(spec.dtype == tf.string or not spec.shape.is_fully_defined())
    return not isinstance(spec, tf.NoneTensorSpec)


def _rank(spec: Any) -> int:
    return (
        int(spec.shape.rank)
        if isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec) and spec.shape.rank
        else 0
    )


def _lengths(leaf: Any) -> tf.Tensor:
    """Return the number of elements of a part, bytes for a text, and then the length of each of its axes."""
    if isinstance(leaf, tf.SparseTensor):
        return tf.reshape(tf.size(leaf.values, tf.int64), [1])
    values = leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else leaf
    size = (
        tf.strings.length(values)
        if values.dtype == tf.string
        else tf.ones_like(values, tf.int32)
    )
    axes = (
        leaf.bounding_shape(out_type=tf.int64)
        if isinstance(leaf, tf.RaggedTensor)
        else tf.shape(leaf, tf.int64)
    )
    return tf.concat([[tf.reduce_sum(tf.cast(size, tf.int64))], axes], 0)
