"""Benchmarks: ratios of contenders that take turns in one session.

Command:   python -m benchmarks [PART …] [--rounds N] [--seconds S] [--models NAME …]
           (`make bench`)
Run time:  about 90 minutes on two CPU cores, on a quiet machine.
Expect:    a table with each figure and whether it meets its target, and the medians and
           quartiles as JSON in benchmarks/results/.

Parts:
    startup      seconds until `pipeline --help` answers, a wrong config is rejected,
                 and the first update is done
    main         seconds of the README's main job, and of the same by Keras and by
                 Lightning ÷ ours
    auto         examples/s with `micro_batch_size=auto_fastest` ÷ with the best by hand
    memory       peak memory by factor and by effective batch
    update       the update ÷ the limit: factor × bare forward+backward + one optimizer
                 apply, each measured alone
    peers        the training loop ÷ Keras' fit, PyTorch, Accelerate and Lightning; the
                 last three with `make peers`
    compiled     the training loop with `hardware.xla=fastest` ÷ Keras' fit with XLA and
                 PyTorch with torch.compile
    tracking     the training loop that logs every update ÷ the same one that logs
                 nothing; CPU time of a logged update
    checkpoints  how long one checkpoint stalls the training loop, and what it costs
    replicas     the training loop under MirroredStrategy with 2 and 4 logical CPU
                 devices ÷ with 1
    text         tokens/s of texts of unequal length, cut by tokens ÷ cut by examples,
                 and ÷ Keras' fit, PyTorch and the Trainer of transformers; the padding
                 of each cut; how far each update is from the true one; peak memory
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

from benchmarks import main_job, memory, processes
from benchmarks.figures import Figure, table
from benchmarks.workloads import NAMES, WORKLOADS, Workload
from pipeline.common import imports

# These compute in processes of their own.
PARTS_ELSEWHERE = ("startup", "main", "auto", "memory")
PARTS_HERE = (
    "update",
    "peers",
    "compiled",
    "tracking",
    "checkpoints",
    "replicas",
    "text",
)
PARTS = (*PARTS_ELSEWHERE, *PARTS_HERE)
RESULTS = Path(__file__).parent / "results"
AUTO_TURNS = 2  # of each size in `auto`, for each start of a command


def main() -> None:
    options = _options()
    begun = time.time()
    load = os.getloadavg()[0]
    if {"main", "peers", "compiled", "text"} & set(options.parts):
        processes.check_peers()

    # These come before TensorFlow takes memory and threads in this process.
    figures = _in_other_processes(options)
    device = "not used"
    if set(options.parts) & set(PARTS_HERE):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        with imports.without_chatter():
            from benchmarks import keras_models, peers

        device = keras_models.device_name()
        for name in options.models:
            figures += _with_model(WORKLOADS[name], options)
        figures += peers.overall(figures)
        if "text" in options.parts:
            figures += _texts(options)

    seconds = time.time() - begun
    print(f"\n{device}, {os.cpu_count()} processors; {seconds:.0f} s")
    print(table(figures))
    path = options.output
    if path is None:
        local_time = time.localtime(begun)
        path = RESULTS / time.strftime("%Y-%m-%d_%H-%M-%S.json", local_time)
    processes.write(
        path,
        begun,
        options,
        processes.peer_versions(),
        device=device,
        load=load,
        figures=[dataclasses.asdict(figure.summary()) for figure in figures],
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

        figures += micro_batches.measure(
            tiny=False,
            effective=128,
            filters=(64, 128),
            rounds=AUTO_TURNS * options.starts,
        )
    if "memory" in options.parts:
        name = "cnn" if "cnn" in options.models else options.models[0]
        figures += memory.measure(WORKLOADS[name], options.starts)
    return figures


def _with_model(workload: Workload, options: argparse.Namespace) -> list[Figure]:
    """Measure the parts that compute with a model in this process."""
    from benchmarks import checkpoints, compiled, peers, replicas, tracking, update

    rounds = options.rounds
    seconds = options.seconds
    tracked_rounds = options.tracked_rounds
    tracked_seconds = options.tracked_seconds
    figures: list[Figure] = []
    if "update" in options.parts:
        figures += update.measure(workload, rounds, seconds, options.xla)
    if "peers" in options.parts:
        figures += peers.measure(workload, rounds, seconds, options.xla)
    if "compiled" in options.parts:
        figures += compiled.measure(workload, rounds, seconds)
    # With a large model, a turn would be two updates.
    if "tracking" in options.parts and not workload.is_large:
        figures += tracking.measure(workload, tracked_rounds, tracked_seconds)
    if "checkpoints" in options.parts:
        figures += checkpoints.measure(workload, tracked_rounds, tracked_seconds)
    if "replicas" in options.parts and workload.name in replicas.NAMES:
        figures += replicas.measure(workload, rounds, seconds)
    return figures


def _texts(options: argparse.Namespace) -> list[Figure]:
    """Measure texts of unequal length."""
    from benchmarks import text, text_memory, text_updates

    figures: list[Figure] = []
    for case in text.all_cases():
        figures += text.measure(case, options.tracked_rounds)
        if case.with_peers:
            figures += text_updates.measure(case)
    return figures + text_memory.measure(options.starts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=", ".join(PARTS) + "; all if none is given",
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
    if not options.parts:
        options.parts = PARTS
    return options


if __name__ == "__main__":
    main()
