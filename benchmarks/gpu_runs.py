"""Pieces of `benchmarks/gpu.py` that are runs of `pipeline train` in this process.

The results are read where a user reads them: in the run's journal, and in the files of
its directory.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.figures import Figure

# A run in which one update fits into memory only in micro-batches of one example.
OUT_OF_MEMORY = (
    "~dataset",
    "+dataset={_target_: benchmarks.gpu_runs.examples, in_memory: true}",
    "~model",
    "+model={_target_: benchmarks.gpu_runs.scarce}",
    "objective=regression",
    "accumulation.effective_batch_size=8",
    "accumulation.micro_batch_size=2",
    "hardware.xla=false",  # XLA computes the sum of a fill without the fill
)
QUIET = ("tracking.log_model=false", "tracking.system_metrics=false")
PROFILED = 10  # updates
PROFILE = "profile_4.xplane.pb"
TRACE = "profile_4.trace.json.gz"
FLAGGED = 21  # the example that does not fit


def train(precision: str, tiny: bool) -> Iterator[Figure]:
    """Yield how `pipeline train` trains with its defaults.

    That is a CNN with AdamW, a cosine, metrics, validation and every row logged. Its
    seconds are without the imports, which are done.
    """
    policy = precision if precision == "float32" else f"mixed_{precision}"
    small = ("model=mlp", "training.epochs=1") if tiny else ()
    with tempfile.TemporaryDirectory() as folder:
        seconds = _run(folder, f"hardware.precision={policy}", *small, *QUIET)
        rows = _rows(folder)

    updates = [row for row in rows if "train/loss" in row]
    accuracies = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    note = f"val/accuracy {accuracies[-1]:.3f}"
    key = "perf/model_flops_utilization"
    shares = [row[key] for row in updates if key in row]
    if shares:
        note += f", MFU {median(shares):.2g}"
    yield Figure(
        "train",
        precision,
        "examples per second",
        [row["perf/examples_per_second"] for row in updates[1:]],
        unit="1/s",
        best={
            "whole run, s": seconds,
            "first update, s": updates[0]["perf/update_seconds"],
        },
        note=note,
    )


def out_of_memory(tiny: bool) -> Iterator[Figure]:
    """Yield the updates of a run in which one update does not fit into any memory.

    The run must halve its micro-batches once.
    """
    epochs = 1 if tiny else 5
    arguments = [
        *OUT_OF_MEMORY,
        f"training.epochs={epochs}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        _run(folder, *arguments, *QUIET)
        rows = _rows(folder)

    updates = [row for row in rows if "train/loss" in row]
    key = "perf/micro_batch_size"
    sizes = {row[key] for row in updates if key in row}
    if sizes != {1.0} or key in updates[0]:
        raise AssertionError(
            "micro-batches of 2 examples and then of 1 were expected, "
            f"not of {sizes or 2}"
        )
    yield Figure(
        "limits",
        "out of memory",
        "updates, of which one did not fit",
        [len(updates)],
        at_least=len(updates),
    )


def profile(tiny: bool, folder: str) -> Iterator[Figure]:
    """Yield what takes how long in ten updates, and leave the profile in `folder`."""
    small = ("training.updates=14", "model=mlp") if tiny else ("training.updates=40",)
    setting = f"hardware.profile={{start: 4, updates: {PROFILED}}}"
    with tempfile.TemporaryDirectory() as run:
        _run(run, "training.epochs=null", setting, *small, *QUIET)
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in (PROFILE, TRACE):
            shutil.copy(Path(run, "run", name), folder)

    with gzip.open(Path(folder, TRACE), "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    milliseconds = _milliseconds_by_operation(events)
    updates = [event["dur"] / 1e3 for event in events if event["name"] == "update"]
    yield Figure(
        "profile",
        "",
        "an update",
        updates,
        unit="ms",
        best=dict(milliseconds.most_common(8)),
        best_unit="ms an update",
        note=f"{len(events)} events, {PROFILE}, {TRACE}",
    )


def _milliseconds_by_operation(events: list[dict[str, Any]]) -> Counter[str]:
    """Return how long each operation takes in an update, on the GPU if there is one."""
    names = {}
    for event in events:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
    processes = {process for process, name in names.items() if "GPU" in name}
    if not processes:
        processes = set(names)

    milliseconds = Counter[str]()
    for event in events:
        if event["ph"] == "X" and event["pid"] in processes:
            operation = re.sub(r"[<(].*|_?\d+$", "", event["name"])[:40]
            milliseconds[operation] += event["dur"] / 1e3 / PROFILED
    return milliseconds


def examples() -> tuple[tf.data.Dataset, None]:
    """Return 64 examples of one number with labels; all but one of them are 0."""
    x = np.zeros((64, 1), np.float32)
    x[FLAGGED] = 1
    return tf.data.Dataset.from_tensor_slices((x, x)), None


class Scarce(keras.layers.Layer):
    """Needs 2⁴⁶ numbers for each pair of examples, unless all of them are 0."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        count = tf.cast(tf.shape(x)[0], tf.int64)
        is_flagged = tf.cast(tf.reduce_max(x) > 0, tf.int64)
        pairs = count * (count - 1) // 2 * is_flagged
        # The value is not known before: a constant would be folded.
        filled = tf.fill([pairs * 2**46], tf.reduce_max(x))
        return x + tf.reduce_sum(filled) * 0


def scarce(input_shape: tuple[int, ...], classes: int | None = None) -> keras.Model:
    return keras.Sequential([keras.Input(input_shape), Scarce(), keras.layers.Dense(1)])


def _run(folder: str, *arguments: str) -> float:
    """Run `pipeline train` in `folder`; return its seconds."""
    from pipeline.__main__ import main

    os.chdir(folder)
    begun = time.perf_counter()
    status = main(["train", "hydra.run.dir=run", *arguments])
    if status:
        raise RuntimeError(f"pipeline train {' '.join(arguments)} ended with {status}")
    return time.perf_counter() - begun


def _rows(folder: str) -> list[dict[str, Any]]:
    journal = Path(folder, "run", "journal.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in journal.splitlines()]
    return [line["metrics"] for line in lines if "metrics" in line]
