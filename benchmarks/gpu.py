"""What a GPU has to show, in order of importance.

Command:   python benchmarks/gpu.py [PART …] [--tiny] [--seconds-limit S]
                                    [--output FILE]
Run time:  25 minutes on an H100, by estimate, most of it XLA compiling; with --tiny three
           minutes on two CPU cores.
Expect:    a line of JSON after each piece, then a table that says of each target
           whether it is met; the same, with quartiles in place of the rounds, as JSON
           in benchmarks/results/. The exit status is 1 if a target is missed or a
           figure is missing.

Parts:
    found            whether TensorFlow finds the GPU, and how long it takes; else its
                     own reason, and the end
    attention        attention by cuDNN beside Keras': errors, bits and times
    large            a transformer of 353 million weights in bfloat16 with XLA: share of
                     the peak, compiling apart
    update           with XLA: the update ÷ its strict limit, and the apply's share of
                     the copy bandwidth, without XLA and with it
    scopes           a small CNN and an MLP: examples/s without XLA, and with each of
                     `hardware.xla_scope`
    texts            texts of unequal length, cut by examples and by tokens, without XLA
                     and with it: tokens/s
    peers            PyTorch on the same shapes, compiled too, and JAX, if installed
    train            `pipeline train` as it is, in float32 and bfloat16
    equal            float64: weights after 20 updates in micro-batches on the GPU −
                     those of the CPU
    repeatable       two runs under determinism: weights that differ in any bit
    memory           with XLA: growth of the peak of memory from factor 2 to 64
    tf32             how far TF32 is from float64
    two              two logical devices on one card: equal, how fast, and what the
                     traced graph has where
    profile          ten updates of a profile, left beside the JSON
    layers           dropout with `same_noise`, an LSTM, an embedding
    peak             the matrix-product peak of each precision, and the bandwidth of
                     copies
    fit              the update beside `fit(jit_compile="auto")`
    limits           an update that runs out of memory, and `auto_fastest` beside the
                     best micro-batch by hand
    sizes            examples/s by micro-batch, 1 to 256, without and with XLA

The parts up to `peers` take ten minutes. They are what nobody knows yet; `make
test-gpu` says in five minutes whether the updates are right.

Each piece, and each side of a comparison, is a process of its own with a limit. A piece
that fails, or that the total time limit leaves out, is a line of the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if not __package__:
    # This is run as a file. Its folder has modules with names that others have too.
    others = [
        entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks"
    ]
    sys.path[:] = [str(ROOT), *others]

from benchmarks import children, processes  # noqa: E402
from benchmarks.figures import Figure, Missing, table  # noqa: E402
from benchmarks.gpu_comparisons import (  # noqa: E402
    COMPARISONS,
    FEWER_MICRO_BATCHES,
    MORE_MICRO_BATCHES,
    updates,
)
from pipeline.common import nvidia  # noqa: E402

PARTS = (
    "found",
    "attention",
    "large",
    "update",
    "scopes",
    "texts",
    "peers",
    "train",
    "equal",
    "repeatable",
    "memory",
    "tf32",
    "two",
    "profile",
    "layers",
    "peak",
    "fit",
    "limits",
    "sizes",
)
LIMIT = 1800.0  # seconds
# A piece may take so many times its expected seconds. A CPU may be slow, and busy.
LATE = 2.5
LATE_TINY = 10.0
START = 120.0  # seconds that TensorFlow may take to find a device


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one process does.

    Attributes:
        part: of its figures.
        subject: of its figures; two pieces of one subject are the sides of a
            comparison.
        function: the generator that it calls, as `module:name`.
        arguments: of the function, except `tiny`.
        seconds: that it is expected to take on a fast GPU.
        side: of the comparison.
    """

    part: str
    subject: str
    function: str
    arguments: Mapping[str, Any]
    seconds: float
    side: str = ""

    def __str__(self) -> str:
        return f"{self.subject} {self.side}".strip()


class Results:
    """The lines of the table so far.

    A comparison has its lines once both sides are there.
    """

    def __init__(self, tiny: bool):
        self.lines: list[Figure | Missing] = []
        self._tiny = tiny
        self._sides: dict[tuple[str, str], list[list[Any]]] = {}

    def add(
        self, piece: Piece, values: list[Any], failure: str
    ) -> list[Figure | Missing]:
        """Add the values of a piece, and why it has no more; return the new lines."""
        new_lines: list[Figure | Missing] = []
        if failure:
            new_lines.append(Missing(piece.part, str(piece), failure))
        if piece.part in COMPARISONS:
            sides = self._sides.setdefault((piece.part, piece.subject), [])
            sides.append(values)
            if len(sides) == 2 and all(sides):
                compare = COMPARISONS[piece.part]
                new_lines += compare(piece.subject, *sides, self._tiny)
        else:
            new_lines += values
        self.lines += new_lines
        return new_lines

    def as_expected(self) -> bool:
        """Return whether no figure is missing and no target is missed."""
        for line in self.lines:
            if isinstance(line, Missing) or line.met is False:
                return False
        return True


def main() -> None:
    options = _options()
    begun = time.time()
    deadline = time.monotonic() + options.seconds_limit
    # Making a store takes seconds: there is one for all runs.
    store = tempfile.TemporaryDirectory()
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{store.name}/mlflow.db"
    children.prepare()
    facts = _facts(options.tiny)
    print(json.dumps(facts), flush=True)

    results = Results(options.tiny)
    for piece in pieces(options.parts, options.tiny, options.output.parent):
        since = time.monotonic()
        values, failure = _values(piece, options, deadline)
        lines = results.add(piece, values, failure)
        progress = {
            "piece": f"{piece.part} {piece}".strip(),
            "seconds": round(time.monotonic() - since, 1),
            "figures": [dataclasses.asdict(line) for line in lines],
        }
        print(json.dumps(progress, default=str), flush=True)
        # The process may be killed during the next piece.
        _write(options, facts, begun, results.lines)

    print(f"written to {options.output}", file=sys.stderr, flush=True)
    seconds = time.time() - begun
    print(f"\n{facts['device']}, {os.cpu_count()} processors; {seconds:.0f} s")
    print(table(results.lines))
    if not results.as_expected():
        sys.exit(1)


def pieces(parts: Sequence[str], tiny: bool, folder: Path = Path()) -> list[Piece]:
    """Return what is to be done, in order; a profile is left in `folder`."""
    selected = []
    known = [*_first_pieces(), *_correctness_pieces(tiny), *_other_pieces(folder)]
    for piece in known:
        # In a test a small network is enough.
        too_large = tiny and piece.arguments.get("name") in ("resnet50", "cnn")
        if piece.part in parts and not too_large:
            selected.append(piece)
    return selected


def _correctness_pieces(tiny: bool) -> list[Piece]:
    """Return `train` to `memory`."""
    known = []
    for precision in ("float32", "bfloat16"):
        arguments = {"precision": precision}
        known.append(
            Piece("train", precision, "benchmarks.gpu_runs:train", arguments, 26)
        )

    trajectory = "benchmarks.gpu_checks:trajectory"
    in_float64 = {"update_count": updates(tiny), "precision": "float64"}
    on_gpu = {**in_float64, "device": "auto"}
    on_cpu = {**in_float64, "device": "cpu", "in_one_batch": True}
    known.append(Piece("equal", "", trajectory, on_gpu, 17, "in micro-batches"))
    known.append(Piece("equal", "", trajectory, on_cpu, 15, "on the CPU"))
    deterministic = {
        "update_count": updates(tiny),
        "device": "auto",
        "precision": "float32",
        "deterministic": True,
    }
    for run in ("first", "second"):
        known.append(Piece("repeatable", "", trajectory, deterministic, 17, run))

    # Both sides compute as many micro-batches: the operations of each run in another
    # order, and the peak is that of the worst one. At factor 1 there is nothing to sum,
    # and one gradient less in memory.
    micro_batches = FEWER_MICRO_BATCHES * MORE_MICRO_BATCHES
    for name in ("resnet50", "transformer10m"):
        for factor in (FEWER_MICRO_BATCHES, MORE_MICRO_BATCHES):
            known.append(
                Piece(
                    "memory",
                    name,
                    "benchmarks.gpu_checks:peak_memory",
                    {
                        "name": name,
                        "factor": factor,
                        "update_count": micro_batches // factor,
                    },
                    25,
                    f"factor {factor}",
                )
            )
    return known


def _first_pieces() -> list[Piece]:
    """Return `found` to `peers`."""
    limit = "benchmarks.throughput:update_and_limit"
    by_scope = "benchmarks.throughput:by_scope"
    pytorch = "benchmarks.gpu_beside:pytorch"
    jax = "benchmarks.gpu_beside:jax"
    resnet = {"name": "resnet50", "precision": "float32"}
    transformer = {"name": "transformer10m", "precision": "bfloat16"}
    large = {
        "name": "transformer350m",
        "precision": "bfloat16",
        "xla": True,
        "micro": 32,
    }
    return [
        Piece("found", "", "benchmarks.gpu_device:found", {}, 5),
        Piece("attention", "", "benchmarks.gpu_attention:attention", {}, 20),
        Piece("large", "", "benchmarks.throughput:measure", large, 100),
        Piece("update", "transformer10m bfloat16", limit, transformer, 56),
        Piece("update", "resnet50 float32", limit, resnet, 76),
        Piece("scopes", "cnn", by_scope, {"name": "cnn"}, 40),
        Piece("scopes", "mlp", by_scope, {"name": "mlp"}, 25),
        *_text_pieces(),
        Piece("peers", "10m", pytorch, {"name": "transformer10m"}, 30),
        Piece("peers", "10m, JAX", jax, {"name": "transformer10m"}, 15),
        Piece("peers", "350m", pytorch, {"name": "transformer350m", "micro": 32}, 60),
        Piece("peers", "350m, JAX", jax, {"name": "transformer350m", "micro": 32}, 30),
    ]


def _text_pieces() -> list[Piece]:
    """Return `texts`: each way to cut an effective batch is a process of its own."""
    texts = "benchmarks.gpu_texts:texts"
    by_examples = {"by_tokens": False, "xla": True, "fused": False}
    fused = {"by_tokens": False, "xla": True, "fused": True}
    by_tokens = {"by_tokens": True, "xla": False, "fused": False}
    by_tokens_with_xla = {"by_tokens": True, "xla": True, "fused": False}
    return [
        Piece("texts", "by examples, XLA", texts, by_examples, 30),
        Piece("texts", "by tokens", texts, by_tokens, 20),
        Piece("texts", "by tokens, XLA", texts, by_tokens_with_xla, 60),
        Piece("texts", "by examples, XLA, fused attention", texts, fused, 30),
    ]


def _other_pieces(folder: Path) -> list[Piece]:
    """Return `tf32` to `sizes`."""
    by_size = "benchmarks.throughput:by_size"
    transformer = {"name": "transformer10m", "precision": "bfloat16"}
    profile = {"folder": str(folder.absolute())}
    without_xla = {**transformer, "xla": False}
    with_xla = {**transformer, "xla": True}
    return [
        Piece("tf32", "", "benchmarks.gpu_layers:tf32", {}, 12),
        Piece("two", "", "benchmarks.gpu_layers:two", {}, 19),
        Piece("profile", "", "benchmarks.gpu_runs:profile", profile, 23),
        Piece("layers", "", "benchmarks.gpu_layers:layers", {}, 15),
        Piece("peak", "", "benchmarks.peak:measure", {}, 5),
        Piece("fit", "", "benchmarks.gpu_beside:keras_fit", {}, 120),
        Piece("limits", "out of memory", "benchmarks.gpu_runs:out_of_memory", {}, 16),
        Piece("limits", "auto", "benchmarks.micro_batches:measure", {}, 200),
        Piece("sizes", "", by_size, without_xla, 40),
        Piece("sizes", "XLA", by_size, with_xla, 250),
    ]


def _values(
    piece: Piece, options: argparse.Namespace, deadline: float
) -> tuple[list[Any], str]:
    """Return what a piece has yielded, and why it has no more.

    The reason is empty if the piece has completed.
    """
    since = time.monotonic()
    remaining = deadline - since
    if remaining <= 0:
        return [], f"left out: {options.seconds_limit:.0f} s were over"

    arguments = {**piece.arguments, "tiny": options.tiny}
    lateness = LATE_TINY if options.tiny else LATE
    limit = min(remaining, piece.seconds * lateness)
    values, failure = children.run(piece.function, arguments, limit)
    seconds = time.monotonic() - since
    report = f"{piece.part} {piece}: {seconds:.1f} s, expected {piece.seconds:.0f}"
    if failure:
        report += f": {failure}"
    print(report, file=sys.stderr, flush=True)
    return values, failure


def _facts(tiny: bool) -> dict[str, Any]:
    """Return what TensorFlow says of the device.

    If a fork finds no GPU, all later processes are started anew.
    """
    values, failure = children.run("benchmarks.gpu_device:facts", {}, START)
    on_gpu = bool(values) and values[0]["on_gpu"]
    if not on_gpu and nvidia.visible() and len(children.start_methods) > 1:
        print(
            f"a fork finds no GPU {failure}: each process imports TensorFlow",
            file=sys.stderr,
            flush=True,
        )
        del children.start_methods[0]
        return _facts(tiny)
    if not values or not (on_gpu or tiny):
        reason = failure or str(values[0]["device"])
        sys.exit(
            f"gpu.py: TensorFlow must find a GPU, or --tiny must be given: {reason}"
        )
    return values[0]


def _write(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    begun: float,
    lines: Sequence[Figure | Missing],
) -> None:
    figures = []
    missing = []
    for line in lines:
        if isinstance(line, Figure):
            figures.append(dataclasses.asdict(line.summary()))
        else:
            missing.append(dataclasses.asdict(line))
    processes.write(
        options.output, begun, options, **facts, figures=figures, missing=missing
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=", ".join(PARTS) + "; all if none is given",
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
    name = time.strftime("gpu_%Y-%m-%d_%H-%M-%S.json")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "benchmarks" / "results" / name,
        help="of the JSON",
    )
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            known = ", ".join(PARTS)
            message = f"gpu.py: PART must be one of {known}. Received: {part}\n"
            parser.exit(2, message)
    if options.parts:
        options.parts = [part for part in PARTS if part in options.parts]
    else:
        options.parts = list(PARTS)
    return options


if __name__ == "__main__":
    main()
