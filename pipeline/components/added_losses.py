"""Checks whether the losses that layers add are means or sums over a batch.

The check computes the added losses for a few examples, and for these examples cut in
two parts. For a sum, the losses of the two parts add up to the loss of the whole; for a
mean, their weighted mean equals it.
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
    """The losses that a layer adds in one call."""

    scalars: float  # sum of the losses that are not per example
    values: float  # sum of the losses that have one value per example


def check(model: keras.Model, x: Any, rule: str) -> list[str]:
    """Check that the losses that layers add are means or sums, as `rule` says.

    The check is skipped if no layer added a loss in the model's last call, if there is
    only one example, or if the model cannot compute in float64.

    Args:
        model: the model, which has been called.
        x: inputs of a few examples.
        rule: `mean` or `sum`.

    Returns:
        One line that names the layers whose losses are neither means nor sums, or an
        empty list if there are none.

    Raises:
        ConfigError: the losses of a layer follow the other rule.
    """
    count = int(internals.examples_in(x))
    if not internals.losses_from_add_loss(model) or count < 2:
        return []
    cut = count - count // 3 - 1  # 7 examples are cut into 4 and 3
    try:
        amounts_of_batch, *amounts_of_parts = _amounts_by_range(
            model, x, [(0, count), (0, cut), (cut, count)]
        )
    except Exception:  # The model cannot compute in float64.
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
    what = "losses that each micro-batch adds and that are neither a mean nor a sum"
    return [f"{what}: {', '.join(neither)}"]


def amounts(model: keras.Model, count: int) -> dict[str, Amounts]:
    """Return the losses that each layer added in the model's last call, by its path.

    The losses of a nested layer are not counted again for the layer that contains it.

    Args:
        model: the model.
        count: number of examples in that call.
    """
    amounts_by_path = {}
    seen: set[int] = set()
    # In reverse order, nested layers come before the layers that contain them.
    for layer in (*reversed(internals.layers_of(model)), model):
        losses = internals.losses_from_add_loss(layer)
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
    """Return whether the losses added for a batch and for its parts fit a rule.

    Per-example losses add up under both rules, so the rule decides only about the
    other losses.

    Args:
        rule: `sum` or `mean`.
        batch: the losses for the whole batch.
        parts: the losses for each part of the batch.
        shares: fraction of the examples in each part.
        tolerance: tolerated difference, relative to the sum of the parts.
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
    """Return the losses that layers add for each range of examples, in float64."""
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
    """Return the error for a layer whose losses follow `right` instead of `rule`.

    Args:
        path: path of the layer.
        right: the rule that its losses follow.
        rule: the rule in the config.
        rules_by_layer: the rules that the losses of each layer follow.
    """
    message = f"must be {right}, since {path} adds a {right} over its batch"
    others = [other for other, rules in rules_by_layer.items() if rules == [rule]]
    if others:
        message += f", while {others[0]} adds a {rule}: one of them has to change"
    return ConfigError(KEY, message, rule)


class _Float64(keras.DTypePolicy):
    """A policy that computes in float64, whatever the precision of the variables."""

    @property
    def compute_dtype(self) -> str:
        return "float64"
