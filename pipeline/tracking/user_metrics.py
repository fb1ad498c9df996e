"""Logs metrics from the user's own code: `pipeline.log`.

Callbacks call `pipeline.log`, and layers call it in `tf.py_function`. The training loop
sets the update to which a value belongs. This module does not import TensorFlow or
MLflow.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import say
from pipeline.config.metric_names import NAME_RULE, UPDATE_METRICS, is_name

if TYPE_CHECKING:
    from pipeline.tracking.tracker import Tracker


class UserMetrics:
    """Logs the metrics of the user's own code while a run trains.

    Args:
        tracker: logs the values. None on a worker other than the chief, where nothing
            is logged.

    Attributes:
        update: the number of the current update, for which values are logged.
        taken: names of metrics, besides `UPDATE_METRICS`, that the run itself logs.
    """

    def __init__(self, tracker: Tracker | None):
        self.update = 0
        self.taken: frozenset[str] = frozenset()
        self._tracker = tracker
        self._reported: set[str] = set()  # keys of the messages that were printed
        # The user's code in `tf.py_function` runs in TensorFlow's threads, so this lock
        # guards the check that the update has no value yet. The journal has its own
        # lock for writing a line.
        self._lock = threading.Lock()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within the block, make `log` write to this run."""
        global _current
        before = _current
        _current = self
        try:
            yield
        finally:
            _current = before

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within the block, such as an evaluation, make `log` do nothing."""
        global _current
        before = _current
        _current = None
        try:
            yield
        finally:
            _current = before

    def add(self, name: str, value: float) -> None:
        """Log a value for the current update.

        Only the first value per update is logged, since a metric has one point per
        update. A later value is dropped, with a message the first time.

        Raises:
            ValueError: the run itself logs a metric of this name.
        """
        if name in self.taken:
            raise ValueError(_name_error(name))
        if self._tracker is None:
            return
        with self._lock:
            is_first = self._tracker.user_metric(self.update, name, value)
        if not is_first:
            self._report_once(
                f"train/{name} was logged more than once for update {self.update}: "
                "the first value of an update counts",
                key=name,
            )

    def add_logs(self, callback: str, added: dict[str, Any]) -> None:
        """Log the values that a callback has added to the logs of its `on_epoch_end`.

        A value that cannot be logged is reported in a message. Metrics that the run
        itself logs are skipped, such as the learning rate, which some of Keras'
        callbacks add.

        Args:
            callback: the callback's name in the config.
            added: the added values, by name.
        """
        for name, value in added.items():
            if name in UPDATE_METRICS or name in self.taken:
                continue
            try:
                self.add(checked_name(name), checked_value(name, value))
            except ValueError as error:
                line = f"training.callbacks.{callback}: logs[{name!r}] is not logged"
                self._report_once(f"{line}: {error}", key=line)

    def report_other_run(self, callback: str, *, ended: bool = False) -> None:
        """If MLflow's own functions log to another run, report this once.

        Args:
            callback: the name of the callback that ran last, or "" if it is unknown.
            ended: whether to find a run that has ended, too. This sends a request to
                the store of that run.
        """
        if self._tracker is None:
            return
        run_id = _run_of_mlflow(ended)
        if not run_id or run_id == self._tracker.run_id:
            return
        who = "a callback logged"
        if callback:
            who = f"training.callbacks.{callback} logs"
        self._report_once(
            f"{who} to another MLflow run ({run_id}): to log to the run that trains, "
            "call pipeline.log(name, value)",
            key="another run",
        )

    def _report_once(self, line: str, key: str) -> None:
        if key not in self._reported:
            self._reported.add(key)
            say(line)


# The run that trains in this process. This is not a context variable, since
# TensorFlow's threads would not inherit its value.
_current: UserMetrics | None = None


def log(name: str, value: float) -> None:
    """Log a value to the run that trains; see `pipeline.log`."""
    number = checked_value(name, value)
    checked_name(name)
    if _current is not None:
        _current.add(name, number)


def checked_name(name: str) -> str:
    """Return `name`; raise a ValueError if a user's metric must not have this name."""
    if not isinstance(name, str) or name in UPDATE_METRICS:
        raise ValueError(_name_error(name))
    if not is_name(f"train/{name}"):
        raise ValueError(_name_error(name))
    return name


def checked_value(name: str, value: Any) -> float:
    """Return `value` as a float; raise a ValueError if it is not a single number."""
    number: Any = None
    # A symbolic tensor has no value yet: `float` raises an error, or AutoGraph replaces
    # `float` by a cast, so that the result is not a float.
    with suppress(TypeError, ValueError):
        number = float(value)
    if isinstance(value, str) or not isinstance(number, float):
        raise ValueError(
            f"the value of {name!r} must be one number; in the graph of a layer it is "
            f"known only within tf.py_function. Received: {value!r}"
        )
    return number


def _name_error(name: object) -> str:
    ours = ", ".join(sorted(UPDATE_METRICS))
    return (
        f"a metric must have a name that MLflow accepts ({NAME_RULE}), other than "
        f"{ours} and the names of other metrics. Received: {name!r}"
    )


def _run_of_mlflow(ended: bool) -> str:
    """Return the ID of the run to which MLflow's own functions log, or "".

    Args:
        ended: whether to return the last such run, even if it has ended.
    """
    mlflow = sys.modules.get("mlflow")
    name = "last_active_run" if ended else "active_run"
    # The function is missing if MLflow is not imported yet, or is just being imported.
    function = getattr(mlflow, name, None)
    if function is None:
        return ""
    with suppress(Exception):  # the store may be unreachable
        run = function()
        if run is not None:
            return str(run.info.run_id)
    return ""
