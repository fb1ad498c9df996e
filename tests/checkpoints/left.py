"""What a run leaves that no disturbance may change, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoints import files, snapshot
from tests.running import Store


def metrics_in(folder: Path) -> dict[str, dict[int, float]]:
    """Return the points of the only run in `folder`, but for those of its speed."""
    store = Store(folder)
    run = store.run()
    metrics = {}
    for key in run.data.metrics:
        if not key.startswith("perf/"):
            metrics[key] = store.history(run, key)
    return metrics


def weights_in(folder: Path, update: int) -> dict[str, bytes]:
    """Return the arrays in the checkpoint of an update, as bytes."""
    path = files.at(folder / "run" / "checkpoints", update)
    arrays = snapshot.read(path).arrays
    return {name: array.tobytes() for name, array in arrays.items()}
