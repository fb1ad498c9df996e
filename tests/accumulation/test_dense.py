"""Wide dense layers get the gradient by their inputs from another product.

With the kernel W and the gradient dY by the outputs it is (W·dYᵀ)ᵀ in place of dY·Wᵀ,
which is the same up to rounding.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import AccumulatingModel, Update
from pipeline.accumulation.dense import transposed_gradients, wide_layers
from tests.accumulation.replicas import strategy_on
from tests.accumulation.wide_dense import (
    BY_INPUTS,
    BY_KERNEL,
    FORWARD,
    INPUTS,
    ROUNDING,
    ROWS,
    TRANSPOSED,
    accumulated,
    assert_equal,
    batch,
    by_keras,
    deviation,
    mean_squared_error,
    network,
    products,
    wide,
)
from tests.parameters import mostly_slow


class Doubled(layers.Dense):
    """Has a call of its own."""

    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training)


def test_the_gradients_are_those_of_keras_but_for_rounding(precision):
    precision("float32")
    model = wide()
    data = batch(model)
    ours = accumulated(model, data)
    theirs = by_keras(model, data)
    assert ours.loss == theirs.loss
    assert deviation(ours.gradients, theirs.gradients) < ROUNDING
    # No such product led to these.
    assert_equal(ours.gradients[2:], theirs.gradients[2:])

    # The control: the gradients of other data are far away.
    of_other_data = by_keras(model, batch(model, seed=2))
    assert deviation(of_other_data.gradients, theirs.gradients) > 0.1

    # The first layer's product is made and not computed: nothing takes it. A Dense(3)
    # is not wide.
    expected = {FORWARD: 3, BY_INPUTS: 1, TRANSPOSED: 2, BY_KERNEL: 3}
    assert products(ours.graph) == expected


def test_a_gradient_by_the_inputs_is_as_near_to_the_exact_one_as_that_of_tensorflow(
    precision,
):
    precision("float32")
    layer = network(layers.Dense(1024)).layers[0]
    x = tf.random.stateless_normal((ROWS, INPUTS), (0, INPUTS))
    output_gradient = tf.random.stateless_normal((ROWS, 1024), (0, 1024))

    def gradient(replaced):
        @tf.function(autograph=False)
        def function():
            with tf.GradientTape() as tape, transposed_gradients(replaced):
                tape.watch(x)
                y = layer(x)
            return tape.gradient(y, x, output_gradient)

        graph = function.get_concrete_function().graph
        assert products(graph)[TRANSPOSED] == len(replaced)
        return function().numpy()

    kernel = layer.kernel.numpy().astype("float64")
    exact = output_gradient.numpy().astype("float64") @ kernel.T
    assert deviation([gradient([layer])], [exact]) < ROUNDING
    assert deviation([gradient([])], [exact]) < ROUNDING
    wrong = np.roll(exact, 1, axis=1)
    assert deviation([gradient([layer])], [wrong]) > 0.1


class Other(NamedTuple):
    """A model, or a batch, whose gradients are computed as TensorFlow does."""

    model: Callable[[], keras.Model]
    rows: int
    policy: str


def short_axis():
    return network(layers.Dense(511), layers.Dense(2048))


def rank_3():
    return network(layers.Dense(1024), layers.Dense(512), shape=(4, INPUTS))


ALL_ELSE = {
    "small": Other(lambda: network(layers.Dense(512)), 16, "float32"),  # 2¹⁸ elements
    "short axis": Other(short_axis, 16, "float32"),
    "few rows": Other(wide, 8, "float32"),
    "many rows": Other(wide, 256, "float32"),
    "float64": Other(wide, 16, "float64"),
    "bfloat16": Other(wide, 16, "mixed_bfloat16"),
    "own call": Other(lambda: network(Doubled(1024), Doubled(512)), 16, "float32"),
    "rank 3": Other(rank_3, 16, "float32"),
}


def replace_nothing(monkeypatch):
    monkeypatch.setattr("pipeline.accumulation.accumulate.wide_layers", lambda *_: [])


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        ALL_ELSE,
        ["rank 3"],
        ["float64", "short axis", "many rows", "bfloat16", "own call"],
    ),
)
def test_all_else_is_computed_as_ever(precision, monkeypatch, case):
    make, rows, policy = ALL_ELSE[case]
    precision(policy)
    model = make()
    data = batch(model, rows)
    ours = accumulated(model, data, rows)
    assert products(ours.graph)[TRANSPOSED] == 0

    if policy == "mixed_bfloat16":
        replace_nothing(monkeypatch)
        expected = accumulated(model, data, rows)
    else:
        expected = by_keras(model, data)
    assert ours.loss == expected.loss
    # Equal, as the loss is divided by a power of two.
    assert_equal(ours.gradients, expected.gradients)
    assert any(gradient.any() for gradient in ours.gradients)


def test_only_what_is_float32_throughout(precision):
    """The kernel as it is stored, as the layer computes with it, and the inputs."""
    precision("float32")
    assert len(wide_layers(wide(), ROWS)) == 2
    assert wide_layers(wide(dtype="int8_from_float32"), ROWS) == []
    half = layers.Dense(1024, autocast=False, dtype="mixed_bfloat16")
    single = layers.Dense(1024, autocast=False, dtype="float32")
    assert wide_layers(network(half, single), ROWS) == [single]

    @tf.function(autograph=False)
    def forward(inputs):
        with transposed_gradients([single]):
            return single(inputs)

    inputs = tf.ones([ROWS, 1024], tf.float64)
    assert forward(inputs).dtype == single(inputs).dtype == tf.float64


@pytest.mark.slow
def test_with_xla_nothing_is_replaced(precision):
    precision("float32")
    model = wide()
    compiled = accumulated(model, batch(model), jit_compile=True)
    not_compiled = accumulated(model, batch(model))
    assert products(compiled.graph)[TRANSPOSED] == 0
    assert products(not_compiled.graph)[TRANSPOSED] == 2


@pytest.mark.parametrize(
    "options",
    mostly_slow(
        [{}, {"use_bias": False}, {"activation": None}, {"activation": "gelu"}],
        [{}, {"use_bias": False}],
    ),
)
def test_the_forward_pass_is_that_of_keras_to_the_bit(precision, options):
    precision("float32")
    model = network(layers.Dense(1024, **{"activation": "relu", **options}))
    for weight in model.layers[0].weights:
        weight.assign(tf.random.stateless_normal(weight.shape, (1, 2)))
    x, _ = batch(model)

    def outputs(replaced):
        @tf.function(autograph=False)
        def forward():
            with transposed_gradients(replaced):
                return model(x, training=True)

        return forward().numpy()

    assert len(wide_layers(model, ROWS)) == 1
    np.testing.assert_array_equal(outputs(wide_layers(model, ROWS)), outputs([]))


def test_lora_gets_the_gradients_of_its_own_weights(precision):
    precision("float32")
    model = wide()
    for layer in model.layers[:2]:
        layer.enable_lora(4)
        values = tf.random.stateless_normal(layer.lora_kernel_b.shape, (3, 4))
        layer.lora_kernel_b.assign(values)
    data = batch(model)
    ours = accumulated(model, data)
    theirs = by_keras(model, data)
    assert ours.loss == theirs.loss
    assert deviation(ours.gradients, theirs.gradients) < ROUNDING
    assert len(ours.gradients) == 8

    # The control: with another value in these weights the gradients are others.
    model.layers[0].lora_kernel_b.assign(model.layers[0].lora_kernel_b / 2)
    assert deviation(ours.gradients, by_keras(model, data).gradients) > 0.1


@pytest.mark.slow
def test_a_layer_that_is_called_twice(precision):
    precision("float32")
    inputs = keras.Input((1024,))
    shared = layers.Dense(1024, "tanh")
    model = keras.Model(inputs, layers.Dense(3)(shared(shared(inputs))))
    data = batch(model)
    ours = accumulated(model, data)
    theirs = by_keras(model, data)
    assert ours.loss == theirs.loss
    assert deviation(ours.gradients, theirs.gradients) < ROUNDING
    assert products(ours.graph)[TRANSPOSED] == 2

    called_once = keras.Model(inputs, model.layers[-1](shared(inputs)))
    others = by_keras(called_once, data)
    assert deviation(others.gradients, theirs.gradients) > 0.1


@pytest.mark.parametrize(
    "steps",
    mostly_slow([3, None], [], [3, None]),
    ids=["unrolled", "vectorised"],
)
def test_a_layer_of_a_layer(precision, steps):
    """TimeDistributed calls it for each step, or in TensorFlow's vectorized map."""
    precision("float32")
    inputs = keras.Input((steps, 512))
    inner = layers.Dense(1024, "tanh")
    hidden = layers.TimeDistributed(inner)(layers.Dense(512)(inputs))
    pooled = layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, layers.Dense(3)(pooled))
    random = np.random.default_rng(1)
    x = tf.constant(random.normal(size=(ROWS, 3, 512)), tf.float32)
    y = tf.constant(random.normal(size=(ROWS, 3)), tf.float32)

    ours = accumulated(model, (x, y))
    theirs = by_keras(model, (x, y))
    assert abs(ours.loss - theirs.loss) < ROUNDING * theirs.loss
    assert deviation(ours.gradients, theirs.gradients) < ROUNDING
    others = by_keras(model, (x + 1, y))
    assert deviation(ours.gradients, others.gradients) > 0.1


class Looping(layers.Layer):
    """Calls a wide layer twice, in a loop of TensorFlow."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1024, "tanh")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        def body(count, x):
            return count + 1, self.dense(x)

        _, outputs = tf.while_loop(lambda count, _: count < 2, body, (0, inputs))
        return outputs


@pytest.mark.slow
def test_in_a_loop_of_a_layer_it_is_that_of_keras(precision):
    precision("float32")
    model = network(Looping(), shape=(1024,))
    data = batch(model)
    assert len(wide_layers(model, ROWS)) == 1
    ours = accumulated(model, data)
    theirs = by_keras(model, data)
    assert products(ours.graph)[TRANSPOSED] == 0
    assert ours.loss == theirs.loss
    assert deviation(ours.gradients, theirs.gradients) < ROUNDING


def test_the_layers_have_no_call_of_their_own_afterwards(precision):
    precision("float32")
    model = wide()
    wide_ones = wide_layers(model, ROWS)
    assert wide_ones == model.layers[:2]
    accumulated(model, batch(model))
    with transposed_gradients(wide_ones):
        assert all("call" in vars(layer) for layer in wide_ones)
        assert wide_layers(model, ROWS) == []
    rejected = pytest.raises(ValueError, match="incompatible")
    with rejected, transposed_gradients(wide_ones):
        model(tf.zeros([ROWS, 3]))
    assert all("call" not in vars(layer) for layer in model.layers)
    assert wide_layers(model, ROWS) == wide_ones


def updated_on(devices, same_noise):
    """Return how far each weight goes in an update, and the graph of the update.

    The last slice of each replica has 8 rows, and is computed likewise. `Dropout` is
    replaced for other reasons, with `same_noise`.
    """
    keras.utils.set_random_seed(0)
    strategy = strategy_on(devices)
    with strategy.scope():
        first = layers.Dense(1024, "relu")
        dropout = layers.Dropout(0.5, seed=3)
        model = network(first, dropout, layers.Dense(512, "tanh"))
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
    before = model.get_weights()
    data = batch(model, devices * 40)
    function(*data)
    pairs = zip(model.get_weights(), before, strict=True)
    moves = [after - start for after, start in pairs]
    return moves, function.get_concrete_function(*data).graph


@pytest.mark.slow
@pytest.mark.parametrize(
    ("same_noise", "devices"), [(False, 1), (False, 2), (True, 1), (True, 2)]
)
def test_an_update_on_each_replica(precision, monkeypatch, devices, same_noise):
    precision("float32")
    moves, graph = updated_on(devices, same_noise)
    assert products(graph)[TRANSPOSED] == 2 * devices
    replace_nothing(monkeypatch)
    expected, graph = updated_on(devices, same_noise)
    assert products(graph)[TRANSPOSED] == 0
    # By how much a weight moves is a difference of float32 values: of weights up to 0.1
    # it has an error of 4e-9.
    assert deviation(moves, expected) < 1e-4
    assert deviation([-move for move in moves], expected) > 1


@pytest.mark.slow
def test_fit_has_it(precision, monkeypatch):
    precision("float32")

    def fitted():
        keras.utils.set_random_seed(0)
        model = AccumulatingModel(wide(), ROWS)
        model.compile(keras.optimizers.Adam(1e-3), "mean_squared_error")
        x, y = map(np.asarray, batch(model.inner, 64))
        options = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, **options).history
        return history["loss"], model

    replaced = []

    def noted_wide_layers(*arguments):
        replaced.extend(wide_layers(*arguments))
        return wide_layers(*arguments)

    monkeypatch.setattr(
        "pipeline.accumulation.accumulate.wide_layers", noted_wide_layers
    )
    means, model = fitted()
    assert set(replaced) == set(model.inner.layers[:2])
    assert all("call" not in vars(layer) for layer in model.inner.layers)

    replace_nothing(monkeypatch)
    expected, _ = fitted()
    # Adam takes a step of ±rate where a gradient is nothing but rounding, too.
    np.testing.assert_allclose(means, expected, rtol=1e-4)
    assert abs(expected[1] - expected[0]) > 0.01 * expected[0]


@pytest.mark.slow
def test_no_trace_is_kept(precision):
    """TensorFlow keeps that of a custom gradient, with the variables of the model.

    Here it is one for all models.
    """
    precision("float32")
    model = wide()
    graph = accumulated(model, batch(model)).graph
    assert products(graph)[TRANSPOSED] == 2
    graph_reference = weakref.ref(graph)
    kernel_reference = weakref.ref(model.layers[0].kernel.value)
    del model, graph
    gc.collect()
    assert graph_reference() is None
    assert kernel_reference() is None
