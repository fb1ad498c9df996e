"""Pieces of `benchmarks/gpu.py` about what a GPU does differently from a CPU.

These are TF32, several devices, noise, RNNs and look-ups.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import keras_models
from benchmarks.figures import Figure, ratios
from benchmarks.gpu_comparisons import largest_difference
from benchmarks.gpu_device import repeated_batch, setup, updates
from benchmarks.turns import alternate_repeated, repeats, seconds_of
from benchmarks.workloads import Workload, on_gpu
from pipeline.accumulation import Update, accumulate_gradients

ROUNDS = 5
MICRO = 8
FACTOR = 4


def tf32(tiny: bool) -> Iterator[Figure]:
    """Yield how far a product and a gradient of float32 are from those of float64.

    Both are computed with TF32 and without.
    """
    setup("float32")
    side = 64 if tiny else 2048
    generator = np.random.default_rng(0)
    left, right = generator.normal(size=(2, side, side))
    workload = on_gpu("transformer", tiny)

    _set_precision("float64", tf32_on=False)
    model = keras_models.build(workload)
    weights = model.get_weights()
    exact_product = _product(left, right, "float64")
    exact_gradient = _gradient(model, workload)

    for subject, tf32_on in (("TF32 off", False), ("TF32 on", True)):
        _set_precision("float32", tf32_on)
        model = keras_models.build(workload)
        model.set_weights(weights)
        product = _product(left, right, "float32")
        gradient = _gradient(model, workload)
        yield _error("product", subject, product, exact_product)
        yield _error("gradient", subject, gradient, exact_gradient)


def two(tiny: bool) -> Iterator[Figure]:
    """Yield an update on two logical devices of one card.

    The figures are whether it equals the update on one device, how fast it is, and
    where the operations are.
    """
    kind = _split_first_device()
    one = _replicated(None, tiny)
    both = tf.distribute.MirroredStrategy([f"{kind}:0", f"{kind}:1"])
    replicated = _replicated(both, tiny)
    yield from _placements(replicated.graph)

    # Sums of float32 in another order: 1e-6 of a weight's size, which is at most
    # about 1.
    yield Figure(
        "two",
        kind,
        "largest difference of a weight after one update",
        [largest_difference(one.weights, replicated.weights)],
        at_most=1e-4,
    )

    turn_seconds = 0.02 if tiny else 0.3
    count = repeats(replicated.step, turn_seconds)
    calls = {"one": one.step, "two": replicated.step}
    times = alternate_repeated(calls, count, ROUNDS)
    yield Figure(
        "two",
        kind,
        "one ÷ two logical devices, seconds",
        ratios(times["one"], times["two"]),
    )


def layers(tiny: bool) -> Iterator[Figure]:
    """Yield examples/s of an update with dropout, with an LSTM and with an embedding.

    Dropout is measured with and without `same_noise`.
    """
    setup("float32")
    width = 512
    length = 128
    rows = 1_000_000
    turn_seconds = 0.3
    if tiny:
        width = 8
        length = 4
        rows = 100
        turn_seconds = 0.02
    generator = np.random.default_rng(0)
    x = generator.integers(0, rows, (FACTOR * MICRO, length), np.int32)
    y = np.zeros(len(x), np.int32)

    dense = keras.layers.Dense(width, activation="relu")
    dropout = keras.layers.Dropout(0.1)
    with_dropout = _token_model([dense, dropout], length, 256, width)
    lstm = keras.layers.LSTM(width, return_sequences=True)
    with_lstm = _token_model([lstm], length, 256, width)
    with_embedding = _token_model([], length, rows, width)
    steps = {
        "dropout": updates(with_dropout, (x, y), MICRO),
        "dropout, same_noise": updates(with_dropout, (x, y), MICRO, same_noise=True),
        "LSTM": updates(with_lstm, (x, y), MICRO),
        "embedding": updates(with_embedding, (x, y), MICRO),
    }
    for name, step in steps.items():
        count = repeats(step, turn_seconds)
        times = seconds_of(step, count, ROUNDS)
        yield Figure(
            "layers",
            name,
            "examples per second",
            [count * len(x) / seconds for seconds in times],
            unit="1/s",
            note=f"{MICRO} × {FACTOR}",
        )


def _set_precision(precision: str, tf32_on: bool) -> None:
    tf.config.experimental.enable_tensor_float_32_execution(tf32_on)
    keras.config.set_floatx(precision)
    keras.config.set_dtype_policy(precision)


def _product(left: np.ndarray, right: np.ndarray, precision: str) -> np.ndarray:
    product = tf.matmul(tf.constant(left, precision), tf.constant(right, precision))
    return product.numpy()


def _gradient(model: keras.Model, workload: Workload) -> np.ndarray:
    """Return the gradient of a batch of two micro-batches, in one vector."""
    batch = workload.examples(MICRO)

    @tf.function(autograph=False)
    def traced() -> list[tf.Tensor]:
        sums = accumulate_gradients(model, keras_models.loss(), batch, MICRO // 2)
        gradients = filter(lambda gradient: gradient is not None, sums.gradients())
        return list(map(tf.convert_to_tensor, gradients))

    vectors = [array.numpy().astype("float64").ravel() for array in traced()]
    return np.concatenate(vectors)


def _error(what: str, subject: str, result: np.ndarray, exact: np.ndarray) -> Figure:
    error = float(np.linalg.norm(result - exact) / np.linalg.norm(exact))
    return Figure("tf32", subject, f"{what} − float64, relative", [error])


@dataclass(frozen=True)
class Replicated:
    """A network under a strategy, after one update.

    Attributes:
        step: makes one more update.
        weights: after the first one.
        graph: of an update.
    """

    step: Callable[[], Any]
    weights: list[np.ndarray]
    graph: tf.Graph


def _split_first_device() -> str:
    """Make two logical devices of the first GPU, or of the CPU; return its kind."""
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    device = tf.config.list_physical_devices(kind)[0]
    limit = 8192 if kind == "GPU" else None  # MB
    logical = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
    tf.config.set_logical_device_configuration(device, [logical, logical])
    return kind


def _replicated(strategy: tf.distribute.Strategy | None, tiny: bool) -> Replicated:
    workload = on_gpu("transformer", tiny)
    keras.utils.set_random_seed(0)
    scope = contextlib.nullcontext() if strategy is None else strategy.scope()
    with scope:
        model = keras_models.build(workload)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    update = Update(model, keras_models.loss(), optimizer, MICRO, strategy=strategy)
    batches = iter(repeated_batch(workload.examples(FACTOR * MICRO)))

    @tf.function(autograph=False)
    def traced(batches: Iterator[Any]) -> dict[str, tf.Tensor]:
        return update(next(batches))

    def step() -> dict[str, tf.Tensor]:
        return traced(batches)

    step()
    graph = traced.get_concrete_function(batches).graph
    return Replicated(step, model.get_weights(), graph)


def _placements(graph: tf.Graph) -> Iterator[Figure]:
    """Yield where the sums over replicas and the collectives of a traced graph are."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def

    placements = Counter[str]()
    for node in nodes:
        if node.op == "AddN" or "Collective" in node.op or "Nccl" in node.op:
            device = node.device.rpartition("/")[2] or "any device"
            placements[f"{node.op} on {device}"] += 1
    on_host = 0
    for placement, count in placements.items():
        if placement.startswith("AddN on device:CPU:0"):
            on_host += count
    yield Figure(
        "two",
        "graph",
        "sums on the host",
        [on_host],
        best=dict(placements),
        best_unit="operations",
    )


def _token_model(
    layers_between: Sequence[keras.layers.Layer], length: int, rows: int, width: int
) -> keras.Model:
    """Build an embedding, some layers, the mean over tokens and one dense layer."""
    inputs = keras.Input((length,), dtype="int32")
    hidden = keras.layers.Embedding(rows, width)(inputs % 256)
    for layer in layers_between:
        hidden = layer(hidden)
    hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(inputs, keras.layers.Dense(10)(hidden))
