"""The verdict in the parent run: its description, its metrics, and the looks at it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.report import parent_verdict, reading, writer
from pipeline.report.equal_budget import BudgetContrast, MoreSeeds, Setting, WithoutLoss
from pipeline.report.seed_differences import BestAgainstBest, Difference
from pipeline.report.verdict import Verdict
from pipeline.sweep import mlflow_view
from pipeline.tracking.foreign_store import LONGEST_TAG
from tests import synthetic
from tests.synthetic import PlantedSweep

# Three seeds of factors 1 and 4, of which the second is better by about 0.2.
LOSSES = {1: [2.0, 2.02, 1.98], 4: [1.81, 1.8, 1.79]}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return synthetic.store(tmp_path_factory.mktemp("store"))


def add_jobs(
    made: PlantedSweep, losses: dict[int, Sequence[float]], first: int = 0
) -> None:
    """Add a job for each loss, whose seed is that of its place, from `first` on."""
    for factor, ends in losses.items():
        for seed, end in enumerate(ends, first):
            curve = {}
            for row in range(1, 7):
                curve[row * 16 // factor] = 5 + (end - 5) * row / 6
            rows = [5.0] * (96 // factor)
            made.job(
                f"factor={factor} seed={seed}",
                {"train/loss": rows, "val/loss": curve},
                factor=factor,
                batch=8 * factor,
                seed=seed,
                seconds=0.01 * factor,
            )


def sweep_in(store, losses: dict[int, Sequence[float]] = LOSSES) -> PlantedSweep:
    names = []
    for factor, ends in losses.items():
        names += [f"factor={factor} seed={seed}" for seed in range(len(ends))]
    made = PlantedSweep(store, names, ["accumulation.factor", "seed"], "does_it_pay")
    add_jobs(made, losses)
    made.end()
    note = mlflow_view.description(made.planned, "#/the/view", [["job"], ["a job"]])
    made.client.set_tag(made.run_id, parent_verdict.NOTE, note)
    made.client.set_tag(made.run_id, "sweep.folder", "/jobs/here")
    return made


@pytest.fixture(scope="module")
def published(store) -> tuple[PlantedSweep, str]:
    """Return a sweep with its verdict, and the description from before."""
    made = sweep_in(store)
    before = parent(made).tags[parent_verdict.NOTE]
    writer.publish(store.uri, made.run_id, [])
    return made, before


def parent(made: PlantedSweep) -> Any:
    return made.client.get_run(made.run_id).data


def test_the_description_begins_with_the_verdict_and_keeps_the_rest(
    store, published, capsys
):
    made, before = published
    note = parent(made).tags[parent_verdict.NOTE]
    lines = note.split("\n")
    link = "[Compare the runs of this sweep](#/the/view)"
    assert lines[0].startswith(f"**Accumulate by 4.** {link}")
    assert lines[2].startswith("> Accumulate by 4: compared with factor 1")
    assert note.endswith(before.partition("\n")[2].strip("\n"))

    # Another report replaces it.
    writer.publish(store.uri, made.run_id, [])
    assert parent(made).tags[parent_verdict.NOTE] == note
    out = capsys.readouterr().out
    assert out.startswith("Does accumulating pay?: Accumulate by 4")
    # A name may have several sweeps.
    which, _ = out.splitlines()[-2:]
    began = r"begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d in /jobs/here"
    assert re.fullmatch(
        rf"reported: sweep {made.run_id[:8]} \(does_it_pay\), {began}", which
    )


def test_its_figures_are_metrics_of_the_parent_run(store, published):
    made, _ = published
    sweep = reading.read(store.uri, made.run_id)
    verdict = writer.summarize(sweep)[0]
    assert verdict.topic == "verdict"
    low, high = verdict.figures["examples"]["interval"]
    values = parent(made).metrics
    assert values["verdict/factor"] == 4
    assert values["verdict/seeds"] == 3
    assert values["verdict/examples/difference"] == pytest.approx(-0.2)
    assert values["verdict/examples/low"] == pytest.approx(low)
    assert values["verdict/examples/high"] == pytest.approx(high)
    assert high < 0


@pytest.mark.slow
def test_a_verdict_with_more_seeds_is_one_more_look(store):
    """Seeds are added, and the interval is wider than that of a first look."""
    made = sweep_in(store)
    assert reading.read(store.uri, made.run_id).looks == ()
    writer.publish(store.uri, made.run_id, [])
    writer.publish(store.uri, made.run_id, [])
    assert reading.read(store.uri, made.run_id).looks == (3,)

    add_jobs(made, {1: [2.01], 4: [1.8]}, first=3)
    writer.publish(store.uri, made.run_id, [])
    assert reading.read(store.uri, made.run_id).looks == (3, 4)
    at_once = sweep_in(store, {1: [*LOSSES[1], 2.01], 4: [*LOSSES[4], 1.8]})
    writer.publish(store.uri, at_once.run_id, [])

    def width(sweep: PlantedSweep) -> float:
        values = parent(sweep).metrics
        return values["verdict/examples/high"] - values["verdict/examples/low"]

    assert width(made) > 1.2 * width(at_once)


def test_a_sweep_that_is_running_has_no_verdict_in_its_parent_run(store):
    made = sweep_in(store)
    made.client.update_run(made.run_id, "RUNNING")
    writer.publish(store.uri, made.run_id, [])
    assert parent(made).metrics == {}
    assert not parent(made).tags[parent_verdict.NOTE].startswith("**Accum")


def verdict_of(recipe: str, state: str = "few") -> Verdict:
    """Return a verdict with one seed, and 900 words of remarks."""
    difference = Difference(-0.5, None, 0, 1, paired=True)
    contrast = BudgetContrast(
        axis="examples",
        budget=1024,
        state=state,
        base=Setting("factor=1", 1, {"0": 2.0}),
        other=Setting("factor=4", 4, {"0": 1.5}),
        result=BestAgainstBest(0, 0, -0.5, -1.0, math.inf, difference),
        best_by_factor={},
        without=WithoutLoss(),
        most_seeds=1,
        more=MoreSeeds(2, (1, 4)),
    )
    return Verdict(
        recipe=recipe,
        micro=8,
        metric="val/loss",
        contrasts=[contrast],
        reasons={"seconds": "no job logged its time"},
        memory_ratio=1.0,
        rates={"examples": {}},
        command="",
        remarks=" words" * 900,
    )


def test_several_verdicts_have_names_of_their_own():
    verdicts = [verdict_of("scaling=none"), verdict_of("scaling=sqrt", "pays")]
    values = parent_verdict.metrics(verdicts)
    # One seed is no look, and what is not finite is no metric.
    assert values == {
        "verdict/scaling_none micro_8/examples/difference": -0.5,
        "verdict/scaling_none micro_8/examples/low": -1.0,
        "verdict/scaling_sqrt micro_8/examples/difference": -0.5,
        "verdict/scaling_sqrt micro_8/examples/low": -1.0,
        "verdict/scaling_sqrt micro_8/factor": 4,
    }


def test_a_long_verdict_leaves_room_for_the_results(store):
    rows = [["job", "val/loss"]]
    rows += [[f"factor={number} seed=0", "0.5"] for number in range(400)]
    made = PlantedSweep(store, [], name="long")
    note = mlflow_view.description(made.planned, "#/the/view", rows)
    verdicts = [verdict_of("scaling=none"), verdict_of("scaling=sqrt")]
    described = parent_verdict.with_verdicts(note, verdicts)
    assert len(described) <= LONGEST_TAG
    assert described.endswith(note.partition("\n")[2].strip("\n"))
    # A description that somebody wrote is kept.
    own = parent_verdict.with_verdicts("My own words.", verdicts[:1])
    assert own.startswith(
        "<!-- verdict -->\n> scaling=none: There are not enough seeds"
    )
    assert own.endswith("\nMy own words.")
    assert parent_verdict.with_verdicts(own, verdicts[:1]) == own


OWN_NOTE = """\
**Read me.** [Compare the runs of this sweep](#x). They differ in nothing.

**name**

> A quotation of mine,
>
> in two parts.



My last words.
"""


@pytest.mark.parametrize("note", [OWN_NOTE, OWN_NOTE.removeprefix("**Read me.** ")])
def test_what_somebody_wrote_is_kept_through_any_number_of_reports(note):
    verdicts = [verdict_of("scaling=none"), verdict_of("scaling=sqrt")]
    once = parent_verdict.with_verdicts(note, verdicts)
    described = once
    for _ in range(4):
        described = parent_verdict.with_verdicts(described, verdicts)
    assert described == once
    assert described.count("> scaling=") == 2
    assert "\n>\n>\n" not in described
    assert described.endswith(note.partition("\n")[2])

    fewer = parent_verdict.with_verdicts(described, verdicts[:1])
    assert "scaling=sqrt" not in fewer
    assert fewer.endswith(note.partition("\n")[2])


def test_a_verdict_of_an_earlier_version_is_replaced():
    """Those had no comments around them."""
    link = "[Compare the runs of this sweep](#x)."
    former = f"**Old: yes.** {link}\n\n> Old: yes\n>\n> Old: no\n\n**name**\n\n> Mine."
    verdict = verdict_of("scaling=none")
    described = parent_verdict.with_verdicts(former, [verdict])
    assert "Old" not in described
    assert described.startswith(f"**{verdict.headline}.** {link}\n<!-- ")
    assert described.endswith("-->\n\n**name**\n\n> Mine.")
