"""Reports callbacks that monitor a metric that is missing at the end of an epoch."""

from collections.abc import Mapping
from typing import Any

import keras

from pipeline.common.errors import say
from pipeline.training.evaluator import Evaluations


class MonitoredMetrics:
    """Prints a line, once for each callback whose monitored metric is missing.

    Keras' own warning does not name the callback. Without the metric, `EarlyStopping`
    never stops, and `ModelCheckpoint(save_best_only=True)` saves as if the epoch were
    the best one.
    """

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        self._named: set[str] = set()

    def check(
        self,
        name: str,
        callback: keras.callbacks.Callback,
        epoch: int,
        logs: Mapping[str, Any],
    ) -> None:
        """Print the line if the callback monitors a metric that `logs` lacks.

        Args:
            name: the name of the callback in the config.
            callback: the callback.
            epoch: the epoch that ends, counted from 0.
            logs: the logs of `on_epoch_end`, with the values that callbacks have added.
        """
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str) or monitor in logs or name in self._named:
            return
        self._named.add(name)
        saves = ""
        if getattr(callback, "save_best_only", False):
            saves = ", so the callback saves as if the epoch were the best"
        say(
            f"training.callbacks.{name} monitors {monitor}, which is missing at the end "
            f"of epoch {epoch + 1}{saves}: {self._remedy(monitor, logs)}"
        )

    def _remedy(self, monitor: str, logs: Mapping[str, Any]) -> str:
        for name in self._evaluations.sets:
            prefix = self._evaluations.log_name(f"{name}/")
            if monitor.startswith(prefix) and not _any_with(prefix, logs):
                return (
                    f"set `every: epoch` in dataset.validations.{name} to evaluate at "
                    "the end of each epoch"
                )
        evaluated = self._evaluations.validation is not None
        if evaluated and monitor.startswith("val_") and not _any_with("val_", logs):
            return "set training.evaluate_every=epoch to evaluate at each epoch's end"
        return f"the logs have {', '.join(sorted(logs))}"


def _any_with(prefix: str, logs: Mapping[str, Any]) -> bool:
    return any(name.startswith(prefix) for name in logs)
