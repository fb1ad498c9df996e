"""Whether accumulating pays, of sweeps whose answer was planted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import stdtrit

from pipeline.report import statistics, verdict
from pipeline.report.comparison import Comparison
from pipeline.report.findings import Finding
from pipeline.report.job_results import Curve
from pipeline.report.writer import summarize
from tests import synthetic

SWEEPS, NOISE = 200, 0.02  # the standard deviation of a loss over seeds


def sweep_of(
    losses: Mapping[int, Sequence[float]], rule: str = "", **seconds: float
) -> Comparison:
    """Return a sweep with micro-batches of 8 whose jobs end at `losses`, by factor and seed."""
    names = {f: f"{rule} factor={f} batch={8 * f}".strip() for f in losses}
    return synthetic.swept(
        [
            synthetic.job(
                f"{names[f]} seed={i}",
                loss,
                factor=f,
                batch=8 * f,
                seconds=seconds.get(f"of{f}", 0.01),
            )
            for f, of in losses.items()
            for i, loss in enumerate(of)
        ]
    )


def verdict_of(sweep: Comparison) -> Finding:
    (finding,) = verdict.findings(sweep)
    return finding


def planted(
    rng: np.random.Generator, better: int | None, effect: float
) -> dict[int, list[float]]:
    """Return losses around 2: those of the factor `better` are lower by `effect`; if it is 1, all others are higher."""
    by = {1: 0.0, 2: 0.0, 4: 0.0, 16: 0.0}
    if better is not None:
        by = {
            f: effect * (f != 1) if better == 1 else -effect * (f == better) for f in by
        }
    seeds = int(rng.integers(3, 6))
    return {f: (2 + by[f] + NOISE * rng.standard_normal(seeds)).tolist() for f in by}


def test_a_planted_winner_is_found_in_nearly_all_sweeps():
    rng, right = np.random.default_rng(0), 0
    for number in range(SWEEPS):
        better = (1, 1, 2, 4, 16, 1)[number % 6]
        figures = verdict_of(
            sweep_of(planted(rng, better, NOISE * rng.uniform(4, 8)))
        ).figures
        expected = (
            "not" if better == 1 else "pays",
            f"factor={better} batch={8 * better}",
        )
        right += (figures["state"], figures["take"]) == expected
    assert right >= 0.95 * SWEEPS


def test_between_equals_it_abstains_in_nearly_all_sweeps():
    rng = np.random.default_rng(1)
    states = [
        verdict_of(sweep_of(planted(rng, None, 0))).figures for _ in range(SWEEPS)
    ]
    abstained = [
        of["state"]
        for of in states
        if of["state"] in ("few", "same") and of["take"] is None
    ]
    assert len(abstained) >= 0.9 * SWEEPS
    assert set(abstained) == {"few", "same"}


def test_what_is_said_with_figures():
    finding = verdict_of(
        sweep_of(
            {1: [2.0, 2.02, 1.98], 4: [1.8, 1.82, 1.78], 16: [2.1, 2.12, 2.08]},
            of4=0.01,
        )
    )
    figures = finding.figures["examples"]
    assert (figures["factor"], figures["seeds"], figures["budget"]) == (4, 3, 6144)
    assert figures["difference"] == pytest.approx(-0.2)
    assert finding.figures["memory"] == pytest.approx(104 / 101)
    least, most = (statistics.number(0.2 + sign * figures["half"]) for sign in (-1, 1))
    assert finding.text.startswith(
        "Accumulate by 4: compared with factor 1 at equal memory (micro-batches of 8, peak ×1.03)"
    )
    assert (
        f"at equal examples val/loss with factor 4, the best above 1, is lower by 0.2 (95%: {least} to {most}) (3 seeds"
        in finding.text
    )
    # three groups of three, each with a deviation of 0.02: about Dunnett's quantile for two differences, 2.86
    assert figures["half"] == pytest.approx(2.86 * 0.02 * math.sqrt(2 / 3), rel=0.15)
    assert verdict_of(sweep_of({1: [2.0, 2.02], 4: [2.0, 2.01, 2.02]})).figures[
        "state"
    ] in ("few", "same")


def test_the_draws_are_the_same_every_time():
    losses = planted(np.random.default_rng(2), 4, 0.1)
    assert verdict_of(sweep_of(losses)) == verdict_of(sweep_of(losses))


def test_the_interval_of_a_bootstrap_is_about_that_of_student():
    rng, n = np.random.default_rng(3), 5
    quantiles = [
        statistics.differences(rng.standard_normal((2, n)).tolist())[2]
        for _ in range(50)
    ]
    assert np.median(quantiles) == pytest.approx(stdtrit(2 * (n - 1), 0.975), rel=0.1)
    assert statistics.differences([[1.0], [2.0]])[2] == math.inf


def test_the_seeds_that_are_missing_would_have_told():
    """With so many more of the same mean and deviation the verdict is decided, with one less it is not."""
    pair, asked = np.array([-0.02, 0.02]), 0
    for by in (0.02, 0.03, 0.04):
        few = verdict_of(
            sweep_of({1: (2 + pair).tolist(), 4: (2 - by + pair).tolist()})
        ).figures["examples"]
        if few["state"] == "few":
            asked += 1
            deviation = float(pair.std(ddof=1))

            def half(n: int, deviation: float = deviation) -> float:
                return float(stdtrit(2 * (n - 1), 0.975)) * deviation * math.sqrt(2 / n)

            assert half(2 + few["more"]) < by <= half(2 + few["more"] - 1)
    assert asked >= 2
    text = verdict_of(
        sweep_of({1: (2 + pair).tolist(), 4: (1.96 + pair).tolist()})
    ).text
    assert text.startswith("There are not enough seeds to tell: ")
    assert "more seeds of factors 1 and 4 would tell)" in text


def test_one_seed_asks_for_two_more_and_claims_nothing():
    finding = verdict_of(sweep_of({1: [2.0], 4: [1.0]}))
    assert (finding.figures["state"], finding.figures["examples"]["more"]) == ("few", 2)
    assert (
        "is lower by 1 (chance unknown; 2 more seeds of factors 1 and 4 would tell)"
        in finding.text
    )


def test_a_difference_that_would_take_too_many_seeds_is_within_them():
    finding = verdict_of(sweep_of({1: [2.0, 2.1, 1.9], 4: [2.001, 2.1, 1.9]}))
    assert finding.text.startswith(
        "Accumulating makes no difference within the seeds: "
    )
    assert finding.figures["state"] == "same"
    equal = verdict_of(sweep_of({1: [2.0, 2.0], 4: [2.0, 2.0]}))
    assert (equal.figures["state"], equal.figures["examples"]["half"]) == ("same", 0)


def test_equal_examples_and_equal_time_may_differ():
    """Factor 4 learns as much from an example as factor 1, in half the time; then less, but still more in a second."""
    noise = np.array([-0.002, 0, 0.002])
    as_much = sweep_of({1: (2 + noise).tolist(), 4: (2 + noise).tolist()}, of4=0.005)
    figures = verdict_of(as_much).figures
    assert [figures[of]["state"] for of in ("examples", "seconds")] == ["same", "pays"]
    assert figures["seconds"]["difference"] == pytest.approx(
        -1.5
    )  # half of the way from 5 to 2
    less = verdict_of(
        sweep_of({1: (2 + noise).tolist(), 4: (2.5 + noise).tolist()}, of4=0.005)
    )
    assert less.figures["state"] == "depends"
    assert less.text.startswith("Accumulate by 4 only if time is what you lack: ")
    assert less.figures["take"] == "factor=4 batch=32"  # by time


def test_what_was_not_logged_at_the_end_is_not_compared():
    sweep = sweep_of({1: [2.0, 2.01, 2.02], 4: [1.8, 1.81, 1.82]})
    for key in ("train/examples_seen", "perf/update_seconds"):
        curve = sweep.jobs[-1].curves[key]
        sweep.jobs[-1].curves[key] = Curve(curve.steps[:-1], curve.values[:-1])
    figures = verdict_of(sweep).figures
    assert figures["examples"]["budget"] == 5 * 1024
    assert figures["examples"]["difference"] == pytest.approx(-0.2 * 5 / 6)
    sweep = sweep_of({1: [2.0, 2.01, 2.02], 4: [1.8, 1.81, 1.82]})
    for job in sweep.jobs:
        del job.curves["perf/update_seconds"], job.curves["perf/peak_memory_bytes"]
    finding = verdict_of(sweep)
    assert "seconds" not in finding.figures
    assert (
        "at equal memory (micro-batches of 8), at equal examples val/loss"
        in finding.text
    )


def test_each_scaling_rule_has_a_verdict():
    noise = np.array([-0.01, 0, 0.01])
    none = sweep_of(
        {1: (2 + noise).tolist(), 4: (2.3 + noise).tolist()}, "scaling=none"
    )
    root = sweep_of(
        {1: (2 + noise).tolist(), 4: (1.8 + noise).tolist()}, "scaling=sqrt"
    )
    both = list(verdict.findings(synthetic.swept(none.jobs + root.jobs)))
    assert [(f.figures["recipe"], f.figures["state"]) for f in both] == [
        ("scaling=none", "not"),
        ("scaling=sqrt", "pays"),
    ]
    assert both[0].text.startswith(
        "scaling=none: Do not accumulate: compared with factor 1 at equal memory"
    )


def test_each_factor_is_taken_at_its_best_rate():
    jobs = []
    for factor, rate, loss in (
        (1, 0.01, 2.0),
        (1, 0.1, 3.0),
        (4, 0.01, 2.5),
        (4, 0.1, 1.5),
    ):
        jobs += [
            synthetic.job(
                f"rate={rate} factor={factor} seed={i}",
                loss + 0.01 * i,
                factor=factor,
                batch=8 * factor,
            )
            for i in range(3)
        ]
    figures = verdict_of(synthetic.swept(jobs)).figures
    assert figures["examples"]["groups"] == ["rate=0.01 factor=1", "rate=0.1 factor=4"]
    assert figures["examples"]["difference"] == pytest.approx(-0.5)


def test_it_is_said_last_but_before_what_is_next_which_agrees_with_it():
    noise = np.array([-0.01, 0, 0.01])
    for better in (1, 4):
        by = 0.3 if better == 1 else -0.3
        findings = summarize(
            sweep_of({1: (2 + noise).tolist(), 4: (2 + by + noise).tolist()})
        )
        topics = [finding.topic for finding in findings]
        assert set(topics[topics.index("verdict") + 1 :]) == {"next"}
        recommended = next(
            f for f in findings if f.topic == "next" and "recommended" in f.figures
        )
        assert (
            recommended.figures["recommended"] == f"factor={better} batch={8 * better}"
        )


def test_what_reaches_the_target_first_is_not_recommended_against_the_verdict():
    """Factor 4 falls faster at first, and ends higher: the lowest loss that all reach is that of factor 4."""
    jobs = []
    for seed in range(3):
        for factor, end in ((1, 2 + 0.01 * seed), (4, 2.4 + 0.01 * seed)):
            job = synthetic.job(
                f"factor={factor} seed={seed}", end, factor=factor, batch=8 * factor
            )
            if factor == 4:
                job.curves["val/loss"].values[:] = [2.42 + 0.01 * seed] * 5 + [end]
            jobs.append(job)
    findings = summarize(synthetic.swept(jobs))
    recommended = next(
        f for f in findings if f.topic == "next" and "recommended" in f.figures
    )
    assert recommended.figures["recommended"] == "factor=1"


def test_without_a_twin_of_equal_memory_nothing_is_claimed():
    jobs = [
        synthetic.job(f"factor={f} seed={i}", 2 - 0.1 * f, factor=f, batch=64)
        for f in (1, 4)
        for i in range(3)
    ]
    finding = verdict_of(synthetic.swept(jobs))
    assert finding.figures == {}
    assert (
        "it takes jobs with factor 1 and with a larger factor, of one micro-batch size"
        in finding.text
    )
    assert not list(verdict.findings(sweep_of({1: [2.0, 2.1]})))


def test_a_setting_of_which_a_seed_failed_is_not_recommended():
    """The other two seeds alone would be the best."""
    sweep = sweep_of(
        {1: [2.0, 2.01, 2.02], 4: [1.5, 1.51, 1.52], 16: [1.9, 1.91, 1.92]}
    )
    four, sixteen = "factor=4 batch=32", "factor=16 batch=128"
    assert verdict_of(sweep).figures["take"] == four
    jobs = [
        replace(job, status="FAILED") if job.name == f"{four} seed=1" else job
        for job in sweep.jobs
    ]
    finding = verdict_of(synthetic.swept(jobs))
    assert finding.figures["take"] == sixteen
    assert finding.text.endswith(f" Left out, as not every seed finished: {four}.")
