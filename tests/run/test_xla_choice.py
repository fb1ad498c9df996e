"""`hardware.xla=fastest`: which way is chosen, and that timing both leaves no trace."""

from __future__ import annotations

import random
from itertools import islice

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from omegaconf import OmegaConf

from pipeline.components import assembly
from pipeline.config import compose
from pipeline.config.resolve import resolve
from pipeline.run import xla_choice
from pipeline.training import xla_timing
from pipeline.training.xla_timing import Timing
from tests.parameters import mostly_slow
from tests.running import TINY, Store, pipeline

HERE = "tests.run.test_xla_choice"
SMALL = (
    "training.updates=4",
    "accumulation.effective_batch_size=24",
    "accumulation.factor=3",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)
# State of every kind that an update changes.
STATE = (
    "~model",
    f"+model={{_target_: {HERE}.stateful}}",
    "accumulation.noise_scale_every=2",
    "+optimizer.use_ema=true",
)


class ByNumPy(layers.Layer):
    """Draws from NumPy's global generator where it is traced."""

    def call(self, x):
        return x + float(np.random.random()) / 100


class Loop(layers.Layer):
    """Computes much faster with XLA: thousands of operations on a scalar."""

    def call(self, x):
        _, last = tf.while_loop(
            lambda step, value: step < 3000,
            lambda step, value: (step + 1, value * 0.999),
            (0, tf.reduce_sum(tf.stop_gradient(x))),
        )
        return x + 1e-6 * last


class Pool(layers.Layer):
    """Computes much slower with XLA: the largest of many overlapping windows."""

    def call(self, x):
        numbers = tf.reshape(tf.stop_gradient(x), [-1])[:8]
        images = tf.ones([1, 64, 64, 8]) * numbers
        return x + 1e-6 * tf.reduce_mean(tf.nn.max_pool2d(images, 31, 1, "SAME"))


class InPython(layers.Layer):
    """Calls Python, which XLA cannot."""

    def call(self, x):
        def same(value):
            return value

        y = tf.numpy_function(same, [x], x.dtype)
        y = tf.ensure_shape(y, x.shape)
        return x + tf.stop_gradient(y)


def stateful(input_shape, classes):
    hidden = layers.Dense(8, activation="relu")
    parts = [layers.Flatten(), layers.BatchNormalization(), layers.Dropout(0.3), hidden]
    noise = [layers.GaussianNoise(0.1), ByNumPy(), layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *parts, *noise])


def with_layer(input_shape, classes, layer):
    layer = {"loop": Loop, "pool": Pool, "python": InPython}[layer]()
    parts = [layers.Flatten(), layer, layers.Dense(classes)]
    return keras.Sequential([keras.Input(input_shape), *parts])


def parts_of(*overrides):
    overrides = [*SMALL, *overrides]
    return assembly.assemble(resolve(compose.composed(overrides), overrides))


def with_layer_parts(layer):
    model = f"+model={{_target_: {HERE}.with_layer, layer: {layer}}}"
    return parts_of("~model", model, "hardware.xla=fastest")


def state_of(parts):
    """Return the bytes of all variables of the model and of the optimizer."""
    variables = [*parts.model.variables, *parts.model.optimizer.variables]
    state = [np.array(variable.value).tobytes() for variable in variables]
    return [*state, random.getstate(), np.random.get_state()[1].tobytes()]


def trained(parts):
    """Train some updates; return their results and the state after them."""
    step = tf.function(parts.update(), autograph=False)
    rows = []
    for batch in islice(parts.batches, 3):
        results = step(batch)
        rows.append({name: float(value) for name, value in results.items()})
    return rows, state_of(parts)


@pytest.fixture
def briefly(monkeypatch):
    """Time no longer than needed: what is tested is not the speed."""
    monkeypatch.setattr(xla_timing, "LEAST_SECONDS", 0.0)


@pytest.mark.parametrize("compiles", mostly_slow([False, True], [False]))
def test_the_run_is_that_of_the_answer_by_hand(briefly, compiles):
    """It is bit-identical, in all results and in all variables."""
    by_hand = trained(parts_of(*STATE, f"hardware.xla={str(compiles).lower()}"))

    parts = parts_of(*STATE, "hardware.xla=fastest")
    before = state_of(parts)
    assert xla_choice.timed(parts) is not None
    assert state_of(parts) == before
    chosen = parts.compiled(compiles)
    assert chosen.spec.config.hardware.xla is compiles
    rows, state = trained(chosen)
    assert str(rows) == str(by_hand[0])  # as NaN is not equal to NaN
    assert state == by_hand[1]

    # The negative control: an update that is not undone changes both.
    parts = parts_of(*STATE, "hardware.xla=fastest").compiled(compiles)
    tf.function(parts.update(), autograph=False)(next(iter(parts.batches)))
    assert state_of(parts) != before
    rows, state = trained(parts)
    assert str(rows) != str(by_hand[0])
    assert state != by_hand[1]


@pytest.mark.parametrize(("layer", "compiles"), [("loop", True), ("pool", False)])
def test_the_faster_way_is_chosen(briefly, layer, compiles):
    choice = xla_choice.timed(with_layer_parts(layer))
    assert choice.compiles is compiles
    other = "with it" if not compiles else "without"
    assert choice.why.endswith(f" ms {other}")


def test_a_way_that_fails_is_not_used():
    """XLA cannot call Python."""
    choice = xla_choice.timed(with_layer_parts("python"))
    assert not choice.compiles
    assert choice.why.startswith("an update with it fails: ")


def test_times_and_errors_decide():
    fast = Timing(0.00123, "")
    slow = Timing(0.4567, "")
    failed = Timing(None, "OOM when allocating")
    alone = Timing(None, "")  # the other one failed
    line = xla_choice.choice_of
    assert str(line(fast, slow)) == "XLA on (1.23 ms an update, 457 ms without)"
    assert str(line(slow, fast)) == "XLA off (1.23 ms an update, 457 ms with it)"
    assert not line(fast, fast).compiles
    why = "an update with it fails: OOM when allocating"
    assert str(line(failed, alone)) == f"XLA off ({why})"
    why = "an update without it fails: OOM when allocating"
    assert str(line(alone, failed)) == f"XLA on ({why})"
    assert line(failed, failed) is None


class Clock:
    """A clock that advances by the given seconds at each reading."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 0.0

    def __call__(self):
        self.now += self.seconds
        return self.now


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [(1 / 512, 256), (1 / 32, 16), (1 / 2, 5), (8.0, 2), (100.0, 1)],
)
def test_how_many_updates_are_timed(seconds, rounds):
    """Five of each, or as many as take a second, but at most half a minute."""
    ran = []

    def counting(name):
        def update(batch):
            tf.py_function(lambda: ran.append(name), [], [])
            return {"loss": batch}

        return update

    batches = tf.data.Dataset.range(3)
    updates = [counting("a"), counting("b")]
    timings = xla_timing.time_updates(updates, batches, Clock(seconds))
    assert [timing.seconds for timing in timings] == pytest.approx([seconds] * 2)
    assert ran.count("a") == ran.count("b") == xla_timing.UNTIMED + rounds
    # They take turns at going first.
    first_of_rounds = ran[2 * xla_timing.UNTIMED :: 2]
    expected = ["a", "b"] * rounds
    assert first_of_rounds == expected[:rounds]


def test_it_runs_out_of_memory_one_way_and_is_not_asked_again():
    ran = []

    def fails(batch):
        def allocate():
            ran.append("fails")
            raise MemoryError("too much")

        tf.py_function(allocate, [], [])
        return {"loss": batch}

    def runs(batch):
        tf.py_function(lambda: ran.append("runs"), [], [])
        return {"loss": batch}

    batches = tf.data.Dataset.range(3)
    failed, alone = xla_timing.time_updates([fails, runs], batches)
    assert failed.why
    assert alone.runs
    assert ran.count("fails") == 1
    assert ran.count("runs") == xla_timing.UNTIMED


FASTEST = "hardware.xla=fastest"


@pytest.mark.slow
def test_it_is_recorded_and_measured_once(tmp_path):
    """A sweep measures once; a rerun and a resumed run do not measure."""
    line = ("train", *TINY, *SMALL, "~training.epochs", FASTEST)
    line = tuple(part for part in line if part != "~training.epochs")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    sweep = ("-m", "optimizer.learning_rate=0.01,0.001", "hydra.sweep.dir=sweep")
    pipeline(*line, *sweep, cwd=tmp_path, **cache)
    logs = [(tmp_path / "sweep" / job / "job.log").read_text() for job in "01"]
    assert sum("timing updates" in log for log in logs) == 1
    assert sum("as was found before" in log for log in logs) == 1
    runs = Store(tmp_path).trained()
    answers = {run.data.params["hardware.xla"] for run in runs}
    assert len(answers) == 1
    assert answers <= {"true", "false"}
    assert len({run.data.tags["xla.found"] for run in runs}) == 1
    (answer,) = answers

    # The record holds for itself: nothing is in the cache of these calls.
    elsewhere = {"XDG_CACHE_HOME": str(tmp_path / "elsewhere")}
    run_dir = tmp_path / "sweep" / "0"
    xla = OmegaConf.load(run_dir / "config.yaml").hardware.xla
    assert str(xla).lower() == answer
    assert FASTEST not in (run_dir / "overrides.yaml").read_text()
    rerun = pipeline("rerun", runs[0].info.run_id, cwd=tmp_path, **elsewhere)
    assert "bit-equal" in rerun.stderr
    single = ("hydra.run.dir=run", "training.resume=auto")
    started = pipeline(*line, *single, cwd=tmp_path, **cache)
    state = "on" if answer == "true" else "off"
    first = next(line for line in started.stderr.splitlines() if "; effective" in line)
    assert f", XLA {state} (" in first
    assert first.count(" ms ") == 2
    more = "training.updates=6"
    resumed = pipeline(*line, *single, more, cwd=tmp_path, **elsewhere)
    assert "goes on after update 4" in resumed.stderr
    assert "timing" not in rerun.stderr + resumed.stderr
    assert "was found before" not in rerun.stderr + resumed.stderr
    assert not (tmp_path / "elsewhere" / "pipeline" / "xla").exists()


@pytest.mark.slow
def test_the_size_is_searched_for_first(tmp_path):
    line = (*TINY, FASTEST, "accumulation.effective_batch_size=16", "hydra.run.dir=run")
    auto = "accumulation.micro_batch_size=auto"
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = pipeline("train", *line, auto, cwd=tmp_path, **cache)
    assert "micro-batch of 16 fits" in done.stderr
    config = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert config.accumulation.micro_batch_size == 16
    assert config.hardware.xla in (True, False)
