"""When a target is reached: what is not known is not claimed, and one batch is no proof."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from pipeline.config import compose
from pipeline.report import largest_batch, noise_scale, plots, table
from pipeline.report.findings import SweepFinding
from pipeline.report.job_results import Curve, JobResult
from pipeline.report.largest_batch import batch_costs
from pipeline.report.statistics import CHANCE
from pipeline.report.sweep_result import EVALUATIONS, SweepResult
from pipeline.report.writer import summarize
from tests import synthetic
from tests.parameters import mostly_slow


def first_on(sweep: SweepResult, topic: str) -> SweepFinding:
    return next(finding for finding in summarize(sweep) if finding.topic == topic)


def with_evaluations(job: JobResult, losses: dict[int, float]) -> JobResult:
    """Return the job with these validation losses, by update."""
    curves = dict(job.curves)
    steps = np.array(list(losses), np.int64)
    values = np.array(list(losses.values()))
    curves["val/loss"] = Curve(steps, values)
    return replace(job, curves=curves)


def steps_of(job: JobResult) -> list[int]:
    """Return the updates after which the job has a training loss."""
    return job.curves["train/loss"].steps.tolist()


def censored() -> SweepResult:
    """Return a sweep whose target is the lowest loss of factor 8.

    Factor 1 is there after 128 updates; factor 8 is first evaluated after 16 updates,
    which is as many examples, and had been there for some time.
    """
    one = synthetic.job("factor=1 batch=8", 1.0)
    falling = [3, 2.4, 2.1, 1.6, 1.2, 1]
    losses_by_update = dict(zip(steps_of(one), falling, strict=True))
    one = with_evaluations(one, losses_by_update)

    eight = synthetic.job("factor=8 batch=64", 2.0, factor=8, batch=64)
    flat = [2.0, 2.02, 2.01, 2.03, 2.02, 2.01]
    losses_by_update = dict(zip(steps_of(eight), flat, strict=True))
    eight = with_evaluations(eight, losses_by_update)

    two = synthetic.job("factor=2 batch=16", 2.0, factor=2, batch=16)
    return synthetic.swept([one, eight, two])


def test_a_first_evaluation_below_the_target_is_an_upper_bound():
    sweep = censored()
    target = sweep.target
    assert target.value == 2.0
    assert target.at_first == {"factor=8 batch=64"}

    finding = first_on(sweep, "time_to_target")
    assert set(finding.figures["groups"]) == {"factor=1 batch=8", "factor=2 batch=16"}
    updates_of_epoch = 1024 / 64
    seconds_of_update = 8 * 0.01  # of 64 examples, and eight take 10 ms
    bound = updates_of_epoch * seconds_of_update
    assert finding.figures["at_most"] == {"factor=8 batch=64": pytest.approx(bound)}
    assert (
        " Already at the target at the first evaluation, and so not ranked: factor=8 "
        "batch=64 (≤ 1.28 s); evaluate more often (training.evaluate_every)."
    ) in finding.text
    assert "gets there first among the others" in finding.text
    assert "factor=8 batch=64 gets there first" not in finding.text

    # Nothing that needs the moment is said.
    for other_finding in summarize(sweep):
        assert "On this machine take" not in other_finding.text
    pays = first_on(sweep, "largest_batch")
    assert pays.figures == {}
    assert "cannot be determined if a batch was at the target at its first" in pays.text


def test_a_bound_is_marked_in_the_table():
    sweep = censored()
    shown = table.groups_table(sweep)
    column = shown.head.index("updates to target")
    cells = {row[0]: row[column] for row in shown.rows}
    assert cells["factor=8 batch=64"] == "≤\N{NO-BREAK SPACE}16"
    assert "≤" not in cells["factor=1 batch=8"]


def test_a_run_that_begins_at_the_target_needs_nothing():
    """An evaluation before the first update is no bound."""
    sweep = censored()
    one, eight, two = sweep.jobs
    curve = eight.curves["val/loss"]
    steps = [0, *curve.steps.tolist()[1:]]
    losses_by_update = dict(zip(steps, curve.values.tolist(), strict=True))
    eight_from_start = with_evaluations(eight, losses_by_update)
    sweep = synthetic.swept([one, eight_from_start, two])
    assert sweep.target.at_first == frozenset()


def evaluated_before(losses_by_factor: dict[int, list[float]]) -> SweepResult:
    """Return a sweep with these six losses, the first one before the first update."""
    jobs = []
    for factor, losses in losses_by_factor.items():
        batch = 8 * factor
        job = synthetic.job(f"factor={factor}", 1.0, factor=factor, batch=batch)
        steps = [0, *steps_of(job)[:5]]
        losses_by_update = dict(zip(steps, losses, strict=True))
        jobs.append(with_evaluations(job, losses_by_update))
    return synthetic.swept(jobs)


def test_a_batch_that_begins_at_the_target_has_no_ratio():
    """The last job begins with the weights of another run."""
    falling = [3, 2.5, 2, 1.5, 1.2, 1]
    rising = [1.5, 1.5, 1.6, 1.5, 1.6, 1.7]
    sweep = evaluated_before({1: falling, 2: falling, 4: rising})
    assert sweep.target.value == 1.5
    last_job = sweep.jobs[2]
    assert sweep.cost(last_job, "examples") == 0
    finding = first_on(sweep, "largest_batch")
    assert finding.figures == {}
    assert finding.text.endswith(
        "determined if a batch was at the target before its first update: 32."
    )


def test_the_largest_batch_is_a_topic_only_where_batches_are_compared():
    def texts(settings: list[tuple[str, int]]) -> list[str]:
        jobs = []
        for name, batch in settings:
            jobs.append(synthetic.job(name, 1.0, batch=batch))
        findings = summarize(synthetic.swept(jobs))
        assert all(finding.topic != "noise_scale" for finding in findings)
        return [item.text for item in findings if item.topic == "largest_batch"]

    same_batch = [("rate=1", 8), ("rate=2", 8)]
    assert texts(same_batch) == []

    # The batches differ, but each has a rate of its own.
    (text,) = texts([("rate=1 batch=8", 8), ("rate=2 batch=16", 16)])
    assert text.endswith("determined for settings that were tried with only one batch.")

    (text,) = texts([("rate=1 batch=8", 8), ("rate=1 batch=16", 16)])
    assert "The largest effective batch that still pays is" in text


def test_losses_that_only_rose_set_no_target():
    falling = [3, 2.5, 2, 1.5, 1.2, 1]
    rising = [3, 3.2, 3.3, 3.4, 3.5, 3.6]
    sweep = evaluated_before({1: falling, 2: rising, 4: rising})
    assert sweep.target.value == 1
    finding = first_on(sweep, "time_to_target")
    assert (
        "reached by 1 of the 3 jobs: it is the lowest loss that was reached by every "
        "job that got at least half of the way down from the first to the lowest loss."
    ) in finding.text
    assert list(finding.figures["groups"]) == ["factor=1"]


@pytest.mark.parametrize("lost", [1, 2])
def test_jobs_without_a_finite_loss_set_no_target(lost):
    jobs = []
    for number in range(3):
        job = synthetic.job(f"rate={number}", 1.0 + 0.1 * number)
        if number >= 3 - lost:
            for metric in ("train/loss", "val/loss"):
                job.curves[metric].values[:] = np.nan
        jobs.append(job)
    sweep = synthetic.swept(jobs)
    # The losses fall straight from 5.
    assert sweep.target.value == pytest.approx(1.0 + 0.1 * (2 - lost))
    text = first_on(sweep, "time_to_target").text
    assert (
        f"reached by {3 - lost} of the 3 jobs: it is the lowest loss that was reached "
        "by every job that got at least half of the way down"
    ) in text


def test_a_target_of_half_of_the_jobs_says_why():
    """The third job misses the target by little, and the fourth one by far."""
    jobs = []
    for rate, end in enumerate((1.0, 2.0, 2.01, 4.9)):
        jobs.append(synthetic.job(f"rate={rate}", end))
    text = first_on(synthetic.swept(jobs), "time_to_target").text
    assert text.startswith(
        "The target is val/loss ≤ 2, reached by 2 of the 4 jobs: it is the lowest loss "
        "that half of them reached, as 1 of them got less than half of the way down "
        "from the first to the lowest loss. "
    )


@pytest.mark.parametrize("order", [1, -1])
def test_a_bound_of_unknown_examples_is_unknown_in_any_order(order):
    sweep = censored()
    one, eight, two = sweep.jobs
    curves = dict(eight.curves)
    del curves["train/examples_seen"]
    unknown = replace(eight, name=f"{eight.name} #2", curves=curves)
    twins = [eight, unknown][::order]
    sweep = synthetic.swept([one, *twins, two])
    assert math.isnan(sweep.target.bound(twins, "examples"))


def test_one_lucky_batch_reaches_no_target():
    """Both jobs have the same noisy loss, but for one batch of the second one.

    There are three evaluations, so the target is one of `train/loss`.
    """
    rng = np.random.default_rng(0)
    updates = 200
    falling = 3 - 2 * np.arange(1, updates + 1) / updates
    jobs = []
    for name in ("rate=1", "rate=2"):
        losses = falling + 0.1 * rng.standard_normal(updates)
        if name == "rate=2":
            losses[20] = 0.5
        job = synthetic.job(name, 1.0, epochs=3)
        steps = np.arange(1, updates + 1)
        curves = {
            "train/loss": Curve(steps, losses),
            "val/loss": Curve(steps[-3:], losses[-3:]),
            "train/examples_seen": Curve(steps, 8.0 * steps),
            "perf/update_seconds": Curve(steps, np.full(updates, 0.01)),
        }
        jobs.append(replace(job, curves=curves))
    sweep = synthetic.swept(jobs)

    assert sweep.target.metric == "train/loss"
    assert sweep.window == 160  # a tenth of 200 updates of 8
    for job in sweep.jobs:
        # The loss of the target is that of about update 190, in the middle of the last
        # window.
        assert 180 <= sweep.cost(job, "updates") <= 200
    assert sweep.target.value == pytest.approx(1.1, abs=0.1)
    assert "(means over 160 examples)" in first_on(sweep, "time_to_target").text


def test_a_single_job_is_not_all_of_them():
    sweep = synthetic.swept([synthetic.job("job", 1.0)])
    finding = first_on(sweep, "time_to_target")
    assert "the lowest that the job that finished reached" in finding.text


# --- the largest batch that pays ---

BATCHES = (32, 64, 128, 256, 512)


def sweep_with_costs(
    rng: np.random.Generator, critical: float, noise: float, seeds: int = 3
) -> SweepResult:
    """Return a sweep in which a batch B needs 10⁶ (1 + B / critical) examples.

    A seed changes that by a factor with the deviation `noise`; a tenth of it is the
    seed's at each batch, the rest the same at all of them.
    """
    jobs = []
    effects_of_seeds = noise * rng.standard_normal(seeds)
    for batch in BATCHES:
        for seed in range(seeds):
            rest = 0.1 * noise * rng.standard_normal()
            factor_of_seed = math.exp(effects_of_seeds[seed] + rest)
            examples = 1e6 * cost_of(batch, critical) * factor_of_seed
            jobs.append(job_with_cost(batch, seed, examples))
    return synthetic.swept(jobs)


def job_with_cost(batch: int, seed: int, examples: float) -> JobResult:
    """Return a job whose loss falls from 2 to 1 in so many examples.

    Then it stays a little below 1, for four times as many examples.
    """
    progress = np.arange(0.05, 5.01, 0.05)
    steps = np.round(examples * progress / batch).astype(np.int64)
    seen = batch * steps
    losses = np.where(progress <= 1.001, 2 - progress, 1 - 1e-9)
    curves = {
        "train/loss": Curve(steps, losses),
        "val/loss": Curve(steps, losses),
        "train/examples_seen": Curve(steps, seen),
    }
    factor = batch // 32
    name = f"factor={factor} batch={batch} seed={seed}"
    job = synthetic.job(name, 1.0, factor=factor, batch=batch)
    return replace(job, curves=curves)


def cost_of(batch: int, critical: float) -> float:
    """Return the examples to the target, relative to those of a batch near 0."""
    return 1 + batch / critical


def interval_of(sweep: SweepResult) -> tuple[int, int]:
    costs = batch_costs(sweep, "", sweep.jobs)
    return largest_batch.interval_of_largest(costs)


def true_largest(critical: float) -> int:
    """Return the largest batch that costs at most twice the smallest one's examples."""
    limit = 2 * cost_of(BATCHES[0], critical)
    return max(batch for batch in BATCHES if cost_of(batch, critical) <= limit)


@pytest.mark.parametrize("critical", mostly_slow([100.0, 190.0, 400.0], [190.0]))
def test_the_interval_has_the_largest_batch_that_pays(critical):
    """At 190, the ratio of the batch 256 is close to the limit: 2.01."""
    rng = np.random.default_rng(0)
    truth = true_largest(critical)
    sweeps = 150
    missed = 0
    for _ in range(sweeps):
        sweep = sweep_with_costs(rng, critical, noise=0.3)
        low, high = interval_of(sweep)
        if not low <= truth <= high:
            missed += 1
    # Three standard errors of such a share.
    slack = 3 * math.sqrt(CHANCE * (1 - CHANCE) / sweeps)
    assert missed / sweeps <= CHANCE + slack


def test_the_interval_is_narrow_where_seeds_agree():
    rng = np.random.default_rng(1)
    sweep = sweep_with_costs(rng, critical=400.0, noise=0.01)
    assert interval_of(sweep) == (256, 256)
    finding = first_on(sweep, "largest_batch")
    assert finding.figures["interval"] == (256, 256)
    assert (
        "Allowing for chance between seeds (95%), the largest batch that pays is from "
        "256 to 256."
    ) in finding.text

    # One seed shows no chance.
    alone = sweep_with_costs(rng, critical=400.0, noise=0.01, seeds=1)
    assert interval_of(alone) == (32, 512)
    text = first_on(alone, "largest_batch").text
    assert "this is one observation" in text
    assert "95%" not in text


def test_the_updates_are_those_that_were_made_even_if_some_had_a_smaller_batch():
    """Every second update of the batch of 512 has half as many examples."""
    jobs = []
    for batch in (32, 512):
        job = job_with_cost(batch, seed=0, examples=1e6)
        if batch == 512:
            curves = {}
            for key, curve in job.curves.items():
                curves[key] = Curve(curve.steps * 4 // 3, curve.values)
            job = replace(job, curves=curves)
        jobs.append(job)
    finding = first_on(synthetic.swept(jobs), "largest_batch")
    updates = finding.figures["updates"]
    # The target is reached at the first point after the fall.
    examples = 1.05e6
    expected = {32: examples / 32, 512: 4 / 3 * examples / 512}
    assert updates == pytest.approx(expected, rel=1e-3)


def test_the_smallest_batch_is_not_compared_with_itself():
    jobs = [
        job_with_cost(32, seed=0, examples=1e6),
        job_with_cost(64, seed=0, examples=3e6),
    ]
    text = first_on(synthetic.swept(jobs), "largest_batch").text
    assert "in 32812 updates; it is the smallest batch that was tried." in text
    assert "than any smaller batch" not in text


def cut_after(job: JobResult, points: int) -> JobResult:
    """Return the job as if it had ended after so many logged updates."""
    curves = {}
    for key, curve in job.curves.items():
        curves[key] = Curve(curve.steps[:points], curve.values[:points])
    return replace(job, curves=curves)


def test_a_batch_that_ended_early_may_pay():
    """The batch of 512 ended before it could tell; with more examples it would have."""
    rng = np.random.default_rng(2)
    sweep = sweep_with_costs(rng, critical=400.0, noise=0.01)
    jobs = []
    for job in sweep.jobs:
        if job.effective_batch_size == 512:
            job = cut_after(job, 8)
        jobs.append(job)
    early = synthetic.swept(jobs)
    costs = batch_costs(early, "", early.jobs)
    assert 512 not in costs.examples
    assert largest_batch.interval_of_largest(costs) == (256, 512)
    text = first_on(early, "largest_batch").text
    assert " 512 did not reach the target." in text


def with_early_end(seed: int, points: int) -> SweepResult:
    """Return a sweep of three seeds in which one job of the batch 512 ends early.

    With this critical batch, 512 needs more than four times as many examples as 32.
    """
    sweep = sweep_with_costs(np.random.default_rng(2), critical=100.0, noise=0.01)
    jobs = []
    for job in sweep.jobs:
        if job.name.endswith(f"batch=512 seed={seed}"):
            job = cut_after(job, points)
        jobs.append(job)
    return synthetic.swept(jobs)


def test_how_many_seeds_of_a_batch_reached_the_target_is_named():
    # It ends after 2.2 times the examples of the batch 32, less than half of the way
    # down.
    sweep = with_early_end(seed=1, points=10)
    finding = first_on(sweep, "largest_batch")
    assert " 512 reached the target in only 2 of 3 jobs." in finding.text
    assert finding.figures["interval"][1] == 128

    table_of_groups = table.groups_table(sweep)
    for heading in ("updates to target", "examples to target"):
        column = table_of_groups.head.index(heading)
        *others, last = [row[column] for row in table_of_groups.rows]
        assert last.endswith(" (2 of 3 jobs)")
        assert not any("jobs" in cell for cell in others)


def test_a_batch_whose_seeds_reached_the_target_in_part_may_pay():
    """The job that ended early read as many examples as the smallest batch needed."""
    early = with_early_end(seed=1, points=4)
    assert first_on(early, "largest_batch").figures["interval"][1] == 512


@pytest.mark.parametrize("order", [1, -1])
def test_a_batch_of_unknown_length_may_pay_in_any_order(order):
    """The jobs of 512 never reach the target; how long one of them ran is not known."""
    sweep = sweep_with_costs(np.random.default_rng(2), critical=200.0, noise=0.01)
    jobs = []
    jobs_of_512 = []
    for job in sweep.jobs:
        if job.effective_batch_size == 512:
            cut = cut_after(job, 15)
            jobs_of_512.append(replace(cut, status="FAILED"))
        else:
            jobs.append(job)
    del jobs_of_512[0].curves["train/examples_seen"]

    sweep = synthetic.swept([*jobs, *jobs_of_512[::order]])
    costs = batch_costs(sweep, "", sweep.jobs)
    assert math.isnan(costs.lower_bounds[512])
    _, largest_that_may_pay = largest_batch.interval_of_largest(costs)
    assert largest_that_may_pay == 512


# --- families with little in them ---


def test_a_noise_scale_without_a_recorded_batch():
    job = replace(
        synthetic.job("job", 1.0),
        effective_batch_size=None,
        factor=None,
        micro_batch_size=None,
    )
    steps = job.curves["train/loss"].steps
    job.curves["train/gradient_noise_scale"] = Curve(steps, np.full(len(steps), 40.0))
    sweep = synthetic.swept([job])
    finding = first_on(sweep, "noise_scale")
    assert finding.text == "job: The gradient noise scale is 40 examples."
    assert finding.figures["predicted"] == 40
    topics = {item.topic for item in summarize(replace(sweep, search=True))}
    assert "noise_scale" not in topics


def test_costs_of_which_none_is_known_are_no_finding():
    jobs = []
    for factor in (1, 2):
        job = synthetic.job(f"factor={factor}", 1.0, factor=factor)
        for key in ("perf/update_seconds", "perf/peak_memory_bytes"):
            curve = job.curves[key]
            job.curves[key] = Curve(curve.steps, np.full(len(curve.steps), np.nan))
        jobs.append(job)
    topics = [finding.topic for finding in summarize(synthetic.swept(jobs))]
    assert "cost" not in topics


def test_the_plot_of_equal_ends_is_one_of_the_page():
    jobs = [synthetic.job(f"rate={rate}", 1.0) for rate in (0.1, 0.2)]
    sweep = synthetic.swept(jobs)
    finding = first_on(sweep, "final")
    assert finding.figures["equal"]
    assert finding.plot in {plot.key for plot in plots.draw(sweep)}


def test_identical_runs_are_one_in_a_ranking():
    """Of three factors two train the same to the last digit; the third ends worse."""
    jobs = []
    for factor, shift in ((1, 0.0), (2, 0.0), (4, 0.1)):
        for seed in range(3):
            name = f"factor={factor} seed={seed}"
            effect_of_seed = 1 + 0.1 * seed
            end = effect_of_seed + shift * effect_of_seed
            jobs.append(synthetic.job(name, end, factor=factor, batch=64))
    sweep = synthetic.swept(jobs)
    finding = first_on(sweep, "final")
    assert finding.figures["best"] == "factor=1"
    assert finding.figures["same"] == ["factor=2"]
    assert (
        "factor=1 (and factor=2, with the same val/loss) ends best, at 1.10 ± 0.10"
    ) in finding.text
    assert "The next is factor=4, " in finding.text
    for other_finding in summarize(sweep):
        if other_finding.topic == "next":
            assert "is better" not in other_finding.text


def test_a_noise_scale_is_a_lower_bound_only_where_it_is_one():
    rng = np.random.default_rng(0)
    text_by_scale = {}
    for scale in (40.0, 400.0, 4000.0):
        sweep = sweep_with_costs(rng, critical=400.0, noise=0.001)
        for job in sweep.jobs:
            steps = job.curves["train/loss"].steps
            curve = Curve(steps, np.full(len(steps), scale))
            job.curves["train/gradient_noise_scale"] = curve
        text_by_scale[scale] = first_on(sweep, "noise_scale").text
    assert "treat the noise scale as a lower bound" in text_by_scale[40.0]
    assert "noise scale agrees with the critical batch" in text_by_scale[400.0]
    assert "so it is not a lower bound" in text_by_scale[4000.0]


def test_a_noise_scale_that_varies_too_much_is_not_compared():
    """Its mean is the critical batch; each value is logged for ten updates."""
    sweep = sweep_with_costs(np.random.default_rng(0), critical=400.0, noise=0.001)
    for number, job in enumerate(sweep.jobs):
        job.params["accumulation.noise_scale_every"] = "10"
        scale = 100.0 if number % 2 else 700.0
        curve = Curve(np.arange(1, 21), np.full(20, scale))
        job.curves["train/gradient_noise_scale"] = curve
    finding = first_on(sweep, "noise_scale")
    assert finding.figures["measurements"] == 30
    # 8 of 15 values are 700. The 97.5% quantile of Student's t with 14 degrees of
    # freedom is 2.1448.
    deviation = 600 * math.sqrt(8 * 7 / (15 * 14))
    half_width = 2.1448 * deviation / math.sqrt(15)
    ends = f"{420 - half_width:.4g} to {420 + half_width:.4g}"
    assert finding.text.endswith(
        "The noise scale is too uncertain to be compared with the critical batch that "
        "was measured here: it comes from 30 measurements in 15 runs, and its 95% "
        f"interval is {ends}."
    )
    assert "agrees" not in finding.text
    assert "times that" not in finding.text

    assert "run's median up to the target. " in finding.text


def test_a_median_is_up_to_the_target_only_if_the_run_reached_it():
    sweep = with_early_end(seed=1, points=10)
    for job in sweep.jobs:
        job.curves["train/gradient_noise_scale"] = Curve(np.array([1]), np.array([9.0]))
    text = first_on(sweep, "noise_scale").text
    assert (
        "the mean over 15 runs (15 measurements) of each run's median up to the target, "
        "or up to its end for the 1 run without the target."
    ) in text

    only_early = [job for job in sweep.jobs if job.name not in sweep.target.costs]
    scale = noise_scale.noise_scale_of_runs(only_early, sweep)
    assert scale.reached == 0
    assert scale.position(1, 20) == "uncertain"
    assert noise_scale._end_of_medians(scale).startswith(" up to its end, as none")


@pytest.mark.parametrize(
    "name", ["does_it_pay", "factor_at_fixed_micro_batch", "rate_transfer"]
)
def test_the_package_s_sweeps_are_evaluated_as_often_at_each_batch(name):
    """More often than a target needs, and after as many examples for every batch."""
    file = Path(compose.directory("sweeps")) / f"{name}.yaml"
    training = yaml.safe_load(file.read_text())["training"]
    parts = int(training["evaluate_every"].removeprefix("epoch/"))
    assert training["epochs"] * parts >= EVALUATIONS
    assert parts > 1
