"""Seconds of the README's main job, from the start of its process to its end.

Ours is `pipeline train` with its defaults. The same job by Keras is
`benchmarks.keras_job`, with `fit` and MLflow's callback; by Lightning
`benchmarks.pytorch.job`, with its MLFlowLogger. All train the same network on the
digits for ten epochs with a validation after each, log every update and the system's
metrics into SQLite, and log the model. The stores exist before the first turn.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks import processes
from benchmarks.figures import Figure, ratios

OURS = "ours"


def measure(rounds: int) -> list[Figure]:
    """Return the seconds of ours, and those of each of the others ÷ ours."""
    commands = {
        OURS: [sys.executable, "-m", "pipeline", "train"],
        "Keras": [sys.executable, "-m", "benchmarks.keras_job"],
    }
    if processes.PEERS.exists():
        lightning = [str(processes.PEERS), "-m", "benchmarks.pytorch.job"]
        commands["Lightning"] = lightning

    seconds: dict[str, list[float]] = {who: [] for who in commands}
    with tempfile.TemporaryDirectory() as folder:
        for who, command in commands.items():  # makes the stores
            (Path(folder) / who).mkdir()
            processes.run(command, Path(folder) / who)
        for _, who in processes.in_turns(commands, rounds):
            seconds[who].append(processes.seconds(commands[who], Path(folder) / who))

    figures = [
        Figure(
            "main",
            "digits",
            "time from start to end",
            seconds[OURS],
            unit="s",
            best={who: min(values) for who, values in seconds.items()},
            best_unit="s",
        )
    ]
    for who, values in seconds.items():
        if who != OURS:
            what = f"speed ÷ {who} with MLflow"
            speeds = ratios(values, seconds[OURS])
            figures.append(Figure("main", "digits", what, speeds))
    return figures
