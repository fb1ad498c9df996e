"""Config → loss, metrics and callbacks, and whether the loss fits the labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig

from pipeline import dataset, targets
from pipeline.accumulation import weighted_sum
from pipeline.dataset import Data
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Objective:
    """What is minimised and what is measured.

    Attributes:
        loss: of every update and of the validation split.
        metrics: of the updates.
        validation_metrics: the same ones, with state of their own.
        callbacks: Keras callbacks; one batch of theirs is one update.
    """

    loss: keras.losses.Loss
    metrics: list[keras.metrics.Metric]
    validation_metrics: list[keras.metrics.Metric]
    callbacks: list[keras.callbacks.Callback]


class FunctionLoss(keras.losses.Loss):
    """A function of (y_true, y_pred) that gives one value per example, as a loss.

    Args:
        function: what is called.
    """

    def __init__(self, function: Callable[[Any, Any], Any]):
        super().__init__(name=getattr(function, "__name__", "loss"))
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._function(y_true, y_pred)


def build(config: DictConfig) -> Objective:
    """The objective of the `training` group.

    Raises:
        ConfigError: a target or one of its arguments is wrong.
    """
    return Objective(
        _loss(config.loss),
        [_metric(node, name) for name, node in config.metrics.items()],
        [_metric(node, name) for name, node in config.metrics.items()],
        [_callback(node, name) for name, node in config.callbacks.items()],
    )


def check(objective: Objective, model: keras.Model, data: Data, micro_batch_size: int) -> None:
    """Computes the loss of one micro-batch, so that labels and outputs that do not fit are refused at once.

    Raises:
        ConfigError: the loss does not fit the labels or the model's outputs, or the model trains nothing.
    """
    batch = next(iter(dataset.in_order(data.train, min(micro_batch_size, 32))))
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loss = objective.loss
    try:
        outputs = model(x, training=False)
    except Exception as error:
        shape = data.input_shape
        raise ConfigError("model", f"must take the dataset's inputs ({_first_line(error)})", shape) from error
    if not model.trainable_variables:
        raise ConfigError("model", "must have weights to train", model.name)
    shapes = f"labels {_shape(y)} and outputs {_shape(outputs)}"
    try:
        _check_shapes(loss, y, outputs)
        _check_classes(loss, y, outputs)
        weighted_sum(loss, y, outputs, sample_weight)
        for metric in objective.metrics:
            metric.update_state(y, outputs)
            metric.reset_state()
    except Exception as error:
        raise ConfigError("training.loss", f"must fit {shapes} ({_first_line(error)})", type(loss).__name__) from error


def _check_shapes(loss: keras.losses.Loss, y: Any, outputs: Any) -> None:
    """Keras' own losses broadcast (batch,) labels against (batch, n) outputs, which is never meant."""
    if not type(loss).__module__.startswith("keras.") or not (tf.is_tensor(y) and tf.is_tensor(outputs)):
        return
    labels, predicted = [size for size in y.shape[1:]], [size for size in outputs.shape[1:]]
    if type(loss).__name__.startswith("Sparse"):
        predicted = predicted[:-1]
    if [size for size in labels if size != 1] != [size for size in predicted if size != 1]:
        raise ValueError("the shapes differ")


def _check_classes(loss: keras.losses.Loss, y: Any, outputs: Any) -> None:
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy) and tf.is_tensor(y):
        classes, largest = outputs.shape[-1], int(tf.reduce_max(tf.cast(y, tf.int64)))
        if largest >= classes:
            raise ValueError(f"label {largest} is outside of the {classes} outputs")


def _loss(node: DictConfig) -> keras.losses.Loss:
    made = targets.build(node, "training.loss")
    if isinstance(made, keras.losses.Loss):
        if made.reduction in (None, "none"):
            raise ConfigError("training.loss.reduction", "must be a mean or a sum", made.reduction)
        return made
    if callable(made):  # a function, by `_partial_: true`
        return FunctionLoss(made)
    raise ConfigError("training.loss._target_", "must give a keras.losses.Loss", type(made).__name__)


def _metric(node: DictConfig, name: str) -> keras.metrics.Metric:
    key = f"training.metrics.{name}"
    made = targets.build(node, key, name=name)
    if not isinstance(made, keras.metrics.Metric):
        raise ConfigError(f"{key}._target_", "must give a keras.metrics.Metric", type(made).__name__)
    return made


def _callback(node: DictConfig, name: str) -> keras.callbacks.Callback:
    key = f"training.callbacks.{name}"
    made = targets.build(node, key)
    if not isinstance(made, keras.callbacks.Callback):
        raise ConfigError(f"{key}._target_", "must give a keras.callbacks.Callback", type(made).__name__)
    return made


def _shape(nest: Any) -> str:
    return ", ".join(f"{tuple(leaf.shape)} {leaf.dtype.name}" for leaf in tf.nest.flatten(nest))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
