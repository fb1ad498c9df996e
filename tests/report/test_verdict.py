"""Whether accumulating pays, in sweeps whose answer was planted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import stdtrit

from pipeline.common.sqlite_uri import absolute
from pipeline.report import verdict
from pipeline.report.findings import SweepFinding
from pipeline.report.job_results import Curve, JobResult
from pipeline.report.sweep_result import SweepResult
from pipeline.report.writer import TOPICS, summarize
from tests import synthetic

SWEEPS = 100
NOISE = 0.02  # the standard deviation of a loss over seeds
MICRO_BATCH = 8
SECONDS = 0.01  # the time for eight examples, unless a test sets another


def sweep_of(
    losses: Mapping[int, Sequence[float]],
    rule: str = "",
    seconds_by_factor: Mapping[int, float] | None = None,
) -> SweepResult:
    """Return a sweep with micro-batches of 8 whose jobs end at `losses`.

    Args:
        losses: the final loss of each seed, by factor.
        rule: the setting that the names of all jobs begin with.
        seconds_by_factor: the time for eight examples.
    """
    seconds_by_factor = seconds_by_factor or {}
    jobs = []
    for factor, losses_of_seeds in losses.items():
        batch = MICRO_BATCH * factor
        group = f"{rule} factor={factor} batch={batch}".strip()
        for seed, loss in enumerate(losses_of_seeds):
            job = synthetic.job(
                f"{group} seed={seed}",
                loss,
                factor=factor,
                batch=batch,
                seconds=seconds_by_factor.get(factor, SECONDS),
            )
            jobs.append(job)
    return synthetic.swept(jobs)


def around(mean: float, deviations: Sequence[float]) -> list[float]:
    return [mean + deviation for deviation in deviations]


def verdict_of(sweep: SweepResult) -> SweepFinding:
    (finding,) = verdict.findings(sweep)
    return finding


def recommendation(findings: list[SweepFinding]) -> SweepFinding:
    for finding in findings:
        if finding.topic == "next" and "recommended" in finding.figures:
            return finding
    raise AssertionError("nothing is recommended")


def planted(
    rng: np.random.Generator, better: int | None, effect: float
) -> dict[int, list[float]]:
    """Return losses around 2 by factor.

    Those of the factor `better` are lower by `effect`. If it is 1, all others are
    higher by that. A seed does `NOISE` to all factors, and a quarter of that to each.
    """
    shifts = {1: 0.0, 2: 0.0, 4: 0.0, 16: 0.0}
    if better == 1:
        shifts |= {2: effect, 4: effect, 16: effect}
    elif better is not None:
        shifts[better] = -effect
    seeds = int(rng.integers(3, 6))
    of_seeds = NOISE * rng.standard_normal(seeds)
    losses = {}
    for factor, shift in shifts.items():
        of_factor = NOISE / 4 * rng.standard_normal(seeds)
        losses[factor] = (2 + shift + of_seeds + of_factor).tolist()
    return losses


def test_a_planted_winner_is_found_in_nearly_all_sweeps():
    rng = np.random.default_rng(0)
    right = 0
    for number in range(SWEEPS):
        better = (1, 1, 2, 4, 16, 1)[number % 6]
        losses = planted(rng, better, NOISE * rng.uniform(4, 8))
        figures = verdict_of(sweep_of(losses)).figures
        expected_state = "not" if better == 1 else "pays"
        expected_group = f"factor={better} batch={MICRO_BATCH * better}"
        if figures["state"] == expected_state and figures["take"] == expected_group:
            right += 1
    assert right >= 0.95 * SWEEPS


def test_between_equals_it_abstains_in_nearly_all_sweeps():
    rng = np.random.default_rng(1)
    abstained = []
    for _ in range(SWEEPS):
        figures = verdict_of(sweep_of(planted(rng, None, 0))).figures
        if figures["state"] in ("few", "same") and figures["take"] is None:
            abstained.append(figures["state"])
    assert len(abstained) >= 0.9 * SWEEPS
    assert set(abstained) == {"few", "same"}


def test_the_sentence_and_its_figures():
    losses = {1: [2.0, 2.02, 1.98], 4: [1.81, 1.8, 1.79], 16: [2.1, 2.12, 2.09]}
    finding = verdict_of(sweep_of(losses, seconds_by_factor={4: 0.01}))
    figures = finding.figures["examples"]
    assert figures["factor"] == 4
    assert figures["seeds"] == 3
    assert figures["budget"] == 6144
    assert figures["difference"] == pytest.approx(-0.2)
    assert finding.figures["memory"] == pytest.approx(104 / 101)

    assert finding.text.startswith(
        "Accumulate by 4: compared with factor 1 at equal memory "
        "(micro-batches of 8, peak ×1.03)"
    )
    # The differences of factor 4 are −0.19, −0.22 and −0.19: a mean of −0.2, with a
    # standard error of 0.01. Student's quantiles with two degrees of freedom: 4.849 for
    # 98%, and for the choice among two factors 6.965 for 99%.
    expected = [-0.2 - 4.849 * 0.01, -0.2 + 6.965 * 0.01]
    assert figures["interval"] == pytest.approx(expected, abs=1e-5)
    assert (
        "at equal examples val/loss with factor 4, the best above 1, is lower by 0.2 "
        "(95% over all looks: 0.1304 to 0.2485) (3 seeds, paired). Compared after 7.68 s "
        "of training and after 6144 examples, where the shortest run ends."
    ) in finding.text

    # The differences of this one are 0.1, −0.5 and 0.1.
    open_sweep = sweep_of({1: [2.0, 2.5, 2.0], 4: [2.1, 2.0, 2.1]})
    interval = verdict_of(open_sweep).figures["examples"]["interval"]
    assert interval == pytest.approx([-0.1 - 4.849 * 0.2, -0.1 + 4.849 * 0.2], abs=2e-4)
    assert (
        "is lower by 0.1 (95% over all looks: lower by 1.07 to higher by 0.8697"
    ) in verdict_of(open_sweep).text

    equal = verdict_of(sweep_of({1: [2.0, 2.02], 4: [2.0, 2.01, 2.02]}))
    assert equal.figures["state"] in ("few", "same")


def test_the_rate_of_each_factor_is_named():
    sweep = sweep_of({1: [2.0, 2.02, 1.98], 4: [1.81, 1.8, 1.79]})
    for job in sweep.jobs:
        rates = np.array([0.001, 0.002 * job.factor, 0.001])
        job.curves["train/learning_rate"] = Curve(np.array([1, 2, 3]), rates)
    finding = verdict_of(sweep)
    assert finding.figures["rates"] == {1: 0.002, 4: 0.008}
    assert (
        " The peak learning rates were 0.002 with factor 1, 0.008 with factor 4."
    ) in finding.text


def test_the_rates_of_each_budget_are_named_where_they_differ():
    """Factor 1 is best at rate 0.01 after equal examples, and at 0.03 in equal time."""
    jobs = []
    settings = ((1, 0.01, 2.0, 0.02), (1, 0.03, 2.1, 0.01), (4, 0.03, 1.9, 0.01))
    for factor, rate, loss, seconds in settings:
        batch = MICRO_BATCH * factor
        name = f"factor={factor} rate={rate} batch={batch}"
        for seed in range(3):
            end = loss + 0.01 * seed
            job = synthetic.job(
                f"{name} seed={seed}", end, factor=factor, batch=batch, seconds=seconds
            )
            rates = np.full(3, rate)
            job.curves["train/learning_rate"] = Curve(np.array([1, 2, 3]), rates)
            jobs.append(job)
    finding = verdict_of(synthetic.swept(jobs))
    assert finding.figures["seconds"]["rates"] == {1: 0.03, 4: 0.03}
    assert finding.figures["examples"]["rates"] == {1: 0.01, 4: 0.03}
    assert (
        " The peak learning rates: at equal time 0.03 with factor 1, 0.03 with factor "
        "4; at equal examples 0.01 with factor 1, 0.03 with factor 4."
    ) in finding.text


@pytest.mark.parametrize("status", ["NO RUN", "RUNNING", "KILLED"])
def test_there_is_no_verdict_while_a_job_that_it_compares_is_missing(status):
    sweep = sweep_of({1: [2.0, 2.01, 2.02], 4: [1.5, 1.51, 1.52], 16: [1.9, 1.91, 1.9]})
    jobs = []
    for job in sweep.jobs:
        if status == "NO RUN" and job.factor == 16:
            job = JobResult(job.name)
        elif job.name == "factor=16 batch=128 seed=2":
            job = replace(job, status=status)
        jobs.append(job)
    findings = summarize(synthetic.swept(jobs))
    assert findings[0].text.startswith("No verdict yet, as ")
    assert "factor=16 batch=128 seed=2" in findings[0].text
    assert findings[0].figures == {}
    for finding in findings:
        assert "recommended" not in finding.figures
        assert "Accumulate" not in finding.text
        assert "Do not accumulate" not in finding.text


def test_a_missing_job_of_another_recipe_does_not_delay_a_verdict():
    none = sweep_of({1: [2.0, 2.01], 4: [2.5, 2.52]}, "scaling=none")
    root = sweep_of({1: [2.0, 2.01], 4: [2.5, 2.52]}, "scaling=sqrt")
    open_jobs = [*root.jobs[:-1], JobResult(root.jobs[-1].name)]
    of_none, of_root = verdict.findings(synthetic.swept(none.jobs + open_jobs))
    assert of_none.figures["recipe"] == "scaling=none"
    assert of_root.text.startswith("scaling=sqrt: No verdict yet, as 1 job ")


def test_seeds_are_added_to_the_settings_that_the_verdict_asks_for():
    """Factor 16 is far from the others, and scaling=sqrt is clear."""
    noise = [-0.02, 0.02, 0.0]
    losses = {1: [2.0] * 3, 4: around(1.96, noise), 16: around(3, noise)}
    none = sweep_of(losses, "scaling=none")
    root = sweep_of({1: [2.0] * 3, 4: around(1, noise), 16: [3.0] * 3}, "scaling=sqrt")
    varied = ["scaling", "accumulation.factor", "seed"]
    sweep = replace(synthetic.swept(none.jobs + root.jobs), varied=varied)
    of_none, of_root = verdict.findings(sweep)
    assert of_none.figures["state"] == "few"
    assert "more seeds of factors 1 and 4 would tell" in of_none.text
    assert of_none.figures["command"].endswith(
        " seed=0,1,2,3,4,5,6 'scaling=choice(none)' accumulation.factor=1,4"
    )
    assert of_root.figures["command"] == ""


def test_seeds_of_some_factors_are_one_more_look():
    losses = {
        1: [2.0, 2.02, 1.98, 2.0],
        4: [1.8, 1.8, 1.79, 1.79],
        16: [3.0, 3.01, 3.0],
    }
    sweep = sweep_of(losses)
    first = verdict_of(sweep).figures["examples"]["interval"]
    again = verdict_of(replace(sweep, looks=(3,))).figures["examples"]["interval"]
    assert again[1] - again[0] > first[1] - first[0]


def test_two_seeds_have_an_interval_and_the_number_that_would_tell():
    """Differences of −0.1 and −0.12: a mean of −0.11 with an error of 0.01."""
    finding = verdict_of(sweep_of({1: [2.0, 2.5], 4: [1.9, 2.38]}))
    figures = finding.figures["examples"]
    half = float(stdtrit(1, 0.98)) * 0.01
    assert figures["interval"] == pytest.approx([-0.11 - half, -0.11 + half])
    assert half > 0.11
    assert figures["state"] == "few"
    assert figures["more"] == 1
    assert "1 more seed of factors 1 and 4 would tell" in finding.text
    uri = absolute("sqlite:///none.db")
    assert finding.text.endswith(f"tracking.uri={uri} seed=0,1,2")
    assert "To add seeds: pipeline sweep made --again 0000" in finding.text


def test_more_seeds_are_one_more_look():
    """The second verdict on a sweep may err in 0.8%, after 4% for the first."""
    losses = {1: [2.0, 2.02, 1.98, 2.0], 4: [1.81, 1.8, 1.79, 1.79]}
    sweep = sweep_of(losses)
    first = verdict_of(sweep).figures["examples"]["interval"]
    again = verdict_of(replace(sweep, looks=(4,))).figures["examples"]["interval"]
    second = verdict_of(replace(sweep, looks=(3, 4))).figures["examples"]["interval"]
    assert first == again
    ratio = (second[1] - second[0]) / (first[1] - first[0])
    expected = float(stdtrit(3, 1 - 0.004) / stdtrit(3, 1 - 0.02))
    assert ratio == pytest.approx(expected)


def test_the_draws_are_the_same_every_time():
    losses = planted(np.random.default_rng(2), 4, 0.1)
    assert verdict_of(sweep_of(losses)) == verdict_of(sweep_of(losses))


def test_the_seeds_that_are_missing_would_have_told():
    """With so many more of the same mean and deviation the verdict is decided.

    With one less it is not.
    """
    deviations = np.array([-0.02, 0.02, 0.0])

    def half_width(seeds: int) -> float:
        return float(stdtrit(seeds - 1, 1 - 0.004)) * 0.02 / math.sqrt(seeds)

    undecided = 0
    for difference in (0.02, 0.03, 0.04):
        losses = {1: [2.0] * 3, 4: (2 - difference + deviations).tolist()}
        figures = verdict_of(sweep_of(losses)).figures["examples"]
        if figures["state"] == "few":
            undecided += 1
            seeds = 3 + figures["more"]
            assert half_width(seeds) < difference <= half_width(seeds - 1)
    assert undecided >= 2

    losses = {1: [2.0] * 3, 4: (1.96 + deviations).tolist()}
    text = verdict_of(sweep_of(losses)).text
    assert text.startswith("There are not enough seeds to tell: ")
    assert "more seeds of factors 1 and 4 would tell)" in text


def test_one_seed_asks_for_two_more_and_has_no_word_of_chance():
    sweep = sweep_of({1: [2.0], 4: [1.0]})
    finding = verdict_of(sweep)
    for every_finding in summarize(sweep):
        assert "chance" not in every_finding.text
    assert finding.figures["state"] == "few"
    assert finding.figures["examples"]["more"] == 2
    assert (
        "is lower by 1 (one seed; 2 more seeds of factors 1 and 4 would show how far "
        "seeds vary) and"
    ) in finding.text


def test_a_difference_that_would_take_too_many_seeds_is_within_them():
    finding = verdict_of(sweep_of({1: [2.0, 2.1, 1.9], 4: [2.02, 2.08, 1.905]}))
    assert finding.text.startswith(
        "Accumulating makes no difference beyond the variation over seeds: "
    )
    assert finding.figures["state"] == "same"

    equal = verdict_of(sweep_of({1: [2.0, 2.0], 4: [2.0, 2.0]}))
    assert equal.figures["state"] == "same"
    assert equal.figures["examples"]["interval"] == [0, 0]


@pytest.mark.parametrize("seeds", [3, 6, 12])
def test_seeds_that_change_nothing_are_not_asked_for_again(seeds):
    finding = verdict_of(sweep_of({1: [2.0] * seeds, 4: [1.5] * seeds}))
    figures = finding.figures["examples"]
    assert figures["state"] == "unvaried"
    assert figures["more"] == 0
    assert finding.figures["command"] == ""
    assert finding.figures["take"] is None
    assert finding.text.startswith(
        "The effect of chance is unknown, as the results do not vary over the seeds: "
    )
    assert "more seed" not in finding.text


def test_equal_examples_and_equal_time_may_differ():
    """Factor 4 takes half the time of factor 1.

    First it learns as much from an example; then less, but still more in a second.
    """
    noise = [-0.002, 0, 0.002]
    half_the_time = {4: 0.005}
    losses = {1: around(2, noise), 4: around(2, noise)}
    figures = verdict_of(sweep_of(losses, seconds_by_factor=half_the_time)).figures
    assert figures["examples"]["state"] == "same"
    assert figures["seconds"]["state"] == "pays"
    # Half of the way from 5 to 2.
    assert figures["seconds"]["difference"] == pytest.approx(-1.5)

    losses = {1: around(2, noise), 4: around(2.5, noise)}
    less = verdict_of(sweep_of(losses, seconds_by_factor=half_the_time))
    assert less.figures["state"] == "depends"
    assert less.text.startswith("Accumulate by 4 only if you are short of time: ")
    # Time decides what to take.
    assert less.figures["take"] == "factor=4 batch=32"
    sweep = sweep_of(losses, seconds_by_factor=half_the_time)
    assert recommendation(summarize(sweep)).text.startswith(
        "On this machine take factor=4 batch=32: the verdict on accumulating "
        "recommends it at equal time. By its final val/loss factor=1 batch=8 is better."
    )


def test_what_was_not_logged_at_the_end_is_not_compared():
    losses = {1: [2.0, 2.01, 2.02], 4: [1.8, 1.81, 1.82]}
    sweep = sweep_of(losses)
    curves = sweep.jobs[-1].curves
    for key in ("train/examples_seen", "perf/update_seconds"):
        curves[key] = Curve(curves[key].steps[:-1], curves[key].values[:-1])
    figures = verdict_of(sweep).figures
    assert figures["examples"]["budget"] == 5 * 1024
    assert figures["examples"]["difference"] == pytest.approx(-0.2 * 5 / 6)

    sweep = sweep_of(losses)
    for job in sweep.jobs:
        del job.curves["perf/update_seconds"]
        del job.curves["perf/peak_memory_bytes"]
    finding = verdict_of(sweep)
    assert "seconds" not in finding.figures
    assert (
        "at equal memory (micro-batches of 8), at equal time nothing can be said, as "
        "no job logged its time and at equal examples val/loss"
    ) in finding.text


def test_why_nothing_is_said_at_equal_examples():
    """With equal updates, factor 1 has ended before factor 64 is evaluated."""
    jobs = []
    for seed in range(3):
        jobs.append(synthetic.job(f"factor=1 seed={seed}", 2 + 0.01 * seed))
        name = f"factor=64 seed={seed}"
        large = synthetic.job(name, 1.5 + 0.02 * seed, factor=64, batch=512)
        for key in ("train/examples_seen", "perf/update_seconds"):
            large.curves[key].values[:] *= 64
        jobs.append(large)
    sweep = synthetic.swept(jobs)
    finding = verdict_of(sweep)
    reason = (
        "factor=64 had no val/loss yet when the shortest run ended, after 6144 examples"
    )
    assert f"at equal examples nothing can be said, as {reason}" in finding.text
    assert finding.figures == {}

    # The ends are ranked all the same, and the reader is told.
    findings = summarize(sweep)
    final = next(finding for finding in findings if finding.topic == "final")
    assert final.text.endswith(
        " These results are not after equal numbers of examples: the groups saw from "
        "6144 to 393216."
    )
    assert final.figures["horizons"] == {"factor=1": 6144, "factor=64": 393216}


def test_a_factor_without_a_loss_at_the_budget_is_named():
    sweep = sweep_of({1: [2.0, 2.01, 2.02], 4: [1.8, 1.82, 1.82], 16: [1.5, 1.6, 1.5]})
    for job in sweep.jobs:
        if job.factor == 16:
            job.curves["train/examples_seen"].values[:] += 10_000
    figures = verdict_of(sweep).figures["examples"]
    assert figures["factor"] == 4
    assert ", while factor=16 batch=128 had no val/loss yet (3 seeds" in (
        verdict_of(sweep).text
    )

    # One that diverged was evaluated.
    for job in sweep.jobs:
        if job.factor == 16:
            job.curves["train/examples_seen"].values[:] -= 10_000
            job.curves["val/loss"].values[:] = math.nan
    assert ", while factor=16 batch=128 had no finite val/loss and" in (
        verdict_of(sweep).text
    )


def test_a_search_has_no_verdict_on_its_factors():
    sweep = sweep_of({1: [2.0, 2.01, 2.02], 4: [1.8, 1.82, 1.82]})
    assert verdict_of(sweep).figures["state"] == "pays"
    finding = verdict_of(replace(sweep, search=True))
    assert finding.figures == {}
    assert finding.text.startswith("No verdict on the factors of a search")


def test_each_scaling_rule_has_a_verdict():
    noise = [-0.01, 0, 0.01]
    none = sweep_of({1: around(2, noise), 4: around(2.3, noise)}, "scaling=none")
    root = sweep_of({1: around(2, noise), 4: around(1.8, noise)}, "scaling=sqrt")
    of_none, of_root = verdict.findings(synthetic.swept(none.jobs + root.jobs))
    assert of_none.figures["recipe"] == "scaling=none"
    assert of_none.figures["state"] == "not"
    assert of_root.figures["recipe"] == "scaling=sqrt"
    assert of_root.figures["state"] == "pays"
    assert of_none.text.startswith(
        "scaling=none: Do not accumulate: compared with factor 1 at equal memory"
    )


def test_each_factor_is_taken_at_its_best_rate():
    loss_by_factor_and_rate = {
        (1, 0.01): 2.0,
        (1, 0.1): 3.0,
        (4, 0.01): 2.5,
        (4, 0.1): 1.5,
    }
    jobs = []
    for (factor, rate), loss in loss_by_factor_and_rate.items():
        for seed in range(3):
            name = f"rate={rate} factor={factor} seed={seed}"
            batch = MICRO_BATCH * factor
            end = loss + 0.01 * seed
            jobs.append(synthetic.job(name, end, factor=factor, batch=batch))
    figures = verdict_of(synthetic.swept(jobs)).figures["examples"]
    assert figures["groups"] == ["rate=0.01 factor=1", "rate=0.1 factor=4"]
    assert figures["difference"] == pytest.approx(-0.5)


@pytest.mark.parametrize(("better", "shift"), [(1, 0.3), (4, -0.3)])
def test_it_comes_first_and_what_is_next_agrees_with_it(better, shift):
    noise = [-0.01, 0, 0.01]
    losses = {1: around(2, noise), 4: around(2 + shift, noise)}
    findings = summarize(sweep_of(losses))
    assert findings[0].topic == "verdict"
    assert next(iter(TOPICS)) == "verdict"
    group = f"factor={better} batch={MICRO_BATCH * better}"
    assert recommendation(findings).figures["recommended"] == group
    assert recommendation(findings).text.startswith(
        f"On this machine take {group}: the verdict on accumulating recommends it"
    )
    # One reason is enough, and no other one weakens it.
    assert "reached the target first" not in recommendation(findings).text
    assert "chance" not in recommendation(findings).text


def test_what_reaches_the_target_first_is_not_recommended_against_the_verdict():
    """Factor 4 falls faster at first, and ends higher.

    The lowest loss that all reach is that of factor 4.
    """
    jobs = []
    for seed in range(3):
        jobs.append(synthetic.job(f"factor=1 seed={seed}", 2 + 0.01 * seed))
        end = 2.4 + 0.01 * seed
        fast = synthetic.job(f"factor=4 seed={seed}", end, factor=4, batch=32)
        fast.curves["val/loss"].values[:] = [4.9] + [end] * 5
        jobs.append(fast)
    findings = summarize(synthetic.swept(jobs))
    assert recommendation(findings).figures["recommended"] == "factor=1"
    assert recommendation(findings).text.startswith(
        "On this machine take factor=1: the verdict on accumulating recommends it, "
        "though factor=4 reached the target first."
    )


def test_a_better_final_result_is_named_unless_chance_may_explain_it():
    """Rate 2 takes far less time, and ends a little worse."""
    for noise, is_named in (([-0.4, 0, 0.3], False), ([-0.01, 0, 0.01], True)):
        jobs = []
        for seed, end in enumerate(around(2.2, noise)):
            jobs.append(synthetic.job(f"rate=1 seed={seed}", 2.0))
            fast = synthetic.job(f"rate=2 seed={seed}", end, seconds=0.001)
            jobs.append(fast)
        chosen = recommendation(summarize(synthetic.swept(jobs)))
        assert chosen.figures["recommended"] == "rate=2"
        is_better = "By its final val/loss rate=1 is better."
        assert (is_better in chosen.text) is is_named
        by_chance = "rate=1 ends best by val/loss, but the difference is within chance."
        assert (by_chance in chosen.text) is not is_named


def test_without_a_twin_of_equal_memory_nothing_is_claimed():
    jobs = []
    for factor in (1, 4):
        for seed in range(3):
            name = f"factor={factor} seed={seed}"
            loss = 2 - 0.1 * factor
            jobs.append(synthetic.job(name, loss, factor=factor, batch=64))
    finding = verdict_of(synthetic.swept(jobs))
    assert finding.figures == {}
    assert (
        "this takes jobs with factor 1 and with a larger factor, of one micro-batch size"
    ) in finding.text
    assert (
        "while factor 1 has micro-batches of 64, and larger factors of 16."
    ) in finding.text
    assert not list(verdict.findings(sweep_of({1: [2.0, 2.1]})))


def test_why_coupled_settings_are_not_compared():
    """A group of the config sets the factor together with the rate."""
    small = sweep_of({1: [2.0, 2.1]}, "arm=small")
    large = sweep_of({4: [1.0, 1.1]}, "arm=large")
    finding = verdict_of(synthetic.swept(small.jobs + large.jobs))
    assert finding.text.endswith(
        "that finished with a loss, while jobs with factor 1 and jobs with larger "
        "factors differ in arm, too: sweep accumulation.factor and "
        "optimizer.learning_rate as separate keys."
    )


def test_a_setting_of_which_a_seed_failed_is_not_recommended():
    """The other two seeds alone would be the best."""
    losses = {1: [2.0, 2.01, 2.02], 4: [1.5, 1.51, 1.52], 16: [1.9, 1.91, 1.92]}
    sweep = sweep_of(losses)
    four = "factor=4 batch=32"
    assert verdict_of(sweep).figures["take"] == four

    jobs = []
    for job in sweep.jobs:
        if job.name == f"{four} seed=1":
            job = replace(job, status="FAILED")
        jobs.append(job)
    finding = verdict_of(synthetic.swept(jobs))
    assert finding.figures["take"] == "factor=16 batch=128"
    assert finding.text.endswith(f" Left out, as not every seed finished: {four}.")
