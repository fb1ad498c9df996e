"""`accumulation.micro_batch_size=auto_fastest` against the best micro-batch by hand, with `pipeline train` itself.

One run looks for the fastest. Then a sweep trains with what it has found, which is remembered, and with the whole
effective batch and powers of two below, all in one sitting and for as many updates as take some seconds. Speed is the
median of `perf/examples_per_second` in each job's journal, the first update left out, as it is traced.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tensorflow as tf
from omegaconf import OmegaConf

from benchmarks.figures import Figure
from pipeline import imports
from pipeline.fitting import TABLE

SECONDS = 3.0  # of a job's updates
SIDE = 32


def examples(count: int) -> tuple[tf.data.Dataset, None]:
    """Return noise as a training split: images with labels."""
    generator = np.random.default_rng(0)
    x = generator.random((count, SIDE, SIDE, 3), np.float32)
    return tf.data.Dataset.from_tensor_slices((x, generator.integers(0, 10, count))), None


def measure(tiny: bool) -> Iterator[Figure]:
    """Yield the speed with what `auto_fastest` finds ÷ that of the best by hand."""
    effective = 16 if tiny else 1024
    filters = [4] if tiny else [64, 128, 256]
    common = [
        "~dataset",
        f"+dataset={{_target_: benchmarks.micro_batches.examples, count: {2 * effective}, in_memory: true}}",
        *(
            "model=cnn",
            f"model.filters={filters}".replace(" ", ""),
            "+model.classes=10",
            f"accumulation.effective_batch_size={effective}",
        ),
        *("tracking.log_model=false", "tracking.system_metrics=false"),
    ]
    key = "accumulation.micro_batch_size"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _train(folder, *common, f"{key}=auto_fastest", "training.updates=1", "hydra.run.dir=search")
        table = json.loads((folder / "search" / TABLE).read_text())
        tries = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        fastest = min(row["update_seconds"] for row in tries if row["update_seconds"])
        sizes = [effective >> power for power in range(2 if tiny else 4)]
        updates = max(5, math.ceil((0.1 if tiny else SECONDS) / fastest))
        swept = ",".join(map(str, ["auto_fastest", *sizes]))
        _train(folder, "-m", *common, f"{key}={swept}", f"training.updates={updates}", "hydra.sweep.dir=sweep")
        found, *by_hand = (_speed(folder / "sweep" / str(job)) for job in range(1 + len(sizes)))
        taken = OmegaConf.load(folder / "sweep" / "0" / "config.yaml").accumulation.micro_batch_size
    best = {f"auto {taken}": found, **dict(zip(map(str, sizes), by_hand, strict=True))}
    target = None if tiny else 0.97
    yield Figure(
        "auto", "cnn", "auto_fastest ÷ best by hand", [found / max(by_hand)], "", best, "examples/s", at_least=target
    )


def _train(folder: Path, *arguments: str) -> None:
    """Run `pipeline train` in `folder`, remembering nothing outside of it."""
    ours = {"PYTHONPATH": imports.path_of_processes(), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-P", "-m", "pipeline", "train", *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | ours, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pipeline train: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


def _speed(run_dir: Path) -> float:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    speeds = [row["metrics"]["perf/examples_per_second"] for row in rows if "train/loss" in row.get("metrics", {})]
    return median(speeds[1:])
