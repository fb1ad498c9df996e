"""Every kind of model, cut and number of devices in pairs, against plain Keras.

20 updates in float64 are those of plain Keras on whole batches. What is summed does
not depend on the optimizer, so that one is enough here; each optimizer takes the step
of the large batch in `test_embeddings.py` and in `tests/verify/test_catalogue.py`.
`test_matrix_float32.py` has one update in float32; the cases are in `matrix.py`.
"""

from __future__ import annotations

import inspect
from itertools import combinations, product

import keras
import pytest
import tensorflow as tf

from pipeline.accumulation.batch import Share
from tests.accumulation.covering import covering
from tests.accumulation.matrix import (
    CUTS,
    DEVICES,
    FLOAT64,
    KINDS,
    OPTIMIZERS,
    Case,
    by_keras,
    deviation,
)
from tests.accumulation.wrong_ways import after_a_wrong_update, wrong_way

AXES = (("SGD",), KINDS, CUTS, DEVICES)
ROWS = [Case(*row) for row in covering(*AXES)]
# These have each kind of model, and among them every cut; two workers train for
# `make test` in tests/distributed/test_workers.py.
QUICK = [
    Case("SGD", "dense", "factor 8", "two replicas"),
    Case("SGD", "masked tokens", "factor 3", "two replicas"),
    Case("SGD", "sample weights", "ragged", "two replicas"),
    Case("SGD", "two outputs", "ragged", "one device"),
    Case("SGD", "embedding", "factor 1", "two replicas"),
    Case("SGD", "regularised", "factor 1", "one device"),
]
# For `make test-all`.
WIDER = [case for case in ROWS[:10] if case not in QUICK]

# `make soak` has the others, and kinds and cuts that test_pairwise.py crosses too.
DRAWN = ("Muon", "Lion", "AdamW")


def cases():
    """Return the rows, and each optimizer on two replicas."""
    parameters = []
    for case in ROWS:
        marks = []
        if case in WIDER:
            marks.append(pytest.mark.slow)
        elif case not in QUICK:
            marks.append(pytest.mark.soak)
        parameters.append(pytest.param(case, marks=marks))
    for name in OPTIMIZERS:
        if name == "SGD":
            continue
        mark = pytest.mark.slow if name in DRAWN else pytest.mark.soak
        case = Case(name, "dense", "ragged", "two replicas")
        parameters.append(pytest.param(case, marks=mark))
    return parameters


def test_every_pair_of_values_is_covered():
    for one, two in combinations(range(len(AXES)), 2):
        pairs = {(row[one], row[two]) for row in ROWS}
        assert pairs == set(product(AXES[one], AXES[two]))
    assert len(ROWS) == len(KINDS) * len(CUTS)  # the two longest axes need that many
    assert set(QUICK) <= set(ROWS)
    for axis, values in enumerate(AXES[:3]):
        assert {row[axis] for row in QUICK} == set(values)


def test_the_shares_of_two_workers_have_each_example_once():
    examples = tf.range(29)
    first, second = (Share.for_replicas(examples, index, 1, 2) for index in range(2))
    assert first.batch.numpy().tolist() == [*range(15)]
    assert second.batch.numpy().tolist() == [*range(15, 29)]
    assert (first.start, second.start) == (0, 15)


def test_the_optimizers_are_those_of_keras():
    classes = inspect.getmembers(keras.optimizers, inspect.isclass)
    names = {name for name, _ in classes}
    around_others = {"LossScaleOptimizer", "MultiOptimizer"}
    assert names - around_others - {"Optimizer", "OptimizerMap"} == set(OPTIMIZERS)


def test_every_mistake_is_a_control_somewhere():
    names = {wrong_way(case).__name__ for case in ROWS}
    assert names >= {"mean_of_means", "last_one_dropped", "regularized_in_each"}


@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_updates_are_those_of_whole_batches(float64, case):
    before, first, *_, last = by_keras(case, FLOAT64)
    trained = DEVICES[case.devices].weights_after(case, FLOAT64)
    assert deviation(trained, last, before) < FLOAT64.tolerance

    # The control: a mistake in the first update is seen.
    wrong = after_a_wrong_update(case, FLOAT64)
    mistake = wrong_way(case).__name__
    assert deviation(wrong, first, before) > 100 * FLOAT64.tolerance, mistake
