"""AdaScale: its gain by hand, its averages, a trajectory against NumPy, and runs that are counted by it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.checkpoints import files, snapshot
from pipeline.common.errors import ConfigError
from pipeline.components import adascale, optimizer
from pipeline.components.adascale import EstimatedPlan, Gain
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from pipeline.config.sizes import derive
from tests.running import Store, pipeline

RULE = ("scaling=adascale", "accumulation.noise_scale_every=1", "training.updates=100")


def gain_of(
    kind=keras.optimizers.SGD, schedule=0.1, effective=16, reference=4, **state
):
    """Return a gain, attached to an optimizer, in a state: τ, how many estimates, averages of tr(Σ) and |G|²."""
    gain = Gain(schedule, effective, reference)
    made = kind(gain)
    said = gain.attach(made)
    made.build([keras.Variable(np.zeros(2))])
    gain.state.assign(
        [state.get(name, 0.0) for name in ("updates", "count", "variance", "square")]
    )
    return gain, made, said


def rate(made):
    return float(made.learning_rate)


# S = 16 / 4 = 4, σ² = 12 / 4 = 3, μ² = 1: r = (3 + 1) / (3/4 + 1) = 16/7. Without noise 1; noise alone: S.
@pytest.mark.parametrize(
    ("variance", "square", "r"),
    [(12, 1, 16 / 7), (0, 1, 1), (12, 0, 4), (0, 0, 1)],
    ids=["", "no noise", "noise", "-"],
)
def test_a_literal_to_check_by_hand(variance, square, r):
    for kind, factor, sign in (
        (keras.optimizers.SGD, r, ""),
        (keras.optimizers.Adam, math.sqrt(r), "√"),
    ):
        gain, made, said = gain_of(kind, count=1, variance=variance, square=square)
        assert float(gain.gain()) == pytest.approx(r, rel=1e-15)
        assert rate(made) == pytest.approx(0.1 * factor, rel=1e-6)  # float32
        assert f"learning rate × {sign}r, r from 1 to 4" in said


def test_the_schedule_counts_scale_invariant_updates():
    """Down to a tenth after update 10: at τ = 10.9, which is in update 10, the first rate; at 11 the second."""
    steps = keras.optimizers.schedules.PiecewiseConstantDecay([10], [1.0, 0.1])
    for updates, expected in ((10.9, 1.0), (11.0, 0.1)):
        _, made, _ = gain_of(schedule=steps, updates=updates)
        made.iterations.assign(1000)  # which does not count
        assert rate(made) == pytest.approx(expected)


def test_the_state_is_with_the_weights_and_the_rate_too():
    """An update computes its rate on the host, which would wait there for the state of a GPU."""
    with tf.device("CPU:1"):
        gain, made, _ = gain_of()

    def device_of_rate():
        with tf.device("CPU:0"):
            devices.append(tf.convert_to_tensor(made.learning_rate).device)

    devices: list[str] = []
    tf.function(device_of_rate, autograph=False).get_concrete_function()
    assert gain.state.value.device[-5:] == "CPU:1"
    assert devices == [""]  # left to TensorFlow, which takes that of the state


def results(variance, square, norm=1.0):
    found = {
        "gradient_variance": variance,
        "gradient_square": square,
        "gradient_norm": norm,
    }
    return {name: tf.constant(value, tf.float64) for name, value in found.items()}


# S = 400: θ = 1 − 400/1000 = 0.6. The first 1/0.4 = 2.5 estimates have equal weights, each later one 0.4. An estimate
# below 0 is 0, one that is not finite is left out.
VARIANCES = {
    10.0: 10,
    30.0: 20,
    math.nan: 20,
    40.0: 0.6 * 20 + 0.4 * 40,
    -5.0: 0.6 * 28,
}


def test_the_averages_are_those_of_the_paper():
    gain, _, _ = gain_of(effective=400, reference=1)
    known, updates, before = 0, 0.0, 1.0
    for variance, average in VARIANCES.items():
        found = gain.advance(results(variance, 2.0))
        known, updates = known + math.isfinite(variance), updates + before
        assert gain.state.numpy() == pytest.approx(
            [updates, known, average, 2], rel=1e-12
        )
        assert (
            float(found["gain"]),
            float(found["scale_invariant_updates"]),
        ) == pytest.approx((before, updates))
        before = (average + 2) / (average / 400 + 2)  # of the next update


def test_an_update_that_a_loss_scale_skips_does_not_count():
    gain, _, _ = gain_of(updates=7.0, count=3.0, variance=12.0, square=1.0)
    gain.advance(results(math.nan, math.inf, math.inf))
    assert list(gain.state.numpy()) == [7, 3, 12, 1]


def test_a_saved_optimizer_has_the_schedule():
    _, made, _ = gain_of(schedule=optimizer.InverseSquareRoot(0.3, 7))
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    again.iterations.assign(20)
    assert rate(again) == pytest.approx(0.3 * math.sqrt(7 / 21), rel=1e-6)


DIMENSIONS, SIZES, MICRO, REFERENCE = 3, (12, 12, 12, 7, 12, 12), 4, 2


def by_hand(x, y, momentum, scaled=True):
    """Return the weights after SGD on (x·w − y)² by NumPy, from zeros, by the formulas; and r of each update."""
    w, velocity, tau, gains = np.zeros(DIMENSIONS), np.zeros(DIMENSIONS), 0.0, []
    variances, squares, scale = [], [], 12 / REFERENCE
    for size, a, b in zip(SIZES, x, y, strict=True):
        gradients = 2 * (a @ w - b)[:, None] * a  # one an example
        cuts = [gradients[at : min(at + MICRO, size)] for at in range(0, size, MICRO)]
        mean, shares = gradients[:size].mean(axis=0), [len(cut) / size for cut in cuts]
        of_cuts = sum(
            share * np.square(cut.mean(axis=0)).sum()
            for share, cut in zip(shares, cuts, strict=True)
        )
        apart = (
            sum(share / len(cut) for share, cut in zip(shares, cuts, strict=True))
            - 1 / size
        )
        variance, square = (
            np.mean(variances or [0]) / REFERENCE,
            np.mean(squares or [0]),
        )
        gains.append(
            (variance + square) / (variance / scale + square)
            if variances and scaled
            else 1.0
        )
        velocity = momentum * velocity - 0.01 / (1 + math.floor(tau)) * gains[-1] * mean
        w, tau = w + velocity, tau + gains[-1]
        estimate = (of_cuts - np.square(mean).sum()) / apart
        variances.append(max(estimate, 0))
        squares.append(max(np.square(mean).sum() - estimate / size, 0))
    return w, gains


def test_a_trajectory_is_that_of_the_formulas():
    """Six updates, one of them of a shorter batch; not scaled, it ends elsewhere."""
    random = np.random.default_rng(3)
    x = random.normal(size=(len(SIZES), 12, DIMENSIONS))
    y = x @ [3.0, -2.0, 1.0] + 4 * random.normal(size=x.shape[:2])
    model = keras.Sequential(
        [
            keras.Input((DIMENSIONS,)),
            keras.layers.Dense(1, use_bias=False, dtype="float64"),
        ]
    )
    model.layers[0].kernel.assign(np.zeros((DIMENSIONS, 1)))
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.01, 1, 1)  # 0.01 / (1 + τ)
    gain = Gain(schedule, 12, REFERENCE)
    made = keras.optimizers.SGD(gain, momentum=0.9)
    gain.attach(made)
    made.build(model.trainable_variables)
    loss = keras.losses.MeanSquaredError(dtype="float64")
    step = tf.function(
        adascale.Update(model, loss, made, MICRO, noise_every=1), reduce_retracing=True
    )
    found = [step((a[:n], b[:n, None])) for n, a, b in zip(SIZES, x, y, strict=True)]
    expected, gains = by_hand(x, y, 0.9)
    assert [float(each["gain"]) for each in found] == pytest.approx(gains, rel=1e-6)
    assert float(found[-1]["scale_invariant_updates"]) == pytest.approx(
        sum(gains), rel=1e-6
    )
    reached = np.ravel(model.layers[0].kernel.numpy())
    assert reached == pytest.approx(expected, rel=1e-6)  # the rate is in float32
    assert max(gains) > 1.5
    assert reached != pytest.approx(by_hand(x, y, 0.9, scaled=False)[0], rel=1e-2)


def test_the_plan_ends_with_the_scale_invariant_updates_and_seldom_looks():
    """A run of r = 2 with S = 8: 1000 scale-invariant updates are 500. Each look waits for the device."""
    looks, done = [], 0

    def numpy():
        looks.append(done)
        return np.array([2.0 * done])

    gain = SimpleNamespace(scale=8.0, state=SimpleNamespace(numpy=numpy))
    plan = EstimatedPlan(derive(64, 2, None), 640, 1000, gain=gain)
    while not plan.ended(done):
        done += 1
    assert done == 500
    assert len(looks) < 30
    assert (
        "10 updates per epoch, 125 to 1000 in all, an estimate: until 1000 scale-invariant ones"
        in str(plan)
    )
    assert not replace(
        plan,
        gain=SimpleNamespace(scale=8.0, state=SimpleNamespace(numpy=lambda: [999.5])),
    ).ended(999)
    skipped = SimpleNamespace(scale=8.0, state=SimpleNamespace(numpy=lambda: [10.0]))
    assert replace(plan, gain=skipped).ended(1000)  # more is not read


@pytest.mark.parametrize(
    ("cut", "overrides", "line"),
    [
        (
            (256, 1, None),
            (),
            "accumulation.factor must be over 1, or there be replicas, for scaling.rule=adascale. ",
        ),
        (
            (64, 2, None),
            (),
            "accumulation.effective_batch_size must be at least the reference's 128 for scaling.rule=",
        ),
        (
            (256, 2, None),
            ("accumulation.noise_scale_every=10",),
            "accumulation.noise_scale_every must be 1 for scaling.rule=adascale. Rec",
        ),
        (
            (256, 2, None),
            ("training.epochs=3", "training.updates=null"),
            "training.epochs must give way to training.up",
        ),
        (
            (256, 2, None),
            ("scaling.warmup=5%",),
            "scaling.warmup must be 0 for scaling.rule=adascale. Received: '5%'.",
        ),
        (
            (256, 2, None),
            ("training.loss_over=effective_batch",),
            "training.loss_over must be example for scaling.rule",
        ),
        (
            (256, 2, None),
            ("optimizer=lion",),
            "scaling.rule must fit the optimizer: adascale is for SGD, Adam, AdamW. ",
        ),
    ],
    ids=lambda value: (
        " ".join(value)
        if isinstance(value, tuple) and all(isinstance(e, str) for e in value)
        else ""
    ),
)
def test_what_is_refused(cut, overrides, line):
    spec = resolve(composed([*RULE, *overrides]), [*RULE, *overrides])
    with pytest.raises(ConfigError) as refused:
        optimizer.build(replace(spec, batching=derive(*cut)), 100)
    assert str(refused.value).startswith(line)


RUN = (
    *(
        "train",
        *RULE,
        "training.updates=60",
        "model=mlp",
        "optimizer=momentum",
        "schedule=inverse_sqrt",
    ),
    *(
        "scaling.reference_batch_size=16",
        "accumulation.effective_batch_size=128",
        "accumulation.factor=4",
    ),
    *(
        "tracking.log_model=false",
        "tracking.system_metrics=false",
        "hardware.precision=float64",
    ),
    *("hardware.deterministic=true", "training.checkpoint_every=5"),
)


def history(folder, run=None):
    found = Store(folder).histories(run or Store(folder).run())
    return {key: points for key, points in found.items() if not key.startswith("perf/")}


@pytest.mark.slow
def test_a_run_is_counted_by_it(tmp_path):
    said = pipeline(*RUN, cwd=tmp_path).stderr
    assert "8 to 60 in all, an estimate: until 60 scale-invariant ones" in said
    changed = "learning rate × r, r from 1 to 8 by the gradient noise, an update counts as r of training.updates"
    run, found = Store(tmp_path).run(), history(tmp_path)
    assert run.data.tags["scaling"] == f"scaling.rule=adascale: {changed}"
    assert run.data.tags["scaling"] in said
    gains, updates = (
        list(found[f"train/{name}"].values())
        for name in ("gain", "scale_invariant_updates")
    )
    assert updates == pytest.approx(np.cumsum(gains), rel=1e-12)
    assert gains[0] == 1
    assert 1 <= min(gains) < 2 < max(gains) <= 8
    assert updates[-2] < 60 <= updates[-1]
    assert 60 / 8 <= len(gains) < 60
    assert run.data.tags["updates"] == str(len(gains))
    # The rate by the schedule's formula, at the scale-invariant updates before: √(w / u), a warm-up of 5% of 60 = 3.
    before = [math.floor(value) + 1 for value in [0, *updates[:-1]]]
    expected = [
        0.05 * min(u / 3, math.sqrt(3 / u)) * r
        for u, r in zip(before, gains, strict=True)
    ]
    assert list(found["train/learning_rate"].values()) == pytest.approx(
        expected, rel=1e-6
    )  # float32


INTERRUPT = """
import os, signal
import keras

class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if str(int(self.model.optimizer.iterations.numpy())) == os.environ.get("AT"):
            os.kill(os.getpid(), int(os.environ["BY"]))

    def get_state(self):
        return {}

    def set_state(self, state):
        pass
"""


INTERRUPTED = (
    *RUN,
    "+training.callbacks.it={_target_: mine.Interrupt}",
    "hydra.run.dir=run",
)


def last_state(folder):
    last = files.newest(folder / "checkpoints")
    return {
        name: array.tobytes()
        for name, array in snapshot.read(last.folder, last.meta).arrays.items()
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A folder with a run to its end, in which the checkpoint of update 10 is there."""
    folder = tmp_path_factory.mktemp("straight")
    (folder / "mine.py").write_text(INTERRUPT)
    pipeline(*INTERRUPTED, cwd=folder, AT="13", BY="9", status=-9)
    shutil.copytree(folder / "run" / "checkpoints" / "10", folder / "10")
    shutil.rmtree(folder / "run")
    pipeline(*INTERRUPTED, cwd=folder)
    shutil.move(folder / "10", folder / "run" / "checkpoints" / "10")
    return folder


def run_of(folder, name="run"):
    lines = map(json.loads, (folder / name / "journal.jsonl").read_text().splitlines())
    run_id = next(line["run"]["run_id"] for line in lines if "run" in line)
    return next(run for run in Store(folder).runs() if run.info.run_id == run_id)


@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(straight, tmp_path):
    (tmp_path / "mine.py").write_text(INTERRUPT)
    pipeline(*INTERRUPTED, cwd=tmp_path, AT="13", BY="9", status=-9)
    pipeline("resume", "run", cwd=tmp_path)
    assert history(tmp_path) == history(straight, run_of(straight))
    assert last_state(tmp_path / "run") == last_state(straight / "run")
    done = int(
        list(history(tmp_path)["train/scale_invariant_updates"].values())[-1]
    )  # over the 60 asked for
    refused = pipeline(
        "resume", "run", f"training.updates={done}", cwd=tmp_path, status=2
    ).stderr
    assert (
        f"training must have a horizon beyond the {done} updates done. Received: {done}."
        in refused
    )


@pytest.mark.soak
def test_forked_and_rerun_to_the_bit(straight):
    """A fork to another rule has no place for the averages; there is one from the weights alone."""
    pipeline(*INTERRUPTED[:-1], "hydra.run.dir=fork", "start.run=run@10", cwd=straight)
    assert last_state(straight / "fork") == last_state(straight / "run")
    assert min(history(straight, run_of(straight, "fork"))["train/gain"]) == 11
    other = (
        *INTERRUPTED[:-1],
        "hydra.run.dir=other",
        "start.run=run@10",
        "scaling=linear",
    )
    (*_, line) = pipeline(*other, cwd=straight, status=2).stderr.splitlines()
    assert line.startswith(
        "pipeline: the checkpoint must fit the model, which has no such variable."
    )
    assert "adascale" in line
    again = pipeline(
        "rerun", run_of(straight).info.run_id, "--allow", "mine", cwd=straight
    )
    assert "bit-equal" in again.stderr + again.stdout


@pytest.mark.soak
def test_two_replicas_and_two_workers_train_the_same_run(tmp_path):
    """With the same micro-batches: 4 of 32 on one replica, 2 on each of two. Another cut measures another noise.

    So does the 12th batch, a last one of 29 examples: one micro-batch, which tells nothing, or one on each replica.
    """
    cuts = {
        "one": (),
        "replicas": ("hardware.replicas=2", "accumulation.factor=2"),
        "workers": (
            "hardware.workers=2",
            "hardware.open_ports=true",
            "accumulation.factor=2",
        ),
        "cut": ("accumulation.factor=8",),
    }
    found = {}
    for name, cut in cuts.items():
        (tmp_path / name).mkdir()
        pipeline(*RUN, *cut, cwd=tmp_path / name)
        gains = history(tmp_path / name)["train/gain"]
        found[name] = [gains[update] for update in range(1, 13)]
    for name in ("replicas", "workers"):
        assert found[name] == pytest.approx(found["one"], rel=1e-6)
    assert found["cut"] != pytest.approx(found["one"], rel=1e-3)


@pytest.mark.soak
def test_it_is_verified(tmp_path):
    assert "equal within rounding" in pipeline("verify", *RUN[1:], cwd=tmp_path).stdout
