"""What a GPU has to show, what is most wanted first.

Command:   python benchmarks/gpu.py [PART …] [--tiny] [--seconds-limit S] [--output FILE]
Run time:  20 minutes on an H100, by estimate, most of it XLA compiling; with --tiny two minutes on two CPU cores.
Expect:    a line of JSON after each piece, then a table that says of each target whether it is met; the same as JSON in
           benchmarks/results/. The exit status is 1 where a target is missed or a figure is missing.

Parts:
    found            whether TensorFlow finds the GPU, and how long it takes; else its own reason, and the end
    train            `pipeline train` as it is, in float32 and bfloat16
    equal            float64: weights after 20 updates in micro-batches on the GPU − those of the CPU
    repeatable       two runs under determinism: weights that differ in any bit
    memory           growth of the peak of memory from factor 2 to 64
    update           the update ÷ its strict limit, and the apply's share of the copy bandwidth
    tf32             how far TF32 is from float64
    two              two logical devices on one card: equal, how fast, and what the traced graph has where
    profile          ten updates of a profile, left beside the JSON
    layers           dropout with `same_noise`, an LSTM, an embedding
    peak             the matrix-product peak of each precision, and the bandwidth of copies
    large            a transformer of 353 million weights in bfloat16 with XLA: share of the peak, compiling apart
    beside           the update beside `fit(jit_compile="auto")`, and beside PyTorch where it is installed
    limits           an update that runs out of memory, and `auto_fastest` beside the best micro-batch by hand
    sizes            examples/s by micro-batch, 1 to 256, without and with XLA

Each piece, and each side of a comparison, is a process of its own with a limit. One that fails is a line of the table.
What the time limit of the whole leaves no time for is another.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if (
    not __package__
):  # run as a file: its folder has modules with names that others have too
    sys.path[:] = [
        str(ROOT),
        *(entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks"),
    ]

import numpy as np  # noqa: E402

from benchmarks import children, processes  # noqa: E402
from benchmarks.figures import Figure, Missing, table  # noqa: E402
from pipeline.common import nvidia  # noqa: E402

PARTS = (
    *(
        "found",
        "train",
        "equal",
        "repeatable",
        "memory",
        "update",
        "tf32",
        "two",
        "profile",
        "layers",
        "peak",
    ),
    *("large", "beside", "limits", "sizes"),
)
UPDATES, UPDATES_TINY = 20, 4  # of a trajectory
# Of as many micro-batches: the operations of each run in another order, and the peak is that of the worst one. At
# factor 1 there is nothing to sum, and a gradient less in memory.
CUTS = ({"factor": 2, "updates": 64}, {"factor": 64, "updates": 2})
LIMIT = 1800.0  # seconds
LATE, LATE_TINY = (
    2.5,
    10.0,
)  # times its expected seconds a piece may take: a CPU may be slow, and busy
START = 120.0  # seconds that TensorFlow may take to find a device

Weights = list[tuple[str, list[np.ndarray]]]  # of each network
Sizes = list[tuple[int, int]]  # the peak of memory and the effective batch, in bytes


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one process does.

    Attributes:
        part, subject: of its figures; two pieces of one subject are the sides of a comparison.
        function, arguments: the generator that it calls, as `module:name`, and with what beside `tiny`.
        seconds: that are expected on a fast GPU.
        side: of the comparison.
    """

    part: str
    subject: str
    function: str
    arguments: Mapping[str, Any]
    seconds: float
    side: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.subject, self.side)))


def main() -> None:
    options = _options()
    begun, deadline = time.time(), time.monotonic() + options.seconds_limit
    store = (
        tempfile.TemporaryDirectory()
    )  # which takes seconds to make: one for all runs
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{store.name}/mlflow.db"
    children.prepare()
    facts = _facts(options.tiny)
    print(json.dumps(facts), flush=True)
    sides: dict[tuple[str, str], list[Any]] = {}
    found: dict[str, list[Figure | Missing]] = {part: [] for part in options.parts}
    for piece in pieces(options.parts, options.tiny, options.output.parent):
        since = time.monotonic()
        values, why = _values(piece, options, deadline)
        lines = found[piece.part]
        before = len(lines)
        if why:
            lines.append(Missing(piece.part, str(piece), why))
        if piece.part in COMPARED:
            both = sides.setdefault((piece.part, piece.subject), [])
            both.append(values)
            values = (
                COMPARED[piece.part](piece.subject, *both, options.tiny)
                if len(both) == 2 and all(both)
                else []
            )
        lines += values
        figures = [dataclasses.asdict(line) for line in lines[before:]]
        taken = {
            "piece": f"{piece.part} {piece}".strip(),
            "seconds": round(time.monotonic() - since, 1),
        }
        print(json.dumps({**taken, "figures": figures}, default=str), flush=True)
        _write(options, facts, begun, found)
    lines = [line for part in found.values() for line in part]
    print(f"written to {options.output}", file=sys.stderr, flush=True)
    said = (
        f"{facts['device']}, {os.cpu_count()} processors; {time.time() - begun:.0f} s"
    )
    print(f"\n{said}\n{table(lines)}")
    sys.exit(any(isinstance(line, Missing) or line.met is False for line in lines))


def pieces(parts: Sequence[str], tiny: bool, folder: Path = Path()) -> list[Piece]:
    """Return what is to be done, in order; a profile is left in `folder`."""
    trajectory = "benchmarks.checks:trajectory"
    updates = UPDATES_TINY if tiny else UPDATES
    ours: dict[str, Any] = {
        "updates": updates,
        "device": "auto",
        "precision": "float64",
    }
    theirs = {**ours, "device": "cpu", "whole": True}
    again = {
        "updates": updates,
        "device": "auto",
        "precision": "float32",
        "deterministic": True,
    }
    large = {
        "name": "transformer350m",
        "precision": "bfloat16",
        "xla": True,
        "micro": 32,
    }
    by_size = {"name": "transformer10m", "precision": "bfloat16"}
    resnet = {"name": "resnet50", "precision": "float32"}
    known = [
        Piece("found", "", "benchmarks.gpu_workloads:found", {}, 5),
        *(
            Piece("train", p, "benchmarks.gpu_runs:train", {"precision": p}, 26)
            for p in ("float32", "bfloat16")
        ),
        Piece("equal", "", trajectory, ours, 17, "in micro-batches"),
        Piece("equal", "", trajectory, theirs, 15, "on the CPU"),
        *(
            Piece("repeatable", "", trajectory, again, 17, run)
            for run in ("first", "second")
        ),
        *(
            Piece(
                "memory",
                name,
                "benchmarks.checks:peak_memory",
                {"name": name, **cut},
                25,
                f"factor {cut['factor']}",
            )
            for name in ("resnet50", "transformer10m")
            for cut in CUTS
        ),
        Piece(
            "update", "resnet50 float32", "benchmarks.throughput:of_limit", resnet, 53
        ),
        Piece(
            "update",
            "transformer10m bfloat16",
            "benchmarks.throughput:of_limit",
            by_size,
            38,
        ),
        Piece("tf32", "", "benchmarks.gpu_layers:tf32", {}, 12),
        Piece("two", "", "benchmarks.gpu_layers:two", {}, 19),
        Piece(
            "profile",
            "",
            "benchmarks.gpu_runs:profile",
            {"folder": str(folder.absolute())},
            23,
        ),
        Piece("layers", "", "benchmarks.gpu_layers:layers", {}, 15),
        Piece("peak", "", "benchmarks.peak:measure", {}, 5),
        Piece("large", "", "benchmarks.throughput:measure", large, 125),
        Piece("beside", "fit", "benchmarks.gpu_beside:keras_fit", {}, 120),
        Piece("beside", "PyTorch", "benchmarks.gpu_beside:pytorch", {}, 30),
        Piece("limits", "out of memory", "benchmarks.gpu_runs:out_of_memory", {}, 16),
        Piece("limits", "auto", "benchmarks.micro_batches:measure", {}, 200),
        Piece(
            "sizes", "", "benchmarks.throughput:by_size", {**by_size, "xla": False}, 40
        ),
        Piece(
            "sizes",
            "XLA",
            "benchmarks.throughput:by_size",
            {**by_size, "xla": True},
            250,
        ),
    ]
    # A small network will do in a test.
    return [
        p
        for p in known
        if p.part in parts and not (tiny and p.arguments.get("name") == "resnet50")
    ]


def _values(
    piece: Piece, options: argparse.Namespace, deadline: float
) -> tuple[list[Any], str]:
    """Return what a piece has yielded, and why it has no more; empty where it has all."""
    left, since = deadline - time.monotonic(), time.monotonic()
    if left <= 0:
        return [], f"left out: {options.seconds_limit:.0f} s were over"
    arguments = {**piece.arguments, "tiny": options.tiny}
    most = piece.seconds * (LATE_TINY if options.tiny else LATE)
    values, why = children.run(piece.function, arguments, min(left, most))
    took = f"{time.monotonic() - since:.1f} s, expected {piece.seconds:.0f}"
    print(
        f"{piece.part} {piece}: {took}{why and f': {why}'}", file=sys.stderr, flush=True
    )
    return values, why


def _equal(_: str, ours: Weights, reference: Weights, tiny: bool) -> list[Figure]:
    def largest(pair: tuple[Any, Any]) -> float:
        (_, one), (_, other) = pair
        # Of NumPy, whose largest of anything and NaN is NaN.
        return float(
            np.max(
                [
                    np.max(np.abs(a - b), initial=0.0)
                    for a, b in zip(one, other, strict=True)
                ]
            )
        )

    what = f"largest difference of a weight after {UPDATES_TINY if tiny else UPDATES} updates"
    pairs = zip(ours, reference, strict=True)
    return [
        Figure("equal", pair[0][0], what, [largest(pair)], at_most=1e-10)
        for pair in pairs
    ]


def _repeatable(_: str, first: Weights, second: Weights, tiny: bool) -> list[Figure]:
    def differing(one: list[np.ndarray], other: list[np.ndarray]) -> int:
        return sum(
            int(np.sum(a.view(np.uint32) != b.view(np.uint32)))
            for a, b in zip(one, other, strict=True)
        )

    what = f"weights that differ after {UPDATES_TINY if tiny else UPDATES} updates"
    pairs = zip(first, second, strict=True)
    return [
        Figure("repeatable", name, what, [differing(a, b)], at_most=0)
        for (name, a), (_, b) in pairs
    ]


def _memory(name: str, least: Sizes, most: Sizes, tiny: bool) -> list[Figure]:
    """The host's batch is taken off only where the growth shows that it lies on the device."""
    (peak, batch), (larger, larger_batch) = least[0], most[0]
    grown, own = larger - peak, larger_batch - batch
    beyond = grown - own if grown > own / 2 else grown
    note = f"{peak / 1e6:,.0f} → {larger / 1e6:,.0f} MB; the batch is {own / 1e6:,.1f} MB larger"
    target = None if tiny else 1.0
    what = f"growth of the peak, factor {CUTS[0]['factor']} to {CUTS[1]['factor']}"
    return [
        Figure(
            "memory", name, what, [100 * beyond / peak], "%", at_most=target, note=note
        )
    ]


COMPARED: dict[str, Callable[..., list[Figure]]] = {
    "equal": _equal,
    "repeatable": _repeatable,
    "memory": _memory,
}


def _facts(tiny: bool) -> dict[str, Any]:
    """Return what TensorFlow says of the device; let processes be new ones where a fork finds no GPU."""
    found, why = children.run("benchmarks.gpu_workloads:facts", {}, START)
    on_gpu = bool(found) and found[0]["on_gpu"]
    if not on_gpu and nvidia.visible() and len(children.methods) > 1:
        print(
            f"a fork finds no GPU {why}: each process imports TensorFlow",
            file=sys.stderr,
            flush=True,
        )
        del children.methods[0]
        return _facts(tiny)
    if not found or not (on_gpu or tiny):
        why = why or str(found[0]["device"])
        sys.exit(f"gpu.py: TensorFlow must find a GPU, or --tiny must be given: {why}")
    return found[0]


def _write(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    begun: float,
    found: Mapping[str, list],
) -> None:
    """Write the results so far, in case the process is killed."""
    lines = [line for part in found.values() for line in part]
    figures = [line.as_dict() for line in lines if isinstance(line, Figure)]
    missing = [dataclasses.asdict(line) for line in lines if isinstance(line, Missing)]
    processes.write(
        options.output, begun, options, **facts, figures=figures, missing=missing
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=", ".join(PARTS) + "; all where none is given",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny networks and no targets of speed: a test",
    )
    parser.add_argument(
        "--seconds-limit",
        type=float,
        default=LIMIT,
        metavar="S",
        help="after which nothing begins",
    )
    output = (
        ROOT / "benchmarks" / "results" / time.strftime("gpu_%Y-%m-%d_%H-%M-%S.json")
    )
    parser.add_argument("--output", type=Path, default=output, help="of the JSON")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.exit(
                2, f"gpu.py: PART must be one of {', '.join(PARTS)}. Received: {part}\n"
            )
    options.parts = [part for part in PARTS if part in (options.parts or PARTS)]
    return options


if __name__ == "__main__":
    main()
