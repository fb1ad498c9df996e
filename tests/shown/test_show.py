"""A run that shows everything trains to the bits of one that shows nothing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import Evaluation, Update
from pipeline.accumulation.internals import Objective
from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching
from pipeline.shown import functions
from pipeline.shown.collector import Collector
from pipeline.shown.functions import Functions
from pipeline.shown.observer import Observer
from pipeline.shown.plan import InputKind, Settings, ShownInput, make_plan
from pipeline.shown.show import Show
from pipeline.training.evaluator import Evaluations, SplitEvaluator
from pipeline.training.loop import Trainer
from pipeline.training.progress import Progress
from pipeline.training.recorder import Recorder

EXAMPLES = 24
SIZE = 8
EPOCHS = 3


class Shown(NamedTuple):
    """What one evaluation shows: the names, sorted."""

    update: int
    pictures: list[str]
    tables: list[str]


class Rows:
    """Where rows and pictures go: here, to be looked at."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict]] = []
        self.shown: list[Shown] = []
        self.shown_before: set[int] = set()
        self.error: Exception | None = None

    def update(self, update, results, performance, at) -> None:
        self.rows.append((update, dict(results)))

    def validation(self, update, results) -> None:
        self.rows.append((update, dict(results)))

    def summary(self, updates, stopped_by, best) -> None:
        pass

    def has_shown(self, update) -> bool:
        return update in self.shown_before

    def show(self, update, pictures, tables) -> None:
        # The row of the evaluation is there before.
        update_of_row, _ = self.rows[-1]
        assert update_of_row == update
        if self.error is not None:
            raise self.error
        self.shown.append(Shown(update, sorted(pictures), sorted(tables)))


class Jitter(keras.callbacks.Callback):
    """Uses the random state of NumPy, as a user's own data or callbacks may do."""

    def on_train_batch_end(self, batch, logs=None):
        for variable in self.model.trainable_variables:
            factor = 1 + 1e-3 * np.random.rand()
            variable.assign(variable * factor)


def draws(x, y, outputs):
    """Return a picture, as a function of a user that uses NumPy's random state."""
    np.random.rand()
    return np.zeros((2, 2))


def images():
    """Return images, (examples, 4, 4, 1), and a label of three for each."""
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, 4, 4, 1)).astype("float32")
    y = np.arange(EXAMPLES) % 3
    return x, y


def network():
    """Return a model that draws noise, and whose statistics an evaluation could move."""
    return keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )


class Trained(NamedTuple):
    """The rows of a run, and the weights at its end."""

    rows: Rows
    weights: list[np.ndarray]


def trained(rows=None, settings=None, own=None) -> Trained:
    """Train for three epochs.

    Args:
        rows: get the rows and the pictures.
        settings: what is shown; None to show nothing.
        own: functions of the user, by name.
    """
    if rows is None:
        rows = Rows()
    keras.utils.set_random_seed(0)
    x, y = images()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(SIZE)
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    goal = Objective(loss)
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, loss)

    if settings is None:
        evaluation = Evaluation(model, goal, SIZE)
        evaluations = Evaluations(SplitEvaluator(evaluation, batches))
    else:
        first_labels = tf.constant(y[:4])
        outputs = {"": model(x[:4])}
        picture = ShownInput(0, InputKind.PICTURE)
        shown_plan = make_plan(settings, goal, first_labels, outputs, picture)
        observer = Observer(goal, shown_plan.has_losses)
        evaluation = Evaluation(model, goal, SIZE, observe=observer)
        functions_of_user = None
        if own is not None:
            functions_of_user = Functions(own, (x[:4], y[:4]), evaluation)
        show = Show(shown_plan, rows, functions_of_user)
        evaluator = SplitEvaluator(evaluation, batches, show=show)
        evaluations = Evaluations(evaluator, show=show)

    plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, EPOCHS * EXAMPLES // SIZE)
    recorder = Recorder(rows, plan, 1, lambda: 0, Progress(plan.updates))
    trainer = Trainer(
        Update(model, goal, optimizer, SIZE),
        batches.repeat(),
        recorder,
        evaluations=evaluations,
        callbacks={"jitter": Jitter()},
    )
    trainer.fit()
    return Trained(rows, model.get_weights())


def are_equal(run: Trained, other: Trained) -> bool:
    """Return whether two runs have the same rows and the same bits of weights."""
    for weight, other_weight in zip(run.weights, other.weights, strict=True):
        if not np.array_equal(weight, other_weight):
            return False
    return run.rows.rows == other.rows.rows


@pytest.fixture(scope="module")
def plain() -> Trained:
    """Return the run that shows nothing."""
    return trained()


def test_it_trains_to_the_bits_of_a_run_that_shows_nothing(plain):
    shown = trained(settings=Settings(), own={"mine": draws})
    assert are_equal(plain, shown)

    pictures = [
        "shown/confusion",
        "shown/fixed",
        "shown/mine",
        "shown/reliability",
        "shown/worst",
    ]
    # An epoch has three updates.
    expected = [Shown(update, pictures, ["examples"]) for update in (3, 6, 9)]
    assert shown.rows.shown == expected


@pytest.mark.slow
def test_the_random_state_decides_the_weights(plain, monkeypatch):
    """A function whose draws were not undone would train another model."""
    monkeypatch.setattr(functions, "_state_kept", lambda _: nullcontext())
    shown = trained(settings=Settings(), own={"mine": draws})
    assert not are_equal(plain, shown)


@pytest.mark.slow
def test_each_part_can_be_left_out():
    settings = Settings(examples=0, reliability=False)
    rows = trained(settings=settings).rows
    assert len(rows.shown) == EPOCHS
    for shown in rows.shown:
        assert shown.pictures == ["shown/confusion"]
        assert shown.tables == []


@pytest.mark.slow
def test_what_was_shown_before_a_resume_is_not_shown_again():
    rows = Rows()
    rows.shown_before = {3, 6}
    trained(rows, Settings())
    assert [shown.update for shown in rows.shown] == [9]


def test_an_error_ends_nothing_and_is_one_line(plain, capsys):
    rows = Rows()
    rows.error = OSError(28, "No space left on device")
    assert are_equal(trained(rows, Settings()), plain)
    lines = capsys.readouterr().err.splitlines()
    (warning,) = [line for line in lines if line.startswith("tracking.show")]
    assert warning == (
        "tracking.show is left out: OSError: [Errno 28] No space left on device"
    )


@pytest.mark.slow
def test_a_batch_that_cannot_be_collected_leaves_the_functions(
    plain, capsys, monkeypatch
):
    def fails(self, batch, observation):
        raise ValueError("on purpose")

    monkeypatch.setattr(Collector, "add", fails)
    run = trained(settings=Settings(), own={"mine": draws})
    output = capsys.readouterr().err
    assert output.count("tracking.show is left out: ValueError: on purpose") == 1
    assert len(run.rows.shown) == EPOCHS
    for shown in run.rows.shown:
        assert shown.pictures == ["shown/mine"]
    assert are_equal(run, plain)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [1, 64])
def test_any_number_of_examples(examples):
    run = trained(settings=Settings(examples=examples))
    assert len(run.rows.shown) == EPOCHS
