"""Checks that the metrics which Keras' callbacks monitor can be in their logs."""

from collections.abc import Mapping, Sequence

import keras

from pipeline.common.errors import ConfigError
from pipeline.config.metric_names import UPDATE_METRICS
from pipeline.config.validation_sets import ValidationSet
from pipeline.dataset.splits import Data

# The values of updates that users monitor; the rest of `UPDATE_METRICS` is accepted,
# but not listed.
_LISTED = ("gradient_norm", "learning_rate")


def check(
    callbacks: Mapping[str, keras.callbacks.Callback],
    data: Data,
    sets: Sequence[ValidationSet],
    results: Sequence[str],
) -> list[str]:
    """Reject a Keras callback that monitors a name that no epoch can log.

    A callback of the user's own may add any metric to the logs. If there is one, only a
    name that a metric has in MLflow, such as `val/loss`, is rejected. For a name that
    only such a callback can log, return a line that says so.

    Args:
        callbacks: the callbacks, by their names in the config.
        data: the loaded dataset.
        sets: the sets of `dataset.validations`.
        results: the names of the loss and the metrics of an evaluation.

    Raises:
        ConfigError: a callback monitors a name that is rejected. The message lists the
            names that the logs can have.
    """
    choices = []
    if data.validation is not None:
        choices += [f"val_{name}" for name in results]
    for validation_set in sets:
        choices += [f"val_{validation_set.name}_{name}" for name in results]
    choices += [*results, *_LISTED]
    accepted = {*choices, *UPDATE_METRICS}

    notes = []
    may_be_added = any(not _is_of_keras(each) for each in callbacks.values())
    for name, callback in callbacks.items():
        monitor = _monitored(callback)
        if monitor is None or monitor in accepted:
            continue
        key = f"training.callbacks.{name}.monitor"
        if may_be_added and _name_in_logs(monitor) not in accepted:
            notes.append(
                f"{key}: only a callback of your own can add {monitor} to the logs, "
                f"which have {', '.join(choices)}"
            )
            continue
        rule = "must be a name in the logs of Keras' callbacks"
        raise ConfigError(key, rule, monitor, choices)
    return notes


def _monitored(callback: keras.callbacks.Callback) -> str | None:
    """Return the metric on which a callback of Keras depends, or None."""
    monitor = getattr(callback, "monitor", None)
    # A ModelCheckpoint that saves every epoch ignores it.
    is_ignored = not getattr(callback, "save_best_only", True)
    if not isinstance(monitor, str) or is_ignored or not _is_of_keras(callback):
        return None
    return monitor


def _is_of_keras(callback: keras.callbacks.Callback) -> bool:
    return type(callback).__module__.startswith("keras.")


def _name_in_logs(metric: str) -> str:
    """Return the name in the logs of a metric that has the name `metric` in MLflow."""
    return metric.removeprefix("train/").replace("/", "_")
