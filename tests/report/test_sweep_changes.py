"""What changed between two sweeps: planted differences, and none where there are none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from pipeline.common.errors import ConfigError
from pipeline.report import command, sweep_changes
from pipeline.report.key_differences import DifferingKeys
from pipeline.report.statistics import CHANCE
from pipeline.report.sweep_result import SweepResult
from pipeline.tracking import record_files
from tests import synthetic
from tests.synthetic import PlantedSweep

PACKAGES = {"tensorflow": "2.19.0", "numpy": "2.1.0"}
NASTY = "<img src=x onerror=console.error('run')>"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return synthetic.store(tmp_path_factory.mktemp("store"))


def planted(
    store,
    ends: Mapping[int, list[float]],
    *,
    commit: str = "a" * 40,
    packages: Mapping[str, str] = PACKAGES,
    params: Mapping[str, object] = {},
) -> PlantedSweep:
    """Make a sweep over factors and seeds.

    Args:
        store: that gets the sweep.
        ends: by factor, the final losses of seed 0, 1 and so on.
        commit: of all jobs.
        packages: their versions, in the environment of each job.
        params: further params of all jobs.
    """
    names = []
    for factor, losses in ends.items():
        names += [f"factor={factor} seed={seed}" for seed in range(len(losses))]
    sweep = PlantedSweep(store, names, ["accumulation.factor", "seed"])
    for factor, losses in ends.items():
        for seed, loss in enumerate(losses):
            run_id = sweep.job(
                f"factor={factor} seed={seed}",
                {"train/loss": [3.0, loss], "val/loss": {2: loss}},
                factor=factor,
                seed=seed,
                params={"tracking.sweep": sweep.run_id, **params},
                tags={"git.commit": commit},
            )
            environment = {"python": "3.12", "packages": dict(packages)}
            sweep.client.log_dict(run_id, environment, "environment.json")
    sweep.end()
    return sweep


def compared(store, first: PlantedSweep, second: PlantedSweep):
    return sweep_changes.page(store.uri, first.run_id, second.run_id, [])


def result_on(page, metric: str = "val/loss") -> sweep_changes.ResultChanges:
    for finding in page.findings:
        if getattr(finding.result, "metric", None) == metric:
            return finding.result
    raise AssertionError(metric)


def test_a_planted_difference_is_found_with_its_interval(store):
    first = planted(store, {1: [1.0, 1.2, 1.4], 4: [2.0, 2.1, 2.2], 8: [3.0]})
    # Factor 1 is lower by 0.1, 0.2 and 0.3, factor 4 differs by chance alone.
    second = planted(
        store,
        {1: [0.9, 1.0, 1.1], 4: [2.1, 2.0, 2.2], 16: [1.0]},
        commit="b" * 40,
        packages=PACKAGES | {"numpy": "2.2.0", "left": "1"},
        params={"optimizer.beta_1": 0.8, "tracking.description": "wider"},
    )
    page = compared(store, first, second)
    settings, keys, *_ = page.findings
    assert settings.result == sweep_changes.SharedSettings(
        both=["factor=1", "factor=4"],
        only_first=["factor=8"],
        only_second=["factor=16"],
    )
    assert keys.result == DifferingKeys(
        ["optimizer.beta_1"], ["git.commit", "left (package)", "numpy (package)"]
    )
    cells = "<td>2.1.0</td><td>2.2.0</td>"
    assert f'<th scope="row">numpy (package)</th>{cells}' in page.html
    assert "tensorflow (package)" not in page.html
    assert "tracking.sweep" not in page.html

    one, four = result_on(page).changes
    assert one.difference.value == pytest.approx(-0.2)
    # By hand: a mean of -0.2 with an error of 0.1 / √3, and Student's quantile for
    # 98.75% with two degrees of freedom, as there are two settings.
    assert one.half_width == pytest.approx(6.205347 * 0.1 / math.sqrt(3))
    assert result_on(page).verdict(one) == sweep_changes.NOT_TOLD_APART
    assert result_on(page).verdict(four) == sweep_changes.NOT_TOLD_APART


def test_sweeps_with_other_seeds_are_compared_at_those_in_common(store):
    first = planted(store, {1: [1.0, 1.2, 1.7]})
    second = planted(store, {1: [1.0, 1.2]})
    page = compared(store, first, second)
    assert page.findings[1].result == DifferingKeys([], [])
    result = result_on(page)
    (change,) = result.changes
    assert change.first.mean == pytest.approx(1.1)
    assert change.first.count == 2
    assert change.second == change.first
    assert result.verdict(change) == sweep_changes.EQUAL

    # One seed in common is not enough, so all seeds count.
    third = planted(store, {1: [1.0]})
    page = compared(store, first, third)
    assert page.findings[1].result == DifferingKeys(["seed"], [])
    (change,) = result_on(page).changes
    assert change.first.mean == pytest.approx(1.3)


@pytest.mark.slow
def test_a_difference_that_is_clear_is_better_or_worse(store):
    first = planted(store, {1: [1.0, 1.2, 1.4], 2: [1.0, 1.2, 1.4], 4: [1.0, 1.2, 1.4]})
    second = planted(
        store, {1: [0.5, 0.71, 0.9], 2: [1.5, 1.71, 1.9], 4: [1.1, 1.1, 1.4]}
    )
    page = compared(store, first, second)
    result = result_on(page)
    verdicts = [result.verdict(change) for change in result.changes]
    assert verdicts == ["better", "worse", "not told apart"]
    text = page.findings[2].text
    assert "The second sweep is better at factor=1 (difference -0.497 ± 0.0" in text
    assert "worse at factor=2 (difference 0.503" in text
    assert "over 3 pairs with equal seeds" in text
    assert text.endswith("Intervals: 95% for 3 settings together.")


def test_between_equal_sweeps_nothing_changed(store):
    ends = {1: [1.0, 1.2], 4: [2.0, 2.1]}
    page = compared(store, planted(store, ends), planted(store, ends))
    keys = page.findings[1]
    assert keys.result == DifferingKeys([], [])
    assert keys.text.endswith("have the same values.")
    for finding in page.findings[2:]:
        assert finding.text.endswith(
            "Both sweeps end with the same values at all 2 settings."
        )
    assert "Keys that differ" not in page.html
    assert "Code that differs" not in page.html


def test_one_seed_says_nothing_about_chance(store):
    page = compared(store, planted(store, {1: [1.0]}), planted(store, {1: [0.5]}))
    result = result_on(page)
    assert [result.verdict(change) for change in result.changes] == ["chance not known"]
    assert "The effect of chance is unknown" in page.findings[2].text
    assert "Intervals" not in page.findings[2].text


@pytest.mark.slow
def test_sweeps_without_a_setting_in_common(store):
    page = compared(store, planted(store, {1: [1.0]}), planted(store, {2: [1.0]}))
    assert page.findings[0].text.startswith("0 settings in both sweeps.")
    assert page.findings[-1].text.startswith("No setting has finished in both sweeps")


def test_a_key_that_one_sweep_fixes_has_to_have_the_value_of_the_other(store):
    """The first sweep varies factor and rate, the second the factor at one rate."""
    names = ["factor=1 rate=0.1", "factor=1 rate=0.2", "factor=4 rate=0.2"]
    varied = ["accumulation.factor", "optimizer.learning_rate"]
    first = PlantedSweep(store, names, varied)
    for name in names:
        factor = int(name[7])
        params = {"optimizer.learning_rate": float(name.rpartition("=")[2])}
        curves = {"val/loss": {2: float(factor)}}
        first.job(name, curves, factor=factor, params=params)
    first.end()
    second = planted(
        store, {1: [0.5], 4: [2.0]}, params={"optimizer.learning_rate": 0.2}
    )

    settings, *_ = compared(store, first, second).findings
    assert settings.result == sweep_changes.SharedSettings(
        both=["factor=1 rate=0.2", "factor=4 rate=0.2"],
        only_first=["factor=1 rate=0.1"],
        only_second=[],
    )
    settings, _, result = compared(store, second, first).findings
    assert settings.result.both == ["factor=1 rate=0.2", "factor=4 rate=0.2"]
    differences = [change.difference.value for change in result.result.changes]
    assert differences == pytest.approx([0.5, 2.0])


def test_a_sweep_without_runs_has_one_line(store):
    first = planted(store, {1: [1.0]})
    second = PlantedSweep(store, ["factor=1 seed=0"])
    page = compared(store, first, second)
    _, keys, _ = page.findings
    assert keys.text == (
        f"Nothing to compare: no job of made {second.run_id[:8]} has a run."
    )
    assert keys.figures == {}
    assert "Keys that differ" not in page.html


def drawn_sweep(rng: np.random.Generator, settings: int, seeds: int) -> SweepResult:
    jobs = []
    for setting in range(settings):
        for seed in range(seeds):
            name = f"rate={setting} seed={seed}"
            jobs.append(synthetic.job(name, 1 + 0.1 * rng.standard_normal()))
    return synthetic.swept(jobs)


@pytest.mark.slow
def test_between_sweeps_that_differ_by_chance_it_errs_in_five_percent():
    rng = np.random.default_rng(0)
    draws = 400
    wrong = 0
    for _ in range(draws):
        sweeps = [drawn_sweep(rng, settings=3, seeds=4) for _ in range(2)]
        result = sweep_changes.changes(sweeps)[0]
        if any(change.told_apart for change in result.changes):
            wrong += 1
    assert wrong / draws <= CHANCE + 3 * math.sqrt(CHANCE * (1 - CHANCE) / draws)


def test_a_planted_effect_is_found_in_nearly_all_sweeps():
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(50):
        first = drawn_sweep(rng, settings=3, seeds=4)
        moved = []
        for job in drawn_sweep(rng, settings=3, seeds=4).jobs:
            curves = {}
            for metric, curve in job.curves.items():
                shift = 1.0 if metric.endswith("/loss") else 0.0
                curves[metric] = replace(curve, values=curve.values - shift)
            moved.append(replace(job, curves=curves))
        result = sweep_changes.changes([first, synthetic.swept(moved)])[0]
        if all(result.verdict(change) == "better" for change in result.changes):
            found += 1
    assert found >= 47


@pytest.mark.slow
def test_a_record_that_is_too_large_or_of_another_form_is_rejected(
    store, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first = planted(store, {1: [1.0]})
    hostile = planted(store, {1: [1.0]})
    job = hostile.client.search_runs(
        [hostile.experiment_id], f"tags.sweep = '{hostile.run_id}'"
    )[0].info.run_id
    names = [first.run_id, hostile.run_id, f"tracking.uri={store.uri}"]
    for content in ({"packages": []}, {"git": "none"}):
        hostile.client.log_dict(job, content, "environment.json")
        with pytest.raises(ConfigError, match="must have records that can be read"):
            command.report(names)
    monkeypatch.setattr(record_files, "LARGEST", 5)
    with pytest.raises(ConfigError, match=r"environment\.json is too large: \d+ bytes"):
        command.report(names)
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_the_page_and_escapes_what_the_store_has(
    store, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    first = planted(store, {1: [1.0, 1.1]}, commit=NASTY)
    second = planted(
        store,
        {1: [1.0, 1.2]},
        packages={NASTY: NASTY},
        params={"model.name": NASTY},
    )
    uri = f"tracking.uri={store.uri}"
    assert command.report([first.run_id, second.run_id[:10], uri]) == 0
    file = tmp_path / "outputs" / f"report-{first.run_id[:8]}-{second.run_id[:8]}.html"
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "Settings: 1 setting in both sweeps: factor=1."
    assert out.splitlines()[-1] == f"report: {file}"
    page = file.read_text()
    ours = page[: page.index("<script>")]
    ours += page[page.index('<script type="application/json"') :]
    assert "<img" not in ours
    assert "&lt;img" in ours
