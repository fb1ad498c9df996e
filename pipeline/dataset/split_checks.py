"""Checks that a split has a known number of single examples, and converts them to tuples."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pipeline.common.errors import ConfigError


def checked(dataset: Any, split: str) -> tf.data.Dataset:
    """Return the split as `as_parts` does.

    Raises:
        ConfigError: it is not a dataset, its length is not known, or its elements are batches.
    """
    key = "dataset._target_"
    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigError(key, f"must give its {split} split as a tf.data.Dataset", type(dataset).__name__)
    spec, count = dataset.element_spec, int(dataset.cardinality())
    if isinstance(spec, tuple) and len(spec) not in (1, 2, 3):
        rule = f"must give (x, y), (x, y, sample_weight) or x alone as an example of its {split} split"
        raise ConfigError(key, rule, spec)
    if count == 0:
        raise ConfigError(key, f"must give at least one example in its {split} split", count)
    if count < 0:
        rule = f"must give a {split} split of a known number of examples (see tf.data.experimental.assert_cardinality)"
        raise ConfigError(key, rule, count)
    leaves = tf.nest.flatten(spec)
    if _is_batched(dataset, leaves):
        rule = f"must give single examples in its {split} split, not batches: leave `batch` out"
        raise ConfigError(key, rule, [str(leaf) for leaf in leaves])
    return as_parts(dataset)


def as_parts(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return the split with tuples as examples, without the labels that are None."""
    spec = dataset.element_spec
    without_labels = any(isinstance(leaf, tf.NoneTensorSpec) for leaf in tf.nest.flatten(spec))
    return dataset if isinstance(spec, tuple) and not without_labels else dataset.map(_parts)


def _is_batched(dataset: tf.data.Dataset, leaves: list[Any]) -> bool:
    """Return whether the first axis of each part has an unknown size and yet the same one in all elements but the last.

    The length of sequences differs from example to example; the last batch may be smaller.
    """
    if not all(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank and leaf.shape[0] is None for leaf in leaves):
        return False
    lengths = [int(tf.shape(tf.nest.flatten(element)[0])[0]) for element in dataset.take(20)]
    return len(lengths) > 1 and len(set(lengths[:-1])) == 1 and 1 <= lengths[-1] <= lengths[0] > 1


@tf.autograph.experimental.do_not_convert
def _parts(x: Any, y: Any = None, *sample_weight: Any) -> tuple:
    return (x,) if y is None else (x, _without_none(y), *sample_weight)


def _without_none(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _without_none(value) for key, value in nest.items() if value is not None}
    if isinstance(nest, tuple):
        return tuple(_without_none(value) for value in nest if value is not None)
    return nest
