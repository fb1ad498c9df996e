"""Wide dense layers in second derivatives, and in derivatives in either direction."""

from __future__ import annotations

import pytest
import tensorflow as tf
from keras import layers, ops

from pipeline.accumulation.dense import transposed_gradients
from tests.accumulation.wide_dense import (
    ROUNDING,
    TRANSPOSED,
    accumulated,
    batch,
    by_keras,
    deviation,
    network,
    products,
)


def test_the_second_derivative(precision):
    """Of |dY/dX|² by the kernel, under one persistent tape and two."""
    precision("float32")
    layer = network(layers.Dense(1024, "tanh")).layers[0]
    x, _ = batch(network())

    def gradients_of_penalties(replaced):
        """Return those of the second and the third power of the slope."""

        @tf.function(autograph=False)
        def function():
            with tf.GradientTape(persistent=True) as outer:
                with tf.GradientTape() as inner, transposed_gradients(replaced):
                    inner.watch(x)
                    y = ops.sum(ops.square(layer(x)))
                slope = inner.gradient(y, x)
                second = tf.reduce_sum(slope**2)
                third = tf.reduce_sum(slope**3)
            kernel = layer.kernel.value
            return outer.gradient(second, kernel), outer.gradient(third, kernel)

        count = products(function.get_concrete_function().graph)[TRANSPOSED]
        assert (count > 0) == bool(replaced)
        return [gradient.numpy() for gradient in function()]

    gradients = gradients_of_penalties([layer])
    expected = gradients_of_penalties([])
    assert deviation(gradients, expected) < 4 * ROUNDING  # a sum over sums over sums
    assert deviation(gradients[:1], expected[1:]) > 0.1


def forward_derivative(function):
    def derivative(x):
        direction = tf.ones_like(x) / 8
        with tf.autodiff.ForwardAccumulator(x, direction) as accumulator:
            y = function(x)
        return accumulator.jvp(y)

    return derivative


def backward_derivative(function):
    def derivative(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    return derivative


class Slope(layers.Layer):
    """Dense layers and their derivative in a direction.

    It is taken by the ways of TensorFlow in `order`, the innermost first.
    """

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.dense = [layers.Dense(1024, "tanh"), layers.Dense(512, "tanh")]

    def build(self, shape):
        self.dense[0].build(shape)
        self.dense[1].build((None, 1024))

    def hidden(self, x):
        return self.dense[1](self.dense[0](x))

    def call(self, x):
        function = self.hidden
        for way in self.order.split("-"):
            if way == "forward":
                function = forward_derivative(function)
            else:
                function = backward_derivative(function)
        return function(x)


ORDERS = [
    "forward",
    "backward",
    "forward-forward",
    "forward-backward",
    "backward-forward",
    "backward-backward",
]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_gradient_through_derivatives_in_either_direction(precision, order):
    precision("float32")
    model = network(Slope(order))
    data = batch(model)
    ours = accumulated(model, data)
    # Layers are left alone in derivatives forward.
    assert (products(ours.graph)[TRANSPOSED] > 0) == ("forward" not in order)
    theirs = by_keras(model, data)
    # Sums over sums over sums, which cancel in part.
    assert deviation(ours.gradients, theirs.gradients) < 32 * ROUNDING
    others = by_keras(model, batch(model, seed=2))
    assert deviation(others.gradients, theirs.gradients) > 0.1
