"""The critical batch that is estimated from branches: against a simulation, by hand, and from a store."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pipeline.report import comparison, critical_batch, html_page, writer
from pipeline.report.critical_batch import TOLERANCE, measure
from tests import synthetic
from tests.synthetic import Made

B = 8
SIZES = [B << n for n in range(7)]
LENGTH = (
    256 * B
)  # examples of a branch, as of 200 updates at B, in whole updates of the largest batch
READ = LENGTH - SIZES[-1]  # where the last update of the largest batch begins


def trajectory(rng, batch, rate, noise, begin, examples):
    """Losses of SGD at √k times the rate on the quadratic ½ Σ h θ², as it reads examples, with and without chance.

    The gradient of an example is h θ + noise · z, and its loss has the chance of z · θ and of one of its own.
    """
    curvature, weights = np.logspace(-1.5, 0, 20), np.full(20, begin)
    losses, expected = [], []
    for first in range(0, LENGTH, batch):
        z = examples[first : first + batch].mean(axis=0)
        expected.append(0.5 * np.sum(curvature * weights**2))
        losses.append(expected[-1] + noise * z[:20] @ weights + 0.3 * z[20])
        weights = weights - rate * math.sqrt(batch / B) * (
            curvature * weights + noise * z[:20]
        )
    return np.full(len(losses), float(batch)), np.array(losses), expected


def problem(seed, *of_problem):
    rng = np.random.default_rng(seed)
    examples = rng.normal(size=(LENGTH, 21))
    return {batch: trajectory(rng, batch, *of_problem, examples) for batch in SIZES}


@pytest.mark.parametrize(
    ("rate", "noise", "begin", "truth"),
    [
        pytest.param(0.03, 0.2, 0.3, 2 * B, id="small", marks=pytest.mark.slow),
        pytest.param(0.2, 0.5, 1.0, 4 * B, id="medium"),
        pytest.param(
            0.1, 0.1, 0.1, 64 * B, id="beyond what is tried", marks=pytest.mark.slow
        ),
    ],
)
def test_the_critical_batch_of_a_noisy_quadratic(rate, noise, begin, truth):
    """Truth: the same rule for the expected losses of the weights after the same examples, over 100 trajectories."""
    runs = [problem(1000 + seed, rate, noise, begin) for seed in range(100)]
    mean = {
        batch: np.mean(
            [run[batch][2][READ // batch] for run in runs]
        )  # of the weights after READ examples
        for batch in SIZES
    }
    assert by_rule(mean) == truth
    found = []
    for seed in range(10):
        measured = measure(
            [
                {
                    batch: curve[:2]
                    for batch, curve in problem(seed, rate, noise, begin).items()
                }
            ]
        )
        found.append(measured.critical)
        assert measured.interval[0] <= measured.critical <= measured.interval[1]
    near = [batch for batch in found if abs(math.log2(batch / truth)) <= 1]
    assert len(near) >= 9, found


def by_rule(losses):
    """Return the largest batch up to which none is over ε above any smaller one."""
    for number, batch in enumerate(SIZES):
        if any(
            losses[batch] > losses[smaller] + TOLERANCE for smaller in SIZES[:number]
        ):
            return SIZES[number - 1]
    return SIZES[-1]


def line(batch, loss=2.0, slope=-0.001, updates=1024):
    sizes = np.full(updates // batch, float(batch))
    return sizes, loss + slope * (np.cumsum(sizes) - batch)


def test_literals_to_check_by_hand():
    """Losses that fall straight by 0.001 an example, of weights that have seen as many: all are equal, though the last
    means over the same 256 examples differ by the 128 of half an update. At 768 examples they are 2 − 0.768."""
    same = measure([{batch: line(batch) for batch in (1, 64, 256)}])
    assert list(same.losses.values()) == pytest.approx([1.232] * 3)
    assert (same.critical, same.interval) == (256, (256, 256))
    lagging = [line(batch)[1][-256 // batch :].mean() for batch in (1, 64, 256)]
    assert lagging == pytest.approx([1.232 - 0.1275, 1.232 - 0.096, 1.232])
    above = {1: line(1), 64: line(64, 2.009), 256: line(256, 2.011)}
    assert measure([above]).critical == 64
    # A batch beyond one that is too large does not count, and a better one sets the bar for those beyond it.
    assert measure([{1: line(1), 64: line(64, 2.02), 256: line(256)}]).critical == 1
    assert (
        measure([{1: line(1), 64: line(64, 1.98), 256: line(256, 1.995)}]).critical
        == 64
    )


def test_a_branch_that_diverged_ends_the_row():
    sizes, losses = line(64)
    found = measure(
        [
            {
                1: line(1),
                16: line(16),
                64: (sizes[:5], np.append(losses[:4], np.nan)),
                256: line(256),
            }
        ]
    )
    assert (found.critical, list(found.losses), found.diverged) == (16, [1, 16], 64)
    assert measure([{1: (sizes, losses * np.nan), 16: line(16)}]) is None
    assert measure([{1: line(1)}]) is None
    assert (
        measure([{64: (sizes[:1], losses[:1]), 256: line(256)}]) is None
    )  # one loss has no spread


def test_the_interval_holds_the_truth_and_seeds_widen_it():
    rng = np.random.default_rng(0)

    def seed(chance, noise):
        curves = {
            batch: line(batch, 2 + 0.008 * n)
            for n, batch in enumerate((8, 16, 32, 64, 128))
        }
        shared = rng.normal(size=1024)
        return {
            batch: (
                sizes,
                losses
                + rng.normal() * chance
                + noise * shared.reshape(-1, batch).mean(axis=1),
            )
            for batch, (sizes, losses) in curves.items()
        }

    assert measure([seed(0, 0)]).interval == (16, 16)
    low, high = measure([seed(0, 1)]).interval
    assert low <= 16 <= high
    assert low < high
    apart = measure([seed(0.01, 0) for _ in range(3)])
    assert apart.interval[0] < apart.interval[1]
    assert 0.006 < np.mean(apart.errors) < 0.02  # 1.96 · 0.01 / √3 = 0.011


def made_of(store, losses, status):
    """A sweep of branches after update 400 at batches of 32 on, with a noise scale of 40."""
    made = Made(store, [f"batch={batch}" for batch in losses], name="critical")
    for batch, loss in losses.items():
        tags = {
            "start.run": "a" * 32,
            "start.update": "400",
            "accumulation.stages": f"[[0, 32], [400, {batch}]]",
        }
        curves = {
            "train/loss": line(batch, loss)[1],
            "train/gradient_noise_scale": [40.0] * (1024 // batch),
        }
        curves["train/effective_batch_size"] = [batch] * (1024 // batch)
        params = {"scaling.reference_batch_size": 32}
        if batch in status:
            made.job(
                f"batch={batch}",
                curves,
                factor=1,
                batch=32,
                tags=tags,
                params=params,
                status=status[batch],
            )
    return made


def test_what_is_larger_than_a_missing_branch_is_not_judged(tmp_path):
    store, ended = synthetic.store(tmp_path), "FINISHED"
    losses = {32: 2.0, 64: 2.005, 128: 2.004, 256: 2.003}
    whole = made_of(store, losses, dict.fromkeys(losses, ended))
    assert (
        critical_batch.measured(comparison.read(store.uri, whole.run_id)).critical
        == 256
    )
    failed = made_of(store, losses, {32: ended, 64: ended, 128: "FAILED", 256: ended})
    assert (
        critical_batch.measured(comparison.read(store.uri, failed.run_id)).critical
        == 64
    )


def test_a_report_has_the_critical_batch_a_schedule_and_a_picture(tmp_path):
    store = synthetic.store(tmp_path)
    finished = dict.fromkeys((32, 64, 128), "FINISHED")
    made = made_of(store, {32: 2.0, 64: 2.005, 128: 2.004, 256: 2.0}, finished)
    made.end("FAILED")
    found = {
        f.topic: f
        for f in writer.write(store.uri, made.run_id, tmp_path / "report").findings
    }
    assert list(found) == ["jobs", "critical", "schedule", "noise_scale"]
    assert found["critical"].figures["critical"] == 128
    assert found["schedule"].figures["schedule"] == (
        "'accumulation.batch_schedule=[{start:{updates:0},effective_batch_size:32},"
        "{start:{updates:400},effective_batch_size:128}]' scaling.rule=sqrt scaling.reference_batch_size=32"
    )
    assert found["noise_scale"].text.startswith("40 examples. Merrill et al. 2025")
    (plot,) = critical_batch.branch_plots(comparison.read(store.uri, made.run_id))
    assert [drawn["name"] for drawn in plot.data] == [
        "branches",
        "lowest + 0.01",
        "critical batch",
        "noise scale",
    ]
    assert plot.data[0]["x"] == [32, 64, 128]
    html = (tmp_path / "report" / "report.html").read_text()
    assert "Loss by effective batch" in html
    assert json.dumps(html_page.finite(found["critical"].figures["losses"]))
