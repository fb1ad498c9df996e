"""How often an update goes over all replicas: once for each gradient, whatever the factor. Read in the traced graph."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import Update, accumulate_gradients
from pipeline.accumulation.batch import all_reduced
from tests import programs
from tests.accumulation.matrix_workers import pair
from tests.parameters import mostly_slow

EFFECTIVE, WIDTH, CLASSES = 64, 5, 3
GRADIENTS = [(WIDTH, 7), (7,), (7, CLASSES), (CLASSES,)]
# Of the one loss Σwᵢ·lossᵢ, the same by its weight and Σwᵢ; what the model adds; the examples.
SCALARS = 3 + 1 + 1
PACKED = sum(map(math.prod, GRADIENTS)) + SCALARS
# Between the CPUs of one process the first replica adds and the others copy; between GPUs or workers all that has one
# dtype is sent by one collective.
COLLECTIVE = {
    "CollectiveReduce",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
    "NcclAllReduce",
    "NcclReduce",
}
REPLICAS = ("CPU:1", "CPU:2")  # beside the host, as two GPUs are


def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


STRATEGIES = {"two replicas": mirrored}


def reductions(function: Callable) -> tuple[list[tuple], int]:
    """Return the shapes that a traced function reduces over replicas, and how many reductions are in its loops."""
    specs = tf.TensorSpec([EFFECTIVE, WIDTH]), tf.TensorSpec([EFFECTIVE], tf.int64)
    graph = (
        tf.function(function, autograph=False)
        .get_concrete_function(*specs)
        .graph.as_graph_def(add_shapes=True)
    )
    shapes = [
        node.attr["_output_shapes"].list.shape[0]
        for node in graph.node
        if _reduces(node)
    ]
    nested = [
        node
        for inner in graph.library.function
        for node in inner.node_def
        if _reduces(node)
    ]
    return [tuple(size.size for size in shape.dim) for shape in shapes], len(nested)


def _reduces(node: tf.compat.v1.NodeDef) -> bool:
    """Whether it is a collective, or a sum of what the first replica has and each other one."""
    of_replicas = [re.search(r"(?:^|/)replica_\d+/", name) for name in node.input]
    return node.op in COLLECTIVE or (
        node.op == "AddN" and any(of_replicas) and not all(of_replicas)
    )


def update_of(
    strategy: tf.distribute.Strategy,
    factor: int,
    width: int = 7,
    *,
    normalised: bool = False,
) -> Update:
    with strategy.scope():
        hidden = (
            keras.layers.Dense(width, "tanh"),
            *([keras.layers.BatchNormalization()] if normalised else []),
        )
        model = keras.Sequential(
            [keras.Input((WIDTH,)), *hidden, keras.layers.Dense(CLASSES)]
        )
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    micro_batch_size = EFFECTIVE // factor // strategy.num_replicas_in_sync
    return Update(model, loss, optimizer, micro_batch_size, strategy=strategy)


@pytest.mark.parametrize("factor", mostly_slow([1, 4, 32], [4, 32]))
@pytest.mark.parametrize("devices", STRATEGIES)
def test_each_gradient_is_reduced_once_an_update(precision, devices, factor):
    precision("float32")
    update = update_of(STRATEGIES[devices](), factor)
    found, in_loops = reductions(lambda x, y: update((x, y)))
    assert [shape for shape in found if shape] == GRADIENTS
    assert len([shape for shape in found if not shape]) == SCALARS
    assert in_loops == 0  # where one would run once a micro-step


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("devices", STRATEGIES)
def test_reduced_in_every_micro_step_they_are_factor_times_as_many(
    precision, devices, factor
):
    """The control: sums over all replicas for each piece of the effective batch."""
    precision("float32")
    update, size = update_of(STRATEGIES[devices](), factor), EFFECTIVE // factor

    def in_every_step(x, y):
        return [
            update.sums((x[start : start + size], y[start : start + size]))
            for start in range(0, EFFECTIVE, size)
        ]

    found, _ = reductions(in_every_step)
    assert [shape for shape in found if shape] == factor * GRADIENTS


@pytest.mark.parametrize("devices", STRATEGIES)
def test_reductions_in_a_loop_are_seen(precision, devices):
    """The control of where they are: the graph has them once, and its loop runs them each time."""
    precision("float32")
    update = update_of(STRATEGIES[devices](), 4)

    def in_a_loop(x, y):
        def body(start, total):
            return start + 16, total + update.sums(
                (x[start : start + 16], y[start : start + 16])
            ).mean_loss()

        return tf.while_loop(lambda start, _: start < EFFECTIVE, body, (0, 0.0))

    found, in_loops = reductions(in_a_loop)
    assert (found, in_loops) == ([], len(GRADIENTS) + SCALARS)


@pytest.mark.parametrize("factor", mostly_slow([1, 4, 32], [4]))
def test_workers_reduce_each_gradient_once_an_update(factor):
    assert pair().ask("reductions", factor=factor) == [[[PACKED]], 0]


def beside_the_host(**more) -> tf.compat.v1.GraphDef:
    """The traced graph of an update by two replicas that are not on the host's device."""
    update = update_of(tf.distribute.MirroredStrategy(REPLICAS), 4, **more)
    specs = tf.TensorSpec([EFFECTIVE, WIDTH]), tf.TensorSpec([EFFECTIVE], tf.int64)
    made = tf.function(
        lambda *batch: update(batch), autograph=False
    ).get_concrete_function(*specs)
    return made.graph.as_graph_def(add_shapes=True)


def device_of(node: tf.compat.v1.NodeDef) -> str:
    return node.device[-len("CPU:0") :]


def edges(
    graph: tf.compat.v1.GraphDef, source: str, target: str
) -> list[tuple[str, int]]:
    """The operations on one device that take what another one computes, each with its number of elements."""
    of, found = {node.name: node for node in graph.node}, []
    for node in graph.node:
        for name in node.input:
            made, _, output = name.partition(":")
            if (
                made in of
                and of[made].op != "Const"
                and (device_of(of[made]), device_of(node)) == (source, target)
            ):
                shape = of[made].attr["_output_shapes"].list.shape[int(output or 0)]
                found.append((node.op, math.prod(size.size for size in shape.dim)))
    return found


@pytest.mark.parametrize("normalised", [False, True])
def test_sums_stay_on_the_replicas(precision, normalised):
    """The host adds nothing and takes nothing of them; the second replica takes each sum once, as the reduction."""
    precision("float32")
    graph = beside_the_host(normalised=normalised)
    assert {device_of(node) for node in graph.node if node.op == "AddN"} == {
        REPLICAS[0]
    }
    assert [edges(graph, replica, "CPU:0") for replica in REPLICAS] == [[], []]
    statistics = (
        2 + 4 if normalised else 0
    )  # the gradients of two weights, and what moves the statistics
    assert [op for op, _ in edges(graph, *REPLICAS)] == ["Identity"] * (
        len(GRADIENTS) + SCALARS + statistics
    )
    # What is on no certain device passes on no gradient.
    assert not [
        size
        for _, size in edges(graph, REPLICAS[0], "")
        if size > (7 if normalised else 1)
    ]


def test_what_has_one_dtype_is_one_collective(precision):
    """Between GPUs; here only traced, as between CPUs it is not used. Rows are collected, not made dense."""
    precision("float32")
    strategy = tf.distribute.MirroredStrategy(REPLICAS)

    def of_replica():
        dense = [tf.ones(shape) for shape in GRADIENTS]
        return [
            *dense,
            tf.ones([2], tf.float64),
            tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 4])),
            tf.ones([]),
        ]

    def summed():
        values = all_reduced(strategy, strategy.run(of_replica))
        assert [value.values[0].dtype for value in values] == [
            *["float32"] * 4,
            "float64",
            *["float32"] * 2,
        ]
        assert isinstance(values[5].values[0], tf.IndexedSlices)
        return [value.values[1] for value in values]

    graph = (
        tf.function(summed, autograph=False)
        .get_concrete_function()
        .graph.as_graph_def(add_shapes=True)
    )
    found = [node for node in graph.node if node.op in COLLECTIVE]
    sizes = [node.attr["_output_shapes"].list.shape[0].dim[0].size for node in found]
    assert sorted(zip(sizes, map(device_of, found), strict=True)) == [
        *((2, replica) for replica in REPLICAS),
        *((sum(map(math.prod, GRADIENTS)) + 1, replica) for replica in REPLICAS),
    ]


def test_rows_of_an_embedding_stay_rows(precision):
    """An index that both replicas looked up has one row, with their sum."""
    precision("float64")
    with (strategy := mirrored()).scope():
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(9, 3),
                keras.layers.Flatten(),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    update = Update(model, "mse", optimizer, 1, strategy=strategy)
    batch = tf.constant([[0, 1], [1, 2], [2, 8], [2, 2]]), tf.zeros([4, 6])
    (found,) = tf.function(lambda: update.sums(batch).gradients(), autograph=False)()
    assert sorted(found.indices.numpy()) == [0, 1, 2, 8]
    (expected,) = accumulate_gradients(model, "mse", batch, 4).gradients()
    np.testing.assert_allclose(
        tf.convert_to_tensor(found),
        tf.convert_to_tensor(expected),
        rtol=1e-15,
        atol=1e-17,
    )


def test_gradients_of_losses_with_weights_of_their_own_are_reduced_as_one(precision):
    """Where the model computes a mask, its weight goes first, so that each replica divides before the reduction."""
    precision("float32")
    with (strategy := mirrored()).scope():
        tokens = keras.Input((WIDTH,))
        hidden = keras.layers.Dense(7)(
            keras.layers.Masking()(keras.layers.Reshape((WIDTH, 1))(tokens))
        )
        of_all = keras.layers.Lambda(lambda sequence: tf.reduce_sum(sequence, 1))(
            hidden
        )
        model = keras.Model(
            tokens,
            {"a": keras.layers.Dense(1)(hidden), "b": keras.layers.Dense(1)(of_all)},
        )
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    update = Update(model, {"a": "mse", "b": "mse"}, optimizer, 8, strategy=strategy)

    def of_both(x, y):
        labels = tf.cast(y, tf.float32)
        return update(
            (
                x,
                {
                    "a": tf.tile(labels[:, None, None], [1, WIDTH, 1]),
                    "b": labels[:, None],
                },
            )
        )

    found, _ = reductions(of_both)
    assert len([shape for shape in found if shape]) == len(model.trainable_variables)


@pytest.mark.slow
def test_workers_send_as_much_at_any_factor():
    """Their gradients of 180,003 numbers, once an update; 1% is for heartbeats and what frames a message."""
    programs.need("ss")
    sent = {}
    for factor in (1, 8):
        pair().ask("updates", factor=factor, count=1)
        before = bytes_sent()
        pair().ask("updates", factor=factor, count=20)
        sent[factor] = bytes_sent() - before
    assert sent[1] > 20 * 4 * 180_003
    assert sent[8] / sent[1] == pytest.approx(1, rel=0.01)


def bytes_sent() -> int:
    """Return the bytes that the two workers have sent to each other so far."""
    ports = " or ".join(f"sport = :{port} or dport = :{port}" for port in pair().ports)
    said = subprocess.run(
        ["ss", "-tinH", f"( {ports} )"], capture_output=True, text=True, check=True
    ).stdout
    return sum(map(int, re.findall(r"bytes_sent:(\d+)", said)))


def test_a_single_device_reduces_nothing(precision):
    precision("float32")
    update = update_of(tf.distribute.get_strategy(), 4)
    assert reductions(lambda x, y: update((x, y))) == ([], 0)
