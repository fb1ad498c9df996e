"""Whether what layers add to the loss is a mean or a sum over their batch: a few examples in two cuts show it."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import internals
from pipeline.common.errors import ConfigError
from pipeline.config.schema import Added

Amounts = dict[
    str, tuple[float, float]
]  # by the layer's path: what it adds as scalars, and as values of examples


def check(model: keras.Model, x: Any, rule: str) -> list[str]:
    """Refuse the rule where the other one is right; return a line about the layers for which none is.

    Nothing is computed for a model that has added nothing in its last call.
    """
    count = int(internals.examples_in(x))
    if not internals.added_losses(model) or count < 2:
        return []
    cuts = [(0, count), (0, count - count // 3 - 1), (count - count // 3 - 1, count)]
    found = list[Amounts]()
    try:
        values = [(variable, variable.value) for variable in model.trainable_variables]
        policies = [
            (layer, "dtype_policy", _Float64("float32"))
            for layer in (model, *internals.layers_of(model))
        ]
        with (
            internals.replaced(policies),
            keras.StatelessScope(values, collect_losses=True),
        ):
            for start, stop in cuts:
                model(internals.slice_of(x, start, stop), training=False)
                found.append(amounts(model, stop - start))
    except Exception:  # it computes in its own precision alone
        return []
    shares = [(stop - start) / count for start, stop in cuts[1:]]
    fitting = {
        path: [each for each in Added.__members__ if holds(each, path, found, shares)]
        for path in found[0]
    }
    for path, rules in fitting.items():
        if rules and rule not in rules:
            others = [other for other, theirs in fitting.items() if theirs == [rule]]
            but = (
                f", while {others[0]} adds a {rule}: one of them has to change"
                if others
                else ""
            )
            right = f"must be {rules[0]}, which {path} adds over its batch{but}"
            raise ConfigError("training.added_losses", right, rule)
    neither = [path for path, rules in fitting.items() if not rules]
    return [
        f"added to the loss by each micro-batch, neither a mean nor a sum: {', '.join(neither)}"
    ] * bool(neither)


def amounts(model: keras.Model, count: int) -> Amounts:
    """Return what each layer has itself added in the last call, of `count` examples."""
    found, seen = Amounts(), set[int]()
    for layer in (
        *reversed(internals.layers_of(model)),
        model,
    ):  # a layer comes after those inside of it
        own = [
            value for value in internals.added_losses(layer) if id(value) not in seen
        ]
        seen |= set(map(id, own))
        sums = [0.0, 0.0]
        for value in own:
            sums[value.shape.rank > 0 and value.shape[0] == count] += float(
                tf.reduce_sum(value)
            )
        if own:
            found[layer.path or layer.name] = (sums[0], sums[1])
    return found


def holds(
    rule: str,
    path: str,
    found: Sequence[Amounts],
    shares: Sequence[float],
    apart: float = 1e-5,
) -> bool:
    """Return whether a layer adds to a batch, the first found, what the rule makes of its parts, the others."""
    whole, *parts = (each.get(path, (0.0, 0.0)) for each in found)
    of_parts = [
        a * (1 if rule == "sum" else share) + b
        for (a, b), share in zip(parts, shares, strict=True)
    ]
    return abs(sum(whole) - sum(of_parts)) <= apart * (sum(map(abs, of_parts)) + 1e-3)


class _Float64(keras.DTypePolicy):
    """Computes in float64, whatever the precision of the variables."""

    @property
    def compute_dtype(self) -> str:
        return "float64"
