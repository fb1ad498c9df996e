"""The benchmarks run and say what they found; how fast anything is, is not asserted here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ("--models", "mlp", "--rounds", "2", "--seconds", "0.01", "--starts", "1")
TRACKED = ("--tracked-rounds", "2", "--tracked-seconds", "0.05")


def bench(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_figure_for_every_contender_in_the_table_and_in_the_json(tmp_path):
    path = tmp_path / "result.json"
    done = bench("update", "fit", "tracking", "checkpoints", *TINY, *TRACKED, "--output", str(path))
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert {"device", "processors", "platform", "versions", "begun", "seconds", "options"} < set(result)
    found = {(figure["part"], figure["subject"], figure["what"]) for figure in result["figures"]}
    assert found == {
        ("update", "mlp", "update ÷ limit, calls"),
        ("update", "mlp", "update ÷ limit, strict"),
        ("update", "mlp", "with noise scale, 1 in 10 ÷ without"),
        ("update", "mlp", "time at factor 8 ÷ at factor 1"),
        ("fit", "mlp", "train ÷ fit, steps_per_execution=1"),
        ("fit", "mlp", "train ÷ fit, steps_per_execution=8"),
        ("tracking", "mlp", "tracked ÷ bare"),
        ("tracking", "mlp", "CPU of a logged update"),
        ("checkpoints", "mlp", "stall"),
        ("checkpoints", "mlp", "cost of one"),
        ("checkpoints", "mlp", "every five minutes ÷ bare"),
    }
    for figure in result["figures"]:
        assert all(math.isfinite(value) for value in figure["values"])
        assert figure["what"] == "cost of one" or all(value > 0 for value in figure["values"])
        first, third = figure["quartiles"]
        assert first <= figure["median"] <= third
        assert figure["what"] in done.stdout
    ratios = [figure for figure in result["figures"] if not figure["unit"] and figure["part"] != "checkpoints"]
    assert all(len(figure["values"]) == 2 and len(figure["best"]) == 2 for figure in ratios)


@pytest.mark.slow
def test_the_start_is_measured_on_a_new_and_on_an_existing_store(tmp_path):
    path = tmp_path / "result.json"
    done = bench("startup", *TINY, "--output", str(path))
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())["figures"]
    assert [figure["subject"] for figure in figures] == ["--help", "wrong config", "new store", "existing store"]
    assert all(len(figure["values"]) == 1 and math.isfinite(figure["median"]) for figure in figures)


def test_an_unknown_part_is_refused(tmp_path):
    done = bench("updates", "--output", str(tmp_path / "result.json"))
    assert done.returncode == 2
    assert "PART must be one of startup, update, fit, tracking, checkpoints. Received: updates" in done.stderr


def test_quartiles_and_targets():
    from benchmarks.figures import Figure, table

    figure = Figure("update", "mlp", "a ÷ b", [1.0, 3.0, 2.0, 4.0, 5.0], best={"a": 1234.0}, at_least=3.0)
    assert (figure.median, figure.quartiles, figure.met) == (3.0, (2.0, 4.0), True)
    missed = Figure("startup", "--help", "to the answer", [1.5], "s", at_most=1.0)
    assert (missed.quartiles, missed.met) == ((1.5, 1.5), False)
    assert Figure("tracking", "mlp", "c ÷ d", [1.0]).met is None
    head, _, *rows = table([figure, missed]).splitlines()
    assert head.split()[:4] == ["part", "of", "figure", "median"]
    assert rows[0].split()[-2:] == ["a", "1,234"]
    assert "MISSED" in rows[1]


def test_contenders_take_turns_and_their_errors_are_not_lost():
    from benchmarks.turns import Coroutine, alternate

    order = []

    def body(name):
        def run(pause):
            while True:
                order.append(name)
                pause()

        return Coroutine(run)

    contenders = {"a": body("a"), "b": body("b")}
    times = alternate(contenders, 3)
    for contender in contenders.values():
        contender.close()
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}

    def broken(pause):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Coroutine(broken)()
