"""Cuts off the padding of examples whose lengths are known, for `dataset.lengths`.

Examples that are padded to one size become examples of unequal length, as if the
dataset had given them without padding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from omegaconf import DictConfig, ListConfig

from pipeline.common.errors import ConfigError, as_config_error
from pipeline.dataset import elements
from pipeline.trust import instantiate

KEY = "dataset.lengths"


@dataclass(frozen=True)
class _Parts:
    """The parts of an example that are sequences of one length.

    Attributes:
        length: a function from an example to this length, a scalar integer.
        indices: the indices of the parts in a flattened example, by their names.
    """

    length: Callable[..., Any]
    indices: Mapping[str, int]


@dataclass(frozen=True)
class _Form:
    """The form of an example.

    Attributes:
        spec: the spec of the example.
        specs: the specs of its parts, by their names, such as `x.tokens`. They are in
            the order of a flattened example.
        split: the name of the split that the example is of.
    """

    spec: tuple
    specs: Mapping[str, Any]
    split: str


def cutter(
    node: DictConfig | ListConfig, spec: tuple, split: str
) -> Callable[..., tuple]:
    """Return a function from an example to the example without padding.

    The function raises an error if a length is below 0 or above the size of a part, or
    if what it would cut off is not zero.

    Args:
        node: the value of `dataset.lengths`.
        spec: the spec of an example.
        split: the name of the split, for errors.

    Raises:
        ConfigError: a part does not exist or is not a dense sequence, two lengths apply
            to it, a length is not one integer per example, or labels would be cut
            without the sample weights of their positions, or the reverse.
    """
    names = elements.part_names(spec)
    specs = dict(zip(names, tf.nest.flatten(spec), strict=True))
    form = _Form(spec, specs, split)

    parts_by_length: list[_Parts] = []
    keys_by_name: dict[str, str] = {}
    for key, entry in _entries(node).items():
        parts = _Parts(_length(entry, key, form), _indices(entry, key, form))
        for name in parts.indices:
            if name in keys_by_name:
                rule = "must be parts that have no other length"
                raise ConfigError(f"{key}.parts", rule, name)
            keys_by_name[name] = f"{key}.parts"
        parts_by_length.append(parts)
    _check_weights(keys_by_name, form)

    @tf.autograph.experimental.do_not_convert
    def cut(*example: Any) -> tuple:
        values = tf.nest.flatten(example)
        for parts in parts_by_length:
            length = tf.cast(parts.length(*example), tf.int64)
            for name, index in parts.indices.items():
                values[index] = _without_padding(values[index], length, name)
        cut_example: tuple = tf.nest.pack_sequence_as(example, values)
        return cut_example

    return cut


def _entries(node: DictConfig | ListConfig) -> dict[str, DictConfig]:
    """Return the nodes with a length and its parts, by their keys in the config."""
    if isinstance(node, ListConfig):
        return {f"{KEY}.{number}": entry for number, entry in enumerate(node)}
    return {KEY: node}


def _length(entry: DictConfig, key: str, form: _Form) -> Callable[..., Any]:
    """Return a function from an example to the length that an entry gives for it."""
    key = f"{key}.length"
    if isinstance(entry.length, str):
        name = entry.length
        if name not in form.specs:
            rule = (
                f"must be a part of an example of the {form.split} split, or a node "
                "with a _target_"
            )
            raise ConfigError(key, rule, name, form.specs)
        _check_length(form.specs[name], key, name)
        index = list(form.specs).index(name)
        return lambda *example: tf.nest.flatten(example)[index]

    target = entry.length._target_
    function = instantiate.build(entry.length, key)
    with as_config_error(key, "must be a function of (x, y)", target):
        # Convert with AutoGraph, as `map` does: the function may branch on tensors.
        converted = tf.function(function)
        traced = converted.get_concrete_function(*form.spec[:2])
    _check_length(traced.structured_outputs, key, target)
    return lambda *example: converted(*example[:2])


def _check_length(spec: Any, key: str, received: str) -> None:
    """Reject a length that is not one integer per example.

    Args:
        spec: the spec of the length, or the traced length.
        key: the config key that gives the length.
        received: the name of the part or of the function that gives the length.
    """
    is_tensor = isinstance(spec, tf.TensorSpec) or tf.is_tensor(spec)
    if is_tensor and spec.dtype.is_integer and spec.shape.rank == 0:
        return
    rule = f"must be one integer per example, not {spec}"
    raise ConfigError(key, rule, received)


def _indices(entry: DictConfig, key: str, form: _Form) -> dict[str, int]:
    """Return the parts that an entry lists: by name, the index in an example."""
    key = f"{key}.parts"
    names = list(form.specs)
    indices = {}
    for name in entry.parts:
        if name not in names:
            rule = f"must be parts of an example of the {form.split} split"
            raise ConfigError(key, rule, name, names)
        spec = form.specs[name]
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            rule = f"must be dense parts with an axis of positions, not {spec}"
            raise ConfigError(key, rule, name)
        indices[name] = names.index(name)
    return indices


def _check_weights(keys_by_name: Mapping[str, str], form: _Form) -> None:
    """Reject labels that are cut without the sample weights of their positions.

    The same applies to sample weights without their labels.

    Args:
        keys_by_name: by the name of each part that is cut, the key that lists it.
        form: the form of an example.
    """
    for pair in elements.weighted_labels(form.specs):
        cut = [name for name in pair if name in keys_by_name]
        uncut = [name for name in pair if name not in keys_by_name]
        if not cut or not uncut:
            continue
        size = _positions(form.specs[uncut[0]])
        if size is not None and size == _positions(form.specs[cut[0]]):
            key = keys_by_name[cut[0]]
            rule = (
                f"must also contain {uncut[0]}, which has as many positions as {cut[0]}"
            )
            others = [name for name, other in keys_by_name.items() if other == key]
            raise ConfigError(key, rule, others)


def _positions(spec: Any) -> int | None:
    """Return the size of the first axis of a part, or None if it is not known."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return None
    size: int | None = spec.shape[0]
    return size


def _without_padding(value: tf.Tensor, length: tf.Tensor, name: str) -> tf.Tensor:
    """Return the first `length` positions of a part.

    Evaluating them raises an error if there are fewer, or if any other is not zero.
    """
    size = tf.shape(value, tf.int64)[0]
    in_range = tf.debugging.Assert(
        (length >= 0) & (length <= size),
        [
            tf.strings.format(
                f"dataset.lengths of {name} must be from 0 to {{}}. Received: {{}}",
                (size, length),
            )
        ],
    )
    with tf.control_dependencies([in_range]):
        rest = value[length:]
    is_padding = tf.debugging.Assert(
        tf.reduce_all(tf.equal(rest, tf.zeros_like(rest))),
        [
            tf.strings.format(
                f"dataset.lengths of {name} must leave out only padding, which is "
                "zero. Received: {}",
                length,
            )
        ],
    )
    with tf.control_dependencies([is_padding]):
        return value[:length]
