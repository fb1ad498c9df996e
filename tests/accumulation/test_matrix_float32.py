"""The cases of `test_matrix.py` in float32: from the same weights one update is that of plain Keras, up to rounding."""

from __future__ import annotations

from collections.abc import Iterator

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
    pairs_of,
    wrong_way,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", ["factor 1", "ragged"])  # the two sizes of a first batch
def test_no_gradient_is_so_near_zero_that_its_rounding_shows(precision, kind, cut):
    precision("float32")
    case = Case("SGD", kind, cut, "one device")
    model, _ = at_start(case, FLOAT32)
    found = np.concatenate([np.ravel(part) for part in gradients_of(case, model, next(batches(case, FLOAT32)))])
    # Rounded by 2⁻²⁴ of about 0.1. RMSprop and Adadelta divide by √(v + 1e-7), Adam by √v + 1e-7, Lion takes the sign.
    assert np.abs(found[found != 0]).min() > 5e-4


def rows() -> Iterator:
    """Every pair; slow are the rows for an optimizer with a kind of model alone, which all are there in float64."""
    seen = set()
    for case in covering(OPTIMIZERS, KINDS, CUTS, DEVICES):
        new = pairs_of(case) - seen
        seen |= new
        yield pytest.param(case, marks=pytest.mark.slow if new <= pairs_of(case[:2]) else ())


@pytest.mark.parametrize("case", list(rows()), ids="-".join)
def test_one_update_is_that_of_the_whole_batch(precision, case):
    precision("float32")
    before, expected = by_keras(case, FLOAT32)
    found = DEVICES[case.devices].weights_after(case, FLOAT32)
    assert deviation(found, expected, before) < FLOAT32.tolerance
    wrong = after_a_wrong_update(case, FLOAT32)
    assert deviation(wrong, expected, before) > 100 * FLOAT32.tolerance, wrong_way(case).__name__
