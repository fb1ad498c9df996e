"""Cases of `test_matrix.py` in float32: from the same weights one update is that of plain Keras, up to rounding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.accumulation.matrix import (
    CUTS,
    DEVICES,
    FLOAT32,
    KINDS,
    OPTIMIZERS,
    Case,
    after_a_wrong_update,
    at_start,
    batches,
    by_keras,
    covering,
    deviation,
    gradients_of,
    wrong_way,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cut", ["factor 1", "ragged"]
)  # the two sizes of a first batch
def test_no_gradient_is_so_near_zero_that_its_rounding_shows(precision, kind, cut):
    precision("float32")
    case = Case("SGD", kind, cut, "one device")
    model, _ = at_start(case, FLOAT32)
    found = np.concatenate(
        [
            np.ravel(part)
            for part in gradients_of(case, model, next(batches(case, FLOAT32)))
        ]
    )
    # Rounded by 2⁻²⁴ of about 0.1. RMSprop and Adadelta divide by √(v + 1e-7), Adam by √v + 1e-7, Lion takes the sign.
    assert np.abs(found[found != 0]).min() > 5e-4


# The first rows have each kind of model once, and among them every cut and every number of devices.
ROWS = covering(("SGD",), KINDS, CUTS, DEVICES)[: len(KINDS)]
OTHERS = [
    Case(name, "dense", "ragged", "one device") for name in OPTIMIZERS if name != "SGD"
]


def test_every_value_is_in_a_row():
    for index, values in enumerate((("SGD",), KINDS, CUTS, DEVICES)):
        assert {row[index] for row in ROWS} == set(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*ROWS, *(pytest.param(case, marks=pytest.mark.soak) for case in OTHERS)],
    ids="-".join,
)
def test_one_update_is_that_of_the_whole_batch(precision, case):
    precision("float32")
    before, expected = by_keras(case, FLOAT32)
    found = DEVICES[case.devices].weights_after(case, FLOAT32)
    assert deviation(found, expected, before) < FLOAT32.tolerance
    wrong = after_a_wrong_update(case, FLOAT32)
    assert deviation(wrong, expected, before) > 100 * FLOAT32.tolerance, wrong_way(
        case
    ).__name__
