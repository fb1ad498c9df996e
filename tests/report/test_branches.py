"""The critical batch from branches: against a simulation, by hand, and from a store."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.report import critical_batch, next_steps, reading, wording, writer
from pipeline.report.critical_batch import TOLERANCE, Branch, CriticalBatch, measure
from pipeline.report.job_results import Curve, JobResult
from tests import synthetic
from tests.synthetic import PlantedSweep

SMALLEST = 8
SIZES = [SMALLEST << doublings for doublings in range(7)]
LENGTH = 256 * SMALLEST  # examples of a branch, in whole updates of the largest batch
LAST = LENGTH - SIZES[-1]  # where the last update of the largest batch begins


@dataclass(frozen=True)
class Problem:
    """SGD on the quadratic ½ Σ h θ², at √k times the rate with k times the batch.

    The gradient of an example is h θ + noise · z, and its loss has the chance of z · θ
    and of one of its own.
    """

    rate: float  # with the smallest batch
    noise: float
    begin: float  # each of the weights θ at the checkpoint


@dataclass(frozen=True)
class Trajectory:
    """One branch, and its losses without chance."""

    branch: Branch
    expected: list[float]  # loss of the weights before each update


def trajectory(problem: Problem, batch: int, examples: NDArray) -> Trajectory:
    """Return the branch at a batch, with z of shape (LENGTH, 21) as its `examples`."""
    curvature = np.logspace(-1.5, 0, 20)
    weights = np.full(20, problem.begin)
    rate = problem.rate * math.sqrt(batch / SMALLEST)
    losses = []
    expected = []
    for first in range(0, LENGTH, batch):
        z = examples[first : first + batch].mean(axis=0)
        expected.append(0.5 * np.sum(curvature * weights**2))
        losses.append(expected[-1] + problem.noise * z[:20] @ weights + 0.3 * z[20])
        gradient = curvature * weights + problem.noise * z[:20]
        weights = weights - rate * gradient
    sizes = np.full(len(losses), float(batch))
    return Trajectory(Branch(sizes, np.array(losses)), expected)


def trajectories(seed: int, problem: Problem) -> dict[int, Trajectory]:
    """Return a trajectory for each batch; all read the same examples."""
    examples = np.random.default_rng(seed).normal(size=(LENGTH, 21))
    return {batch: trajectory(problem, batch, examples) for batch in SIZES}


@pytest.mark.parametrize(
    ("problem", "truth"),
    [
        pytest.param(
            Problem(0.03, 0.2, 0.3), 2 * SMALLEST, id="small", marks=pytest.mark.slow
        ),
        pytest.param(Problem(0.2, 0.5, 1.0), 4 * SMALLEST, id="medium"),
        pytest.param(
            Problem(0.1, 0.1, 0.1),
            64 * SMALLEST,
            id="beyond what is tried",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_critical_batch_of_a_noisy_quadratic(problem, truth):
    """Measure the critical batch near the true one.

    The truth is the same rule for the expected losses of the weights after the same
    examples, over 100 trajectories.
    """
    runs = [trajectories(1000 + seed, problem) for seed in range(100)]
    mean_losses = {}
    for batch in SIZES:
        losses = [run[batch].expected[LAST // batch] for run in runs]
        mean_losses[batch] = np.mean(losses)
    assert by_rule(mean_losses) == truth

    measured = []
    for seed in range(10):
        branches = {}
        for batch, run in trajectories(seed, problem).items():
            branches[batch] = run.branch
        result = measure([branches])
        measured.append(result.critical)
        assert result.interval[0] <= result.critical <= result.interval[1]
    near = [batch for batch in measured if abs(math.log2(batch / truth)) <= 1]
    assert len(near) >= 9, measured


def by_rule(losses: dict[int, float]) -> int:
    """Return the largest batch up to which none is over ε above any smaller one."""
    lowest = math.inf
    largest = SIZES[0]
    for batch in SIZES:
        if losses[batch] > lowest + TOLERANCE:
            return largest
        lowest = min(lowest, losses[batch])
        largest = batch
    return largest


def line(
    batch: int, loss: float = 2.0, slope: float = -0.001, examples: int = 1024
) -> Branch:
    """Return a branch whose loss begins at `loss` and changes by `slope` an example."""
    sizes = np.full(examples // batch, float(batch))
    return Branch(sizes, loss + slope * (np.cumsum(sizes) - batch))


def lines(losses: dict[int, float]) -> dict[int, Branch]:
    return {batch: line(batch, loss) for batch, loss in losses.items()}


def test_literals_to_check_by_hand():
    """Losses that fall straight by 0.001 an example are equal for all batches.

    They are of weights that have seen as many examples. The last means over the same
    256 examples differ by the 128 of half an update. At 768 examples the losses are
    2 − 0.768.
    """
    same = measure([lines({1: 2.0, 64: 2.0, 256: 2.0})])
    assert list(same.losses.values()) == pytest.approx([1.232] * 3)
    assert same.critical == 256
    assert same.interval == (256, 256)

    means = []
    for batch in (1, 64, 256):
        means.append(line(batch).losses[-256 // batch :].mean())
    assert means == pytest.approx([1.232 - 0.1275, 1.232 - 0.096, 1.232])

    above = lines({1: 2.0, 64: 2.009, 256: 2.011})
    assert measure([above]).critical == 64
    # A batch beyond one that is too large does not count.
    beyond = lines({1: 2.0, 64: 2.02, 256: 2.0})
    assert measure([beyond]).critical == 1
    # A better batch sets the bar for those beyond it.
    better = lines({1: 2.0, 64: 1.98, 256: 1.995})
    assert measure([better]).critical == 64


def test_a_branch_that_diverged_ends_the_row():
    whole = line(64)
    diverged = Branch(whole.sizes[:5], np.append(whole.losses[:4], np.nan))
    result = measure([{1: line(1), 16: line(16), 64: diverged, 256: line(256)}])
    assert result.critical == 16
    assert list(result.losses) == [1, 16]
    assert result.diverged == 64

    no_number = Branch(whole.sizes, whole.losses * np.nan)
    assert measure([{1: no_number, 16: line(16)}]) is None
    assert measure([{1: line(1)}]) is None
    # A single loss has no spread.
    single = Branch(whole.sizes[:1], whole.losses[:1])
    assert measure([{64: single, 256: line(256)}]) is None


def seed_of_lines(
    rng: np.random.Generator, chance: float, noise: float
) -> dict[int, Branch]:
    """Return branches that end higher by 0.008 with each doubling of the batch.

    Args:
        rng: draws the chance and the noise.
        chance: the standard deviation of the loss of a branch.
        noise: that of the loss of an example, which the branches share.
    """
    shared = rng.normal(size=1024)
    branches = {}
    for doublings, batch in enumerate((8, 16, 32, 64, 128)):
        branch = line(batch, 2 + 0.008 * doublings)
        of_updates = shared.reshape(-1, batch).mean(axis=1)
        losses = branch.losses + rng.normal() * chance + noise * of_updates
        branches[batch] = Branch(branch.sizes, losses)
    return branches


def test_the_interval_holds_the_truth_and_seeds_widen_it():
    rng = np.random.default_rng(0)
    assert measure([seed_of_lines(rng, 0, 0)]).interval == (16, 16)
    low, high = measure([seed_of_lines(rng, 0, 1)]).interval
    assert low <= 16 <= high
    assert low < high

    apart = measure([seed_of_lines(rng, 0.01, 0) for _ in range(3)])
    assert apart.interval[0] < apart.interval[1]
    # 4.303 is the 97.5% quantile of Student's t with two degrees of freedom; the spread
    # of three seeds, 0.01, is known within a factor of two.
    expected = 4.303 * 0.01 / math.sqrt(3)
    assert expected / 2 < np.mean(apart.errors) < 2 * expected


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_the_interval_of_few_seeds_holds_the_truth(count):
    """With normal quantiles, the interval of two seeds held the truth in 74%."""
    problem = Problem(0.2, 0.5, 1.0)
    truth = 4 * SMALLEST  # as in `test_the_critical_batch_of_a_noisy_quadratic`
    groups = 60

    held = 0
    held_by_one_seed = 0
    for group in range(groups):
        seeds = []
        for seed in range(count):
            runs = trajectories(count * group + seed, problem)
            seeds.append({batch: run.branch for batch, run in runs.items()})
        low, high = measure(seeds).interval
        held += low <= truth <= high
        low, high = measure(seeds[:1]).interval
        held_by_one_seed += low <= truth <= high

    # If the interval holds the truth in 95% of all cases, fewer than 51 of 60 have a
    # probability of 0.1%. One seed is the negative control.
    assert held >= 51
    assert held_by_one_seed < 45


def branches_sweep(
    store, losses: dict[int, float], statuses: dict[int, str]
) -> PlantedSweep:
    """Make a sweep of branches after update 400, with a noise scale of 40.

    Args:
        store: the store for the sweep.
        losses: the first loss of each branch, by batch; all of them are planned.
        statuses: the status of each branch that has run, by batch.
    """
    sweep = PlantedSweep(store, [f"batch={batch}" for batch in losses], name="critical")
    for batch, status in statuses.items():
        updates = 1024 // batch
        tags = {
            "start.run": "a" * 32,
            "start.update": "400",
            "accumulation.stages": f"[[0, 32], [400, {batch}]]",
        }
        curves = {
            "train/loss": line(batch, losses[batch]).losses,
            "train/gradient_noise_scale": [40.0] * updates,
            "train/effective_batch_size": [batch] * updates,
        }
        sweep.job(
            f"batch={batch}",
            curves,
            factor=1,
            batch=32,
            tags=tags,
            params={"scaling.reference_batch_size": 32},
            status=status,
        )
    return sweep


def test_what_is_larger_than_a_missing_branch_is_not_judged(tmp_path):
    store = synthetic.store(tmp_path)
    losses = {32: 2.0, 64: 2.005, 128: 2.004, 256: 2.003}
    finished = dict.fromkeys(losses, "FINISHED")
    complete = branches_sweep(store, losses, finished)
    results = reading.read(store.uri, complete.run_id)
    assert critical_batch.measured(results).critical == 256

    failed = branches_sweep(store, losses, finished | {128: "FAILED"})
    results = reading.read(store.uri, failed.run_id)
    assert critical_batch.measured(results).critical == 64
    missing = next(iter(next_steps.findings(results, [])))
    assert f"pipeline critical as before, with --again {failed.run_id}" in missing.text


NON_FINITE = "pipeline.training.recorder.NonFiniteError: gradient_norm=nan at update 3"


@pytest.mark.parametrize(
    ("last", "failure"),
    [(math.nan, ""), (math.inf, ""), (-math.inf, ""), (1.9, NON_FINITE)],
)
def test_a_branch_that_failed_for_what_is_not_finite_diverged(last, failure):
    jobs = []
    for batch in (32, 64, 128, 256):
        branch = line(batch)
        losses = branch.losses
        status = "FINISHED"
        tags = {"start.update": "5"}
        if batch == 256:
            losses = np.array([2.0, 1.95, last])
            status = "FAILED"
            tags["failure"] = failure
        steps = np.arange(1, len(losses) + 1)
        curves = {
            "train/loss": Curve(steps, losses),
            "train/effective_batch_size": Curve(steps, branch.sizes[: len(steps)]),
        }
        job = JobResult(
            f"batch={batch} seed=0",
            status=status,
            curves=curves,
            tags=tags,
            effective_batch_size=batch,
        )
        jobs.append(job)
    sweep = replace(synthetic.swept(jobs), name="critical")
    finding = next(iter(critical_batch.branch_findings(sweep)))
    assert finding.figures["critical"] == 128
    assert finding.figures["diverged"] == 256
    assert " With a batch of 256, training diverged." in finding.text

    # A branch that failed for another reason is missing.
    lost = replace(jobs[-1], tags={"start.update": "5", "failure": "Killed"})
    lost.curves["train/loss"].values[-1] = 1.9
    sweep = replace(sweep, jobs=[*jobs[:-1], lost])
    finding = next(iter(critical_batch.branch_findings(sweep)))
    assert finding.figures["diverged"] is None

    # So is one whose sizes were not logged.
    del jobs[2].curves["train/effective_batch_size"]
    sweep = replace(sweep, jobs=jobs)
    assert critical_batch.measured(sweep).critical == 64


def test_branches_that_are_cut_by_tokens_have_no_noise_scale():
    def texts(**params):
        jobs = []
        for batch in (32, 64):
            branch = line(batch)
            steps = np.arange(1, len(branch.losses) + 1)
            curves = {
                "train/loss": Curve(steps, branch.losses),
                "train/effective_batch_size": Curve(steps, branch.sizes),
            }
            job = JobResult(
                f"batch={batch} seed=0",
                status="FINISHED",
                curves=curves,
                tags={"start.update": "5"},
                params=params,
                effective_batch_size=batch,
            )
            jobs.append(job)
        sweep = replace(synthetic.swept(jobs), name="critical")
        findings = critical_batch.branch_findings(sweep)
        return {finding.topic: finding.text for finding in findings}

    by_tokens = texts(**{"accumulation.micro_batch_tokens": "512"})
    assert by_tokens["critical"].startswith("The critical batch is ")
    assert by_tokens["noise_scale"] == (
        "Not measured: micro-batches that are cut by tokens are not random samples. With "
        "accumulation.micro_batch_tokens=null and accumulation.micro_batch_size, the noise "
        "scale is measured."
    )
    by_examples = texts(**{"accumulation.micro_batch_tokens": "null"})
    assert by_examples["noise_scale"].startswith("Not measured. The noise scale may be")


def test_a_schedule_has_a_reservation_if_the_interval_includes_the_smallest_batch():
    def text(interval):
        losses = {16: 2.0, 32: 2.0, 64: 2.0}
        result = CriticalBatch(64, interval, losses, [0.0] * 3, None)
        return critical_batch._uncertainty_sentence(result)

    assert text((32, 64)) == ""
    assert text((16, 64)) == (
        "The interval includes the smallest batch, 16, so it is not certain that a "
        "larger batch pays; more seeds or --examples may tell. "
    )


def test_a_report_has_the_critical_batch_a_schedule_and_a_picture(tmp_path):
    store = synthetic.store(tmp_path)
    losses = {32: 2.0, 64: 2.005, 128: 2.004, 256: 2.0}
    finished = dict.fromkeys((32, 64, 128), "FINISHED")
    sweep = branches_sweep(store, losses, finished)
    sweep.end("FAILED")

    written = writer.write(store.uri, sweep.run_id, tmp_path / "report")
    by_topic = {finding.topic: finding for finding in written.findings}
    assert list(by_topic) == ["jobs", "critical", "schedule", "noise_scale"]
    assert by_topic["critical"].figures["critical"] == 128
    assert by_topic["schedule"].figures["schedule"] == (
        "'accumulation.batch_schedule=[{start:{updates:0},effective_batch_size:32},"
        "{start:{updates:400},effective_batch_size:128}]' scaling.rule=sqrt "
        "scaling.reference_batch_size=32"
    )
    assert by_topic["noise_scale"].text.startswith(
        "40 ± 0 examples: the mean over 3 runs (56 measurements) of each run's median. "
        "The noise scale is below the critical batch that was measured here"
    )

    assert re.search(
        r"Losses \(intervals; .*\): 32: 1\.1\d+ ± 0\.0\d+, 64: ",
        by_topic["critical"].text,
    )

    results = reading.read(store.uri, sweep.run_id)
    (plot,) = critical_batch.branch_plots(results)
    names = [drawn["name"] for drawn in plot.data]
    assert names == ["branches", "lowest + 0.01", "critical batch", "noise scale"]
    assert plot.data[0]["x"] == [32, 64, 128]
    html = written.page.read_text()
    assert "Loss by effective batch" in html
    assert json.dumps(wording.finite(by_topic["critical"].figures["losses"]))
