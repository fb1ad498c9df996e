"""The training loop ÷ the peers: Keras' `fit`, PyTorch by hand, Accelerate, Lightning.

Ours is `pipeline.training.loop.Trainer` itself, with its recorder and without a
tracker. `fit` has `verbose=0` and no metrics, at `steps_per_execution` 1, as people use
it, and at the factor. The other three are in `benchmarks.pytorch`, each in a process of
`.venv-peers`: eager, as their documentation writes them, with the fastest options that
it offers. Model, optimizer and examples are the same; all shuffle out of memory. All of
them have started and traced when the first turn begins. `benchmarks.compiled` compares
what is compiled.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from benchmarks import fit, keras_models
from benchmarks.figures import BEST_PEER, Figure, ratios
from benchmarks.processes import PEERS, Process
from benchmarks.turns import Coroutine, alternate
from benchmarks.workloads import Workload

LOOPS = ("PyTorch", "Accelerate", "Lightning")
# GNU's OpenMP, which PyTorch comes with, lets its threads spin for some milliseconds
# after their last work.
REST = 0.02


def measure(workload: Workload, rounds: int, seconds: float, xla: bool) -> list[Figure]:
    """Return a figure for each peer, and one for the best of them."""
    updates = fit.updates_within(workload, seconds, xla)
    bodies = {
        "train": fit.ours(workload, updates, xla=xla),
        "fit, one update per execution": fit.keras_fit(
            workload, updates, workload.factor
        ),
    }
    if not workload.is_large:
        bodies["fit"] = fit.keras_fit(workload, updates, 1)

    with ExitStack() as contenders:
        turns: dict[str, Callable[[], object]] = {}
        for name, body in bodies.items():
            turns[name] = contenders.enter_context(closing(Coroutine(body)))
        for loop in _loops(workload):
            process = pytorch_process(loop, workload, updates)
            turns[loop] = contenders.enter_context(closing(process))
        alternate(turns, 2)  # traces, and fills the read-ahead
        times = alternate(turns, rounds, REST)

    examples = workload.effective * updates
    figures = []
    for name in times:
        if name == "train":
            continue
        figures.append(
            Figure(
                "peers",
                workload.name,
                f"train ÷ {name}",
                ratios(times[name], times["train"]),
                best={who: examples / min(times[who]) for who in ("train", name)},
                best_unit="examples/s",
            )
        )
    nearest = min(figures, key=lambda figure: figure.median)
    figures.append(
        Figure(
            "peers",
            workload.name,
            BEST_PEER,
            nearest.values,
            at_least=1.0,
            note=nearest.what.removeprefix("train ÷ "),
        )
    )
    return figures


def overall(figures: Sequence[Figure]) -> list[Figure]:
    """Return the geometric mean of the best peers, if there are several models."""
    medians = [figure.median for figure in figures if figure.what == BEST_PEER]
    if len(medians) < 2:
        return []
    return [
        Figure(
            "peers",
            f"{len(medians)} models",
            f"{BEST_PEER}, geometric mean",
            [statistics.geometric_mean(medians)],
            at_least=1.2,
        )
    ]


def pytorch_process(loop: str, workload: Workload, updates: int) -> Process:
    """Start one of `benchmarks.pytorch.loops.LOOPS`, as a contender of a turn.

    Raises:
        RuntimeError: its model has another number of weights than that in Keras.
    """
    threads = len(os.sched_getaffinity(0))  # as TensorFlow has
    command = [str(PEERS), "-m", "benchmarks.pytorch"]
    command += [loop, workload.name, str(threads)]
    process = Process(command, updates)

    theirs = process.facts["weights"]
    ours = keras_models.weight_count(keras_models.build(workload))
    if theirs != ours:
        process.close()
        raise RuntimeError(
            f"{workload.name} has {theirs} weights in PyTorch, not {ours}"
        )
    return process


def _loops(workload: Workload) -> Sequence[str]:
    """Return the loops in PyTorch that take turns."""
    if not PEERS.exists():
        return ()
    if workload.is_large:
        return LOOPS[:1]
    return LOOPS
