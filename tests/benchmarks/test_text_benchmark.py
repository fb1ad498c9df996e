"""The benchmark of texts has all its figures; how fast anything is, is not asserted."""

from __future__ import annotations

import math

import pytest

from benchmarks.processes import PEERS
from benchmarks.texts import Case

TINY = Case("help texts", effective=8, factor=4, with_peers=True, limit=64)
EXACT = 1e-5  # of a step of SGD in float32
LOOPS = {"PyTorch", "Trainer, by length"}


def by_name(figures):
    return {figure.what: figure for figure in figures}


@pytest.mark.soak
def test_every_contender_that_is_there_takes_turns():
    from benchmarks import text

    figures = by_name(text.measure(TINY, rounds=2))
    others = {"by examples", "fit", "fit, by length"}
    if PEERS.exists():
        others |= LOOPS
    expected = {"padding, by tokens", "padding, by examples", "speed, by tokens"}
    for other in others:
        expected |= {f"speed, {other}", f"by tokens ÷ {other}"}
    assert set(figures) == expected

    by_tokens = figures["padding, by tokens"].median
    assert 0 <= by_tokens < figures["padding, by examples"].median < 1
    for figure in figures.values():
        if not figure.what.startswith("padding"):
            assert len(figure.values) == 2
            assert min(figure.values) > 0
            assert math.isfinite(max(figure.values))


@pytest.mark.slow
def test_only_means_of_means_are_far_from_the_true_update():
    """So the model in PyTorch is that in Keras, too: its exact loop has the update."""
    from benchmarks import text_updates

    figures = by_name(text_updates.measure(TINY))
    exact = {"by tokens", "by examples"}
    others = {"fit", "fit, by length"}
    grouped = {"fit, by length"}
    if PEERS.exists():
        exact.add("Trainer, by length")
        others |= {"PyTorch", "Trainer, by length, own mean"}
        grouped.add("Trainer, by length")
    expected = {f"spread of mean lengths ÷ by chance, {name}" for name in grouped}
    expected |= {f"distance of the update, {name}" for name in exact | others}
    assert set(figures) == expected

    for name in exact:
        assert max(figures[f"distance of the update, {name}"].values) < EXACT, name
    for name in others:
        distances = figures[f"distance of the update, {name}"].values
        assert max(distances) > 1000 * EXACT, name
    if PEERS.exists():
        spread = "spread of mean lengths ÷ by chance, Trainer, by length"
        assert figures[spread].median > 2


@pytest.mark.soak
def test_peak_memory_is_level_for_a_linear_model_and_else_that_of_the_longest(
    monkeypatch,
):
    from benchmarks import text_memory

    monkeypatch.setattr(text_memory, "LENGTHS", (10, 500))
    peaks = {}
    for figure in text_memory.measure(starts=1):
        peaks[figure.subject, figure.what] = figure.median

    def peak(model, lengths):
        return peaks[model, f"peak memory, texts of {lengths} tokens"]

    assert len(peaks) == 6
    dense = [peak("dense", lengths) for lengths in ("10", "500", "10 to 500")]
    assert max(dense) < 1.15 * min(dense)
    assert peak("attention", "500") > 2 * peak("attention", "10")
    assert peak("attention", "10 to 500") < 1.2 * peak("attention", "500")
