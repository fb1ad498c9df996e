"""After which updates a run is evaluated."""

from __future__ import annotations

import pytest

from pipeline.config.plan import Plan
from pipeline.config.sizes import Batching
from pipeline.training.evaluator import Evaluations


def plan_of(batch: int, examples: int = 1000, epochs: int = 2) -> Plan:
    updates = epochs * -(-examples // batch)
    return Plan(Batching(batch, 1, batch, 1), examples, updates)


def evaluated(every: int | str, plan: Plan) -> list[int]:
    """Return the examples that were seen at each evaluation."""
    evaluations = Evaluations(validation=lambda *_, **__: {}, every=every)
    seen = []
    for update in range(1, plan.updates + 1):
        if evaluations.due(update, plan, last=update == plan.updates):
            seen.append(plan.examples_seen(update))
    return seen


def test_a_part_of_an_epoch_is_as_many_examples_for_every_batch():
    quarters = [250, 500, 750, 1000, 1250, 1500, 1750, 2000]
    assert evaluated("epoch/4", plan_of(10)) == quarters
    assert evaluated("epoch/4", plan_of(50)) == quarters
    # The first update that has seen a quarter, and the ends of the epochs.
    assert evaluated("epoch/4", plan_of(120)) == [
        360,
        600,
        840,
        1000,
        1360,
        1600,
        1840,
        2000,
    ]
    # Never twice after one update.
    assert evaluated("epoch/4", plan_of(500)) == [500, 1000, 1500, 2000]


def test_three_parts_end_with_the_epoch():
    assert evaluated("epoch/3", plan_of(10)) == [340, 670, 1000, 1340, 1670, 2000]


@pytest.mark.parametrize("parts", [1, 7, 13, 999])
def test_the_end_of_an_epoch_is_always_one(parts):
    assert {1000, 2000} <= set(evaluated(f"epoch/{parts}", plan_of(10)))


def test_epochs_and_updates():
    assert evaluated("epoch", plan_of(120)) == [1000, 2000]
    assert evaluated(5, plan_of(120)) == [600, 1120, 1720, 2000]
