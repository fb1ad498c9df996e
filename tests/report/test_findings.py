"""What is found in a sweep: every figure against sweeps whose answers are known."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from pipeline.report import comparison, plots, statistics, writer
from pipeline.report.findings import Finding
from pipeline.report.statistics import Spread
from pipeline.report.writer import summarize
from pipeline.sweep.parent_run import ParentRun
from tests import synthetic
from tests.synthetic import Made


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return synthetic.store(tmp_path_factory.mktemp("store"))


def found(made: Made) -> dict[str, Finding]:
    """What is found in a sweep, the first of each topic."""
    every = summarize(comparison.read(made.store.uri, made.run_id))
    return {finding.topic: finding for finding in reversed(every)}


@pytest.fixture(scope="module")
def by_batch(store) -> dict[str, Finding]:
    return found(synthetic.at_fixed_micro_batch(store))


# --- the arithmetic, by hand ---


def test_spread_and_welch_interval_by_hand():
    assert statistics.spread([1, 2, 3, math.nan]) == Spread(2, 1, 3)
    assert statistics.spread([5]) == Spread(5, None, 1)
    assert statistics.spread([math.nan]) is None
    by, half = statistics.difference(Spread(10, 2, 4), Spread(13, 2, 4))
    # t with 6 degrees of freedom at 97.5% is 2.446912; the standard error is √(4/4 + 4/4)
    assert (by, half) == (3, pytest.approx(2.446912 * math.sqrt(2), rel=1e-6))
    assert statistics.difference(Spread(10, None, 1), Spread(13, 2, 4)) is None


def test_relative_difference_knows_zero_and_what_is_not_finite():
    one, other = (
        np.array([2.0, 0, 1, np.nan, np.inf, 1]),
        np.array([1.0, 0, -1, np.nan, np.inf, np.nan]),
    )
    assert statistics.relative_difference(one, other).tolist() == [
        0.5,
        0,
        2,
        0,
        0,
        np.inf,
    ]


def test_a_target_is_reached_between_two_points():
    x, y = np.array([10.0, 20, 30, 40]), np.array([4.0, 3, 1, 2])
    assert statistics.reached(x, y, 2) == 25
    assert statistics.reached(x, y, 3) == 20
    assert statistics.reached(x, y, 5) == 10
    assert math.isnan(statistics.reached(x, y, 0.5))


def test_a_trailing_mean_weighs_by_examples():
    examples, values = np.array([10.0, 20, 25, 35]), np.array([1.0, 2, 4, 8])
    means = statistics.trailing_mean(examples, values, 15)
    expected = [1, (5 * 1 + 10 * 2) / 15, (10 * 2 + 5 * 4) / 15, (5 * 4 + 10 * 8) / 15]
    assert means.tolist() == pytest.approx(expected, rel=1e-12)
    assert statistics.trailing_mean(examples, values, 1).tolist() == values.tolist()


def test_the_loss_of_a_short_tail_is_no_target():
    """An epoch of 1000 examples in batches of 124 ends with 8, whose loss is lower by chance."""
    examples = np.array([*range(124, 993, 124), 1000.0])
    values = np.array([2.0] * 8 + [0.1])
    assert statistics.trailing_mean(examples, values, 124)[-1] == pytest.approx(
        (116 * 2 + 8 * 0.1) / 124
    )


def test_the_trade_off_is_fitted_exactly_and_refused_where_there_is_none():
    batches = [16, 64, 256]
    assert statistics.tradeoff(
        batches, [1000 + 5 * batch for batch in batches]
    ) == pytest.approx((1000, 5))
    assert statistics.tradeoff(batches[:2], [1000, 2000]) is None
    assert statistics.tradeoff(batches, [3000, 2000, 1000]) is None


def test_the_fit_weighs_every_batch_by_its_relative_residual():
    batches, costs = np.array([10.0, 100, 1000]), np.array([200.0, 300, 900])
    fewest, least_updates = statistics.tradeoff(batches, costs)

    def residual(examples: float, updates: float) -> float:
        return float(np.sum(((examples + updates * batches) / costs - 1) ** 2))

    least = residual(fewest, least_updates)
    for share in (0.99, 1.01):
        assert residual(fewest * share, least_updates) > least
        assert residual(fewest, least_updates * share) > least


def test_numbers_are_written_with_the_digits_that_count():
    assert Spread(0.97901, 0.00969, 3).text() == "0.9790 ± 0.0097"
    assert Spread(0.303, 0.0862, 3).text(statistics.SECONDS) == "303 ± 86 ms"
    assert Spread(7354.2, 40.8, 3).text() == "7354 ± 41"
    assert [statistics.number(value) for value in (2.0, 0.25, 1e-7, 12345.6)] == [
        "2",
        "0.25",
        "1e-7",
        "12346",
    ]
    assert statistics.number(3 * 2**30, statistics.SIZE) == "3 GiB"


# --- trajectories ---


@pytest.mark.slow
def test_float32_trajectories_part_where_they_were_made_to(store):
    finding = found(synthetic.at_fixed_batch(store, "float32"))["trajectories"]
    figures = finding.figures
    assert figures["above"] == {"1e-6": 26, "1e-3": 98, "1e-2": None}
    assert figures["first"] == pytest.approx(1e-7, rel=1e-6)
    assert figures["largest"] == pytest.approx(1e-7 * 1.1**119, rel=1e-9)
    assert (figures["at"], figures["pairs"], figures["updates"]) == (120, 2, 120)
    assert not figures["agree"]
    assert figures["rounding"]
    assert "amplified that 84281 times" in finding.text


@pytest.mark.slow
def test_float64_trajectories_agree(store):
    every = found(synthetic.at_fixed_batch(store, "float64"))
    assert every["trajectories"].figures["agree"]
    assert every["trajectories"].figures["largest"] == pytest.approx(1e-15, rel=0.3)
    assert every["final"].figures["equal"]
    assert every["time_to_target"].figures["best"] == "factor=1"
    assert "float64" not in every["next"].text


@pytest.mark.parametrize(
    ("tags", "agree"), [({}, False), ({"float32.in_tf32": "true"}, True)]
)
def test_the_bounds_of_tf32_apply_where_a_job_computed_in_it(store, tags, agree):
    made = Made(store, ["factor=1", "factor=2"])
    loss = 2 * 0.9 ** np.arange(10)
    made.job("factor=1", {"train/loss": loss})
    made.job("factor=2", {"train/loss": loss * 1.003}, factor=2, tags=tags)
    finding = found(made)["trajectories"]
    assert finding.figures["agree"] is agree
    assert finding.text.startswith("In float32 with TF32, ") is agree


def test_the_bound_of_rounding_doubles_with_each_update(store):
    made = Made(store, ["factor=1", "factor=2"])
    loss = 2 * 0.9 ** np.arange(5)
    apart = np.array([0.9e-5, 1.9e-5, 3.9e-5, 7.9e-5, 15e-5])
    made.job("factor=1", {"train/loss": loss})
    made.job("factor=2", {"train/loss": loss * (1 - apart)}, factor=2)
    assert found(made)["trajectories"].figures["agree"]


def test_what_differs_at_the_first_update_is_not_called_rounding(store):
    made = Made(store, ["factor=1", "factor=2"])
    layers = {"model.batch_dependent_layers": "batch_normalization"}
    loss = 2 * 0.9 ** np.arange(10)
    made.job("factor=1", {"train/loss": loss}, tags=layers)
    made.job("factor=2", {"train/loss": loss * 1.01}, factor=2, tags=layers)
    finding = found(made)["trajectories"]
    assert not finding.figures["rounding"]
    assert finding.figures["above"] == {"1e-6": 1, "1e-3": 1, "1e-2": None}
    assert "depends on the micro-batch: batch_normalization." in finding.text
    assert "amplified it" not in finding.text


@pytest.mark.parametrize(
    "differs",
    [
        {"seed": 1},
        {"batch": 32},
        *(
            {"params": {k: 0.2}}
            for k in ("optimizer.learning_rate", "accumulation.same_noise")
        ),
    ],
)
def test_only_equal_configs_are_compared(store, differs):
    made = Made(store, ["one", "other"])
    made.job("one", {"train/loss": [2, 1]}, params={"optimizer.learning_rate": 0.1})
    made.job(
        "other",
        {"train/loss": [2, 1]},
        **{"params": {"optimizer.learning_rate": 0.1}, **differs},
    )
    finding = found(made)["trajectories"]
    assert finding.figures == {}
    assert "cannot be compared: no two jobs share effective batch, seed" in finding.text


def test_hardware_and_logging_do_not_keep_jobs_apart(store):
    made = Made(store, ["one", "other"])
    made.job(
        "one",
        {"train/loss": [2, 1]},
        params={"hardware.replicas": 1, "tracking.log_every": 1},
    )
    made.job(
        "other",
        {"train/loss": {2: 1}},
        params={"hardware.replicas": 2, "tracking.log_every": 2},
    )
    finding = found(made)["trajectories"]
    assert (finding.figures["largest"], finding.figures["updates"]) == (0, 1)
    assert "of equal effective batch, seed and config train the same" in finding.text


def test_what_else_differs_between_jobs_of_one_trajectory_is_said(store):
    made = Made(store, ["one", "other"])
    for name, compiled in (("one", "false"), ("other", "true")):
        made.job(name, {"train/loss": [2, 1]}, params={"hardware.xla": compiled})
    assert (
        "seed and config (but for hardware.xla) train the same"
        in found(made)["trajectories"].text
    )


# --- results, targets, batches ---


def test_error_bars_and_whether_groups_differ(store):
    names = [
        f"factor={factor} seed={seed}" for factor in (1, 2, 4) for seed in (0, 1, 2)
    ]
    made = Made(store, names, ["accumulation.factor", "seed"])
    for name, accuracy in zip(
        names, (0.80, 0.82, 0.84, 0.90, 0.92, 0.94, 0.91, 0.92, 0.93), strict=True
    ):
        made.job(
            name,
            {"val/loss": {1: 2.0, 2: 1.0}, "val/accuracy": {1: 0.1, 2: accuracy}},
            factor=int(name[7]),
        )
    read = comparison.read(store.uri, made.run_id)
    plot = next(plot for plot in plots.draw(read) if plot.key == "final_by_factor")
    assert (plot.data[0]["x"], plot.data[0]["y"]) == (
        [1, 2, 4],
        pytest.approx([0.82, 0.92, 0.92]),
    )
    assert plot.data[0]["error_y"]["array"] == pytest.approx([0.02, 0.02, 0.01])
    final = found(made)["final"]
    assert (final.figures["worst"], final.figures["groups"]["factor=2"]) == (
        "factor=1",
        pytest.approx(0.92),
    )
    assert "does just as well" in final.text


def test_a_lower_error_is_better_and_one_seed_is_said_to_be_one(store):
    made = Made(store, ["factor=1", "factor=2"])
    for factor, error in ((1, 0.2), (2, 0.1)):
        params = {"training.metrics.wrong._target_": "keras.metrics.MeanAbsoluteError"}
        made.job(
            f"factor={factor}",
            {"train/loss": [2, 1], "val/wrong": {2: error}},
            factor=factor,
            params=params,
        )
    every = found(made)
    assert every["final"].figures["best"] == "factor=2"
    assert "With one seed, chance is not told from effect" in every["final"].text
    assert every["final"].figures["difference"] is None


def test_seeds_alone_are_compared_with_nothing(store):
    made = Made(store, ["seed=0", "seed=1"])
    for seed, accuracy in ((0, 0.8), (1, 0.9)):
        curves = {"train/loss": [2, 1], "val/accuracy": {2: accuracy}}
        made.job(f"seed={seed}", curves, factor=1, params={"seed": seed})
    every = found(made)
    assert (
        every["final"].text
        == "Final val/accuracy of all jobs: 0.850 ± 0.071 (2 seeds)."
    )
    assert every["final"].figures["value"] == pytest.approx(0.85)
    assert "It is reached after" in every["time_to_target"].text


def test_time_to_the_target(by_batch):
    figures = by_batch["time_to_target"].figures
    worst = synthetic.cost_of(512, 2)
    horizon = 512 * math.ceil(3200 * 3.56 * 1.03 / 512)
    fall = (
        horizon / worst
    )  # from a loss of 2 to the lowest that the slowest job reaches
    assert figures["target"] == pytest.approx(2 - fall)
    assert (figures["metric"], figures["all_reach"], figures["seeds"]) == (
        "val/loss",
        True,
        3,
    )
    cost = synthetic.cost_of(32, 0)
    assert figures["best"] == "factor=1 batch=32"
    assert figures["seconds"] == pytest.approx(1.01 * cost * fall / 3200)
    assert figures["deviation"] == pytest.approx(0.01 * cost * fall / 3200)
    assert "so they differ" in by_batch["time_to_target"].text


def test_the_largest_batch_that_pays_and_the_critical_one(by_batch):
    figures = by_batch["largest_batch"].figures
    assert figures["ratio"] == pytest.approx(
        {b: (1 + b / 200) / 1.16 for b in (32, 64, 128, 256, 512)}
    )
    assert (figures["largest"], figures["least"], figures["open"]) == (256, 32, False)
    assert figures["critical"] == pytest.approx(200)
    assert figures["updates"][256] == pytest.approx(
        figures["updates"][32] * (1 + 256 / 200) / 1.16 / 8
    )


def test_the_noise_scale_beside_what_was_measured(by_batch):
    figures = by_batch["noise_scale"].figures
    assert (figures["predicted"], figures["deviation"], figures["runs"]) == (190, 0, 12)
    assert figures["measured"] == pytest.approx(200)
    assert figures["ratio"] == pytest.approx(0.95)
    assert figures["cost"][512] == pytest.approx(1 + 512 / 190)


def test_what_a_factor_costs(by_batch):
    figures = by_batch["cost"].figures
    assert figures["update_seconds"] == pytest.approx((0.01, 0.16))
    assert figures["examples_per_second"] == pytest.approx((3200, 3200))
    assert figures["peak_memory_bytes"] == (301 * 2**20, 316 * 2**20)


def test_a_sweep_over_any_key_is_drawn_by_it_and_its_best_value_is_listed(
    store, tmp_path
):
    names = [
        f"rate={rate} optimizer={name}"
        for rate in (0.01, 0.1)
        for name in ("adam", "lion")
    ]
    made = Made(store, names, ["optimizer.learning_rate", "optimizer"])
    made.client.set_tag(made.run_id, "sweep.question", "which rate?")
    for name, accuracy in zip(names, (0.5, 0.7, 0.9, 0.6), strict=True):
        made.job(name, {"train/loss": [2, 1], "val/accuracy": {2: accuracy}})
    drawn = {
        plot.key: plot for plot in plots.draw(comparison.read(store.uri, made.run_id))
    }
    adam, lion = drawn["final_by_rate"].data
    assert (adam["name"], adam["x"], adam["y"]) == (
        "optimizer=adam",
        [0.01, 0.1],
        [0.5, 0.9],
    )
    assert drawn["final_by_optimizer"].data[0]["x"] == ["adam", "lion"]
    assert lion["y"] == [0.7, 0.6]
    text = writer.write(store.uri, made.run_id, tmp_path).page.read_text()
    cells = re.findall(
        r"<tr><th scope=\"row\">(\w+=[\w.]+)</th><td>([\d.]+)</td><td>(.*?)</td>", text
    )
    assert cells == [
        ("rate=0.01", "0.7", "rate=0.01 optimizer=lion"),
        ("rate=0.1", "0.9", "rate=0.1 optimizer=adam"),
        ("optimizer=adam", "0.9", "rate=0.1 optimizer=adam"),
        ("optimizer=lion", "0.7", "rate=0.01 optimizer=lion"),
    ]
    assert "<p>which rate?</p>" in text


def test_what_is_fast_and_what_ends_best_are_both_said(store):
    made = Made(store, ["factor=1", "factor=2"])
    for factor, accuracy in ((1, 0.8), (2, 0.9)):
        curves = {"train/loss": [2, 1], "val/accuracy": {2: accuracy}}
        made.job(f"factor={factor}", curves, factor=factor, seconds=0.01 * factor)
    text = next(
        f.text
        for f in writer.summarize(comparison.read(store.uri, made.run_id))
        if f.topic == "next"
    )
    assert text.startswith("On this machine take factor=1: it reached the target first")
    assert text.endswith(
        "By its final val/accuracy factor=2 is better, though not by more than chance may do."
    )


def test_what_to_try_next(by_batch):
    assert "10 ± 0 ms → 160 ± 0 ms" in by_batch["cost"].text
    assert by_batch["next"].figures == {
        "recommended": "factor=1 batch=32",
        "batch": 256,
    }


def test_a_job_that_diverged_sets_no_target(store):
    made = Made(store, [f"rate={rate}" for rate in (1, 2, 3)])
    loss = 2 * 0.9 ** np.arange(20)
    made.job("rate=1", {"train/loss": loss})
    made.job("rate=2", {"train/loss": loss * 1.5})
    made.job("rate=3", {"train/loss": 2 * 1.5 ** np.arange(20)})
    figures = found(made)["time_to_target"].figures
    assert not figures["all_reach"]
    assert figures["target"] == pytest.approx(loss[-1] * 1.5)
    assert list(figures["groups"]) == ["rate=1", "rate=2"]


def test_a_loss_that_only_rose_has_no_target(store):
    made = Made(store, ["job"])
    made.job("job", {"train/loss": [2, 3, 4]})
    assert found(made)["time_to_target"].figures == {}


def test_optimizers_are_families_with_a_batch_each(store):
    names = [
        f"optimizer={name} factor={factor} batch={32 * factor}"
        for name in ("sgd", "adam")
        for factor in (1, 2)
    ]
    made = Made(store, names, ["optimizer", "accumulation.factor"])
    for name in names:
        factor = int(name.split("factor=")[1][0])
        rate = 0.9 if "sgd" in name else 0.8
        # sgd needs as many updates at either batch, so the larger one saves nothing; adam needs half as many
        rate = rate**factor if "adam" in name else rate
        loss = dict(enumerate(2 * rate ** np.arange(1, 41), start=1))
        made.job(
            name,
            {"train/loss": list(loss.values()), "val/loss": loss},
            factor=factor,
            batch=32 * factor,
        )
    every = summarize(comparison.read(store.uri, made.run_id))
    assert [f.figures["family"] for f in every if f.topic == "largest_batch"] == [
        "optimizer=sgd",
        "optimizer=adam",
    ]
    assert [
        f.figures["batch"] for f in every if f.topic == "next" and "Try an" in f.text
    ] == [128]
    assert [f.figures["largest"] for f in every if f.topic == "largest_batch"] == [
        32,
        64,
    ]
    plot = next(
        p
        for p in plots.draw(comparison.read(store.uri, made.run_id))
        if p.key == "final_by_factor"
    )
    assert [trace["name"] for trace in plot.data] == ["optimizer=sgd", "optimizer=adam"]


def test_jobs_that_ran_at_once_are_said_to_have(store):
    made = Made(store, ["factor=1", "factor=2"])
    loss = 2 * 0.9 ** np.arange(20)
    made.job("factor=1", {"train/loss": loss})
    made.clock = synthetic.STARTED
    made.job("factor=2", {"train/loss": loss}, factor=2)
    assert "Up to 2 jobs ran at the same time" in found(made)["time_to_target"].text


def test_jobs_that_never_ran_are_named_whatever_the_size_of_the_sweep(store):
    names = [
        f"optimizer=adamw learning_rate=0.0{number:03} batch=256"
        for number in range(400)
    ]  # 18,400 characters
    made = Made(store, names, varied=["optimizer", "optimizer.learning_rate"])
    made.job(names[0], {"train/loss": [2, 1]})
    assert found(made)["next"].figures["missing"] == names[1:]
    ParentRun(store.uri, made.run_id, made.experiment_id).tag(
        "sweep.jobs", json.dumps(names[:150])
    )  # two tags of four
    assert found(made)["next"].figures["missing"] == names[1:150]


# --- what must not be claimed ---


def test_the_tracing_of_the_first_update_is_no_training_time(store):
    made = Made(store, ["factor=1", "factor=2"])
    loss = 2 * 0.9 ** np.arange(20)
    for factor, tracing in ((1, 9.7), (2, 0.3)):
        seconds = [tracing, *[0.01 * factor] * 19]
        curves = {"train/loss": loss, "perf/update_seconds": seconds}
        made.job(f"factor={factor}", curves, factor=factor)
    figures = found(made)["time_to_target"].figures
    assert figures["groups"] == pytest.approx(
        {"factor=1": 20 * 0.01, "factor=2": 20 * 0.02}
    )
    assert figures["best"] == "factor=1"


def test_rounding_that_starts_after_the_first_update_has_its_amplification(store):
    made = Made(store, ["factor=1", "factor=2"])
    loss = 2 * 0.99 ** np.arange(30)
    apart = np.concatenate(
        [[0, 0], 1e-7 * 1.5 ** np.arange(28)]
    )  # bit-equal for two updates
    made.job("factor=1", {"train/loss": loss})
    made.job("factor=2", {"train/loss": loss * (1 - apart)}, factor=2)
    finding = found(made)["trajectories"]
    assert finding.figures["amplified"] == pytest.approx(
        1.5**27, rel=1e-3
    )  # 1e-7 of a loss has three digits left
    assert "at most 0 of their value at the first update" in finding.text
    assert (
        "apart by 1e-7 at update 3, and training amplified that 56815 times"
        in finding.text
    )


def test_what_was_not_logged_is_not_called_more_than_rounding(store):
    made = Made(store, ["factor=1", "factor=2"])
    steps = range(20, 121, 20)  # tracking.log_every=20
    for factor in (1, 2):
        loss = {
            step: 2 * 0.99**step * (1 - (factor - 1) * 1e-7 * 1.1**step)
            for step in steps
        }
        made.job(f"factor={factor}", {"train/loss": loss}, factor=factor)
    finding = found(made)["trajectories"]
    assert "at update 20, the first that was logged" in finding.text
    assert "more than rounding" not in finding.text
    assert finding.figures["rounding"]


def test_the_batch_that_still_pays_is_that_of_the_recommended_family(store):
    names = [
        f"optimizer={name} factor={f} batch={32 * f}"
        for name in ("sgd", "adam")
        for f in (1, 2, 4)
    ]
    made = Made(store, names, ["optimizer", "accumulation.factor"])
    for name in names:
        factor = int(name.split("factor=")[1][0])
        # sgd needs as many updates at any batch; adam pays to the largest batch, and is the fastest there
        rate = 0.9 if "sgd" in name else 0.8**factor
        loss = dict(enumerate(2 * rate ** np.arange(1, 81), start=1))
        curves = {"train/loss": list(loss.values()), "val/loss": loss}
        made.job(
            name,
            curves,
            factor=factor,
            batch=32 * factor,
            seconds=0.01 if "sgd" in name else 0.001,
        )
    every = summarize(comparison.read(store.uri, made.run_id))
    assert {
        f.figures["family"]: f.figures["largest"]
        for f in every
        if f.topic == "largest_batch"
    } == {
        "optimizer=sgd": 32,
        "optimizer=adam": 128,
    }
    recommended = next(f for f in every if "recommended" in f.figures)
    assert recommended.figures == {
        "recommended": "optimizer=adam factor=4 batch=128",
        "batch": 128,
    }
    assert "still pays" not in recommended.text  # it is the recommended one
    assert "not by more than chance may do" in recommended.text  # one seed


def test_what_differs_between_groups_is_no_error_bar(store):
    names = [
        f"factor={factor} batch={batch}" for factor in (1, 2) for batch in (32, 64, 128)
    ]
    made = Made(
        store, names, ["accumulation.factor", "accumulation.effective_batch_size"]
    )
    for name in names:
        factor, batch = int(name[7]), int(name.split("batch=")[1])
        loss = 2 * 0.9 ** (np.arange(1, 41) * 32 / batch)
        made.job(
            name,
            {"train/loss": loss, "val/accuracy": {40: batch / 128}},
            factor=factor,
            batch=batch,
        )
    sweep = comparison.read(store.uri, made.run_id)
    by_factor = next(
        plot for plot in plots.draw(sweep) if plot.key == "final_by_factor"
    )
    (means,) = by_factor.data
    assert "error_y" not in means
    assert means["y"] == pytest.approx([(32 + 64 + 128) / 3 / 128] * 2)
    assert (
        "With one seed at some batch, this is one observation"
        in found(made)["largest_batch"].text
    )


def test_equal_results_of_all_seeds_are_no_certainty(store):
    names = [f"factor={factor} seed={seed}" for factor in (1, 2) for seed in range(3)]
    made = Made(store, names, ["accumulation.factor", "seed"])
    for name in names:
        accuracy = (
            176 if "factor=1" in name else 175
        ) / 180  # of 180 examples: all seeds may well be equal
        curves = {"train/loss": [2, 1], "val/accuracy": {2: accuracy}}
        made.job(name, curves, factor=int(name[7]), seed=int(name[-1]))
    finding = found(made)["final"]
    assert finding.figures["difference"] is None
    assert "so they differ" not in finding.text
    assert (
        "The next is factor=2, 0.005556 behind; as neither varies over its seeds, chance is not known"
        in finding.text
    )


@pytest.mark.slow
def test_a_critical_batch_outside_of_what_was_tried_was_not_measured(store):
    finding = found(synthetic.at_fixed_micro_batch(store, critical=5000.0))[
        "noise_scale"
    ]
    assert finding.figures["extrapolated"] == pytest.approx(
        5000, rel=1e-2
    )  # the losses are logged at 40 updates
    assert "measured" not in finding.figures
    assert "extrapolate to" in finding.text


def test_a_sweep_without_a_file_is_run_again_as_it_was_run(store):
    made = Made(store, ["seed=0"], name="multirun")
    made.end("FAILED")
    every = summarize(comparison.read(store.uri, made.run_id))
    text = next(f.text for f in every if "missing" in f.figures)
    assert (
        f"pipeline train -m … tracking.sweep={made.run_id} tracking.uri={store.uri}"
        in text
    )
