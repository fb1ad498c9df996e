"""The catalogue of traps: ours gets each right, Keras' own accumulation does not.

The page shows the recorded outcomes.
"""

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
from benchmarks.conformance.outcome import (
    RIGHT,
    LargeBatches,
    Outcome,
    by_log,
    by_weights,
    measured,
)
from benchmarks.conformance.ways import LIBRARIES
from benchmarks.processes import PEERS
from tests.parameters import mostly_slow
from tests.running import ROOT

BY_NAME = {case.name: case for case in CASES}
RESULTS = json.loads((ROOT / "docs" / "conformance.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")


def recorded():
    """Yield every outcome of the page as (library, way, case, outcome)."""
    for library, result in RESULTS.items():
        for way, outcomes in result["outcomes"].items():
            for name, outcome in outcomes.items():
                yield library, way, BY_NAME[name], Outcome(**outcome)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_is_right(float64, case):
    outcome = measured(ours.ours, case)
    assert outcome.verdict(case) == "right", outcome
    expected_rows = 1 if case.logged else None
    assert outcome.rows == expected_rows


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
        assert outcome.raised == (
            "RuntimeError: `merge_call` called while defining a new graph "
            "or a tf.function"
        )
    else:
        assert outcome.error >= least


def by_hand(case: Case) -> LargeBatches:
    """Train by SGD on large batches, in NumPy."""
    weights = list(initial_weights())
    losses = []
    for update, (x, y, *example_weights) in enumerate(effective_batches(case)):
        kernel, bias, last_kernel, last_bias = weights
        counted = _shares_of_the_mean(case, y, example_weights)
        hidden = np.tanh(x @ kernel + bias)
        logits = hidden @ last_kernel + last_bias
        chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        labels = np.eye(CLASSES)[np.where(y == IGNORED, 0, y)]
        cross_entropy = -(counted * np.log((chances * labels).sum(-1))).sum()
        squares = sum((array**2).sum() for array in weights)
        losses.append(float(cross_entropy + case.penalty * squares))

        error = counted[..., None] * (chances - labels)
        hidden_error = (error @ last_kernel.T) * (1 - hidden**2)
        error = _as_matrix(error)
        hidden_error = _as_matrix(hidden_error)
        gradients = [
            _as_matrix(x).T @ hidden_error,
            hidden_error.sum(0),
            _as_matrix(hidden).T @ error,
            error.sum(0),
        ]
        for gradient, array in zip(gradients, weights, strict=True):
            gradient += 2 * case.penalty * array

        rate = RATE * case.decay**update
        if case.clip is not None:
            norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
            rate *= min(1, case.clip / norm)
        pairs = zip(weights, gradients, strict=True)
        weights = [array - rate * gradient for array, gradient in pairs]
    return LargeBatches(tuple(weights), losses)


def _shares_of_the_mean(case, y, example_weights):
    """Return what the loss of each example or token is multiplied with."""
    is_counted = y != IGNORED
    if not example_weights:
        return is_counted / is_counted.sum()
    weights = example_weights[0] * is_counted
    if case.divided_by == "weights":
        return weights / weights.sum()
    return weights / is_counted.sum()


def _as_matrix(array):
    return array.reshape(-1, array.shape[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_large_batch_is_that_of_numpy(float64, case):
    large = in_keras.large(case, list(effective_batches(case)))
    expected = by_hand(case)
    assert by_weights(large.weights, expected.weights).error < RIGHT
    assert large.losses == pytest.approx(expected.losses, rel=RIGHT)


def test_every_clip_clips():
    (case,) = [case for case in CASES if case.clip]
    unclipped = by_hand(dataclasses.replace(case, clip=None))
    assert by_weights(by_hand(case).weights, unclipped.weights).error > 0.1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_micro_batches_are_the_effective_batches(case):
    """They are in the same order, and those of an update fill it.

    Only the last one of an epoch may be smaller.
    """
    examples_of_updates = zip(*effective_batches(case), strict=True)
    examples_of_parts = zip(*micro_batches(case), strict=True)
    for arrays, parts in zip(examples_of_updates, examples_of_parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(arrays), np.concatenate(parts))

    lengths = [len(y) for _, y, *_ in micro_batches(case)]
    per_epoch = -(-sum(case.sizes) // MICRO)
    assert len(lengths) == case.epochs * per_epoch
    for number, length in enumerate(lengths, 1):
        is_last_of_epoch = number % per_epoch == 0
        assert length == MICRO or is_last_of_epoch
    assert case.sizes[0] in (FACTOR * MICRO, sum(case.sizes))
    trained_examples = sum(len(y) for _, y, *_ in effective_batches(case))
    assert trained_examples == case.epochs * len(examples(case)[0])


def test_an_error_is_relative_to_the_change():
    before = initial_weights()
    moved = [array + 1 for array in before]
    halfway = [array + 0.5 for array in before]
    assert by_weights(moved, moved).error == 0
    assert by_weights(before, moved).error == pytest.approx(1)  # nothing was trained
    assert by_weights(halfway, moved).error == pytest.approx(0.5)


def test_verdicts():
    case = BY_NAME["equal"]
    logged = BY_NAME["logs"]
    assert Outcome(1e-13).verdict(case) == "right"
    assert Outcome(1e-11).verdict(case) == "wrong"
    assert Outcome(raised="ValueError: no").verdict(case) == "raises"
    assert Outcome(note="has no log").verdict(case) == "none"
    assert by_log([1.0, 2.0], 2, [1.0, 2.0]).verdict(logged) == "right"
    assert by_log([1.0, 2.01], 2, [1.0, 2.0]).verdict(logged) == "wrong"
    # Four rows for each update.
    assert by_log([1.0, 2.0], 8, [1.0, 2.0]).verdict(logged) == "wrong"

    def way(case):
        raise ValueError(
            "Exception encountered when calling Cond.call().\n\n"
            "\x1b[1mThe first. The second.\nMore"
        )

    assert measured(way, case) == Outcome(raised="ValueError: The first")


def test_the_page_says_what_the_json_says():
    written = re.search(f"{page.BEGIN}\n\n(.*)\n\n{page.END}", PAGE, re.DOTALL)
    assert written
    assert written[1] == page.text(RESULTS)


def test_all_was_measured_and_nothing_lies_near_the_bound():
    assert set(RESULTS) == {library.module for library in LIBRARIES}
    for library, way, case, outcome in recorded():
        where = f"{library}, {way}, {case.name}: {outcome}"
        if library == "ours" or case.name == "equal":
            assert outcome.verdict(case) == "right", where
        if way == "in_a_loop":
            expected = "none" if case.logged else "right"
            assert outcome.verdict(case) == expected, where
        if outcome.error is not None and not case.logged:
            assert not RIGHT < outcome.error < 1e-3, where

    for library in LIBRARIES:
        outcomes = RESULTS[library.module]["outcomes"]
        assert set(outcomes) == {call.name for call in library.calls}
        for outcomes_by_case in outcomes.values():
            assert set(outcomes_by_case) == set(BY_NAME)


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
    json_file = tmp_path / "conformance.json"
    document = tmp_path / "conformance.md"
    json_file.write_text(json.dumps(RESULTS))
    document.write_text(f"before\n{page.BEGIN}\n{page.END}\nafter\n")
    again = RESULTS["ours"] | {"versions": {"keras": "99"}}
    monkeypatch.setattr(command, "measure", lambda library: again)
    monkeypatch.setattr(command, "PEERS", tmp_path / "nothing")
    arguments = ["conformance", "ours", "optax_updates", "--docs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    command.main()

    expected = "optax_updates is left out: `make peers` sets it up"
    assert expected in capsys.readouterr().err
    results = RESULTS | {"ours": again}
    assert json.loads(json_file.read_text()) == results
    written = f"{page.BEGIN}\n\n{page.text(results)}\n\n{page.END}"
    assert document.read_text() == f"before\n{written}\nafter\n"

    monkeypatch.setattr(sys, "argv", ["conformance", "our"])
    with pytest.raises(SystemExit):
        command.main()
    assert "LIBRARY must be one of ours, keras_fit, " in capsys.readouterr().err


OURS = [library for library in LIBRARIES if library.module == "ours"]


@pytest.mark.parametrize(
    "library",
    mostly_slow(LIBRARIES, [], OURS),
    ids=lambda library: library.module,
)
def test_a_library_does_what_the_page_says(library):
    if library.peer and not PEERS.exists():
        pytest.skip(
            "others are run where `make peers` has set them up, which takes 6 GB"
        )
    measured_again = command.measure(library)["outcomes"]
    for name, outcomes in RESULTS[library.module]["outcomes"].items():
        for case in CASES:
            now = Outcome(**measured_again[name][case.name])
            then = Outcome(**outcomes[case.name])
            assert now.verdict(case) == then.verdict(case), (name, case.name, now)
            if then.verdict(case) == "wrong":
                assert now.error == pytest.approx(then.error, rel=1e-6)
