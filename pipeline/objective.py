"""Config → loss, metrics and callbacks, and whether the loss fits the labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig

from pipeline import batching, instantiate
from pipeline.accumulation import update_metrics, weighted_sum
from pipeline.dataset import Data
from pipeline.errors import ConfigError, refused


@dataclass(frozen=True)
class Objective:
    """What is minimised and what is measured.

    Attributes:
        loss: used in every update and on the validation split.
        metrics: used in the updates.
        validation_metrics: the same metrics, with state of their own.
        named_callbacks: Keras callbacks under their names in the config; one batch of theirs is one update.
    """

    loss: keras.losses.Loss
    metrics: list[keras.metrics.Metric]
    validation_metrics: list[keras.metrics.Metric]
    named_callbacks: dict[str, keras.callbacks.Callback]

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        return list(self.named_callbacks.values())


class FunctionLoss(keras.losses.Loss):
    """A loss that calls a function of (y_true, y_pred), which returns one value per example.

    Args:
        function: takes tensors with the examples on axis 0.
    """

    def __init__(self, function: Callable[[Any, Any], Any]):
        super().__init__(name=getattr(function, "__name__", "loss"))
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._function(y_true, y_pred)


def build(config: DictConfig) -> Objective:
    """Return the objective of the `training` group.

    Raises:
        ConfigError: a target or one of its arguments is wrong.
    """
    return Objective(
        _loss(config.loss),
        [_metric(node, name) for name, node in config.metrics.items()],
        [_metric(node, name) for name, node in config.metrics.items()],
        {str(name): _callback(node, name) for name, node in config.callbacks.items()},
    )


def check(objective: Objective, model: keras.Model, data: Data, micro_batch_size: int) -> None:
    """Compute the loss of one micro-batch, so that labels and outputs that do not fit are refused at once.

    Build the model, and the metrics that it was compiled with, where they are not built yet.

    Raises:
        ConfigError: the loss does not fit the labels or the model's outputs, the model trains nothing, or a callback
            cannot do its work.
    """
    batch = next(iter(batching.in_order(data.train, min(micro_batch_size, 32))))
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loss = objective.loss
    with refused("model", f"must take inputs of {_shape(x)}", model.name):
        outputs = model(x, training=False)
    if not model.trainable_variables:
        raise ConfigError("model", "must have weights to train", model.name)
    # By the outputs and not by the weights, which under a strategy have gradients inside of a replica only. From a
    # softmax or a sigmoid Keras takes the logits, which it has left on the output.
    reached = tf.nest.flatten(outputs)
    reached += [output._keras_logits for output in reached if hasattr(output, "_keras_logits")]
    with tf.GradientTape() as tape:
        tape.watch(reached)
        fit = f"must fit labels {_shape(y)} and outputs {_shape(outputs)}"
        with refused("training.loss", fit, loss.name):
            _check_shapes(loss, y, outputs)
            _check_classes(loss, y, outputs, data.classes)
            total, _ = weighted_sum(loss, y, outputs, sample_weight)
            _trace(weighted_sum, loss, y, outputs, sample_weight)
    if all(gradient is None for gradient in tape.gradient(total, reached)):
        raise ConfigError("training.loss", "must depend on the model's outputs: no gradient reaches any", loss.name)
    for metric in objective.metrics:
        with refused(f"training.metrics.{metric.name}", fit, type(metric).__name__):
            _check_shapes(metric, y, outputs)
            update_metrics([metric], y, outputs)
            _trace(update_metrics, [metric], y, outputs)
            if tf.nest.is_nested(result := metric.result()) or tf.convert_to_tensor(result).shape.rank != 0:
                raise ValueError("its result is not one number")
        metric.reset_state()
    if tf.is_tensor(y) and tf.is_tensor(outputs):  # for a nest, `fit` wants metrics of each of its parts
        for compiled in model.metrics:
            if not getattr(compiled, "built", True):  # Keras' callbacks look in it for the metric that they monitor
                compiled.build(y, outputs)
    for name, callback in objective.named_callbacks.items():
        with refused(f"training.callbacks.{name}", "must be able to do its work", type(callback).__name__):
            _check_callback(callback, model)


def _check_callback(callback: keras.callbacks.Callback, model: keras.Model) -> None:
    """Raise where a Keras callback would raise at the first end of an epoch.

    Fresh callbacks are tried in its place, with nothing to write and nothing to stop.
    """
    if isinstance(getattr(callback, "monitor", None), str) and hasattr(callback, "mode"):
        trial = keras.callbacks.EarlyStopping(callback.monitor, mode=callback.mode, patience=1)
        trial.set_model(model)
        trial.on_train_begin()
        trial.on_epoch_end(0, {callback.monitor: 0.0})
    sets_rate = keras.callbacks.LearningRateScheduler | keras.callbacks.ReduceLROnPlateau
    if isinstance(callback, sets_rate):
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        try:
            model.optimizer.learning_rate = rate
        except TypeError:
            raise ValueError("it sets the learning rate, which only schedule=constant allows") from None
        if isinstance(callback, keras.callbacks.LearningRateScheduler):
            scheduler = keras.callbacks.LearningRateScheduler(callback.schedule)
            scheduler.set_model(model)
            scheduler.on_epoch_begin(0)
            model.optimizer.learning_rate = rate


def _trace(function: Callable[..., Any], *arguments: Any) -> None:
    """Raise where `function` cannot be traced, which a call does not show; compute nothing."""
    try:
        tf.function(lambda: function(*arguments), autograph=False).get_concrete_function()
    except tf.errors.OperatorNotAllowedInGraphError as error:
        rule = "it branches in Python by the value of a tensor: use keras.ops.where or keras.ops.cond"
        raise ValueError(rule) from error


def _check_shapes(measure: Any, y: Any, outputs: Any) -> None:
    """Refuse (batch,) labels against (batch, n) outputs, which many of Keras' losses broadcast without a word."""
    kind = type(measure)
    if not kind.__module__.startswith("keras.") or not (tf.is_tensor(y) and tf.is_tensor(outputs)):
        return
    labels, predicted = list(y.shape[1:]), list(outputs.shape[1:])
    if kind.__name__ in _SPARSE:
        predicted = predicted[:-1]
    elif kind.__name__ not in _ELEMENTWISE:
        return
    if [size for size in labels if size != 1] != [size for size in predicted if size != 1]:
        raise ValueError("the shapes differ")


def _check_classes(loss: keras.losses.Loss, y: Any, outputs: Any, classes: int | None) -> None:
    """Refuse what Keras computes without a word: a label without an output, the logarithm of a logit."""
    if not isinstance(loss, _CROSS_ENTROPIES) or not (tf.is_tensor(y) and tf.is_tensor(outputs)):
        return
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        labels, ignored = tf.cast(y, tf.int64), loss.ignore_class
        counting = labels if ignored is None else labels[labels != ignored]
        largest = classes - 1 if ignored is None and classes is not None else int(tf.reduce_max(counting))
        if largest >= outputs.shape[-1]:
            raise ValueError(f"label {largest} is outside of the {outputs.shape[-1]} outputs")
    outside = float(tf.reduce_min(outputs)) < 0 or float(tf.reduce_max(outputs)) > 1 + 1e-3
    if outside and not loss.get_config().get("from_logits"):
        raise ValueError("the outputs are no probabilities; for logits, set from_logits=true")


# Losses and metrics whose labels have the shape of the outputs, and those whose labels lack its last axis.
_ELEMENTWISE = {
    *("MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredLogarithmicError"),
    *("Huber", "LogCosh", "LogCoshError", "CosineSimilarity", "Hinge", "SquaredHinge", "CategoricalHinge"),
    *("KLDivergence", "Poisson", "BinaryCrossentropy", "BinaryFocalCrossentropy", "Dice", "Tversky"),
    *("CategoricalCrossentropy", "CategoricalFocalCrossentropy"),
    *("Accuracy", "BinaryAccuracy", "CategoricalAccuracy", "TopKCategoricalAccuracy"),
}
_SPARSE = {"SparseCategoricalCrossentropy", "SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy"}
_CROSS_ENTROPIES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.SparseCategoricalCrossentropy,
)


def _loss(node: DictConfig) -> keras.losses.Loss:
    made = instantiate.build(node, "training.loss")
    if isinstance(made, keras.losses.Loss):
        if made.reduction in (None, "none"):
            raise ConfigError("training.loss.reduction", "must be a mean or a sum", made.reduction)
        if type(made).__call__ is not keras.losses.Loss.__call__:
            rule = "must compute in `call`, one value per example: its __call__ is not called here"
            raise ConfigError("training.loss._target_", rule, type(made).__name__)
        return made
    if callable(made):  # a function, by `_partial_: true`
        return FunctionLoss(made)
    raise ConfigError("training.loss._target_", "must give a keras.losses.Loss", type(made).__name__)


def _metric(node: DictConfig, name: str) -> keras.metrics.Metric:
    key = f"training.metrics.{name}"
    made = instantiate.build(node, key, **instantiate.accepted(instantiate.locate(node, key), node, name=name))
    if not isinstance(made, keras.metrics.Metric):
        raise ConfigError(f"{key}._target_", "must give a keras.metrics.Metric", type(made).__name__)
    made.name = name  # also that of a class which takes none
    return made


def _callback(node: DictConfig, name: str) -> keras.callbacks.Callback:
    key = f"training.callbacks.{name}"
    made = instantiate.build(node, key)
    if not isinstance(made, keras.callbacks.Callback):
        raise ConfigError(f"{key}._target_", "must give a keras.callbacks.Callback", type(made).__name__)
    return made


def _shape(nest: Any) -> str:
    return ", ".join(f"{tuple(leaf.shape)} {leaf.dtype.name}" for leaf in tf.nest.flatten(nest))
