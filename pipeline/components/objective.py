"""Config → loss, metrics and callbacks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from omegaconf import DictConfig, ListConfig, OmegaConf

from pipeline.accumulation import internals
from pipeline.accumulation.internals import Losses, Metrics, by_name
from pipeline.checkpoints import snapshot
from pipeline.common.errors import ConfigError, refused
from pipeline.config.objective_nodes import METRIC_GROUPS, metrics_of
from pipeline.trust import instantiate


@dataclass(frozen=True)
class Objective:
    """What is minimised and what is measured; what is of several outputs stands under the name of the output."""

    training: internals.Objective
    evaluation: (
        internals.Objective
    )  # the same, with metrics that have a state of their own
    callbacks: dict[
        str, keras.callbacks.Callback
    ]  # by their names in the config; one batch of theirs is one update


class FunctionLoss(keras.losses.Loss):
    """A loss that calls a function of (y_true, y_pred), which returns one value per example, on axis 0."""

    def __init__(self, function: Callable[[Any, Any], Any]):
        super().__init__(name=getattr(function, "__name__", "loss"))
        self.fn = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        # As `compile(loss=function)` does: (batch,) labels beside (batch, 1) outputs would be broadcast.
        if (
            tf.is_tensor(y_true)
            and tf.is_tensor(y_pred)
            and y_true.shape.rank
            and y_pred.shape.rank
        ):
            if y_true.shape.rank == y_pred.shape.rank + 1 and y_true.shape[-1] == 1:
                y_true = tf.squeeze(y_true, -1)
            elif y_pred.shape.rank == y_true.shape.rank + 1 and y_pred.shape[-1] == 1:
                y_true = tf.expand_dims(y_true, -1)
        return self.fn(y_true, y_pred)


def build(training: DictConfig) -> Objective:
    """Return the objective of the `training` group; raise a `ConfigError` for a wrong target or argument."""
    weights: Any = training.loss_weights
    if OmegaConf.is_config(weights):
        weights = OmegaConf.to_container(weights)
    weights = tf.nest.map_structure(
        lambda weight: None if weight is None else float(weight), weights
    )
    losses: dict[str, Any] = {
        "loss": _losses(training.loss, "training.loss"),
        "loss_weights": weights,
    }
    losses |= {"added_losses": training.added_losses, "loss_over": training.loss_over}
    if training.loss is None and training.loss_over != "example":
        raise ConfigError(
            "training.loss_over",
            "must be example where training.loss is null",
            training.loss_over,
        )
    groups = [
        {group: _metrics(training, group) for group in METRIC_GROUPS} for _ in range(2)
    ]
    goal, evaluated = (internals.Objective(**(losses | metrics)) for metrics in groups)
    return Objective(
        goal,
        evaluated,
        {str(name): _callback(node, name) for name, node in training.callbacks.items()},
    )


def compile(
    objective: Objective,
    model: keras.Model,
    optimizer: keras.Optimizer,
    y: Any,
    outputs: Any,
) -> None:
    """Compile the model as its callbacks look for it, and the saved model keeps it; try its callbacks."""
    goal, weights = objective.training, objective.training.loss_weights
    if isinstance(weights, dict):  # Keras wants one for each
        weights = {
            name: 1.0 if weights.get(name) is None else weights[name]
            for name in by_name(model, outputs)
        }
    metrics = {
        "metrics": goal.metrics or None,
        "weighted_metrics": goal.weighted_metrics or None,
    }
    model.compile(optimizer, goal.loss, loss_weights=weights, **metrics)
    if tf.is_tensor(y) and tf.is_tensor(outputs):
        for compiled in model.metrics:
            if not getattr(
                compiled, "built", True
            ):  # Keras' callbacks look in it for the metric that they monitor
                compiled.build(y, outputs)
    for name, callback in objective.callbacks.items():
        with refused(
            f"training.callbacks.{name}",
            "must be able to do its work",
            type(callback).__name__,
        ):
            _check_callback(callback, model)
            snapshot.check_state(name, callback)


def _check_callback(callback: keras.callbacks.Callback, model: keras.Model) -> None:
    """Raise where a Keras callback would at the end of the first epoch; a fresh one is tried, with nothing to stop."""
    if isinstance(getattr(callback, "monitor", None), str) and hasattr(
        callback, "mode"
    ):
        trial = keras.callbacks.EarlyStopping(
            callback.monitor, mode=callback.mode, patience=1
        )
        trial.set_model(model)
        trial.on_train_begin()
        trial.on_epoch_end(0, {callback.monitor: 0.0})
    if isinstance(
        callback,
        keras.callbacks.LearningRateScheduler | keras.callbacks.ReduceLROnPlateau,
    ):
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        try:
            model.optimizer.learning_rate = rate
        except TypeError:
            raise ValueError(
                "it sets the learning rate, which only schedule=constant allows"
            ) from None
        if isinstance(callback, keras.callbacks.LearningRateScheduler):
            scheduler = keras.callbacks.LearningRateScheduler(callback.schedule)
            scheduler.set_model(model)
            scheduler.on_epoch_begin(0)
            model.optimizer.learning_rate = rate


def _losses(node: Any, key: str) -> Losses:
    if node is None:
        return None
    if isinstance(node, ListConfig):
        return [_losses(inner, f"{key}.{index}") for index, inner in enumerate(node)]
    if "_target_" not in node:
        return {name: _losses(inner, f"{key}.{name}") for name, inner in node.items()}
    made = instantiate.build(node, key)
    if isinstance(made, keras.losses.Loss):
        if made.reduction in (None, "none"):
            raise ConfigError(
                f"{key}.reduction", "must be a mean or a sum", made.reduction
            )
        if type(made).__call__ is not keras.losses.Loss.__call__:
            rule = "must compute in `call`, one value per example: its __call__ is not called here"
            raise ConfigError(f"{key}._target_", rule, type(made).__name__)
        return made
    if callable(made):  # a function, by `_partial_: true`
        return FunctionLoss(made)
    raise ConfigError(
        f"{key}._target_", "must give a keras.losses.Loss", type(made).__name__
    )


def _metrics(training: DictConfig, group: str) -> Metrics:
    """Return the metrics of a group: a list for the only output, or lists by the names of outputs."""
    nodes, made = metrics_of(training, group), dict[Any, list[keras.metrics.Metric]]()
    for metric in nodes:
        made.setdefault(metric.output, []).append(
            _metric(metric.node, metric.key, metric.name)
        )
    if None in made and len(made) > 1:
        rule = "must have all metrics under the name of their output, or none"
        raise ConfigError(
            f"training.{group}", rule, [metric.full_name for metric in nodes]
        )
    return made.get(None, made)


def _metric(node: DictConfig, key: str, name: str) -> keras.metrics.Metric:
    made = instantiate.build(
        node,
        key,
        **instantiate.accepted(instantiate.locate(node, key), node, name=name),
    )
    if node.get("_partial_") and callable(made):  # a function
        made = keras.metrics.MeanMetricWrapper(made, name=name)  # as `compile` does
    if not isinstance(made, keras.metrics.Metric):
        raise ConfigError(
            f"{key}._target_", "must give a keras.metrics.Metric", type(made).__name__
        )
    made.name = name  # also that of a class which takes none
    return made


def _callback(node: DictConfig, name: str) -> keras.callbacks.Callback:
    key = f"training.callbacks.{name}"
    made = instantiate.build(node, key)
    if not isinstance(made, keras.callbacks.Callback):
        raise ConfigError(
            f"{key}._target_",
            "must give a keras.callbacks.Callback",
            type(made).__name__,
        )
    if isinstance(
        made, keras.callbacks.BackupAndRestore
    ):  # it repeats an epoch on weights that have seen half of it
        rule = "must be left out: training.checkpoint_every is for that, and pipeline resume goes on from there"
        raise ConfigError(f"{key}._target_", rule, type(made).__name__)
    return made
