"""The catalogue of traps: ours gets each right, Keras' own accumulation does not, and the page says what was found."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import numpy as np
import pytest

from benchmarks.conformance import __main__ as command
from benchmarks.conformance import in_keras, keras_fit, ours, page
from benchmarks.conformance.cases import (
    CASES,
    CLASSES,
    FACTOR,
    IGNORED,
    MICRO,
    RATE,
    Case,
    effective_batches,
    examples,
    initial_weights,
    micro_batches,
)
from benchmarks.conformance.outcome import RIGHT, Outcome, by_log, by_weights, measured
from benchmarks.conformance.ways import LIBRARIES
from benchmarks.processes import PEERS
from tests.parameters import mostly_slow
from tests.running import ROOT

BY_NAME = {case.name: case for case in CASES}
RESULTS = json.loads((ROOT / "docs" / "conformance.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")


def recorded():
    """Every outcome of the page as (library, way, case, outcome)."""
    for library, result in RESULTS.items():
        for way, outcomes in result["outcomes"].items():
            for name, outcome in outcomes.items():
                yield library, way, BY_NAME[name], Outcome(**outcome)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_is_right(float64, case):
    outcome = measured(ours.ours, case)
    assert outcome.verdict(case) == "right", outcome
    assert outcome.rows == (1 if case.logged else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "least"),
    [
        ("equal", "right", 0),
        ("ragged", "wrong", 1e-2),
        ("tail", "wrong", 1e-1),
        ("devices", "raises", None),
    ],
)
def test_keras_falls_into_its_traps(float64, name, verdict, least):
    outcome = measured(keras_fit.fit, BY_NAME[name])
    assert outcome.verdict(BY_NAME[name]) == verdict, outcome
    if least is None:
        assert (
            outcome.raised
            == "RuntimeError: `merge_call` called while defining a new graph or a tf.function"
        )
    else:
        assert outcome.error >= least


def by_hand(case: Case) -> tuple[list[np.ndarray], list[float]]:
    """Weights and losses of SGD on whole batches, in NumPy."""
    weights, losses = list(initial_weights()), []
    for update, (x, y, *w) in enumerate(effective_batches(case)):
        kernel, bias, last, last_bias = weights
        weight = np.broadcast_to(w[0] if w else 1.0, y.shape) * (y != IGNORED)
        weight = weight / (
            weight.sum() if case.divided_by == "weights" else (y != IGNORED).sum()
        )
        hidden = np.tanh(x @ kernel + bias)
        logits = hidden @ last + last_bias
        chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        labels = np.eye(CLASSES)[np.where(y == IGNORED, 0, y)]
        squares = sum((each**2).sum() for each in weights)
        losses.append(
            float(
                -(weight * np.log((chances * labels).sum(-1))).sum()
                + case.penalty * squares
            )
        )
        error = weight[..., None] * (chances - labels)
        back = (error @ last.T) * (1 - hidden**2)
        x, hidden, error, back = (
            each.reshape(-1, each.shape[-1]) for each in (x, hidden, error, back)
        )
        gradients = [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
        gradients = [
            g + 2 * case.penalty * each
            for g, each in zip(gradients, weights, strict=True)
        ]
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
        scale = 1 if case.clip is None else min(1, case.clip / norm)
        rate = RATE * case.decay**update * scale
        weights = [
            each - rate * gradient
            for each, gradient in zip(weights, gradients, strict=True)
        ]
    return weights, losses


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_large_batch_is_that_of_numpy(float64, case):
    weights, losses = in_keras.large(case, list(effective_batches(case)))
    expected, expected_losses = by_hand(case)
    assert by_weights(weights, expected).error < RIGHT
    assert losses == pytest.approx(expected_losses, rel=RIGHT)


def test_every_clip_clips():
    (case,) = [case for case in CASES if case.clip]
    free, _ = by_hand(dataclasses.replace(case, clip=None))
    assert by_weights(by_hand(case)[0], free).error > 0.1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_micro_batches_are_the_effective_batches(case):
    """In the same order; only the last one of an epoch may be smaller, and those of an update fill it."""
    updates, parts_of = (
        zip(*cut(case), strict=True) for cut in (effective_batches, micro_batches)
    )
    for whole, parts in zip(updates, parts_of, strict=True):
        np.testing.assert_array_equal(np.concatenate(whole), np.concatenate(parts))
    lengths = [len(y) for _, y, *_ in micro_batches(case)]
    per_epoch = -(-sum(case.sizes) // MICRO)
    assert len(lengths) == case.epochs * per_epoch
    assert all(
        length == MICRO
        for number, length in enumerate(lengths, 1)
        if number % per_epoch
    )
    assert case.sizes[0] in (FACTOR * MICRO, sum(case.sizes))
    assert sum(len(y) for _, y, *_ in effective_batches(case)) == case.epochs * len(
        examples(case)[0]
    )


def test_an_error_is_relative_to_the_change():
    before = initial_weights()
    moved = [each + 1 for each in before]
    assert by_weights(moved, moved).error == 0
    assert by_weights(before, moved).error == pytest.approx(1)  # nothing was trained
    assert by_weights([each + 0.5 for each in before], moved).error == pytest.approx(
        0.5
    )


def test_verdicts():
    case, logged = BY_NAME["equal"], BY_NAME["logs"]
    assert Outcome(1e-13).verdict(case) == "right"
    assert Outcome(1e-11).verdict(case) == "wrong"
    assert Outcome(raised="ValueError: no").verdict(case) == "raises"
    assert Outcome(note="has no log").verdict(case) == "none"
    assert by_log([1.0, 2.0], 2, [1.0, 2.0]).verdict(logged) == "right"
    assert by_log([1.0, 2.01], 2, [1.0, 2.0]).verdict(logged) == "wrong"
    assert (
        by_log([1.0, 2.0], 8, [1.0, 2.0]).verdict(logged) == "wrong"
    )  # four rows each

    def way(case):
        raise ValueError(
            "Exception encountered when calling Cond.call().\n\n\x1b[1mThe first. The second.\nMore"
        )

    assert measured(way, case) == Outcome(raised="ValueError: The first")


def test_the_page_says_what_the_json_says():
    written = re.search(f"{page.BEGIN}\n\n(.*)\n\n{page.END}", PAGE, re.DOTALL)
    assert written
    assert written[1] == page.text(RESULTS)


def test_all_was_measured_and_nothing_lies_near_the_bound():
    assert set(RESULTS) == {library.module for library in LIBRARIES}
    for library, way, case, outcome in recorded():
        where = library, way, case.name, outcome
        if library == "ours":
            assert outcome.verdict(case) == "right", where
        if case.name == "equal":
            assert outcome.verdict(case) == "right", where
        if way == "in_a_loop":
            assert outcome.verdict(case) == ("none" if case.logged else "right"), where
        if outcome.error is not None and not case.logged:
            assert not RIGHT < outcome.error < 1e-3, where
    for library in LIBRARIES:
        outcomes = RESULTS[library.module]["outcomes"]
        assert set(outcomes) == {call.name for call in library.calls}
        assert all(set(found) == set(BY_NAME) for found in outcomes.values())


def test_a_cell():
    notes: list[str] = []
    outcomes = {
        "equal": dataclasses.asdict(Outcome(2e-16)),
        "ragged": dataclasses.asdict(Outcome(0.123)),
        "devices": dataclasses.asdict(Outcome(raised="RuntimeError: no")),
        "devices_tokens": dataclasses.asdict(Outcome(raised="RuntimeError: no")),
        "logs": dataclasses.asdict(Outcome(0.0, 4, note="by a callback")),
    }
    cells = [page.cell(BY_NAME[name], outcomes, notes) for name in (*outcomes, "tail")]
    assert cells == [
        "right 2e-16",
        "**wrong** 0.1",
        "**raises** [1]",
        "**raises** [1]",
        "**wrong** 4 rows, 0 [2]",
        "",
    ]
    assert notes == ["`` RuntimeError: no ``", "by a callback"]


def test_parts_are_measured_alone_and_the_rest_stays(tmp_path, monkeypatch, capsys):
    (tmp_path / "conformance.md").write_text(
        f"before\n{page.BEGIN}\n{page.END}\nafter\n"
    )
    (tmp_path / "conformance.json").write_text(json.dumps(RESULTS))
    again = RESULTS["ours"] | {"versions": {"keras": "99"}}
    monkeypatch.setattr(command, "measure", lambda library: again)
    monkeypatch.setattr(command, "PEERS", tmp_path / "nothing")
    monkeypatch.setattr(
        sys, "argv", ["conformance", "ours", "optax_updates", "--docs", str(tmp_path)]
    )
    command.main()
    assert (
        "optax_updates is left out: `make peers` sets it up" in capsys.readouterr().err
    )
    assert json.loads((tmp_path / "conformance.json").read_text()) == RESULTS | {
        "ours": again
    }
    assert (tmp_path / "conformance.md").read_text() == "\n".join(
        [
            "before",
            page.BEGIN,
            "",
            page.text(RESULTS | {"ours": again}),
            "",
            page.END,
            "after",
            "",
        ]
    )
    monkeypatch.setattr(sys, "argv", ["conformance", "our"])
    with pytest.raises(SystemExit):
        command.main()
    assert "LIBRARY must be one of ours, keras_fit, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "library",
    mostly_slow(LIBRARIES, [], [each for each in LIBRARIES if each.module == "ours"]),
    ids=lambda library: library.module,
)
def test_a_library_does_what_the_page_says(library):
    if library.peer and not PEERS.exists():
        pytest.skip(
            "others are run where `make peers` has set them up, which takes 6 GB"
        )
    found = command.measure(library)["outcomes"]
    for name, outcomes in RESULTS[library.module]["outcomes"].items():
        for case in CASES:
            now, then = (
                Outcome(**found[name][case.name]),
                Outcome(**outcomes[case.name]),
            )
            assert now.verdict(case) == then.verdict(case), (name, case.name, now)
            if then.verdict(case) == "wrong":
                assert now.error == pytest.approx(then.error, rel=1e-6)
