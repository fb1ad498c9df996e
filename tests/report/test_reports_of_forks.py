"""Jobs that are forks count from their checkpoint."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.report import verdict
from pipeline.report.job_results import Curve, JobResult, curve
from tests import synthetic

FORKED_AFTER = 400  # updates of the other run


def fork(name: str, factor: int, updates: int, *, log_every: int = 1) -> JobResult:
    """Return a fork with micro-batches of 16 examples and updates of 0.1 s.

    The examples are counted as if the other run had had the same batch, as in a run.
    The loss is 3 minus a thousandth for each 16 examples of the fork.
    """
    batch = 16 * factor
    steps = np.arange(FORKED_AFTER + log_every, FORKED_AFTER + updates + 1, log_every)
    values_by_metric = {
        "train/loss": 3 - 0.001 * factor * (steps - FORKED_AFTER),
        "train/examples_seen": batch * steps.astype(float),
        "train/effective_batch_size": np.full(len(steps), float(batch)),
        "perf/update_seconds": np.full(len(steps), 0.1),
    }
    return JobResult(
        name,
        name,
        "FINISHED",
        params={"seed": "0", "start.run": "0123@400", "start.weights_only": "False"},
        tags={"start.run": "0123", "start.update": str(FORKED_AFTER)},
        curves={key: Curve(steps, values) for key, values in values_by_metric.items()},
        factor=factor,
        effective_batch_size=batch,
        micro_batch_size=16,
    )


@pytest.mark.parametrize("log_every", [1, 10])
def test_a_fork_counts_its_own_updates(log_every):
    job = fork("factor=1", 1, 400, log_every=log_every)
    ends = np.array([FORKED_AFTER, 800])
    assert job.spent("updates", ends).tolist() == [0, 400]
    assert job.spent("examples", ends).tolist() == [0, 6400]
    np.testing.assert_allclose(job.spent("seconds", ends), [0, 40])
    assert job.horizon == 6400
    # The axes of plots have the logged numbers.
    assert job.along("examples", ends).tolist() == [6400, 12800]


def test_the_first_update_of_a_fork_includes_tracing():
    job = fork("factor=1", 1, 10)
    seconds = job.curves["perf/update_seconds"]
    slow = np.where(seconds.steps == FORKED_AFTER + 1, 5.0, seconds.values)
    traced = replace(
        job, curves=job.curves | {"perf/update_seconds": Curve(seconds.steps, slow)}
    )
    assert traced.seconds is not None
    assert traced.seconds.values[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "params",
    [
        {"start.weights_only": "True", "start.run": "0123@400"},
        {"start.weights_only": "False", "start.run": "models:/m/1"},
    ],
)
def test_a_run_that_begins_with_weights_counts_from_0(params):
    job = JobResult(
        "job",
        params=params,
        tags={"start.update": "400"},
        curves={"perf/update_seconds": curve({500: 0.1, 1000: 0.1})},
    )
    assert job.seconds is not None
    np.testing.assert_allclose(job.seconds.values, [50, 100])


def test_the_budgets_of_a_verdict_begin_at_the_fork():
    jobs = [fork("factor=1", 1, 400), fork("factor=4", 4, 100)]
    found = [each.result for each in verdict.findings(synthetic.swept(jobs))]
    budgets = {contrast.axis: contrast.budget for contrast in found[0].contrasts}
    assert budgets == {"seconds": pytest.approx(10), "examples": 6400}


def test_losses_are_averaged_over_a_tenth_of_the_fork():
    sweep = synthetic.swept([fork("factor=1", 1, 400)])
    assert sweep.window == 640
    # The first mean has the first value alone; the last one those of 40 updates.
    smoothed = sweep.smooth(sweep.jobs[0], "train/loss")
    assert smoothed is not None
    assert smoothed.values[0] == pytest.approx(2.999)
    assert smoothed.values[-1] == pytest.approx(3 - 0.001 * 380.5)


def test_the_costs_to_the_target_begin_at_the_fork():
    sweep = synthetic.swept([fork("factor=1", 1, 400), fork("factor=4", 4, 100)])
    assert sweep.target is not None
    slow, fast = (sweep.target.costs[job.name] for job in sweep.jobs)
    assert 0 < fast["updates"] <= 100
    assert 0 < slow["updates"] <= 400
    assert fast["seconds"] == pytest.approx(0.1 * fast["updates"])
    assert fast["examples"] == pytest.approx(64 * fast["updates"])
    assert slow["examples"] == pytest.approx(16 * slow["updates"])


def test_an_evaluation_at_the_fork_that_meets_the_target_costs_nothing():
    steps = [FORKED_AFTER, *range(440, 801, 40)]
    jobs = []
    for name, start in (("schedule=cosine", 1.0), ("schedule=constant", 2.0)):
        values = dict(zip(steps, np.linspace(start, 1.0, len(steps)), strict=True))
        job = fork(name, 1, 400)
        jobs.append(replace(job, curves=job.curves | {"val/loss": curve(values)}))
    target = synthetic.swept(jobs).target
    assert target is not None
    assert target.at_first == frozenset()
    at_start = target.costs["schedule=cosine"]
    assert at_start == {"updates": 0, "examples": 0, "seconds": 0}
