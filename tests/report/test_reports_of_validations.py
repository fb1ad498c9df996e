"""Further validation sets, and evaluations before the first update, in a report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.report.curve_plots import metric_plots
from pipeline.report.job_results import Curve, JobResult
from pipeline.report.table import columns
from pipeline.report.trajectories import trajectory_pairs
from tests import synthetic

SETS = {
    "dataset.validations.a_cost": "test",
    "dataset.validations.late.split": "test[50%:]",
    "dataset.validations.late.every": "5",
}


def with_metrics(*names: str, params=SETS) -> JobResult:
    """Return a job with curves like that of `val/loss` under further names."""
    job = synthetic.job("job", 1.0)
    curves = dict(job.curves)
    for name in names:
        curves[name] = curves["val/loss"]
    return replace(job, curves=curves, params=params)


def test_the_metrics_of_the_own_split_come_first():
    job = with_metrics(
        "val/a_cost/accuracy", "val/a_cost/loss", "val/accuracy", "val/late/loss"
    )
    sweep = synthetic.swept([job])
    assert sweep.metrics == [
        *("train/loss", "val/loss", "val/accuracy"),
        *("val/a_cost/accuracy", "val/a_cost/loss", "val/late/loss"),
    ]
    assert sweep.quality == "val/accuracy"
    names = [column.name for column in columns(sweep)]
    assert [name for name in names if name in sweep.metrics] == sweep.metrics
    titles = " ".join(plot.title for plot in metric_plots(sweep))
    assert "val/late/loss" in titles

    # Losses alone are ranked by that of the own split.
    only_losses = synthetic.swept([with_metrics("val/a_cost/loss")])
    assert only_losses.quality == "val/loss"


def test_the_direction_of_a_metric_is_that_of_its_name_without_the_set():
    sweep = synthetic.swept([with_metrics("val/a_cost/accuracy")])
    assert not sweep.lower_is_better("val/a_cost/accuracy")
    assert sweep.lower_is_better("val/late/loss")
    # Where no set has this name, it is a word of the metric's name.
    other = synthetic.swept([with_metrics("val/a_cost/accuracy", params={})])
    assert other.lower_is_better("val/a_cost/accuracy")

    kept = {
        **SETS,
        "training.keep_best.metric": "val/late/wrong_error",
        "training.keep_best.mode": "max",
    }
    sweep = synthetic.swept([with_metrics("val/wrong_error", params=kept)])
    assert not sweep.lower_is_better("val/wrong_error")
    assert not sweep.lower_is_better("val/a_cost/wrong_error")


def evaluated(job: JobResult, values: dict[int, float]) -> JobResult:
    curve = Curve(np.array(list(values)), np.array(list(values.values())))
    return replace(job, curves={**job.curves, "val/loss": curve})


@pytest.mark.parametrize(("points", "judged"), [(4, "train/loss"), (5, "val/loss")])
def test_an_evaluation_at_the_start_is_a_point_but_none_of_the_five(points, judged):
    job = synthetic.job("job", 1.0, epochs=8)
    steps = job.curves["train/loss"].steps[:points].tolist()
    losses = [5.0 - number for number in range(points)]
    values = {0: 9.0, **dict(zip(steps, losses, strict=True))}
    sweep = synthetic.swept([evaluated(job, values)])
    assert sweep.judged_loss == judged
    curve = sweep.jobs[0].curves["val/loss"]
    for axis in ("updates", "examples", "seconds"):
        assert sweep.jobs[0].along(axis, curve.steps)[0] == 0


def test_the_cost_of_a_target_is_counted_from_the_start():
    """Half of the way down from the initial loss is half of the first evaluation's."""
    job = synthetic.job("job", 1.0)
    steps = job.curves["train/loss"].steps.tolist()
    losses = [3.0, 2.5, 2.0, 1.8, 1.6, 1.5]
    first = evaluated(job, {0: 9.0, **dict(zip(steps, losses, strict=True))})
    other = replace(evaluated(job, {0: 9.0, steps[0]: 3.0}), name="seed=1")
    reached = {step: 3.0 for step in steps[:5]}
    other = evaluated(other, {0: 9.0, **reached})
    target = synthetic.swept([first, other]).target
    assert target.value == 3.0
    assert target.costs["job"]["updates"] == steps[0]
    assert not target.at_first


def test_jobs_that_are_evaluated_otherwise_train_the_same_trajectory():
    first = with_metrics(params={"accumulation.effective_batch_size": "8"})
    params = {**SETS, "training.evaluate_at_start": "true"}
    second = replace(first, name="second", params={**first.params, **params})
    other = replace(first, name="other", params={**first.params, "seed": "1"})
    pairs = trajectory_pairs(synthetic.swept([first, second, other]))
    assert [(pair.base.name, pair.other.name) for pair in pairs] == [("job", "second")]
