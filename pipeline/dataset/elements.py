"""Brings the elements of a user's dataset into one form.

An element is a tuple `(x,)`, `(x, y)` or `(x, y, sample_weight)`.
"""

from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from pipeline.common.errors import ConfigError

TARGET = "dataset._target_"  # the key that names the user's function
_LABELS = "y"
_WEIGHTS = "sample_weight"
_PARTS = ("x", _LABELS, _WEIGHTS)


def as_parts(dataset: tf.data.Dataset, split: str) -> tf.data.Dataset:
    """Return the dataset with tuples as elements; see `parts_of_element`."""
    spec = dataset.element_spec
    # Raise an error here, not while the function below is traced.
    parts_of_element(as_tuple(spec), split)
    if isinstance(spec, tuple) and not any(map(is_none, tf.nest.flatten(spec))):
        return dataset

    @tf.autograph.experimental.do_not_convert
    def in_parts(*element: Any) -> tuple:
        return parts_of_element(element, split)

    return dataset.map(in_parts)


def as_tuple(element: Any) -> tuple:
    """Return an element, or its spec, as a tuple: x alone becomes `(x,)`."""
    if isinstance(element, tuple):
        return element
    return (element,)


def parts_of_element(parts: tuple, split: str) -> tuple:
    """Return the parts of an element without those that are None.

    Labels of single outputs may be None, too.

    Args:
        parts: an element `(x,)`, `(x, y)` or `(x, y, sample_weight)`, or its spec.
        split: the name of the split, for the error.

    Raises:
        ConfigError: the element has sample weights, but no labels.
    """
    x, *others = parts
    y, sample_weight = [*others, None, None][:2]
    if is_none(y) and not is_none(sample_weight):
        rule = f"must not yield sample weights without labels in its {split} split"
        raise ConfigError(TARGET, rule, "(x, None, sample_weight)")
    if is_none(y):
        return (x,)
    if is_none(sample_weight):
        return x, _without_none(y)
    return x, _without_none(y), sample_weight


def part_names(spec: tuple) -> list[str]:
    """Return the names of the parts of an example, in the order of flattening.

    A name is `x`, `y` or `sample_weight`, followed by the keys of a dict or the numbers
    of a tuple, such as `x.tokens`.
    """
    nests = []
    for name, part in zip(_PARTS, spec, strict=False):
        nests.append(_named(part, name))
    names: list[str] = tf.nest.flatten(nests)
    return names


def _named(nest: Any, name: str) -> Any:
    """Return a nest with the name of each part in its place."""
    if isinstance(nest, Mapping):
        return {key: _named(value, f"{name}.{key}") for key, value in nest.items()}
    if isinstance(nest, tuple):
        return [_named(value, f"{name}.{i}") for i, value in enumerate(nest)]
    return name


def weighted_labels(names: Collection[str]) -> list[tuple[str, str]]:
    """Return the names of labels, each with the name of its sample weights.

    If the labels are a dict or a tuple and the sample weights are not, the weights
    apply to all labels. Labels without sample weights are left out.

    Args:
        names: the names of the parts of an example, see `part_names`.
    """
    pairs = []
    for weights in names:
        part, _, output = weights.partition(".")
        if part != _WEIGHTS:
            continue
        owner = f"{_LABELS}.{output}".rstrip(".")
        for labels in names:
            if labels == owner or labels.startswith(f"{owner}."):
                pairs.append((labels, weights))
    return pairs


def is_none(part: Any) -> bool:
    """Return whether a part of an element, or its spec, is None."""
    return part is None or isinstance(part, tf.NoneTensorSpec)


def _without_none(nest: Any) -> Any:
    if isinstance(nest, dict):
        kept = {key: value for key, value in nest.items() if not is_none(value)}
        return {key: _without_none(value) for key, value in kept.items()}
    if isinstance(nest, tuple):
        return tuple(_without_none(value) for value in nest if not is_none(value))
    return nest
