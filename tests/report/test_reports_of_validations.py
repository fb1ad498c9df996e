"""Further validation sets, and evaluations before the first update, in a report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.report import ranking
from pipeline.report.curve_plots import metric_plots
from pipeline.report.job_results import Curve, JobResult
from pipeline.report.table import columns
from pipeline.report.trajectories import trajectory_pairs
from tests import synthetic

# Params of a job with two further validation sets.
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
        "train/loss",
        "val/loss",
        "val/accuracy",
        "val/a_cost/accuracy",
        "val/a_cost/loss",
        "val/late/loss",
    ]
    assert sweep.quality == "val/accuracy"

    # The table and the plots have them all, in this order.
    names = [column.name for column in columns(sweep)]
    metrics_in_table = [name for name in names if name in sweep.metrics]
    assert metrics_in_table == sweep.metrics
    titles = " ".join(plot.title for plot in metric_plots(sweep))
    assert "val/late/loss" in titles


def test_losses_alone_are_ranked_by_that_of_the_own_split():
    only_losses = synthetic.swept([with_metrics("val/a_cost/loss")])
    assert only_losses.quality == "val/loss"


def test_the_loss_of_one_output_never_ranks():
    outputs = ("val/age_loss", "val/late/age_loss", "val/sex_loss")
    assert synthetic.swept([with_metrics(*outputs)]).quality == "val/loss"
    with_accuracy = with_metrics(*outputs, "val/sex_accuracy")
    assert synthetic.swept([with_accuracy]).quality == "val/sex_accuracy"

    # Without an evaluation, too.
    trained = with_metrics("train/age_loss", "train/sex_loss")
    curves = dict(trained.curves)
    del curves["val/loss"]
    not_evaluated = replace(trained, curves=curves)
    assert synthetic.swept([not_evaluated]).quality == "train/loss"


def test_the_metric_of_keep_best_ranks_if_all_jobs_that_ran_have_it():
    by_loss = {
        "training.keep_best.metric": "val/loss",
        "training.keep_best.mode": "min",
    }
    by_nothing = {
        "training.keep_best.metric": "null",
        "training.keep_best.mode": "null",
    }
    kept = with_metrics("val/accuracy", params=by_loss)
    other = with_metrics("val/accuracy", params=by_nothing)
    assert synthetic.swept([kept, kept, JobResult("planned")]).quality == "val/loss"
    assert "Final val/loss" in ranking.final_result(synthetic.swept([kept, kept])).text
    assert synthetic.swept([other, other]).quality == "val/accuracy"
    assert synthetic.swept([kept, other]).quality == "val/accuracy"

    reversed_mode = with_metrics(
        "val/accuracy", params=by_loss | {"training.keep_best.mode": "max"}
    )
    assert synthetic.swept([kept, reversed_mode]).quality == "val/accuracy"
    not_logged = with_metrics(
        "val/accuracy", params=by_loss | {"training.keep_best.metric": "val/recall"}
    )
    assert synthetic.swept([not_logged]).quality == "val/accuracy"


def test_the_direction_of_a_metric_is_that_of_its_name_without_the_set():
    sweep = synthetic.swept([with_metrics("val/a_cost/accuracy")])
    assert not sweep.lower_is_better("val/a_cost/accuracy")
    assert sweep.lower_is_better("val/late/loss")

    # Where no set has this name, it is a word of the metric's name: a cost.
    without_sets = synthetic.swept([with_metrics("val/a_cost/accuracy", params={})])
    assert without_sets.lower_is_better("val/a_cost/accuracy")


def test_the_direction_of_the_best_holds_for_the_metric_of_each_set():
    keep_best = {
        "training.keep_best.metric": "val/late/wrong_error",
        "training.keep_best.mode": "max",
    }
    job = with_metrics("val/wrong_error", params={**SETS, **keep_best})
    sweep = synthetic.swept([job])
    assert not sweep.lower_is_better("val/wrong_error")
    assert not sweep.lower_is_better("val/a_cost/wrong_error")


def evaluated(job: JobResult, losses_by_update: dict[int, float]) -> JobResult:
    """Return the job with these values of `val/loss`."""
    updates = np.array(list(losses_by_update))
    losses = np.array(list(losses_by_update.values()))
    curves = {**job.curves, "val/loss": Curve(updates, losses)}
    return replace(job, curves=curves)


@pytest.mark.parametrize(("points", "judged"), [(4, "train/loss"), (5, "val/loss")])
def test_an_evaluation_at_the_start_is_a_point_but_none_of_the_five(points, judged):
    job = synthetic.job("job", 1.0, epochs=8)
    updates = job.curves["train/loss"].steps[:points].tolist()
    losses_by_update = {0: 9.0}
    for number, update in enumerate(updates):
        losses_by_update[update] = 5.0 - number

    sweep = synthetic.swept([evaluated(job, losses_by_update)])
    assert sweep.judged_loss == judged
    (job_of_sweep,) = sweep.jobs
    curve = job_of_sweep.curves["val/loss"]
    for axis in ("updates", "examples", "seconds"):
        places = job_of_sweep.along(axis, curve.steps)
        assert places[0] == 0


def test_the_cost_of_a_target_is_counted_from_the_start():
    """Half of the way down from the initial loss is half of the first evaluation's."""
    job = synthetic.job("job", 1.0)
    updates = job.curves["train/loss"].steps.tolist()
    initial_loss = 9.0

    falling_losses = [3.0, 2.5, 2.0, 1.8, 1.6, 1.5]
    losses_by_update = dict(zip(updates, falling_losses, strict=True))
    falling = evaluated(job, {0: initial_loss, **losses_by_update})

    # It stays at a loss that the other job has passed at its first update.
    losses_by_update = dict.fromkeys(updates[:5], 3.0)
    flat = evaluated(job, {0: initial_loss, **losses_by_update})
    flat = replace(flat, name="seed=1")

    target = synthetic.swept([falling, flat]).target
    assert target.value == 3.0
    assert target.costs["job"]["updates"] == updates[0]
    assert not target.at_first


def test_jobs_that_are_evaluated_otherwise_train_the_same_trajectory():
    first = with_metrics(params={"accumulation.effective_batch_size": "8"})
    evaluations = {**SETS, "training.evaluate_at_start": "true"}
    second = replace(first, name="second", params={**first.params, **evaluations})
    other = replace(first, name="other", params={**first.params, "seed": "1"})

    sweep = synthetic.swept([first, second, other])
    (pair,) = trajectory_pairs(sweep)
    assert pair.base.name == "job"
    assert pair.other.name == "second"
