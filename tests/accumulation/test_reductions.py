"""How often an update goes over all replicas: once for each gradient, whatever the factor. Read in the traced graph."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable

import keras
import pytest
import tensorflow as tf

from pipeline.accumulation import Update
from tests import programs
from tests.accumulation.matrix_workers import pair
from tests.parameters import mostly_slow

EFFECTIVE, WIDTH, CLASSES = 64, 5, 3
GRADIENTS = [(WIDTH, 7), (7,), (7, CLASSES), (CLASSES,)]
# Of the one loss Σwᵢ·lossᵢ, the same by its weight and Σwᵢ; what the model adds; the examples.
SCALARS = 3 + 1 + 1
# TensorFlow's: between CPUs of one process a MirroredStrategy adds the copies where they are, between GPUs or workers
# it is a collective or NCCL.
COLLECTIVE = {"CollectiveReduce", "CollectiveReduceV2", "CollectiveReduceV3", "NcclAllReduce", "NcclReduce"}


def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


STRATEGIES = {"two replicas": mirrored}


def reductions(function: Callable) -> tuple[list[tuple], int]:
    """Return the shapes that a traced function reduces over replicas, and how many reductions are in its loops."""
    specs = tf.TensorSpec([EFFECTIVE, WIDTH]), tf.TensorSpec([EFFECTIVE], tf.int64)
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph.as_graph_def(add_shapes=True)
    shapes = [node.attr["_output_shapes"].list.shape[0] for node in graph.node if _reduces(node)]
    nested = [node for inner in graph.library.function for node in inner.node_def if _reduces(node)]
    return [tuple(size.size for size in shape.dim) for shape in shapes], len(nested)


def _reduces(node: tf.compat.v1.NodeDef) -> bool:
    """Whether it is a collective, or a sum of what the first replica has and each other one."""
    of_replicas = [re.search(r"(?:^|/)replica_\d+/", name) for name in node.input]
    return node.op in COLLECTIVE or (node.op == "AddN" and any(of_replicas) and not all(of_replicas))


def update_of(strategy: tf.distribute.Strategy, factor: int, width: int = 7) -> Update:
    with strategy.scope():
        hidden = keras.layers.Dense(width, "tanh")
        model = keras.Sequential([keras.Input((WIDTH,)), hidden, keras.layers.Dense(CLASSES)])
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
def test_reduced_in_every_micro_step_they_are_factor_times_as_many(precision, devices, factor):
    """The control: sums over all replicas for each piece of the effective batch."""
    precision("float32")
    update, size = update_of(STRATEGIES[devices](), factor), EFFECTIVE // factor

    def in_every_step(x, y):
        return [update.sums((x[start : start + size], y[start : start + size])) for start in range(0, EFFECTIVE, size)]

    found, _ = reductions(in_every_step)
    assert [shape for shape in found if shape] == factor * GRADIENTS


@pytest.mark.parametrize("devices", STRATEGIES)
def test_reductions_in_a_loop_are_seen(precision, devices):
    """The control of where they are: the graph has them once, and its loop runs them each time."""
    precision("float32")
    update = update_of(STRATEGIES[devices](), 4)

    def in_a_loop(x, y):
        def body(start, total):
            return start + 16, total + update.sums((x[start : start + 16], y[start : start + 16])).mean_loss()

        return tf.while_loop(lambda start, _: start < EFFECTIVE, body, (0, 0.0))

    found, in_loops = reductions(in_a_loop)
    assert (found, in_loops) == ([], len(GRADIENTS) + SCALARS)


@pytest.mark.parametrize("factor", mostly_slow([1, 4, 32], [4]))
def test_workers_reduce_each_gradient_once_an_update(factor):
    found, in_loops = pair().ask("reductions", factor=factor)
    assert [size for (size,) in found if size > 1] == [math.prod(shape) for shape in GRADIENTS]  # they are sent flat
    assert [size for (size,) in found if size == 1] == [1] * SCALARS
    assert in_loops == 0


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
    said = subprocess.run(["ss", "-tinH", f"( {ports} )"], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"bytes_sent:(\d+)", said)))


def test_a_single_device_reduces_nothing(precision):
    precision("float32")
    update = update_of(tf.distribute.get_strategy(), 4)
    assert reductions(lambda x, y: update((x, y))) == ([], 0)
