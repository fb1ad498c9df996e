"""Benchmarks: ratios of contenders that take turns in one session.

Command:   python -m benchmarks [PART …] [--rounds N] [--seconds S] [--models NAME …]     (`make bench`)
Run time:  about 40 minutes on two CPU cores, on a quiet machine.
Expect:    a table with each figure and whether it meets its target, also as JSON in benchmarks/results/.

Parts:
    update       the update ÷ the limit: factor × bare forward+backward + one optimizer apply, each measured alone
    peers        the training loop ÷ Keras' fit, PyTorch, Accelerate and Lightning; the last three with `make peers`
    tracking     the training loop that logs every update ÷ the same one that logs nothing; CPU time of a logged update
    checkpoints  how long one checkpoint stalls the training loop, and what it costs
    replicas     the training loop under MirroredStrategy with 2 and 4 logical CPU devices ÷ with 1
    memory       peak memory by factor and by effective batch
    main         seconds of the README's main job, and of the same by Keras and by Lightning ÷ ours
    auto         examples/s with `micro_batch_size=auto_fastest` ÷ with the best by hand
    startup      seconds until `pipeline --help` answers, a wrong config is refused, and the first update is done
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks import main_job, memory, processes
from benchmarks.figures import Figure, table
from benchmarks.workloads import LARGE, NAMES
from pipeline.common import imports

PARTS = (
    "startup",
    "main",
    "auto",
    "memory",
    "update",
    "peers",
    "tracking",
    "checkpoints",
    "replicas",
)
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = _options()
    begun, load = time.time(), os.getloadavg()[0]
    if {"main", "peers"} & set(options.parts):
        processes.check_peers()
    # These come before TensorFlow takes memory and threads in this process.
    figures = _in_other_processes(options)
    device = "not used"
    if set(options.parts) - {"startup", "main", "auto", "memory"}:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        with imports.without_chatter():
            from benchmarks import models, peers

        device = models.device()
        for name in options.models:
            figures += _of_model(name, options)
        figures += peers.overall(figures)
    said = f"{device}, {os.cpu_count()} processors; {time.time() - begun:.0f} s"
    print(f"\n{said}\n{table(figures)}")
    path = Path(
        options.output
        or RESULTS / time.strftime("%Y-%m-%d_%H-%M-%S.json", time.localtime(begun))
    )
    found = [figure.as_dict() for figure in figures]
    versions = processes.peer_versions()
    processes.write(
        path, begun, options, versions, device=device, load=load, figures=found
    )
    print(f"written to {path}", file=sys.stderr)


def _in_other_processes(options: argparse.Namespace) -> list[Figure]:
    """Measure the parts that compute in processes of their own."""
    figures: list[Figure] = []
    if "startup" in options.parts:
        from benchmarks import startup

        figures += startup.measure(options.starts)
    if "main" in options.parts:
        figures += main_job.measure(options.starts)
    if "auto" in options.parts:
        from benchmarks import micro_batches

        figures += micro_batches.measure(False, 128, (64, 128), 2 * options.starts)
    if "memory" in options.parts:
        name = "cnn" if "cnn" in options.models else options.models[0]
        figures += memory.measure(name, options.starts)
    return figures


def _of_model(name: str, options: argparse.Namespace) -> list[Figure]:
    """Measure the parts that compute with a model in this process."""
    from benchmarks import checkpoints, peers, replicas, tracking, update

    figures: list[Figure] = []
    if "update" in options.parts:
        figures += update.measure(name, options.rounds, options.seconds, options.xla)
    if "peers" in options.parts:
        figures += peers.measure(name, options.rounds, options.seconds, options.xla)
    # Of a large model, a turn would be two updates.
    if "tracking" in options.parts and name not in LARGE:
        figures += tracking.measure(
            name, options.tracked_rounds, options.tracked_seconds
        )
    if "checkpoints" in options.parts:
        figures += checkpoints.measure(
            name, options.tracked_rounds, options.tracked_seconds
        )
    if "replicas" in options.parts and name in replicas.NAMES:
        figures += replicas.measure(name, options.rounds, options.seconds)
    return figures


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=", ".join(PARTS) + "; all where none is given",
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--rounds", type=int, default=11, help="turns of each contender"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.25, help="a contender's turn, at least"
    )
    parser.add_argument(
        "--tracked-rounds", type=int, default=6, help="turns with and without tracking"
    )
    parser.add_argument(
        "--tracked-seconds", type=float, default=2.0, help="such a turn, at least"
    )
    parser.add_argument("--starts", type=int, default=3, help="starts of each command")
    parser.add_argument(
        "--xla",
        action="store_true",
        help="compile our forward+backward and the limit's with XLA",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="of the JSON; by default a new file in benchmarks/results/",
    )
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"PART must be one of {', '.join(PARTS)}. Received: {part}")
    options.parts = options.parts or PARTS
    return options


if __name__ == "__main__":
    main()
