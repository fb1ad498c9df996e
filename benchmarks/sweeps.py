"""What a sweep adds to its jobs: seconds of a sweep ÷ seconds of as many `pipeline train`, one after the other.

Command:   python -m benchmarks.sweeps [--jobs N] [--rounds N]
Run time:  about 65 seconds a round of 8 jobs on two CPU cores.
Expect:    about 0.7 for one job at a time and 0.5 for two at once; at most 1.10 and 0.75.

The contenders take turns, so that a machine that is busy for some minutes is busy for all three of them. All log to
one store, which is there before the first of them starts.
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
    """Two ratios: a sweep of one job at a time, and of two at once, ÷ the same jobs by hand."""
    with tempfile.TemporaryDirectory() as folder:
        uri = f"tracking.uri=sqlite:///{Path(folder) / 'mlflow.db'}"

        def by_hand(turn: str) -> None:
            for seed in range(jobs):
                _pipeline(
                    [
                        "train",
                        *TINY,
                        uri,
                        f"seed={seed}",
                        f"hydra.run.dir={folder}/{turn}/{seed}",
                    ]
                )

        def sweep(turn: str, at_once: int) -> None:
            seeds = ",".join(map(str, range(jobs)))
            more = [
                f"hardware.parallel_jobs={at_once}",
                f"hydra.sweep.dir={folder}/{turn}",
            ]
            _pipeline(["train", "-m", *TINY, uri, f"seed={seeds}", *more])

        contenders: dict[str, Callable[[str], None]] = {
            "by hand": by_hand,
            "sweep": lambda turn: sweep(turn, 1),
            "two at once": lambda turn: sweep(turn, 2),
        }
        _pipeline(["train", *TINY, uri, f"hydra.run.dir={folder}/first"])
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for number, name in processes.in_turns(contenders, rounds):
            begun = time.perf_counter()
            contenders[name](f"{name} {number}".replace(" ", "_"))
            seconds[name].append(time.perf_counter() - begun)
    best = {name: min(values) for name, values in seconds.items()}
    subject = f"{jobs} jobs"
    over = ratios(seconds["sweep"], seconds["by hand"])
    parallel = ratios(seconds["two at once"], seconds["by hand"])
    return [
        Figure(
            "sweeps",
            subject,
            "sweep ÷ by hand",
            over,
            best=best,
            best_unit="s",
            at_most=1.1,
        ),
        Figure(
            "sweeps",
            subject,
            "two at once ÷ by hand",
            parallel,
            best=best,
            best_unit="s",
            at_most=0.75,
        ),
    ]


def _pipeline(arguments: list[str]) -> None:
    processes.run([sys.executable, "-m", "pipeline", *arguments], Path.cwd())


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
