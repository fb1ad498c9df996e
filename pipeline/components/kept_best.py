"""Builds the tracker of the best evaluation, for `training.keep_best`."""

from collections.abc import Sequence
from typing import Any

import keras

from pipeline.accumulation import internals
from pipeline.common.errors import ConfigError
from pipeline.config.schema import KeepBestConfig
from pipeline.config.validation_sets import ValidationSet
from pipeline.dataset.splits import Data
from pipeline.training.evaluator import Best


def result_names(
    model: keras.Model, goal: internals.Objective, outputs: Any
) -> list[str]:
    """Return the names of the loss and the metrics of an evaluation.

    Args:
        model: the model.
        goal: the objective of evaluations.
        outputs: the model's outputs.
    """
    output_names = list(internals.by_name(model, outputs))
    losses_by_output = internals.spread(goal.loss, output_names, "loss", to_all=True)
    with_loss = [name for name, loss in losses_by_output.items() if loss is not None]
    names = ["loss"]
    if len(with_loss) > 1:
        names += [f"{output}_loss" for output in with_loss]
    return [*names, *goal.measured()]


def build(
    keep: KeepBestConfig | None,
    data: Data,
    sets: Sequence[ValidationSet],
    results: Sequence[str],
) -> Best | None:
    """Return the tracker of the best evaluation, or None if no checkpoint is kept.

    Args:
        keep: `training.keep_best`.
        data: the loaded dataset.
        sets: the sets of `dataset.validations`.
        results: the names of the loss and the metrics of an evaluation.

    Raises:
        ConfigError: there is no validation split, or no evaluation returns the metric
            of `keep`.
    """
    if keep is None or keep.metric is None or keep.mode is None:
        return None
    key = "training.keep_best.metric"
    choices = []
    if data.validation is not None:
        choices += [f"val/{name}" for name in results]
    for validation_set in sets:
        choices += [f"val/{validation_set.name}/{name}" for name in results]
    if not choices:
        rule = "must be null: the dataset has no validation split"
        raise ConfigError(key, rule, keep.metric)
    if keep.metric not in choices:
        rule = "must be a metric of the validation split"
        raise ConfigError(key, rule, keep.metric, choices)
    return Best(keep.metric.removeprefix("val/"), keep.mode.name)
