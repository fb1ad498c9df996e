"""Seconds from the start of a process to its answer, each in turn.

To the first update is from the start of `pipeline train`, with its defaults, to the time stamp of the first row of
its journal. TensorFlow's own import is measured beside it, in a process that does nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figure

ROOT = Path(__file__).parent.parent
BEYOND_IMPORT = 4.0  # seconds


def measure(starts: int) -> list[Figure]:
    """Four figures: help, refusal, first update with a new store and with one that is there."""
    seconds: dict[str, list[float]] = {name: [] for name in ("help", "refusal", "import", "new", "existing")}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(starts):
            store = Path(folder) / str(turn)
            seconds["help"].append(_answer(["-m", "pipeline", "--help"], 0))
            seconds["refusal"].append(_answer(["-m", "pipeline", "train", "accumulation.factor=0"], 2))
            seconds["import"].append(_answer(["-c", "import tensorflow"], 0))
            seconds["new"].append(_first_update(store, store / "first"))
            seconds["existing"].append(_first_update(store, store / "second"))
    figures = [
        Figure("startup", "--help", "to the answer", seconds["help"], "s", at_most=1.0),
        Figure("startup", "wrong config", "to the answer", seconds["refusal"], "s", at_most=1.0),
    ]
    for kind in ("new", "existing"):
        beyond = [first - imported for first, imported in zip(seconds[kind], seconds["import"], strict=True)]
        best = {"import tensorflow": min(seconds["import"]), "first update": min(seconds[kind])}
        what = "to the first update − import tensorflow"
        figures.append(Figure("startup", f"{kind} store", what, beyond, "s", best, "s", at_most=BEYOND_IMPORT))
    return figures


def _answer(arguments: list[str], status: int) -> float:
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=_environment(), capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    if done.returncode != status:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}, not {status}: {done.stderr}")
    return seconds


def _first_update(store: Path, run_dir: Path) -> float:
    store.mkdir(exist_ok=True)
    settings = [f"tracking.uri=sqlite:///{store / 'mlflow.db'}", f"hydra.run.dir={run_dir}"]
    short = ["training.epochs=null", "training.updates=3", "tracking.log_model=false"]
    begun = time.time()
    _answer(["-m", "pipeline", "train", *settings, *short], 0)
    lines = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "train/loss" in line.get("metrics", {}))
    return float(first["time"]) / 1000 - begun


def _environment() -> dict[str, str]:
    return os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
