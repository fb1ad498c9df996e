"""Compares an update in micro-batches with Keras' update on the whole batch.

The comparison covers the loss, the gradients, the weights, the non-trainable state, the
metrics and the number of updates.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.accumulation import Evaluation, GradientSums, Update, internals
from pipeline.common import nvidia

Computation = Update | Evaluation  # both have a model, an objective and metrics

# Replacements for zero in a denominator, and for infinity in a certificate.
_TINY = 1e-300
_HUGE = 1e300

_array = keras.ops.convert_to_numpy


@dataclass(frozen=True)
class Difference:
    """A relative difference, and the bound up to which rounding may explain it."""

    what: str  # name of the quantity, such as `loss`, `updates` or a variable's path
    kind: str  # loss, gradient, weights, state, metric or count
    error: float  # the relative difference
    bound: float  # infinite if rounding alone may be as large as the quantity

    @property
    def holds(self) -> bool:
        """Whether rounding explains the difference; False if it is NaN."""
        return bool(self.error <= self.bound)

    @property
    def bare_name(self) -> str:
        """The name without `val/`, which marks a result of the evaluation."""
        return self.what.removeprefix("val/")

    @property
    def label(self) -> str:
        """The label with which the difference is printed."""
        if self.kind == "loss":
            return self.what
        return f"{self.kind} {self.what}"

    def as_json(self) -> dict[str, Any]:
        """Return the entry for the certificate, with `_HUGE` in place of infinity."""
        return {
            "what": f"{self.kind} {self.what}",
            "apart": min(self.error, _HUGE),
            "rounding": min(self.bound, _HUGE),
            "holds": self.holds,
        }


@dataclass(frozen=True)
class _Outcome:
    """The results of one update on a batch."""

    results: dict[str, float]  # loss, metrics, learning rate and gradient norm
    gradients: list[Any]  # None if the loss does not depend on the variable
    weights: list[Any]
    state: list[Any]  # the values of non-trainable variables; see `_untrained`
    iterations: int


@dataclass(frozen=True)
class _TracedUpdate:
    """An update as functions that are traced once and accept batches of any size."""

    update: Update
    by_keras: Callable[[Any], Any]  # returns loss and metrics, and gradients
    sums: Callable[[Any], GradientSums]
    step: Callable[[Any], dict[str, Any]]
    apply: Callable[[list[Any]], None]  # takes gradients


@dataclass(frozen=True)
class _Rounding:
    """The numbers from which the rounding bounds are computed."""

    gamma: float  # relative bound for a sum; see `compare`
    unit: float  # unit roundoff
    scale: float  # largest term of any gradient; errors of gradients are relative to it


@dataclass(frozen=True)
class _Step:
    """The values of a variable before the two updates, and after each of them."""

    before: Any
    expected: Any  # after the update by Keras
    reached: Any  # after the update in micro-batches


def compare(
    update: Update, batches: Sequence[Any], other_weights: bool = False
) -> list[list[Difference]]:
    """Compare updates in micro-batches with whole-batch updates from the same weights.

    The reference is Keras: `model.compute_loss` on all examples, one tape, and one
    `optimizer.apply`. If the batch does not fit in memory, the reference is `Update`
    with micro-batches of one example. Model and optimizer are restored at the end.

    The bound is γ = m·u / (1 − m·u), relative to the largest term of a sum, where u is
    the unit roundoff and m is an estimate of the number of terms in the longest sum
    (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1). In
    precisions below float64, 8·√m replaces m: this bound holds with high probability
    (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019).
    The bound for a weight is larger, since the optimizer may amplify an error of the
    gradient.

    Args:
        update: the update to compare.
        batches: effective batches, which may be padded to different lengths.
        other_weights: whether to compare the last batch a second time, with weights
            near those of the model.

    Returns:
        The differences for each batch, then those for the second comparison, if any.
    """
    state = _variables_without_metrics(update)
    traced = _trace(update, _common_specs(batches))

    findings = _compare_at_current_weights(traced, state, batches)
    if other_weights:
        with perturbed(update.model):
            findings += _compare_at_current_weights(traced, state, batches[-1:])
    return findings


def compare_evaluation(evaluation: Evaluation, batch: Any) -> list[Difference]:
    """Compare the loss and metrics of a batch in micro-batches with those by Keras."""
    parts = whole_parts(evaluation, batch)

    _reset_metrics(evaluation)
    by_keras = tf.function(
        lambda: _results_by_keras(evaluation, *parts, training=False), autograph=False
    )
    expected = by_keras()

    _reset_metrics(evaluation)
    in_micro_batches = tf.function(evaluation, autograph=False)
    reached = in_micro_batches(batch).results(evaluation.measured)

    rounding = _Rounding(_gamma(evaluation, batch), unit(evaluation), scale=1.0)
    findings = _compare_results(expected, reached, rounding)
    return [replace(finding, what=f"val/{finding.what}") for finding in findings]


def whole_parts(computation: Computation, batch: Any) -> tuple[Any, Any, Any]:
    """Return `(x, y, sample_weight)` of a batch that is computed as a whole.

    Parts that would be padded after a cut by tokens are padded to the longest example.
    """
    limit = computation.token_limit
    if limit is None:
        return internals.parts_of(batch)
    weighted = internals.with_position_weights(batch)
    return internals.padded_parts(weighted, limit.pad_multiple)


@contextmanager
def restored(variables: Iterable[Any]) -> Iterator[None]:
    """Restore the values of the variables at the end of the `with` block."""
    before = [(variable, _array(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


@contextmanager
def perturbed(model: keras.Model) -> Iterator[None]:
    """Change the weights of the model slightly at random inside the `with` block.

    Initial weights, such as zeros, may hide a difference.
    """
    random = np.random.default_rng(0)
    with restored(model.trainable_variables):
        for variable in model.trainable_variables:
            value = _array(variable)
            factor = random.normal(1, 0.1, value.shape)
            offset = random.normal(0, 0.01, value.shape)
            variable.assign(value * factor + offset)
        yield


def unit(computation: Computation) -> float:
    """Return the unit roundoff of the lowest precision of any layer, weight or loss."""
    dtypes = {"float64"}
    for layer in internals.layers_of(computation.model):
        dtypes.add(layer.compute_dtype)
    # Keras' LoRA keeps its weights in float32 in a model of float64, too.
    for variable in computation.model.trainable_variables:
        dtypes.add(variable.dtype)
    for loss in tf.nest.flatten(computation.objective.loss):
        if loss is not None:
            dtypes.add(loss.dtype)
    return nvidia.unit_roundoff(dtypes)


def examples(batch: Any) -> int:
    """Return the number of examples in a batch."""
    return int(internals.examples_in(batch))


def _variables_without_metrics(update: Update) -> list[Any]:
    """Return the variables that an update may change, except those of metrics."""
    of_metrics: set[int] = set()
    for metric in update.measured.values():
        of_metrics.update(id(variable) for variable in metric.variables)

    variables = []
    for variable in [*update.model.variables, *update.optimizer.variables]:
        if id(variable) not in of_metrics:
            variables.append(variable)
    for _, variable in internals.untracked_variables(update.model):
        variables.append(variable)
    return variables


def _common_specs(batches: Sequence[Any]) -> Any:
    """Return specs that match all batches, whatever their size and padded length."""

    def common_spec(first: Any, *others: Any) -> Any:
        if first is None:
            return None
        return first.most_specific_common_supertype(others)

    specs = [internals.slice_specs(batch) for batch in batches]
    return tf.nest.map_structure(common_spec, *specs)


def _trace(update: Update, specs: Any) -> _TracedUpdate:
    model = update.model
    variables = model.trainable_variables

    def gradients_by_keras(batch: Any) -> tuple[dict[str, Any], list[Any]]:
        x, *others = whole_parts(update, batch)
        noisy = []
        if update.same_noise:
            noisy = internals.noisy_layers(model, x)
        seeds = internals.draw_noise_seeds(noisy)

        with tf.GradientTape() as tape:
            examples = internals.examples_in(x)
            position = tf.range(examples) if update.token_limit is not None else 0
            with internals.noise_by_position(noisy, seeds, position, examples):
                results = _results_by_keras(update, x, *others, training=True)
            scaled = update.optimizer.scale_loss(results["loss"])
        values = [variable.value for variable in variables]
        return results, tape.gradient(scaled, values)

    def apply(gradients: list[Any]) -> None:
        update.optimizer.apply(gradients, variables)

    by_keras = tf.function(gradients_by_keras, autograph=False)
    sums = tf.function(update.sums, autograph=False)
    step = tf.function(update, autograph=False)
    # Trace each function once. An `input_signature` cannot be used for this, since it
    # must not contain None.
    for function in (by_keras, sums, step):
        function.get_concrete_function(specs)

    apply_gradients = tf.function(apply, autograph=False)
    return _TracedUpdate(update, by_keras, sums, step, apply_gradients)


def _compare_at_current_weights(
    traced: _TracedUpdate, state: Sequence[Any], batches: Sequence[Any]
) -> list[list[Difference]]:
    """Compare the updates for each batch, always from the current values of `state`."""
    update = traced.update
    before = _arrays(update.model.trainable_variables)

    def run(function: Callable[[_TracedUpdate, Any], Any], batch: Any) -> Any:
        with restored(state):
            return function(traced, batch)

    references = [run(_update_by_keras, batch) for batch in batches]
    cuts = [run(_update_in_micro_batches, batch) for batch in batches]

    findings = []
    for batch, reference, cut in zip(batches, references, cuts, strict=True):
        rounding = _Rounding(
            gamma=_gamma(update, batch),
            unit=unit(update),
            scale=max(
                _TINY,
                run(_largest_term, batch),
                _largest_of_all(reference.gradients),
            ),
        )
        findings.append(
            list(_compare_outcomes(update, before, reference, cut, rounding))
        )
    return findings


def _update_by_keras(traced: _TracedUpdate, batch: Any) -> _Outcome:
    update = traced.update
    _reset_metrics(update)

    try:
        results, gradients = traced.by_keras(batch)
    except (tf.errors.ResourceExhaustedError, MemoryError):
        results, gradients = _by_single_examples(update, batch)

    arrays = _arrays(gradients)
    square = 0.0
    for array in arrays:
        if array is not None:
            square += float(np.square(array).sum())
    loss_scale = float(update.optimizer.scale_loss(tf.ones(())))
    results["gradient_norm"] = math.sqrt(square) / loss_scale
    results["learning_rate"] = _array(update.optimizer.learning_rate)

    traced.apply(_constants(arrays))
    return _outcome(update, results, arrays)


def _by_single_examples(update: Update, batch: Any) -> tuple[dict[str, Any], list[Any]]:
    """Compute loss and gradients with `Update`, in micro-batches of one example."""
    limits: dict[str, Any] = {"micro_batch_size": 1}
    if update.token_limit is not None:
        limits["micro_batch_tokens"] = update.token_limit.tokens
        limits["pad_multiple"] = update.token_limit.pad_multiple
    single = Update(
        update.model,
        update.objective,
        update.optimizer,
        **limits,
        same_noise=update.same_noise,
        hold_statistics=False,
    )
    sums = tf.function(single.sums, autograph=False)(batch)
    return {"loss": sums.mean_loss()}, sums.gradients()


def _update_in_micro_batches(traced: _TracedUpdate, batch: Any) -> _Outcome:
    model = traced.update.model
    # Compute the gradients in a separate pass, and restore the state that it changes
    # (including seeds) before the update.
    with restored([*model.non_trainable_variables, *_untrained(model)]):
        sums = traced.sums(batch)
    results = traced.step(batch)
    return _outcome(traced.update, results, _arrays(sums.gradients()))


def _outcome(
    update: Update, results: Mapping[str, Any], gradients: list[Any]
) -> _Outcome:
    return _Outcome(
        results={name: float(value) for name, value in results.items()},
        gradients=gradients,
        weights=_arrays(update.model.trainable_variables),
        state=_arrays(_untrained(update.model)),
        iterations=int(_array(update.optimizer.iterations)),
    )


def _untrained(model: keras.Model) -> list[Any]:
    """Return the numeric variables that a forward pass may change, without metrics.

    Variables of type uint32 (seeds) or string (lookup tables) are left out.
    """
    variables = list(model.non_trainable_weights)
    for _, variable in internals.untracked_variables(model):
        variables.append(variable)

    of_numbers = []
    for variable in variables:
        if tf.as_dtype(variable.dtype) not in (tf.uint32, tf.string):
            of_numbers.append(variable)
    return of_numbers


def _reset_metrics(computation: Computation) -> None:
    computation.model.reset_metrics()
    for metric in computation.measured.values():
        metric.reset_state()


def _results_by_keras(
    computation: Computation, x: Any, y: Any, sample_weight: Any, *, training: bool
) -> dict[str, Any]:
    """Compute the loss and the metrics of a batch with Keras.

    Metrics that `Update` weights by a mask, but Keras does not, are left out.
    """
    model = computation.model
    outputs, y, sample_weight = _as_keras_takes(
        computation, model(x, training=training), y, sample_weight
    )
    loss = model.compute_loss(x, y, outputs, sample_weight, training=training)

    results = {}
    if y is not None:
        results.update(model.compute_metrics(x, y, outputs, sample_weight))
    for name in ["loss", *_metrics_without_mask(computation, outputs)]:
        results.pop(name, None)
    results["loss"] = loss
    return results


def _metrics_without_mask(computation: Computation, outputs: Any) -> list[str]:
    """Return the metrics that `fit` does not weight by a mask; see docs/exact.md."""
    leaves = tf.nest.flatten(outputs)
    if all(internals.mask_of(leaf) is None for leaf in leaves):
        return []

    names = []
    for name, metric in computation.measured.items():
        if not isinstance(metric, keras.metrics.MeanMetricWrapper):
            names.append(name)
    return names


def _as_keras_takes(
    computation: Computation, outputs: Any, y: Any, sample_weight: Any
) -> tuple[Any, Any, Any]:
    """Return outputs, labels and sample weights in the structure that Keras expects.

    Labels and nested weights get the structure of the outputs, with None for an output
    without labels or weights. Nested outputs are flattened to one dict by name, which
    is also how losses and metrics are given. With a single output or without labels,
    the arguments are returned unchanged.
    """
    outputs_by_name = internals.by_name(computation.model, outputs)
    names = list(outputs_by_name)
    if len(names) < 2 or y is None:
        return outputs, y, sample_weight
    if any(len(path) > 1 for path, _ in keras.tree.flatten_with_path(outputs)):
        outputs = outputs_by_name

    def packed(values_by_name: Mapping[str, Any]) -> Any:
        values = {name: values_by_name.get(name) for name in names}
        if outputs is outputs_by_name:
            return values
        return keras.tree.pack_sequence_as(outputs, list(values.values()))

    labels = internals.labels_by_name(computation.objective.loss, y, names)
    if keras.tree.is_nested(sample_weight):
        by_output = internals.spread(sample_weight, names, "sample_weight", to_all=True)
        sample_weight = packed(by_output)
    return outputs, packed(labels), sample_weight


def _largest_term(traced: _TracedUpdate, batch: Any) -> float:
    """Return the largest magnitude in the gradients for the first example.

    Rounding errors scale with the gradients of single examples, even if these cancel in
    the sum over the batch.
    """
    sums = traced.sums(internals.slice_of(batch, 0, 1))
    return _largest_of_all(_arrays(sums.gradients()))


def _gamma(computation: Computation, batch: Any) -> float:
    """Return the bound γ described in `compare`, which is at most 1."""
    layers = set()
    widest = 0
    for variable in computation.model.trainable_variables:
        layers.add(variable.path.rpartition("/")[0])
        widest = max(widest, int(np.prod(variable.shape)))

    # An upper estimate of the number of terms in a sum: the terms in all layers,
    # forward and backward, and all elements of the batch.
    terms = 2 * (1 + len(layers)) * widest
    for leaf in tf.nest.flatten(internals.parts_of(batch)):
        if isinstance(leaf, tf.RaggedTensor):
            terms += int(tf.size(leaf.flat_values))
        elif leaf is not None:
            terms += int(tf.size(leaf))

    roundoff = unit(computation)
    is_float64 = roundoff < 2.0**-50
    if is_float64:
        gamma = terms * roundoff
    else:
        gamma = 8 * math.sqrt(terms) * roundoff
    gamma = min(gamma, 0.5)
    return gamma / (1 - gamma)


def _compare_outcomes(
    update: Update,
    before: Sequence[Any],
    reference: _Outcome,
    cut: _Outcome,
    rounding: _Rounding,
) -> Iterator[Difference]:
    """Compare two updates that both started from the weights `before`."""
    yield from _compare_results(reference.results, cut.results, rounding)

    apart = abs(cut.iterations - reference.iterations)
    yield Difference("updates", "count", float(apart), 0.0)

    for variable, expected, reached in zip(
        _untrained(update.model), reference.state, cut.state, strict=True
    ):
        name = getattr(variable, "path", variable.name)
        difference = _largest(reached.astype("float64") - expected)
        error = difference / max(_largest(expected), 1)
        yield Difference(name, "state", error, rounding.gamma)

    for i, variable in enumerate(update.model.trainable_variables):
        gradient = reference.gradients[i]
        yield _compare_gradients(variable.path, gradient, cut.gradients[i], rounding)
        if gradient is None or cut.gradients[i] is None or not gradient.size:
            continue
        yield _compare_weights(
            variable.path,
            _Step(before[i], reference.weights[i], cut.weights[i]),
            np.abs(gradient),
            rounding,
        )


def _compare_results(
    expected: Mapping[str, Any], reached: Mapping[str, Any], rounding: _Rounding
) -> Iterator[Difference]:
    """Compare loss and metrics relative to their expected magnitude.

    A loss smaller than `rounding.scale` is compared relative to that scale, and a
    metric smaller than 1 relative to 1.
    """
    for name, value in expected.items():
        if name == "loss":
            kind = "loss"
            smallest = rounding.scale
        else:
            kind = "metric"
            smallest = 1
        size = max(abs(float(value)), smallest)
        error = abs(float(reached.get(name, math.inf)) - float(value)) / size
        yield Difference(name, kind, error, rounding.gamma)


def _compare_gradients(
    path: str, expected: Any, reached: Any, rounding: _Rounding
) -> Difference:
    if expected is None and reached is None:
        error = 0.0
    elif expected is None or reached is None:
        error = math.inf
    else:
        error = _largest(reached - expected) / rounding.scale
    return Difference(path, "gradient", error, rounding.gamma)


def _compare_weights(
    path: str, step: _Step, gradient_size: Any, rounding: _Rounding
) -> Difference:
    """Return the difference of the element that differs most relative to its bound.

    Differences are relative to the largest step of any element of the variable.
    """
    before = np.asarray(step.before, "float64")
    expected = np.asarray(step.expected, "float64")
    reached = np.asarray(step.reached, "float64")
    length = max(_largest(expected - before), _TINY)

    # An optimizer that divides by the gradient's magnitude passes the relative error of
    # the gradient on to the step, and this error is large for small gradients. If the
    # gradient may be mere rounding, so may the step, and there is no bound.
    slope = rounding.scale / np.maximum(gradient_size, _TINY, dtype="float64")
    is_bounded = slope * rounding.gamma < 2e-2
    of_gradient = 10 * rounding.gamma * slope
    of_weight = (1 + np.abs(expected) / length) * rounding.unit
    bounds = np.where(is_bounded, of_gradient + of_weight, np.inf)

    errors = np.abs(reached - expected) / length
    share_of_bound = np.where(bounds < np.inf, errors / bounds, -1)
    worst = np.unravel_index(np.argmax(share_of_bound), errors.shape)
    return Difference(path, "weights", float(errors[worst]), float(bounds[worst]))


def _arrays(values: Iterable[Any]) -> list[Any]:
    """Convert the values to arrays. None remains None."""
    arrays = []
    for value in values:
        if value is not None:
            value = _array(tf.convert_to_tensor(value))
        arrays.append(value)
    return arrays


def _constants(arrays: Iterable[Any]) -> list[Any]:
    """Convert the arrays to tensors. None remains None."""
    constants = []
    for array in arrays:
        if array is not None:
            array = tf.constant(array)
        constants.append(array)
    return constants


def _largest(values: Any) -> float:
    """Return the largest magnitude in an array, or 0 if it is empty."""
    return float(np.abs(values).max(initial=0.0))


def _largest_of_all(arrays: Iterable[Any]) -> float:
    """Return the largest magnitude in all arrays, ignoring those that are None."""
    return max(_largest(array) for array in arrays if array is not None)
