"""Finds the layer whose output for an example depends on the other examples of its batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import by_name, calling, examples_in, layers_of, parts_of, slice_of, terms, weighted_sum

_AMOUNTS = ("rate", "stddev", "dropout", "recurrent_dropout")  # attributes of Keras' layers with an amount of noise


@contextmanager
def without_noise(model: keras.Model, but: Collection[keras.Layer] = ()) -> Iterator[list[str]]:
    """Disable the noise of all Keras layers except for `but`; yield the names of the affected layers."""
    found = [
        (layer, name, amount)
        for layer in layers_of(model)
        if layer not in but
        for name in _AMOUNTS
        if isinstance(amount := getattr(layer, name, None), int | float) and amount and _draws(layer)
    ]
    for layer, name, _ in found:
        setattr(layer, name, 0)
    try:
        yield sorted({layer.name for layer, _, _ in found})
    finally:
        for layer, name, amount in found:
            setattr(layer, name, amount)


def _draws(layer: keras.Layer) -> bool:
    return any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())


def culprit(model: keras.Model, loss: Any, batch: Any, micro_batch_size: int, rounding: float = 2.0**-53) -> str:
    """Return the first layer or loss whose value for an example differs between micro-batch and batch, and why."""
    apart = 1e7 * rounding  # of the lowest precision, relative to the largest output: 1e-9 in float64
    x, y, sample_weight = parts_of(batch)
    count = int(examples_in(x))
    cuts = [(start, min(start + micro_batch_size, count)) for start in range(0, count, micro_batch_size)]
    state = [(variable, tf.identity(variable.value)) for variable in model.variables]
    whole, outputs, added = _recorded(model, x)
    parts = [_recorded(model, slice_of(x, *cut)) for cut in cuts]
    for variable, value in state:
        variable.assign(value)
    for index, (layer, output) in enumerate(whole):
        pieces = [recorded[index][1] for recorded, _, _ in parts]
        if _differs(output, pieces, count, apart):
            return f"{layer.name} ({type(layer).__name__}): {_reason(layer)}"
    shares = [(stop - start) / count for start, stop in cuts]
    for name, value in added.items():
        mean = sum(share * more.get(name, 0) for share, (_, _, more) in zip(shares, parts, strict=True))
        if abs(mean - value) > apart * max(1, abs(value)):
            return f"{name}: what it adds to the loss is not the mean of what its examples add"
    if loss is not None:
        whole_and_parts = [((x, y, sample_weight), outputs)]
        for cut, (_, of_part, _) in zip(cuts, parts, strict=True):
            whole_and_parts.append((slice_of((x, y, sample_weight), *cut), of_part))
        for (given, total), *others in zip(*(_sums(model, loss, *each) for each in whole_and_parts), strict=True):
            if abs(sum(part for _, part in others) - total) > apart * max(1, abs(total)):
                return f"{given.name} ({type(given).__name__}): its loss of an example depends on the others"
    return "no layer and no loss, but the update itself"


def _sums(model: keras.Model, loss: Any, batch: Any, outputs: Any) -> list[tuple[keras.losses.Loss, float]]:
    """Return each loss with the sum of its values over the examples of `batch`."""
    _, y, sample_weight = parts_of(batch)
    found = terms(loss, None, y, by_name(model, outputs), sample_weight)
    return [(t.loss, float(weighted_sum(t.loss, t.y, t.output, t.sample_weight).total)) for t in found]


def _recorded(model: keras.Model, x: Any) -> tuple[list[tuple[keras.Layer, Any]], Any, dict[str, float]]:
    """Return each layer's output in a forward pass in order of completion, the outputs, and each layer's losses."""
    given: list[tuple[keras.Layer, Any]] = []
    layers = layers_of(model)

    def recording(layer: keras.Layer) -> Any:
        call = layer.call

        def recorded(*arguments: Any, **options: Any) -> Any:
            output = call(*arguments, **options)
            given.append((layer, output))
            return output

        return recorded

    with calling((layer, recording(layer)) for layer in layers):
        outputs = model(x, training=True)
    added = {layer.name: float(sum(map(tf.reduce_sum, layer.losses))) for layer in layers if layer.losses}
    return given, outputs, added


def _differs(output: Any, pieces: list[Any], count: int, apart_by: float) -> bool:
    for whole, *parts in zip(tf.nest.flatten(output), *map(tf.nest.flatten, pieces), strict=True):
        if isinstance(whole, tf.RaggedTensor) or not tf.is_tensor(whole) or not whole.dtype.is_floating:
            continue
        if whole.shape.rank == 0 or not whole.shape[0] == count == sum(part.shape[0] for part in parts):
            continue  # not one value per example
        if any(part.shape[1:] != whole.shape[1:] for part in parts):
            return True
        apart = np.abs(np.concatenate(parts) - whole).max(initial=0.0)
        if not apart <= apart_by * max(float(np.abs(whole).max(initial=0.0)), 1e-300):
            return True
    return False


def _reason(layer: keras.Layer) -> str:
    if _draws(layer):
        return "it draws its own noise for every micro-batch"
    if isinstance(layer, keras.layers.BatchNormalization):
        return "it normalises by the mean and the variance of the micro-batch"
    return "its output for an example depends on the other examples of the micro-batch"
