"""The transformer of 10 million weights, beside Keras' `fit` and PyTorch, on whole batches in bfloat16.

All train with Adam on the same number of examples at a time, out of memory. `fit` has `jit_compile="auto"`, as it has
by default; our update is compiled where that compiles, and not where it does not. PyTorch, where this interpreter or
that of `.venv-peers` has it, runs eagerly and compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from benchmarks import models, processes
from benchmarks.figures import Figure, ratios
from benchmarks.gpu_workloads import setup, updates, workload
from benchmarks.turns import alternate, repeats

ROUNDS = 5


def keras_fit(tiny: bool) -> Iterator[Figure]:
    """Yield examples/s of our update ÷ that of `fit`."""
    on_gpu = setup("bfloat16").on_gpu
    of = workload("transformer10m", tiny)
    batch = of.examples(of.micro)
    turns: dict[str, Callable[[], object]] = {
        "update": updates(of.build(), batch, of.micro, xla=on_gpu)
    }
    model = of.build()
    model.compile(models.optimizer(), models.loss(), jit_compile="auto")
    with tf.device("CPU:0"):
        data = tf.data.Dataset.from_tensors(tuple(map(tf.constant, batch))).repeat()
    count = repeats(turns["update"], 0.1 if tiny else 0.5)

    def ours() -> None:
        for _ in range(count):
            turns["update"]()

    def theirs() -> None:
        model.fit(data, epochs=1, steps_per_epoch=count, verbose=0)

    theirs()  # traces
    times = alternate({"update": ours, "fit": theirs}, ROUNDS)
    best = {who: count * of.micro / min(seconds) for who, seconds in times.items()}
    note = f"jit_compile: {model.jit_compile}"
    over = ratios(times["fit"], times["update"])
    yield Figure(
        "beside",
        "fit",
        "update ÷ fit(jit_compile=auto)",
        over,
        "",
        best,
        "examples/s",
        note=note,
    )


def pytorch(tiny: bool) -> Iterator[Figure]:
    """Yield examples/s of PyTorch; say that it is not installed where that is so."""
    of = workload("transformer10m", tiny)
    sizes = {"layers": 8, "width": 256, "heads": 4, "vocabulary": 8192, "length": 256}
    if tiny:
        sizes = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 32, "length": 8}
    for interpreter in (sys.executable, str(processes.PEERS)):
        asked = [interpreter, "-c", "import torch"]
        try:
            subprocess.run(
                asked, check=True, capture_output=True, env=processes.environment()
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        given = json.dumps(
            {"sizes": sizes, "micro": of.micro, "seconds": 0.1 if tiny else 1.0}
        )
        said = processes.run([interpreter, "-m", "benchmarks.pytorch.device", given])
        for line in map(json.loads, said.splitlines()):
            yield Figure(
                "beside",
                line["what"],
                "examples per second",
                line["rates"],
                "1/s",
                note=line["note"],
            )
        return
    yield Figure(
        "beside",
        "PyTorch",
        "installations found",
        [0],
        note=f"asked at {time.strftime('%H:%M')}",
    )
