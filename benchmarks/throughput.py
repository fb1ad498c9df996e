"""How fast a network trains on a device: examples/s, and the share of the device's own measured peak.

The matrix-product peak is measured in the same process, just after, in the precision of the run: in float32 with TF32
where the GPU has it, as TensorFlow and so a run leave it on. FLOPs are those of the model, as `training_flops` counts
them. One apply of Adam reads a gradient, a weight and two moments of float32, and writes the latter three: 28 bytes a
weight, whose share of the copy bandwidth says how far the apply is from the least that it could take.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Iterator

import keras
import tensorflow as tf

from benchmarks import models, peak, update
from benchmarks.figures import Figure, ratios
from benchmarks.gpu_workloads import FACTOR, Workload, setup, updates, workload
from benchmarks.turns import alternate, repeats
from pipeline.accumulation import training_flops
from pipeline.common.memory_budget import readable
from pipeline.components import devices

ROUNDS = 5
SECONDS = 3.0  # of all turns of a network, about
SIZES = (1, 4, 16, 64, 256)  # micro-batches
APPLY = 28  # bytes a weight
SHARE = {"transformer350m bfloat16": 0.45}  # of the matrix-product peak, at least


def measure(
    name: str, precision: str, xla: bool, tiny: bool, micro: int | None = None
) -> Iterator[Figure]:
    """Yield the speed of training `name`, whose best is in examples/s, as share of the matrix-product peak.

    `micro` is the micro-batch size, halved until it fits. The first update, which is traced and compiled, is apart.
    """
    machine = setup(precision)
    of = workload(name, tiny)
    of = of if micro is None or tiny else dataclasses.replace(of, micro=micro)
    model = of.build()
    weights = sum(math.prod(weight.shape) for weight in model.trainable_weights)
    subject = f"{name} {precision}{', XLA' if xla else ''}"
    begun = time.perf_counter()
    fitting, rates = _rates(of, model, xla, 0.1 if tiny else SECONDS)
    compiled = time.perf_counter() - begun - ROUNDS * FACTOR * fitting / max(rates)
    memory = devices.peak_memory(machine)
    yield Figure(
        "large",
        subject,
        "seconds before it is measured: traced, compiled, tried",
        [max(0.0, compiled)],
        "s",
    )
    possible = max(peak.products(precision, tiny))
    flops, unknown = training_flops(model, models.loss(), of.examples(2))
    assert not unknown, unknown
    best = {"examples/s": max(rates)} | (
        {"tokens/s": of.tokens * max(rates)} if of.tokens else {}
    )
    note = f"{fitting} × {FACTOR}, {weights / 1e6:.1f} M weights, {readable(memory)}, {possible / 1e12:.4g} TFLOP/s"
    target = None if tiny else SHARE.get(f"{name} {precision}")
    shares = [rate * flops / possible for rate in rates]
    yield Figure(
        "large",
        subject,
        "share of matrix-product peak",
        shares,
        "",
        best,
        at_least=target,
        note=note,
    )


def by_size(name: str, precision: str, xla: bool, tiny: bool) -> Iterator[Figure]:
    """Yield examples/s for each micro-batch size, at factor 1; the first that does not fit ends it."""
    setup(precision)
    of = workload(name, tiny)
    model = of.build()
    for micro in SIZES[:2] if tiny else SIZES:
        begun = time.perf_counter()
        step = updates(model, of.examples(micro), micro, xla)
        step()["loss"].numpy()
        first = time.perf_counter() - begun
        count = repeats(step, 0.02 if tiny else 0.3)
        times = alternate({"": update.repeated(step, count)}, ROUNDS)[""]
        subject = f"{name} {precision}{', XLA' if xla else ''}, micro-batch {micro}"
        rates = [count * micro / each for each in times]
        yield Figure(
            "sizes",
            subject,
            "examples per second",
            rates,
            "1/s",
            {"first update": first},
            "s",
        )


def of_limit(name: str, precision: str, tiny: bool) -> Iterator[Figure]:
    """Yield the update ÷ its strict limit, and what its apply makes of the copy bandwidth."""
    setup(precision)
    of = workload(name, tiny)
    model = of.build()
    x, y = map(tf.constant, of.examples(FACTOR * of.micro))
    known = update.contenders(model, x, y, of.micro, xla=False)
    parts = {part: known[part] for part in ("update", "strict", "apply")}
    count = repeats(parts["update"], 0.05 if tiny else 0.5)
    times = alternate(
        {part: update.repeated(call, count) for part, call in parts.items()}, ROUNDS
    )
    limit = [
        passes + apply
        for passes, apply in zip(times["strict"], times["apply"], strict=True)
    ]
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


def _rates(
    of: Workload, model: keras.Model, xla: bool, seconds: float
) -> tuple[int, list[float]]:
    """Return the micro-batch size, halved until it fits, and examples/s of each turn."""
    micro = of.micro
    while (rates := _tried(of, model, micro, xla, seconds)) is None:
        gc.collect()  # the optimizer's moments
        micro //= 2
    return micro, rates


def _tried(
    of: Workload, model: keras.Model, micro: int, xla: bool, seconds: float
) -> list[float] | None:
    """Return examples/s of each turn; None where it does not fit into memory."""
    if tf.config.list_logical_devices("GPU"):
        tf.config.experimental.reset_memory_stats(
            "GPU:0"
        )  # the peak of a try that did not fit
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
