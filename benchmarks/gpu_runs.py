"""Pieces of `benchmarks/gpu.py` that are runs of `pipeline train`, each in the process that this is called in.

What they show is read where a user reads it: in the run's journal, and in the files of its directory.
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

QUIET = ("tracking.log_model=false", "tracking.system_metrics=false")
PROFILED = 10  # updates
FLAGGED = 21  # the example that does not fit


def train(precision: str, tiny: bool) -> Iterator[Figure]:
    """Yield how `pipeline train` as it is trains: a CNN with AdamW, a cosine, metrics, validation and every row logged.

    Its seconds are without the imports, which are done.
    """
    policy = precision if precision == "float32" else f"mixed_{precision}"
    small = ("model=mlp", "training.epochs=1") if tiny else ()
    with tempfile.TemporaryDirectory() as folder:
        seconds = _run(folder, f"hardware.precision={policy}", *small, *QUIET)
        rows = _rows(folder)
    updates = [row for row in rows if "train/loss" in row]
    rates = [row["perf/examples_per_second"] for row in updates[1:]]
    accuracy = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    best = {
        "whole run, s": seconds,
        "first update, s": updates[0]["perf/update_seconds"],
    }
    shares = [
        row["perf/model_flops_utilization"]
        for row in updates
        if "perf/model_flops_utilization" in row
    ]
    note = f"val/accuracy {accuracy[-1]:.3f}" + (
        f", MFU {median(shares):.2g}" if shares else ""
    )
    yield Figure(
        "train", precision, "examples per second", rates, "1/s", best, note=note
    )


def out_of_memory(tiny: bool) -> Iterator[Figure]:
    """Yield how often a run halved its micro-batches, in whose middle an update asks for more than any device has."""
    small = ("training.epochs=1",) if tiny else ("training.epochs=5",)
    arguments = (
        *(
            "~dataset",
            "+dataset={_target_: benchmarks.gpu_runs.examples, in_memory: true}",
            "~model",
        ),
        *(
            "+model={_target_: benchmarks.gpu_runs.scarce}",
            "objective=regression",
            "training.metrics={}",
        ),
        *(
            "accumulation.effective_batch_size=8",
            "accumulation.micro_batch_size=2",
            *small,
            *QUIET,
        ),
        "hardware.xla=false",  # which computes the sum of a fill without the fill
    )
    with tempfile.TemporaryDirectory() as folder:
        _run(folder, *arguments)
        rows = _rows(folder)
    updates = [row for row in rows if "train/loss" in row]
    sizes = {
        row["perf/micro_batch_size"]
        for row in updates
        if "perf/micro_batch_size" in row
    }
    if sizes != {1.0} or "perf/micro_batch_size" in updates[0]:
        raise AssertionError(
            f"micro-batches of 2 examples and then of 1 were expected, not of {sizes or 2}"
        )
    yield Figure(
        "limits",
        "out of memory",
        "updates, of which one did not fit",
        [len(updates)],
        at_least=len(updates),
    )


def profile(tiny: bool, folder: str) -> Iterator[Figure]:
    """Yield what took how long in ten updates, and leave the profile in `folder`."""
    small = ("training.updates=14", "model=mlp") if tiny else ("training.updates=40",)
    with tempfile.TemporaryDirectory() as run:
        _run(
            run,
            "training.epochs=null",
            f"hardware.profile={{start: 4, updates: {PROFILED}}}",
            *small,
            *QUIET,
        )
        names = ["profile_4.xplane.pb", "profile_4.trace.json.gz"]
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(Path(run, "run", name), folder)
    with gzip.open(Path(folder, names[1]), "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    places = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event["name"] == "process_name"
    }
    devices = {pid for pid, name in places.items() if "GPU" in name} or set(places)
    taken = Counter[str]()
    for event in events:
        if event["ph"] == "X" and event["pid"] in devices:
            taken[re.sub(r"[<(].*|_?\d+$", "", event["name"])[:40]] += (
                event["dur"] / 1e3 / PROFILED
            )
    updates = [event["dur"] / 1e3 for event in events if event["name"] == "update"]
    note = f"{len(events)} events, {', '.join(names)}"
    yield Figure(
        "profile",
        "",
        "an update",
        updates,
        "ms",
        dict(taken.most_common(8)),
        "ms an update",
        note=note,
    )


def examples() -> tuple[tf.data.Dataset, None]:
    """Return 64 examples of one number, 0 but for one of them, with labels."""
    x = np.zeros((64, 1), np.float32)
    x[FLAGGED] = 1
    return tf.data.Dataset.from_tensor_slices((x, x)), None


class Scarce(keras.layers.Layer):
    """Asks for 2⁴⁶ numbers for each pair of examples in a micro-batch with one that is not 0."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        count = tf.cast(tf.shape(x)[0], tf.int64)
        pairs = count * (count - 1) // 2 * tf.cast(tf.reduce_max(x) > 0, tf.int64)
        # Not known before: a constant would be folded.
        return x + tf.reduce_sum(tf.fill([pairs * 2**46], tf.reduce_max(x))) * 0


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
    lines = (
        Path(folder, "run", "journal.jsonl").read_text(encoding="utf-8").splitlines()
    )
    return [line["metrics"] for line in map(json.loads, lines) if "metrics" in line]
