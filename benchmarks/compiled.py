"""The training loop with `hardware.xla=fastest` ÷ what others compile.

Ours is `pipeline.training.loop.Trainer` itself. Before the first turn it has timed its
update with XLA and without, and taken the faster one. The others are Keras' `fit` with
`jit_compile=True` and with one update per execution, and PyTorch by hand, eager and
with `torch.compile`. Model, optimizer and examples are those of `benchmarks.peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from benchmarks import fit, peers
from benchmarks.figures import Figure, ratios
from benchmarks.processes import PEERS
from benchmarks.turns import Coroutine, alternate
from benchmarks.workloads import Embedding, ResNet, Workload

FASTEST = "hardware.xla=fastest"
WITHOUT_XLA = "hardware.xla=false"


def measure(workload: Workload, rounds: int, seconds: float) -> list[Figure]:
    """Return a figure for each contender, and one for the fastest of them."""
    if isinstance(workload.network, ResNet):
        return []  # XLA compiles it for minutes.

    updates = fit.updates_within(workload, seconds)
    bodies = {
        FASTEST: fit.ours(workload, updates, xla="fastest"),
        WITHOUT_XLA: fit.ours(workload, updates),
        "fit, jit_compile=True": fit.keras_fit(
            workload, updates, workload.factor, jit_compile=True
        ),
    }
    with ExitStack() as contenders:
        turns: dict[str, Callable[[], object]] = {}
        for name, body in bodies.items():
            turns[name] = contenders.enter_context(closing(Coroutine(body)))
        for loop in _loops(workload):
            process = peers.pytorch_process(loop, workload, updates)
            turns[loop] = contenders.enter_context(closing(process))
        alternate(turns, 2)  # traces and compiles
        times = alternate(turns, rounds, peers.REST)

    examples = workload.effective * updates
    figures = []
    for name in times:
        if name == FASTEST:
            continue
        figures.append(
            Figure(
                "compiled",
                workload.name,
                f"{FASTEST} ÷ {name}",
                ratios(times[name], times[FASTEST]),
                best={who: examples / min(times[who]) for who in (FASTEST, name)},
                best_unit="examples/s",
            )
        )
    others = [figure for figure in figures if not figure.what.endswith(WITHOUT_XLA)]
    nearest = min(others, key=lambda figure: figure.median)
    figures.append(
        Figure(
            "compiled",
            workload.name,
            f"{FASTEST} ÷ best peer",
            nearest.values,
            at_least=0.95,
            note=nearest.what.removeprefix(f"{FASTEST} ÷ "),
        )
    )
    return figures


def _loops(workload: Workload) -> Sequence[str]:
    """Return the loops in PyTorch that take turns."""
    if not PEERS.exists():
        return ()
    if isinstance(workload.network, Embedding):
        return ("PyTorch",)  # `torch.compile` takes no sparse gradient.
    return ("PyTorch", "PyTorch, compiled")
