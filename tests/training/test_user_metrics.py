"""What a callback or a layer logs reaches the run: `pipeline.log`, additions to logs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

import pipeline
from pipeline.tracking.user_metrics import UserMetrics
from tests.running import python
from tests.training.test_loop import PER_EPOCH, SIZE, Rows, Run


class LoggedRows(Rows):
    """Rows, and what the user's code has logged: values by (name, update)."""

    run_id = "this run"

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[tuple[str, int], float] = {}

    def user_metric(self, update, name, value) -> bool:
        is_first = (name, update) not in self.logged
        if is_first:
            self.logged[name, update] = value
        return is_first


def logged_by(*callbacks, **options) -> dict[tuple[str, int], float]:
    """Train two epochs, and return what was logged."""
    rows = LoggedRows()
    Run(callbacks, epochs=2, rows=rows, **options)
    return rows.logged


def printed(capsys) -> list[str]:
    """Return the lines on standard error except those of progress."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if not line.startswith("update ")]


class Adds(keras.callbacks.Callback):
    """Adds to the logs of each epoch."""

    def __init__(self, **values) -> None:
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs |= self.values
        logs["loss"] = 0.0  # a change, which is not an addition


class LogsUpdates(keras.callbacks.Callback):
    """Logs the position in the epoch of each update, and each epoch twice."""

    def on_train_batch_end(self, batch, logs=None):
        pipeline.log("position", batch)

    def on_epoch_begin(self, epoch, logs=None):
        pipeline.log("epoch_begin", epoch)

    def on_epoch_end(self, epoch, logs=None):
        pipeline.log("epoch_end", epoch)
        pipeline.log("epoch_end", -1)

    def on_train_begin(self, logs=None):
        pipeline.log("begin", 7)


class LogsBatches(keras.layers.Layer):
    """Logs how many examples its input has, in its host code."""

    def call(self, x):
        def count(rows):
            pipeline.log("rows", len(rows))
            return rows

        y = tf.py_function(count, [x], x.dtype)
        return tf.ensure_shape(y, x.shape)


def test_additions_to_logs_are_rows_of_the_last_update_of_their_epoch(capsys):
    after = Adds(second=tf.constant(2.5))
    assert logged_by(Adds(first=1, nested={"third": 3}), after) == {
        ("first", PER_EPOCH): 1.0,
        ("second", PER_EPOCH): 2.5,
        ("first", 2 * PER_EPOCH): 1.0,
        ("second", 2 * PER_EPOCH): 2.5,
    }
    # Once, not once an epoch.
    (line,) = printed(capsys)
    assert line.startswith("training.callbacks.0: logs['nested'] is not logged: ")


@pytest.mark.slow
def test_what_cannot_be_logged_is_named_once_and_the_rest_is_logged(capsys):
    schedule = keras.callbacks.LearningRateScheduler(lambda _: 0.1)
    logged = logged_by(Adds(a=1, text="x", **{"b(c)": 1}), schedule)
    assert set(logged) == {("a", PER_EPOCH), ("a", 2 * PER_EPOCH)}
    lines = printed(capsys)
    assert [line.split(":")[1] for line in lines] == [
        " logs['text'] is not logged",
        " logs['b(c)'] is not logged",
    ]
    assert lines[0].endswith("Received: 'x'")


def test_a_callback_logs_for_the_update_that_it_is_called_for(capsys):
    logged = logged_by(LogsUpdates())
    expected = {("begin", 0): 7.0}
    for epoch in (0, 1):
        before = epoch * PER_EPOCH
        expected["epoch_begin", before + 1] = epoch
        expected["epoch_end", before + PER_EPOCH] = epoch  # the first value counts
        for position in range(PER_EPOCH):
            expected["position", before + position + 1] = position
    assert logged == expected
    assert printed(capsys) == [
        f"train/epoch_end was logged more than once for update {PER_EPOCH}: "
        "the first value of an update counts"
    ]


@pytest.mark.slow
def test_host_code_of_a_layer_logs_in_updates_not_in_evaluations():
    logged = logged_by(middle=[LogsBatches()])
    updates = range(1, 2 * PER_EPOCH + 1)
    assert logged == {("rows", update): SIZE for update in updates}


def test_of_several_micro_steps_the_first_counts(capsys):
    logged = logged_by(middle=[LogsBatches()], micro_batch_size=SIZE // 4)
    updates = range(1, 2 * PER_EPOCH + 1)
    assert logged == {("rows", update): SIZE // 4 for update in updates}
    assert "train/rows was logged more than once" in printed(capsys)[0]


@pytest.mark.parametrize("name", ["loss", "epoch", "a(b)", "../a", "", 5])
def test_a_name_that_no_metric_may_have_is_rejected(name):
    with pytest.raises(ValueError, match="must have a name that MLflow accepts"):
        pipeline.log(name, 1.0)


@pytest.mark.parametrize("value", ["1", None, [1, 2]])
def test_a_value_that_is_not_a_number_is_rejected(value):
    with pytest.raises(ValueError, match="the value of 'a' must be one number"):
        pipeline.log("a", value)


def test_a_symbolic_value_is_rejected():
    @tf.function
    def graph(x):
        pipeline.log("a", x)

    with pytest.raises(ValueError, match=r"within tf\.py_function"):
        graph(tf.constant(1.0))


def test_the_name_of_a_metric_of_the_run_is_rejected():
    class Logs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.trainer.user_metrics.taken |= {"accuracy"}
            pipeline.log("accuracy", 1.0)

    callback = Logs()
    run = Run([callback], rows=LoggedRows(), fit=False)
    callback.trainer = run.trainer
    with pytest.raises(ValueError, match=r"other metrics\. Received: 'accuracy'"):
        run.trainer.fit()


def test_a_worker_other_than_the_chief_logs_nothing(capsys):
    """It calls the same callbacks, and has no tracker."""
    rows = LoggedRows()
    run = Run([LogsUpdates(), Adds(first=1)], epochs=1, rows=rows, fit=False)
    run.trainer.recorder.tracker = None
    run.trainer.user_metrics = UserMetrics(None)
    run.trainer.fit()
    assert rows.logged == {}
    assert printed(capsys) == []


@pytest.mark.slow
def test_mlflow_s_own_functions_to_another_run_are_reported_once(monkeypatch, capsys):
    class Fluent(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            active["run"] = SimpleNamespace(info=SimpleNamespace(run_id="stray"))

    active: dict = {"run": None}
    fake = SimpleNamespace(
        active_run=lambda: active["run"], last_active_run=lambda: active["run"]
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    logged_by(Adds(first=1))
    assert printed(capsys) == []

    logged_by(Adds(first=1), Fluent())
    assert printed(capsys) == [
        "training.callbacks.1 logs to another MLflow run (stray): "
        "to log to the run that trains, call pipeline.log(name, value)"
    ]

    # To this run, by its ID.
    monkeypatch.setattr(LoggedRows, "run_id", "stray")
    logged_by(Fluent())
    assert printed(capsys) == []


def test_a_run_of_mlflow_that_a_callback_has_ended_is_reported_too(monkeypatch, capsys):
    ended = SimpleNamespace(info=SimpleNamespace(run_id="stray"))
    fake = SimpleNamespace(active_run=lambda: None, last_active_run=lambda: ended)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    logged_by(Adds())
    (line,) = printed(capsys)
    assert line.startswith("a callback logged to another MLflow run (stray): ")


def test_logging_outside_of_a_run_does_nothing_and_imports_nothing(tmp_path):
    code = (
        "import sys, pipeline\n"
        "pipeline.log('a', 1)\n"
        "print({'tensorflow', 'keras', 'mlflow'} & {*sys.modules})"
    )
    process = python("-c", code, cwd=tmp_path, warm=False)
    out, err = process.communicate()
    assert out == "set()\n", err
    assert list(tmp_path.iterdir()) == []
