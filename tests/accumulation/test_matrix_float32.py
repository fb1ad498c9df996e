"""Cases of `test_matrix.py` in float32: one update is that of plain Keras.

It starts from the same weights, and differs by rounding alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.accumulation.covering import covering
from tests.accumulation.matrix import (
    CUTS,
    DEVICES,
    FLOAT32,
    KINDS,
    OPTIMIZERS,
    Case,
    at_start,
    batches,
    by_keras,
    deviation,
    gradients_of,
)
from tests.accumulation.wrong_ways import after_a_wrong_update, wrong_way

AXES = (("SGD",), KINDS, CUTS, DEVICES)
# The first rows have each kind of model once, and among them every cut and every number
# of devices.
ROWS = [Case(*row) for row in covering(*AXES)[: len(KINDS)]]


def cases():
    """Return the rows, and for `make soak` each optimizer in a ragged cut."""
    parameters = list(ROWS)
    for name in OPTIMIZERS:
        if name != "SGD":
            case = Case(name, "dense", "ragged", "one device")
            parameters.append(pytest.param(case, marks=pytest.mark.soak))
    return parameters


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
# The two sizes of a first batch.
@pytest.mark.parametrize("cut", ["factor 1", "ragged"])
def test_no_gradient_is_so_near_zero_that_its_rounding_shows(precision, kind, cut):
    precision("float32")
    case = Case("SGD", kind, cut, "one device")
    model, _ = at_start(case, FLOAT32)
    gradients = gradients_of(case, model, next(batches(case, FLOAT32)))
    elements = np.concatenate([np.ravel(gradient) for gradient in gradients])
    # Rounded by 2⁻²⁴ of about 0.1. RMSprop and Adadelta divide by √(v + 1e-7), Adam by
    # √v + 1e-7, Lion takes the sign.
    assert np.abs(elements[elements != 0]).min() > 5e-4


def test_every_value_is_in_a_row():
    for index, values in enumerate(AXES):
        assert {row[index] for row in ROWS} == set(values)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_one_update_is_that_of_the_whole_batch(precision, case):
    precision("float32")
    before, expected = by_keras(case, FLOAT32)
    trained = DEVICES[case.devices].weights_after(case, FLOAT32)
    assert deviation(trained, expected, before) < FLOAT32.tolerance

    # The control: a mistake in the update is seen.
    wrong = after_a_wrong_update(case, FLOAT32)
    mistake = wrong_way(case).__name__
    assert deviation(wrong, expected, before) > 100 * FLOAT32.tolerance, mistake
