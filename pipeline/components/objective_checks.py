"""Checks, on one batch, that the loss and the metrics fit the labels and outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import internals
from pipeline.common.errors import ConfigError, as_config_error
from pipeline.components.objective import RunObjective
from pipeline.config.metric_names import UPDATE_METRICS, is_name
from pipeline.config.objective_nodes import METRIC_GROUPS
from pipeline.config.resolve import RunSpec
from pipeline.dataset.splits import Data

# Keras losses and metrics whose labels lack the last axis of the outputs.
_SPARSE = {
    "SparseCategoricalCrossentropy",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
}
# Keras losses and metrics whose labels may differ in shape from the outputs. All others
# require equal shapes, apart from axes of size 1.
_OF_ANY_SHAPE = {
    "CTC",
    "CategoricalGeneralizedCrossEntropy",
    "Circle",
    "ConcordanceCorrelation",
    "LossFunctionWrapper",
    "MeanMetricWrapper",
    "PearsonCorrelation",
}
_CROSS_ENTROPIES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.SparseCategoricalCrossentropy,
)
_PADDED_REDUCTION = (
    "must be mean_with_sample_weight or sum if dataset.pad pads the labels and the "
    "model has no mask: other reductions also count the padding"
)


@dataclass(frozen=True)
class Checked:
    """The result of `check`: an objective that fits the labels and outputs."""

    labels: Any
    outputs: Any
    objective: RunObjective  # includes the metrics that the model's layers update


@dataclass(frozen=True)
class _Example:
    """A batch and the model's outputs for it."""

    y: Any
    sample_weight: Any
    outputs: dict[str, Any]  # by name
    padded: bool  # whether `dataset.pad` pads examples
    classes: int | None  # number of classes, if the dataset states it
    rule: str  # the error if labels and outputs do not fit


def check(
    objective: RunObjective,
    model: keras.Model,
    data: Data,
    batch: Any,
    spec: RunSpec,
    *,
    labels_needed: bool = True,
) -> Checked:
    """Compute the loss and the metrics of a batch; this also builds the model.

    Args:
        objective: the loss and the metrics.
        model: the model, built or not.
        data: the loaded dataset.
        batch: `(x, y, sample_weight)` of a few examples; the last two may be missing.
        spec: the spec of the run.
        labels_needed: whether the loss and the metrics are computed. If not, they are
            checked only if the batch has labels.

    Raises:
        ConfigError: the model does not take the inputs or has no weights to train, the
            loss, a metric or a class weight does not fit the labels and outputs, or an
            output or a metric has an unusable name.
    """
    goal = objective.training
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    rule = f"must accept inputs of {_shape(x)}"
    if any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(x)):
        rule += (
            ", which dataset.pad would pad to one length; if all have one length, set "
            "it in your dataset function with tf.ensure_shape"
        )
    with as_config_error("model", rule, model.name):
        outputs = model(x, training=False)
    if not model.trainable_variables:
        raise ConfigError("model", "must have weights to train", model.name)
    example = _Example(
        y,
        sample_weight,
        internals.by_name(model, outputs),
        padded=spec.dataset.get("pad") is not None,
        classes=data.classes,
        rule=f"must fit labels {_shape(y)} and outputs {_shape(outputs)}",
    )

    if labels_needed or y is not None:
        _check_loss(goal, model, example)
        _check_class_weights(spec.config.training.class_weight or {}, goal, example)
        labels = {}
        if y is not None:
            labels = internals.labels_by_name(goal.loss, y, example.outputs)
        for group in METRIC_GROUPS:
            _check_metrics(goal, group, labels, example)
    layer_metrics = _layer_metrics(model)
    _check_names(goal, list(example.outputs), layer_metrics)

    checked = replace(
        objective,
        training=replace(goal, layer_metrics=layer_metrics),
        evaluation=replace(objective.evaluation, layer_metrics=layer_metrics),
    )
    return Checked(y, outputs, checked)


def _check_loss(
    goal: internals.Objective, model: keras.Model, example: _Example
) -> None:
    """Raise a ConfigError if the loss fails, or does not depend on the outputs.

    Without a loss in the config, the model must add one by itself.
    """
    if goal.loss is None:
        if not model.losses:
            rule = "must be given for a model that adds no loss by itself"
            raise ConfigError("training.loss", rule, model.name)
        return
    # Check the gradient with respect to the outputs. The gradient of the weights cannot
    # be taken here: under a strategy, it exists only inside a replica.
    reached = []
    for output in example.outputs.values():
        if output.dtype.is_floating:
            reached.append(output)
    # For a softmax or a sigmoid, watch its logits too: Keras stores them on the output
    # and computes cross-entropies from them.
    for output in list(reached):
        logits = internals.logits_of(output)
        if logits is not None:
            reached.append(logits)
    with tf.GradientTape() as tape:
        tape.watch(reached)
        total = _sum_of_losses(goal, example)
    if all(gradient is None for gradient in tape.gradient(total, reached)):
        rule = "must depend on the model's outputs: no gradient reaches them"
        raise ConfigError("training.loss", rule, model.name)


def _sum_of_losses(goal: internals.Objective, example: _Example) -> tf.Tensor:
    """Check the loss of each output; return their sum, a float64 scalar."""
    if example.y is None:
        rule = (
            "needs labels, but the dataset has none: set it to null if the model adds "
            "its own loss"
        )
        raise ConfigError("training.loss", rule)
    losses = [loss for loss in tf.nest.flatten(goal.loss) if loss is not None]
    names = ", ".join(loss.name for loss in losses)
    with as_config_error("training.loss", example.rule, names):
        terms = internals.Objective(goal.loss).terms(
            example.y, example.outputs, example.sample_weight
        )
    with as_config_error(
        "training.loss_weights", "must fit the outputs", goal.loss_weights
    ):
        internals.spread(goal.loss_weights, list(example.outputs), "loss_weights")
    total = tf.zeros((), tf.float64)
    for term in terms:
        total += tf.cast(_checked_term(goal, term, example), tf.float64)
    return total


def _checked_term(
    goal: internals.Objective, term: internals.Term, example: _Example
) -> tf.Tensor:
    """Check the loss of one output; return its weighted sum over the examples.

    Raises:
        ConfigError: the loss cannot be computed or does not fit the labels, divides by
            padding, or couples examples and so needs the effective batch.
    """
    loss = term.loss
    has_several_outputs = len(example.outputs) > 1
    key = "training.loss"
    if has_several_outputs and isinstance(goal.loss, dict):
        key = f"training.loss.{term.name}"

    if example.padded and _divides_by_padding(term):
        raise ConfigError(f"{key}.reduction", _PADDED_REDUCTION, loss.reduction)
    if internals.couples_examples(loss) and not goal.over_batch:
        rule = f"must be effective_batch: {loss.name} is a loss that compares examples"
        raise ConfigError("training.loss_over", rule, goal.loss_over)

    def weighted_sum(
        y: Any, output: Any, mask: Any, logits: Any, sample_weight: Any
    ) -> tf.Tensor:
        output = internals.with_mask_and_logits(output, mask, logits)
        sums = internals.weighted_sum(
            loss, y, output, sample_weight, None, goal.over_batch
        )
        return sums.total

    arguments = (
        term.y,
        term.output,
        internals.mask_of(term.output),
        internals.logits_of(term.output),
        term.sample_weight,
    )
    with as_config_error(key, example.rule, loss.name):
        _check_shapes(loss, term.y, term.output)
        classes = None if has_several_outputs else example.classes
        _check_classes(loss, term.y, term.output, classes)
        total = weighted_sum(*arguments)
        # Trace for an unknown number of examples, as in training.
        _trace(weighted_sum, *internals.slice_specs(arguments))
    return total


def _divides_by_padding(term: internals.Term) -> bool:
    """Return whether the mean of a loss also divides by the number of padded labels."""
    weights = term.sample_weight
    has_weight_per_label = tf.is_tensor(weights) and weights.shape.rank > 1
    averages = term.loss.reduction in ("mean", "sum_over_batch_size")
    if not has_weight_per_label or not averages:
        return False
    return internals.mask_of(term.output) is None


def _check_class_weights(
    class_weight: Mapping[int, float], goal: internals.Objective, example: _Example
) -> None:
    classes = example.classes or _classes(goal.loss, list(example.outputs.values()))
    if classes is None:
        return
    for label in class_weight:
        if label >= classes:
            rule = f"must name classes from 0 to {classes - 1}"
            raise ConfigError("training.class_weight", rule, label)


def _classes(loss: internals.Losses, outputs: Sequence[Any]) -> int | None:
    """Return the number of classes, judging by the width of the only output.

    Return None if there are several outputs, or if the loss is not one of
    `_CROSS_ENTROPIES`.
    """
    if len(outputs) != 1 or not isinstance(loss, _CROSS_ENTROPIES):
        return None
    width: int = outputs[0].shape[-1]
    if isinstance(loss, keras.losses.BinaryCrossentropy):
        return max(2, width)
    return width


def _check_metrics(
    goal: internals.Objective,
    group: str,
    labels: Mapping[str, Any],
    example: _Example,
) -> None:
    """Compute each metric of a group by itself; a ConfigError names one that fails."""
    metrics: Any = getattr(goal, group)
    metrics_by_output = metrics if isinstance(metrics, Mapping) else {None: metrics}
    for output, metrics_of_output in metrics_by_output.items():
        for metric in metrics_of_output:
            key = f"training.{group}.{metric.name}"
            selected: Any = [metric]
            if output is not None:
                key = f"training.{group}.{output}.{metric.name}"
                selected = {output: [metric]}
            alone = internals.Objective(goal.loss, **{group: selected})
            with as_config_error(key, example.rule, type(metric).__name__):
                if output is None and len(example.outputs) == 1 and labels:
                    _check_shapes(metric, *labels.values(), *example.outputs.values())
                _check_metric(metric, alone, example)
            metric.reset_state()


def _check_metric(
    metric: keras.metrics.Metric, alone: internals.Objective, example: _Example
) -> None:
    """Raise an error if a metric cannot be computed, or its result is not a scalar.

    Args:
        metric: the metric.
        alone: an objective that has no other metric.
        example: the batch, with the model's outputs.
    """

    def update_metrics() -> None:
        alone.update_metrics(example.y, example.outputs, example.sample_weight)

    update_metrics()
    _trace(update_metrics)
    result = metric.result()
    if tf.nest.is_nested(result) or tf.convert_to_tensor(result).shape.rank != 0:
        reason = "its result is not one number"
        # By default, Keras metrics such as F1Score return one result per class.
        if getattr(metric, "average", "") is None:
            reason += "; with average=macro, it is one number"
        raise ValueError(reason)


def _layer_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics that the model's layers update when they are called."""
    if not model.compiled:
        return list(model.metrics)
    metrics: list[keras.metrics.Metric] = []
    for layer in model.layers:
        metrics += layer.metrics
    return metrics


def _check_names(
    goal: internals.Objective,
    outputs: list[str],
    layer_metrics: list[keras.metrics.Metric],
) -> None:
    """Raise a ConfigError if an output or a layer's metric has an unusable name.

    Results are logged under these names, so each must be unique and valid in MLflow.
    """
    names = list(dict.fromkeys(metric.name for metric in layer_metrics))
    if len(outputs) > 1:
        names += [f"{output}_loss" for output in outputs]
    taken = UPDATE_METRICS.keys() | goal.measured().keys()
    for name in names:
        if name in taken or names.count(name) > 1 or not is_name(f"train/{name}"):
            rule = (
                "must give its outputs and the metrics of its layers names that "
                "MLflow accepts and that no other metric has"
            )
            raise ConfigError("model", rule, name)


def _trace(function: Callable[..., Any], *specs: Any) -> None:
    """Trace `function` without running it. Raise an error if it cannot be traced.

    An eager call would not reveal, for example, Python branches on tensors. `specs` are
    the specs of the arguments.
    """
    try:
        tf.function(function, autograph=False).get_concrete_function(*specs)
    except tf.errors.OperatorNotAllowedInGraphError as error:
        rule = (
            "it branches in Python on the value of a tensor: use keras.ops.where or "
            "keras.ops.cond"
        )
        raise ValueError(rule) from error


def _check_shapes(measure: Any, y: Any, outputs: Any) -> None:
    """Raise a ValueError if labels and outputs differ in shape, except in unit axes.

    Many Keras losses and metrics would silently broadcast labels of shape (batch,)
    against outputs of shape (batch, n). The user's own losses and metrics, and those
    that accept other shapes, are not checked.
    """
    kind = type(measure)
    if not kind.__module__.startswith("keras.") or kind.__name__ in _OF_ANY_SHAPE:
        return
    if not isinstance(measure, keras.losses.Loss | keras.metrics.MeanMetricWrapper):
        return
    if not (tf.is_tensor(y) and tf.is_tensor(outputs)):
        return
    of_label = list(y.shape[1:])
    of_output = list(outputs.shape[1:])
    if kind.__name__ in _SPARSE:
        of_output = of_output[:-1]
    if _without_ones(of_label) != _without_ones(of_output):
        raise ValueError("the shapes differ")


def _without_ones(shape: list[int | None]) -> list[int | None]:
    return [size for size in shape if size != 1]


def _check_classes(
    loss: keras.losses.Loss, y: Any, outputs: Any, classes: int | None
) -> None:
    """Raise a ValueError for values that Keras' cross-entropies silently accept.

    Such values are labels that are out of range, and logits where the loss expects
    probabilities. Other losses are not checked.

    Args:
        loss: the loss.
        y: the labels.
        outputs: the model's output.
        classes: number of classes, or None if it is unknown. The labels are 0 to
            `classes` − 1.
    """
    if not isinstance(loss, _CROSS_ENTROPIES):
        return
    if not (tf.is_tensor(y) and tf.is_tensor(outputs)):
        return
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        _check_labels(loss, y, outputs.shape[-1], classes)
    elif float(tf.reduce_min(y)) < 0 or float(tf.reduce_max(y)) > 1:
        raise ValueError("the labels must be from 0 to 1")

    least = float(tf.reduce_min(outputs))
    most = float(tf.reduce_max(outputs))
    are_logits = least < 0 or most > 1 + 1e-3
    if are_logits and not loss.get_config().get("from_logits"):
        why = "the outputs are not probabilities; for logits, set from_logits=true"
        raise ValueError(why)


def _check_labels(
    loss: keras.losses.SparseCategoricalCrossentropy,
    y: tf.Tensor,
    width: int,
    classes: int | None,
) -> None:
    """Raise a ValueError if a label is not from 0 to `width` − 1.

    If `classes` is known and no class is ignored, the label `classes` − 1 is checked in
    place of the largest label in the batch.
    """
    labels = tf.cast(y, tf.int64)
    if loss.ignore_class is not None:
        labels = labels[labels != loss.ignore_class]
        classes = None
        if not len(labels):  # The loss ignores all labels of this batch.
            return
    largest = int(tf.reduce_max(labels)) if classes is None else classes - 1
    for label in (largest, int(tf.reduce_min(labels))):
        if not 0 <= label < width:
            raise ValueError(f"label {label} is outside the {width} outputs")


def _shape(nest: Any) -> str:
    """Return the shapes and dtypes of the leaves of a nest, for an error message."""
    leaves = [leaf for leaf in tf.nest.flatten(nest) if leaf is not None]
    return ", ".join(f"{tuple(leaf.shape)} {leaf.dtype.name}" for leaf in leaves)
