"""How far the best rate moves with the batch, on losses whose best rate is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plotly import graph_objects

from pipeline.report import plots, rate_drift
from pipeline.report.findings import SweepFinding
from pipeline.report.rate_drift import Drift
from pipeline.report.sweep_result import SweepResult
from tests import synthetic

RATES = [2.0**exponent for exponent in range(-9, -2)]
BATCHES = (16, 64, 256)


def sweep_of(
    drifts: dict[str, float], seeds: int = 3, noise: float = 0.0, rng_seed: int = 0
) -> SweepResult:
    """Return a sweep in which the best rate is 2^-6.3 at a batch of 64.

    Args:
        drifts: how many octaves it moves per doubling of the batch, by recipe.
        seeds: the number of seeds.
        noise: the standard deviation of a loss over seeds.
        rng_seed: the seed of the noise.
    """
    rng = np.random.default_rng(rng_seed)
    jobs = []
    for recipe, drift in drifts.items():
        for batch in BATCHES:
            best = -6.3 + drift * math.log2(batch / 64)
            for rate in RATES:
                mean = 2 + 0.05 * (math.log2(rate) - best) ** 2
                for seed in range(seeds):
                    name = f"{recipe} batch={batch} rate={rate} seed={seed}".strip()
                    loss = mean + noise * rng.standard_normal()
                    jobs.append(synthetic.job(name, loss, batch=batch))
    return synthetic.swept(jobs)


def first_finding(sweep: SweepResult) -> SweepFinding:
    return next(iter(rate_drift.findings(sweep)))


def drift_of(sweep: SweepResult) -> dict[str, Any]:
    return first_finding(sweep).figures


def test_the_vertex_by_hand():
    rates = np.array([-8.0, -7, -5, -4])  # uneven steps
    best_rates = np.array([-5.3, -6.6, -9, -3])
    losses = (rates - best_rates[:, np.newaxis]) ** 2
    vertices = rate_drift.vertex(rates, losses).tolist()
    # The best is among the rates, so beyond an edge it is that edge.
    assert vertices == pytest.approx([-5.3, -6.6, -8, -4])

    flat = np.array([[3.0, 1, 1, 3], [2, 1, 1, 1]])
    vertices = rate_drift.vertex(rates, flat).tolist()
    assert vertices == pytest.approx([-6, -6.0], abs=0.4)


@pytest.mark.parametrize("drift", [0.0, 0.5, -0.5])
def test_a_known_drift_is_found(drift):
    figures = drift_of(sweep_of({"": drift}))
    assert figures["drift"] == pytest.approx(drift, abs=1e-9)
    best_rates = {}
    for batch in BATCHES:
        doublings = math.log2(batch / 64)
        best_rates[batch] = 2 ** (-6.3 + drift * doublings)
    assert figures["rates"] == pytest.approx(best_rates)


@pytest.mark.slow
def test_the_interval_has_the_drift_in_nearly_all_sweeps_and_not_another():
    sweeps = 60
    has_the_drift = 0
    has_no_drift = 0
    drifts = []
    widths = []
    for number in range(sweeps):
        sweep = sweep_of({"": 0.5}, noise=0.01, rng_seed=number)
        figures = drift_of(sweep)
        low, high = figures["interval"]
        if low <= 0.5 <= high:
            has_the_drift += 1
        if low <= 0.0 <= high:
            has_no_drift += 1
        drifts.append(figures["drift"])
        widths.append(high - low)
    assert has_the_drift >= 0.88 * sweeps
    assert sweeps - has_no_drift >= 0.95 * sweeps

    # 95% of a normal distribution are within 1.96 standard deviations.
    width_of_normal = 2 * 1.96 * np.std(drifts)
    assert np.median(widths) == pytest.approx(width_of_normal, rel=0.3)


def test_a_best_rate_at_an_edge_claims_no_drift():
    finding = first_finding(sweep_of({"": 1.5}))
    assert finding.figures["drift"] is None
    assert finding.figures["edges"] == {16: "smallest", 256: "largest"}
    assert (
        "of the rates at which every seed finished, the smallest rate is the best at 16, "
        "the largest"
    ) in finding.text


def test_a_search_claims_no_edge_of_what_was_searched():
    """Its trials have other rates at each batch."""
    sweep = replace(sweep_of({"": 1.5}), search=True)
    assert first_finding(sweep).text == (
        "No drift of the best rate is reported: of the trials that finished, none has "
        "a rate below the best one at 16, none has a rate above the best one at 256."
    )


def test_a_rate_that_diverged_is_no_neighbor():
    sweep = sweep_of({"": 0.0})
    for job in sweep.jobs:
        if job.effective_batch_size == 256 and job.setting("rate") > 2**-6.5:
            job.curves["val/loss"].values[-1] = math.inf
    assert drift_of(sweep)["edges"] == {256: "largest"}


def test_a_rate_at_which_one_seed_diverged_is_not_the_best():
    """Without that seed the mean of the others would be the best."""
    sweep = sweep_of({"": 0.0})
    for job in sweep.jobs:
        if job.name.endswith("seed=1") and job.setting("rate") > 2**-6.5:
            job.curves["val/loss"].values[-1] = math.inf
    figures = drift_of(sweep)
    assert figures["drift"] is None
    assert set(figures["edges"].values()) == {"largest"}
    assert max(figures["rates"].values()) <= 2**-6.5


def test_one_seed_has_no_interval():
    finding = first_finding(sweep_of({"": 0.5}, seeds=1))
    assert finding.figures["interval"] is None
    assert ("+0.50 octaves per doubling of the batch (one seed): 0.00") in finding.text


def test_two_batches_with_three_rates_are_needed():
    jobs = sweep_of({"": 0.5}).jobs

    one_batch = [job for job in jobs if job.effective_batch_size == 16]
    sweep = synthetic.swept(one_batch)
    assert not list(rate_drift.findings(sweep))

    # 2⁻⁹ and 2⁻⁸.
    two_rates = [job for job in jobs if job.setting("rate") < 2**-7.5]
    sweep = synthetic.swept(two_rates)
    assert not list(rate_drift.findings(sweep))


def test_the_rule_that_keeps_the_best_rate_still():
    drifts = {"scaling=none": 0.5, "scaling=sqrt": 0.0, "scaling=linear": -0.5}
    *_, last = rate_drift.findings(sweep_of(drifts, noise=0.005))
    assert last.figures["order"][0] == "scaling=sqrt"
    assert last.figures["still"] == ["scaling=sqrt"]
    assert (
        "moves least with scaling=sqrt: in octaves per doubling of the batch, "
    ) in last.text

    about_equal = {"scaling=none": 0.24, "scaling=sqrt": -0.26}
    *_, last = rate_drift.findings(sweep_of(about_equal, noise=0.01))
    assert last.figures["still"] == []
    assert "though not by more than chance can explain: in octaves" in last.text
    assert last.text.endswith(
        "It moves with each of them by more than the variation over seeds."
    )


def drift_between(name: str, value: float, low: float, high: float) -> Drift:
    """Return a drift whose bootstrap samples are spread evenly over an interval."""
    samples = np.linspace(low, high, 4001)
    return Drift(name, [], [], np.concatenate([[value], samples]))


def test_the_least_drift_is_told_apart_from_all_others():
    still = drift_between("sqrt", 0.01, -0.02, 0.03)
    far = drift_between("linear", 0.3, 0.25, 0.35)
    wide = drift_between("none", 0.35, -0.9, 1.6)
    around_zero = drift_between("linear", 0.06, -0.30, 0.40)
    chance = "moves least with sqrt, though not by more than chance can explain"

    finding = rate_drift._least_drift([still, far])
    assert chance not in finding.text
    # An interval around 0 has a drift of 0 in it, however far its ends are.
    finding = rate_drift._least_drift([still, around_zero])
    assert chance in finding.text
    finding = rate_drift._least_drift([still, far, wide])
    assert chance in finding.text


def test_a_plot_for_each_rule_with_a_curve_for_each_batch_and_the_best_rates():
    drifts = {"scaling=none": 0.5, "scaling=sqrt": 0.0}
    all_plots = plots.draw(sweep_of(drifts))
    plots_by_rate = [plot for plot in all_plots if "loss_by_rate" in plot.key]
    of_none, of_sqrt = plots_by_rate
    assert of_none.title == "scaling=none val/loss by rate"
    assert of_sqrt.title == "scaling=sqrt val/loss by rate"
    for plot in (of_none, of_sqrt):
        # Plotly rejects what it does not know.
        graph_objects.Figure(plot.data, plot.layout)

    *curves, best = of_none.data
    names = []
    for curve in curves:
        assert curve["x"] == pytest.approx(RATES)
        names.append(curve["name"])
    assert names == [f"scaling=none batch={batch}" for batch in BATCHES]
    assert best["x"] == pytest.approx([2**-7.3, 2**-6.3, 2**-5.3])
