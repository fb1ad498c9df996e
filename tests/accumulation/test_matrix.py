"""Every optimizer, kind of model, cut and number of devices in pairs: 20 updates in float64 are those of plain Keras.

`test_matrix_float32.py` has one update in float32; the cases are in `matrix.py`.
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
    after_a_wrong_update,
    by_keras,
    covering,
    deviation,
    wrong_way,
)

AXES = (OPTIMIZERS, KINDS, CUTS, DEVICES)
ROWS = covering(*AXES)


def test_every_pair_of_values_is_covered():
    for one, two in combinations(range(len(AXES)), 2):
        assert {(row[one], row[two]) for row in ROWS} == set(product(AXES[one], AXES[two]))
    assert len(ROWS) < 1.1 * len(OPTIMIZERS) * len(KINDS)  # the two longest axes need that many


def test_the_optimizers_are_those_of_keras():
    found = {name for name, cls in inspect.getmembers(keras.optimizers, inspect.isclass)}
    around_others = {"LossScaleOptimizer", "MultiOptimizer"}
    assert found - around_others - {"Optimizer", "OptimizerMap"} == set(OPTIMIZERS)


def test_every_mistake_is_a_control_somewhere():
    names = {wrong_way(case).__name__ for case in ROWS}
    assert names >= {"mean_of_means", "last_one_dropped", "regularised_in_each"}


@pytest.mark.parametrize("case", ROWS, ids="-".join)
def test_updates_are_those_of_whole_batches(float64, case):
    before, first, *_, last = by_keras(case, FLOAT64)
    found = DEVICES[case.devices].weights_after(case, FLOAT64)
    assert deviation(found, last, before) < FLOAT64.tolerance
    wrong = after_a_wrong_update(case, FLOAT64)
    assert deviation(wrong, first, before) > 100 * FLOAT64.tolerance, wrong_way(case).__name__
