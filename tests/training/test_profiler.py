"""A profile has the updates that were asked for, and ends with the training."""

from __future__ import annotations

import gzip
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import tensorflow as tf

from pipeline.training.evaluator import Evaluations
from pipeline.training.profiler import Profiler
from tests.training.test_loop import Run, StopAt


class Clock:
    """The recorder, of which a profile only uses these."""

    def __init__(self, last_update):
        self.plan = SimpleNamespace(ended=lambda done: done >= last_update)
        self.calls = []

    @contextmanager
    def paused(self):
        self.calls.append("pause")
        yield
        self.calls.append("resume")


def profile(folder, updates, *, start=3, count=2, fails=None, last_update=99):
    logged = []
    recorder = Clock(last_update)
    multiply = tf.function(lambda x: tf.matmul(x, x))
    with Profiler(folder, start, count, logged.append) as profiler:
        for number in updates:
            with profiler.update(number, recorder):
                multiply(tf.ones((8, 8)))
                if number == fails:
                    raise KeyboardInterrupt
            with tf.profiler.experimental.Trace("after", step_num=number):
                multiply(tf.ones((8, 8)))
    return logged, recorder.calls


def traced(folder, name, event_name="update"):
    with gzip.open(folder / name, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    timed = [event for event in events if event["ph"] == "X"]
    for event in timed:
        assert event["dur"] >= 0
        assert event["ts"] >= 0
    return len([event for event in timed if event["name"].startswith(event_name)])


def names(first):
    return [f"profile_{first}.xplane.pb", f"profile_{first}.trace.json.gz"]


def test_the_updates_asked_for_are_traced_and_not_in_the_update_times(tmp_path):
    logged, calls = profile(tmp_path, range(1, 8))
    assert logged == names(3)
    assert calls == ["pause", "resume"] * 2
    assert traced(tmp_path, logged[1]) == 2
    assert (tmp_path / logged[0]).stat().st_size > 0
    (folder,) = tmp_path.glob("plugins/profile/*")  # where TensorBoard looks
    assert [file.suffixes for file in folder.iterdir()] == [[".xplane", ".pb"]]


@pytest.mark.parametrize(
    ("updates", "first", "count"), [(range(1, 4), 3, 1), (range(4, 9), 4, 1)]
)
def test_a_run_that_ends_early_or_is_resumed_has_the_rest(
    tmp_path, updates, first, count
):
    logged, _ = profile(tmp_path, updates)
    assert logged == names(first)
    assert traced(tmp_path, logged[1]) == count


@pytest.mark.parametrize(("count", "last_update"), [(2, 99), (9, 4)])
def test_nothing_after_the_last_traced_update_is_traced(tmp_path, count, last_update):
    """An evaluation between two traced updates is."""
    updates = range(1, min(7, last_update) + 1)
    logged, _ = profile(tmp_path, updates, count=count, last_update=last_update)
    assert traced(tmp_path, logged[1]) == 2
    assert traced(tmp_path, logged[1], "after") == 1


@pytest.mark.parametrize(
    ("start", "updates", "callbacks", "order"),
    [
        pytest.param(
            4, 2, [], ["profile", "val", "val", "test"], marks=pytest.mark.slow
        ),
        pytest.param(
            9, 5, [], ["val", "profile", "val", "test"], marks=pytest.mark.slow
        ),
        (4, 9, [StopAt(0)], ["val", "profile", "test"]),
    ],
)
def test_a_run_ends_the_trace_before_what_follows(
    tmp_path, start, updates, callbacks, order
):
    events = []

    def evaluate(split):
        def evaluated(check):
            events.append(split)
            return {"loss": 1.0}

        return evaluated

    def log(name):
        if name.endswith("json.gz"):
            events.append("profile")

    trainer = Run(callbacks, epochs=2, fit=False).trainer
    trainer.evaluations = Evaluations(evaluate("val"), evaluate("test"))
    trainer.profiler = Profiler(tmp_path, start, updates, log)
    trainer.recorder.tracker.test = lambda update, results: None
    trainer.fit()
    assert events == order


def test_an_interruption_ends_the_trace(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        profile(tmp_path, range(1, 8), fails=4)
    assert traced(tmp_path, names(3)[1]) == 2
    assert profile(tmp_path, range(3, 4))[0] == names(3)  # another one may begin


def test_a_run_that_is_over_before_or_resumed_after_has_none(tmp_path):
    assert profile(tmp_path, range(1, 3)) == ([], [])
    assert profile(tmp_path, range(5, 8)) == ([], [])
    assert list(tmp_path.iterdir()) == []
