"""How often an update goes over all replicas: once for each gradient.

That is so whatever the factor. It is read in the traced graph.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import Update, accumulate_gradients
from pipeline.accumulation.batch import all_reduced
from tests import programs
from tests.accumulation.matrix_workers import pair
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

EFFECTIVE = 64
WIDTH = 5
CLASSES = 3
GRADIENTS = [(WIDTH, 7), (7,), (7, CLASSES), (CLASSES,)]
GRADIENT_ELEMENTS = sum(map(math.prod, GRADIENTS))
# Of the one loss Σwᵢ·lossᵢ, the same by its weight and Σwᵢ; what the model adds; the
# examples.
SCALARS = 3 + 1 + 1
# Between the CPUs of one process the first replica adds and the others copy; between
# GPUs or workers all that has one dtype is sent by one collective.
COLLECTIVE = {
    "CollectiveReduce",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
    "NcclAllReduce",
    "NcclReduce",
}
REPLICAS = ("CPU:1", "CPU:2")  # beside the host, as two GPUs are

STRATEGIES = {"two replicas": lambda: strategy_on(2)}

Graph = tf.compat.v1.GraphDef
Node = tf.compat.v1.NodeDef


class Reductions(NamedTuple):
    """What a traced function reduces over replicas.

    Attributes:
        shapes: of what is reduced outside of loops.
        in_loops: how many reductions are in loops.
    """

    shapes: list[tuple[int, ...]]
    in_loops: int

    def of_gradients(self) -> list[tuple[int, ...]]:
        return [shape for shape in self.shapes if shape]

    def of_scalars(self) -> int:
        return self.shapes.count(())


def graph_of(function: Callable, *specs: tf.TensorSpec) -> Graph:
    traced = tf.function(function, autograph=False).get_concrete_function(*specs)
    return traced.graph.as_graph_def(add_shapes=True)


def reductions(function: Callable) -> Reductions:
    """Return what a function of inputs and labels reduces over replicas."""
    graph = graph_of(
        function,
        tf.TensorSpec([EFFECTIVE, WIDTH]),
        tf.TensorSpec([EFFECTIVE], tf.int64),
    )
    shapes = [shape_of(node) for node in graph.node if _reduces(node)]
    in_loops = 0
    for inner in graph.library.function:
        in_loops += len([node for node in inner.node_def if _reduces(node)])
    return Reductions(shapes, in_loops)


def shape_of(node: Node, output: int = 0) -> tuple[int, ...]:
    shape = node.attr["_output_shapes"].list.shape[output]
    return tuple(size.size for size in shape.dim)


def _reduces(node: Node) -> bool:
    """Return whether it is a collective, or the sum of the first replica.

    The first replica adds what it has and what each other one has.
    """
    if node.op in COLLECTIVE:
        return True
    if node.op != "AddN":
        return False
    of_others = [re.search(r"(?:^|/)replica_\d+/", name) for name in node.input]
    return any(of_others) and not all(of_others)


def update_of(
    strategy: tf.distribute.Strategy,
    factor: int,
    width: int = 7,
    *,
    normalized: bool = False,
) -> Update:
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,))])
        model.add(keras.layers.Dense(width, "tanh"))
        if normalized:
            model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.Dense(CLASSES))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    micro_batch_size = EFFECTIVE // factor // strategy.num_replicas_in_sync
    return Update(model, loss, optimizer, micro_batch_size, strategy=strategy)


@pytest.mark.parametrize("factor", mostly_slow([1, 4, 32], [4]))
@pytest.mark.parametrize("devices", STRATEGIES)
def test_each_gradient_is_reduced_once_an_update(precision, devices, factor):
    precision("float32")
    update = update_of(STRATEGIES[devices](), factor)
    reduced = reductions(lambda x, y: update((x, y)))
    assert reduced.of_gradients() == GRADIENTS
    assert reduced.of_scalars() == SCALARS
    assert reduced.in_loops == 0  # where one would run once a micro-step


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("devices", STRATEGIES)
def test_reduced_in_every_micro_step_they_are_factor_times_as_many(
    precision, devices, factor
):
    """The control: sums over all replicas for each piece of the effective batch."""
    precision("float32")
    update = update_of(STRATEGIES[devices](), factor)
    size = EFFECTIVE // factor

    def in_every_step(x, y):
        sums = []
        for start in range(0, EFFECTIVE, size):
            part = slice(start, start + size)
            sums.append(update.sums((x[part], y[part])))
        return sums

    assert reductions(in_every_step).of_gradients() == factor * GRADIENTS


@pytest.mark.parametrize("devices", STRATEGIES)
def test_reductions_in_a_loop_are_seen(precision, devices):
    """The control of where they are.

    The graph has them once, and its loop runs them each time.
    """
    precision("float32")
    update = update_of(STRATEGIES[devices](), 4)

    def in_a_loop(x, y):
        def body(start, total):
            sums = update.sums((x[start : start + 16], y[start : start + 16]))
            return start + 16, total + sums.mean_loss()

        return tf.while_loop(lambda start, _: start < EFFECTIVE, body, (0, 0.0))

    assert reductions(in_a_loop) == ([], len(GRADIENTS) + SCALARS)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 4, 32])
def test_workers_reduce_each_gradient_once_an_update(factor):
    packed = GRADIENT_ELEMENTS + SCALARS
    assert pair().ask("reductions", factor=factor) == [[[packed]], 0]


def beside_the_host(normalized: bool) -> Graph:
    """Return the graph of an update by replicas that are not on the host's device."""
    strategy = tf.distribute.MirroredStrategy(REPLICAS)
    update = update_of(strategy, 4, normalized=normalized)
    return graph_of(
        lambda *batch: update(batch),
        tf.TensorSpec([EFFECTIVE, WIDTH]),
        tf.TensorSpec([EFFECTIVE], tf.int64),
    )


def device_of(node: Node) -> str:
    return node.device[-len("CPU:0") :]


class Edge(NamedTuple):
    """An operation that takes something, and the number of its elements."""

    operation: str
    elements: int


def edges(graph: Graph, source: str, target: str) -> list[Edge]:
    """Return what operations on one device take of what another one computes."""
    nodes = {node.name: node for node in graph.node}
    taken = []
    for node in graph.node:
        if device_of(node) != target:
            continue
        for name in node.input:
            name, _, output = name.partition(":")
            computing = nodes.get(name)
            if computing is None or computing.op == "Const":
                continue
            if device_of(computing) == source:
                shape = shape_of(computing, int(output or 0))
                taken.append(Edge(node.op, math.prod(shape)))
    return taken


@pytest.mark.parametrize("normalized", mostly_slow([False, True], [True]))
def test_sums_stay_on_the_replicas(precision, normalized):
    """The host adds nothing and takes nothing of them.

    The second replica takes each sum once, as the reduction.
    """
    precision("float32")
    graph = beside_the_host(normalized)
    first, second = REPLICAS
    sums = [node for node in graph.node if node.op == "AddN"]
    assert {device_of(node) for node in sums} == {first}
    assert edges(graph, first, "CPU:0") == []
    assert edges(graph, second, "CPU:0") == []

    reduced = len(GRADIENTS) + SCALARS
    if normalized:
        # The gradients of two weights, and what moves the statistics.
        reduced += 2 + 4
    copies = [edge.operation for edge in edges(graph, first, second)]
    assert copies == ["Identity"] * reduced

    # What is on no certain device passes on no gradient.
    largest = 7 if normalized else 1
    for edge in edges(graph, first, ""):
        assert edge.elements <= largest


def test_what_has_one_dtype_is_one_collective(precision):
    """Between GPUs; here it is only traced, as between CPUs it is not used.

    Rows are collected, not made dense.
    """
    precision("float32")
    strategy = tf.distribute.MirroredStrategy(REPLICAS)

    def of_replica():
        rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 4]))
        dense = [tf.ones(shape) for shape in GRADIENTS]
        return [*dense, tf.ones([2], tf.float64), rows, tf.ones([])]

    def summed():
        values = all_reduced(strategy, strategy.run(of_replica))
        dtypes = [value.values[0].dtype for value in values]
        assert dtypes == [*["float32"] * 4, "float64", "float32", "float32"]
        assert isinstance(values[5].values[0], tf.IndexedSlices)
        return [value.values[1] for value in values]

    graph = graph_of(summed)
    collectives = []
    for node in graph.node:
        if node.op in COLLECTIVE:
            collectives.append((shape_of(node)[0], device_of(node)))
    # On each replica one of float64, and one of all that is dense in float32.
    expected = []
    for elements in (2, GRADIENT_ELEMENTS + 1):
        expected += [(elements, replica) for replica in REPLICAS]
    assert sorted(collectives) == expected


def test_rows_of_an_embedding_stay_rows(precision):
    """An index that both replicas looked up has one row, with their sum."""
    precision("float64")
    strategy = strategy_on(2)
    with strategy.scope():
        inputs = keras.Input((2,), dtype="int32")
        embedding = keras.layers.Embedding(9, 3)
        model = keras.Sequential([inputs, embedding, keras.layers.Flatten()])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    update = Update(model, "mse", optimizer, 1, strategy=strategy)
    batch = tf.constant([[0, 1], [1, 2], [2, 8], [2, 2]]), tf.zeros([4, 6])
    (rows,) = tf.function(lambda: update.sums(batch).gradients(), autograph=False)()
    assert sorted(rows.indices.numpy()) == [0, 1, 2, 8]

    (expected,) = accumulate_gradients(model, "mse", batch, 4).gradients()
    np.testing.assert_allclose(
        tf.convert_to_tensor(rows),
        tf.convert_to_tensor(expected),
        rtol=1e-15,
        atol=1e-17,
    )


def two_weights() -> keras.Model:
    """Return a model whose output a is masked and whose output b is not."""
    inputs = keras.Input((WIDTH,))
    sequence = keras.layers.Masking()(keras.layers.Reshape((WIDTH, 1))(inputs))
    hidden = keras.layers.Dense(7)(sequence)
    total = keras.layers.Lambda(lambda steps: tf.reduce_sum(steps, 1))(hidden)
    outputs = {"a": keras.layers.Dense(1)(hidden), "b": keras.layers.Dense(1)(total)}
    return keras.Model(inputs, outputs)


def test_gradients_of_losses_with_weights_of_their_own_are_reduced_as_one(precision):
    """Each replica divides before the reduction.

    Where the model computes a mask, the weight goes first for that.
    """
    precision("float32")
    strategy = strategy_on(2)
    with strategy.scope():
        model = two_weights()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    update = Update(model, {"a": "mse", "b": "mse"}, optimizer, 8, strategy=strategy)

    def of_both(x, y):
        numbers = tf.cast(y, tf.float32)[:, None]
        of_steps = tf.tile(numbers[..., None], [1, WIDTH, 1])
        return update((x, {"a": of_steps, "b": numbers}))

    reduced = reductions(of_both)
    assert len(reduced.of_gradients()) == len(model.trainable_variables)


@pytest.mark.slow
def test_workers_send_as_much_at_any_factor():
    """They send their gradients of 180,003 numbers once an update.

    1% is for heartbeats and what frames a message.
    """
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
    sockets = subprocess.run(
        ["ss", "-tinH", f"( {ports} )"], capture_output=True, text=True, check=True
    ).stdout
    return sum(map(int, re.findall(r"bytes_sent:(\d+)", sockets)))


def test_a_single_device_reduces_nothing(precision):
    precision("float32")
    update = update_of(strategy_on(1), 4)
    assert reductions(lambda x, y: update((x, y))) == ([], 0)
