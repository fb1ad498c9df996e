"""Checks on one batch that the loss and the metrics fit the labels and the outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from pipeline.accumulation import internals
from pipeline.common.errors import ConfigError, refused
from pipeline.components.objective import Objective
from pipeline.config.metric_names import UPDATE_METRICS, is_name
from pipeline.config.objective_nodes import METRIC_GROUPS
from pipeline.config.resolve import RunSpec
from pipeline.dataset.splits import Data


@dataclass(frozen=True)
class _Example:
    """A batch and the model's outputs for it."""

    y: Any
    sample_weight: Any
    outputs: dict[str, Any]  # by name
    shapes: str  # the rule that an error names where labels and outputs do not fit


def check(
    objective: Objective, model: keras.Model, data: Data, batch: Any, spec: RunSpec
) -> tuple[Any, Any, Objective]:
    """Compute the loss and the metrics of `batch`, so that labels and outputs that do not fit are refused at once.

    This builds the model if it is not built yet. Return the labels, the outputs, and the objective with the metrics
    that the model's layers update.
    """
    goal, padded = objective.training, spec.dataset.get("pad") is not None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    with refused("model", f"must take inputs of {_shape(x)}", model.name):
        outputs = model(x, training=False)
    if not model.trainable_variables:
        raise ConfigError("model", "must have weights to train", model.name)
    shapes = f"must fit labels {_shape(y)} and outputs {_shape(outputs)}"
    example = _Example(y, sample_weight, internals.by_name(model, outputs), shapes)
    _check_loss(goal, model, data, example, padded)
    classes = data.classes or _classes(goal.loss, *example.outputs.values())
    for label in spec.config.training.class_weight or {}:
        if classes is not None and label >= classes:
            raise ConfigError(
                "training.class_weight",
                f"must name classes from 0 to {classes - 1}",
                label,
            )
    labels = (
        {} if y is None else internals.labels_by_name(goal.loss, y, example.outputs)
    )
    for group in METRIC_GROUPS:
        _check_metrics(goal, group, labels, example)
    layer_metrics = [
        each
        for layer in (model.layers if model.compiled else [model])
        for each in layer.metrics
    ]
    _check_names(goal, list(example.outputs), layer_metrics)
    training, evaluation = (
        replace(each, layer_metrics=layer_metrics)
        for each in (goal, objective.evaluation)
    )
    return y, outputs, replace(objective, training=training, evaluation=evaluation)


def _check_loss(
    goal: internals.Objective,
    model: keras.Model,
    data: Data,
    example: _Example,
    padded: bool,
) -> None:
    if goal.loss is None:
        if not model.losses:
            raise ConfigError(
                "training.loss",
                "must be given for a model that adds no loss by itself",
                model.name,
            )
        return
    # By the outputs, as under a strategy the weights have gradients only inside of a replica. From a softmax or a
    # sigmoid Keras takes the logits, which it has left on the output.
    reached = [
        output for output in example.outputs.values() if output.dtype.is_floating
    ]
    reached += [
        logits
        for output in reached
        if (logits := internals.logits_of(output)) is not None
    ]
    with tf.GradientTape() as tape:
        tape.watch(reached)
        total = _sum_of_losses(goal, data, example, padded)
    if all(gradient is None for gradient in tape.gradient(total, reached)):
        raise ConfigError(
            "training.loss",
            "must depend on the model's outputs: no gradient reaches any",
            model.name,
        )


def _sum_of_losses(
    objective: internals.Objective, data: Data, example: _Example, padded: bool
) -> tf.Tensor:
    loss, outputs = objective.loss, example.outputs
    if example.y is None:
        raise ConfigError("training.loss", "must be null: the dataset has no labels")
    names = ", ".join(each.name for each in tf.nest.flatten(loss) if each is not None)
    with refused("training.loss", example.shapes, names):
        found = internals.Objective(loss).terms(
            example.y, outputs, example.sample_weight
        )
    with refused(
        "training.loss_weights", "must fit the outputs", objective.loss_weights
    ):
        internals.spread(objective.loss_weights, list(outputs))
    total = tf.zeros((), tf.float64)
    for term in found:
        key = (
            f"training.loss.{term.name}"
            if len(outputs) > 1 and isinstance(loss, dict)
            else "training.loss"
        )
        several = tf.is_tensor(term.sample_weight) and term.sample_weight.shape.rank > 1
        averages = term.loss.reduction in ("mean", "sum_over_batch_size")
        if padded and several and averages and internals.mask_of(term.output) is None:
            rule = "must be mean_with_sample_weight or sum where dataset.pad pads the labels and the model has no mask"
            rule += ": this one divides by the padding as well"
            raise ConfigError(f"{key}.reduction", rule, term.loss.reduction)
        if internals.couples_examples(term.loss) and not objective.over_batch:
            rule = f"must be effective_batch: {term.loss.name} is a loss of several examples at once"
            raise ConfigError("training.loss_over", rule, objective.loss_over)
        with refused(key, example.shapes, term.loss.name):
            _check_shapes(term.loss, term.y, term.output)
            _check_classes(
                term.loss,
                term.y,
                term.output,
                data.classes if len(outputs) == 1 else None,
            )
            arguments = (
                term.loss,
                term.y,
                term.output,
                term.sample_weight,
                None,
                objective.over_batch,
            )
            total += tf.cast(internals.weighted_sum(*arguments).total, tf.float64)
            _trace(internals.weighted_sum, *arguments)
    return total


def _classes(loss: internals.Losses, output: Any, *others: Any) -> int | None:
    """Return the number of classes of a cross-entropy, if there is one output; None if that is not known."""
    if others or not isinstance(loss, _CROSS_ENTROPIES):
        return None
    return (
        max(2, output.shape[-1])
        if isinstance(loss, keras.losses.BinaryCrossentropy)
        else output.shape[-1]
    )


def _check_metrics(
    goal: internals.Objective, group: str, labels: dict[str, Any], example: _Example
) -> None:
    given: Any = getattr(goal, group)
    by_output = isinstance(given, Mapping)
    by_name = given if by_output else {"": given}
    for output, metric in (
        (output, metric) for output, listed in by_name.items() for metric in listed
    ):
        single: dict[str, Any] = {group: {output: [metric]} if by_output else [metric]}
        alone = internals.Objective(goal.loss, **single)
        where = (
            f"training.{group}.{output}.{metric.name}"
            if by_output
            else f"training.{group}.{metric.name}"
        )
        with refused(where, example.shapes, type(metric).__name__):
            if not by_output and len(example.outputs) == 1 and labels:
                _check_shapes(metric, *labels.values(), *example.outputs.values())
            alone.update_metrics(example.y, example.outputs, example.sample_weight)
            _trace(
                alone.update_metrics, example.y, example.outputs, example.sample_weight
            )
            if (
                tf.nest.is_nested(result := metric.result())
                or tf.convert_to_tensor(result).shape.rank != 0
            ):
                raise ValueError("its result is not one number")
        metric.reset_state()


def _check_names(
    goal: internals.Objective,
    outputs: list[str],
    layer_metrics: list[keras.metrics.Metric],
) -> None:
    """Refuse names of outputs and of layers' metrics under which nothing can be logged."""
    own = list(dict.fromkeys(metric.name for metric in layer_metrics))
    own += [f"{name}_loss" for name in outputs] if len(outputs) > 1 else []
    for name in own:
        if (
            name in UPDATE_METRICS
            or name in goal.measured()
            or own.count(name) > 1
            or not is_name(f"train/{name}")
        ):
            rule = "must name its outputs and the metrics of its layers as MLflow takes names, and unlike other metrics"
            raise ConfigError("model", rule, name)


def _trace(function: Callable[..., Any], *arguments: Any) -> None:
    """Raise if `function` cannot be traced, which a call does not show; this computes nothing."""
    try:
        tf.function(
            lambda: function(*arguments), autograph=False
        ).get_concrete_function()
    except tf.errors.OperatorNotAllowedInGraphError as error:
        rule = "it branches in Python by the value of a tensor: use keras.ops.where or keras.ops.cond"
        raise ValueError(rule) from error


def _check_shapes(measure: Any, y: Any, outputs: Any) -> None:
    """Refuse (batch,) labels against (batch, n) outputs, which many of Keras' losses broadcast silently."""
    kind = type(measure)
    if not kind.__module__.startswith("keras.") or not (
        tf.is_tensor(y) and tf.is_tensor(outputs)
    ):
        return
    labels, predicted = list(y.shape[1:]), list(outputs.shape[1:])
    if kind.__name__ in _OTHER or not isinstance(
        measure, keras.losses.Loss | keras.metrics.MeanMetricWrapper
    ):
        return
    if kind.__name__ in _SPARSE:
        predicted = predicted[:-1]
    if [size for size in labels if size != 1] != [
        size for size in predicted if size != 1
    ]:
        raise ValueError("the shapes differ")


def _check_classes(
    loss: keras.losses.Loss, y: Any, outputs: Any, classes: int | None
) -> None:
    """Refuse what Keras computes silently: a label without an output, the logarithm of a logit."""
    if not isinstance(loss, _CROSS_ENTROPIES) or not (
        tf.is_tensor(y) and tf.is_tensor(outputs)
    ):
        return
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        labels, ignored = tf.cast(y, tf.int64), loss.ignore_class
        counting = labels if ignored is None else labels[labels != ignored]
        largest = (
            classes - 1
            if ignored is None and classes is not None
            else int(tf.reduce_max(counting))
        )
        for label in (largest, int(tf.reduce_min(counting))):
            if not 0 <= label < outputs.shape[-1]:
                raise ValueError(
                    f"label {label} is outside of the {outputs.shape[-1]} outputs"
                )
    elif float(tf.reduce_min(y)) < 0 or float(tf.reduce_max(y)) > 1:
        raise ValueError("the labels must be from 0 to 1")
    outside = (
        float(tf.reduce_min(outputs)) < 0 or float(tf.reduce_max(outputs)) > 1 + 1e-3
    )
    if outside and not loss.get_config().get("from_logits"):
        raise ValueError(
            "the outputs are no probabilities; for logits, set from_logits=true"
        )


# Losses and metrics whose labels lack the last axis of the outputs, and those of which they may have another shape: the
# labels of all others have that of the outputs.
_SPARSE = {
    "SparseCategoricalCrossentropy",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
}
_OTHER = {
    "CTC",
    "CategoricalGeneralizedCrossEntropy",
    "Circle",
    "LossFunctionWrapper",
    "MeanMetricWrapper",
}
_OTHER |= {"ConcordanceCorrelation", "PearsonCorrelation"}
_CROSS_ENTROPIES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.SparseCategoricalCrossentropy,
)


def _shape(nest: Any) -> str:
    return ", ".join(
        f"{tuple(leaf.shape)} {leaf.dtype.name}"
        for leaf in tf.nest.flatten(nest)
        if leaf is not None
    )
