"""Builds the loss, the metrics and the callbacks of a config."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipeline.accumulation import internals
from pipeline.accumulation.internals import Losses, Metrics, by_name
from pipeline.checkpoints import snapshot
from pipeline.common.errors import ConfigError, as_config_error, first_line
from pipeline.config.objective_nodes import metrics_of
from pipeline.shown.functions import ShownFunction
from pipeline.trust import instantiate

# Attributes of Keras' callbacks that hold the path of a file or folder to write.
_PATH_ARGUMENTS = ("filepath", "filename", "log_dir")


@dataclass(frozen=True)
class RunObjective:
    """The loss, the metrics and the callbacks of a run.

    For a model with several outputs, losses and metrics may be given by output name.
    """

    training: internals.Objective
    evaluation: internals.Objective  # the same losses, with separate metric objects
    # The callbacks, by their names in the config. They see each update as one batch.
    callbacks: dict[str, keras.callbacks.Callback]
    # The functions of `training.shown`, by their names in the config.
    shown: dict[str, ShownFunction] = field(default_factory=dict)


class FunctionLoss(keras.losses.Loss):
    """A loss computed by a function of (y_true, y_pred).

    The function returns a tensor whose axis 0 has one entry per example.
    """

    def __init__(self, function: Callable[[Any, Any], Any]):
        super().__init__(name=getattr(function, "__name__", "loss"))
        self.fn = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        # Give labels and outputs the same rank, as `compile(loss=function)` does:
        # shapes (batch,) and (batch, 1) would broadcast to (batch, batch).
        if tf.is_tensor(y_true) and tf.is_tensor(y_pred):
            y_true = _with_rank_of_outputs(y_true, y_pred)
        return self.fn(y_true, y_pred)


def build(training: DictConfig) -> RunObjective:
    """Build the loss, the metrics and the callbacks of the `training` group.

    Raises:
        ConfigError: a target or an argument is wrong.
    """
    loss_weights = _loss_weights(training.loss_weights)
    losses = _losses(training.loss, "training.loss")
    if training.loss is None and training.loss_over != "example":
        rule = "must be example if training.loss is null"
        raise ConfigError("training.loss_over", rule, training.loss_over)

    def with_new_metrics() -> internals.Objective:
        return internals.Objective(
            loss=losses,
            loss_weights=loss_weights,
            metrics=_metrics(training, "metrics"),
            weighted_metrics=_metrics(training, "weighted_metrics"),
            added_losses=training.added_losses,
            loss_over=training.loss_over,
        )

    return RunObjective(
        training=with_new_metrics(),
        evaluation=with_new_metrics(),
        callbacks={
            str(name): _callback(node, name)
            for name, node in training.callbacks.items()
        },
        shown={
            str(name): _shown_function(node, name)
            for name, node in training.shown.items()
        },
    )


def compile(
    objective: RunObjective,
    model: keras.Model,
    optimizer: keras.Optimizer,
    y: Any,
    outputs: Any,
) -> None:
    """Compile the model, and check that the run's callbacks work with it.

    Training does not use Keras' compiled loss; the callbacks and the saved model do.

    Args:
        objective: the loss, the metrics and the callbacks.
        model: the built model.
        optimizer: the optimizer of the model.
        y: the labels of a few examples.
        outputs: the model's outputs for these examples.

    Raises:
        ConfigError: a callback fails with this model, or its state cannot be saved.
    """
    goal = objective.training
    loss_weights = goal.loss_weights
    if isinstance(loss_weights, dict):  # Keras requires a weight for each output.
        loss_weights = {}
        for name in by_name(model, outputs):
            weight = goal.loss_weights.get(name)
            loss_weights[name] = 1.0 if weight is None else weight
    model.compile(
        optimizer,
        goal.loss,
        loss_weights=loss_weights,
        metrics=goal.metrics or None,
        weighted_metrics=goal.weighted_metrics or None,
    )
    # Keras' callbacks look up the metric that they monitor in built metrics only.
    if tf.is_tensor(y) and tf.is_tensor(outputs):
        for metric in model.metrics:
            if not getattr(metric, "built", True):
                metric.build(y, outputs)

    for name, callback in objective.callbacks.items():
        key = f"training.callbacks.{name}"
        kind = type(callback).__name__
        with as_config_error(key, "must be able to run", kind):
            _check_callback(callback, model)
            snapshot.check_callback_can_be_saved(name, callback)


def notes_on_files(callbacks: Mapping[str, keras.callbacks.Callback]) -> list[str]:
    """Return a line for each callback that writes to a relative path.

    The path is relative to the working folder, which other runs share.
    """
    lines = []
    for name, callback in callbacks.items():
        for argument in _PATH_ARGUMENTS:
            path = getattr(callback, argument, None)
            if isinstance(path, str) and path and not _is_absolute(path):
                lines.append(
                    f"training.callbacks.{name} writes to {path} in the working folder, "
                    f"where another run overwrites it; set {argument}: "
                    f"${{hydra:runtime.output_dir}}/{path}"
                )
    return lines


def _is_absolute(path: str) -> bool:
    return "://" in path or Path(path).is_absolute()


def _with_rank_of_outputs(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Add or drop a last axis of size 1, so that labels have the rank of outputs.

    Labels that differ from the outputs in another way are returned unchanged.
    """
    if not labels.shape.rank or not outputs.shape.rank:
        return labels
    if labels.shape.rank == outputs.shape.rank + 1 and labels.shape[-1] == 1:
        return tf.squeeze(labels, -1)
    if outputs.shape.rank == labels.shape.rank + 1 and outputs.shape[-1] == 1:
        return tf.expand_dims(labels, -1)
    return labels


def _loss_weights(node: Any) -> Any:
    """Return the loss weights of a node with numbers as floats; None stays None."""
    weights = node
    if OmegaConf.is_config(node):
        weights = OmegaConf.to_container(node)

    def as_float(weight: Any) -> float | None:
        return None if weight is None else float(weight)

    return tf.nest.map_structure(as_float, weights)


def _losses(node: Any, key: str) -> Losses:
    if node is None:
        return None
    if isinstance(node, ListConfig):
        return [_losses(inner, f"{key}.{index}") for index, inner in enumerate(node)]
    if "_target_" not in node:
        return {name: _losses(inner, f"{key}.{name}") for name, inner in node.items()}
    return _loss(node, key)


def _loss(node: DictConfig, key: str) -> keras.losses.Loss:
    loss = instantiate.build(node, key)
    kind = type(loss)
    if not isinstance(loss, keras.losses.Loss):
        if callable(loss):  # a function, given with `_partial_: true`
            return FunctionLoss(loss)
        rule = "must build a keras.losses.Loss"
        raise ConfigError(f"{key}._target_", rule, kind.__name__)
    if loss.reduction in (None, "none"):
        raise ConfigError(f"{key}.reduction", "must be a mean or a sum", loss.reduction)
    if kind.__call__ is not keras.losses.Loss.__call__:
        rule = (
            "must compute one value per example in `call`, because "
            "its __call__ is never called"
        )
        raise ConfigError(f"{key}._target_", rule, kind.__name__)
    return loss


def _metrics(training: DictConfig, group: str) -> Metrics:
    """Return the metrics of a group: a list, or a dict of lists by output name.

    Raises:
        ConfigError: a metric cannot be built, or only some have the name of an output.
    """
    nodes = metrics_of(training, group)
    metrics_by_output: dict[Any, list[keras.metrics.Metric]] = {}
    for node in nodes:
        metric = _metric(node.node, node.key, node.name)
        metrics_by_output.setdefault(node.output, []).append(metric)
    if None in metrics_by_output and len(metrics_by_output) > 1:
        rule = "must have all or none of its metrics under the name of an output"
        names = [node.full_name for node in nodes]
        raise ConfigError(f"training.{group}", rule, names)
    return metrics_by_output.get(None, metrics_by_output)


def _metric(node: DictConfig, key: str, name: str) -> keras.metrics.Metric:
    arguments = instantiate.accepted(instantiate.locate(node, key), node, name=name)
    metric = instantiate.build(node, key, **arguments)
    if node.get("_partial_") and callable(
        metric
    ):  # a function, which is wrapped as in Keras' `compile`
        metric = keras.metrics.MeanMetricWrapper(metric, name=name)
    if not isinstance(metric, keras.metrics.Metric):
        rule = "must build a keras.metrics.Metric"
        raise ConfigError(f"{key}._target_", rule, type(metric).__name__)
    metric.name = name  # The class may have no parameter `name`.
    return metric


def _shown_function(node: DictConfig, name: str) -> ShownFunction:
    key = f"training.shown.{name}"
    function = instantiate.build(node, key)
    if not callable(function):
        rule = "must give a function of (x, y, outputs), with _partial_: true"
        raise ConfigError(f"{key}._target_", rule, type(function).__name__)
    return function


def _callback(node: DictConfig, name: str) -> keras.callbacks.Callback:
    key = f"training.callbacks.{name}"
    callback = instantiate.build(node, key)
    kind = type(callback).__name__
    if not isinstance(callback, keras.callbacks.Callback):
        rule = "must build a keras.callbacks.Callback"
        raise ConfigError(f"{key}._target_", rule, kind)
    # Reject BackupAndRestore: after an interruption in an epoch, it would repeat the
    # whole epoch with weights already trained on a part of it.
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        rule = (
            "must be left out: training.checkpoint_every replaces it, and "
            "pipeline resume continues from the last checkpoint"
        )
        raise ConfigError(f"{key}._target_", rule, kind)
    # SwapEMAWeights would swap the weights and their averages a second time.
    if isinstance(callback, keras.callbacks.SwapEMAWeights):
        rule = (
            "must be left out: with +optimizer.use_ema=true, evaluations, callbacks' "
            "on_epoch_end and the trained model already have the averaged weights"
        )
        raise ConfigError(f"{key}._target_", rule, kind)
    # If the monitored value is missing, ModelCheckpoint saves as if it were the best.
    is_checkpoint = isinstance(callback, keras.callbacks.ModelCheckpoint)
    if is_checkpoint and callback.save_best_only and callback.save_freq != "epoch":
        if callback.monitor.startswith("val_"):
            rule = f"must be epoch: a single update has no {callback.monitor}"
            raise ConfigError(f"{key}.save_freq", rule, callback.save_freq)
    return callback


def _check_callback(callback: keras.callbacks.Callback, model: keras.Model) -> None:
    """Raise an error if a Keras callback would fail in its first epoch.

    The check runs new callbacks with the same settings, so that the callback itself and
    the learning rate remain unchanged.
    """
    is_board = isinstance(callback, keras.callbacks.TensorBoard)
    if is_board and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "it needs the package tensorboard, which the extra tensorboard installs"
        )

    saves_model = isinstance(callback, keras.callbacks.ModelCheckpoint)
    if saves_model and not callback.save_weights_only:
        _check_serializable(model)

    monitors = isinstance(getattr(callback, "monitor", None), str)
    if monitors and hasattr(callback, "mode"):
        trial = keras.callbacks.EarlyStopping(
            callback.monitor, mode=callback.mode, patience=1
        )
        trial.set_model(model)
        trial.on_train_begin()
        trial.on_epoch_end(0, {callback.monitor: 0.0})

    schedules = isinstance(callback, keras.callbacks.LearningRateScheduler)
    if schedules or isinstance(callback, keras.callbacks.ReduceLROnPlateau):
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        try:
            model.optimizer.learning_rate = rate
        except TypeError:
            why = "it sets the learning rate, which only schedule=constant allows"
            raise ValueError(why) from None
        if schedules:
            scheduler = keras.callbacks.LearningRateScheduler(callback.schedule)
            scheduler.set_model(model)
            scheduler.on_epoch_begin(0)
            model.optimizer.learning_rate = rate


def _check_serializable(model: keras.Model) -> None:
    """Raise a ValueError if Keras cannot save the whole model."""
    try:
        keras.saving.serialize_keras_object(model)
    except Exception as error:  # `get_config` is user code and may raise anything
        reason = first_line(error)
        raise ValueError(
            f"{reason}. To save only the weights, set save_weights_only: true and a "
            "filepath that ends in .weights.h5"
        ) from error
