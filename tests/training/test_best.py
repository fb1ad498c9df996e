"""`training.keep_best`: which evaluation is the best one."""

import math
from dataclasses import asdict

import pytest

from pipeline.training.evaluator import Best


@pytest.mark.parametrize(("mode", "best", "update"), [("min", 1.0, 3), ("max", 4.0, 2)])
def test_the_first_of_the_best_evaluations_is_kept(mode, best, update):
    kept = Best("loss", mode)
    values = [math.nan, 2.0, 4.0, 1.0, 1.0, 4.0]
    taken = [
        number
        for number, value in enumerate(values)
        if kept.take(number, {"loss": value})
    ]
    assert taken[-1] == update
    assert kept.row() == {"best/val/loss": best, "best/update": update}


def test_a_resumed_run_compares_with_the_best_before():
    before = Best("loss", "min")
    after = Best("loss", "min")
    before.take(5, {"loss": 1.0})
    after.set_state(asdict(before))
    assert not after.take(6, {"loss": 1.5})
    assert after.row() == before.row()
