"""A run that shows everything trains to the bits of one that shows nothing."""

from __future__ import annotations

from contextlib import nullcontext

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


class Rows:
    """Where rows and pictures go: here, to be looked at."""

    def __init__(self) -> None:
        self.rows: list[tuple] = []
        self.shown: list[tuple] = []
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
        assert self.rows[-1][0] == update
        if self.error is not None:
            raise self.error
        self.shown.append((update, sorted(pictures), sorted(tables)))


class Jitter(keras.callbacks.Callback):
    """Uses the random state of NumPy, as a user's own data or callbacks may do."""

    def on_train_batch_end(self, batch, logs=None):
        for variable in self.model.trainable_variables:
            variable.assign(variable * (1 + 1e-3 * np.random.rand()))


def draws(x, y, outputs):
    np.random.rand()
    return np.zeros((2, 2))


def trained(rows=None, settings=None, own=None):
    """Train for three epochs; return the rows, and the weights at the end."""
    rows = rows or Rows()
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 4, 4, 1)).astype("float32")
    y = np.arange(EXAMPLES) % 3
    examples = tf.data.Dataset.from_tensor_slices((x, y))
    model = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, loss)
    plan = Plan(Batching(SIZE, SIZE, 1), EXAMPLES, EPOCHS * EXAMPLES // SIZE)
    goal = Objective(loss)
    observer = None
    show = None
    if settings is not None:
        outputs = {"": model(x[:4])}
        shown_input = ShownInput(0, InputKind.PICTURE)
        shown_plan = make_plan(settings, goal, tf.constant(y[:4]), outputs, shown_input)
        observer = Observer(goal, shown_plan.has_losses)
    evaluation = Evaluation(model, goal, SIZE, observe=observer)
    if settings is not None:
        user_functions = None
        if own:
            user_functions = Functions(own, (x[:4], y[:4]), evaluation)
        show = Show(shown_plan, rows, user_functions)
    evaluator = SplitEvaluator(evaluation, examples.batch(SIZE), show=show)
    evaluations = Evaluations(evaluator)
    if show is not None:
        evaluations = Evaluations(evaluator, show=show)
    recorder = Recorder(rows, plan, 1, lambda: 0, Progress(plan.updates))
    Trainer(
        Update(model, goal, optimizer, SIZE),
        examples.batch(SIZE).repeat(),
        recorder,
        evaluations=evaluations,
        callbacks={"jitter": Jitter()},
    ).fit()
    return rows, model.get_weights()


def are_equal(run, other) -> bool:
    rows, weights = run
    other_rows, other_weights = other
    pairs = zip(weights, other_weights, strict=True)
    is_same_model = all(np.array_equal(one, two) for one, two in pairs)
    return is_same_model and rows.rows == other_rows.rows


def test_it_trains_to_the_bits_of_a_run_that_shows_nothing():
    plain = trained()
    shown = trained(settings=Settings(), own={"mine": draws})
    assert are_equal(plain, shown)
    keys = ["shown/confusion", "shown/fixed", "shown/mine", "shown/reliability"]
    keys.append("shown/worst")
    assert shown[0].shown == [(step, keys, ["examples"]) for step in (3, 6, 9)]


@pytest.mark.slow
def test_the_random_state_decides_the_weights(monkeypatch):
    """A function whose draws were not undone would train another model."""
    monkeypatch.setattr(functions, "_state_kept", lambda _: nullcontext())
    shown = trained(settings=Settings(), own={"mine": draws})
    assert not are_equal(trained(), shown)


@pytest.mark.slow
def test_each_part_can_be_left_out():
    shown, _ = trained(settings=Settings(examples=0, reliability=False))
    assert [names for _, names, _ in shown.shown] == [["shown/confusion"]] * 3
    assert [tables for _, _, tables in shown.shown] == [[]] * 3


@pytest.mark.slow
def test_what_was_shown_before_a_resume_is_not_shown_again():
    rows = Rows()
    rows.shown_before = {3, 6}
    shown, _ = trained(rows, Settings())
    assert [step for step, _, _ in shown.shown] == [9]


def test_an_error_ends_nothing_and_is_one_line(capsys):
    rows = Rows()
    rows.error = OSError(28, "No space left on device")
    assert are_equal(trained(rows, Settings()), trained())
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("tracking.show")]
    assert line == (
        "tracking.show is left out: OSError: [Errno 28] No space left on device"
    )


@pytest.mark.slow
def test_a_batch_that_cannot_be_collected_leaves_the_functions(capsys, monkeypatch):
    def fails(self, batch, observation):
        raise ValueError("on purpose")

    monkeypatch.setattr(Collector, "add", fails)
    shown = trained(settings=Settings(), own={"mine": draws})
    assert [names for _, names, _ in shown[0].shown] == [["shown/mine"]] * EPOCHS
    assert are_equal(shown, trained())
    said = capsys.readouterr().err
    assert said.count("tracking.show is left out: ValueError: on purpose") == 1


@pytest.mark.slow
@pytest.mark.parametrize("examples", [1, 64])
def test_any_number_of_examples(examples):
    shown, _ = trained(settings=Settings(examples=examples))
    assert len(shown.shown) == EPOCHS
