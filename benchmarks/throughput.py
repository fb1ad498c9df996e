"""How fast a network trains on a device, and its share of the device's measured peak.

The matrix-product peak is measured in the same process, just after the training, in the
same precision. In float32 that is with TF32 if the GPU has it, as TensorFlow and so a
run leave it on. FLOPs are those of the model, as `training_flops` counts them.

One apply of Adam reads a gradient, a weight and two moments of float32, and writes the
latter three: 28 bytes a weight. These bytes per second, as a share of the copy
bandwidth, say how close the apply is to the least time that it could take.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Iterator

import keras
import tensorflow as tf

from benchmarks import keras_models, peak, update
from benchmarks.figures import Figure, ratios
from benchmarks.gpu_device import setup, updates
from benchmarks.turns import alternate_repeated, repeats, seconds_of
from benchmarks.workloads import WORKLOADS, Workload, on_gpu
from pipeline.accumulation import training_flops
from pipeline.accumulation.update import SCOPES
from pipeline.common.memory_budget import readable
from pipeline.components import devices

ROUNDS = 5
SECONDS = 3.0  # of all turns of a network, about
MICRO_BATCH_SIZES = (1, 4, 16, 64, 256)
APPLY_BYTES = 28  # of a weight
# The targets: shares of the matrix-product peak.
LEAST_SHARES = {"transformer350m bfloat16": 0.45}


def measure(
    name: str, precision: str, xla: bool, tiny: bool, micro: int | None = None
) -> Iterator[Figure]:
    """Yield the time to compile, and the share of the matrix-product peak.

    `micro` is the micro-batch size, halved until it fits. The first update, which is
    traced and compiled, is not part of the speed.
    """
    machine = setup(precision)
    workload = on_gpu(name, tiny)
    if micro is not None and not tiny:
        workload = dataclasses.replace(workload, micro=micro)
    model = keras_models.build(workload)
    subject = f"{name} {precision}"
    if xla:
        subject += ", XLA"

    seconds = 0.1 if tiny else SECONDS
    begun = time.perf_counter()
    fitting, rates = _rates(workload, model, xla, seconds)
    turns = ROUNDS * workload.factor * fitting / max(rates)
    before_turns = time.perf_counter() - begun - turns
    memory = devices.peak_memory(machine)
    yield Figure(
        "large",
        subject,
        "seconds before it is measured: traced, compiled, tried",
        [max(0.0, before_turns)],
        unit="s",
    )

    possible = max(peak.products(precision, tiny))
    flops, unknown = training_flops(model, keras_models.loss(), workload.examples(2))
    assert not unknown, unknown
    best = {"examples/s": max(rates)}
    if workload.tokens:
        best["tokens/s"] = workload.tokens * max(rates)
    target = None if tiny else LEAST_SHARES.get(f"{name} {precision}")
    yield Figure(
        "large",
        subject,
        "share of matrix-product peak",
        [rate * flops / possible for rate in rates],
        best=best,
        at_least=target,
        note=(
            f"{fitting} × {workload.factor}, {_weights(model) / 1e6:.1f} M weights, "
            f"{readable(memory)}, {possible / 1e12:.4g} TFLOP/s"
        ),
    )


def by_size(name: str, precision: str, xla: bool, tiny: bool) -> Iterator[Figure]:
    """Yield examples/s for each micro-batch size, at factor 1.

    The first size that does not fit ends it.
    """
    setup(precision)
    workload = on_gpu(name, tiny)
    model = keras_models.build(workload)
    subject = f"{name} {precision}"
    if xla:
        subject += ", XLA"
    sizes = list(MICRO_BATCH_SIZES)
    turn_seconds = 0.3
    if tiny:
        sizes = sizes[:2]
        turn_seconds = 0.02

    for micro in sizes:
        begun = time.perf_counter()
        step = updates(model, workload.examples(micro), micro, xla)
        step()["loss"].numpy()
        first_update = time.perf_counter() - begun

        count = repeats(step, turn_seconds)
        times = seconds_of(step, count, ROUNDS)
        yield Figure(
            "sizes",
            f"{subject}, micro-batch {micro}",
            "examples per second",
            [count * micro / seconds for seconds in times],
            unit="1/s",
            best={"first update": first_update},
            best_unit="s",
        )


def by_scope(name: str, tiny: bool) -> Iterator[Figure]:
    """Yield examples/s of a small model: without XLA, and with each `xla_scope`.

    The turns alternate. The effective batch has 32 micro-batches of 8 examples.
    """
    setup("float32")
    workload = WORKLOADS[name]
    examples_per_update = 16 if tiny else 256
    batch = workload.examples(examples_per_update)
    calls = {}
    model = keras_models.build(workload)
    calls["without XLA"] = updates(model, batch, 8)
    for scope in SCOPES:
        model = keras_models.build(workload)
        calls[f"xla_scope={scope}"] = updates(
            model, batch, 8, xla=True, xla_scope=scope
        )

    turn_seconds = 0.02 if tiny else 0.3
    count = repeats(calls["without XLA"], turn_seconds)
    times = alternate_repeated(calls, count, ROUNDS)
    examples = count * len(batch[0])
    for way, seconds in times.items():
        yield Figure(
            "scopes",
            f"{name} float32, {way}",
            "examples per second",
            [examples / turn for turn in seconds],
            unit="1/s",
        )


def update_and_limit(name: str, precision: str, tiny: bool) -> Iterator[Figure]:
    """Yield the update ÷ its strict limit, and the apply's share of the bandwidth."""
    setup(precision)
    workload = on_gpu(name, tiny)
    model = keras_models.build(workload)
    x, y = map(tf.constant, workload.examples(workload.effective))
    contenders = update.contenders(model, x, y, workload.micro, xla=False)
    parts = ("update", "strict", "apply", "apply by XLA")
    calls = {part: contenders[part] for part in parts}
    turn_seconds = 0.05 if tiny else 0.5
    count = repeats(calls["update"], turn_seconds)
    times = alternate_repeated(calls, count, ROUNDS)

    limit = update.limits(times["strict"], times["apply"])
    examples = count * len(x)
    subject = f"{name} {precision}"
    target = None if tiny else 0.97
    yield Figure(
        "update",
        subject,
        "update ÷ limit, strict",
        ratios(limit, times["update"]),
        best={
            "update": examples / min(times["update"]),
            "limit": examples / min(limit),
        },
        best_unit="examples/s",
        at_least=target,
    )

    moved = APPLY_BYTES * _weights(model)
    possible = max(peak.copies(tiny))
    for part in ("apply", "apply by XLA"):
        milliseconds = 1e3 * min(times[part]) / count
        yield Figure(
            "update",
            subject,
            f"{part}, share of copy bandwidth",
            [count * moved / seconds / possible for seconds in times[part]],
            note=(
                f"{milliseconds:.3g} ms for {readable(moved)}, "
                f"of {possible / 1e9:.4g} GB/s"
            ),
        )


def _rates(
    workload: Workload, model: keras.Model, xla: bool, seconds: float
) -> tuple[int, list[float]]:
    """Return the micro-batch size, halved until it fits, and examples/s by turn."""
    micro = workload.micro
    rates = _rates_if_it_fits(workload, model, micro, xla, seconds)
    while rates is None:
        gc.collect()  # the optimizer's moments
        micro //= 2
        rates = _rates_if_it_fits(workload, model, micro, xla, seconds)
    return micro, rates


def _rates_if_it_fits(
    workload: Workload, model: keras.Model, micro: int, xla: bool, seconds: float
) -> list[float] | None:
    """Return examples/s of each turn; None if it does not fit into memory."""
    if tf.config.list_logical_devices("GPU"):
        # The peak so far may be that of a size that did not fit.
        tf.config.experimental.reset_memory_stats("GPU:0")
    examples = workload.factor * micro
    step = updates(model, workload.examples(examples), micro, xla)
    try:
        count = repeats(step, seconds / ROUNDS)
        times = seconds_of(step, count, ROUNDS)
    except tf.errors.ResourceExhaustedError:
        if micro == 1:
            raise
        return None

    loss = float(step()["loss"])
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    return [count * examples / turn for turn in times]


def _weights(model: keras.Model) -> int:
    return sum(math.prod(weight.shape) for weight in model.trainable_weights)
