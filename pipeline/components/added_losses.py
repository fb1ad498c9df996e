"""Whether what layers add to the loss is a mean or a sum over the examples of a batch.

A few examples are enough to find out: the amount that a layer adds for all of them is
compared with the amounts for two parts of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from pipeline.accumulation import internals
from pipeline.common.errors import ConfigError
from pipeline.config.schema import Added

KEY = "training.added_losses"


class Amounts(NamedTuple):
    """What a layer adds to the loss in one call."""

    scalars: float
    values: float  # the sum of what it adds as one value for each example


def check(model: keras.Model, x: Any, rule: str) -> list[str]:
    """Check that the layers of a model add to the loss by `rule`.

    Nothing is computed for a model that added nothing in its last call.

    Args:
        x: inputs of a few examples.
        rule: `mean` or `sum`.

    Returns:
        A line with the layers for which neither rule is right, or an empty list.

    Raises:
        ConfigError: the other rule is right for a layer.
    """
    count = int(internals.examples_in(x))
    if not internals.added_losses(model) or count < 2:
        return []
    cut = count - count // 3 - 1  # parts of different sizes: 7 examples are 4 and 3
    try:
        amounts_of_batch, *amounts_of_parts = _amounts_by_range(
            model, x, [(0, count), (0, cut), (cut, count)]
        )
    except Exception:  # the model computes in its own precision only
        return []

    shares = [cut / count, (count - cut) / count]
    rules_by_layer: dict[str, list[str]] = {}
    for path, batch in amounts_of_batch.items():
        parts = [part.get(path, Amounts(0.0, 0.0)) for part in amounts_of_parts]
        rules_by_layer[path] = [
            name for name in Added.__members__ if holds(name, batch, parts, shares)
        ]

    for path, rules in rules_by_layer.items():
        if rules and rule not in rules:
            raise _wrong_rule(path, rules[0], rule, rules_by_layer)
    neither = [path for path, rules in rules_by_layer.items() if not rules]
    if not neither:
        return []
    what = "added to the loss by each micro-batch, neither a mean nor a sum"
    return [f"{what}: {', '.join(neither)}"]


def amounts(model: keras.Model, count: int) -> dict[str, Amounts]:
    """Return the amounts that each layer itself added in the last call, by path.

    What a nested layer added counts for that layer, not for the layer around it.

    Args:
        count: the number of examples of that call.
    """
    amounts_by_path = {}
    seen: set[int] = set()
    # Reversed, a layer comes after those inside it.
    for layer in (*reversed(internals.layers_of(model)), model):
        losses = internals.added_losses(layer)
        own_losses = [loss for loss in losses if id(loss) not in seen]
        seen.update(map(id, own_losses))

        scalars = 0.0
        values = 0.0
        for loss in own_losses:
            total = float(tf.reduce_sum(loss))
            if loss.shape.rank > 0 and loss.shape[0] == count:
                values += total
            else:
                scalars += total
        if own_losses:
            amounts_by_path[layer.path or layer.name] = Amounts(scalars, values)
    return amounts_by_path


def holds(
    rule: str,
    batch: Amounts,
    parts: Sequence[Amounts],
    shares: Sequence[float],
    tolerance: float = 1e-5,
) -> bool:
    """Return whether the amounts of a batch follow by the rule from those of its parts.

    Args:
        shares: the share of the examples that is in each part.
        tolerance: relative to the sum of the parts.
    """
    expected = []
    for part, share in zip(parts, shares, strict=True):
        weight = 1.0 if rule == "sum" else share
        expected.append(part.scalars * weight + part.values)
    size = sum(map(abs, expected)) + 1e-3
    return abs(sum(batch) - sum(expected)) <= tolerance * size


def _amounts_by_range(
    model: keras.Model, x: Any, ranges: Sequence[tuple[int, int]]
) -> list[dict[str, Amounts]]:
    """Return what the layers add for each range of examples, computed in float64."""
    values = [(variable, variable.value) for variable in model.trainable_variables]
    policies = [
        (layer, "dtype_policy", _Float64("float32"))
        for layer in (model, *internals.layers_of(model))
    ]
    amounts_by_range = []
    with (
        internals.replaced(policies),
        keras.StatelessScope(values, collect_losses=True),
    ):
        for start, stop in ranges:
            model(internals.slice_of(x, start, stop), training=False)
            amounts_by_range.append(amounts(model, stop - start))
    return amounts_by_range


def _wrong_rule(
    path: str, right: str, rule: str, rules_by_layer: dict[str, list[str]]
) -> ConfigError:
    """Return the error for a layer that adds by the `right` rule, not by `rule`."""
    message = f"must be {right}, which {path} adds over its batch"
    others = [other for other, rules in rules_by_layer.items() if rules == [rule]]
    if others:
        message += f", while {others[0]} adds a {rule}: one of them has to change"
    return ConfigError(KEY, message, rule)


class _Float64(keras.DTypePolicy):
    """A policy that computes in float64, whatever the precision of the variables."""

    @property
    def compute_dtype(self) -> str:
        return "float64"
