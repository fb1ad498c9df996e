"""The training loop ÷ what others offer: Keras' `fit`, a hand-written loop in PyTorch, Accelerate, Lightning.

Ours is `pipeline.training.loop.Trainer` itself, with its recorder and without a tracker. `fit` has `verbose=0` and no
metrics, at `steps_per_execution` 1, the way people use it, and at as many as the factor is. The other three are in
`benchmarks.pytorch`, each in a process of `.venv-peers`: eager, as their documentation writes them, with the fastest
of what it offers. Model, optimizer and examples are the same; all shuffle out of memory. Start and tracing are behind
all of them when the first turn begins.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from benchmarks import fit, models
from benchmarks.figures import BEST, Figure, ratios
from benchmarks.processes import PEERS, Process
from benchmarks.turns import Coroutine, alternate
from benchmarks.workloads import LARGE, sizes

LOOPS = ("PyTorch", "Accelerate", "Lightning")
# GNU's OpenMP, which PyTorch comes with, lets its threads spin for some milliseconds after their last work.
REST = 0.02


def measure(name: str, rounds: int, seconds: float, xla: bool) -> list[Figure]:
    """One figure for each peer, and one for the best of them."""
    updates = fit.updates_within(name, seconds, xla)
    bodies = {
        "train": fit.ours(name, updates, xla=xla),
        "fit, an update an execution": fit.keras_fit(name, updates, sizes(name).factor),
    }
    if name not in LARGE:
        bodies["fit"] = fit.keras_fit(name, updates, 1)
    with ExitStack() as opened:
        turns: dict[str, Callable[[], object]] = {
            who: opened.enter_context(closing(Coroutine(body)))
            for who, body in bodies.items()
        }
        for loop in (LOOPS[:1] if name in LARGE else LOOPS) if PEERS.exists() else ():
            turns[loop] = opened.enter_context(closing(_process(loop, name, updates)))
        alternate(turns, 2)  # traces, and fills the read-ahead
        times = alternate(turns, rounds, REST)
    examples = sizes(name).effective * updates
    figures = []
    for who in list(times)[1:]:
        best = {each: examples / min(times[each]) for each in ("train", who)}
        over = ratios(times[who], times["train"])
        figures.append(
            Figure("peers", name, f"train ÷ {who}", over, "", best, "examples/s")
        )
    nearest = min(figures, key=lambda figure: figure.median)
    note = nearest.what.removeprefix("train ÷ ")
    return [
        *figures,
        Figure("peers", name, BEST, nearest.values, at_least=1.0, note=note),
    ]


def overall(figures: Sequence[Figure]) -> list[Figure]:
    """Return the geometric mean of the models' figures for their best peers, where there are several."""
    found = [figure.median for figure in figures if figure.what == BEST]
    if len(found) < 2:
        return []
    mean = statistics.geometric_mean(found)
    return [
        Figure(
            "peers",
            f"{len(found)} models",
            f"{BEST}, geometric mean",
            [mean],
            at_least=1.2,
        )
    ]


def _process(loop: str, name: str, updates: int) -> Process:
    threads = str(len(os.sched_getaffinity(0)))  # as TensorFlow has
    process = Process(
        [str(PEERS), "-m", "benchmarks.pytorch", loop, name, threads], updates
    )
    ours = models.weights(models.build(name))
    if process.said["weights"] != ours:
        process.close()
        raise RuntimeError(
            f"{name} has {process.said['weights']} weights in PyTorch, not {ours}"
        )
    return process
