"""`hardware.xla=fastest`: which way is chosen, and that timing both leaves no trace."""

from __future__ import annotations

import random
from copy import deepcopy
from itertools import islice
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from omegaconf import OmegaConf

from pipeline.checkpoints import resume_rules
from pipeline.components import assembly
from pipeline.config import compose
from pipeline.config.resolve import resolve
from pipeline.run import xla_choice
from pipeline.tracking.journal_lines import RunStart
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


@pytest.mark.parametrize("compiles", mostly_slow([False, True], []))
def test_the_run_is_that_of_the_answer_by_hand(briefly, compiles):
    """It is bit-identical, in all results and in all variables."""
    by_hand = trained(parts_of(*STATE, f"hardware.xla={str(compiles).lower()}"))

    parts = parts_of(*STATE, "hardware.xla=fastest")
    before = state_of(parts)
    assert xla_choice.timed(parts) is not None
    assert state_of(parts) == before
    chosen = parts.with_xla(compiles)
    assert chosen.spec.config.hardware.xla is compiles
    rows, state = trained(chosen)
    assert str(rows) == str(by_hand[0])  # as NaN is not equal to NaN
    assert state == by_hand[1]

    # The negative control: an update that is not undone changes both.
    parts = parts_of(*STATE, "hardware.xla=fastest").with_xla(compiles)
    tf.function(parts.update(), autograph=False)(next(iter(parts.batches)))
    assert state_of(parts) != before
    rows, state = trained(parts)
    assert str(rows) != str(by_hand[0])
    assert state != by_hand[1]


@pytest.mark.parametrize(
    ("layer", "compiles"),
    mostly_slow([("loop", True), ("pool", False)], [("loop", True)]),
)
def test_the_faster_way_is_chosen(briefly, layer, compiles):
    choice = xla_choice.timed(with_layer_parts(layer))
    assert choice.compiles is compiles
    other = "with it" if not compiles else "without"
    assert choice.why.endswith(f" ms {other}")


def test_a_way_that_fails_is_not_used(briefly):
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


@pytest.fixture(scope="module")
def spec():
    return resolve(compose.composed([FASTEST]), [FASTEST])


@pytest.mark.parametrize("recorded", [True, False, "auto", None])
def test_a_resumed_run_keeps_the_recorded_answer(spec, recorded):
    """A record without the key is older: nothing was compiled."""
    before = deepcopy(dict(spec.recorded))
    before["hardware"]["xla"] = recorded
    if recorded is None:
        del before["hardware"]["xla"]
    start = RunStart(store=spec.config.tracking.uri, segment={})
    past = SimpleNamespace(run_id="", start=start)
    kept = resume_rules._with_recorded_choices(spec, before, past)
    assert kept.config.hardware.xla == (recorded or False)
    assert not kept.times_xla
    assert FASTEST not in kept.overrides


@pytest.fixture
def cache(tmp_path):
    """Return the environment of commands that share a cache, which is empty."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.slow
def test_a_run_records_its_answer_which_a_rerun_and_a_resumed_run_take(tmp_path, cache):
    line = ("train", "model=mlp", *SMALL, FASTEST, "hydra.run.dir=run")
    line = (*line, "training.resume=auto")
    done = pipeline(*line, cwd=tmp_path, **cache)
    run = Store(tmp_path).run()
    answer = run.data.params["hardware.xla"]
    state = {"true": "on", "false": "off"}[answer]
    first = next(line for line in done.stderr.splitlines() if "; effective" in line)
    assert f", XLA {state} ({run.data.tags['xla.found']}); effective" in first
    assert first.count(" ms ") == 2
    config = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert str(config.hardware.xla).lower() == answer
    assert FASTEST not in (tmp_path / "run" / "overrides.yaml").read_text()

    # The record is enough: the cache of these calls is empty, and stays so.
    other_cache = {"XDG_CACHE_HOME": str(tmp_path / "other")}
    rerun = pipeline("rerun", run.info.run_id, cwd=tmp_path, **other_cache)
    assert "bit-equal" in rerun.stderr
    wrong = pipeline("rerun", run.info.run_id, FASTEST, cwd=tmp_path, status=2)
    rule = "hardware.xla must be true, false or auto, because a rerun does not time"
    assert rule in wrong.stderr
    longer = "training.updates=6"
    resumed = pipeline(*line, longer, cwd=tmp_path, **other_cache)
    assert "continues after update 4" in resumed.stderr
    assert "hardware.xla" not in resumed.stderr
    assert not (tmp_path / "other" / "pipeline" / "xla").exists()


@pytest.mark.slow
def test_a_sweep_measures_once(tmp_path, cache):
    line = ("train", "model=mlp", *SMALL, FASTEST, "hydra.sweep.dir=sweep", "-m")
    rates = "optimizer.learning_rate=0.01,0.001"
    pipeline(*line, rates, "hardware.parallel_jobs=2", cwd=tmp_path, **cache)
    logs = [(tmp_path / "sweep" / job / "job.log").read_text() for job in "01"]
    assert sum("timing updates" in log for log in logs) == 1
    assert sum("as found before" in log for log in logs) == 1
    runs = Store(tmp_path).trained()
    assert len(runs) == 2
    assert len({run.data.params["hardware.xla"] for run in runs}) == 1
    assert len({run.data.tags["xla.found"] for run in runs}) == 1


@pytest.mark.slow
def test_the_micro_batch_size_is_searched_for_first(tmp_path, cache):
    line = ("train", *TINY, FASTEST, "accumulation.effective_batch_size=16")
    auto = ("accumulation.micro_batch_size=auto", "hydra.run.dir=run")
    done = pipeline(*line, *auto, cwd=tmp_path, **cache)
    assert done.stderr.index("micro-batch of 16 fits") < done.stderr.index("XLA o")
    config = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert config.accumulation.micro_batch_size == 16
    assert config.hardware.xla in (True, False)
