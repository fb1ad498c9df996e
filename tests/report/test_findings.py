"""The findings about a sweep: every figure against sweeps whose answers are known."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from pipeline.report import (
    curve_plots,
    findings,
    job_results,
    next_steps,
    plots,
    ranking,
    reading,
    table,
    writer,
)
from pipeline.report.findings import SweepFinding
from pipeline.report.html_page import Plot
from pipeline.report.job_results import Curve, JobResult, pauses
from pipeline.report.sweep_result import SweepResult
from pipeline.report.writer import summarize
from pipeline.sweep.parent_run import set_tag
from tests import synthetic
from tests.synthetic import PlantedSweep


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return synthetic.store(tmp_path_factory.mktemp("store"))


def read(sweep: PlantedSweep) -> SweepResult:
    return reading.read(sweep.store.uri, sweep.run_id)


def all_findings(sweep: PlantedSweep) -> list[SweepFinding]:
    return summarize(read(sweep))


def first_by_topic(sweep: PlantedSweep) -> dict[str, SweepFinding]:
    """Return the first finding of each topic."""
    by_topic: dict[str, SweepFinding] = {}
    for finding in all_findings(sweep):
        by_topic.setdefault(finding.topic, finding)
    return by_topic


def figures_of(findings: list[SweepFinding], topic: str) -> list[dict]:
    return [finding.figures for finding in findings if finding.topic == topic]


def first_with(findings: list[SweepFinding], figure: str) -> SweepFinding:
    """Return the first finding that has the figure."""
    return next(finding for finding in findings if figure in finding.figures)


def plot_of(sweep: PlantedSweep, key: str) -> Plot:
    for plot in plots.draw(read(sweep)):
        if plot.key == key:
            return plot
    raise AssertionError(f"no plot has the key {key}")


def factor_in(name: str) -> int:
    """Return the factor in the name of a job."""
    return int(re.search(r"factor=(\d+)", name)[1])


@pytest.fixture(scope="module")
def by_batch(store) -> dict[str, SweepFinding]:
    return first_by_topic(synthetic.at_fixed_micro_batch(store))


@pytest.mark.slow
def test_float64_trajectories_agree(store):
    findings = first_by_topic(synthetic.at_fixed_batch(store, "float64"))
    trajectories = findings["trajectories"].figures
    assert trajectories["agree"]
    assert trajectories["largest"] == pytest.approx(1e-15, rel=0.3)
    assert findings["final"].figures["equal"]
    assert findings["time_to_target"].figures["best"] == "factor=1"
    assert "float64" not in findings["next"].text


# --- results, targets, batches ---


def test_error_bars_and_whether_groups_differ(store):
    accuracies_by_factor = {
        1: (0.80, 0.82, 0.84),
        2: (0.90, 0.92, 0.94),
        4: (0.91, 0.92, 0.93),
    }
    accuracy_by_name = {}
    for factor, accuracies in accuracies_by_factor.items():
        for seed, accuracy in enumerate(accuracies):
            accuracy_by_name[f"factor={factor} seed={seed}"] = accuracy
    sweep = PlantedSweep(store, list(accuracy_by_name), ["accumulation.factor", "seed"])
    for name, accuracy in accuracy_by_name.items():
        curves = {
            "val/loss": {1: 2.0, 2: 1.0},
            "val/accuracy": {1: 0.1, 2: accuracy},
        }
        sweep.job(name, curves, factor=factor_in(name))

    (means,) = plot_of(sweep, "final_by_factor").data
    assert means["x"] == [1, 2, 4]
    assert means["y"] == pytest.approx([0.82, 0.92, 0.92])
    assert means["error_y"]["array"] == pytest.approx([0.02, 0.02, 0.01])
    final = first_by_topic(sweep)["final"]
    assert final.figures["worst"] == "factor=1"
    assert final.figures["groups"]["factor=2"] == pytest.approx(0.92)
    # Their means are equal, but not the results of each seed.
    assert (
        "The next is factor=2, 0.000 ± 0.025 behind (95%, over 3 pairs with equal "
        "seeds), so the data do not tell them apart."
    ) in final.text


def test_only_groups_with_equal_results_of_each_seed_are_one():
    def final_of(losses_by_rate: dict[int, list[float]]) -> SweepFinding:
        jobs = []
        for rate, losses in losses_by_rate.items():
            for seed, loss in enumerate(losses):
                jobs.append(synthetic.job(f"rate={rate} seed={seed}", loss))
        return ranking.final_result(synthetic.swept(jobs))

    equal = final_of({1: [2.0, 2.5], 2: [2.0, 2.5]})
    assert equal.figures["equal"]
    assert "all 2 groups end at 2.25 ± 0.35, with the same value for each" in equal.text

    # The same mean, by other results.
    other = final_of({1: [2.0, 2.5], 2: [2.5, 2.0]})
    assert "equal" not in other.figures
    assert (
        "all 2 groups have the same mean, 2.25 ± 0.35 (2 seeds), but not the same value "
        "for each seed. The next is rate=2, 0.0 ± 6.4 behind"
    ) in other.text

    # One group stands between two that are the same.
    two = final_of({1: [2.0, 2.5], 2: [2.5, 2.0], 3: [2.0, 2.5]})
    assert two.figures["same"] == ["rate=3"]


def test_a_lower_error_is_better_and_one_seed_is_named_as_one(store):
    sweep = PlantedSweep(store, ["factor=1", "factor=2"])
    params = {"training.metrics.wrong._target_": "keras.metrics.MeanAbsoluteError"}
    for factor, error in ((1, 0.2), (2, 0.1)):
        curves = {"train/loss": [2, 1], "val/wrong": {2: error}}
        sweep.job(f"factor={factor}", curves, factor=factor, params=params)
    final = first_by_topic(sweep)["final"]
    assert final.figures["best"] == "factor=2"
    assert final.text.endswith(" The next is factor=1, 0.1 behind, with one seed.")
    assert final.figures["told_apart"] is None
    assert final.figures["difference"] is None


def test_seeds_alone_are_compared_with_nothing(store):
    sweep = PlantedSweep(store, ["seed=0", "seed=1"])
    for seed, accuracy in ((0, 0.8), (1, 0.9)):
        curves = {"train/loss": [2, 1], "val/accuracy": {2: accuracy}}
        sweep.job(f"seed={seed}", curves, factor=1, params={"seed": seed})
    findings = first_by_topic(sweep)
    final = findings["final"]
    assert final.text == "Final val/accuracy of all jobs: 0.850 ± 0.071 (2 seeds)."
    assert final.figures["value"] == pytest.approx(0.85)
    assert "It is reached after" in findings["time_to_target"].text


def test_time_to_the_target(by_batch):
    figures = by_batch["time_to_target"].figures
    worst = synthetic.cost_of(512, 2)
    horizon = 512 * math.ceil(3200 * 3.56 * 1.03 / 512)
    # From a loss of 2 to the lowest that the slowest job reaches.
    fall = horizon / worst
    assert figures["target"] == pytest.approx(2 - fall)
    assert figures["metric"] == "val/loss"
    assert figures["all_reach"]
    assert figures["seeds"] == 3

    cost = synthetic.cost_of(32, 0)
    assert figures["best"] == "factor=1 batch=32"
    assert figures["seconds"] == pytest.approx(1.01 * cost * fall / 3200)
    assert figures["deviation"] == pytest.approx(0.01 * cost * fall / 3200)
    assert "so they differ" in by_batch["time_to_target"].text


def test_the_largest_batch_that_pays_and_the_critical_one(by_batch):
    figures = by_batch["largest_batch"].figures
    ratios = {}
    for batch in (32, 64, 128, 256, 512):
        ratios[batch] = (1 + batch / 200) / 1.16
    assert figures["ratio"] == pytest.approx(ratios)
    assert figures["largest"] == 256
    assert figures["least"] == 32
    assert figures["open"] is False
    assert figures["critical"] == pytest.approx(200)
    updates = figures["updates"]
    assert updates[256] == pytest.approx(updates[32] * (1 + 256 / 200) / 1.16 / 8)


def test_the_noise_scale_beside_what_was_measured(by_batch):
    figures = by_batch["noise_scale"].figures
    assert figures["predicted"] == 190
    assert figures["deviation"] == 0
    assert figures["runs"] == 12
    assert figures["measured"] == pytest.approx(200)
    assert figures["ratio"] == pytest.approx(0.95)
    assert figures["cost"][512] == pytest.approx(1 + 512 / 190)


def test_what_a_factor_costs(by_batch):
    figures = by_batch["cost"].figures
    assert figures["update_seconds"] == pytest.approx((0.01, 0.16))
    assert figures["examples_per_second"] == pytest.approx((3200, 3200))
    assert figures["peak_memory_bytes"] == (301 * 2**20, 316 * 2**20)


@pytest.fixture
def over_rate_and_optimizer(store) -> PlantedSweep:
    accuracy_by_name = {
        "rate=0.01 optimizer=adam": 0.5,
        "rate=0.01 optimizer=lion": 0.7,
        "rate=0.1 optimizer=adam": 0.9,
        "rate=0.1 optimizer=lion": 0.6,
    }
    varied = ["optimizer.learning_rate", "optimizer"]
    sweep = PlantedSweep(store, list(accuracy_by_name), varied)
    sweep.client.set_tag(sweep.run_id, "sweep.question", "which rate?")
    for name, accuracy in accuracy_by_name.items():
        sweep.job(name, {"train/loss": [2, 1], "val/accuracy": {2: accuracy}})
    return sweep


def test_a_sweep_over_any_key_is_drawn_by_it(over_rate_and_optimizer):
    adam, lion = plot_of(over_rate_and_optimizer, "final_by_rate").data
    assert adam["name"] == "optimizer=adam"
    assert adam["x"] == [0.01, 0.1]
    assert adam["y"] == [0.5, 0.9]
    assert lion["y"] == [0.7, 0.6]
    by_optimizer = plot_of(over_rate_and_optimizer, "final_by_optimizer")
    assert by_optimizer.data[0]["x"] == ["adam", "lion"]


def test_the_best_value_of_each_key_is_listed(over_rate_and_optimizer, tmp_path):
    sweep = over_rate_and_optimizer
    page = writer.write(sweep.store.uri, sweep.run_id, tmp_path).page.read_text()
    row = r"<tr><th scope=\"row\">(\w+=[\w.]+)</th><td>([\d.]+)</td><td>(.*?)</td>"
    assert re.findall(row, page) == [
        ("rate=0.01", "0.7", "rate=0.01 optimizer=lion"),
        ("rate=0.1", "0.9", "rate=0.1 optimizer=adam"),
        ("optimizer=adam", "0.9", "rate=0.1 optimizer=adam"),
        ("optimizer=lion", "0.7", "rate=0.01 optimizer=lion"),
    ]
    assert "<p>which rate?</p>" in page


def test_what_is_fast_and_what_ends_best_are_both_named(store):
    sweep = PlantedSweep(store, ["factor=1", "factor=2"])
    for factor, accuracy in ((1, 0.8), (2, 0.9)):
        curves = {"train/loss": [2, 1], "val/accuracy": {2: accuracy}}
        sweep.job(f"factor={factor}", curves, factor=factor, seconds=0.01 * factor)
    text = first_by_topic(sweep)["next"].text
    assert text.startswith("On this machine take factor=1: it reached the target first")
    assert text.endswith(" By its final val/accuracy factor=2 is better.")


@pytest.mark.parametrize(
    ("fastest", "sentence"),
    [
        (
            0.4,
            " Its rate is the largest that was tried at this batch: try larger ones,",
        ),
        (0.1, " Its rate is the smallest that was tried at this batch: try smaller"),
        (0.2, ""),
    ],
)
def test_a_recommended_rate_at_the_edge_of_those_tried_is_named(fastest, sentence):
    def advice(rates):
        jobs = []
        for rate in rates:
            seconds = 0.001 if rate == fastest else 0.01
            jobs.append(synthetic.job(f"rate={rate}", 1.0, seconds=seconds))
        findings = summarize(synthetic.swept(jobs))
        return first_with(findings, "recommended").text

    text = advice((0.1, 0.2, 0.4))
    assert f"take rate={fastest}: it reached the target first.{sentence}" in text
    assert ("Its rate is" in text) == bool(sentence)
    assert "Its rate is" not in advice((fastest, 0.3))


def test_nothing_is_recommended_before_there_are_enough_seeds(store):
    sweep = PlantedSweep(store, ["factor=1", "factor=2"])
    for factor in (1, 2):
        loss = 2 * 0.9 ** np.arange(20)
        sweep.job(
            f"factor={factor}",
            {"train/loss": loss},
            factor=factor,
            batch=32 * factor,
            seconds=0.01 * factor,
        )
    findings = all_findings(sweep)
    (verdict,) = [finding for finding in findings if finding.topic == "verdict"]
    assert "There are not enough seeds to tell" in verdict.text
    assert not any("take factor=" in finding.text for finding in findings)


@pytest.mark.parametrize(
    ("keep_best", "advice"),
    [
        (
            {"metric": "val/accuracy", "mode": "max"},
            "Take rate=2: the highest final val/accuracy of the search.",
        ),
        (
            {"metric": "val/error", "mode": "min"},
            "Take rate=2: the lowest final val/error of the search.",
        ),
        (
            {"metric": "val/loss", "mode": "min"},
            "Take rate=1: the lowest final val/loss of the search.",
        ),
        (
            {},
            "Take rate=1: the lowest loss of the search. By its final val/accuracy "
            "rate=2 is better.",
        ),
    ],
)
def test_the_best_of_a_search_is_that_of_keep_best(store, keep_best, advice):
    sweep = PlantedSweep(store, ["rate=1", "rate=2"], ["optimizer.learning_rate"])
    params = {f"training.keep_best.{key}": value for key, value in keep_best.items()}
    for name, loss, accuracy in (("rate=1", 1.0, 0.7), ("rate=2", 1.2, 0.9)):
        curves = {
            "train/loss": [2, loss],
            "val/loss": {2: loss},
            "val/accuracy": {2: accuracy},
            "val/error": {2: 1 - accuracy},
        }
        sweep.job(name, curves, params=params)
    best = {"loss": 1.0, "overrides": ["optimizer.learning_rate=1"]}
    sweep.tag(sweep.run_id, **{"sweep.best": json.dumps(best)})
    best = advice.split(":")[0].removeprefix("Take rate=")
    seeds = (
        " This is one seed, so the effect of chance is unknown. To add seeds, repeat "
        f"the search's command with optimizer.learning_rate={best} seed=0,1,2 "
        "hydra.sweeper.trials=3 hydra.sweeper.at_once=3"
    )
    assert first_by_topic(sweep)["next"].text == advice + seeds


def test_what_to_try_next(by_batch):
    assert "10 ± 0 ms → 160 ± 0 ms" in by_batch["cost"].text
    expected = {"recommended": "factor=1 batch=32", "batch": 256}
    assert by_batch["next"].figures == expected
    # What several devices may do does not contradict the advice for one.
    assert by_batch["next"].text.startswith("On this machine take factor=1 batch=32: ")
    assert by_batch["next"].text.endswith(
        " With more devices, enlarge the batch by replicas, not by the factor: an "
        "effective batch of up to 256 takes fewer updates to the target, at the price "
        "of more examples."
    )


def test_a_job_that_diverged_sets_no_target(store):
    sweep = PlantedSweep(store, [f"rate={rate}" for rate in (1, 2, 3)])
    loss = 2 * 0.9 ** np.arange(20)
    sweep.job("rate=1", {"train/loss": loss})
    sweep.job("rate=2", {"train/loss": loss * 1.5})
    sweep.job("rate=3", {"train/loss": 2 * 1.5 ** np.arange(20)})
    figures = first_by_topic(sweep)["time_to_target"].figures
    assert not figures["all_reach"]
    # A tenth of the run is two updates.
    assert figures["target"] == pytest.approx(loss[-2:].mean() * 1.5)
    assert list(figures["groups"]) == ["rate=1", "rate=2"]


def test_a_loss_that_only_rose_has_no_target(store):
    sweep = PlantedSweep(store, ["job"])
    sweep.job("job", {"train/loss": [2, 3, 4]})
    assert first_by_topic(sweep)["time_to_target"].figures == {}


def optimizer_names(factors: tuple[int, ...]) -> list[str]:
    names = []
    for optimizer in ("sgd", "adam"):
        for factor in factors:
            names.append(f"optimizer={optimizer} factor={factor} batch={32 * factor}")
    return names


def test_optimizers_are_families_with_a_batch_each(store):
    names = optimizer_names((1, 2))
    sweep = PlantedSweep(store, names, ["optimizer", "accumulation.factor"])
    for name in names:
        factor = factor_in(name)
        # sgd needs as many updates at either batch, so the larger one saves nothing;
        # adam needs half as many.
        rate = 0.8**factor if "adam" in name else 0.9
        loss = 2 * rate ** np.arange(1, 41)
        curves = {"train/loss": loss, "val/loss": dict(enumerate(loss, start=1))}
        sweep.job(name, curves, factor=factor, batch=32 * factor)

    findings = all_findings(sweep)
    sgd, adam = figures_of(findings, "largest_batch")
    assert sgd["family"] == "optimizer=sgd"
    assert sgd["largest"] == 32
    assert adam["family"] == "optimizer=adam"
    assert adam["largest"] == 64

    to_try = [finding for finding in findings if "Try an" in finding.text]
    assert figures_of(to_try, "next") == [{"batch": 128, "family": "optimizer=adam"}]
    traces = plot_of(sweep, "final_by_factor").data
    names = [trace["name"] for trace in traces]
    assert names == ["optimizer=sgd", "optimizer=adam"]


def test_jobs_that_ran_at_once_are_named(store):
    sweep = PlantedSweep(store, ["factor=1", "factor=2"])
    loss = 2 * 0.9 ** np.arange(20)
    sweep.job("factor=1", {"train/loss": loss})
    sweep.clock = synthetic.STARTED
    sweep.job("factor=2", {"train/loss": loss}, factor=2)
    text = first_by_topic(sweep)["time_to_target"].text
    assert "Up to 2 jobs ran at the same time" in text


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_job_does_not_run_between_its_interruption_and_its_continuation(
    store, is_resumed
):
    sweep = PlantedSweep(store, ["factor=1", "factor=2"])
    loss = 2 * 0.9 ** np.arange(20)
    # It ends after 200 s.
    tags = {}
    if is_resumed:
        began = synthetic.STARTED
        tags["interruptions"] = f"[[{began + 90_000}, {began + 150_000}]]"
    sweep.job("factor=1", {"train/loss": loss}, seconds=10, tags=tags)
    sweep.clock = synthetic.STARTED + 100_000
    sweep.job("factor=2", {"train/loss": loss}, factor=2)
    text = first_by_topic(sweep)["time_to_target"].text
    assert ("ran at the same time" in text) != is_resumed


def test_jobs_that_never_ran_are_named_whatever_the_size_of_the_sweep(store):
    # The names have 18,400 characters.
    names = []
    for number in range(400):
        names.append(f"optimizer=adamw learning_rate=0.0{number:03} batch=256")
    sweep = PlantedSweep(store, names, varied=["optimizer", "optimizer.learning_rate"])
    sweep.job(names[0], {"train/loss": [2, 1]})
    assert first_by_topic(sweep)["next"].figures["missing"] == names[1:]

    # Two tags instead of four.
    set_tag(sweep.planned, "sweep.jobs", json.dumps(names[:150]))
    assert first_by_topic(sweep)["next"].figures["missing"] == names[1:150]


# --- what must not be claimed ---


def test_the_tracing_of_the_first_update_is_no_training_time(store):
    sweep = PlantedSweep(store, ["factor=1", "factor=2"])
    loss = 2 * 0.9 ** np.arange(20)
    for factor, tracing in ((1, 9.7), (2, 0.3)):
        seconds = [tracing, *[0.01 * factor] * 19]
        curves = {"train/loss": loss, "perf/update_seconds": seconds}
        sweep.job(f"factor={factor}", curves, factor=factor)
    figures = first_by_topic(sweep)["time_to_target"].figures
    expected = {"factor=1": 20 * 0.01, "factor=2": 20 * 0.02}
    assert figures["groups"] == pytest.approx(expected)
    assert figures["best"] == "factor=1"


def test_the_batch_that_still_pays_is_that_of_the_recommended_family(store):
    names = optimizer_names((1, 2, 4))
    sweep = PlantedSweep(store, names, ["optimizer", "accumulation.factor"])
    for name in names:
        factor = factor_in(name)
        # sgd needs as many updates at any batch; adam pays to the largest batch, and
        # is the fastest there.
        rate = 0.8**factor
        seconds = 0.001
        if "sgd" in name:
            rate = 0.9
            seconds = 0.01
        loss = 2 * rate ** np.arange(1, 81)
        curves = {"train/loss": loss, "val/loss": dict(enumerate(loss, start=1))}
        sweep.job(name, curves, factor=factor, batch=32 * factor, seconds=seconds)

    findings = all_findings(sweep)
    sgd, adam = figures_of(findings, "largest_batch")
    assert sgd["family"] == "optimizer=sgd"
    assert sgd["largest"] == 32
    assert adam["family"] == "optimizer=adam"
    assert adam["largest"] == 128

    recommended = first_with(findings, "recommended")
    assert recommended.figures == {
        "recommended": "optimizer=adam factor=4 batch=128",
        "batch": 128,
    }
    # The batch that still pays is the recommended one.
    assert "more devices" not in recommended.text
    # There is one seed, which shows no chance.
    assert "chance" not in recommended.text


def test_what_differs_between_groups_is_no_error_bar(store):
    names = []
    for factor in (1, 2):
        for batch in (32, 64, 128):
            names.append(f"factor={factor} batch={batch}")
    varied = ["accumulation.factor", "accumulation.effective_batch_size"]
    sweep = PlantedSweep(store, names, varied)
    for name in names:
        batch = int(name.split("batch=")[1])
        loss = 2 * 0.9 ** (np.arange(1, 41) * 32 / batch)
        curves = {"train/loss": loss, "val/accuracy": {40: batch / 128}}
        sweep.job(name, curves, factor=factor_in(name), batch=batch)

    (means,) = plot_of(sweep, "final_by_factor").data
    assert "error_y" not in means
    assert means["y"] == pytest.approx([(32 + 64 + 128) / 3 / 128] * 2)
    text = first_by_topic(sweep)["largest_batch"].text
    assert "Some batch has only one seed, so this is one observation" in text


def test_equal_results_of_all_seeds_are_no_certainty(store):
    # Of 180 examples: all seeds may well be equal.
    accuracy_by_factor = {1: 176 / 180, 2: 175 / 180}
    names = []
    for factor in accuracy_by_factor:
        for seed in range(3):
            names.append(f"factor={factor} seed={seed}")
    sweep = PlantedSweep(store, names, ["accumulation.factor", "seed"])
    for name in names:
        factor = factor_in(name)
        curves = {
            "train/loss": [2, 1],
            "val/accuracy": {2: accuracy_by_factor[factor]},
        }
        sweep.job(name, curves, factor=factor, seed=int(name[-1]))
    finding = first_by_topic(sweep)["final"]
    assert finding.figures["difference"] is None
    assert "so they differ" not in finding.text
    assert (
        "The next is factor=2, 0.005556 behind; as the results of neither group vary "
        "over its seeds, the effect of chance is unknown"
    ) in finding.text


# A seed of the second group is missing; at the seeds of both, it is the better one.
REVERSED = {1: (0.90, 0.901, 0.99), 2: (0.92, 0.9205)}


def with_accuracies(accuracies: dict[int, tuple[float, ...]]) -> SweepResult:
    """Return a sweep whose rates end at these accuracies, one for each seed."""
    jobs = []
    for rate, of_seeds in accuracies.items():
        for seed, accuracy in enumerate(of_seeds):
            job = synthetic.job(f"rate={rate} seed={seed}", 1.0 + 0.1 * rate * seed)
            steps = job.curves["val/loss"].steps
            curve = Curve(steps, np.full(len(steps), accuracy))
            jobs.append(replace(job, curves=job.curves | {"val/accuracy": curve}))
    return synthetic.swept(jobs)


def test_a_group_that_is_ahead_at_the_common_seeds_is_not_called_behind():
    finding = ranking.final_result(with_accuracies(REVERSED))
    # Differences of 0.02 and 0.0195; Student's quantile with one degree of freedom.
    half_width = 12.7062 * 0.00025
    assert finding.figures["best"] == "rate=1"
    assert finding.figures["difference"] == pytest.approx(
        (0.01975, half_width), rel=1e-4
    )
    assert finding.figures["told_apart"] is False
    assert finding.figures["not_told_apart"] == ["rate=2"]
    assert finding.text.endswith(
        " The next is rate=2, 0.0197 ± 0.0032 ahead on the seeds that both groups have (95%, "
        "over 2 pairs with equal seeds), so the order comes from seeds that only one of them "
        "has."
    )


def test_a_final_result_that_is_better_by_other_seeds_is_named_so():
    sweep = with_accuracies(REVERSED)
    final = ranking.final_result(sweep)
    text = next_steps._better_final(sweep, [final], "rate=2")
    assert text == (
        " By its final val/accuracy rate=1 is better, though not on the seeds that "
        "both groups have."
    )


def test_why_chance_is_not_known_fits_the_number_of_seeds():
    equal = with_accuracies({1: (0.1, 0.1, 0.1), 2: (0.3, 0.3, 0.3)})
    assert "behind; as the results of neither group vary over its seeds" in (
        ranking.final_result(equal).text
    )
    two = with_accuracies({1: (0.1, 0.2), 2: (0.3, 0.4)})
    assert "as both seeds are equally far behind" in ranking.final_result(two).text


@pytest.mark.parametrize(
    ("name", "class_name", "lower"),
    [
        ("false_positives", "keras.metrics.FalsePositives", True),
        ("misses", "keras.metrics.FalseNegatives", True),
        ("error_free", "keras.metrics.BinaryAccuracy", False),
        ("fit", "keras.metrics.MeanSquaredLogarithmicError", True),
        ("nll", "my.NLL", True),
        ("msle", "my.MSLE", True),
        ("wer", "my.WER", True),
        ("quality", "my.WordErrorRate", True),
        ("valloss", "my.Thing", True),
        ("bits_per_token", "pipeline.metrics.BitsPerToken", True),
        ("glossary_accuracy", "my.Accuracy", False),
        ("interval_score", "my.Score", False),
    ],
)
def test_which_direction_of_a_metric_is_better(name, class_name, lower):
    job = JobResult("job", params={f"training.metrics.{name}._target_": class_name})
    assert synthetic.swept([job]).lower_is_better(f"val/{name}") is lower
    key = f"training.weighted_metrics.age.{name}._target_"
    job = JobResult("job", params={key: class_name})
    assert synthetic.swept([job]).lower_is_better(f"val/age_{name}") is lower


def test_the_recorded_mode_decides_which_direction_is_better():
    params = {
        "training.metrics.wrong._target_": "my.Error",
        "training.keep_best.metric": "val/wrong",
        "training.keep_best.mode": "max",
    }
    sweep = synthetic.swept([JobResult("job", params=params)])
    assert not sweep.lower_is_better("val/wrong")
    assert not sweep.lower_is_better("train/wrong")
    assert sweep.lower_is_better("val/error")


# --- names and states ---


def test_versions_are_not_numbers():
    jobs = []
    for version, end in (("1.1", 1.0), ("1.10", 2.0), ("1.2", 3.0)):
        jobs.append(synthetic.job(f"data.version={version} rate=0.10", end))
    sweep = synthetic.swept(jobs)
    assert sweep.axes == ["data.version"]
    assert list(sweep.by_setting(jobs, "data.version")) == ["1.1", "1.10", "1.2"]
    assert jobs[0].setting("rate") == 0.1
    for name in ("nan", "inf", "1_0", "1e999"):
        assert JobResult(f"model.name={name}").setting("model.name") == name


def test_a_number_beside_a_text_is_written_as_it_was_given():
    jobs = [synthetic.job("data.size=100", 1.0), synthetic.job("data.size=all", 1.1)]
    sweep = synthetic.swept(jobs)
    (plot,) = (plot for plot in plots.draw(sweep) if plot.key.startswith("final_by"))
    assert plot.data[0]["x"] == ["100", "all"]
    assert [row[0] for row in table.best_by_value(sweep).rows] == [
        "data.size=100",
        "data.size=all",
    ]


def test_a_recorded_size_is_read_only_from_decimal_digits():
    assert job_results._size({"derived.factor": "²"}, "factor") is None
    assert job_results._size({"derived.factor": "8"}, "factor") == 8


def test_equal_ends_after_unequal_examples_keep_the_caveat_in_the_figures():
    jobs = [
        synthetic.job("rate=1", 1.0, epochs=6),
        synthetic.job("rate=2", 1.0, epochs=3),
    ]
    finding = ranking.final_result(synthetic.swept(jobs))
    assert finding.figures["equal"]
    assert finding.figures["horizons"] == {"rate=1": 6144, "rate=2": 3072}
    assert finding.text.endswith("the groups saw from 3072 to 6144.")


@pytest.mark.parametrize(
    ("statuses", "state"),
    [
        (("FINISHED", "FINISHED"), "that finished."),
        (("RUNNING", "RUNNING"), "that have not finished."),
        (("FINISHED", "RUNNING"), "that finished, or else of those that did not."),
    ],
)
def test_a_caption_names_the_jobs_of_which_a_mean_is(statuses, state):
    jobs = []
    for rate, status in enumerate(statuses):
        for seed in range(2):
            job = synthetic.job(f"rate={rate} seed={seed}", 1.0)
            jobs.append(replace(job, status=status))
    plot = curve_plots.metric_plots(synthetic.swept(jobs))[0]
    assert plot.caption.endswith(f"the thick one is the mean of those {state}")


@pytest.mark.slow
def test_a_critical_batch_outside_of_what_was_tried_was_not_measured(store):
    sweep = synthetic.at_fixed_micro_batch(store, critical=5000.0)
    finding = first_by_topic(sweep)["noise_scale"]
    # The losses are logged at 40 updates.
    assert finding.figures["extrapolated"] == pytest.approx(5000, rel=1e-2)
    assert "measured" not in finding.figures
    assert "extrapolate to" in finding.text


def test_a_sweep_without_a_file_is_run_again_as_it_was_run(store):
    sweep = PlantedSweep(store, ["seed=0"], name="multirun")
    sweep.end("FAILED")
    finding = first_with(all_findings(sweep), "missing")
    command = f"pipeline sweep multirun --again {sweep.run_id} tracking.uri={store.uri}"
    assert command in finding.text


def test_a_job_whose_loss_exploded_is_named():
    exploded = synthetic.job("rate=9", 3.0)
    exploded.tags["loss.exploded"] = "3e+06 at update 3; the first loss was 1"
    jobs = [synthetic.job("rate=1", 1.0), exploded]
    finding = findings.job_states(synthetic.swept(jobs))
    assert finding.text == (
        "2 of 2 jobs finished. The loss exploded in 1: "
        "rate=9 (3e+06 at update 3; the first loss was 1)."
    )
    assert finding.figures == {"planned": 2, "FINISHED": 2, "exploded": 1}
    finding = findings.job_states(synthetic.swept(jobs[:1]))
    assert finding.text == "1 of 1 job finished."


def test_the_running_time_of_a_run_leaves_out_its_interruptions():
    run = JobResult("run", started=0, ended=10_000, pauses=((1000, 4000),))
    assert run.running_milliseconds == 7000
    assert JobResult("run", started=0).running_milliseconds is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[[3, 9], [12, 15]]", ((3, 9), (12, 15))), ("[3]", ()), ("{", ()), ("[]", ())],
)
def test_the_interruptions_of_a_run_are_those_of_its_tag(text, expected):
    assert pauses({"interruptions": text}) == expected
    assert pauses({}) == ()
