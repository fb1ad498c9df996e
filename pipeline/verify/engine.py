"""Compares an update in micro-batches with that of one batch by Keras: loss, gradients, weights, state, metrics."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import Evaluation, GradientSums, Update, internals
from pipeline.common import nvidia

_array = keras.ops.convert_to_numpy


@dataclass(frozen=True)
class Finding:
    """Relative difference of one quantity, and the bound by which rounding may change it."""

    what: str  # "loss", or the name of a metric or variable
    kind: str  # loss, gradient, weights, state, metric or count
    error: float
    bound: float  # infinite where rounding alone may be as large as the quantity

    @property
    def holds(self) -> bool:
        return bool(self.error <= self.bound)

    @property
    def label(self) -> str:
        return self.what if self.kind == "loss" else f"{self.kind} {self.what}"

    def as_json(self) -> dict[str, Any]:
        apart, rounding = min(self.error, 1e300), min(self.bound, 1e300)
        return {
            "what": f"{self.kind} {self.what}",
            "apart": apart,
            "rounding": rounding,
            "holds": self.holds,
        }


class _Outcome(NamedTuple):
    results: dict[str, float]  # loss, metrics, learning rate and gradient norm
    gradients: list[Any]  # None if the loss does not depend on the variable
    weights: list[Any]
    state: list[Any]  # of all that is not trained
    iterations: int


class _Traced(NamedTuple):
    """Functions of a batch of any size and of any weights: each is traced once for all that is compared."""

    update: Update
    by_keras: Callable[[Any], Any]  # → metrics with the loss, and gradients
    sums: Callable[[Any], GradientSums]
    step: Callable[[Any], dict[str, Any]]
    apply: Callable[[list[Any]], None]  # of gradients


def compare(
    update: Update, batches: Sequence[Any], other_weights: bool = False
) -> list[list[Finding]]:
    """Apply each of `batches` once as a whole and once in micro-batches, from the same weights; return the findings.

    With `other_weights` the last batch is compared once more, with weights near those of the model.

    The reference is Keras: `model.compute_loss` on all examples, one tape, one `optimizer.apply`. If that does not fit
    in memory, the reference is the kernel with micro-batches of one example. Model and optimizer are restored.

    The bound is γ = m·u / (1 − m·u) for the longest sum m that a value results from, relative to the largest terms of
    that sum (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1); below float64 for 8·√m in
    place of m, which holds with high probability (Higham and Mary, A new approach to probabilistic rounding error
    analysis, 2019). The bound of a weight is larger by the slope of the optimizer's step as a function of the gradient.
    """
    measured = {
        id(variable)
        for metric in update.measured.values()
        for variable in metric.variables
    }
    state = [
        v
        for v in [*update.model.variables, *update.optimizer.variables]
        if id(v) not in measured
    ]
    state += [variable for _, variable in internals.unknown_to_keras(update.model)]
    specs = map(
        internals.slice_specs, batches
    )  # which may be padded to different lengths
    of_all = tf.nest.map_structure(
        lambda a, *more: a and a.most_specific_common_supertype(more), *specs
    )
    traced = _traced(update, of_all)

    def run(function: Callable[[_Traced, Any], Any], batch: Any) -> Any:
        with restored(state):
            return function(traced, batch)

    def compared(batches: Sequence[Any]) -> list[list[Finding]]:
        old = [_array(variable) for variable in update.model.trainable_variables]
        wholes = [
            run(_whole, batch) for batch in batches
        ]  # all of them first, since metrics accumulate over updates
        cuts = [run(_cut, batch) for batch in batches]
        limits = [
            (run(_largest_term, batch), _gamma(update, batch)) for batch in batches
        ]
        return [
            list(_findings(update, old, *each))
            for each in zip(wholes, cuts, limits, strict=True)
        ]

    found = compared(batches)
    if other_weights:
        with perturbed(update.model):
            found += compared(batches[-1:])
    return found


@contextmanager
def restored(variables: Iterable[Any]) -> Iterator[None]:
    """Give the variables the values back that they had."""
    before = [(variable, _array(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextmanager
def perturbed(model: keras.Model) -> Iterator[None]:
    """Give the model other weights near its own meanwhile: initial ones may hide a difference, as zeros do."""
    random = np.random.default_rng(0)
    with restored(model.trainable_variables):
        for variable in model.trainable_variables:
            value = _array(variable)
            variable.assign(
                value * random.normal(1, 0.1, value.shape)
                + random.normal(0, 0.01, value.shape)
            )
        yield


def compare_evaluation(evaluation: Evaluation, batch: Any) -> list[Finding]:
    """Evaluate `batch` once as a whole by Keras and once in micro-batches; compare loss and metrics."""
    parts = internals.parts_of(batch)
    _reset_metrics(evaluation)
    whole = tf.function(
        lambda: _by_keras(evaluation, *parts, training=False), autograph=False
    )()
    _reset_metrics(evaluation)
    reached = tf.function(evaluation, autograph=False)(batch).results(
        evaluation.measured
    )
    return [
        replace(each, what=f"val/{each.what}")
        for each in _compared(whole, reached, 1, _gamma(evaluation, batch))
    ]


def unit(update: Update | Evaluation) -> float:
    """Return the unit roundoff of the lowest precision of any layer or loss."""
    names = {
        "float64",
        *(layer.compute_dtype for layer in internals.layers_of(update.model)),
    }
    names |= {
        loss.dtype
        for loss in tf.nest.flatten(update.objective.loss)
        if loss is not None
    }
    return nvidia.unit_roundoff(names)


def examples(batch: Any) -> int:
    """Return the number of examples in a batch."""
    return int(internals.examples_in(batch))


def _traced(update: Update, specs: Any) -> _Traced:
    model, variables = update.model, update.model.trainable_variables

    def by_keras(batch: Any) -> tuple[dict[str, Any], list[Any]]:
        x, *others = internals.parts_of(batch)
        noisy = internals.noisy_layers(model, x) if update.same_noise else []
        with tf.GradientTape() as tape:
            with internals.drawn(
                noisy, internals.keys_of(noisy), 0, internals.examples_in(x)
            ):
                results = _by_keras(update, x, *others, training=True)
            scaled = update.optimizer.scale_loss(results["loss"])
        return results, tape.gradient(
            scaled, [variable.value for variable in variables]
        )

    whole, sums, step = (
        tf.function(each, autograph=False) for each in (by_keras, update.sums, update)
    )
    for each in (whole, sums, step):  # no input signature: it could have no None
        each.get_concrete_function(specs)
    apply = tf.function(
        lambda gradients: update.optimizer.apply(gradients, variables), autograph=False
    )
    return _Traced(update, whole, sums, step, apply)


def _whole(traced: _Traced, batch: Any) -> _Outcome:
    update = traced.update
    _reset_metrics(update)

    try:
        results, gradients = traced.by_keras(batch)
    except (tf.errors.ResourceExhaustedError, MemoryError):
        parts = update.model, update.objective, update.optimizer, 1
        single = Update(*parts, same_noise=update.same_noise, hold_statistics=False)
        sums = tf.function(single.sums, autograph=False)(batch)
        results, gradients = {"loss": sums.mean_loss()}, sums.gradients()
    arrays = _arrays(gradients)
    square = sum(float(np.square(array).sum()) for array in arrays if array is not None)
    results["gradient_norm"] = math.sqrt(square) / float(
        update.optimizer.scale_loss(tf.ones(()))
    )
    results["learning_rate"] = _array(update.optimizer.learning_rate)
    traced.apply([None if array is None else tf.constant(array) for array in arrays])
    return _outcome(update, results, arrays)


def _reset_metrics(of: Update | Evaluation) -> None:
    of.model.reset_metrics()
    for metric in of.measured.values():
        metric.reset_state()


def _by_keras(
    of: Update | Evaluation, x: Any, y: Any, sample_weight: Any, *, training: bool
) -> dict[str, Any]:
    """Return Keras' metrics of a batch, without those for which masks are handled differently here, and the loss."""
    outputs = of.model(x, training=training)
    y, sample_weight = _as_outputs(of, outputs, y, sample_weight)
    loss = of.model.compute_loss(x, y, outputs, sample_weight, training=training)
    results = (
        {} if y is None else of.model.compute_metrics(x, y, outputs, sample_weight)
    )
    masked = any(
        internals.mask_of(output) is not None for output in tf.nest.flatten(outputs)
    )
    means = (
        keras.metrics.MeanMetricWrapper
    )  # `fit` weights no other metric by a mask: see docs/exact.md
    left_out = {
        name
        for name, metric in of.measured.items()
        if masked and not isinstance(metric, means)
    }
    return {
        name: each for name, each in results.items() if name not in {"loss", *left_out}
    } | {"loss": loss}


def _as_outputs(
    update: Update | Evaluation, outputs: Any, y: Any, sample_weight: Any
) -> tuple[Any, Any]:
    """Return labels and sample weights in the structure of the outputs; None for an output without, as in Keras."""
    names = list(internals.by_name(update.model, outputs))
    if len(names) < 2 or y is None:
        return y, sample_weight
    labels = internals.labels_by_name(update.objective.loss, y, names)
    weights = internals.spread(sample_weight, names, to_all=True)
    in_order = ([given.get(name) for name in names] for given in (labels, weights))
    packed, packed_weights = (
        keras.tree.pack_sequence_as(outputs, leaves) for leaves in in_order
    )
    return packed, packed_weights if keras.tree.is_nested(
        sample_weight
    ) else sample_weight


def _cut(traced: _Traced, batch: Any) -> _Outcome:
    model = traced.update.model
    with restored([*model.non_trainable_variables, *_untrained(model)]):  # seeds too
        sums = traced.sums(batch)
    return _outcome(traced.update, traced.step(batch), _arrays(sums.gradients()))


def _outcome(
    update: Update, results: Mapping[str, Any], gradients: list[Any]
) -> _Outcome:
    numbers = {name: float(value) for name, value in results.items()}
    weights, state = (
        _arrays(update.model.trainable_variables),
        _arrays(_untrained(update.model)),
    )
    return _Outcome(
        numbers, gradients, weights, state, int(_array(update.optimizer.iterations))
    )


def _untrained(model: keras.Model) -> list[Any]:
    """Return the variables that forward passes alone change, without those of metrics and without seeds."""
    found = [
        *model.non_trainable_weights,
        *(variable for _, variable in internals.unknown_to_keras(model)),
    ]
    return [
        variable
        for variable in found
        if tf.as_dtype(variable.dtype) not in (tf.uint32, tf.string)
    ]


def _largest_term(traced: _Traced, batch: Any) -> float:
    """Return the largest element of the gradient of one example: in the sum over a batch they may cancel."""
    sums = traced.sums(internals.slice_of(batch, 0, 1))
    return max(_most(array) for array in _arrays(sums.gradients()) if array is not None)


def _gamma(update: Update | Evaluation, batch: Any) -> float:
    layers = 1 + len(
        {
            variable.path.rpartition("/")[0]
            for variable in update.model.trainable_variables
        }
    )
    widest = max(
        int(np.prod(variable.shape)) for variable in update.model.trainable_variables
    )
    leaves = [
        leaf for leaf in tf.nest.flatten(internals.parts_of(batch)) if leaf is not None
    ]
    dense = [
        leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else leaf
        for leaf in leaves
    ]
    terms = 2 * layers * widest + sum(
        int(tf.size(leaf)) for leaf in dense
    )  # at most, one after the other
    rounding = unit(update)
    gamma = min(
        (terms if rounding < 2.0**-50 else 8 * math.sqrt(terms)) * rounding, 0.5
    )
    return gamma / (1 - gamma)


def _compared(
    expected: Mapping[str, Any], reached: Mapping[str, Any], scale: float, gamma: float
) -> Iterator[Finding]:
    """Compare the loss, relative to `scale` where it is smaller, and the metrics."""
    for name, value in ((name, float(value)) for name, value in expected.items()):
        kind, least = ("loss", scale) if name == "loss" else ("metric", 1)
        apart = abs(float(reached.get(name, math.inf)) - value) / max(abs(value), least)
        yield Finding(name, kind, apart, gamma)


def _findings(
    update: Update,
    old: Sequence[Any],
    whole: _Outcome,
    cut: _Outcome,
    limits: tuple[float, float],
) -> Iterator[Finding]:
    (largest, gamma), rounding = limits, unit(update)
    scale = max(
        [
            1e-300,
            largest,
            *(_most(gradient) for gradient in whole.gradients if gradient is not None),
        ]
    )
    yield from _compared(whole.results, cut.results, scale, gamma)
    yield Finding(
        "updates", "count", float(abs(cut.iterations - whole.iterations)), 0.0
    )
    for variable, expected, reached in zip(
        _untrained(update.model), whole.state, cut.state, strict=True
    ):
        apart = _most(reached.astype("float64") - expected) / max(_most(expected), 1)
        yield Finding(getattr(variable, "path", variable.name), "state", apart, gamma)
    variables = update.model.trainable_variables
    sides = zip(
        variables,
        old,
        whole.gradients,
        cut.gradients,
        whole.weights,
        cut.weights,
        strict=True,
    )
    for variable, start, expected, gradient, aimed, reached in sides:
        if expected is None or gradient is None:
            apart = 0.0 if expected is None and gradient is None else math.inf
            yield Finding(variable.path, "gradient", apart, gamma)
            continue
        yield Finding(
            variable.path, "gradient", _most(gradient - expected) / scale, gamma
        )
        start, aimed, reached = (
            np.asarray(each, "float64") for each in (start, aimed, reached)
        )
        step = max(_most(aimed - start), 1e-300)
        # An optimizer that divides by the gradient's magnitude turns its relative error into one of the step, which is
        # large for a small gradient. If the gradient is only rounding, so is the step.
        steeper = scale / np.maximum(np.abs(expected), 1e-300, dtype="float64")
        bounds = np.where(
            steeper * gamma < 2e-2,
            10 * gamma * steeper + (1 + np.abs(aimed) / step) * rounding,
            np.inf,
        )
        apart_by = np.abs(reached - aimed) / step
        if apart_by.size:
            worst = np.unravel_index(
                np.argmax(np.where(bounds < np.inf, apart_by / bounds, -1)),
                apart_by.shape,
            )
            yield Finding(
                variable.path, "weights", float(apart_by[worst]), float(bounds[worst])
            )


def _arrays(values: Iterable[Any]) -> list[Any]:
    return [
        None if value is None else _array(tf.convert_to_tensor(value))
        for value in values
    ]


def _most(values: Any) -> float:
    return float(np.abs(values).max(initial=0.0))
