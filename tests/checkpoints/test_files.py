"""A run that goes on from a checkpoint is the undisturbed run, to the bit; a damaged checkpoint is not used."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import threading
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
from pipeline.checkpoints import files as checkpoint
from pipeline.checkpoints import snapshot as state
from pipeline.checkpoints.files import Checkpoints
from pipeline.checkpoints.snapshot import State
from pipeline.common.errors import ConfigError
from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching
from pipeline.dataset import Data, batches
from pipeline.training.evaluator import Evaluations, Evaluator
from pipeline.training.loop import Trainer
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder
from tests.parameters import mostly_slow
from tests.training.test_loop import Rows

EXAMPLES, SIZE, UPDATES = 43, 8, 15  # 6 updates an epoch, the last one of 3 examples
PLAN = Plan(Batching(SIZE, 2, 4), EXAMPLES, UPDATES)
# In the middle of an epoch, at its end, after its first update: where that may matter; else after the first tail.
WHERE = {"ema": (4,), "callbacks": (6, 7), "streamed": (4,)}


class Drawing(keras.callbacks.Callback):
    """Draws where an epoch ends from Python and NumPy, moves the weights by it, and offers what it keeps."""

    def __init__(self):
        super().__init__()
        self.drawn, self.moved = [], np.zeros(3, np.float32)

    def on_epoch_end(self, epoch, logs=None):
        self.drawn.append([random.random(), {"normal": float(np.random.normal())}])
        self.moved += np.float32(self.drawn[-1][0])
        self.model.trainable_variables[-1].assign_add(
            keras.ops.full((1,), self.moved[0] / 100)
        )

    def get_state(self):
        return {"drawn": self.drawn, "moved": self.moved}

    def set_state(self, state):
        self.drawn, self.moved = state["drawn"], state["moved"]


class Unseeded(layers.Layer):
    """Draws from Keras' global seed generator and from TensorFlow's, and counts in a variable of TensorFlow's."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(3)
        self.counts = [tf.Variable(0.0, trainable=False)]

    def call(self, x, training=False):
        if not training:
            return x
        self.counts[0].assign_add(1.0)
        return x + 0.01 * (
            keras.random.normal(tf.shape(x))
            + self.generator.normal(tf.shape(x))
            + self.counts[0]
        )


def shift(image, seed):
    return image + tf.random.stateless_normal(tf.shape(image), seed)


def shifting():
    return shift


def momentum(**more):
    return keras.optimizers.SGD(0.05, momentum=0.9, **more)


def early_callbacks(folder):
    return {
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
    }


CASES = {
    "plain": {"optimizer": momentum},
    "ema": {
        "optimizer": lambda: momentum(use_ema=True, ema_momentum=0.8),
        "dropout": True,
        "noise": 2,
        "metric": True,
    },
    "float16": {
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=2.0**20, dynamic_growth_steps=3
        ),
        "precision": "mixed_float16",
        "dropout": True,
    },
    "callbacks": {"optimizer": momentum, "callbacks": early_callbacks},
    "streamed": {
        "optimizer": momentum,
        "node": {
            "in_memory": False,
            "shuffle_buffer": 7,
            "augment": {"_target_": f"{__name__}.shifting"},
        },
    },
    "unseeded": {"optimizer": momentum, "extra": Unseeded},
    "replicas": {
        "optimizer": momentum,
        "dropout": True,
        "extra": layers.BatchNormalization,
        "replicas": 2,
        "hold": False,
    },
    "float64": {"optimizer": momentum, "precision": "float64", "metric": True},
}


class Run:
    """A small model on 43 examples; a checkpoint after every update is left in `folder`."""

    def __init__(
        self,
        folder: Path,
        case: dict,
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
    ):
        keras.utils.clear_session(free_memory=False)
        precision = case.get("precision", "float32")
        keras.config.set_floatx("float64" if precision == "float64" else "float32")
        keras.config.set_dtype_policy(precision)
        keras.utils.set_random_seed(1)
        replicas = case.get("replicas", 1)
        strategy = tf.distribute.get_strategy()
        if replicas > 1:
            strategy = tf.distribute.MirroredStrategy(
                [f"/CPU:{replica}" for replica in range(replicas)]
            )
        numbers = np.random.default_rng(0)
        x, y = (
            numbers.normal(size=(EXAMPLES, 3)).astype("float32"),
            numbers.normal(size=(EXAMPLES, 1)),
        )
        data = Data(tf.data.Dataset.from_tensor_slices((x, y.astype("float32"))), None)
        cut = Batching(SIZE, micro, -(-SIZE // (micro * replicas)), replicas)
        self.plan = Plan(cut, EXAMPLES, updates)
        self.batches = batches.effective_batches(
            OmegaConf.create(case.get("node", {})),
            data,
            self.plan.slices(start.update if start else 0),
            seed=3,
        )
        with strategy.scope():
            middle = [case["extra"]()] if "extra" in case else []
            middle += [layers.Dropout(0.5)] * case.get("dropout", False)
            self.model = keras.Sequential(
                [keras.Input((3,)), layers.Dense(units), *middle, layers.Dense(1)]
            )
            optimizer = case["optimizer"]()
            optimizer.build(self.model.trainable_variables)
            metrics = [keras.metrics.MeanAbsoluteError()] * case.get("metric", False)
            validating = [keras.metrics.MeanAbsoluteError()] * case.get("metric", False)
        loss = keras.losses.MeanSquaredError()
        self.model.compile(optimizer, loss)
        noise = case.get("noise", 0)
        options = {"noise_every": noise, "hold_statistics": case.get("hold", True)}
        update = Update(
            self.model,
            Objective(loss, metrics=metrics),
            optimizer,
            micro,
            strategy=strategy,
            **options,
        )
        evaluation = Evaluation(
            self.model, Objective(loss, metrics=validating), micro, strategy=strategy
        )
        self.rows, self.folder = Rows(), folder
        recorder = Counting(
            self.rows, self.plan, log_every, lambda: 0, Progress(updates)
        )
        recorder.skips = precision == "mixed_float16"
        folder.mkdir(parents=True, exist_ok=True)
        self.callbacks = case["callbacks"](folder) if "callbacks" in case else {}
        reason, looked = Stopped("now"), []

        def stop():
            looked.extend([None] * (recorder.done == stop_at))
            return reason if len(looked) >= looks else None

        with Checkpoints(folder / "checkpoints", every, self.plan, keep) as checkpoints:
            validation = Evaluator(evaluation, batches.in_order(data.train, SIZE))
            self.loss = Trainer(
                update,
                self.batches,
                recorder,
                evaluations=Evaluations(validation, every=3),
                callbacks=self.callbacks,
                checkpoints=checkpoints,
                stop=stop,
            ).fit(start)

    def state(self, update: int) -> State:
        return written(self.folder, update)


class Stopped(BaseException):
    pass


class Counting(Recorder):
    """Knows the last update that it was given."""

    done = 0

    def add(self, update, *given):
        self.done = update
        super().add(update, *given)


def written(folder: Path, update: int) -> State:
    found = checkpoint.at(folder / "checkpoints", update)
    return state.read(found.folder, found.meta)


@pytest.fixture(autouse=True)
def precision_after(precision):
    """Each run sets its own; the test's end restores it."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The undisturbed run of each case, made when it is first asked for."""
    made = {}

    def of(name: str) -> Run:
        if name not in made:
            made[name] = Run(tmp_path_factory.mktemp(name), CASES[name])
        return made[name]

    return of


def goes_on(run: Run, update: int, folder: Path, case: dict, **arguments) -> Run:
    return Run(
        folder,
        case,
        start=checkpoint.at(run.folder / "checkpoints", update),
        **arguments,
    )


def differences(one: State, two: State) -> list[str]:
    """The names of what is not equal to the bit."""
    names = [*one.arrays, *(name for name in two.arrays if name not in one.arrays)]
    bits = [
        {name: (a.dtype, a.shape, a.tobytes()) for name, a in both.arrays.items()}
        for both in (one, two)
    ]
    different = [name for name in names if bits[0].get(name) != bits[1].get(name)]
    return different + [
        name for name in one.values if one.values[name] != two.values[name]
    ]


def files(folder: Path) -> list[str]:
    return [file.name for file in folder.glob("*.h5")]


def rest(rows: list, update: int) -> list:
    return [row for row in rows if row[0] > update]


@pytest.mark.parametrize(
    "name",
    mostly_slow(CASES, ["ema", "callbacks", "streamed"], ["replicas", "unseeded"]),
)
def test_what_follows_a_checkpoint_is_what_would_have_followed(
    name, straight, tmp_path
):
    whole = straight(name)
    for update in WHERE.get(name, (7,)):
        again = goes_on(
            whole, update, tmp_path / str(update), CASES[name], every=UPDATES
        )
        assert again.rows.updates == rest(whole.rows.updates, update)
        assert again.rows.validations == rest(whole.rows.validations, update)
        assert again.loss == whole.loss
        assert differences(again.state(UPDATES), whole.state(UPDATES)) == []
        for one, two in zip(
            again.model.get_weights(), whole.model.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(
                one, two
            )  # after the end: averaged weights, the best ones
        assert set(files(again.folder)) <= set(
            files(whole.folder)
        )  # of ModelCheckpoint, by epoch


def test_the_cases_have_what_they_are_for(straight):
    """A state that never changes would prove nothing."""
    kept = straight("callbacks").state(7).values["callbacks"]
    assert set(kept) == {"stop", "reduce", "save", "history", "draw"}
    assert all(
        [
            kept["stop"]["best_weights"],
            kept["history"]["history"],
            kept["draw"]["drawn"],
        ]
    )
    assert straight("callbacks").rows.updates[-1][1]["learning_rate"] < 0.05
    assert straight("ema").state(7).values["recorder"]["noise"]["_variance"] != 0


@pytest.mark.slow
def test_the_slow_cases_have_what_they_are_for(straight):
    skipped = [row["skipped_updates"] for _, row in straight("float16").rows.updates]
    assert 0 < skipped[-1] < UPDATES
    assert any(
        " on replica 1" in name for name in straight("replicas").state(7).arrays
    )  # moving statistics
    assert "keras' global seed" in straight("unseeded").state(4).arrays


# What a state consists of: the names of arrays that a pattern is in, or a part of the values, and the case it is of.
PARTS = {
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


QUICK = ("the seeds", "the noise scale")


@pytest.mark.parametrize("part", mostly_slow(PARTS | VALUES, QUICK, []))
def test_without_one_part_of_the_state_another_run_follows(
    part, straight, tmp_path, monkeypatch
):
    name, *where = (PARTS | VALUES)[part]
    whole, restore = straight(name), state.restore

    def restore_without(given, update, recorder, callbacks):
        fresh = state.capture(update, recorder, callbacks, {})
        arrays, values = dict(given.arrays), json.loads(json.dumps(given.values))
        for array in [array for array in arrays if part in PARTS and where[0] in array]:
            arrays[array] = fresh.arrays.get(
                array, arrays[array.partition(" on replica")[0]]
            )
        if part in VALUES:
            *path, last = where
            inner, of = values, fresh.values
            for key in path:
                inner, of = inner[key], of[key]
            if last == "numpy":
                arrays |= {
                    array: fresh.arrays[array]
                    for array in arrays
                    if array.startswith("NumPy")
                }
            assert inner[last] != of[last] or last == "numpy"
            inner[last] = of[last]
            arrays = {**fresh.arrays, **arrays}
        assert part in VALUES or any(where[0] in array for array in given.arrays)
        return restore(State(arrays, values), update, recorder, callbacks)

    monkeypatch.setattr(state, "restore", restore_without)
    update = 13 if name == "callbacks" else 7
    try:
        again = goes_on(whole, update, tmp_path, CASES[name], every=UPDATES)
    except AttributeError:  # ModelCheckpoint learns of an epoch where one begins
        assert part == "ModelCheckpoint"
        return
    same = [again.rows.updates == rest(whole.rows.updates, update)]
    same += [again.rows.validations == rest(whole.rows.validations, update)]
    same += [not differences(again.state(UPDATES), whole.state(UPDATES))]
    assert not all(same)


@pytest.mark.slow
def test_at_another_factor_it_goes_on_within_rounding(straight, tmp_path):
    whole = straight("float64")
    again = goes_on(
        whole, 7, tmp_path, CASES["float64"], every=None, micro=4
    )  # 2 micro-batches in place of 4
    for (update, row), (expected, values) in zip(
        again.rows.updates, rest(whole.rows.updates, 7), strict=True
    ):
        assert (update, row) == (expected, pytest.approx(values, rel=1e-12))
    for one, two in zip(
        again.model.get_weights(), whole.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_on_two_replicas_it_goes_on_within_rounding_and_back(straight, tmp_path):
    whole = straight("float64")
    on_two = CASES["float64"] | {"replicas": 2}
    again = goes_on(whole, 7, tmp_path / "two", on_two)
    back = goes_on(again, 10, tmp_path / "one", CASES["float64"])
    for rows, update in ((again.rows.updates, 7), (back.rows.updates, 10)):
        for (number, row), (expected, values) in zip(
            rows, rest(whole.rows.updates, update), strict=True
        ):
            assert (number, row) == (expected, pytest.approx(values, rel=1e-12))


@pytest.mark.parametrize(
    ("stop_at", "looks"),
    mostly_slow(
        [(4, 1), (6, 3), (6, 1), (UPDATES, 1), (UPDATES, 2)],
        [],
        [(4, 1), (6, 3), (UPDATES, 2)],
    ),
)
def test_a_stop_that_is_asked_for_leaves_the_rows_and_a_checkpoint(
    stop_at, looks, straight, tmp_path
):
    """Before the evaluation and the callbacks that are due after the update: the run that goes on begins with them.

    Also where it is asked for while the run evaluates, which is looked at again after each batch.
    """
    whole = straight("callbacks")
    with pytest.raises(Stopped):
        stopped_run(tmp_path / "one", stop_at, looks)
    found = checkpoint.newest(tmp_path / "one" / "checkpoints")
    assert found.update == stop_at
    first = KEPT_ROWS.pop()
    again = Run(tmp_path / "two", CASES["callbacks"], start=found, every=UPDATES)
    assert first.updates == [row for row in whole.rows.updates if row[0] <= stop_at]
    assert first.updates + again.rows.updates == whole.rows.updates
    assert first.validations + again.rows.validations == whole.rows.validations
    assert differences(again.state(UPDATES), whole.state(UPDATES)) == []
    assert again.loss == whole.loss


KEPT_ROWS: list[Rows] = []


def stopped_run(folder: Path, stop_at: int, looks: int) -> None:
    """The rows of a run that raises are left in `KEPT_ROWS`."""
    made = Run.__new__(Run)
    try:
        made.__init__(
            folder, CASES["callbacks"], every=100, stop_at=stop_at, looks=looks
        )
    finally:
        KEPT_ROWS.append(made.rows)


@pytest.mark.slow
def test_a_row_that_log_every_leaves_out_is_logged_at_the_end_all_the_same(tmp_path):
    whole = Run(tmp_path / "whole", CASES["plain"], log_every=4)
    for update in (UPDATES - 1, UPDATES):
        again = goes_on(
            whole, update, tmp_path / str(update), CASES["plain"], log_every=4
        )
        assert [row[0] for row in whole.rows.updates] == [4, 8, 12, UPDATES]
        assert again.rows.updates == rest(whole.rows.updates, update)
    assert again.loss == whole.loss


class StopsAt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


@pytest.mark.slow
def test_a_run_that_a_callback_has_stopped_stays_stopped(tmp_path, capsys):
    case = CASES["plain"] | {"callbacks": lambda folder: {"stop": StopsAt()}}
    stopped = Run(tmp_path / "one", case, every="auto")
    assert stopped.rows.updates[-1][0] == 12
    again = goes_on(stopped, 12, tmp_path / "two", case, every=None)
    assert (again.rows.updates, again.rows.validations, again.loss) == (
        [],
        [],
        stopped.loss,
    )
    assert not (tmp_path / "two" / "checkpoints").exists()
    assert state.starting_anew(stopped.callbacks) == [
        "training.callbacks.stop starts anew: it offers no state"
    ]
    assert state.starting_anew(early_callbacks(tmp_path)) == []


@pytest.mark.parametrize(
    ("case", "arguments", "message"),
    [
        (
            {},
            {"units": 5},
            "model/sequential/dense/kernel is (3, 5) float32. Received: '(3, 4) float32'.",
        ),
        ({"dropout": True}, {}, "seed_generator_state is (2,) int64. Received: null."),
        (
            {"optimizer": keras.optimizers.SGD},
            {},
            "which has no such variable. Received: 'optimizer/sgd/sequential_dense_kernel_momentum'.",
        ),
        (
            {"precision": "float64"},
            {},
            "dense/kernel is (3, 4) float64. Received: '(3, 4) float32'.",
        ),
    ],
    ids=["units", "dropout", "optimizer", "precision"],
)
def test_a_checkpoint_of_another_model_is_refused(
    case, arguments, message, straight, tmp_path
):
    with pytest.raises(ConfigError) as refused:
        goes_on(straight("plain"), 4, tmp_path, CASES["plain"] | case, **arguments)
    assert message in str(refused.value)


# From here on the folders alone: what is written, and what becomes of it.


LEAST: dict[str, Any] = {  # what every checkpoint has
    "loop": {"open": False, "validation": {}, "stopped_by": None, "best": None},
    "stop_training": False,
    **{"recorder": {}, "random": [], "numpy": [], "callbacks": {}, "kinds": {}},
}


def small(update: int) -> State:
    arrays = {
        "a": np.full((40, 3), update, np.float32),
        "b": np.array(update),
        "c": tf.cast([1.5], tf.bfloat16).numpy(),
    }
    return State(arrays, {**LEAST, "of": update, "nothing": None, "third": 1 / 3})


def saved(folder: Path, *updates: int, keep=2) -> Checkpoints:
    with Checkpoints(folder, 1, PLAN, keep) as checkpoints:
        for update in updates:
            checkpoints.save(update, lambda update=update: small(update))
    return checkpoints


def test_what_is_written_is_read(tmp_path):
    saved(tmp_path, 3)
    found = checkpoint.at(tmp_path, 3)
    assert differences(state.read(found.folder, found.meta), small(3)) == []
    assert (found.meta["examples"], found.meta["effective_batch_size"]) == (
        EXAMPLES,
        SIZE,
    )


def test_the_latest_stay_and_what_a_killed_process_left_goes(tmp_path):
    assert checkpoint.newest(tmp_path / "none") is None
    saved(tmp_path, 1, 2, 3)
    assert names(tmp_path) == ["2", "3"]
    (tmp_path / ".4").mkdir()
    (tmp_path / ".4" / "arrays.index").write_text("half of it")
    assert (
        checkpoint.newest(tmp_path).update == 3
    )  # who reads removes nothing: the run may be writing
    assert names(tmp_path) == [".4", "2", "3"]
    (tmp_path / "07").mkdir(), (tmp_path / "notes").mkdir()  # a person's
    saved(tmp_path, 9)
    assert names(tmp_path) == ["07", "3", "9", "notes"]
    saved(tmp_path, 5)  # it went on from 3: what was after it is of another run
    assert names(tmp_path) == ["07", "3", "5", "notes"]
    saved(tmp_path, 5)
    assert checkpoint.newest(tmp_path).update == 5


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def damages(file: Path):
    """Name and bytes: each of a small file's bytes flipped, and of a large one's some; cut, longer, empty."""
    whole = file.read_bytes()
    step = max(1, len(whole) // 61)
    for place in {*range(0, len(whole), step), len(whole) - 1}:
        for bit in (0, 5):
            yield (
                f"bit {bit} of byte {place}",
                whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :],
            )
    for length in {0, 1, len(whole) // 2, len(whole) - 1}:
        yield f"cut to {length}", whole[:length]
    yield "one more", whole + b"\0"
    yield "of zeros", bytes(len(whole))


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(tmp_path, capsys):
    saved(tmp_path, 1, 2)
    files = [file for file in sorted((tmp_path / "2").iterdir()) if file.is_file()]
    assert [file.name for file in files] == [
        *("arrays.data-00000-of-00001", "arrays.index", "manifest.json", "meta.json")
    ]
    used = {1: 0, 2: 0}
    for file in files:
        whole = file.read_bytes()
        for how, damaged in damages(file):
            file.write_bytes(damaged)
            capsys.readouterr()
            found = checkpoint.newest(tmp_path)
            used[found.update] += 1
            said = capsys.readouterr().err
            if found.update == 2:  # a space in the manifest
                assert file.name == "manifest.json", how
                assert json.loads(damaged) == json.loads(whole), how
            else:
                assert said.startswith(
                    f"the checkpoint {tmp_path / '2'} is damaged, and not used: "
                ), how
                assert said.count("\n") == 1
                with pytest.raises(ConfigError, match="must not be damaged"):
                    checkpoint.at(tmp_path, 2)
                continue
            assert differences(state.read(found.folder, found.meta), small(2)) == []
        for other in (
            None,
            files[0] if file is not files[0] else files[1],
        ):  # not there; another's content
            file.unlink()
            if other is not None:
                shutil.copyfile(other, file)
            assert checkpoint.newest(tmp_path).update == 1, file
            file.write_bytes(whole)
    assert used[2] < 20 < 300 < used[1]
    (tmp_path / "2" / "more").touch()
    assert checkpoint.newest(tmp_path).update == 1
    (tmp_path / "2").rename(tmp_path / "3")
    (tmp_path / "3" / "more").unlink()
    assert checkpoint.newest(tmp_path).update == 1
    assert "it is of update 2" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "1")
    assert checkpoint.newest(tmp_path) is None


def test_one_of_another_format_or_that_is_not_there_is_refused(tmp_path):
    saved(tmp_path, 1, 2)
    with pytest.raises(
        ConfigError, match=r"3 must be there\. Received: 3\. Choices: 1, 2\."
    ):
        checkpoint.at(tmp_path, 3)
    meta = tmp_path / "2" / "meta.json"
    before = checkpoint._hash(meta)
    meta.write_text(meta.read_text().replace('"format": 1', '"format": 2'))
    manifest = tmp_path / "2" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(before, checkpoint._hash(meta)))
    for find in (
        lambda: checkpoint.newest(tmp_path),
        lambda: checkpoint.at(tmp_path, 2),
    ):
        with pytest.raises(ConfigError, match=r"must be of format 1\. Received: 2\."):
            find()


@pytest.mark.parametrize("lost", ["values", "arrays", "loop", "stopped_by"])
def test_one_that_lacks_something_is_said_and_not_used(tmp_path, capsys, lost):
    """Though its hashes are right."""
    saved(tmp_path, 1, 2)
    meta, manifest = tmp_path / "2" / "meta.json", tmp_path / "2" / "manifest.json"
    before = checkpoint._hash(meta)
    meta.write_text(meta.read_text().replace(f'"{lost}"', '"found"'))
    manifest.write_text(manifest.read_text().replace(before, checkpoint._hash(meta)))
    assert checkpoint.newest(tmp_path).update == 1
    assert re.search(
        rf"is damaged, and not used: meta.json, line \d+: {lost} is missing\n",
        capsys.readouterr().err,
    )


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
            patch.setattr(state, "read", lambda folder, meta: small(7))
        saved(tmp_path, 2)
    assert names(tmp_path) == ["1"]
    said = capsys.readouterr().err
    reason = (
        "was read back other than it was written"
        if call == "read"
        else "No space left on device"
    )
    assert said.startswith("the checkpoint of update 2 was not written: OSError: ")
    assert reason in said
    assert said.count("\n") == 1
    saved(tmp_path, 3)
    assert names(tmp_path) == ["1", "3"]


def test_training_goes_on_where_no_checkpoint_can_be_written(
    straight, tmp_path, capsys
):
    tmp_path.joinpath("checkpoints").write_text("in the way")
    run = Run(tmp_path, CASES["plain"], every=5)
    assert run.rows.updates == straight("plain").rows.updates
    assert capsys.readouterr().err.count(" was not written: ") == 3


def test_a_checkpoint_does_not_see_what_comes_after_it(tmp_path, monkeypatch):
    """It is written while training goes on; the next one waits for it."""
    may_write, variable, write = threading.Event(), tf.Variable([1.0]), State.write
    monkeypatch.setattr(
        State, "write", lambda self, folder: may_write.wait(60) and write(self, folder)
    )
    with Checkpoints(tmp_path, "auto", PLAN) as checkpoints:
        checkpoints.save(1, lambda: State({"v": variable.numpy()}, LEAST))
        variable.assign([2.0])
        assert "1" not in names(tmp_path)
        monkeypatch.setattr(checkpoint, "AUTO_SECONDS", 0)
        checkpoints._next = 0
        assert not checkpoints.due(2)  # while one is written
        threading.Timer(0.1, may_write.set).start()
        checkpoints.save(2, lambda: State({"v": variable.numpy()}, LEAST))
        assert names(tmp_path)[-1] == "1"
    for update in (1, 2):
        found = checkpoint.at(tmp_path, update)
        assert state.read(found.folder, found.meta).arrays["v"].tolist() == [update]


def test_when_one_is_due(tmp_path, monkeypatch):
    def due(every, last=False):
        checkpoints = Checkpoints(tmp_path, every, PLAN)
        return [
            update
            for update in range(1, 16)
            if checkpoints.due(update, last=last and update == 15)
        ]

    assert due(None) == due(None, last=True) == []
    assert due("epoch") == [6, 12]
    assert due("epoch", last=True) == [6, 12, 15]
    assert due(4) == [4, 8, 12]
    assert due("auto") == []
    assert due("auto", last=True) == [15]
    now = [1000.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])

    def slowly(seconds):
        now[0] += seconds
        return small(1)

    checkpoints, times = Checkpoints(tmp_path, "auto", PLAN), []
    while now[0] < 8000:
        if checkpoints.due(1):
            times.append(now[0])
            checkpoints.save(1, lambda: slowly(20 if len(times) == 1 else 1))
            checkpoints.wait()
        now[0] += 1
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
    class Offers(keras.callbacks.Callback):
        get_state, set_state = (lambda self: {"kept": [value]}), None

    with pytest.raises(
        TypeError,
        match="the state of callback/own/kept/0 must be JSON values and NumPy arrays",
    ):
        state._without_arrays(Offers().get_state(), "callback/own", {})
