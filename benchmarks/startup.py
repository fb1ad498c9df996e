"""Seconds from the start of a process to its answer, each in turn.

To the first update is from the start of `pipeline train`, with its defaults, to the time stamp of the first row of
its journal. TensorFlow's own import is measured beside it, in a process that does nothing else.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import processes
from benchmarks.figures import Figure

BEYOND_IMPORT = 4.0  # seconds


def measure(starts: int) -> list[Figure]:
    """Four figures: help, refusal, first update with a new store and with one that is there."""
    seconds: dict[str, list[float]] = {
        name: [] for name in ("help", "refusal", "import", "new", "existing")
    }
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(starts):
            store = Path(folder) / str(turn)
            seconds["help"].append(_answer("-m", "pipeline", "--help"))
            seconds["refusal"].append(
                _answer("-m", "pipeline", "train", "accumulation.factor=0", status=2)
            )
            seconds["import"].append(_answer("-c", "import tensorflow"))
            seconds["new"].append(_first_update(store, store / "first"))
            seconds["existing"].append(_first_update(store, store / "second"))
    figures = [
        Figure("startup", "--help", "to the answer", seconds["help"], "s", at_most=1.0),
        Figure(
            "startup",
            "wrong config",
            "to the answer",
            seconds["refusal"],
            "s",
            at_most=1.0,
        ),
    ]
    for kind in ("new", "existing"):
        beyond = [
            first - imported
            for first, imported in zip(seconds[kind], seconds["import"], strict=True)
        ]
        best = {
            "import tensorflow": min(seconds["import"]),
            "first update": min(seconds[kind]),
        }
        what = "to the first update − import tensorflow"
        figures.append(
            Figure(
                "startup",
                f"{kind} store",
                what,
                beyond,
                "s",
                best,
                "s",
                at_most=BEYOND_IMPORT,
            )
        )
    return figures


def _answer(*arguments: str, status: int = 0) -> float:
    return processes.seconds([sys.executable, *arguments], status=status)


def _first_update(store: Path, run_dir: Path) -> float:
    store.mkdir(exist_ok=True)
    settings = [
        f"tracking.uri=sqlite:///{store / 'mlflow.db'}",
        f"hydra.run.dir={run_dir}",
    ]
    short = ["training.epochs=null", "training.updates=3", "tracking.log_model=false"]
    begun = time.time()
    _answer("-m", "pipeline", "train", *settings, *short)
    lines = [
        json.loads(line)
        for line in (run_dir / "journal.jsonl").read_text().splitlines()
    ]
    first = next(line for line in lines if "train/loss" in line.get("metrics", {}))
    return float(first["time"]) / 1000 - begun
