"""`accumulation.micro_batch_size=auto_fastest` against the best micro-batch by hand.

One run of `pipeline train` searches for the fastest. Then a sweep trains with what the
search has found, which is remembered, and with the effective batch as one micro-batch
and powers of two below it. They take turns, for as many updates as take some seconds.
Speed is the median of `perf/examples_per_second` in each job's journal, without the
first update, which is traced. The best by hand is the one that is fastest over all
turns.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tensorflow as tf
from omegaconf import OmegaConf

from benchmarks import processes
from benchmarks.figures import Figure, ratios
from pipeline.common import imports
from pipeline.run.batch_size_search import TABLE

SECONDS = 3.0  # of a job's updates
LEAST_UPDATES = 5
SIDE = 32
AUTO = "auto_fastest"
KEY = "accumulation.micro_batch_size"


def examples(count: int) -> tuple[tf.data.Dataset, None]:
    """Return noise as a training split: images with labels."""
    generator = np.random.default_rng(0)
    x = generator.random((count, SIDE, SIDE, 3), np.float32)
    y = generator.integers(0, 10, count)
    return tf.data.Dataset.from_tensor_slices((x, y)), None


def measure(
    tiny: bool,
    effective: int = 1024,
    filters: Sequence[int] = (64, 128, 256),
    rounds: int = 1,
) -> Iterator[Figure]:
    """Yield the speed with what `auto_fastest` finds ÷ that of the best by hand.

    Args:
        tiny: use an effective batch and filters that are too small to show anything.
        effective: examples of an update.
        filters: of the convolutions.
        rounds: turns of each size.
    """
    seconds = SECONDS
    powers = range(4)
    target: float | None = 0.97
    train = _train
    if tiny:
        effective = 2
        filters = (4,)
        seconds = 0.1
        powers = range(1)
        target = None
        train = _train_here
    sizes = [effective >> power for power in powers]
    common = _arguments(effective, filters)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        search = [f"{KEY}={AUTO}", "training.updates=1", "hydra.run.dir=search"]
        train(folder, *common, *search)
        fastest = _fastest_update(folder / "search" / TABLE)

        updates = max(LEAST_UPDATES, math.ceil(seconds / fastest))
        turns = [AUTO, *sizes]
        order = [turn for _, turn in processes.in_turns(turns, rounds)]
        sweep = [
            f"{KEY}={','.join(map(str, order))}",
            f"training.updates={updates}",
            "hydra.sweep.dir=sweep",
        ]
        train(folder, "-m", *common, *sweep)

        speeds: dict[Any, list[float]] = {turn: [] for turn in turns}
        for job, turn in enumerate(order):
            speeds[turn].append(_speed(folder / "sweep" / str(job)))
        config = OmegaConf.load(folder / "sweep" / "0" / "config.yaml")

    best_size = max(sizes, key=lambda size: median(speeds[size]))
    shown = {f"auto {config.accumulation.micro_batch_size}": median(speeds[AUTO])}
    for size in sizes:
        shown[str(size)] = median(speeds[size])
    yield Figure(
        "limits",
        "cnn",
        "auto_fastest ÷ best by hand",
        ratios(speeds[AUTO], speeds[best_size]),
        best=shown,
        best_unit="examples/s",
        at_least=target,
    )


def _arguments(effective: int, filters: Sequence[int]) -> list[str]:
    """Return what all runs have in common."""
    dataset = (
        "{_target_: benchmarks.micro_batches.examples, "
        f"count: {2 * effective}, in_memory: true}}"
    )
    listed = ",".join(map(str, filters))
    return [
        "~dataset",
        f"+dataset={dataset}",
        "model=cnn",
        f"model.filters=[{listed}]",
        "+model.classes=10",
        f"accumulation.effective_batch_size={effective}",
        "tracking.log_model=false",
        "tracking.system_metrics=false",
    ]


def _train(folder: Path, *arguments: str) -> None:
    """Run `pipeline train` in `folder`, with its cache there."""
    variables = {
        "PYTHONPATH": imports.path_of_processes(),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    command = [sys.executable, "-P", "-m", "pipeline", "train", *arguments]
    processes.run(command, folder, variables=variables)


def _train_here(folder: Path, *arguments: str) -> None:
    """Run it in this process, which has imported TensorFlow.

    On a GPU that would leave the tries no memory.
    """
    from pipeline.__main__ import main

    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    command = ["train", *arguments]
    if "-m" in arguments:
        command.append("hydra/launcher=basic")
    if main(command):
        raise RuntimeError(f"pipeline train {' '.join(arguments)} failed")


def _fastest_update(path: Path) -> float:
    """Return the seconds of the fastest update of the search."""
    table = json.loads(path.read_text())
    column = table["columns"].index("update_seconds")
    return min(row[column] for row in table["data"] if row[column])


def _speed(run_dir: Path) -> float:
    speeds = []
    for line in (run_dir / "journal.jsonl").read_text().splitlines():
        metrics = json.loads(line).get("metrics", {})
        if "train/loss" in metrics:
            speeds.append(metrics["perf/examples_per_second"])
    return median(speeds[1:])
