"""Whether two runs are the same: on histories small enough to see it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.common import rounding
from pipeline.rerun import agreement
from pipeline.rerun.agreement import Scope

EXACT = Path(__file__).parents[2] / "docs" / "exact.md"
NAN = math.nan
INF = math.inf


def history(**metrics: dict[int, float]) -> dict[str, dict[int, float]]:
    """Return a history; `train_loss={…}` is `train/loss`."""
    return {name.replace("_", "/", 1): points for name, points in metrics.items()}


def verdict_of(old, new, precision="float32", **options) -> str:
    return agreement.compare(old, new, precision, **options).verdict


class StoredRuns:
    """What `compare_runs` uses of MLflow's client: the histories of two runs."""

    def __init__(self):
        self.histories = {}

    def add(self, run_id: str, points, **params: str):
        """Add a finished run, and return it; `log__every` is the param `log.every`."""
        self.histories[run_id] = points
        data = SimpleNamespace(
            metrics=dict.fromkeys(points),
            params={key.replace("__", "."): value for key, value in params.items()},
            tags={},
        )
        info = SimpleNamespace(run_id=run_id, status="FINISHED")
        return SimpleNamespace(info=info, data=data)

    def get_metric_history(self, run_id: str, metric: str):
        return [
            SimpleNamespace(step=step, value=value)
            for step, value in self.histories[run_id][metric].items()
        ]


def test_the_same_points_are_bit_equal():
    old = history(train_loss={1: 0.1, 2: NAN, 3: INF}, val_loss={3: 0.0})
    new = history(train_loss={1: 0.1, 2: NAN, 3: INF}, val_loss={3: -0.0})
    outcome = agreement.compare(old, new, "float32")
    assert outcome.verdict == "bit-equal"
    assert outcome.text == "bit-equal: 4 points of 2 metrics"


def test_the_next_float_is_not_bit_equal():
    old = history(train_loss={1: 0.5})
    new = history(train_loss={1: math.nextafter(0.5, 1)})
    outcome = agreement.compare(old, new, "float64")
    assert outcome.verdict == "equal within rounding"
    assert (
        "train/loss at update 1: 0.5 then, 0.5000000000000001 now, 2.2e-16 relative"
        in outcome.text
    )


@pytest.mark.parametrize(
    ("precision", "update", "relative", "verdict"),
    [
        ("float32", 1, 0.9e-5, "equal within rounding"),
        ("float32", 1, 1.1e-5, "different"),
        ("float32", 4, 7.9e-5, "equal within rounding"),  # 1e-5 · 2³
        ("float32", 4, 8.1e-5, "different"),
        ("float32", 500, 0.9e-3, "equal within rounding"),
        ("float32", 500, 1.1e-3, "different"),
        ("float64", 1, 1.1e-12, "different"),
        ("float64", 3000, 0.9e-9, "equal within rounding"),
        ("float64", 3000, 1.1e-9, "different"),
    ],
)
def test_what_counts_as_rounding_grows_with_the_updates_up_to_a_bound(
    precision, update, relative, verdict
):
    larger = history(train_loss={update: 2.0})
    smaller = history(train_loss={update: 2.0 * (1 - relative)})
    assert verdict_of(larger, smaller, precision) == verdict
    assert verdict_of(smaller, larger, precision) == verdict


@pytest.mark.parametrize(
    ("relative", "verdict"), [(2.9e-2, "equal within rounding"), (3.1e-2, "different")]
)
def test_the_gradients_norm_is_more_sensitive(relative, verdict):
    old = history(train_gradient_norm={500: 2.0})
    new = history(train_gradient_norm={500: 2.0 * (1 - relative)})
    assert verdict_of(old, new) == verdict


def test_the_first_difference_is_of_the_earliest_update_and_there_the_training_loss():
    old = history(
        train_accuracy={2: 0.1, 3: 0.1}, train_loss={2: 1.0, 3: 1.0}, val_loss={1: 1.0}
    )
    new = history(
        train_accuracy={2: 0.3, 3: 0.1},
        train_loss={2: 1.5, 3: 9.0},
        val_loss={1: 1.0 + 1e-9},
    )
    outcome = agreement.compare(old, new, "float32")
    assert outcome.text == (
        "different from update 2 on: "
        "train/loss at update 2: 1.0 then, 1.5 now, 0.33 relative; "
        "the largest difference: train/loss at update 3: 1.0 then, 9.0 now, "
        "0.89 relative; "
        "the first difference within rounding: val/loss at update 1: 1.0 then, "
        "1.000000001 now, 1e-09 relative; 5 points of 3 metrics"
    )


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_is_never_rounding(value):
    old = history(train_loss={1: 1.0})
    new = history(train_loss={1: value})
    assert verdict_of(old, new) == "different"


def test_a_point_that_is_missing_is_a_difference():
    both = history(train_loss={1: 1.0, 2: 1.0})
    first = history(train_loss={1: 1.0})
    outcome = agreement.compare(both, first, "float32")
    assert outcome.text.startswith(
        "different from update 2 on: "
        "train/loss at update 2: 1.0 then, absent now; the largest difference: "
    )
    outcome = agreement.compare(first, both, "float32")
    assert outcome.text.startswith(
        "different from update 2 on: "
        "train/loss at update 2: absent then, 1.0 now; the largest difference: "
    )
    assert verdict_of(history(val_loss={1: 1.0}), {}) == "different"


def test_a_metric_that_only_the_new_run_has_is_left_out_and_named():
    old = history(train_loss={1: 1.0})
    new = history(train_loss={1: 1.0}, val_new={1: 1.0})
    outcome = agreement.compare(old, new, "float32")
    assert outcome.text == "bit-equal: 1 point of 1 metric (without val/new)"


def test_an_interrupted_run_is_compared_as_far_as_it_came():
    old = history(train_loss={1: 1.0, 2: 1.0})
    new = history(train_loss={1: 1.0, 2: 1.0, 3: 1.0}, val_loss={3: 1.0})
    outcome = agreement.compare(old, new, "float32", scope=Scope(until=2))
    assert outcome.verdict == "bit-equal"
    assert "up to update 2, where the recorded run ended" in outcome.text


def test_what_depends_on_how_a_batch_is_cut_is_compared_where_it_was_cut_alike():
    old = history(
        train_loss={1: 1.0},
        train_micro_steps={1: 4},
        train_gradient_noise_scale={1: 9.0},
    )
    new = history(
        train_loss={1: 1.0},
        train_micro_steps={1: 2},
        train_gradient_noise_scale={1: 8.0},
    )
    assert verdict_of(old, new, scope=Scope(same_cut=False)) == "bit-equal"
    assert verdict_of(old, new) == "different"


def test_a_run_that_was_resumed_with_another_cut_was_cut_differently():
    then = history(train_loss={1: 1.0, 2: 1.0}, train_micro_steps={1: 4, 2: 12})
    now = history(train_loss={1: 1.0, 2: 1.0}, train_micro_steps={1: 4, 2: 8})
    client = StoredRuns()
    old = client.add("old", then, derived__factor="4", derived__replicas="1")
    new = client.add("new", now, derived__factor="4", derived__replicas="1")
    first = {"after": 0, "cut": {"factor": 4, "replicas": 1}}
    second = {"after": 1, "cut": {"factor": 8, "replicas": 1}}

    outcome, _ = agreement.compare_runs(client, old, new, {}, segments=[first, second])
    assert outcome.text == "bit-equal: 2 points of 1 metric (without train/micro_steps)"
    # An older version, which began the run, recorded no limit in tokens.
    same = {"after": 1, "cut": first["cut"] | {"micro_batch_tokens": None}}
    for segments in ([], [first, same]):
        outcome, _ = agreement.compare_runs(client, old, new, {}, segments=segments)
        assert outcome.verdict == "different"


def test_runs_of_unequal_log_every_are_compared_at_the_steps_of_both():
    then = history(train_loss={2: 1.0, 4: 1.0}, val_loss={4: 1.0})
    now = history(train_loss={1: 9.0, 2: 1.0, 3: 9.0, 4: 1.0}, val_loss={4: 1.0})
    client = StoredRuns()
    old = client.add("old", then, tracking__log_every="2")
    new = client.add("new", now, tracking__log_every="1")
    for first, second in ((old, new), (new, old)):
        outcome, _ = agreement.compare_runs(client, first, second, {})
        assert outcome.text == (
            "bit-equal: 3 points of 2 metrics, with train/ only at the steps that both "
            "runs logged, since tracking.log_every differed"
        )
    now["train/loss"][4] = 2.0
    outcome, _ = agreement.compare_runs(client, old, new, {})
    assert outcome.text.startswith("different from update 4 on: ")

    # An evaluation that is missing, and a metric that the rerun does not have at all.
    for missing in ("train/loss", "val/loss"):
        client.histories["new"] = {**then, missing: {}}
        outcome, _ = agreement.compare_runs(client, old, new, {})
        assert f": {missing} at update" in outcome.text


@pytest.mark.parametrize(
    ("params", "settings"),
    [
        ({"training__evaluate_every": "epoch"}, {}),
        ({"training__evaluate_at_start": "true"}, {}),
        ({}, {"training.evaluate_every": 3}),  # of a segment of one of the runs
    ],
)
def test_runs_of_other_evaluations_are_compared_at_the_steps_of_both(params, settings):
    same = {"training__evaluate_every": "2", "training__evaluate_at_start": "false"}
    client = StoredRuns()
    then = history(train_loss={1: 1.0, 2: 1.0}, val_loss={2: 1.0, 4: 1.0})
    now = history(train_loss={1: 1.0, 2: 1.0}, val_loss={0: 9.0, 3: 9.0, 4: 1.0})
    old = client.add("old", then, **same)
    new = client.add("new", now, **same | params)
    segments = [{"after": 2, "settings": settings}]
    outcome, _ = agreement.compare_runs(client, old, new, {}, segments=segments)
    (key,) = settings or [name.replace("__", ".") for name in params]
    assert outcome.text == (
        "bit-equal: 3 points of 2 metrics, with val/ only at the steps that both runs "
        f"logged, since {key} differed"
    )

    del now["train/loss"][2]
    outcome, _ = agreement.compare_runs(client, old, new, {}, segments=segments)
    assert outcome.verdict == "different"


def test_the_last_row_before_a_longer_horizon_may_be_absent():
    old = history(train_loss={2: 1.0, 3: 1.0, 4: 1.0})
    new = history(train_loss={2: 1.0, 4: 1.0})
    assert verdict_of(old, new, scope=Scope(ends=[3])) == "bit-equal"
    assert verdict_of(old, new) == verdict_of(new, old, scope=Scope(ends=[3]))


# Accuracies over 128 examples, and the verdict on the second one.
moves_of_accuracies = pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (100 / 128, 102 / 128, "equal within rounding"),
        (100 / 128, 103 / 128, "different"),
        (0.78, 0.79, "different"),  # no share of 128 examples: nothing is counted
    ],
)


@moves_of_accuracies
def test_a_share_of_the_batch_may_move_by_two_examples(old, new, verdict):
    def in_training(accuracy: float):
        return history(
            train_accuracy={1: accuracy},
            train_effective_batch_size={1: 128},
            train_loss={1: 1.0},
        )

    assert verdict_of(in_training(old), in_training(new)) == verdict


@moves_of_accuracies
def test_a_share_of_the_validation_may_move_by_two_examples(old, new, verdict):
    then = history(val_accuracy={12: old})
    now = history(val_accuracy={12: new})
    assert verdict_of(then, now, examples={"validation": 128}) == verdict
    # Without the number of examples, nothing is counted.
    assert verdict_of(then, now) == "different"


@moves_of_accuracies
def test_a_share_of_a_further_validation_set_is_of_its_own_examples(old, new, verdict):
    then = {"val/late/accuracy": {0: old}}
    now = {"val/late/accuracy": {0: new}}
    counts = {"validation": 3, "validations.late": 128}
    assert verdict_of(then, now, examples=counts) == verdict
    counts = {"validation": 128, "validations.late": 3}
    assert verdict_of(then, now, examples=counts) == "different"


@pytest.mark.parametrize(
    ("metric", "old", "new", "examples"),
    [
        ("learning_rate", 5e-6, 1e-6, 128),
        # One 64th: a share of the examples by its value alone.
        ("learning_rate", 0.5, 0.515625, 128),
        ("learning_rate", 1e-3, 1e-5, 1),
        ("loss", 5e-6, 1e-9, 128),
        ("loss", 0.5, 0.515625, 128),
        ("gradient_norm", 0.25, 0.5, 8),
        ("gradient_noise_scale", 0.25, 0.5, 8),
        ("accuracy", 5e-6, 0.0, 128),  # near a count, and none
        ("accuracy", 98 / 128 + 5e-6, 100 / 128, 128),
        ("mine", 1.5, 1.0, 4),
        ("mine", -0.25, 0.0, 4),
        ("accuracy", 0.0, 1.0, 1),
        ("accuracy", 0.5, 1.0, 2),
    ],
)
def test_nothing_else_may_move_by_two_examples(metric, old, new, examples):
    batch_sizes = {"train/effective_batch_size": {1: examples}}
    for first, second in ((old, new), (new, old)):
        then = {f"train/{metric}": {1: first}, **batch_sizes}
        now = {f"train/{metric}": {1: second}, **batch_sizes}
        assert verdict_of(then, now) == "different"

        then = {f"val/{metric}": {1: first}}
        now = {f"val/{metric}": {1: second}}
        counts = {"validation": examples}
        assert verdict_of(then, now, "float64", examples=counts) == "different"


@pytest.mark.parametrize("examples", [3, 29, 128, 10_000, 1_281_167])
def test_a_share_is_known_in_float32(examples):
    def with_share(count: int):
        share = np.float32(count) / np.float32(examples)
        return {"val/it": {1: float(share)}}

    counts = {"validation": examples}
    for count in (0, 1, examples // 3, examples - 2):
        then = with_share(count)
        now = with_share(count + 2)
        verdict = verdict_of(then, now, examples=counts)
        assert verdict == "equal within rounding"


def test_runs_without_common_points_have_nothing_to_compare():
    new = history(train_loss={1: 1.0})
    for old in ({}, history(train_loss={})):
        outcome = agreement.compare(old, new, "float32", scope=Scope(until=0))
        assert outcome.text.startswith("nothing to compare: 0 points of ")


def test_a_counter_is_exact():
    for name in ("train/examples_seen", "train/effective_batch_size", "train/epoch"):
        old = {name: {900: 100000.0}}
        new = {name: {900: 100001.0}}
        assert verdict_of(old, new) == "different"


@pytest.mark.slow
def test_the_page_draws_both_runs_and_what_differs():
    old = history(train_loss={1: 1.0, 2: NAN, 3: 0.5}, val_loss={3: 1.0})
    new = history(train_loss={1: 1.0, 3: 0.4})
    page = agreement.page(old, new, "old & new", "different")
    data = re.search(
        r'<script type="application/json" id="plots">(.*?)</script>', page, re.DOTALL
    )
    losses, differences = json.loads(data[1])
    points_by_name = {}
    for trace in losses["data"]:
        points = zip(trace["x"], trace["y"], strict=True)
        points_by_name[trace["name"]] = dict(points)
    assert points_by_name["train/loss, then"] == {1: 1.0, 3: 0.5}
    assert points_by_name["train/loss, now"] == {1: 1.0, 3: 0.4}
    assert points_by_name["val/loss, then"] == {3: 1.0}

    difference = differences["data"][0]
    assert difference["x"] == [3]
    assert difference["y"] == [pytest.approx(0.2)]
    assert "<h1>old &amp; new</h1>" in page

    page_of_nothing = agreement.page({}, {}, "nothing", "")
    assert 'class="plotly-graph-div"' not in page_of_nothing


def test_the_documentation_shows_the_bounds_of_rounding():
    in_docs = {}
    for line in EXACT.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"\| (.+) \| (\d+) \| (\S+) \| (\S+) \|", line)
        if match:
            precision = match[1].partition(",")[0]
            in_docs[precision] = rounding.Rounding(
                int(match[2]), float(match[3]), float(match[4])
            )
    assert in_docs == rounding.BY_PRECISION


def test_the_unit_roundoff_of_a_dtype_is_that_of_its_precision():
    cases = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
    for dtype, bits in cases.items():
        bounds = rounding.of_dtype(dtype, in_tf32=False)
        assert bounds.unit_roundoff == 2.0**-bits

    # TF32 has the mantissa of float16, and is used for float32 alone.
    bounds = rounding.of_dtype("float32", in_tf32=True)
    assert bounds.unit_roundoff == 2.0**-11
    bounds = rounding.of_dtype("float64", in_tf32=True)
    assert bounds.unit_roundoff == 2.0**-53


def test_the_coarsest_precision_bounds_the_comparison_of_two_runs():
    assert rounding.coarsest({"float64", "float32"}) == "float32"
    assert rounding.coarsest({"float32", rounding.TF32}) == rounding.TF32
    assert rounding.coarsest({None}) == "float32"
