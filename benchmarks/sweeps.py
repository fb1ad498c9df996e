"""What a sweep adds to its jobs: seconds of a sweep ÷ seconds of the same jobs by hand.

By hand is as many `pipeline train`, one after the other.

Command:   python -m benchmarks.sweeps [--jobs N] [--rounds N]
Run time:  about 65 seconds a round of 8 jobs on two CPU cores.
Expect:    about 0.7 for one job at a time and 0.5 for two at once; at most 1.10 and
           0.75.

The contenders take turns, so that a machine that is busy for some minutes is busy for
all three of them. All log to one store, which exists before the first of them starts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import processes
from benchmarks.figures import Figure, ratios, table

TINY = (
    "model=mlp",
    "training.epochs=1",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)


def measure(jobs: int, rounds: int) -> list[Figure]:
    """Return a sweep of one job at a time, and of two at once, ÷ the jobs by hand."""
    with tempfile.TemporaryDirectory() as folder:
        uri = f"tracking.uri=sqlite:///{Path(folder) / 'mlflow.db'}"

        def by_hand(turn: str) -> None:
            for seed in range(jobs):
                run_dir = f"hydra.run.dir={folder}/{turn}/{seed}"
                _train(uri, f"seed={seed}", run_dir)

        def sweep(turn: str, parallel_jobs: int) -> None:
            seeds = ",".join(map(str, range(jobs)))
            _train(
                "-m",
                uri,
                f"seed={seeds}",
                f"hardware.parallel_jobs={parallel_jobs}",
                f"hydra.sweep.dir={folder}/{turn}",
            )

        contenders: dict[str, Callable[[str], None]] = {
            "by hand": by_hand,
            "sweep": lambda turn: sweep(turn, 1),
            "two at once": lambda turn: sweep(turn, 2),
        }
        _train(uri, f"hydra.run.dir={folder}/first")  # makes the store
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for number, name in processes.in_turns(contenders, rounds):
            begun = time.perf_counter()
            contenders[name](f"{name} {number}".replace(" ", "_"))
            seconds[name].append(time.perf_counter() - begun)

    best = {name: min(values) for name, values in seconds.items()}
    figures = []
    for name, target in (("sweep", 1.1), ("two at once", 0.75)):
        figures.append(
            Figure(
                "sweeps",
                f"{jobs} jobs",
                f"{name} ÷ by hand",
                ratios(seconds[name], seconds["by hand"]),
                best=best,
                best_unit="s",
                at_most=target,
            )
        )
    return figures


def _train(*arguments: str) -> None:
    command = [sys.executable, "-m", "pipeline", "train", *TINY, *arguments]
    processes.run(command, Path.cwd())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweeps", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    print(table(measure(options.jobs, options.rounds)))


if __name__ == "__main__":
    main()
