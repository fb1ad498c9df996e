"""The best value at an edge of a search's range is named in the next steps."""

from __future__ import annotations

import json

import pytest

from pipeline.report import reading
from pipeline.report.search_range import SearchRange, recorded_ranges
from pipeline.report.writer import summarize
from tests import synthetic
from tests.synthetic import PlantedSweep

RATE = "optimizer.learning_rate"
INTERVAL = SearchRange(1e-4, 1e-1, log=True)
LIST = SearchRange(1, 8, listed=True)


@pytest.mark.parametrize(
    ("searched", "best", "tried", "edge"),
    [
        (INTERVAL, 1.5e-4, [1.5e-4, 1e-3, 1e-2], "lower"),
        (INTERVAL, 9e-2, [9e-2, 1e-3, 1e-2], "upper"),
        (INTERVAL, 5e-4, [5e-4, 1e-3, 1e-2], ""),  # not in the last tenth
        (INTERVAL, 1.5e-4, [1.2e-4, 1.5e-4, 1e-2], ""),  # a lower one was tried
        (INTERVAL, 9e-2, [9e-2, 1e-2], ""),
        (SearchRange(0, 1), 0.95, [0.95, 0.5, 0.1], "upper"),
        (LIST, 8, [1, 4, 8], "upper"),
        (LIST, 4, [1, 2, 4], ""),
    ],
)
def test_the_edge_at_which_the_best_value_lies(searched, best, tried, edge):
    assert searched.edge(best, tried) == edge


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"ranges": [1]}', '{"ranges": {"x": {"low": "a"}}}']
)
def test_a_tag_that_was_edited_has_no_ranges(text):
    assert recorded_ranges({"sweep.best": text}) == {}


def test_the_report_says_beyond_which_edge_to_search(tmp_path):
    names = ["rate=0.00011", "rate=0.001", "rate=0.01"]
    sweep = PlantedSweep(synthetic.store(tmp_path), names, [RATE])
    for number, name in enumerate(names):
        sweep.job(name, {"train/loss": [3, 1 + number]})
    searched = {"low": 1e-4, "high": 1e-1, "log": True, "listed": False}
    ranges = {RATE: searched, "model.dropout": {**searched, "log": False}}
    best = {"loss": 1.0, "overrides": [f"{RATE}=0.00011"], "ranges": ranges}
    sweep.tag(sweep.run_id, **{"sweep.best": json.dumps(best)})
    sweep.end()
    steps = []
    for finding in summarize(reading.read(sweep.store.uri, sweep.run_id)):
        if finding.topic == "next":
            steps.append(finding.text)
    assert steps == [
        "Take rate=0.00011: the lowest loss of the search. This is one seed, so the "
        "effect of chance is unknown. To add seeds, repeat the search's command with "
        f"{RATE}=0.00011 seed=0,1,2 hydra.sweeper.trials=3 hydra.sweeper.at_once=3",
        "Search optimizer.learning_rate below 0.0001, too: the best value, 0.00011, "
        "lies at the lower edge of the search, which was from 0.0001 to 0.1.",
    ]
