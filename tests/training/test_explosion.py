"""A loss that is finite but has exploded is reported once."""

from __future__ import annotations

import math

import pytest

from pipeline.training.explosion import Explosion


@pytest.mark.parametrize(
    ("losses", "exploded_at"),
    [
        ([2.0, 3.0, 1.9e6], None),
        ([2.0, 2.1e6, 5e7], 2),
        ([2.0, -2.1e6], 2),  # by its absolute value
        ([-2.0, 1.0, 2e6], 3),
        ([0.0, 0.9], None),  # the first loss may be 0 by chance
        ([0.0, 1.0], 2),
        ([1e-9, 0.5], None),
        ([2.0, math.nan, math.inf], None),  # another error reports these
        ([math.nan, 2.0, 2e6], 3),
    ],
)
def test_a_loss_has_exploded_at_a_million_times_the_first_one(losses, exploded_at):
    explosion = Explosion()
    reported = []
    for update, loss in enumerate(losses, start=1):
        if explosion.add(update, loss):
            reported.append(update)
    expected = []
    if exploded_at is not None:
        expected.append(exploded_at)
    assert reported == expected
