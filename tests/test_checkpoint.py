"""A run that goes on from a checkpoint is the undisturbed run, to the bit; a damaged checkpoint is not used."""

from __future__ import annotations

import random
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from omegaconf import OmegaConf

from pipeline import batching, checkpoint, state
from pipeline.accumulation import Evaluation, Update
from pipeline.checkpoint import Checkpoints
from pipeline.dataset import Data
from pipeline.progress import Progress
from pipeline.recorder import Recorder
from pipeline.sizes import Batching, Plan
from pipeline.state import State
from pipeline.training import evaluator, train
from tests.test_training import Rows

EXAMPLES, SIZE, UPDATES = 43, 8, 15  # 6 updates an epoch, the last one of 3 examples
PLAN = Plan(Batching(SIZE, 2, 4), EXAMPLES, UPDATES)
WHERE = (4, 6, 7)  # in the middle of an epoch, at its end, after its first update


class Drawing(keras.callbacks.Callback):
    """Draws where an epoch ends from Python and NumPy, moves the weights by it, and offers what it keeps."""

    def __init__(self):
        super().__init__()
        self.drawn, self.moved = [], np.zeros(3, np.float32)

    def on_epoch_end(self, epoch, logs=None):
        self.drawn.append([random.random(), {"normal": float(np.random.normal())}])
        self.moved += np.float32(self.drawn[-1][0])
        self.model.trainable_variables[-1].assign_add(keras.ops.full((1,), self.moved[0] / 100))

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
        return x + 0.01 * (keras.random.normal(tf.shape(x)) + self.generator.normal(tf.shape(x)) + self.counts[0])


def shift(image, seed):
    return image + tf.random.stateless_normal(tf.shape(image), seed)


def shifting():
    return shift


def momentum(**more):
    return keras.optimizers.SGD(0.05, momentum=0.9, **more)


def early_callbacks(folder):
    return {
        "stop": keras.callbacks.EarlyStopping("val_loss", mode="min", patience=5, restore_best_weights=True),
        "reduce": keras.callbacks.ReduceLROnPlateau("loss", mode="min", patience=0, min_delta=10, factor=0.5),
        "save": keras.callbacks.ModelCheckpoint(
            str(folder / "{epoch}.weights.h5"), monitor="loss", mode="min", save_weights_only=True, save_freq=4
        ),
        "history": keras.callbacks.History(),
        "draw": Drawing(),
    }


CASES = {
    "plain": {"optimizer": momentum},
    "ema": {"optimizer": lambda: momentum(use_ema=True, ema_momentum=0.8), "dropout": True, "noise": 2, "metric": True},
    "float16": {
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=2.0**17, dynamic_growth_steps=3
        ),
        "precision": "mixed_float16",
        "dropout": True,
    },
    "callbacks": {"optimizer": momentum, "callbacks": early_callbacks},
    "streamed": {
        "optimizer": momentum,
        "node": {"in_memory": False, "shuffle_buffer": 7, "augment": {"_target_": f"{__name__}.shifting"}},
    },
    "unseeded": {"optimizer": momentum, "extra": Unseeded},
    "replicas": {"optimizer": momentum, "dropout": True, "extra": layers.BatchNormalization, "replicas": 2},
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
            strategy = tf.distribute.MirroredStrategy([f"/CPU:{replica}" for replica in range(replicas)])
        numbers = np.random.default_rng(0)
        x, y = numbers.normal(size=(EXAMPLES, 3)).astype("float32"), numbers.normal(size=(EXAMPLES, 1))
        data = Data(tf.data.Dataset.from_tensor_slices((x, y.astype("float32"))), None)
        cut = Batching(SIZE, micro, -(-SIZE // (micro * replicas)), replicas)
        self.plan = Plan(cut, EXAMPLES, updates)
        self.batches = batching.effective_batches(
            OmegaConf.create(case.get("node", {})),
            data,
            seed=3,
            effective_batch_size=SIZE,
            epochs=self.plan.epochs,
            first_update=start.update if start else 0,
        )
        with strategy.scope():
            middle = [case["extra"]()] if "extra" in case else []
            middle += [layers.Dropout(0.5)] * case.get("dropout", False)
            self.model = keras.Sequential([keras.Input((3,)), layers.Dense(units), *middle, layers.Dense(1)])
            optimizer = case["optimizer"]()
            optimizer.build(self.model.trainable_variables)
            metrics = [keras.metrics.MeanAbsoluteError()] * case.get("metric", False)
            validating = [keras.metrics.MeanAbsoluteError()] * case.get("metric", False)
        loss = keras.losses.MeanSquaredError()
        self.model.compile(optimizer, loss)
        noise = case.get("noise", 0)
        update = Update(self.model, loss, optimizer, micro, metrics=metrics, strategy=strategy, noise_every=noise)
        evaluation = Evaluation(self.model, loss, micro, metrics=validating, strategy=strategy)
        self.rows, self.folder = Rows(), folder
        recorder = Recorder(self.rows, self.plan, log_every, lambda: 0, Progress(updates))
        recorder.skips = precision == "mixed_float16"
        folder.mkdir(parents=True, exist_ok=True)
        self.callbacks = case["callbacks"](folder) if "callbacks" in case else {}
        self.done = start.update if start else 0

        def stop():
            self.done += 1
            return Stopped("now") if self.done == stop_at else None

        with Checkpoints(folder / "checkpoints", every, self.plan, keep) as checkpoints:
            self.loss = train(
                self.model,
                self.batches,
                update,
                self.plan,
                recorder,
                evaluate=evaluator(evaluation, batching.in_order(data.train, SIZE)),
                evaluate_every=3,
                callbacks=self.callbacks,
                checkpoints=checkpoints,
                start=start,
                stop=stop,
            )

    def state(self, update: int) -> State:
        return written(self.folder, update)


class Stopped(BaseException):
    pass


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
    return Run(folder, case, start=checkpoint.at(run.folder / "checkpoints", update), **arguments)


def differences(one: State, two: State) -> list[str]:
    """The names of what is not equal to the bit."""
    names = [*one.arrays, *(name for name in two.arrays if name not in one.arrays)]
    bits = [{name: (a.dtype, a.shape, a.tobytes()) for name, a in both.arrays.items()} for both in (one, two)]
    different = [name for name in names if bits[0].get(name) != bits[1].get(name)]
    return different + [name for name in one.values if one.values[name] != two.values[name]]


def rest(rows: list, update: int) -> list:
    return [row for row in rows if row[0] > update]


@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_checkpoint_is_what_would_have_followed(name, straight, tmp_path):
    whole = straight(name)
    for update in WHERE:
        again = goes_on(whole, update, tmp_path / str(update), CASES[name])
        assert again.rows.updates == rest(whole.rows.updates, update)
        assert again.rows.validations == rest(whole.rows.validations, update)
        assert again.loss == whole.loss
        assert differences(again.state(UPDATES), whole.state(UPDATES)) == []
        for one, two in zip(again.model.get_weights(), whole.model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, two)  # after the end: averaged weights, the best ones
