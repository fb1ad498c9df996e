"""Wide dense layers, their gradients by us and by Keras, and the products in graphs."""

from __future__ import annotations

import collections
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation.accumulate import (
    BatchContext,
    MicroBatchSettings,
    accumulate_share,
)
from pipeline.accumulation.internals import Objective, batch_totals
from tests.accumulation import reference

ROWS = 16
INPUTS = 512
# Each element of a gradient is a sum of at most 1024 products, taken in two orders.
# Each order rounds 1024 times by up to 2⁻²⁴, and errors of either sign add up like
# their root: √1024·2⁻²⁴ = 1.9e-6 of the norm.
ROUNDING = 1024**0.5 * 2**-24

# The products that `products` counts: forward, by the inputs in both ways, by a kernel.
FORWARD = "X·W"
BY_INPUTS = "dY·Wᵀ"
TRANSPOSED = "(W·dYᵀ)ᵀ"
BY_KERNEL = "Xᵀ·dY"


def mean_squared_error():
    return losses.MeanSquaredError()


def network(*hidden, shape=(INPUTS,)):
    return keras.Sequential([keras.Input(shape), *hidden, layers.Dense(3)])


def wide(**options):
    """Return two wide layers; the second one alone needs the gradient by its inputs."""
    first = layers.Dense(1024, "relu", **options)
    second = layers.Dense(512, "tanh", **options)
    return network(first, second)


def batch(model, rows=ROWS, seed=1):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, *model.input_shape[1:]))
    y = random.normal(size=(rows, *model.output_shape[1:]))
    dtype = model.compute_dtype
    return tf.constant(x, dtype), tf.constant(y, dtype)


class Computed(NamedTuple):
    """A loss, its gradients, and the graph that computed them."""

    loss: np.ndarray
    gradients: list[np.ndarray]
    graph: tf.Graph


def accumulated(model, data, micro_batch_size=ROWS, jit_compile=False):
    """Return what the sums over micro-batches give."""
    objective = Objective(mean_squared_error())
    settings = MicroBatchSettings(
        model, objective, micro_batch_size, jit_compile=jit_compile
    )

    def step(*data):
        sums = accumulate_share(settings, data, BatchContext(batch_totals(data)))
        return sums.mean_loss(), sums.gradients()

    return computed(step, data)


def by_keras(model, data):
    """Return what a plain tape gives."""

    def step(x, y):
        with tf.GradientTape() as tape:
            value = mean_squared_error()(y, model(x, training=True))
        return value, reference.gradients_of(tape, value, model)

    return computed(step, data)


def computed(step, data):
    function = tf.function(step, autograph=False)
    loss, gradients = function(*data)
    graph = function.get_concrete_function(*data).graph
    return Computed(loss.numpy(), [gradient.numpy() for gradient in gradients], graph)


def products(graph):
    """Return how many matrix products a graph computes, by what they are of.

    Those of the functions that it calls count, too. W·dYᵀ is followed by a
    transposition, dY·Wᵀ is not.
    """
    graph = graph.as_graph_def()
    functions = {inner.signature.name: inner for inner in graph.library.function}
    counts = collections.Counter()

    def count(nodes):
        transposed = set()
        for node in nodes:
            if node.op == "Transpose":
                transposed.add(node.input[0].split(":")[0])
        for node in nodes:
            for value in node.attr.values():
                if value.func.name:
                    count(functions[value.func.name].node_def)
            if node.op == "MatMul":
                counts[kind_of(node, node.name in transposed)] += 1

    count(graph.node)
    return counts


def kind_of(product, is_transposed):
    if product.attr["transpose_a"].b:
        return BY_KERNEL
    if not product.attr["transpose_b"].b:
        return FORWARD
    return TRANSPOSED if is_transposed else BY_INPUTS


def deviation(gradients, expected_gradients):
    """Return the norm of the difference ÷ the expected norm, of the worst gradient."""
    ratios = []
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        distance = np.linalg.norm(gradient - expected)
        ratios.append(distance / np.linalg.norm(expected))
    return max(ratios)


def assert_equal(gradients, expected_gradients):
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_array_equal(gradient, expected)
