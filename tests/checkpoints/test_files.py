"""A run that goes on from a checkpoint has the bits of the undisturbed run.

A damaged checkpoint is not used.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from omegaconf import OmegaConf

from pipeline.accumulation import Evaluation, Update
from pipeline.accumulation.internals import Objective
from pipeline.checkpoints import files, fork, snapshot
from pipeline.checkpoints.files import Checkpoints
from pipeline.checkpoints.snapshot import Snapshot
from pipeline.common.errors import ConfigError
from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching
from pipeline.dataset import Data, batches
from pipeline.training.evaluator import Evaluations, SplitEvaluator
from pipeline.training.loop import Trainer
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder
from tests.parameters import mostly_slow
from tests.training.test_loop import Rows

# An epoch has 6 updates, the last one of 3 examples.
EXAMPLES = 43
SIZE = 8
UPDATES = 15
PLAN = Plan(Batching(SIZE, 2, 4), EXAMPLES, UPDATES)
# The updates after which a case goes on: in the middle of an epoch, at its end, or
# after its first update, where that may matter. Others go on after the first tail.
WHERE = {"ema": (4,), "callbacks": (6, 7), "streamed": (4,)}


class Drawing(keras.callbacks.Callback):
    """Draws from Python and NumPy where an epoch ends, and moves the weights by it.

    It offers what it has drawn as its state.
    """

    def __init__(self):
        super().__init__()
        self.drawn = []
        self.moved = np.zeros(3, np.float32)

    def on_epoch_end(self, epoch, logs=None):
        number = random.random()
        self.drawn.append([number, {"normal": float(np.random.normal())}])
        self.moved += np.float32(number)
        bias = self.model.trainable_variables[-1]
        bias.assign_add(keras.ops.full((1,), self.moved[0] / 100))

    def get_state(self):
        return {"drawn": self.drawn, "moved": self.moved}

    def set_state(self, state):
        self.drawn = state["drawn"]
        self.moved = state["moved"]


class AddingTensor(keras.callbacks.Callback):
    """Adds a tensor to the logs, as Keras allows."""

    def on_epoch_end(self, epoch, logs):
        logs["count"] = tf.constant(float(epoch))

    def get_state(self):
        return {}

    def set_state(self, state):
        assert state == {}


class Patient(keras.callbacks.EarlyStopping):
    """A user's own kind of EarlyStopping."""


class Unseeded(layers.Layer):
    """Draws from the global seed generators of Keras and TensorFlow.

    It counts in a variable of TensorFlow's.
    """

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)
        self.counts = [tf.Variable(0.0, trainable=False)]

    def call(self, x, training=False):
        if not training:
            return x
        self.counts[0].assign_add(1.0)
        noise = keras.random.normal(tf.shape(x)) + self.generator.normal(tf.shape(x))
        return x + 0.01 * (noise + self.counts[0])


def shift(image, seed):
    return image + tf.random.stateless_normal(tf.shape(image), seed)


def shifting():
    return shift


def momentum(**more):
    return keras.optimizers.SGD(0.05, momentum=0.9, **more)


def averaging():
    return momentum(use_ema=True, ema_momentum=0.8)


def loss_scaling():
    adam = keras.optimizers.Adam(0.01)
    return keras.optimizers.LossScaleOptimizer(
        adam, initial_scale=2.0**20, dynamic_growth_steps=3
    )


def no_callbacks(folder):
    return {}


def early_callbacks(folder):
    return {
        "count": AddingTensor(),
        "stop": keras.callbacks.EarlyStopping(
            "val_loss", mode="max", patience=5, restore_best_weights=True
        ),
        "reduce": keras.callbacks.ReduceLROnPlateau(
            "loss", mode="min", patience=0, min_delta=10, factor=0.5
        ),
        "save": keras.callbacks.ModelCheckpoint(
            str(folder / "{epoch}.weights.h5"),
            monitor="loss",
            mode="min",
            save_weights_only=True,
            save_freq=4,
        ),
        "history": keras.callbacks.History(),
        "draw": Drawing(),
        "patient": Patient("count", mode="max", patience=5),
    }


@dataclass(frozen=True)
class Case:
    """What differs between the runs.

    Attributes:
        optimizer: makes it.
        precision: name of Keras' policy.
        dropout: whether the model has a layer of it.
        metric: whether there is a metric besides the loss.
        noise_every: updates between two measurements of the noise scale; 0 for none.
        callbacks: makes them by name, for a folder.
        node: the config group of the dataset.
        extra: makes a further layer.
        replicas: of the model.
        hold_statistics: see `Update`.
    """

    optimizer: Callable[[], keras.Optimizer] = momentum
    precision: str = "float32"
    dropout: bool = False
    metric: bool = False
    noise_every: int = 0
    callbacks: Callable[[Path], dict] = no_callbacks
    node: dict = field(default_factory=dict)
    extra: Callable[[], layers.Layer] | None = None
    replicas: int = 1
    hold_statistics: bool = True


STREAMED = {
    "in_memory": False,
    "shuffle_buffer": 7,
    "augment": {"_target_": f"{__name__}.shifting"},
}
CASES = {
    "plain": Case(),
    "ema": Case(averaging, dropout=True, noise_every=2, metric=True),
    "float16": Case(loss_scaling, precision="mixed_float16", dropout=True),
    "callbacks": Case(callbacks=early_callbacks),
    "streamed": Case(node=STREAMED),
    "unseeded": Case(extra=Unseeded),
    "replicas": Case(
        dropout=True,
        extra=layers.BatchNormalization,
        replicas=2,
        hold_statistics=False,
    ),
    "float64": Case(precision="float64", metric=True),
}


class Run:
    """A small model on 43 examples; `folder` has a checkpoint after every update."""

    def __init__(  # noqa: PLR0913  what a test varies
        self,
        folder: Path,
        case: Case,
        *,
        start=None,
        every=1,
        keep=99,
        stop_at=None,
        looks=1,
        micro=2,
        units=4,
        updates=UPDATES,
        log_every=1,
        rows=None,
    ):
        """Train the case.

        Args:
            folder: of the checkpoints, and of what the callbacks write.
            case: what is trained.
            start: checkpoint to go on from; None to begin.
            every, keep: see `Checkpoints`.
            stop_at: update after which a stop is requested; None for never.
            looks: how often the stop is looked at before it is granted.
            micro: size of the micro-batches, in examples.
            units: of the hidden layer.
            updates: when the run ends.
            log_every: see `Recorder`.
            rows: gets the rows; None for new ones.
        """
        self.folder = folder
        if rows is None:
            rows = Rows()
        self.rows = rows
        begin(case.precision)
        strategy = tf.distribute.get_strategy()
        if case.replicas > 1:
            devices = [f"/CPU:{replica}" for replica in range(case.replicas)]
            strategy = tf.distribute.MirroredStrategy(devices)

        data = examples()
        factor = -(-SIZE // (micro * case.replicas))
        cut = Batching(SIZE, micro, factor, case.replicas)
        self.plan = Plan(cut, EXAMPLES, updates)
        done = 0 if start is None else start.updates_done
        effective_batches = batches.effective_batches(
            OmegaConf.create(case.node), data, self.plan.slices(done), seed=3
        )

        with strategy.scope():
            self.model = model_of(case, units)
            optimizer = case.optimizer()
            optimizer.build(self.model.trainable_variables)
            metrics = metrics_of(case)
            validation_metrics = metrics_of(case)
        loss = keras.losses.MeanSquaredError()
        self.model.compile(optimizer, loss)
        update = Update(
            self.model,
            Objective(loss, metrics=metrics),
            optimizer,
            micro,
            strategy=strategy,
            noise_every=case.noise_every,
            hold_statistics=case.hold_statistics,
        )
        objective = Objective(loss, metrics=validation_metrics)
        evaluation = Evaluation(self.model, objective, micro, strategy=strategy)

        recorder = Counting(
            self.rows, self.plan, log_every, lambda: 0, Progress(updates)
        )
        recorder.skips = case.precision == "mixed_float16"
        folder.mkdir(parents=True, exist_ok=True)
        self.callbacks = case.callbacks(folder)
        looked = 0

        def stop():
            nonlocal looked
            if recorder.done == stop_at:
                looked += 1
            if looked >= looks:
                return Stopped("now")
            return None

        with Checkpoints(folder / "checkpoints", every, self.plan, keep) as checkpoints:
            validation = SplitEvaluator(evaluation, batches.in_order(data.train, SIZE))
            self.loss = Trainer(
                update,
                effective_batches,
                recorder,
                evaluations=Evaluations(validation, every=3),
                callbacks=self.callbacks,
                checkpoints=checkpoints,
                stop=stop,
            ).fit(start)

    def state(self, update: int) -> Snapshot:
        """Return the state in the checkpoint of an update."""
        saved = files.at(self.folder / "checkpoints", update)
        return snapshot.read(saved)


def begin(precision: str) -> None:
    """Set Keras' precision, and begin all its names and seeds anew."""
    keras.utils.clear_session(free_memory=False)
    # Losses and metrics follow floatx.
    floatx = "float64" if precision == "float64" else "float32"
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(1)


def examples() -> Data:
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(EXAMPLES, 3)).astype("float32")
    y = numbers.normal(size=(EXAMPLES, 1)).astype("float32")
    return Data(tf.data.Dataset.from_tensor_slices((x, y)), None)


def model_of(case: Case, units: int) -> keras.Model:
    middle = []
    if case.extra is not None:
        middle.append(case.extra())
    if case.dropout:
        middle.append(layers.Dropout(0.5))
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(units), *middle, layers.Dense(1)]
    )


def metrics_of(case: Case) -> list[keras.Metric]:
    if case.metric:
        return [keras.metrics.MeanAbsoluteError()]
    return []


class Stopped(BaseException):
    pass


class Counting(Recorder):
    """A recorder that knows the last update that it was given."""

    done = 0

    def add(self, update, *values):
        self.done = update
        super().add(update, *values)


@pytest.fixture(autouse=True)
def precision_after(precision):
    """Each run sets its own; the test's end restores it."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A function that gives the undisturbed run of a case, made once."""
    runs = {}

    def undisturbed(name: str) -> Run:
        if name not in runs:
            runs[name] = Run(tmp_path_factory.mktemp(name), CASES[name])
        return runs[name]

    return undisturbed


def goes_on(run: Run, update: int, folder: Path, case: Case, **arguments) -> Run:
    """Return a run in `folder` that goes on from a checkpoint of `run`."""
    start = files.at(run.folder / "checkpoints", update)
    return Run(folder, case, start=start, **arguments)


def differences(actual: Snapshot, expected: Snapshot) -> list[str]:
    """Return the names of the arrays and values that are not bit-identical."""
    bits = bits_of_arrays(actual)
    expected_bits = bits_of_arrays(expected)
    different = []
    for name in expected_bits | bits:
        if bits.get(name) != expected_bits.get(name):
            different.append(name)
    for name, value in actual.values.items():
        if value != expected.values[name]:
            different.append(name)
    return different


def bits_of_arrays(one: Snapshot) -> dict[str, tuple]:
    bits = {}
    for name, array in one.arrays.items():
        bits[name] = (array.dtype, array.shape, array.tobytes())
    return bits


def weight_files(folder: Path) -> set[str]:
    """Return the names of the files of ModelCheckpoint, which are by epoch."""
    return {file.name for file in folder.glob("*.h5")}


def rest(rows: list, update: int) -> list:
    """Return the rows after an update."""
    return [row for row in rows if row[0] > update]


PLACES = []
for _name in CASES:
    for _update in WHERE.get(_name, (7,)):
        PLACES.append((_name, _update))


@pytest.mark.parametrize(
    ("name", "update"),
    mostly_slow(
        PLACES,
        [("ema", 4), ("callbacks", 6)],
        [("callbacks", 7), ("streamed", 4), ("replicas", 7), ("unseeded", 7)],
    ),
)
def test_what_follows_a_checkpoint_is_what_would_have_followed(
    name, update, straight, tmp_path
):
    run = straight(name)
    again = goes_on(run, update, tmp_path, CASES[name], every=UPDATES)
    assert again.rows.updates == rest(run.rows.updates, update)
    assert again.rows.validations == rest(run.rows.validations, update)
    assert again.loss == run.loss
    assert differences(again.state(UPDATES), run.state(UPDATES)) == []
    # After the end these may be averaged weights, or the best ones.
    weights = again.model.get_weights()
    for array, expected in zip(weights, run.model.get_weights(), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert weight_files(again.folder) <= weight_files(run.folder)


def test_a_fork_is_the_run_itself_unless_it_takes_the_weights_alone(straight, tmp_path):
    run = straight("ema")
    checkpoint = files.at(run.folder / "checkpoints", 4)
    forks = []
    for weights_only in (False, True):
        start = fork.Fork("id", run.folder, checkpoint, weights_only, own_rate=False)
        assert start.tags == {"start.run": "id", "start.update": "4"}
        start.load()
        folder = tmp_path / str(weights_only)
        forks.append(Run(folder, CASES["ema"], start=start, every=UPDATES))

    same, other = forks
    assert same.rows.updates == rest(run.rows.updates, 4)
    assert same.rows.validations == rest(run.rows.validations, 4)
    assert differences(same.state(UPDATES), run.state(UPDATES)) == []
    # The negative control: the weights are those of the checkpoint, and nothing else.
    assert [row[0] for row in other.rows.updates] == list(range(1, UPDATES + 1))
    for rows, rows_of_run in zip(other.rows.updates, run.rows.updates, strict=True):
        assert rows[1]["loss"] != rows_of_run[1]["loss"]


def test_the_cases_have_what_they_are_for(straight):
    """A state that never changes would prove nothing."""
    kept = straight("callbacks").state(7).values["callbacks"]
    assert set(kept) == {
        "count",
        "draw",
        "history",
        "patient",
        "reduce",
        "save",
        "stop",
    }
    assert kept["stop"]["best_weights"]
    assert kept["history"]["history"]
    assert kept["draw"]["drawn"]
    assert straight("callbacks").rows.updates[-1][1]["learning_rate"] < 0.05
    assert straight("ema").state(7).values["recorder"]["noise"]["_variance"] != 0


@pytest.mark.slow
def test_the_slow_cases_have_what_they_are_for(straight):
    skipped = [row["skipped_updates"] for _, row in straight("float16").rows.updates]
    assert 0 < skipped[-1] < UPDATES
    # The moving statistics of each replica are its own.
    arrays = straight("replicas").state(7).arrays
    assert any(" on replica 1" in name for name in arrays)
    assert "keras' global seed" in straight("unseeded").state(4).arrays


# The parts of a state. For arrays: the case, and a text in the names of the arrays.
ARRAYS = {
    "the weights": ("ema", "model/sequential/dense/kernel"),
    "the seeds": ("ema", "seed_generator_state"),
    "the slots": ("ema", "_momentum"),
    "the averages": ("ema", "_average"),
    "the iterations": ("ema", "iteration"),
    "the loss scale": ("float16", "dynamic_scale"),
    "its counter": ("float16", "step_counter"),
    "the learning rate": ("callbacks", "learning_rate"),
    "the moving statistics": ("replicas", "moving_"),
    "the seeds of one replica": ("replicas", " on replica 1"),
    "Keras' global seed": ("unseeded", "keras' global seed"),
    "TensorFlow's generator": ("unseeded", "/generator"),
    "TensorFlow's variable": ("unseeded", "/counts"),
}
# For values: the case, and the path of the value.
VALUES = {
    "the noise scale": ("ema", "recorder", "noise"),
    "the epoch's sums": ("callbacks", "recorder", "epoch_sums"),
    "the epoch's examples": ("callbacks", "recorder", "epoch_examples"),
    "the skipped updates": ("float16", "recorder", "skipped"),
    "EarlyStopping": ("callbacks", "callbacks", "stop"),
    "ReduceLROnPlateau": ("callbacks", "callbacks", "reduce"),
    "ModelCheckpoint": ("callbacks", "callbacks", "save"),
    "an own callback": ("callbacks", "callbacks", "draw"),
    "Python's random state": ("callbacks", "random"),
    "NumPy's random state": ("callbacks", "numpy"),
}


QUICK = ("the seeds",)


def without_arrays(saved: Snapshot, fresh: Snapshot, text: str) -> Snapshot:
    """Return a saved state whose arrays with a text in their name are fresh."""
    arrays = dict(saved.arrays)
    replaced = [name for name in arrays if text in name]
    assert replaced
    for name in replaced:
        name_of_all = name.partition(" on replica")[0]
        arrays[name] = fresh.arrays.get(name, arrays[name_of_all])
    return Snapshot(arrays, saved.values)


def without_value(saved: Snapshot, fresh: Snapshot, path: list[str]) -> Snapshot:
    """Return a saved state in which the value at `path` is fresh."""
    arrays = {**fresh.arrays, **saved.arrays}
    values = json.loads(json.dumps(saved.values))
    *outer, last = path
    parent = values
    fresh_parent = fresh.values
    for key in outer:
        parent = parent[key]
        fresh_parent = fresh_parent[key]
    if last == "numpy":
        # Most of NumPy's random state is in arrays.
        for name in saved.arrays:
            if name.startswith("NumPy"):
                arrays[name] = fresh.arrays[name]
    else:
        assert parent[last] != fresh_parent[last]
    parent[last] = fresh_parent[last]
    return Snapshot(arrays, values)


@pytest.mark.parametrize(
    "part", mostly_slow(ARRAYS | VALUES, QUICK, ["the noise scale"])
)
def test_without_one_part_of_the_state_another_run_follows(
    part, straight, tmp_path, monkeypatch
):
    name, *path = (ARRAYS | VALUES)[part]
    run = straight(name)
    restore = snapshot.restore

    def restore_without(saved, update, recorder, callbacks):
        fresh = snapshot.capture(update, recorder, callbacks, files.LoopState())
        if part in ARRAYS:
            changed = without_arrays(saved, fresh, *path)
        else:
            changed = without_value(saved, fresh, path)
        return restore(changed, update, recorder, callbacks)

    monkeypatch.setattr(snapshot, "restore", restore_without)
    update = 13 if name == "callbacks" else 7
    try:
        again = goes_on(run, update, tmp_path, CASES[name], every=UPDATES)
    except AttributeError:  # ModelCheckpoint learns of an epoch where one begins
        assert part == "ModelCheckpoint"
        return
    is_same = (
        again.rows.updates == rest(run.rows.updates, update)
        and again.rows.validations == rest(run.rows.validations, update)
        and not differences(again.state(UPDATES), run.state(UPDATES))
    )
    assert not is_same


def assert_rows_close(rows: list, expected: list) -> None:
    """Check that rows are of the same updates, with equal values within rounding."""
    assert [update for update, _ in rows] == [update for update, _ in expected]
    for (_, values), (_, expected_values) in zip(rows, expected, strict=True):
        assert values == pytest.approx(expected_values, rel=1e-12)


@pytest.mark.slow
def test_at_another_factor_it_goes_on_within_rounding(straight, tmp_path):
    run = straight("float64")
    # 2 micro-batches in place of 4
    again = goes_on(run, 7, tmp_path, CASES["float64"], every=None, micro=4)
    assert_rows_close(again.rows.updates, rest(run.rows.updates, 7))
    weights = again.model.get_weights()
    for array, expected in zip(weights, run.model.get_weights(), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_on_two_replicas_it_goes_on_within_rounding_and_back(straight, tmp_path):
    run = straight("float64")
    two_replicas = replace(CASES["float64"], replicas=2)
    again = goes_on(run, 7, tmp_path / "two", two_replicas)
    back = goes_on(again, 10, tmp_path / "one", CASES["float64"])
    assert_rows_close(again.rows.updates, rest(run.rows.updates, 7))
    assert_rows_close(back.rows.updates, rest(run.rows.updates, 10))


@pytest.mark.parametrize(
    ("stop_at", "looks"),
    mostly_slow(
        [(4, 1), (6, 3), (6, 1), (UPDATES, 1), (UPDATES, 2)],
        [],
        [(4, 1), (6, 3), (UPDATES, 2)],
    ),
)
def test_a_stop_leaves_the_rows_and_a_checkpoint(stop_at, looks, straight, tmp_path):
    """The run that goes on begins with what was due after the update.

    That is the evaluation and the callbacks. A stop may also come during an evaluation:
    it is looked at again after each batch.
    """
    run = straight("callbacks")
    case = CASES["callbacks"]
    rows = Rows()
    with pytest.raises(Stopped):
        Run(tmp_path / "one", case, every=100, stop_at=stop_at, looks=looks, rows=rows)
    start = files.newest(tmp_path / "one" / "checkpoints")
    assert start.updates_done == stop_at
    again = Run(tmp_path / "two", case, start=start, every=UPDATES)
    assert rows.updates == [row for row in run.rows.updates if row[0] <= stop_at]
    assert rows.updates + again.rows.updates == run.rows.updates
    assert rows.validations + again.rows.validations == run.rows.validations
    assert differences(again.state(UPDATES), run.state(UPDATES)) == []
    assert again.loss == run.loss


@pytest.mark.slow
def test_a_row_that_log_every_leaves_out_is_logged_at_the_end_all_the_same(tmp_path):
    case = CASES["plain"]
    run = Run(tmp_path / "undisturbed", case, log_every=4)
    assert [row[0] for row in run.rows.updates] == [4, 8, 12, UPDATES]
    for update in (UPDATES - 1, UPDATES):
        again = goes_on(run, update, tmp_path / str(update), case, log_every=4)
        assert again.rows.updates == rest(run.rows.updates, update)
    assert again.loss == run.loss


class StopsAt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


@pytest.mark.slow
def test_a_run_that_a_callback_has_stopped_stays_stopped(tmp_path, capsys):
    case = replace(CASES["plain"], callbacks=lambda folder: {"stop": StopsAt()})
    stopped = Run(tmp_path / "one", case, every="auto")
    assert stopped.rows.updates[-1][0] == 12
    again = goes_on(stopped, 12, tmp_path / "two", case, every=None)
    assert again.rows.updates == []
    assert again.rows.validations == []
    assert again.loss == stopped.loss
    assert not (tmp_path / "two" / "checkpoints").exists()
    assert snapshot.starting_anew(stopped.callbacks) == [
        "training.callbacks.stop starts anew: it has no state to save"
    ]
    assert snapshot.starting_anew(early_callbacks(tmp_path)) == []


def test_the_state_of_a_subclass_of_keras_own_callback_is_kept(straight):
    """That it is restored is part of what follows a checkpoint."""
    run = straight("callbacks")
    kept = run.state(12).values["callbacks"]["patient"]
    assert kept["best"] is not None
    assert snapshot.starting_anew(run.callbacks) == []


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        (
            {},
            {"units": 5},
            "model/sequential/dense/kernel is (3, 5) float32. "
            "Received: '(3, 4) float32'.",
        ),
        ({"dropout": True}, {}, "seed_generator_state is (2,) int64. Received: null."),
        (
            {"optimizer": keras.optimizers.SGD},
            {},
            "which has no such variable. "
            "Received: 'optimizer/sgd/sequential_dense_kernel_momentum'.",
        ),
        (
            {"precision": "float64"},
            {},
            "dense/kernel is (3, 4) float64. Received: '(3, 4) float32'.",
        ),
    ],
    ids=["units", "dropout", "optimizer", "precision"],
)
def test_a_checkpoint_of_another_model_is_rejected(
    changes, arguments, message, straight, tmp_path
):
    case = replace(CASES["callbacks"], **changes)
    with pytest.raises(ConfigError) as error:
        goes_on(straight("callbacks"), 4, tmp_path, case, **arguments)
    assert message in str(error.value)


# From here on, only the folders are tested: what is written, and what becomes of it.


# The values that every checkpoint has.
LEAST: dict[str, Any] = {
    "loop": {"open": False, "validation": {}, "stopped_by": None, "best": None},
    "stop_training": False,
    "recorder": {
        "last": {"learning_rate": 0.1},
        "skipped": 0,
        "noise": {},
        "unlogged": [],
        "epoch_sums": {},
        "epoch_examples": {},
    },
    "random": [],
    "numpy": [],
    "callbacks": {},
    "kinds": {},
}


def small(update: int) -> Snapshot:
    arrays = {
        "a": np.full((40, 3), update, np.float32),
        "b": np.array(update),
        "c": tf.cast([1.5], tf.bfloat16).numpy(),
    }
    return Snapshot(arrays, {**LEAST, "of": update, "nothing": None, "third": 1 / 3})


def saved(folder: Path, *updates: int, keep=2) -> Checkpoints:
    """Save small checkpoints of some updates."""
    with Checkpoints(folder, 1, PLAN, keep) as checkpoints:
        for update in updates:
            checkpoints.save(update, lambda update=update: small(update))
    return checkpoints


def test_what_is_written_is_read(tmp_path):
    saved(tmp_path, 3)
    found = files.at(tmp_path, 3)
    assert differences(snapshot.read(found), small(3)) == []
    assert found.meta.examples == EXAMPLES
    assert found.meta.effective_batch_size == SIZE
    content = json.loads((tmp_path / "3" / "meta.json").read_text())
    assert list(content) == [
        "format",
        "update",
        "examples",
        "effective_batch_size",
        "arrays",
        "values",
    ]


def test_the_state_of_the_loop_is_written_by_its_old_keys():
    loop = files.LoopState(True, {"loss": 1.0}, "stop", {"update": 3}, 7)
    content = loop.as_json()
    assert list(content) == ["open", "validation", "stopped_by", "best", "batch"]
    assert files.LoopState.from_json(content) == loop
    # The first checkpoints had no digest of the batch.
    del content["batch"]
    assert files.LoopState.from_json(content).batch_digest is None


def test_the_latest_stay_and_what_a_killed_process_left_goes(tmp_path):
    assert files.newest(tmp_path / "none") is None
    saved(tmp_path, 1, 2, 3)
    assert names(tmp_path) == ["2", "3"]
    (tmp_path / ".4").mkdir()
    (tmp_path / ".4" / "arrays.index").write_text("half of it")
    # Reading removes nothing: the run may be writing.
    assert files.newest(tmp_path).updates_done == 3
    assert names(tmp_path) == [".4", "2", "3"]

    # Folders that a person has made stay.
    (tmp_path / "07").mkdir()
    (tmp_path / "notes").mkdir()
    saved(tmp_path, 9)
    assert names(tmp_path) == ["07", "3", "9", "notes"]
    # It went on from 3: what was after that belongs to another run.
    saved(tmp_path, 5)
    assert names(tmp_path) == ["07", "3", "5", "notes"]
    saved(tmp_path, 5)
    assert files.newest(tmp_path).updates_done == 5


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def damages(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what a file may contain in place of `content`, by a name of the damage.

    Each byte of a small file has a bit flipped, and some bytes of a large one. The file
    is cut, longer, or empty.
    """
    step = max(1, len(content) // 61)
    for place in {*range(0, len(content), step), len(content) - 1}:
        for bit in (0, 5):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            yield f"bit {bit} of byte {place}", bytes(damaged)
    for length in {0, 1, len(content) // 2, len(content) - 1}:
        yield f"cut to {length}", content[:length]
    yield "one more", content + b"\0"
    yield "of zeros", bytes(len(content))


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(tmp_path, capsys):
    saved(tmp_path, 1, 2)
    paths = [file for file in sorted((tmp_path / "2").iterdir()) if file.is_file()]
    assert [file.name for file in paths] == [
        "arrays.data-00000-of-00001",
        "arrays.index",
        "manifest.json",
        "meta.json",
    ]
    damaged_line = f"the checkpoint {tmp_path / '2'} is damaged and is not used: "
    times_used = {1: 0, 2: 0}
    for file in paths:
        content = file.read_bytes()
        for damage, damaged in damages(content):
            file.write_bytes(damaged)
            capsys.readouterr()
            found = files.newest(tmp_path)
            err = capsys.readouterr().err
            times_used[found.updates_done] += 1
            if found.updates_done == 2:  # a space in the manifest
                assert file.name == "manifest.json", damage
                assert json.loads(damaged) == json.loads(content), damage
                assert differences(snapshot.read(found), small(2)) == []
            else:
                assert err.startswith(damaged_line), damage
                assert err.count("\n") == 1
                with pytest.raises(ConfigError, match="must not be damaged"):
                    files.at(tmp_path, 2)

        # The file is not there, or has the content of another one.
        other = paths[0] if file is not paths[0] else paths[1]
        file.unlink()
        assert files.newest(tmp_path).updates_done == 1, file
        shutil.copyfile(other, file)
        assert files.newest(tmp_path).updates_done == 1, file
        file.write_bytes(content)
    assert times_used[2] < 20
    assert times_used[1] > 300

    (tmp_path / "2" / "more").touch()
    assert files.newest(tmp_path).updates_done == 1
    (tmp_path / "2").rename(tmp_path / "3")
    (tmp_path / "3" / "more").unlink()
    assert files.newest(tmp_path).updates_done == 1
    assert "it was written after update 2" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "1")
    assert files.newest(tmp_path) is None


def test_where_the_latest_ones_are_damaged_that_of_the_best_evaluation_is_offered(
    tmp_path, capsys
):
    folder = tmp_path / "checkpoints"
    saved(folder, 3, 4)
    saved(folder / files.BEST, 2)
    for update in ("3", "4"):
        (folder / update / "meta.json").write_text("{}")

    assert files.newest(folder) is None
    assert files.newest_of_run(folder).updates_done == 2
    line = f"the checkpoint of the best evaluation is used: {folder}/best/2\n"
    assert capsys.readouterr().err.endswith(line)
    assert files.newest_of_run(folder, lambda _: False) is None

    choices = " Received: 'run'. Choices: run@2."
    rule = "RUN must name an update: only the best evaluation has an intact checkpoint."
    with pytest.raises(ConfigError, match=re.escape(rule + choices)):
        fork.checkpoint_in(tmp_path, "run", "RUN")
    with pytest.raises(ConfigError, match=r"must not be damaged .* Choices: 2\.$"):
        fork.checkpoint_in(tmp_path, "run@4", "RUN", 4)
    assert fork.checkpoint_in(tmp_path, "run@2", "RUN", 2).updates_done == 2

    shutil.rmtree(folder / files.BEST)
    rule = "RUN must have an intact checkpoint. Received: 'run'. Choices: none."
    with pytest.raises(ConfigError, match=re.escape(rule)):
        fork.checkpoint_in(tmp_path, "run", "RUN")


def edit_meta(folder: Path, old: str, new: str) -> None:
    """Replace a text in a checkpoint's meta.json, and correct its hash."""
    meta = folder / "meta.json"
    manifest = folder / "manifest.json"
    old_hash = files._sha256(meta)
    meta.write_text(meta.read_text().replace(old, new))
    new_hash = files._sha256(meta)
    manifest.write_text(manifest.read_text().replace(old_hash, new_hash))


def test_one_of_another_format_or_that_is_not_there_is_rejected(tmp_path):
    saved(tmp_path, 1, 2)
    line = r"3 must exist\. Received: 3\. Choices: 1, 2\."
    with pytest.raises(ConfigError, match=line):
        files.at(tmp_path, 3)
    edit_meta(tmp_path / "2", '"format": 1', '"format": 2')
    line = r"must be of format 1\. Received: 2\."
    with pytest.raises(ConfigError, match=line):
        files.newest(tmp_path)
    with pytest.raises(ConfigError, match=line):
        files.at(tmp_path, 2)


@pytest.mark.parametrize("lost", ["values", "arrays", "loop", "stopped_by"])
def test_one_that_lacks_something_is_said_and_not_used(tmp_path, capsys, lost):
    """Its hashes are right."""
    saved(tmp_path, 1, 2)
    edit_meta(tmp_path / "2", f'"{lost}"', '"found"')
    assert files.newest(tmp_path).updates_done == 1
    line = rf"is damaged and is not used: meta.json, line \d+: {lost} is missing\n"
    assert re.search(line, capsys.readouterr().err)


@pytest.mark.parametrize("call", ["fsync", "rename", "write", "read"])
def test_what_cannot_be_written_is_said_and_leaves_nothing(
    call, tmp_path, capsys, monkeypatch
):
    saved(tmp_path, 1)

    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", full)
        elif call == "rename":
            patch.setattr(Path, "rename", full)
        elif call == "write":
            patch.setattr(tf.train.Checkpoint, "write", full)
        else:
            patch.setattr(
                snapshot, "read_arrays", lambda folder, specs: small(7).arrays
            )
        saved(tmp_path, 2)
    assert names(tmp_path) == ["1"]
    err = capsys.readouterr().err
    not_written = "the checkpoint of update 2 was not written: "
    if call == "read":
        assert err.startswith(f"{not_written}OSError: ")
        assert "was not read back as it was written" in err
        assert err.count("\n") == 1
    else:
        assert err == f"{not_written}No space left on device\n"
    saved(tmp_path, 3)
    assert names(tmp_path) == ["1", "3"]


def test_a_best_checkpoint_that_could_not_be_written_is_named(tmp_path, capsys):
    assert Checkpoints(tmp_path, 1, PLAN).best(3) is None
    assert capsys.readouterr().err == (
        "the best checkpoint, that of update 3, does not exist: the last weights are "
        "used instead\n"
    )


def test_training_goes_on_where_no_checkpoint_can_be_written(
    straight, tmp_path, capsys
):
    tmp_path.joinpath("checkpoints").write_text("in the way")
    run = Run(tmp_path, CASES["callbacks"], every=5)
    assert run.rows.updates == straight("callbacks").rows.updates
    assert capsys.readouterr().err.count(" was not written: ") == 3


def test_a_checkpoint_does_not_see_what_comes_after_it(tmp_path, monkeypatch):
    """It is written while training goes on; the next one waits for it."""
    may_write = threading.Event()
    variable = tf.Variable([1.0])
    write = Snapshot.write_arrays

    def write_later(snapshot, folder):
        assert may_write.wait(60)
        write(snapshot, folder)

    def captured():
        return Snapshot({"v": variable.numpy()}, LEAST)

    monkeypatch.setattr(Snapshot, "write_arrays", write_later)
    with Checkpoints(tmp_path, "auto", PLAN) as checkpoints:
        checkpoints.save(1, captured)
        variable.assign([2.0])
        assert "1" not in names(tmp_path)
        checkpoints._next_auto = 0
        assert not checkpoints.due(2)  # while one is written
        threading.Timer(0.1, may_write.set).start()
        checkpoints.save(2, captured)
        assert names(tmp_path)[-1] == "1"
        checkpoints.wait()
        checkpoints._next_auto = 0
        assert checkpoints.due(2)
    for update in (1, 2):
        found = files.at(tmp_path, update)
        assert snapshot.read(found).arrays["v"].tolist() == [update]


def test_the_first_one_that_is_due_by_the_time_is_announced(tmp_path, capsys):
    def captured():
        return Snapshot({"v": np.zeros(1)}, LEAST)

    def save(checkpoints, update, *, best=False):
        checkpoints.save(update, captured, best=best)
        checkpoints.wait()
        return capsys.readouterr().err

    with Checkpoints(tmp_path / "auto", "auto", PLAN) as checkpoints:
        assert save(checkpoints, 1) == ""  # that at the end of a short run
        checkpoints._next_auto = 0
        assert save(checkpoints, 2, best=True) == ""
        assert save(checkpoints, 3) == (
            "first checkpoint, after update 3: a crash loses only the updates after "
            "the latest checkpoint; the next one is due in 5 min "
            "(training.checkpoint_every)\n"
        )
        checkpoints._next_auto = 0
        assert save(checkpoints, 4) == ""
    with Checkpoints(tmp_path / "each", 1, PLAN) as checkpoints:
        checkpoints._next_auto = 0
        assert save(checkpoints, 1) == ""


def test_when_one_is_due(tmp_path):
    def due(every, last=False):
        checkpoints = Checkpoints(tmp_path, every, PLAN)
        updates = []
        for update in range(1, 16):
            if checkpoints.due(update, last=last and update == 15):
                updates.append(update)
        return updates

    assert due(None) == due(None, last=True) == []
    assert due("epoch") == [6, 12]
    assert due("epoch", last=True) == [6, 12, 15]
    assert due(4) == [4, 8, 12]
    assert due("auto") == []
    assert due("auto", last=True) == [15]


def test_auto_waits_longer_after_a_slow_one(tmp_path, monkeypatch):
    now = 1000.0  # seconds
    monkeypatch.setattr(files.time, "monotonic", lambda: now)
    checkpoints = Checkpoints(tmp_path, "auto", PLAN)
    times = []

    def captured():
        nonlocal now
        now += 1
        if len(times) == 1:
            now += 19
        return small(1)

    while now < 4000:
        if checkpoints.due(1):
            times.append(now)
            checkpoints.save(1, captured)
            checkpoints.wait()
        now += 1
    # 300 s after the start; the first stalls for 20 s, so the next is 2000 s after it.
    assert times[:4] == [1300, 1300 + 2020, 1300 + 2020 + 301, 1300 + 2020 + 602]


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        {1: "a number for a key"},
        np.array(["text"]),
        {"__array__": 1},
        object(),
    ],
)
def test_what_a_callback_may_not_keep_is_said(value):
    line = "the state of callback/own/kept/0 must be JSON values and NumPy arrays"
    with pytest.raises(TypeError, match=line):
        snapshot._without_arrays({"kept": [value]}, "callback/own", {})
