"""Finds the layer whose output, or whose gradient, for an example depends on the other examples of its batch."""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation.internals import (
    Objective,
    by_name,
    calling,
    layers_of,
    parts_of,
    replaced,
    slice_of,
    weighted_sum,
)
from pipeline.components import added_losses
from pipeline.verify.engine import examples, perturbed, restored

_ON = "on the other examples of the micro-batch"
_AMOUNTS = (
    "rate",
    "stddev",
    "dropout",
    "recurrent_dropout",
)  # arguments of Keras' layers with an amount of noise


@contextmanager
def without_noise(
    model: keras.Model, but: Collection[keras.Layer] = ()
) -> Iterator[list[str]]:
    """Disable the noise of all Keras layers except for `but`; yield the names of the affected layers."""
    places = (
        (layer, name)
        for layer in layers_of(model)
        if layer not in but
        for name in _AMOUNTS
    )
    found = [(layer, name, 0) for layer, name in places if _is_noise(layer, name)]
    with replaced(found):
        yield sorted({layer.name for layer, _, _ in found})


def _is_noise(layer: keras.Layer, name: str) -> bool:
    """Return whether the layer draws noise of an amount `name`, as Keras defines it: a user's own may be anything."""
    if not isinstance(amount := getattr(layer, name, None), int | float) or amount == 0:
        return False
    of_keras = next(
        kind for kind in type(layer).__mro__ if kind.__module__.startswith("keras.")
    )
    return _draws(layer) and name in inspect.signature(of_keras).parameters


def _draws(layer: keras.Layer) -> bool:
    return any(
        isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values()
    )


def culprit(
    model: keras.Model,
    loss: Any,
    batch: Any,
    micro_batch_size: int,
    rounding: float = 2.0**-53,
) -> str:
    """Return the first layer or loss whose value for an example depends on the cut, and why; empty if there is none."""
    count, apart = (
        examples(batch),
        1e7 * rounding,
    )  # of the lowest precision: 1e-9 in float64
    cuts = [
        (start, min(start + micro_batch_size, count))
        for start in range(0, count, micro_batch_size)
    ]
    for weights in (nullcontext(), perturbed(model)):
        divisors: list[Any] = []  # of the losses: the weights of the whole batch
        with weights, restored(model.variables):
            of_batch = model, Objective.of(loss), parts_of(batch), divisors
            found = [_observed(*of_batch, *cut, count) for cut in [(0, count), *cuts]]
        for (why, of_examples, whole), *parts in zip(*found, strict=True):
            if (_differs if of_examples else _is_other_sum)(
                whole, [part for *_, part in parts], apart
            ):
                return why
    return ""


def _observed(
    model: keras.Model,
    objective: Objective,
    batch: Any,
    divisors: list[Any],
    start: int,
    stop: int,
    count: int,
) -> list[tuple[str, bool, Any]]:
    """Return what a part of the batch gives, in the order in which a fault shows.

    Each is the fault that it would show, whether it has a row for each example, and a value; without rows, the values
    of the parts sum to that of the batch.
    """
    made: list[
        tuple[keras.Layer, list[Any], Any]
    ] = []  # layer, inputs and outputs, in order of completion

    def recorded(
        layer: keras.Layer, call: Callable[..., Any], /, *arguments: Any, **options: Any
    ) -> Any:
        output = call(*arguments, **options)
        made.append((layer, tf.nest.flatten((arguments, options)), output))
        return output

    x, y, sample_weight = slice_of(batch, start, stop)
    with tf.GradientTape() as tape:
        with calling(
            (layer, partial(recorded, layer, layer.call)) for layer in layers_of(model)
        ):
            outputs = model(x, training=True)
        terms = objective.of_micro_batch().terms(
            y, by_name(model, outputs), sample_weight
        )
        sums = [
            weighted_sum(term.loss, term.y, term.output, term.sample_weight)
            for term in terms
        ]
        divisors += [] if divisors else [each.weight or 1.0 for each in sums]
        parts = zip(terms, sums, divisors, strict=True)
        scaled = (
            (1.0 if t.scale is None else t.scale) * tf.cast(each.total / by, tf.float64)
            for t, each, by in parts
        )
        target = sum(scaled, tf.zeros((), tf.float64))
    found = [
        (f"{_named(layer)}: {_reason(layer)}", True, output)
        for layer, _, output in made
    ]
    for path, (scalars, values) in added_losses.amounts(model, stop - start).items():
        why = f"{path}: what it adds to the loss is not the {objective.added_losses} of what its examples add"
        share = (stop - start) / count if objective.added_losses == "mean" else 1
        found.append((why, False, tf.constant(scalars * share + values)))
    why = "its loss of an example depends on the others"
    found += [
        (f"{_named(term.loss)}: {why}", False, each.total)
        for term, each in zip(terms, sums, strict=True)
    ]
    why = f"its gradient for an example depends {_ON}"
    passed: list[tuple[str, bool, Any]] = []  # from one layer to another
    for place, (_, _, output) in enumerate(made):
        takers = (
            layer
            for layer, inputs, _ in made[place + 1 :]
            if any(each is output for each in inputs)
        )
        if (
            tf.is_tensor(output)
            and output.dtype.is_floating
            and (taker := next(takers, None)) is not None
        ):
            passed.insert(0, (f"{_named(taker)}: {why}", True, output))
    for layer in reversed(layers_of(model)):
        passed += [
            (f"{_named(layer)}: {why}", False, variable.value)
            for variable in layer.trainable_variables
        ]
    gradients = tape.gradient(
        target, [each for *_, each in passed], unconnected_gradients="zero"
    )
    return [
        *found,
        *(
            (*fault, tf.convert_to_tensor(g))
            for (*fault, _), g in zip(passed, gradients, strict=True)
        ),
    ]


def _named(thing: Any) -> str:
    return f"{thing.name} ({type(thing).__name__})"


def _is_other_sum(whole: Any, parts: list[Any], apart_by: float) -> bool:
    terms = sum(np.abs(part).max(initial=0.0) for part in parts)
    return not np.abs(whole - sum(parts)).max(initial=0.0) <= apart_by * (terms + 1e-3)


def _differs(output: Any, pieces: list[Any], apart_by: float) -> bool:
    for whole, *parts in zip(
        tf.nest.flatten(output), *map(tf.nest.flatten, pieces), strict=True
    ):
        if (
            isinstance(whole, tf.RaggedTensor)
            or not tf.is_tensor(whole)
            or not whole.dtype.is_floating
        ):
            continue
        if whole.shape.rank == 0 or whole.shape[0] != sum(
            part.shape[0] for part in parts
        ):
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
