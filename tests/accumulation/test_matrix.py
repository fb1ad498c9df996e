"""Every kind of model, cut and number of devices in pairs: 20 updates in float64 are those of plain Keras.

What is summed does not depend on the optimizer, so that one is enough here; each optimizer takes the step of the large
batch in `test_embeddings.py` and in `tests/verify/test_catalogue.py`. `test_matrix_float32.py` has one update in
float32; the cases are in `matrix.py`.
"""

from __future__ import annotations

import inspect
from itertools import combinations, product

import keras
import pytest

from tests.accumulation.matrix import (
    CUTS,
    DEVICES,
    FLOAT64,
    KINDS,
    OPTIMIZERS,
    Case,
    after_a_wrong_update,
    by_keras,
    covering,
    deviation,
    wrong_way,
)

AXES = (("SGD",), KINDS, CUTS, DEVICES)
ROWS = covering(*AXES)
QUICK = ROWS[
    :10
]  # the first rows have each kind of model, among them every cut and every number of devices


def test_every_pair_of_values_is_covered():
    for one, two in combinations(range(len(AXES)), 2):
        assert {(row[one], row[two]) for row in ROWS} == set(
            product(AXES[one], AXES[two])
        )
    assert len(ROWS) == len(KINDS) * len(CUTS)  # the two longest axes need that many
    assert all(
        {row[axis] for row in QUICK} == set(values) for axis, values in enumerate(AXES)
    )


def test_the_optimizers_are_those_of_keras():
    found = {
        name for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass)
    }
    around_others = {"LossScaleOptimizer", "MultiOptimizer"}
    assert found - around_others - {"Optimizer", "OptimizerMap"} == set(OPTIMIZERS)


def test_every_mistake_is_a_control_somewhere():
    names = {wrong_way(case).__name__ for case in ROWS}
    assert names >= {"mean_of_means", "last_one_dropped", "regularised_in_each"}


DRAWN = (
    "Muon",
    "Lion",
    "AdamW",
)  # `make soak` has the others, and kinds and cuts that test_pairwise.py crosses too
ON_REPLICAS = [
    Case(name, "dense", "ragged", "two replicas")
    for name in OPTIMIZERS
    if name != "SGD"
]


@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(case, marks=[pytest.mark.soak] * (case not in QUICK))
            for case in ROWS
        ),
        *(
            pytest.param(
                case,
                marks=pytest.mark.slow if case.optimizer in DRAWN else pytest.mark.soak,
            )
            for case in ON_REPLICAS
        ),
    ],
    ids="-".join,
)
def test_updates_are_those_of_whole_batches(float64, case):
    before, first, *_, last = by_keras(case, FLOAT64)
    found = DEVICES[case.devices].weights_after(case, FLOAT64)
    assert deviation(found, last, before) < FLOAT64.tolerance
    wrong = after_a_wrong_update(case, FLOAT64)
    assert deviation(wrong, first, before) > 100 * FLOAT64.tolerance, wrong_way(
        case
    ).__name__
