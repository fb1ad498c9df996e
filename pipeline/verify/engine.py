"""Compares an update in micro-batches with that of one batch by Keras: loss, gradients, weights, state, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import (
    Evaluation,
    Update,
    accumulate_gradients,
    by_name,
    drawn,
    examples_in,
    keys_of,
    labels_by_name,
    layers_of,
    mask_of,
    noisy_layers,
    parts_of,
    slice_of,
    slice_specs,
    spread,
    unknown_to_keras,
)


@dataclass(frozen=True)
class Finding:
    """Relative difference of one quantity, and the bound by which rounding may change it."""

    what: str  # "loss", or the name of a metric or variable
    kind: str  # loss, gradient, weights, state, metric or count
    error: float
    bound: float  # infinite where rounding alone may be as large as the quantity: it proves nothing

    @property
    def holds(self) -> bool:
        return bool(self.error <= self.bound)

    @property
    def excess(self) -> float:
        return self.error / max(self.bound, 1e-300)

    def as_json(self) -> dict[str, Any]:
        apart, rounding = min(self.error, 1e300), min(self.bound, 1e300)
        return {"what": f"{self.kind} {self.what}", "apart": apart, "rounding": rounding, "holds": self.holds}


@dataclass(frozen=True)
class _Outcome:
    """The results of one update."""

    loss: float
    gradients: list[Any]  # None if the loss does not depend on the variable
    weights: list[Any]
    state: list[Any]  # of all that is not trained
    iterations: int
    results: dict[str, float]  # metrics, and the learning rate
    largest_term: float = 0.0  # of the gradient: the largest element of that of an example


def compare(update: Update, batches: Sequence[Any]) -> list[list[Finding]]:
    """Apply each of `batches` once as a whole and once in micro-batches, from the same weights; return the findings.

    The last one is applied from perturbed weights as well, as initial ones may hide a difference: zeros behind zeros.
    The reference is Keras: `model.compute_loss` on all examples, one tape, one `optimizer.apply`. If that does not fit
    in memory, the reference is the kernel with micro-batches of one example. Model and optimizer are restored.

    The bound is γ = m·u / (1 − m·u) for the longest sum m that a value results from, relative to the largest terms of
    that sum (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). Below float64 it is for 8·√m
    in place of m, which holds with a high probability (Higham and Mary, A new approach to probabilistic rounding error
    analysis, 2019). The bound of a weight is larger by the slope of the optimizer's step as a function of the gradient.
    """
    measured = {id(variable) for metric in update.measured.values() for variable in metric.variables}
    of_keras = [v for v in [*update.model.variables, *update.optimizer.variables] if id(v) not in measured]
    state = [*of_keras, *(variable for _, variable in unknown_to_keras(update.model))]
    trained, batches = update.model.trainable_variables, [parts_of(batch) for batch in batches]
    initial = [_array(variable) for variable in state]
    places = {id(variable): place for place, variable in enumerate(state)}
    other = list(initial)
    for variable in trained:
        other[places[id(variable)]] = perturbed(variable)
    cases = [*((batch, initial) for batch in batches), (batches[-1], other)]

    def run(outcome: Callable[[Any], Any]) -> list[Any]:
        found = []
        for batch, values in cases:
            _assign(state, values)
            found.append(outcome(batch))
        _assign(state, initial)
        return found

    wholes, cuts = run(_whole(update, batches[0])), run(_cut(update, batches[0]))
    terms = [_longest_sum(update, batch) for batch in batches]
    starts = [[values[places[id(variable)]] for variable in trained] for _, values in cases]
    of_cases = zip(starts, wholes, cuts, [*terms, terms[-1]], strict=True)
    found = [_findings(update, *each) for each in of_cases]
    return found if math.isfinite(wholes[-1].loss) else found[:-1]  # not every weight can be perturbed


def perturbed(variable: keras.Variable) -> Any:
    """Return other values for a variable, near its own."""
    value, random = _array(variable), np.random.default_rng(0)
    return (value * random.normal(1, 0.1, value.shape) + random.normal(0, 0.01, value.shape)).astype(value.dtype)


def compare_evaluation(evaluation: Evaluation, batch: Any) -> list[Finding]:
    """Evaluate `batch` once as a whole by Keras and once in micro-batches; compare loss and metrics."""
    x, y, sample_weight = parts_of(batch)
    model = evaluation.model
    model.reset_metrics()

    @tf.function(autograph=False)
    def whole() -> tuple[Any, dict[str, Any]]:
        outputs = model(x, training=False)
        labels, weights = _as_outputs(evaluation, outputs, y, sample_weight)
        loss = model.compute_loss(x, labels, outputs, weights, training=False)
        return loss, _metrics(evaluation, x, labels, outputs, weights)

    loss, results = whole()
    for metric in evaluation.measured.values():
        metric.reset_state()
    sums = tf.function(evaluation, autograph=False)(batch)
    found = sums.results(evaluation.measured)
    terms = min(_longest_sum(evaluation, batch) * unit(evaluation), 0.5)
    findings = []
    for name, value in {**{name: float(each) for name, each in results.items()}, "loss": float(loss)}.items():
        apart = abs(float(found.get(name, math.inf)) - value) / max(abs(value), 1)
        kind = "loss" if name == "loss" else "metric"
        findings.append(Finding(f"val/{name}", kind, apart, terms / (1 - terms)))
    return findings


def unit(update: Update | Evaluation) -> float:
    """Return the unit roundoff of the lowest precision of any layer or loss."""
    losses = [loss for loss in tf.nest.flatten(update.objective.loss) if loss is not None]
    names = {"float64", *(layer.compute_dtype for layer in layers_of(update.model)), *(loss.dtype for loss in losses)}
    dtypes = [dtype for dtype in map(tf.as_dtype, names) if dtype.is_floating]
    return max(2.0 ** -{"float64": 53, "float32": 24, "float16": 11}.get(dtype.name, 8) for dtype in dtypes)


def examples(batch: Any) -> int:
    """Return the number of examples in a batch."""
    return int(examples_in(batch))


def shortened(batch: Any, size: int) -> Any:
    """Return `size` examples of a batch, or all but one if there are no more, to test a short last micro-batch."""
    return slice_of(batch, 0, size if size < examples(batch) else max(size - 1, 1))


def _traced(function: Callable[[Any], Any], batch: Any) -> Callable[[Any], Any]:
    """Return a function of a batch like `batch`, traced once for any number of examples."""

    def leaves(batch: Any) -> list[Any]:
        return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]

    @tf.function(autograph=False, input_signature=[slice_specs(leaves(batch))])
    def on_leaves(given: list[Any]) -> Any:
        left = iter(given)
        return function(tf.nest.map_structure(lambda leaf: None if leaf is None else next(left), batch))

    return lambda batch: on_leaves(leaves(batch))


def _whole(update: Update, like: Any) -> Callable[[Any], _Outcome]:
    """Return what applies a batch, of the form of `like`, in one piece."""
    model, variables = update.model, update.model.trainable_variables
    noisy = noisy_layers(model, like[0]) if update.same_noise else []

    def step(batch: Any) -> tuple[Any, ...]:
        x, y, sample_weight = batch
        with tf.GradientTape() as tape:
            with drawn(noisy, keys_of(noisy), 0, examples_in(x)):
                outputs = model(x, training=True)
            labels, weights = _as_outputs(update, outputs, y, sample_weight)
            loss = model.compute_loss(x, labels, outputs, weights)
            scaled = update.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [variable.value for variable in variables])
        return loss, _dense(gradients), _metrics(update, x, labels, outputs, weights)

    def step_by_example(batch: Any) -> tuple[Any, ...]:
        of_update = {"scale_loss": update.optimizer.scale_loss, "noise_keys": keys_of(noisy)}
        sums = accumulate_gradients(model, update.objective, batch, 1, **of_update)
        return sums.mean_loss(), _dense(sums.gradients()), {}

    traced, traced_by_example = _traced(step, like), _traced(step_by_example, like)
    apply = tf.function(lambda gradients: update.optimizer.apply(gradients, variables), autograph=False)

    def outcome(batch: Any) -> _Outcome:
        model.reset_metrics()
        for metric in update.measured.values():
            metric.reset_state()
        try:
            loss, gradients, results = traced(batch)
        except (tf.errors.ResourceExhaustedError, MemoryError):
            loss, gradients, results = traced_by_example(batch)
        found = {name: float(result) for name, result in results.items()}
        arrays = _arrays(gradients)
        square = sum(float(np.square(array).sum()) for array in arrays if array is not None)
        found["gradient_norm"] = math.sqrt(square) / float(update.optimizer.scale_loss(tf.ones(())))
        found["learning_rate"] = float(_array(update.optimizer.learning_rate))
        apply([None if array is None else tf.constant(array) for array in arrays])
        return _outcome(update, float(loss), arrays, found)

    return outcome


def _metrics(update: Update | Evaluation, x: Any, y: Any, outputs: Any, sample_weight: Any) -> dict[str, Any]:
    """Return Keras' metrics of a batch, without the loss and those for which masks are handled differently here."""
    if y is None:
        return {}
    results = update.model.compute_metrics(x, y, outputs, sample_weight)
    masked = any(mask_of(output) is not None for output in by_name(update.model, outputs).values())
    means = keras.metrics.MeanMetricWrapper  # `fit` weights no other metric by a mask: see docs/exact.md
    left_out = {name for name, metric in update.measured.items() if masked and not isinstance(metric, means)}
    return {name: result for name, result in results.items() if name not in {"loss", *left_out}}


def _as_outputs(update: Update | Evaluation, outputs: Any, y: Any, sample_weight: Any) -> tuple[Any, Any]:
    """Return labels and sample weights in the structure of the outputs; None for an output without, as in Keras."""
    names = list(by_name(update.model, outputs))
    if len(names) < 2 or y is None:
        return y, sample_weight
    labels, weights = labels_by_name(update.objective.loss, y, names), spread(sample_weight, names, to_all=True)
    in_order = ([given.get(name) for name in names] for given in (labels, weights))
    packed, packed_weights = (keras.tree.pack_sequence_as(outputs, leaves) for leaves in in_order)
    return packed, packed_weights if keras.tree.is_nested(sample_weight) else sample_weight


def _cut(update: Update, like: Any) -> Callable[[Any], _Outcome]:
    """Return what applies a batch, of the form of `like`, in micro-batches."""
    sums_of, applied = _traced(update.sums, like), _traced(update, like)

    def outcome(batch: Any) -> _Outcome:
        moved = _untrained(update.model)
        before = [_array(variable) for variable in moved]
        # Of single examples: the terms of the gradient, which may cancel in a batch.
        alone = [sums_of(slice_of(batch, place, place + 1)) for place in range(min(examples(batch), 4))]
        of_batch, *of_examples = (_arrays(each.gradients()) for each in (sums_of(batch), *alone))
        largest = max(_most(array) for arrays in of_examples for array in arrays if array is not None)
        _assign(moved, before)
        results = {name: float(value) for name, value in applied(batch).items()}
        return replace(_outcome(update, results.pop("loss"), of_batch, results), largest_term=largest)

    return outcome


def _outcome(update: Update, loss: float, gradients: list[Any], results: dict[str, float]) -> _Outcome:
    weights, state = ([_array(v) for v in of] for of in (update.model.trainable_variables, _untrained(update.model)))
    return _Outcome(loss, gradients, weights, state, int(_array(update.optimizer.iterations)), results)


def _untrained(model: keras.Model) -> list[Any]:
    """Return the variables that only forward passes change, without those of metrics and without seeds."""
    found = [*model.non_trainable_weights, *(variable for _, variable in unknown_to_keras(model))]
    return [variable for variable in found if tf.as_dtype(variable.dtype).name not in ("uint32", "string", "resource")]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _longest_sum(update: Update | Evaluation, batch: Any) -> int:
    """Return an upper bound of the number of sequential additions in the computation of a gradient."""
    layers = 1 + len({variable.path.rpartition("/")[0] for variable in update.model.trainable_variables})
    widest = max(int(np.prod(variable.shape)) for variable in update.model.trainable_variables)
    leaves = [leaf for leaf in tf.nest.flatten(parts_of(batch)) if leaf is not None]
    dense = [leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else leaf for leaf in leaves]
    return 2 * layers * widest + sum(int(tf.size(leaf)) for leaf in dense)


def _findings(update: Update, old: Sequence[Any], whole: _Outcome, cut: _Outcome, terms: int) -> list[Finding]:
    rounding = unit(update)
    gamma = min((terms if rounding < 2.0**-50 else 8 * math.sqrt(terms)) * rounding, 0.5)
    gamma /= 1 - gamma
    largest = [_most(gradient) for gradient in whole.gradients if gradient is not None]
    scale = max([1e-300, cut.largest_term, *largest])
    found = [Finding("loss", "loss", abs(cut.loss - whole.loss) / max(abs(whole.loss), scale), gamma)]
    found.append(Finding("updates", "count", float(abs(cut.iterations - whole.iterations)), 0.0))
    for name, value in whole.results.items():
        found.append(Finding(name, "metric", abs(cut.results.get(name, math.inf) - value) / max(abs(value), 1), gamma))
    for variable, expected, reached in zip(_untrained(update.model), whole.state, cut.state, strict=True):
        apart = _most(reached.astype("float64") - expected) / max(_most(expected), 1)
        found.append(Finding(getattr(variable, "path", variable.name), "state", apart, gamma))
    variables = update.model.trainable_variables
    sides = zip(variables, old, whole.gradients, cut.gradients, whole.weights, cut.weights, strict=True)
    for variable, start, expected, gradient, aimed, reached in sides:
        if expected is None or gradient is None:
            apart = 0.0 if expected is None and gradient is None else math.inf
            found.append(Finding(variable.path, "gradient", apart, gamma))
            continue
        found.append(Finding(variable.path, "gradient", _most(gradient - expected) / scale, gamma))
        step = max(_most(aimed - start), 1e-300)
        # An optimizer that divides by the gradient's magnitude turns its relative error into one of the step, which is
        # large for a small gradient. If the gradient is only rounding, so is the step.
        steeper = scale / np.maximum(np.abs(expected), 1e-300)
        bounds = np.where(steeper * gamma < 1e-3, 10 * gamma * steeper + (1 + np.abs(aimed) / step) * rounding, np.inf)
        apart_by = np.abs(reached - aimed) / step
        if apart_by.size:
            worst = np.unravel_index(np.argmax(np.where(bounds < np.inf, apart_by / bounds, -1)), apart_by.shape)
            found.append(Finding(variable.path, "weights", float(apart_by[worst]), float(bounds[worst])))
    return found


def _dense(gradients: Sequence[Any]) -> list[Any]:
    return [() if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def _arrays(gradients: Sequence[Any]) -> list[Any]:
    return [None if g is None or isinstance(g, tuple) else _array(tf.convert_to_tensor(g)) for g in gradients]


def _array(value: Any) -> Any:
    return np.asarray(keras.ops.convert_to_numpy(value))


def _most(values: Any) -> float:
    return float(np.abs(values).max(initial=0.0))
