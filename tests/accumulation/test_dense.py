"""Wide dense layers get the gradient by their inputs from another product, which is the same but for rounding."""

from __future__ import annotations

import collections
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, ops

from pipeline.accumulation import AccumulatingModel, Update
from pipeline.accumulation.dense import transposed_gradients, wide_layers
from pipeline.accumulation.internals import (
    BatchContext,
    Kernel,
    Objective,
    accumulate_share,
    batch_totals,
)
from tests.parameters import mostly_slow

ROWS, INPUTS = 16, 512
# Each element of a gradient is a sum of at most 1024 products, taken in two orders. Each order rounds 1024 times by up
# to 2⁻²⁴, and errors of either sign add up like their root: √1024·2⁻²⁴ = 1.9e-6 of the norm.
ROUNDING = 1024**0.5 * 2**-24


class Doubled(layers.Dense):
    """A call of its own."""

    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training)


def mean_squared_error():
    return losses.MeanSquaredError()


def network(*hidden, shape=(INPUTS,)):
    return keras.Sequential([keras.Input(shape), *hidden, layers.Dense(3)])


def wide(**options):
    """Two wide layers; a gradient by the inputs is asked of the second one alone."""
    return network(
        layers.Dense(1024, "relu", **options), layers.Dense(512, "tanh", **options)
    )


def batch(model, rows=ROWS, seed=1):
    numbers, dtype = np.random.default_rng(seed), model.compute_dtype
    shapes = (rows, *model.input_shape[1:]), (rows, *model.output_shape[1:])
    return tuple(tf.constant(numbers.normal(size=shape), dtype) for shape in shapes)


def accumulated(model, data, micro=ROWS, jit_compile=False):
    """Return the loss, the gradients, and the graph that computed them."""
    objective = Objective(mean_squared_error())
    kernel = Kernel(model, objective, micro, jit_compile=jit_compile)

    def sums(*data):
        totals = accumulate_share(kernel, data, BatchContext(batch_totals(data)))
        return totals.mean_loss(), totals.gradients()

    function = tf.function(sums, autograph=False)
    value, gradients = function(*data)
    return (
        value.numpy(),
        [gradient.numpy() for gradient in gradients],
        function.get_concrete_function(*data).graph,
    )


def by_keras(model, data):
    """Return the loss and the gradients of a plain tape."""

    @tf.function(autograph=False)
    def plain(x, y):
        with tf.GradientTape() as tape:
            value = mean_squared_error()(y, model(x, training=True))
        return value, tape.gradient(
            value, [variable.value for variable in model.trainable_variables]
        )

    value, gradients = plain(*data)
    return value.numpy(), [gradient.numpy() for gradient in gradients]


def products(graph):
    """Return how many matrix products a graph computes, those of the functions that it calls too: by what they are of.

    W·dYᵀ is followed by a transposition, dY·Wᵀ is not.
    """
    graph = graph.as_graph_def()
    functions = {
        function.signature.name: function.node_def
        for function in graph.library.function
    }
    found = collections.Counter()

    def count(nodes):
        turned = {
            node.input[0].split(":")[0] for node in nodes if node.op == "Transpose"
        }
        for node in nodes:
            for value in node.attr.values():
                if value.func.name:
                    count(functions[value.func.name])
            if node.op == "MatMul" and node.attr["transpose_a"].b:
                found["Xᵀ·dY"] += 1
            elif node.op == "MatMul" and node.attr["transpose_b"].b:
                found["(W·dYᵀ)ᵀ" if node.name in turned else "dY·Wᵀ"] += 1
            elif node.op == "MatMul":
                found["X·W"] += 1

    count(graph.node)
    return found


def apart(got, expected):
    return max(
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for a, b in zip(got, expected, strict=True)
    )


def test_the_gradients_are_those_of_keras_but_for_rounding(precision):
    precision("float32")
    model = wide()
    data = batch(model)
    loss, gradients, graph = accumulated(model, data)
    expected_loss, expected = by_keras(model, data)
    assert loss == expected_loss
    assert apart(gradients, expected) < ROUNDING
    for got, of_keras in zip(
        gradients[2:], expected[2:], strict=True
    ):  # those that no such product led to
        np.testing.assert_array_equal(got, of_keras)
    assert apart(by_keras(model, batch(model, seed=2))[1], expected) > 0.1
    # The first layer's product is made and not computed: nothing takes it. A Dense(3) is not wide.
    assert products(graph) == {"X·W": 3, "dY·Wᵀ": 1, "(W·dYᵀ)ᵀ": 2, "Xᵀ·dY": 3}


def test_a_gradient_by_the_inputs_is_as_near_to_the_exact_one_as_that_of_tensorflow(
    precision,
):
    precision("float32")
    layer = network(layers.Dense(1024)).layers[0]
    x, dy = (
        tf.random.stateless_normal((ROWS, size), (0, size)) for size in (INPUTS, 1024)
    )

    def gradient(by):
        @tf.function(autograph=False)
        def function():
            with tf.GradientTape() as tape, transposed_gradients(by):
                tape.watch(x)
                y = layer(x)
            return tape.gradient(y, x, dy)

        assert products(function.get_concrete_function().graph)["(W·dYᵀ)ᵀ"] == len(by)
        return function().numpy()

    exact = dy.numpy().astype("float64") @ layer.kernel.numpy().astype("float64").T
    assert apart([gradient([layer])], [exact]) < ROUNDING
    assert apart([gradient([])], [exact]) < ROUNDING
    wrong = np.roll(exact, 1, axis=1)
    assert apart([gradient([layer])], [wrong]) > 0.1


ALL_ELSE = {
    "small": (lambda: network(layers.Dense(512)), 16, "float32"),  # 2¹⁸ elements
    "short axis": (
        lambda: network(layers.Dense(511), layers.Dense(2048)),
        16,
        "float32",
    ),
    "few rows": (wide, 8, "float32"),
    "many rows": (wide, 256, "float32"),
    "float64": (wide, 16, "float64"),
    "bfloat16": (wide, 16, "mixed_bfloat16"),
    "own call": (lambda: network(Doubled(1024), Doubled(512)), 16, "float32"),
    "rank 3": (
        lambda: network(layers.Dense(1024), layers.Dense(512), shape=(4, INPUTS)),
        16,
        "float32",
    ),
}


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        ALL_ELSE,
        ["float64", "rank 3"],
        ["short axis", "many rows", "bfloat16", "own call"],
    ),
)
def test_all_else_is_computed_as_ever(precision, monkeypatch, case):
    make, rows, policy = ALL_ELSE[case]
    precision(policy)
    model = make()
    data = batch(model, rows)
    loss, gradients, graph = accumulated(model, data, rows)
    assert products(graph)["(W·dYᵀ)ᵀ"] == 0
    expected_loss, expected = by_keras(model, data)
    if policy == "mixed_bfloat16":
        monkeypatch.setattr(
            "pipeline.accumulation.accumulate.wide_layers", lambda *_: []
        )
        expected_loss, expected, _ = accumulated(model, data, rows)
    assert loss == expected_loss
    for got, of_keras in zip(
        gradients, expected, strict=True
    ):  # the loss is divided by a power of two
        np.testing.assert_array_equal(got, of_keras)
    assert any(gradient.any() for gradient in gradients)


def test_only_what_is_float32_throughout(precision):
    """The kernel as it is stored, as the layer computes with it, and the inputs."""
    precision("float32")
    assert len(wide_layers(wide(), ROWS)) == 2
    assert wide_layers(wide(dtype="int8_from_float32"), ROWS) == []
    uncast = {
        dtype: layers.Dense(1024, autocast=False, dtype=dtype)
        for dtype in ("mixed_bfloat16", "float32")
    }
    assert wide_layers(network(*uncast.values()), ROWS) == [uncast["float32"]]
    layer = uncast["float32"]

    @tf.function(autograph=False)
    def computed(inputs):
        with transposed_gradients([layer]):
            return layer(inputs)

    inputs = tf.ones([ROWS, 1024], tf.float64)
    assert computed(inputs).dtype == layer(inputs).dtype == tf.float64


@pytest.mark.slow
def test_with_xla_nothing_is_replaced(precision):
    precision("float32")
    model = wide()
    _, _, compiled = accumulated(model, batch(model), jit_compile=True)
    _, _, not_compiled = accumulated(model, batch(model))
    assert products(compiled)["(W·dYᵀ)ᵀ"] == 0
    assert products(not_compiled)["(W·dYᵀ)ᵀ"] == 2


@pytest.mark.parametrize(
    "options", [{}, {"use_bias": False}, {"activation": None}, {"activation": "gelu"}]
)
def test_the_forward_pass_is_that_of_keras_to_the_bit(precision, options):
    precision("float32")
    model = network(layers.Dense(1024, **{"activation": "relu", **options}))
    model.layers[0].set_weights(
        [tf.random.stateless_normal(w.shape, (1, 2)) for w in model.layers[0].weights]
    )
    x, _ = batch(model)

    def outputs(by):
        @tf.function(autograph=False)
        def forward():
            with transposed_gradients(by):
                return model(x, training=True)

        return forward().numpy()

    assert len(wide_layers(model, ROWS)) == 1
    np.testing.assert_array_equal(outputs(wide_layers(model, ROWS)), outputs([]))


def test_lora_gets_the_gradients_of_its_own_weights(precision):
    precision("float32")
    model = wide()
    for layer in model.layers[:2]:
        layer.enable_lora(4)
        layer.lora_kernel_b.assign(
            tf.random.stateless_normal(layer.lora_kernel_b.shape, (3, 4))
        )
    data = batch(model)
    loss, gradients, _ = accumulated(model, data)
    expected_loss, expected = by_keras(model, data)
    assert loss == expected_loss
    assert apart(gradients, expected) < ROUNDING
    assert len(gradients) == 8
    model.layers[0].lora_kernel_b.assign(model.layers[0].lora_kernel_b / 2)
    assert apart(gradients, by_keras(model, data)[1]) > 0.1


def test_a_layer_that_is_called_twice(precision):
    precision("float32")
    inputs, shared = keras.Input((1024,)), layers.Dense(1024, "tanh")
    model = keras.Model(inputs, layers.Dense(3)(shared(shared(inputs))))
    data = batch(model)
    loss, gradients, graph = accumulated(model, data)
    expected_loss, expected = by_keras(model, data)
    assert loss == expected_loss
    assert apart(gradients, expected) < ROUNDING
    assert products(graph)["(W·dYᵀ)ᵀ"] == 2
    once = keras.Model(inputs, model.layers[-1](shared(inputs)))
    assert apart(by_keras(once, data)[1], expected) > 0.1


@pytest.mark.parametrize(
    "steps", mostly_slow([3, None], [None]), ids=["unrolled", "vectorised"]
)
def test_a_layer_of_a_layer(precision, steps):
    """TimeDistributed calls it for each step, or in TensorFlow's vectorised map."""
    precision("float32")
    inputs = keras.Input((steps, 512))
    outputs = layers.TimeDistributed(layers.Dense(1024, "tanh"))(
        layers.Dense(512)(inputs)
    )
    model = keras.Model(
        inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(outputs))
    )
    numbers = np.random.default_rng(1)
    data = tuple(
        tf.constant(numbers.normal(size=shape), tf.float32)
        for shape in ((ROWS, 3, 512), (ROWS, 3))
    )
    loss, gradients, _ = accumulated(model, data)
    expected_loss, expected = by_keras(model, data)
    assert abs(loss - expected_loss) < ROUNDING * expected_loss
    assert apart(gradients, expected) < ROUNDING
    assert apart(gradients, by_keras(model, (data[0] + 1, data[1]))[1]) > 0.1


def test_in_a_loop_of_a_layer_it_is_that_of_keras(precision):
    precision("float32")

    class Looping(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1024, "tanh")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, inputs):
            def again(count, x):
                return count + 1, self.dense(x)

            return tf.while_loop(lambda count, _: count < 2, again, (0, inputs))[1]

    model = network(Looping(), shape=(1024,))
    data = batch(model)
    assert len(wide_layers(model, ROWS)) == 1
    loss, gradients, graph = accumulated(model, data)
    expected_loss, expected = by_keras(model, data)
    assert products(graph)["(W·dYᵀ)ᵀ"] == 0
    assert loss == expected_loss
    assert apart(gradients, expected) < ROUNDING


def test_the_second_derivative(precision):
    """Of |dY/dX|² by the kernel, under one persistent tape and two."""
    precision("float32")
    layer = network(layers.Dense(1024, "tanh")).layers[0]
    x = batch(network())[0]

    def penalty(by):
        @tf.function(autograph=False)
        def function():
            with tf.GradientTape(persistent=True) as outer:
                with tf.GradientTape() as inner, transposed_gradients(by):
                    inner.watch(x)
                    y = ops.sum(ops.square(layer(x)))
                slope = inner.gradient(y, x)
                square, again = tf.reduce_sum(slope**2), tf.reduce_sum(slope**3)
            kernel = layer.kernel.value
            return [outer.gradient(target, kernel) for target in (square, again)]

        assert (
            products(function.get_concrete_function().graph)["(W·dYᵀ)ᵀ"] > 0
        ) == bool(by)
        return [gradient.numpy() for gradient in function()]

    got, expected = penalty([layer]), penalty([])
    assert apart(got, expected) < 4 * ROUNDING  # a sum over sums over sums
    assert apart(got[:1], expected[1:]) > 0.1


class Slope(layers.Layer):
    """Dense layers and their derivative in a direction, by the ways of TensorFlow in `order`, the innermost first."""

    def __init__(self, order):
        super().__init__()
        self.order, self.dense = (
            order,
            [layers.Dense(1024, "tanh"), layers.Dense(512, "tanh")],
        )

    def build(self, shape):
        self.dense[0].build(shape)
        self.dense[1].build((None, 1024))

    def call(self, x):
        def derived(function, way):
            def forward(x):
                with tf.autodiff.ForwardAccumulator(
                    x, tf.ones_like(x) / 8
                ) as accumulator:
                    y = function(x)
                return accumulator.jvp(y)

            def backward(x):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = function(x)
                return tape.gradient(y, x)

            return {"forward": forward, "backward": backward}[way]

        function = lambda x: self.dense[1](self.dense[0](x))  # noqa: E731
        for way in self.order.split("-"):
            function = derived(function, way)
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
    _, gradients, graph = accumulated(model, data)
    assert (products(graph)["(W·dYᵀ)ᵀ"] > 0) == (
        "forward" not in order
    )  # left alone there
    _, expected = by_keras(model, data)
    assert (
        apart(gradients, expected) < 32 * ROUNDING
    )  # sums over sums over sums, which cancel in part
    assert apart(by_keras(model, batch(model, seed=2))[1], expected) > 0.1


def test_the_layers_have_no_call_of_their_own_afterwards(precision):
    precision("float32")
    model = wide()
    found = wide_layers(model, ROWS)
    assert found == model.layers[:2]
    accumulated(model, batch(model))
    with transposed_gradients(found):
        assert all("call" in vars(layer) for layer in found)
        assert wide_layers(model, ROWS) == []
    with pytest.raises(ValueError, match="incompatible"), transposed_gradients(found):
        model(tf.zeros([ROWS, 3]))
    assert all("call" not in vars(layer) for layer in model.layers)
    assert wide_layers(model, ROWS) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("same_noise", "devices"), [(False, 1), (False, 2), (True, 1), (True, 2)]
)
def test_an_update_on_each_replica(precision, monkeypatch, devices, same_noise):
    """With layers that are replaced for other reasons; the last slice has 8 rows, and is computed likewise."""
    precision("float32")

    def after():
        keras.utils.set_random_seed(0)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"][:devices])
        with strategy.scope():
            model = network(
                layers.Dense(1024, "relu"),
                layers.Dropout(0.5, seed=3),
                layers.Dense(512, "tanh"),
            )
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
        update = Update(
            model,
            mean_squared_error(),
            optimizer,
            ROWS,
            strategy=strategy,
            same_noise=same_noise,
        )
        function = tf.function(lambda *data: update(data), autograph=False)
        before, data = model.get_weights(), batch(model, devices * 40)
        function(*data)
        moved = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
        return moved, products(function.get_concrete_function(*data).graph)["(W·dYᵀ)ᵀ"]

    moved, taken = after()
    monkeypatch.setattr("pipeline.accumulation.accumulate.wide_layers", lambda *_: [])
    expected, none = after()
    assert (taken, none) == (2 * devices, 0)
    # By how much a weight moves is a difference of float32 values: of weights up to 0.1 it has an error of 4e-9.
    assert apart(moved, expected) < 1e-4
    assert apart([-one for one in moved], expected) > 1


@pytest.mark.slow
def test_fit_has_it(precision, monkeypatch):
    precision("float32")

    def history():
        keras.utils.set_random_seed(0)
        model = AccumulatingModel(wide(), ROWS)
        model.compile(keras.optimizers.Adam(1e-3), "mean_squared_error")
        x, y = map(np.asarray, batch(model.inner, 64))
        return model.fit(
            x, y, batch_size=32, epochs=2, shuffle=False, verbose=0
        ).history["loss"], model

    taken = []

    def seen(*given):
        taken.extend(wide_layers(*given))
        return wide_layers(*given)

    monkeypatch.setattr("pipeline.accumulation.accumulate.wide_layers", seen)
    got, model = history()
    assert set(taken) == set(model.inner.layers[:2])
    assert all("call" not in vars(layer) for layer in model.inner.layers)
    monkeypatch.setattr("pipeline.accumulation.accumulate.wide_layers", lambda *_: [])
    expected, _ = history()
    # Adam takes a step of ±rate also where a gradient is nothing but rounding.
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert abs(expected[1] - expected[0]) > 0.01 * expected[0]


@pytest.mark.slow
def test_no_trace_is_kept(precision):
    """As TensorFlow keeps that of a custom gradient, with the variables of the model: here it is one for all models."""
    precision("float32")
    model = wide()
    *_, graph = accumulated(model, batch(model))
    assert products(graph)["(W·dYᵀ)ᵀ"] == 2
    kept = weakref.ref(graph), weakref.ref(model.layers[0].kernel.value)
    del model, graph
    gc.collect()
    assert [thing() for thing in kept] == [None, None]
