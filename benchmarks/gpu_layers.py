"""Pieces of `benchmarks/gpu.py` about what a GPU does in its own way: TF32, several devices, noise, RNNs, look-ups."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import models
from benchmarks.figures import Figure, ratios
from benchmarks.gpu_workloads import setup, updates, workload
from benchmarks.turns import alternate, repeats
from benchmarks.update import repeated
from pipeline.accumulation import Update, accumulate_gradients

ROUNDS = 5
MICRO = 8


def tf32(tiny: bool) -> Iterator[Figure]:
    """Yield how far products and a gradient of float32 are from those of float64, with TF32 and without."""
    setup("float32")
    side = 64 if tiny else 2048
    generator = np.random.default_rng(0)
    left, right = generator.normal(size=(2, side, side))
    of = workload("transformer", tiny)
    batch, weights = of.examples(MICRO), None
    gradients: dict[str, np.ndarray] = {}
    for precision, on in (("float64", False), ("float32", False), ("float32", True)):
        tf.config.experimental.enable_tensor_float_32_execution(on)
        keras.config.set_floatx(precision)
        keras.config.set_dtype_policy(precision)
        model = of.build()
        weights = model.get_weights() if weights is None else weights
        model.set_weights(weights)

        @tf.function(autograph=False)
        def gradient(model: keras.Model = model) -> list[tf.Tensor]:
            found = accumulate_gradients(
                model, models.loss(), batch, MICRO // 2
            ).gradients()
            return [tf.convert_to_tensor(each) for each in found if each is not None]

        of_model = np.concatenate(
            [each.numpy().astype("float64").ravel() for each in gradient()]
        )
        product = tf.matmul(
            tf.constant(left, precision), tf.constant(right, precision)
        ).numpy()
        if precision == "float64":
            gradients, reference = {"": of_model}, product
            continue
        for what, found, exact in (
            ("product", product, reference),
            ("gradient", of_model, gradients[""]),
        ):
            error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
            yield Figure(
                "tf32",
                f"TF32 {'on' if on else 'off'}",
                f"{what} − float64, relative",
                [error],
            )


def two(tiny: bool) -> Iterator[Figure]:
    """Yield an update on two logical devices of one: whether it equals that on one, how fast, and what is where."""
    gpus = tf.config.list_physical_devices("GPU")
    kind, device = (
        ("GPU", gpus[0]) if gpus else ("CPU", tf.config.list_physical_devices("CPU")[0])
    )
    limit = {"memory_limit": 8192} if gpus else {}
    tf.config.set_logical_device_configuration(
        device, [tf.config.LogicalDeviceConfiguration(**limit)] * 2
    )
    of = workload("transformer", tiny)
    examples = of.examples(4 * MICRO)
    turns: dict[str, Callable[[], Any]] = {}
    weights: dict[str, list[np.ndarray]] = {}
    for name, strategy in (
        ("one", None),
        ("two", tf.distribute.MirroredStrategy([f"{kind}:0", f"{kind}:1"])),
    ):
        keras.utils.set_random_seed(0)
        with (
            tf.distribute.get_strategy().scope()
            if strategy is None
            else strategy.scope()
        ):
            model = of.build()
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
        update = Update(model, models.loss(), optimizer, MICRO, strategy=strategy)
        with tf.device("CPU:0"):
            batches = iter(
                tf.data.Dataset.from_tensors(tuple(map(tf.constant, examples))).repeat()
            )

        @tf.function(autograph=False)
        def step(
            batches: Iterator[Any], update: Update = update
        ) -> dict[str, tf.Tensor]:
            return update(next(batches))

        turns[name] = functools.partial(step, batches)
        turns[name]()
        weights[name] = model.get_weights()
        if name == "two":
            yield from _placed(step.get_concrete_function(batches).graph)
    largest = max(
        float(np.max(np.abs(a - b))) for a, b in zip(*weights.values(), strict=True)
    )
    # Sums of float32 in another order: 1e-6 of a weight's size, which is at most about 1.
    yield Figure(
        "two",
        kind,
        "largest difference of a weight after one update",
        [largest],
        at_most=1e-4,
    )
    count = repeats(turns["two"], 0.02 if tiny else 0.3)
    times = alternate(
        {name: repeated(call, count) for name, call in turns.items()}, ROUNDS
    )
    yield Figure(
        "two",
        kind,
        "one ÷ two logical devices, seconds",
        ratios(times["one"], times["two"]),
    )


def _placed(graph: tf.Graph) -> Iterator[Figure]:
    """Yield where the sums over replicas are, and which collectives there are, in the traced graph."""
    definition = graph.as_graph_def()
    functions = (
        node for function in definition.library.function for node in function.node_def
    )
    found = Counter[str]()
    for node in (*definition.node, *functions):
        if node.op == "AddN" or "Collective" in node.op or "Nccl" in node.op:
            found[f"{node.op} on {node.device.rpartition('/')[2] or 'any device'}"] += 1
    on_host = sum(
        count
        for where, count in found.items()
        if where.startswith("AddN on device:CPU:0")
    )
    yield Figure(
        "two",
        "graph",
        "sums on the host",
        [on_host],
        best=dict(found),
        best_unit="operations",
    )


def layers(tiny: bool) -> Iterator[Figure]:
    """Yield examples/s of an update with dropout, with and without `same_noise`, with an LSTM and with an embedding."""
    setup("float32")
    width, length, rows = (8, 4, 100) if tiny else (512, 128, 1_000_000)
    x = np.random.default_rng(0).integers(0, rows, (4 * MICRO, length), np.int32)
    y = np.zeros(len(x), np.int32)
    networks = {
        "dropout": lambda tokens: keras.layers.Dropout(0.1)(
            keras.layers.Dense(width, activation="relu")(tokens)
        ),
        "LSTM": keras.layers.LSTM(width, return_sequences=True),
        "embedding": lambda tokens: tokens,
    }
    turns: dict[str, Callable[[], object]] = {}
    for name, of in networks.items():
        inputs = keras.Input((length,), dtype="int32")
        hidden = of(
            keras.layers.Embedding(rows if name == "embedding" else 256, width)(
                inputs % 256
            )
        )
        model = keras.Model(
            inputs,
            keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(hidden)),
        )
        for same_noise in (False, True) if name == "dropout" else (False,):
            label = f"{name}, same_noise" if same_noise else name
            turns[label] = updates(model, (x, y), MICRO, same_noise=same_noise)
    for name, call in turns.items():
        count = repeats(call, 0.02 if tiny else 0.3)
        seconds = alternate({name: repeated(call, count)}, ROUNDS)[name]
        rates = [count * len(x) / each for each in seconds]
        yield Figure(
            "layers", name, "examples per second", rates, "1/s", note=f"{MICRO} × 4"
        )
