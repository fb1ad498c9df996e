"""The horizons of a run that was resumed with another one are recorded and read."""

from __future__ import annotations

import json

import pytest

from pipeline.config.sizes import Horizon
from pipeline.tracking import horizons
from pipeline.tracking.journal_lines import RunStart

OLD = RunStart(params={"training.epochs": "600", "derived.updates": 7200})


def segment(after, unit, length, updates):
    """Return the entries of a segment that describe its horizon."""
    return horizons.of_segment(after, Horizon(unit, length), updates).entry()


FIRST = segment(0, "epochs", 600, 7200)
NOW = RunStart(params=OLD.params, segment=FIRST)


def texts(in_force):
    return [f"{horizon.override} after {horizon.after}" for horizon in in_force]


@pytest.mark.parametrize("start", [NOW, OLD])
@pytest.mark.parametrize(
    ("resumed", "expected"),
    [
        ([], ["training.epochs=600 after 0"]),
        ([segment(9, "epochs", 600, 7200)], ["training.epochs=600 after 0"]),
        # A version that recorded no horizon of a segment.
        ([{"after": 9}], ["training.epochs=600 after 0"]),
        (
            [segment(9, "epochs", 70, 840), segment(20, "epochs", 70, 840)],
            ["training.epochs=600 after 0", "training.epochs=70 after 9"],
        ),
        # No update was trained towards 70 epochs.
        (
            [segment(9, "epochs", 70, 840), segment(9, "updates", 30, 30)],
            ["training.epochs=600 after 0", "training.updates=30 after 9"],
        ),
        ([segment(0, "updates", 30, 30)], ["training.updates=30 after 0"]),
    ],
)
def test_horizons_are_those_towards_which_updates_were_trained(
    start, resumed, expected
):
    in_force = horizons.of_run(start, resumed)
    assert texts(in_force) == expected
    tag = horizons.tag(start, in_force, ())
    assert bool(tag) == (expected != ["training.epochs=600 after 0"])
    if tag:
        assert horizons.of_tags(tag) == in_force
    # A run that has the tag keeps it up to date.
    assert horizons.of_tags(horizons.tag(start, in_force, [horizons.TAG])) == in_force


def test_params_and_the_name_have_the_last_horizon():
    in_force = horizons.of_run(NOW, [segment(9, "updates", 30, 30)])
    tags = horizons.tag(NOW, in_force, ())
    params = {"training.epochs": "600", "training.updates": "null", "seed": "0"}
    assert horizons.current_params(params, {}) == params
    assert horizons.current_params(params, tags) == {
        "training.epochs": "null",
        "training.updates": "30",
        "derived.updates": "30",
        "seed": "0",
    }
    name = "digits epochs=600 rate=0.1"
    assert horizons.current_name(name, {}) == name
    assert horizons.current_name(name, tags) == (
        "digits epochs=600→updates=30 rate=0.1"
    )
    config = {"training": {"epochs": 600, "updates": None, "examples": None}}
    assert horizons.with_last(config, in_force)["training"]["updates"] == 30
    assert horizons.with_last(config, in_force)["training"]["epochs"] is None


@pytest.mark.parametrize(
    "text",
    [
        *("{", "3", "[[]]", "[" * 100_000),
        json.dumps([{"after": 0, "horizon": "training.epochs=${oc.env:HOME}"}]),
        json.dumps([{"after": 0, "horizon": "model.units=3"}]),
    ],
)
def test_a_tag_that_is_not_ours_is_ignored(text):
    assert horizons.of_tags({horizons.TAG: text}) == []


def test_rates_depend_on_a_share_of_the_horizon_or_a_link_to_it():
    constant = {"schedule": {"learning_rate": 0.1, "clock": "updates"}}
    assert not horizons.decides_rates(constant, {"a": "${optimizer.learning_rate}"})
    assert horizons.decides_rates(constant, {"a": "${training.epochs}"})
    assert horizons.decides_rates({"schedule": {"boundaries": ["50%"]}}, {})
    assert horizons.decides_rates({"scaling": {"warmup": "5%"}}, {})
