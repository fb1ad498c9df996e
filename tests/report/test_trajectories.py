"""Whether jobs that should train one trajectory do so, on losses that were planted."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.report import next_steps, reading, writer
from pipeline.report.findings import SweepFinding
from pipeline.report.job_results import Curve, JobResult
from pipeline.report.trajectories import same_trajectory
from tests import synthetic
from tests.synthetic import PlantedSweep

# The only two jobs of most sweeps here.
FACTORS = ["factor=1", "factor=2"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return synthetic.store(tmp_path_factory.mktemp("store"))


def finding_of(sweep: PlantedSweep) -> SweepFinding:
    (finding,) = same_trajectory(reading.read(sweep.store.uri, sweep.run_id))
    return finding


@pytest.mark.slow
def test_float32_trajectories_part_where_they_were_made_to(store):
    finding = finding_of(synthetic.at_fixed_batch(store, "float32"))
    figures = finding.figures
    assert figures["above"] == {"1e-6": 26, "1e-3": 98, "1e-2": None}
    assert figures["first"] == pytest.approx(1e-7, rel=1e-6)
    assert figures["largest"] == pytest.approx(1e-7 * 1.1**119, rel=1e-9)
    assert figures["at"] == 120
    assert figures["pairs"] == 2
    assert figures["updates"] == 120
    assert not figures["agree"]
    assert figures["rounding"]
    assert "amplified that 84281 times" in finding.text


@pytest.mark.parametrize(
    ("tags", "agree"), [({}, False), ({"float32.in_tf32": "true"}, True)]
)
def test_the_bounds_of_tf32_apply_where_a_job_computed_in_it(store, tags, agree):
    sweep = PlantedSweep(store, FACTORS)
    loss = 2 * 0.9 ** np.arange(10)
    sweep.job("factor=1", {"train/loss": loss})
    sweep.job("factor=2", {"train/loss": loss * 1.003}, factor=2, tags=tags)
    finding = finding_of(sweep)
    assert finding.figures["agree"] is agree
    assert finding.text.startswith("In float32 with TF32, ") is agree


def test_the_bound_of_rounding_doubles_with_each_update(store):
    # Each is a little below the bound: 1e-5, 2e-5, 4e-5, 8e-5 and 16e-5.
    differences = np.array([0.9e-5, 1.9e-5, 3.9e-5, 7.9e-5, 15e-5])
    losses = 2 * 0.9 ** np.arange(5)
    losses_of_other = losses * (1 - differences)
    sweep = PlantedSweep(store, FACTORS)
    sweep.job("factor=1", {"train/loss": losses})
    sweep.job("factor=2", {"train/loss": losses_of_other}, factor=2)
    finding = finding_of(sweep)
    assert finding.figures["agree"]


def test_what_differs_at_the_first_update_is_not_called_rounding(store):
    sweep = PlantedSweep(store, FACTORS)
    layers = {"model.batch_dependent_layers": "batch_normalization"}
    loss = 2 * 0.9 ** np.arange(10)
    sweep.job("factor=1", {"train/loss": loss}, tags=layers)
    sweep.job("factor=2", {"train/loss": loss * 1.01}, factor=2, tags=layers)
    finding = finding_of(sweep)
    assert not finding.figures["rounding"]
    assert finding.figures["above"] == {"1e-6": 1, "1e-3": 1, "1e-2": None}
    assert "depends on the micro-batch: batch_normalization." in finding.text
    assert "amplified it" not in finding.text


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        ({"seed": 1}, "seed (0, 1)"),
        ({"batch": 32}, "effective batch (64, 32)"),
        (
            {"params": {"optimizer.learning_rate": 0.2}},
            "optimizer.learning_rate (0.1, 0.2)",
        ),
        (
            {
                "params": {
                    "optimizer.learning_rate": 0.1,
                    "accumulation.same_noise": 0.2,
                }
            },
            "accumulation.same_noise (none, 0.2)",
        ),
    ],
)
def test_only_equal_configs_are_compared(store, differs, named):
    sweep = PlantedSweep(store, ["one", "other"])
    common = {"params": {"optimizer.learning_rate": 0.1}}
    sweep.job("one", {"train/loss": [2, 1]}, **common)
    sweep.job("other", {"train/loss": [2, 1]}, **(common | differs))
    finding = finding_of(sweep)
    assert finding.figures == {}
    assert finding.text == (
        "Trajectories cannot be compared: no two of 2 jobs share effective batch, seed "
        f"and the rest of the config; they differ in {named}."
    )


def test_why_a_sweep_without_two_losses_is_not_compared_has_figures(store):
    sweep = PlantedSweep(store, ["one", "other"])
    sweep.job("one", {"train/loss": [2, 1]})
    assert finding_of(sweep).text == (
        "Trajectories cannot be compared: it takes two jobs with a training loss, and "
        "1 of 2 jobs logged one."
    )
    sweep.job("other", {"val/loss": {1: 2}}, factor=2)
    assert finding_of(sweep).text.endswith("1 of 2 jobs logged one.")


def test_a_sweep_of_no_equal_trajectories_has_no_word_of_them():
    def topics(*names: str) -> set[str]:
        jobs = [JobResult(name) for name in names]
        return {finding.topic for finding in writer.summarize(synthetic.swept(jobs))}

    assert "trajectories" not in topics("rate=0.1 seed=0", "rate=0.2 seed=0")
    assert "trajectories" not in topics("factor=1 batch=8", "factor=2 batch=16")
    assert "trajectories" in topics("factor=1 rate=0.1", "factor=2 rate=0.1")


def test_jobs_of_one_config_without_a_common_update_are_not_compared(store):
    sweep = PlantedSweep(store, ["one", "other"])
    sweep.job("one", {"train/loss": {1: 2}})
    sweep.job("other", {"train/loss": {2: 1}}, factor=2)
    assert "no update was logged by two jobs that share" in finding_of(sweep).text


def test_hardware_and_logging_do_not_keep_jobs_apart(store):
    sweep = PlantedSweep(store, ["one", "other"])
    params = {"hardware.replicas": 1, "tracking.log_every": 1}
    sweep.job("one", {"train/loss": [2, 1]}, params=params)
    params = {"hardware.replicas": 2, "tracking.log_every": 2}
    sweep.job("other", {"train/loss": {2: 1}}, params=params)
    finding = finding_of(sweep)
    assert finding.figures["largest"] == 0
    assert finding.figures["updates"] == 1
    assert "of equal effective batch, seed and config train the same" in finding.text


def test_what_else_differs_between_jobs_of_one_trajectory_is_named(store):
    sweep = PlantedSweep(store, ["one", "other"])
    for name, compiled in (("one", "false"), ("other", "true")):
        sweep.job(name, {"train/loss": [2, 1]}, params={"hardware.xla": compiled})
    text = finding_of(sweep).text
    assert "seed and config (but for hardware.xla) train the same" in text


def test_rounding_that_starts_after_the_first_update_has_its_amplification(store):
    losses = 2 * 0.99 ** np.arange(30)
    # Both are bit-identical for two updates.
    amplified = 1e-7 * 1.5 ** np.arange(28)
    differences = np.concatenate([[0, 0], amplified])
    losses_of_other = losses * (1 - differences)
    sweep = PlantedSweep(store, FACTORS)
    sweep.job("factor=1", {"train/loss": losses})
    sweep.job("factor=2", {"train/loss": losses_of_other}, factor=2)
    finding = finding_of(sweep)
    # Of 1e-7 of a loss three digits are left.
    assert finding.figures["amplified"] == pytest.approx(1.5**27, rel=1e-3)
    assert "at most 0 of their value at the first update" in finding.text
    assert (
        "apart by 1e-7 at update 3, and training amplified that 56815 times"
    ) in finding.text


def pair_of(
    apart: np.ndarray, precision: str = "float32", steps: np.ndarray | None = None
) -> SweepFinding:
    """Return the finding on two jobs whose losses have these relative differences."""
    if steps is None:
        steps = np.arange(1, len(apart) + 1)
    losses = 2 * 0.99**steps
    return finding_on(losses, losses * (1 - apart), steps, precision)


def finding_on(
    losses: np.ndarray,
    other_losses: np.ndarray,
    steps: np.ndarray,
    precision: str = "float32",
) -> SweepFinding:
    """Return the finding on two jobs with these losses, of factors 1 and 2."""
    jobs = []
    for factor, values in ((1, losses), (2, other_losses)):
        job = JobResult(
            f"factor={factor}",
            params={"hardware.precision": precision},
            curves={"train/loss": Curve(steps, values)},
            factor=factor,
            effective_batch_size=64,
        )
        jobs.append(job)
    (finding,) = same_trajectory(synthetic.swept(jobs))
    return finding


@pytest.mark.parametrize(
    ("precision", "before"),
    [("float32", 0.0), ("float32", 1e-7), ("float64", 0.0), ("float64", 1e-14)],
)
def test_a_sudden_jump_is_not_called_rounding(precision, before):
    """Equal or nearly so for 49 updates, then 0.3 apart, as of other examples."""
    apart = np.full(60, before)
    apart[49:] = 0.3
    finding = pair_of(apart, precision)
    assert finding.figures["rounding"] is False
    assert finding.figures["by_rounding"] == 0
    assert "amplified" not in finding.figures
    assert "differ by 0.3 at update 50, so the jobs computed different things" in (
        finding.text
    )
    assert not list(next_steps._run_in_float64([finding]))


def test_losses_that_are_zero_but_for_rounding_do_not_jump():
    """Of a batch that is learned by heart: 0 in one job, and 1e-8 in the other."""
    losses = 2 * 0.7 ** np.arange(60)
    losses[50] = 0.0
    other_losses = losses.copy()
    other_losses[50] = 1e-8
    steps = np.arange(1, 61)
    finding = finding_on(losses, other_losses, steps)
    assert finding.figures["largest"] == 1
    assert finding.figures["rounding"] is True


def test_a_loss_that_is_suddenly_not_finite_is_not_called_rounding():
    apart = np.zeros(60)
    apart[49:] = np.nan
    finding = pair_of(apart)
    assert finding.figures["rounding"] is False
    assert (
        "factor=1 and factor=2 are equal up to update 49, and only one of them is "
        "finite at update 50"
    ) in finding.text


def test_a_difference_whose_begin_was_not_logged_has_no_known_cause():
    steps = np.arange(20, 121, 20)
    finding = pair_of(np.full(6, 0.01), steps=steps)
    assert finding.figures["rounding"] is None
    assert finding.figures["by_rounding"] == 0
    assert "is not known, because not every earlier update was logged" in finding.text
    # Rows that are missing later hide no jump.
    amplified = pair_of(1e-7 * 1.15**steps, steps=steps)
    assert amplified.figures["rounding"] is True


def test_what_was_not_logged_is_not_called_more_than_rounding(store):
    # As with tracking.log_every=20.
    steps = np.arange(20, 121, 20)
    losses = 2 * 0.99**steps
    differences = 1e-7 * 1.1**steps
    losses_of_other = losses * (1 - differences)

    sweep = PlantedSweep(store, FACTORS)
    curve = dict(zip(steps.tolist(), losses, strict=True))
    sweep.job("factor=1", {"train/loss": curve}, factor=1)
    curve = dict(zip(steps.tolist(), losses_of_other, strict=True))
    sweep.job("factor=2", {"train/loss": curve}, factor=2)
    finding = finding_of(sweep)
    assert "at update 20, the first that was logged" in finding.text
    assert "more than rounding" not in finding.text
    assert finding.figures["rounding"]
