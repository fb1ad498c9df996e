"""`accumulation.micro_batch_size=auto_fastest` against the best micro-batch by hand, with `pipeline train` itself.

One run looks for the fastest. Then a sweep trains with what it has found, which is remembered, and with the whole
effective batch and powers of two below, in turns and for as many updates as take some seconds. Speed is the median of
`perf/examples_per_second` in each job's journal, the first update left out, as it is traced. The best by hand is the
one that is fastest over all turns.
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
SIDE = 32


def examples(count: int) -> tuple[tf.data.Dataset, None]:
    """Return noise as a training split: images with labels."""
    generator = np.random.default_rng(0)
    x = generator.random((count, SIDE, SIDE, 3), np.float32)
    return tf.data.Dataset.from_tensor_slices(
        (x, generator.integers(0, 10, count))
    ), None


def measure(
    tiny: bool,
    effective: int = 1024,
    filters: Sequence[int] = (64, 128, 256),
    rounds: int = 1,
) -> Iterator[Figure]:
    """Yield the speed with what `auto_fastest` finds ÷ that of the best by hand.

    Args:
        tiny: of an effective batch and of filters that are too small to show anything.
        effective: examples of an update.
        filters: of the convolutions.
        rounds: turns of each size.
    """
    if tiny:
        effective, filters = 2, [4]
    common = [
        "~dataset",
        f"+dataset={{_target_: benchmarks.micro_batches.examples, count: {2 * effective}, in_memory: true}}",
        *(
            "model=cnn",
            f"model.filters={[*filters]}".replace(" ", ""),
            "+model.classes=10",
            f"accumulation.effective_batch_size={effective}",
        ),
        *("tracking.log_model=false", "tracking.system_metrics=false"),
    ]
    key = "accumulation.micro_batch_size"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = _train_here if tiny else _train
        train(
            folder,
            *common,
            f"{key}=auto_fastest",
            "training.updates=1",
            "hydra.run.dir=search",
        )
        table = json.loads((folder / "search" / TABLE).read_text())
        tries = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        fastest = min(row["update_seconds"] for row in tries if row["update_seconds"])
        sizes = [effective >> power for power in range(1 if tiny else 4)]
        updates = max(5, math.ceil((0.1 if tiny else SECONDS) / fastest))
        turns = ["auto_fastest", *sizes]
        order = [turn for _, turn in processes.in_turns(turns, rounds)]
        swept = ",".join(map(str, order))
        train(
            folder,
            "-m",
            *common,
            f"{key}={swept}",
            f"training.updates={updates}",
            "hydra.sweep.dir=sweep",
        )
        speeds: dict[Any, list[float]] = {turn: [] for turn in turns}
        for job, turn in enumerate(order):
            speeds[turn].append(_speed(folder / "sweep" / str(job)))
        taken = OmegaConf.load(
            folder / "sweep" / "0" / "config.yaml"
        ).accumulation.micro_batch_size
    found, *by_hand = speeds.values()
    best = max(by_hand, key=median)
    shown = {
        f"auto {taken}": median(found),
        **dict(zip(map(str, sizes), map(median, by_hand), strict=True)),
    }
    target = None if tiny else 0.97
    yield Figure(
        "limits",
        "cnn",
        "auto_fastest ÷ best by hand",
        ratios(found, best),
        "",
        shown,
        "examples/s",
        at_least=target,
    )


def _train(folder: Path, *arguments: str) -> None:
    """Run `pipeline train` in `folder`, with its cache there."""
    ours = {
        "PYTHONPATH": imports.path_of_processes(),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    processes.run(
        [sys.executable, "-P", "-m", "pipeline", "train", *arguments],
        folder,
        variables=ours,
    )


def _train_here(folder: Path, *arguments: str) -> None:
    """Run it in this process, which has imported TensorFlow; on a GPU that would leave the tries no memory."""
    from pipeline.__main__ import main

    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    if main(
        ["train", *arguments, *(["hydra/launcher=basic"] if "-m" in arguments else [])]
    ):
        raise RuntimeError(f"pipeline train {' '.join(arguments)} failed")


def _speed(run_dir: Path) -> float:
    rows: list[dict[str, Any]] = [
        json.loads(line)
        for line in (run_dir / "journal.jsonl").read_text().splitlines()
    ]
    speeds = [
        row["metrics"]["perf/examples_per_second"]
        for row in rows
        if "train/loss" in row.get("metrics", {})
    ]
    return median(speeds[1:])
