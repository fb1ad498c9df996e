"""Finds the layer or loss whose value for an example depends on the micro-batch.

The cut is the division of a batch into micro-batches.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation.internals import (
    Objective,
    Term,
    by_name,
    calling,
    is_absent,
    layers_of,
    parts_of,
    replaced,
    slice_of,
    untracked_variables,
    weighted_sum,
)
from pipeline.components import added_losses
from pipeline.verify.engine import examples, perturbed, restored

STATE_CHANGES = "it is updated in every forward pass, so once per micro-batch"

_ON_OTHERS = "on the other examples of the micro-batch"
_OUTPUT_DEPENDS = f"its output for an example depends {_ON_OTHERS}"
_STATE_MATTERS = (
    "its output depends on a state that it updates in every forward pass, so once per "
    "micro-batch"
)
_GRADIENT_DEPENDS = f"its gradient for an example depends {_ON_OTHERS}"
_LOSS_DEPENDS = "its loss for an example depends on the other examples"
_LOSS_GRADIENT_DEPENDS = (
    "the gradient of its loss for an example depends on the other examples"
)
_REGULARIZER_CHANGES = "its regularizer has a different value in each call"

# Arguments of Keras layers that set an amount of noise.
_NOISE_ARGUMENTS = ("rate", "stddev", "dropout", "recurrent_dropout")


@dataclass(frozen=True)
class _LayerCall:
    """One call of a layer in a forward pass."""

    layer: keras.Layer
    inputs: list[Any]
    output: Any


@dataclass(frozen=True)
class _LossSums:
    """The sums from which the loss of one output over a part of a batch is computed."""

    term: Term
    total: Any
    weight: Any


@dataclass(frozen=True)
class _Observation:
    """A value computed for a part of a batch: for a micro-batch or the whole batch."""

    fault: str  # the fault to report if the cut changes the value
    value: Any
    has_rows: bool  # True: one row per example; False: values of parts are summed


@contextmanager
def without_noise(
    model: keras.Model, excluded: Collection[keras.Layer] = ()
) -> Iterator[list[str]]:
    """Disable the noise of Keras layers, except `excluded` ones, in the `with` block.

    Yield the names of the layers whose noise is disabled.
    """
    changes = []
    for layer in layers_of(model):
        if layer in excluded:
            continue
        for argument in _NOISE_ARGUMENTS:
            if _is_noise(layer, argument):
                changes.append((layer, argument, 0))

    with replaced(changes):
        yield sorted({layer.name for layer, _, _ in changes})


def culprit(
    model: keras.Model,
    loss: Any,
    batch: Any,
    micro_batch_size: int,
    rounding: float = 2.0**-53,
) -> str:
    """Return the first layer or loss whose value for an example depends on the cut.

    Args:
        model: a built model, whose variables are restored at the end.
        loss: the loss, in a form that `Update` accepts.
        batch: an effective batch.
        micro_batch_size: the number of examples per micro-batch.
        rounding: the unit roundoff of the lowest precision of any layer or loss.

    Returns:
        The name of the layer or loss and the reason why it depends on the cut, or an
        empty string if there is none.
    """
    count = examples(batch)
    parts = [(0, count)]
    for start in range(0, count, micro_batch_size):
        parts.append((start, min(start + micro_batch_size, count)))
    tolerance = 1e7 * rounding  # 1e-9 in float64
    variables = list(model.variables)
    variables += [variable for _, variable in untracked_variables(model)]

    for weights in (nullcontext(), perturbed(model)):
        observer = _Observer(model, Objective.from_loss(loss), batch)
        with weights:
            with restored(variables):
                observations = [observer.observe(start, stop) for start, stop in parts]
            number = _first_differing(observations, tolerance)
            if number is None:
                continue
            fault = observations[0][number].fault
            if not fault.endswith(_OUTPUT_DEPENDS):
                return fault

            # Compute each part from the same state: an output that no longer differs
            # depends on the state, not on other examples.
            observations = []
            for start, stop in parts:
                with restored(variables):
                    observations.append(observer.observe(start, stop))
            if _first_differing(observations, tolerance) == number:
                return fault
            return fault.replace(_OUTPUT_DEPENDS, _STATE_MATTERS)
    return ""


def _first_differing(
    observations: Sequence[Sequence[_Observation]], tolerance: float
) -> int | None:
    """Return the index of the first value that the cut changes, or None.

    Args:
        observations: those of the whole batch, then those of each micro-batch.
        tolerance: the relative difference up to which values are equal.
    """
    for number, (of_batch, *of_micro_batches) in enumerate(
        zip(*observations, strict=True)
    ):
        values = [observation.value for observation in of_micro_batches]
        if of_batch.has_rows:
            differs = _has_other_rows(of_batch.value, values, tolerance)
        else:
            differs = _is_other_sum(of_batch.value, values, tolerance)
        if differs:
            return number
    return None


class _Observer:
    """Runs parts of a batch forward and backward, and records their values."""

    def __init__(self, model: keras.Model, objective: Objective, batch: Any):
        self._model = model
        self._objective = objective
        self._batch = parts_of(batch)
        self._count = examples(batch)
        # Divisors for the losses of all parts: the weights of the whole batch, so that
        # the losses of the parts sum to the loss of the batch.
        self._divisors: list[Any] | None = None

    def observe(self, start: int, stop: int) -> list[_Observation]:
        """Return the observations of a part, in the order in which to check them.

        The first call has to be for the whole batch.
        """
        x, y, sample_weight = slice_of(self._batch, start, stop)
        with tf.GradientTape(persistent=True) as tape:
            outputs, calls = _call_recorded(self._model, x)
            losses = self._losses(y, outputs, sample_weight)
            if self._divisors is None:
                self._divisors = [_divisor(loss.weight) for loss in losses]
            target = self._target(losses, self._divisors)

        observations = []
        for call in calls:
            fault = f"{_named(call.layer)}: {_reason(call.layer)}"
            observations.append(_Observation(fault, call.output, has_rows=True))
        observations += self._added_losses(stop - start)
        observations += self._regularizers((stop - start) / self._count)
        for loss in losses:
            fault = f"{_named(loss.term.loss)}: {_LOSS_DEPENDS}"
            observations.append(_Observation(fault, loss.total, has_rows=False))
        observations += _gradients_of_losses(tape, losses)
        return observations + self._gradients(tape, target, calls)

    def _losses(self, y: Any, outputs: Any, sample_weight: Any) -> list[_LossSums]:
        objective = self._objective.of_micro_batch()
        outputs = by_name(self._model, outputs)
        losses = []
        for term in objective.terms(y, outputs, sample_weight):
            sums = weighted_sum(term.loss, term.y, term.output, term.sample_weight)
            losses.append(_LossSums(term, sums.total, sums.weight))
        return losses

    def _target(self, losses: Sequence[_LossSums], divisors: Sequence[Any]) -> Any:
        """Return the contribution of the part to the loss of the whole batch."""
        target = tf.zeros((), tf.float64)
        for loss, divisor in zip(losses, divisors, strict=True):
            scale = loss.term.scale
            if scale is None:
                scale = 1.0
            target += scale * tf.cast(loss.total / divisor, tf.float64)
        return target

    def _added_losses(self, count: int) -> list[_Observation]:
        """Return the losses that each layer adds for a part of `count` examples.

        Added scalars that are means are weighted by the part's share of the batch.
        """
        rule = self._objective.added_losses
        share = 1.0
        if rule == "mean":
            share = count / self._count

        observations = []
        amounts_by_path = added_losses.amounts(self._model, count)
        for path, (of_scalars, of_examples) in amounts_by_path.items():
            fault = (
                f"{path}: what it adds to the loss for a batch is not the {rule} "
                "of what it adds for each example"
            )
            value = tf.constant(of_scalars * share + of_examples)
            observations.append(_Observation(fault, value, has_rows=False))
        return observations

    def _regularizers(self, share: float) -> list[_Observation]:
        """Return each weight's regularization penalty, times the part's `share`."""
        observations = []
        for variable in self._model.trainable_variables:
            if variable.regularizer is not None:
                fault = f"{variable.path}: {_REGULARIZER_CHANGES}"
                value = tf.convert_to_tensor(variable.regularizer(variable)) * share
                observations.append(_Observation(fault, value, has_rows=False))
        return observations

    def _gradients(
        self, tape: tf.GradientTape, target: Any, calls: Sequence[_LayerCall]
    ) -> list[_Observation]:
        """Return the gradients with respect to layer outputs, then to weights.

        Both are ordered from the last layer to the first. If the gradient for an output
        that one layer passes to another depends on the cut, the receiving layer is at
        fault.
        """
        sources = []
        for call, taker in _passed_on(calls):
            fault = f"{_named(taker)}: {_GRADIENT_DEPENDS}"
            sources.append(_Observation(fault, call.output, has_rows=True))
        sources.reverse()
        for layer in reversed(layers_of(self._model)):
            fault = f"{_named(layer)}: {_GRADIENT_DEPENDS}"
            for variable in layer.trainable_variables:
                sources.append(_Observation(fault, variable.value, has_rows=False))

        gradients = tape.gradient(
            target,
            [source.value for source in sources],
            unconnected_gradients="zero",
        )
        observations = []
        for source, gradient in zip(sources, gradients, strict=True):
            value = tf.convert_to_tensor(gradient)
            observations.append(_Observation(source.fault, value, source.has_rows))
        return observations


def _gradients_of_losses(
    tape: tf.GradientTape, losses: Sequence[_LossSums]
) -> list[_Observation]:
    """Return the gradient of each loss with respect to the output of the model.

    Gradients reveal faults that sums hide. For example, a loss that is divided by its
    mean over the micro-batch has the same sum for any cut, but different gradients.
    """
    observations = []
    for loss in losses:
        output = loss.term.output
        if not tf.is_tensor(output) or not output.dtype.is_floating:
            continue
        gradient = tape.gradient(loss.total, output, unconnected_gradients="zero")
        fault = f"{_named(loss.term.loss)}: {_LOSS_GRADIENT_DEPENDS}"
        observations.append(_Observation(fault, gradient, has_rows=True))
    return observations


def _call_recorded(model: keras.Model, x: Any) -> tuple[Any, list[_LayerCall]]:
    """Call the model; return its outputs, and the layers' calls in order of completion.

    A layer completes its call after the layers that it calls itself.
    """
    calls: list[_LayerCall] = []

    def record(
        layer: keras.Layer, call: Callable[..., Any], /, *arguments: Any, **options: Any
    ) -> Any:
        output = call(*arguments, **options)
        inputs = tf.nest.flatten((arguments, options))
        calls.append(_LayerCall(layer, inputs, output))
        return output

    recording = []
    for layer in layers_of(model):
        recording.append((layer, partial(record, layer, layer.call)))
    with calling(recording):
        return model(x, training=True), calls


def _passed_on(
    calls: Sequence[_LayerCall],
) -> Iterator[tuple[_LayerCall, keras.Layer]]:
    """Yield each call whose output is passed to a later layer, with that layer.

    If several layers receive the output, the first one called is yielded. Outputs that
    are not floating-point tensors are skipped.
    """
    for number, call in enumerate(calls, start=1):
        if not tf.is_tensor(call.output) or not call.output.dtype.is_floating:
            continue
        for later in calls[number:]:
            if any(value is call.output for value in later.inputs):
                yield call, later.layer
                break


def _is_noise(layer: keras.Layer, argument: str) -> bool:
    """Return whether `argument` is the nonzero amount of noise that the layer draws.

    The nearest base class from Keras has to define the argument, since an argument that
    only a user's own layer defines may have any meaning.
    """
    amount = getattr(layer, argument, None)
    if not isinstance(amount, int | float) or amount == 0:
        return False
    for kind in type(layer).__mro__:
        if kind.__module__.startswith("keras."):
            parameters = inspect.signature(kind).parameters
            return argument in parameters and _draws(layer)
    return False


def _draws(layer: keras.Layer) -> bool:
    values = vars(layer).values()
    return any(isinstance(value, keras.random.SeedGenerator) for value in values)


def _divisor(weight: Any) -> Any:
    """Return `weight`, or 1 if there is none, as for the reduction `sum`, or it is 0."""
    if is_absent(weight) or weight == 0:
        return 1.0
    return weight


def _is_other_sum(of_batch: Any, of_parts: list[Any], tolerance: float) -> bool:
    """Return whether the values of the parts do not sum to that of the batch.

    NaN always counts as different.
    """
    terms = sum(np.abs(part).max(initial=0.0) for part in of_parts)
    apart = np.abs(of_batch - sum(of_parts)).max(initial=0.0)
    return not apart <= tolerance * (terms + 1e-3)


def _has_other_rows(of_batch: Any, of_parts: list[Any], tolerance: float) -> bool:
    """Return whether an example has a different output in a part than in the batch."""
    leaves_of_parts = [tf.nest.flatten(part) for part in of_parts]
    for leaf, *parts in zip(tf.nest.flatten(of_batch), *leaves_of_parts, strict=True):
        if isinstance(leaf, tf.RaggedTensor) or not tf.is_tensor(leaf):
            continue
        if leaf.dtype.is_floating and _leaf_has_other_rows(leaf, parts, tolerance):
            return True
    return False


def _leaf_has_other_rows(
    of_batch: tf.Tensor, of_parts: list[tf.Tensor], tolerance: float
) -> bool:
    has_rows = of_batch.shape.rank > 0
    if not has_rows or of_batch.shape[0] != sum(part.shape[0] for part in of_parts):
        return False  # the output does not have one row per example

    if any(part.shape[1:] != of_batch.shape[1:] for part in of_parts):
        return True
    largest = max(float(np.abs(of_batch).max(initial=0.0)), 1e-300)
    apart = np.abs(np.concatenate(of_parts) - of_batch).max(initial=0.0)
    return not apart <= tolerance * largest  # NaN differs


def _named(thing: Any) -> str:
    return f"{thing.name} ({type(thing).__name__})"


def _reason(layer: keras.Layer) -> str:
    """Return the reason why the output of a layer may depend on the cut."""
    if _draws(layer):
        return "it draws its own noise for every micro-batch"
    if isinstance(layer, keras.layers.BatchNormalization):
        return "it normalizes with the mean and the variance of the micro-batch"
    return _OUTPUT_DEPENDS
