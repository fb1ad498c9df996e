"""Seconds of the README's main job, from the start of its process to its end, and of the same job by other means.

Ours is `pipeline train` with its defaults. The same job by Keras is `benchmarks.keras_job`, with `fit` and MLflow's
callback; by Lightning `benchmarks.pytorch.job`, with its MLFlowLogger. All train the same network on the digits for ten
epochs with a validation after each, log every update and the system's metrics into SQLite, and log the model. The
stores are there before the first turn.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks import processes
from benchmarks.figures import Figure, ratios


def measure(rounds: int) -> list[Figure]:
    """Return the seconds of ours, and those of each of the others ÷ ours."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {"ours": [sys.executable, "-m", "pipeline", "train"]}
        commands["Keras"] = [sys.executable, "-m", "benchmarks.keras_job"]
        if processes.PEERS.exists():
            commands["Lightning"] = [
                str(processes.PEERS),
                "-m",
                "benchmarks.pytorch.job",
            ]
        seconds: dict[str, list[float]] = {who: [] for who in commands}
        for who, command in commands.items():  # makes the stores
            (Path(folder) / who).mkdir()
            processes.run(command, Path(folder) / who)
        for _, who in processes.in_turns(commands, rounds):
            seconds[who].append(processes.seconds(commands[who], Path(folder) / who))
    best = {who: min(values) for who, values in seconds.items()}
    figures = [
        Figure("main", "digits", "start to end", seconds["ours"], "s", best, "s")
    ]
    for who in list(commands)[1:]:
        figures.append(
            Figure(
                "main",
                "digits",
                f"speed ÷ {who} with MLflow",
                ratios(seconds[who], seconds["ours"]),
            )
        )
    return figures
