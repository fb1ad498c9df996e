"""Seconds from the start of a process to its answer; the processes take turns.

The time to the first update is from the start of `pipeline train`, with its defaults,
to the time stamp of the first row of its journal. TensorFlow's own import is measured
alongside, in a process that does nothing else.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import processes
from benchmarks.figures import Figure

LONGEST_ANSWER = 1.0  # seconds
LONGEST_BEYOND_IMPORT = 4.0  # seconds


def measure(starts: int) -> list[Figure]:
    """Return the seconds to the help, a rejection, and the first update.

    The first update is measured with a new store and with an existing one.
    """
    help_seconds = []
    rejection_seconds = []
    import_seconds = []
    new_store_seconds = []
    existing_store_seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(starts):
            store = Path(folder) / str(turn)
            help_seconds.append(_answer("-m", "pipeline", "--help"))
            wrong_config = ("-m", "pipeline", "train", "accumulation.factor=0")
            rejection_seconds.append(_answer(*wrong_config, status=2))
            import_seconds.append(_answer("-c", "import tensorflow"))
            new_store_seconds.append(_first_update(store, store / "first"))
            existing_store_seconds.append(_first_update(store, store / "second"))

    return [
        _answer_figure("pipeline --help", help_seconds),
        _answer_figure("wrong config", rejection_seconds),
        _update_figure("new store", new_store_seconds, import_seconds),
        _update_figure("existing store", existing_store_seconds, import_seconds),
    ]


def _answer_figure(subject: str, seconds: list[float]) -> Figure:
    return Figure(
        "startup",
        subject,
        "time to the answer",
        seconds,
        unit="s",
        at_most=LONGEST_ANSWER,
    )


def _update_figure(
    subject: str, update_seconds: list[float], import_seconds: list[float]
) -> Figure:
    beyond_import = []
    for to_update, to_import in zip(update_seconds, import_seconds, strict=True):
        beyond_import.append(to_update - to_import)
    return Figure(
        "startup",
        subject,
        "time to the first update − time to import tensorflow",
        beyond_import,
        unit="s",
        best={
            "import tensorflow": min(import_seconds),
            "first update": min(update_seconds),
        },
        best_unit="s",
        at_most=LONGEST_BEYOND_IMPORT,
    )


def _answer(*arguments: str, status: int = 0) -> float:
    return processes.seconds([sys.executable, *arguments], status=status)


def _first_update(store: Path, run_dir: Path) -> float:
    store.mkdir(exist_ok=True)
    arguments = [
        f"tracking.uri=sqlite:///{store / 'mlflow.db'}",
        f"hydra.run.dir={run_dir}",
        "training.epochs=null",
        "training.updates=3",
        "tracking.log_model=false",
    ]
    begun = time.time()
    _answer("-m", "pipeline", "train", *arguments)

    for line in (run_dir / "journal.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "train/loss" in row.get("metrics", {}):
            return float(row["time"]) / 1000 - begun
    raise RuntimeError("the journal has no update")
