"""How fast a network trains on a device: examples/s, and the share of the device's own measured peak.

The matrix-product peak is measured in the same process, just after, in the precision of the run: in float32 with TF32
where the GPU has it, as TensorFlow and so a run leave it on. FLOPs are those of the model, as `benchmarks.flops` counts
them. One apply of Adam reads a gradient, a weight and two moments of float32, and writes the latter three: 28 bytes a
weight, whose share of the copy bandwidth says how far the apply is from the least that it could take.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import keras
import tensorflow as tf

from benchmarks import flops, peak, tracking, update
from benchmarks.figures import Figure, ratios
from benchmarks.gpu_workloads import FACTOR, Workload, setup, updates, workload
from benchmarks.turns import alternate, repeats
from pipeline.common.memory_budget import readable
from pipeline.components import devices

ROUNDS = 5
SECONDS = 3.0  # of all turns of a network, about
APPLY = 28  # bytes a weight
SHARE = {"transformer350m bfloat16": 0.45}  # of the matrix-product peak, at least


def measure(name: str, precision: str, xla: bool, tiny: bool) -> Iterator[Figure]:
    """Yield the speed of training `name`, whose best is in examples/s, as share of the matrix-product peak."""
    machine = setup(precision)
    of = workload(name, tiny)
    model = of.build()
    weights = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    micro, rates = _rates(of, model, xla, 0.1 if tiny else SECONDS)
    memory = devices.peak_memory(machine)
    possible = max(peak.products(precision, tiny))
    shares = [rate * flops.of_training(model) / possible for rate in rates]
    best = {"examples/s": max(rates)} | ({"tokens/s": of.tokens * max(rates)} if of.tokens else {})
    note = f"{micro} × {FACTOR}, {weights / 1e6:.1f} M weights, {readable(memory)}, peak {possible / 1e12:.4g} TFLOP/s"
    subject = f"{precision}{', XLA' if xla else ''}"
    target = None if tiny else SHARE.get(f"{name} {precision}")
    yield Figure(name, subject, "share of matrix-product peak", shares, "", best, at_least=target, note=note)


def of_limit(name: str, precision: str, tiny: bool) -> Iterator[Figure]:
    """Yield the update ÷ its strict limit, and what its apply makes of the copy bandwidth."""
    setup(precision)
    of = workload(name, tiny)
    model = of.build()
    x, y = map(tf.constant, of.examples(FACTOR * of.micro))
    known = update.contenders(model, x, y, of.micro, xla=False)
    parts = {part: known[part] for part in ("update", "strict", "apply")}
    count = repeats(parts["update"], 0.05 if tiny else 0.5)
    times = alternate({part: update.repeated(call, count) for part, call in parts.items()}, ROUNDS)
    limit = [passes + apply for passes, apply in zip(times["strict"], times["apply"], strict=True)]
    examples = count * len(x)
    best = {"update": examples / min(times["update"]), "limit": examples / min(limit)}
    subject, target = f"{name} {precision}", None if tiny else 0.97
    yield Figure(
        "update",
        subject,
        "update ÷ limit, strict",
        ratios(limit, times["update"]),
        "",
        best,
        "examples/s",
        at_least=target,
    )
    moved = APPLY * sum(math.prod(weight.shape) for weight in model.trainable_weights)
    possible = max(peak.copies(tiny))
    shares = [count * moved / seconds / possible for seconds in times["apply"]]
    note = f"{1e3 * min(times['apply']) / count:.3g} ms for {readable(moved)}, of {possible / 1e9:.4g} GB/s"
    yield Figure("update", subject, "apply, share of copy bandwidth", shares, note=note)


def logging(tiny: bool) -> Iterator[Figure]:
    """Yield what it costs to log every update."""
    setup("float32")
    rounds, seconds = (2, 0.05) if tiny else (4, 1.0)
    for figure in tracking.measure("mlp" if tiny else "cnn", rounds, seconds):
        figure.part = "logging"
        if tiny:
            figure.at_least = figure.at_most = None
        yield figure


def _rates(of: Workload, model: keras.Model, xla: bool, seconds: float) -> tuple[int, list[float]]:
    """Return the micro-batch size, halved until it fits, and examples/s of each turn."""
    micro = of.micro
    while (rates := _tried(of, model, micro, xla, seconds)) is None:
        gc.collect()  # the optimizer's moments
        micro //= 2
    return micro, rates


def _tried(of: Workload, model: keras.Model, micro: int, xla: bool, seconds: float) -> list[float] | None:
    """Return examples/s of each turn; None where it does not fit into memory."""
    if tf.config.list_logical_devices("GPU"):
        tf.config.experimental.reset_memory_stats("GPU:0")  # the peak of a try that did not fit
    step = updates(model, of.examples(FACTOR * micro), micro, xla)
    try:
        count = repeats(step, seconds / ROUNDS)
        times = alternate({"": update.repeated(step, count)}, ROUNDS)[""]
    except tf.errors.ResourceExhaustedError:
        if micro == 1:
            raise
        return None
    loss = float(step()["loss"])
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    return [count * FACTOR * micro / each for each in times]
