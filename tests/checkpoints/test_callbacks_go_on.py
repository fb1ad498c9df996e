"""Callbacks of a run that goes on: their files, their steps, the epoch in progress."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import keras
import pytest

from pipeline.checkpoints import csv_rows, snapshot
from tests.checkpoints.test_files import CASES, UPDATES, Run, goes_on
from tests.parameters import mostly_slow

PER_EPOCH = 6
LOG = "log.csv"


def with_callback(make):
    """Return a case with one callback, which `make` returns for a folder."""
    return replace(CASES["plain"], callbacks=lambda folder: {"mine": make(folder)})


def logger(folder):
    return keras.callbacks.CSVLogger(folder / LOG)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Return a run with a `CSVLogger`: two epochs, and a part of a third one.

    It begins where another run has left its file.
    """
    folder = tmp_path_factory.mktemp("logged")
    (folder / LOG).write_text("of another run\n")
    return Run(folder, with_callback(logger))


def test_a_new_run_begins_a_new_file_as_in_keras(logged):
    lines = (logged.folder / LOG).read_text().splitlines()
    assert len(lines) == 1 + 3
    assert lines[0].startswith("epoch,")


@pytest.mark.parametrize(
    ("update", "rows_left"),
    mostly_slow([(7, 3), (2, 3), (6, 1), (12, 2), (12, 3), (14, 3)], [(7, 3)]),
)
def test_a_run_that_goes_on_keeps_its_rows_and_doubles_none(
    logged, update, rows_left, tmp_path
):
    content = (logged.folder / LOG).read_bytes()
    lines = content.splitlines(keepends=True)
    # The run went on for a while after its checkpoint.
    (tmp_path / LOG).write_bytes(b"".join(lines[: 1 + rows_left]))
    again = goes_on(logged, update, tmp_path, with_callback(logger), every=None)
    assert (tmp_path / LOG).read_bytes() == content
    assert snapshot.starting_anew(again.callbacks) == []


def test_a_file_that_somebody_has_changed_loses_nothing(logged, tmp_path):
    mine = b"# mine\n" + (logged.folder / LOG).read_bytes()
    (tmp_path / LOG).write_bytes(mine)
    again = logger(tmp_path)
    again.set_model(SimpleNamespace(stop_training=False))
    csv_rows.keep_rows([again])
    again.on_train_begin()
    csv_rows.restore(again, logged.state(PER_EPOCH).values["callbacks"]["mine"])
    for epoch in (1, 2):  # two epochs are trained again
        again.on_epoch_end(epoch, {"learning_rate": 0.05, "loss": 1.0})
    again.on_train_end()
    content = (tmp_path / LOG).read_bytes()
    assert content.startswith(mine)
    assert len(content.splitlines()) == 1 + 4 + 2


class Plants(keras.callbacks.Callback):
    """Makes the first epoch the best one, for the callbacks after this one."""

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = epoch


@pytest.mark.slow
def test_the_file_of_the_best_epoch_is_not_replaced_by_a_worse_one(tmp_path):
    file = tmp_path / "best.weights.h5"

    def keeping(folder):
        keep = keras.callbacks.ModelCheckpoint(
            file, save_best_only=True, save_weights_only=True
        )
        return {"plants": Plants(), "keep": keep}

    case = replace(CASES["plain"], callbacks=keeping)
    run = Run(tmp_path / "one", case)
    file.unlink()
    goes_on(run, PER_EPOCH, tmp_path / "two", case)
    assert not file.exists()
    goes_on(run, PER_EPOCH - 1, tmp_path / "three", case)  # before that epoch's end
    assert file.exists()


class Board(keras.callbacks.TensorBoard):
    """Keeps the step of each batch, and writes nothing: that needs a package."""

    def __init__(self, folder):
        super().__init__(folder, write_graph=False)
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(self._global_train_batch)

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self.began = epoch

    def on_epoch_end(self, epoch, logs=None):
        assert self.began == epoch

    def on_test_end(self, logs=None):
        pass


@pytest.mark.slow
def test_the_steps_of_tensorboard_go_on(tmp_path):
    case = with_callback(Board)
    run = Run(tmp_path / "one", case)
    assert run.callbacks["mine"].steps == list(range(1, UPDATES + 1))
    again = goes_on(run, 8, tmp_path / "two", case)
    assert again.callbacks["mine"].steps == list(range(9, UPDATES + 1))


class Counts(keras.callbacks.Callback):
    """Counts the batches of each epoch, from its `on_epoch_begin` on."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun = epoch
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None):
        assert epoch == self.begun
        self.counts.append(self.batches)


class CountsOn(Counts):
    """As `Counts`, with a state."""

    def get_state(self):
        return {"begun": self.begun, "batches": self.batches}

    def set_state(self, state):
        vars(self).update(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "update", "counts"),
    [
        (Counts, 8, [4, 3]),
        (CountsOn, 8, [6, 3]),
        (Counts, PER_EPOCH, [6, 3]),
        (CountsOn, PER_EPOCH, [6, 3]),
    ],
)
def test_an_epoch_in_progress_begins_for_what_starts_anew(
    kind, update, counts, tmp_path
):
    case = with_callback(lambda folder: kind())
    run = Run(tmp_path / "one", case)
    assert run.callbacks["mine"].counts == [6, 6, 3]
    again = goes_on(run, update, tmp_path / "two", case)
    assert again.callbacks["mine"].counts == counts


def test_the_epoch_whose_end_is_pending_begins_too(tmp_path):
    """The run was stopped after the last update of an epoch, before its evaluation."""
    case = with_callback(lambda folder: Counts())
    with pytest.raises(BaseException, match="now"):
        Run(tmp_path / "one", case, every=100, stop_at=PER_EPOCH)
    run = SimpleNamespace(folder=tmp_path / "one")
    again = goes_on(run, PER_EPOCH, tmp_path / "two", case, every=None)
    assert again.callbacks["mine"].counts == [0, 6, 3]
