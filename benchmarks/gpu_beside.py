"""The transformer of 10 million weights beside Keras' `fit`, PyTorch and JAX.

All train in bfloat16 with Adam, on the same number of examples at a time, out of memory.
`fit` has `jit_compile="auto"`, its default; our update is compiled if that compiles.
PyTorch trains on whole batches, eagerly and compiled, and JAX in micro-batches. They run
if this interpreter or that of `.venv-peers` has them, also with the transformer of 353
million weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks import keras_models, processes
from benchmarks.figures import Figure, ratios
from benchmarks.gpu_device import repeated_batch, setup, updates
from benchmarks.turns import alternate, repeats
from benchmarks.workloads import on_gpu

ROUNDS = 5
NAME = "transformer10m"


def keras_fit(tiny: bool) -> Iterator[Figure]:
    """Yield examples/s of our update ÷ that of `fit`."""
    machine = setup("bfloat16")
    workload = on_gpu(NAME, tiny)
    batch = workload.examples(workload.micro)
    model = keras_models.build(workload)
    update = updates(model, batch, workload.micro, xla=machine.on_gpu)

    fitted = keras_models.build(workload)
    fitted.compile(keras_models.optimizer(), keras_models.loss(), jit_compile="auto")
    batches = repeated_batch(batch)
    turn_seconds = 0.1 if tiny else 0.5
    count = repeats(update, turn_seconds)

    def ours() -> None:
        for _ in range(count):
            update()

    def theirs() -> None:
        fitted.fit(batches, epochs=1, steps_per_epoch=count, verbose=0)

    theirs()  # traces
    times = alternate({"update": ours, "fit": theirs}, ROUNDS)
    examples = count * workload.micro
    yield Figure(
        "fit",
        "",
        "update ÷ fit(jit_compile=auto)",
        ratios(times["fit"], times["update"]),
        best={who: examples / min(turns) for who, turns in times.items()},
        best_unit="examples/s",
        note=f"jit_compile: {fitted.jit_compile}",
    )


def pytorch(name: str, tiny: bool, micro: int | None = None) -> Iterator[Figure]:
    """Yield examples/s of PyTorch, or a figure that says that it is not installed.

    `micro` is the number of examples in a batch; that of the workload if None.
    """
    yield from _peer("PyTorch", "torch", "benchmarks.pytorch.device", name, tiny, micro)


def jax(name: str, tiny: bool, micro: int | None = None) -> Iterator[Figure]:
    """Yield examples/s of JAX, or a figure that says that it is not installed.

    `micro` is the number of examples in a micro-batch; that of the workload if None.
    """
    yield from _peer("JAX", "jax", "benchmarks.jax_transformer", name, tiny, micro)


def _peer(
    peer: str, package: str, script: str, name: str, tiny: bool, micro: int | None
) -> Iterator[Figure]:
    """Yield what a script prints, which runs where its package is installed."""
    interpreter = _interpreter_with(package)
    if interpreter is None:
        note = f"at {time.strftime('%H:%M')}"
        yield Figure("peers", peer, "installations found", [0], note=note)
        return

    seconds = 0.1 if tiny else 1.0
    arguments = {"name": name, "tiny": tiny, "seconds": seconds, "micro": micro}
    command = [interpreter, "-m", script, json.dumps(arguments)]
    for line in processes.run(command).splitlines():
        result = json.loads(line)
        yield Figure(
            "peers",
            f"{name}, {result['what']}",
            "examples per second",
            result["rates"],
            unit="1/s",
            note=result["note"],
        )


def _interpreter_with(package: str) -> str | None:
    for interpreter in (sys.executable, str(processes.PEERS)):
        try:
            subprocess.run(
                [interpreter, "-c", f"import {package}"],
                check=True,
                capture_output=True,
                env=processes.environment(),
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return interpreter
    return None
