"""A piece of `benchmarks/gpu.py`: texts of unequal length, cut by examples or by tokens.

A causal transformer of 11 million weights predicts the next byte, in bfloat16. Padding,
which is at the end, has sample weights of zero. The lengths are log-normal, up to 512,
and an effective batch has 256 texts. If it is cut by examples, it is padded to the
longest of all texts, since attention is fused only if the length is known during
tracing, and has 16 micro-batches. The limit of tokens is what each of these has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from benchmarks import gpu_device, text
from benchmarks.figures import Figure
from benchmarks.keras_models import weight_count
from benchmarks.texts import (
    CLASSES,
    MULTIPLE,
    Case,
    Texts,
    padded,
    read,
    token_count,
)
from benchmarks.turns import seconds_of
from benchmarks.workloads import Transformer
from pipeline.accumulation import Update, choose_xla_lengths
from pipeline.common import nvidia
from pipeline.common.memory_budget import readable
from pipeline.components import devices
from pipeline.components.model import decoder

ROUNDS = 10  # of one update of each effective batch
CASE = Case("log-normal", effective=256, factor=16)
NETWORK = Transformer(layers=6, width=384, heads=6)
TINY_CASE = Case("log-normal", effective=16, factor=4, limit=32)
TINY_NETWORK = Transformer(layers=1, width=16, heads=2)
TINY_ROUNDS = 2
XLA_LENGTHS = 4  # each is compiled


def texts(by_tokens: bool, xla: bool, fused: bool, tiny: bool) -> Iterator[Figure]:
    """Yield tokens/s without padding, the seconds to compile, and a loss.

    Args:
        by_tokens: the effective batches are cut by tokens; otherwise by examples.
        xla: XLA compiles the forward and backward passes.
        fused: cuDNN computes the attention, if it can.
        tiny: for a test.
    """
    machine = gpu_device.setup("bfloat16")
    case = TINY_CASE if tiny else CASE
    network = TINY_NETWORK if tiny else NETWORK
    effective_batches = effective_batches_of(case)
    limits = _limits(case, effective_batches, by_tokens, xla)
    model = _build(case, network)
    step = _updates(model, effective_batches, limits, xla, fused)

    # Each length is compiled when it comes for the first time.
    begun = time.perf_counter()
    first_loss = float(step()["loss"])
    first_update = time.perf_counter() - begun
    for _ in effective_batches[1:]:
        last_loss = float(step()["loss"])
    all_updates = time.perf_counter() - begun
    if not math.isfinite(last_loss):
        raise ArithmeticError(f"the loss is {last_loss}")

    count = len(effective_batches)
    rounds = TINY_ROUNDS if tiny else ROUNDS
    times = seconds_of(step, count, rounds)
    tokens = sum(map(token_count, effective_batches))
    positions = _positions(case, effective_batches, step, by_tokens)

    subject = _subject(by_tokens, xla, fused)
    cut = ", ".join(f"{name}={value}" for name, value in limits.items())
    yield Figure(
        "texts",
        subject,
        "tokens per second",
        [tokens / seconds for seconds in times],
        unit="1/s",
        note=(
            f"{positions / tokens:.2f} positions a token, {cut}, "
            f"{weight_count(model) / 1e6:.1f} M weights, "
            f"{readable(devices.peak_memory(machine))}"
        ),
    )
    yield Figure(
        "texts",
        subject,
        "first update",
        [first_update],
        unit="s",
        note=f"the first {count}: {all_updates:.1f} s",
    )
    # It is the same for each way, but for rounding: so are the updates before it.
    yield Figure(
        "texts",
        subject,
        f"loss of update {count}",
        [last_loss],
        note=f"of the first: {first_loss:.4f}",
    )


def effective_batches_of(case: Case) -> list[Texts]:
    in_order = read(case)
    starts = range(0, len(in_order), case.effective)
    return [in_order[start : start + case.effective] for start in starts]


def _limits(
    case: Case, effective_batches: Sequence[Texts], by_tokens: bool, xla: bool
) -> dict[str, Any]:
    """Return the arguments of `Update` that say how an effective batch is cut."""
    if not by_tokens:
        return {"micro_batch_size": case.micro}
    limits: dict[str, Any] = {
        "micro_batch_tokens": case.micro * _longest(effective_batches),
        "pad_multiple": MULTIPLE,
    }
    lengths = []
    for batch in effective_batches:
        lengths += [token_count([tokens]) for tokens in batch]
    if xla:
        limits["xla_lengths"] = choose_xla_lengths(lengths, XLA_LENGTHS, MULTIPLE)
    return limits


def _build(case: Case, network: Transformer) -> keras.Model:
    """Build the decoder, always with the same weights."""
    keras.utils.set_random_seed(0)
    return decoder(
        classes=CLASSES,
        length=case.longest,
        width=network.width,
        blocks=network.layers,
        heads=network.heads,
    )


def _updates(
    model: keras.Model,
    effective_batches: Sequence[Texts],
    limits: dict[str, Any],
    xla: bool,
    fused: bool,
) -> Callable[[], dict[str, tf.Tensor]]:
    """Return a function that makes an update of the next effective batch, endlessly."""
    optimizer = gpu_device.optimizer()
    optimizer.build(model.trainable_variables)
    update = Update(
        model,
        text.loss(),
        optimizer,
        jit_compile=xla,
        fused_attention=fused and nvidia.all_are_hopper(),
        **limits,
    )
    by_tokens = "micro_batch_tokens" in limits
    batches = iter(endless(effective_batches, by_tokens))

    @tf.function(autograph=False)
    def step(batches: Iterator[Any]) -> dict[str, tf.Tensor]:
        return update(next(batches))

    return lambda: step(batches)


def endless(effective_batches: Sequence[Texts], by_tokens: bool) -> tf.data.Dataset:
    """Return a dataset that repeats the effective batches, from the host's memory.

    They are ragged if they are cut by tokens. Otherwise, all have the same length.
    """
    as_batch: Callable[[Texts], tuple[Any, ...]]
    if by_tokens:
        as_batch = text.ragged_batch
        tokens = tf.RaggedTensorSpec([None, None], tf.int32)
        signature: tuple[Any, ...] = (tokens, tokens)
    else:
        length = _longest(effective_batches)
        as_batch = partial(text.padded_batch, length=length)
        tokens = tf.TensorSpec([None, length], tf.int32)
        signature = (tokens, tokens, tf.TensorSpec([None, length], tf.float32))
    with tf.device("CPU:0"):
        batches = [as_batch(batch) for batch in effective_batches]
        data = tf.data.Dataset.from_generator(
            lambda: iter(batches), output_signature=signature
        )
        return data.cache().repeat().prefetch(1)


def _positions(
    case: Case,
    effective_batches: Sequence[Texts],
    step: Callable[[], dict[str, tf.Tensor]],
    by_tokens: bool,
) -> int:
    """Return how many positions are computed for all effective batches."""
    if not by_tokens:
        return len(effective_batches) * case.effective * _longest(effective_batches)
    return sum(int(step()["positions"]) for _ in effective_batches)


def _longest(effective_batches: Sequence[Texts]) -> int:
    """Return the padded length of the longest text."""
    longest = 0
    for batch in effective_batches:
        longest = max(longest, *(token_count([tokens]) for tokens in batch))
    return padded(longest)


def _subject(by_tokens: bool, xla: bool, fused: bool) -> str:
    subject = "by tokens" if by_tokens else "by examples"
    if xla:
        subject += ", XLA"
    if fused:
        subject += ", fused attention"
    return subject
