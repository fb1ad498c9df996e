"""A profile has the updates that were asked for, and ends with the training."""

from __future__ import annotations

import gzip
import json

import pytest
import tensorflow as tf

from pipeline.training.profiler import Profiler


class Clock:
    """The recorder, of which a profile only uses these."""

    def __init__(self):
        self.calls = []
        self.fetch = lambda: self.calls.append("fetch")
        self.restart_clock = lambda: self.calls.append("restart")


def profile(folder, updates, *, start=3, count=2, fails=None):
    logged = []
    recorder = Clock()
    multiply = tf.function(lambda x: tf.matmul(x, x))
    with Profiler(folder, start, count, logged.append) as profiler:
        for number in updates:
            with profiler.update(number, recorder):
                multiply(tf.ones((8, 8)))
                if number == fails:
                    raise KeyboardInterrupt
    return logged, recorder.calls


def traced(folder, name):
    with gzip.open(folder / name, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    timed = [event for event in events if event["ph"] == "X"]
    for event in timed:
        assert event["dur"] >= 0
        assert event["ts"] >= 0
    return len([event for event in timed if event["name"].startswith("update ")])


def names(first):
    return [f"profile_{first}.xplane.pb", f"profile_{first}.trace.json.gz"]


def test_the_updates_asked_for_are_traced_and_not_in_the_update_times(tmp_path):
    logged, calls = profile(tmp_path, range(1, 8))
    assert logged == names(3)
    assert calls == ["fetch", "restart"] * 2
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


def test_an_interruption_ends_the_trace(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        profile(tmp_path, range(1, 8), fails=4)
    assert traced(tmp_path, names(3)[1]) == 2
    assert profile(tmp_path, range(3, 4))[0] == names(3)  # another one may begin


def test_a_run_that_is_over_before_or_resumed_after_has_none(tmp_path):
    assert profile(tmp_path, range(1, 3)) == ([], [])
    assert profile(tmp_path, range(5, 8)) == ([], [])
    assert list(tmp_path.iterdir()) == []
