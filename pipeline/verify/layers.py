"""Finds the layer whose output, or whose gradient, for an example depends on the other examples of its batch."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import (
    Objective,
    by_name,
    calling,
    examples_in,
    layers_of,
    parts_of,
    slice_of,
    weighted_sum,
)
from pipeline.components import added_losses
from pipeline.verify.engine import perturbed

_AMOUNTS = ("rate", "stddev", "dropout", "recurrent_dropout")  # arguments of Keras' layers with an amount of noise


@contextmanager
def without_noise(model: keras.Model, but: Collection[keras.Layer] = ()) -> Iterator[list[str]]:
    """Disable the noise of all Keras layers except for `but`; yield the names of the affected layers."""
    found = [
        (layer, name, amount)
        for layer in layers_of(model)
        if layer not in but
        for name in _AMOUNTS
        if isinstance(amount := getattr(layer, name, None), int | float) and amount and _is_noise(layer, name)
    ]
    for layer, name, _ in found:
        setattr(layer, name, 0)
    try:
        yield sorted({layer.name for layer, _, _ in found})
    finally:
        for layer, name, amount in found:
            setattr(layer, name, amount)


def _is_noise(layer: keras.Layer, name: str) -> bool:
    """Return whether the layer draws, and takes `name` as Keras defines it: of one's own it may be anything."""
    of_keras = next(kind for kind in type(layer).__mro__ if kind.__module__.startswith("keras."))
    return _draws(layer) and name in inspect.signature(of_keras.__init__).parameters


def _draws(layer: keras.Layer) -> bool:
    return any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())


@dataclass(frozen=True)
class _Pass:
    """A forward and backward pass of a batch, or of a part of it."""

    layers: list[keras.Layer]  # in order of completion
    inputs: list[list[Any]]  # of each, and
    outputs: list[Any]  # what it returns
    added: added_losses.Amounts
    sums: list[tuple[keras.losses.Loss, Any]]  # Σ wᵢ·lossᵢ of each output
    tape: tf.GradientTape
    target: Any  # Σ of the losses, each divided by its weight in the batch


def culprit(model: keras.Model, loss: Any, batch: Any, micro_batch_size: int, rounding: float = 2.0**-53) -> str:
    """Return the first layer or loss whose value for an example differs between micro-batch and batch, and why.

    `loss` is as an `Update` takes it. Empty if there is none, also with perturbed weights.
    """
    apart = 1e7 * rounding  # of the lowest precision, relative to the largest output: 1e-9 in float64
    state = [(variable, tf.identity(variable.value)) for variable in model.variables]
    of_batch = model, Objective.of(loss), parts_of(batch), micro_batch_size, apart
    try:
        if not (found := _culprit(*of_batch)):
            for variable in model.trainable_variables:
                variable.assign(perturbed(variable))
            found = _culprit(*of_batch)
        return found
    finally:
        for variable, value in state:
            variable.assign(value)


def _culprit(model: keras.Model, objective: Objective, batch: Any, micro_batch_size: int, apart: float) -> str:
    count = int(examples_in(batch[0]))
    cuts = [(start, min(start + micro_batch_size, count)) for start in range(0, count, micro_batch_size)]
    weights: list[Any] = []
    whole, *parts = (_passed(model, objective, slice_of(batch, *cut), weights) for cut in [(0, count), *cuts])
    for index, layer in enumerate(whole.layers):
        if _differs(whole.outputs[index], [part.outputs[index] for part in parts], count, apart):
            return f"{layer.name} ({type(layer).__name__}): {_reason(layer)}"
    shares = [(stop - start) / count for start, stop in cuts]
    rule, found = objective.added_losses, [each.added for each in (whole, *parts)]
    for path in whole.added:
        if not added_losses.holds(rule, path, found, shares, apart):
            return f"{path}: what it adds to the loss is not the {rule} of what its examples add"
    for (term, total), *others in zip(whole.sums, *(part.sums for part in parts), strict=True):
        if abs(float(sum(part for _, part in others) - total)) > apart * max(1, abs(float(total))):
            return f"{term.name} ({type(term).__name__}): its loss of an example depends on the others"
    layer = _backward_culprit(model, whole, parts, count, apart) if whole.sums else None
    return "" if layer is None else f"{layer.name} ({type(layer).__name__}): its gradient for an example depends {_ON}"


_ON = "on the other examples of the micro-batch"


def _backward_culprit(
    model: keras.Model, whole: _Pass, parts: Sequence[_Pass], count: int, apart: float
) -> keras.Layer | None:
    """Return the last layer that is given the same gradients for each example, and passes on or takes others."""
    kept = [index for index, output in enumerate(whole.outputs) if tf.is_tensor(output) and output.dtype.is_floating]
    of_outputs, *of_parts = (
        each.tape.gradient(each.target, [each.outputs[index] for index in kept]) for each in (whole, *parts)
    )
    for place in reversed(range(len(kept))):
        gradients = [of_outputs[place], *(each[place] for each in of_parts)]
        if not any(each is None for each in gradients) and _differs(gradients[0], gradients[1:], count, apart):
            passed = whole.outputs[kept[place]]
            later = list(zip(whole.layers, whole.inputs, strict=True))[kept[place] + 1 :]
            return next((layer for layer, inputs in later if any(each is passed for each in inputs)), None)
    variables = model.trainable_variables
    values = [variable.value for variable in variables]
    expected, *sums = (each.tape.gradient(each.target, values) for each in (whole, *parts))
    dense = [[None if g is None else tf.convert_to_tensor(g) for g in gradients] for gradients in (expected, *sums)]
    for variable, gradient, *terms in zip(variables, *dense, strict=True):
        if gradient is not None and _differs(
            gradient[None], [tf.add_n([term for term in terms if term is not None])[None]], 1, apart
        ):
            owners = (layer for layer in reversed(layers_of(model)) if any(each is variable for each in layer.weights))
            return next(owners, None)
    return None


def _passed(model: keras.Model, objective: Objective, batch: Any, weights: list[Any]) -> _Pass:
    """Run a batch forward; `weights` of the losses are those of the first one that is run."""
    made: list[tuple[keras.Layer, list[Any], Any]] = []

    def recording(layer: keras.Layer) -> Any:
        call = layer.call

        def recorded(*arguments: Any, **options: Any) -> Any:
            output = call(*arguments, **options)
            made.append((layer, tf.nest.flatten((arguments, options)), output))
            return output

        return recorded

    x, y, sample_weight = batch
    with tf.GradientTape(persistent=True) as tape:
        with calling((layer, recording(layer)) for layer in layers_of(model)):
            outputs = model(x, training=True)
        terms = objective.terms(y, by_name(model, outputs), sample_weight)
        sums = [weighted_sum(term.loss, term.y, term.output, term.sample_weight) for term in terms]
        weights += (
            [] if weights else [tf.where(each.weight == 0, tf.ones_like(each.weight), each.weight) for each in sums]
        )
        scaled = zip(sums, terms, weights, strict=True)
        target = sum(each.total * (1 if term.scale is None else term.scale) / weight for each, term, weight in scaled)
    layers, inputs, layer_outputs = map(list, zip(*made, strict=True))
    losses = [(term.loss, each.total) for term, each in zip(terms, sums, strict=True)]
    added = added_losses.amounts(model, int(examples_in(x)))
    return _Pass(layers, inputs, layer_outputs, added, losses, tape, target)


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
    return f"its output for an example depends {_ON}"
