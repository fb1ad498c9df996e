"""Further validation sets, and an evaluation before the first update, in the loop."""

from __future__ import annotations

from dataclasses import dataclass

import keras
import pytest
from keras import layers

from pipeline.training.evaluator import Best
from tests.parameters import mostly_slow
from tests.training.test_loop import PER_EPOCH, Rows, Run, StopAt
from tests.training.test_monitored import Taking

LOSSES = {"loss", "late/loss", "rare/loss"}
# Set "late" every 3 updates, set "rare" never within a run of these tests.
LATE_AND_RARE = {"late": 3, "rare": 100}


def names_by_step(rows: Rows) -> dict[int, set[str]]:
    """Return the results of each row of the validation; no step may occur twice."""
    names = {}
    for step, results in rows.validations:
        assert step not in names
        names[step] = set(results)
    return names


class Looks(keras.callbacks.Callback):
    """Notes the results that it gets.

    Attributes:
        epochs: those of the validation at the end of each epoch.
        tests: the names of those of each evaluation.
    """

    def __init__(self):
        super().__init__()
        self.epochs = []
        self.tests = []

    def on_epoch_end(self, epoch, logs=None):
        results = {}
        for name, value in logs.items():
            if name.startswith("val_"):
                results[name] = value
        self.epochs.append(results)

    def on_test_end(self, logs=None):
        self.tests.append(set(logs))


def with_dropout(rate: float) -> list[layers.Layer]:
    """Return layers that draw noise at each update, and begin with the same weights."""
    keras.utils.set_random_seed(0)  # the layers draw their seeds as they are made
    return [layers.Dense(4), layers.Dropout(rate)]


@dataclass
class Evaluated:
    """A run of two epochs with `LATE_AND_RARE`, evaluated at the start too.

    Attributes:
        run: the run.
        looks: its callback.
        shown: the updates after which the own split was evaluated to be shown.
        best: the best evaluation by `late/loss`.
    """

    run: Run
    looks: Looks
    shown: list[int]
    best: Best


@pytest.fixture(scope="module")
def evaluated() -> Evaluated:
    looks = Looks()
    shown: list[int] = []
    best = Best("late/loss", "min")
    run = Run(
        [looks],
        epochs=2,
        middle=with_dropout(0.5),
        sets=LATE_AND_RARE,
        best=best,
        evaluate_at_start=True,
        show=shown.append,
    )
    return Evaluated(run, looks, shown, best)


@pytest.mark.slow
def test_each_set_is_evaluated_at_its_own_steps_and_all_at_the_last():
    rows = Run(epochs=2, sets=LATE_AND_RARE).rows
    assert names_by_step(rows) == {
        3: {"late/loss"},
        PER_EPOCH: {"loss"},
        6: {"late/loss"},
        9: {"late/loss"},
        2 * PER_EPOCH: LOSSES,
    }


def test_all_are_evaluated_before_the_first_update_and_then_at_their_steps(evaluated):
    rows = evaluated.run.rows
    assert names_by_step(rows) == {
        0: LOSSES,
        3: {"late/loss"},
        PER_EPOCH: {"loss"},
        6: {"late/loss"},
        9: {"late/loss"},
        2 * PER_EPOCH: LOSSES,
    }
    _, initial_results = rows.validations[0]
    _, last_results = rows.validations[-1]
    assert initial_results["loss"] > last_results["loss"]


@pytest.mark.parametrize("use_ema", mostly_slow([False, True], [True]))
def test_the_first_evaluation_is_of_the_initial_weights(use_ema):
    """The moving averages of an optimizer begin with its first update."""
    rows = Run(epochs=1, use_ema=use_ema, evaluate_at_start=True).rows
    of_initial_weights = Run(fit=False).evaluate()
    update, results = rows.validations[0]
    assert update == 0
    assert results == {"loss": of_initial_weights["loss"]}


def test_they_change_nothing_of_the_training(evaluated):
    plain = Run(epochs=2, middle=with_dropout(0.5))
    assert plain.rows.updates == evaluated.run.rows.updates
    # The objective of a sweep is that of `val/loss`.
    assert plain.loss == evaluated.run.loss

    # The control: other noise would be noticed.
    other = Run(epochs=2, middle=with_dropout(0.4))
    assert plain.rows.updates != other.rows.updates


def test_what_is_shown_is_of_the_evaluations_of_the_own_split(evaluated):
    assert 3 in names_by_step(evaluated.run.rows)
    assert evaluated.shown == [PER_EPOCH, 2 * PER_EPOCH]


def test_a_callback_gets_the_results_of_each_set(evaluated):
    looks = evaluated.looks
    late = {"late/loss"}
    assert looks.tests == [LOSSES, late, {"loss"}, late, late, LOSSES]
    first_epoch, second_epoch = looks.epochs
    assert set(first_epoch) == {"val_loss"}
    assert set(second_epoch) == {"val_loss", "val_late_loss", "val_rare_loss"}
    _, last_results = evaluated.run.rows.validations[-1]
    assert second_epoch["val_late_loss"] == last_results["late/loss"]


@pytest.mark.slow
def test_a_callback_that_monitors_a_set_which_an_epoch_does_not_have_is_named(capsys):
    stop = keras.callbacks.EarlyStopping("val_late_loss", mode="min")
    Run([stop], epochs=2, sets={"late": 7}, rows=Taking())
    output = capsys.readouterr().err
    warnings = [line for line in output.splitlines() if "monitors" in line]
    assert warnings == [
        "training.callbacks.0 monitors val_late_loss, which is missing at the end of "
        "epoch 1: set `every: epoch` in dataset.validations.late to evaluate at the "
        "end of each epoch"
    ]


def test_a_stop_by_a_callback_is_the_end_for_each_set():
    """The sets that were not due before are evaluated after the callback."""
    rows = Run([StopAt(0)], sets=LATE_AND_RARE).rows
    assert names_by_step(rows) == {3: {"late/loss"}, PER_EPOCH: LOSSES}


def test_the_best_is_that_of_the_evaluations_with_its_metric(evaluated):
    assert_best(evaluated.best, "late/loss", evaluated.run.rows)


@pytest.mark.slow
def test_the_best_is_that_of_the_evaluations_of_the_own_split():
    best = Best("loss", "min")
    run = Run(epochs=2, sets={"late": 3}, best=best, evaluate_at_start=True)
    assert_best(best, "loss", run.rows)


def assert_best(best: Best, metric: str, rows: Rows) -> None:
    """Assert that the best evaluation has the lowest value after the start."""
    values_by_step = {}
    for step, results in rows.validations:
        if metric in results and step > 0:
            values_by_step[step] = results[metric]
    assert best.value == min(values_by_step.values())
    assert values_by_step[best.update] == best.value
    _, _, best_row = rows.end
    assert best_row == {
        f"best/val/{metric}": best.value,
        "best/update": best.update,
    }


def test_the_evaluation_at_the_start_is_never_the_best():
    """No checkpoint has the weights of update 0."""
    best = Best("loss", "max")
    rows = Run(epochs=1, best=best, evaluate_at_start=True).rows
    at_start, at_end = [results["loss"] for _, results in rows.validations]
    assert at_start > at_end
    assert best.value == at_end
    assert best.update == PER_EPOCH


@pytest.mark.slow
def test_sets_without_a_validation_split_of_its_own():
    run = Run(epochs=1, sets={"late": 3}, validate=False)
    assert names_by_step(run.rows) == {3: {"late/loss"}, PER_EPOCH: {"late/loss"}}
    # The objective of a sweep is then the loss of the training.
    _, last_results = run.rows.updates[-1]
    assert run.loss == last_results["loss"]


@pytest.mark.slow
def test_an_interruption_of_the_first_evaluation_writes_no_row():
    rows = Rows()
    with pytest.raises(KeyboardInterrupt):
        Run(rows=rows, stop=KeyboardInterrupt, sets={"late": 3}, evaluate_at_start=True)
    assert rows.validations == []
    assert rows.updates == []
