"""Adam by one operation takes the step that Keras' own `optimizer.apply` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import AccumulatingModel, Update, fused_adam
from tests.accumulation import reference
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

RATE = 0.01
UPDATES = 8
# The operation steps the first two; the bias is too small to gain.
SHAPES = {"matrix": (256, 256), "table": (4096, 16), "bias": (256,)}
EXACT = {"float32": 1e-6, "float64": 1e-14}  # of how far a variable has moved


def halving():
    return keras.optimizers.schedules.ExponentialDecay(
        RATE, decay_steps=5, decay_rate=0.5
    )


def without_decay_of_the_table():
    optimizer = keras.optimizers.AdamW(RATE, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["table"])
    return optimizer


STEPS = {
    "adam": lambda: keras.optimizers.Adam(RATE),
    "adamw": without_decay_of_the_table,
    "betas": lambda: keras.optimizers.Adam(RATE, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "epsilon": lambda: keras.optimizers.Adam(RATE, epsilon=0.1),
    "no momentum": lambda: keras.optimizers.Adam(RATE, beta_1=0.0),
    "schedule": lambda: keras.optimizers.Adam(halving()),
    "clipvalue": lambda: keras.optimizers.Adam(RATE, clipvalue=0.5),
    "clipnorm": lambda: keras.optimizers.Adam(RATE, clipnorm=1.0),
    "global_clipnorm": lambda: keras.optimizers.Adam(RATE, global_clipnorm=1.0),
    "weight decay": lambda: keras.optimizers.Adam(RATE, weight_decay=0.1),
    "ema": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(RATE), initial_scale=8.0
    ),
}


class HalfStep(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)


def new_variables(dtype):
    random = np.random.default_rng(0)
    variables = []
    for name, shape in SHAPES.items():
        value = 1e-3 * random.normal(size=shape)
        variables.append(keras.Variable(value, dtype=dtype, name=name))
    return variables


def gradients(dtype, updates=UPDATES):
    """Yield noise around a mean; of the table a few rows, others in each update."""
    random = np.random.default_rng(1)
    rows_of_table, width = SHAPES["table"]
    few = 64
    for _ in range(updates):
        matrix = tf.constant(0.3 + random.normal(size=SHAPES["matrix"]), dtype)
        bias = tf.constant(0.3 + random.normal(size=SHAPES["bias"]), dtype)
        rows = random.choice(rows_of_table, few, replace=False)
        values = random.normal(size=(few, width))
        table = tf.IndexedSlices(
            tf.constant(values, dtype),
            tf.constant(rows),
            tf.constant(SHAPES["table"]),
        )
        yield matrix, table, bias


def applying(optimizer, variables, fused):
    """Return a traced function that applies gradients."""
    optimizer.build(variables)

    @tf.function
    def apply(*gradients):
        if fused:
            with fused_adam(optimizer):
                optimizer.apply(gradients, variables)
        else:
            optimizer.apply(gradients, variables)

    return apply


def fused_count(function, *arguments):
    """Return how many variables the function steps by the one operation."""
    concrete = function.get_concrete_function(*arguments)
    graph = concrete.graph.as_graph_def()
    nodes = list(graph.node)
    for inner in graph.library.function:
        nodes += inner.node_def
    return len([node for node in nodes if node.op == "ResourceApplyAdam"])


class Trained(NamedTuple):
    """What updates of an optimizer leave.

    Attributes:
        values: of the variables, after each update.
        fused: how many variables one operation stepped.
    """

    values: list[list[np.ndarray]]
    optimizer: keras.optimizers.Optimizer
    fused: int


def trained(make, dtype, fused, updates=UPDATES):
    variables = new_variables(dtype)
    optimizer = make()
    apply = applying(optimizer, variables, fused)
    scale = 1.0
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = 8.0
    values = []
    for update in gradients(dtype, updates):
        scaled = [times(gradient, scale) for gradient in update]
        apply(*scaled)
        values.append([variable.numpy() for variable in variables])
    fused_variables = fused_count(apply, *scaled)
    return Trained(values, optimizer, fused_variables)


def times(gradient, scale):
    if isinstance(gradient, tf.Tensor):
        return gradient * scale
    return tf.IndexedSlices(
        gradient.values * scale, gradient.indices, gradient.dense_shape
    )


def deviation(values, expected_values):
    """Return how far variables are from where they should be ÷ how far they moved.

    It is that of the worst variable, and the way is the expected one.
    """
    ratios = []
    starts = [variable.numpy() for variable in new_variables("float64")]
    for value, expected, start in zip(values, expected_values, starts, strict=True):
        distance = np.linalg.norm(value.astype("float64") - expected)
        way = np.linalg.norm(expected - start.astype(expected.dtype))
        ratios.append(distance / way)
    return max(ratios)


QUICK = ("schedule", "loss scale")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *mostly_slow(
            [(name, "float64") for name in STEPS], [(name, "float64") for name in QUICK]
        ),
        *mostly_slow([(name, "float32") for name in STEPS], [("adamw", "float32")]),
    ],
)
def test_the_step_is_that_of_keras(precision, name, dtype):
    precision(dtype)
    ours = trained(STEPS[name], dtype, fused=True)
    theirs = trained(STEPS[name], dtype, fused=False)
    assert ours.fused == 2
    assert theirs.fused == 0
    for update in (0, 1, UPDATES - 1):
        distance = deviation(ours.values[update], theirs.values[update])
        assert distance < EXACT[dtype], update
    # The control: the step before is another one.
    assert deviation(ours.values[1], theirs.values[0]) > 1e-2

    error = 2e-5 if dtype == "float32" else 1e-14  # of v 1.3e-5
    pairs = zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True)
    for variable, expected in pairs:
        distance = np.linalg.norm(variable.numpy() - expected.numpy())
        assert distance <= error * np.linalg.norm(expected.numpy()), variable.path


def test_in_float32_the_operation_as_it_is_takes_another_step(precision):
    """`fused_adam` makes up for it.

    A difference remains where a gradient is the first one after many updates.
    """
    precision("float32")
    random = np.random.default_rng(0)
    gradient = tf.constant(random.normal(size=SHAPES["matrix"]), tf.float32)

    def step(updates, fused):
        variable = keras.Variable(np.zeros(SHAPES["matrix"]), dtype="float32")
        optimizer = keras.optimizers.Adam(RATE)
        apply = applying(optimizer, [variable], fused)
        optimizer.iterations.assign(updates)
        apply(gradient)
        return variable.numpy()

    weight = tf.Variable(tf.zeros_like(gradient))
    first_moment = tf.Variable(tf.zeros_like(gradient))
    second_moment = tf.Variable(tf.zeros_like(gradient))
    tf.raw_ops.ResourceApplyAdam(
        var=weight.handle,
        m=first_moment.handle,
        v=second_moment.handle,
        grad=gradient,
        lr=RATE,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-7,
        beta1_power=0.9,
        beta2_power=0.999,
    )

    def error(value, expected):
        return np.linalg.norm(value - expected) / np.linalg.norm(expected)

    first_step = step(0, fused=False)
    assert error(weight.numpy(), first_step) > 5e-6
    assert error(step(0, fused=True), first_step) < 3e-7

    late_step = step(20_000, fused=False)
    assert error(step(20_000, fused=True), late_step) < 1e-5


# Not fused it is Keras' own.
@pytest.mark.parametrize("fused", mostly_slow([True, False], [True]))
def test_a_loss_scale_skips_an_update_that_is_not_finite(precision, fused):
    precision("float32")
    adam = keras.optimizers.Adam(RATE)
    optimizer = keras.optimizers.LossScaleOptimizer(adam, initial_scale=8.0)
    variables = new_variables("float32")
    apply = applying(optimizer, variables, fused)

    def changes(update):
        """Apply gradients; return whether anything but the scale has changed."""
        before = [variable.numpy() for variable in (*variables, *adam.variables)]
        apply(*update)
        after = [variable.numpy() for variable in (*variables, *adam.variables)]
        return not all(map(np.array_equal, before, after))

    def state():
        """Return how many updates were applied, and the loss scale."""
        return int(adam.iterations.numpy()), float(optimizer.dynamic_scale)

    first, second = gradients("float32", 2)
    matrix, table, bias = second
    not_finite = (matrix * np.inf, table, bias)

    assert changes(first)
    assert state() == (1, 8.0)
    assert not changes(not_finite)
    assert state() == (1, 4.0)
    assert changes(second)
    assert state() == (2, 4.0)


class Counting(keras.optimizers.Adam):
    """Assigns in a way of its own."""

    def assign_sub(self, variable, value):
        super().assign_sub(variable, value * 0.5)


class Other(NamedTuple):
    """An optimizer, or a precision, that the operation is not for."""

    make: Callable[[], keras.optimizers.Optimizer]
    dtype: str


ALL_ELSE = {
    "amsgrad": Other(lambda: keras.optimizers.Adam(RATE, amsgrad=True), "float32"),
    # Of 1 − β₂ float32 leaves 1.7e-4 too much.
    "beta_2": Other(lambda: keras.optimizers.Adam(RATE, beta_2=0.9999), "float32"),
    "bfloat16": Other(lambda: keras.optimizers.Adam(RATE), "bfloat16"),
    "float16": Other(lambda: keras.optimizers.Adam(RATE), "float16"),
    "nadam": Other(lambda: keras.optimizers.Nadam(RATE), "float32"),
    "sgd": Other(lambda: keras.optimizers.SGD(RATE, momentum=0.9), "float32"),
    "own step": Other(lambda: HalfStep(RATE), "float32"),
    "own assignment": Other(lambda: Counting(RATE), "float32"),
}


@pytest.mark.parametrize("case", mostly_slow(ALL_ELSE, ["own step"]))
def test_all_else_applies_as_ever(precision, case):
    make, dtype = ALL_ELSE[case]
    precision("float32")
    ours = trained(make, dtype, fused=True, updates=3)
    theirs = trained(make, dtype, fused=False, updates=3)
    assert ours.fused == 0
    for value, expected in zip(ours.values[-1], theirs.values[-1], strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("rows", [8, 4096], ids=["small", "large"])
def test_rows_that_are_looked_up_twice_are_summed_whatever_the_size(precision, rows):
    """A user's loop has such rows from its tape."""
    precision("float32")

    width = 16

    def stepped(gradient):
        """Return the table after one step."""
        table = keras.Variable(np.ones((rows, width)))
        optimizer = keras.optimizers.Adam(RATE, epsilon=1.0)
        apply = applying(optimizer, [table], fused=True)
        apply(gradient)
        return table.numpy()

    values = np.random.default_rng(0).normal(size=(3, width))
    row_2_twice = tf.constant([2, 5, 2])
    slices = tf.IndexedSlices(
        tf.constant(values, tf.float32), row_2_twice, tf.constant([rows, width])
    )
    dense = tf.convert_to_tensor(slices)
    np.testing.assert_array_equal(stepped(slices), stepped(dense))


def test_the_optimizer_is_its_own_again(precision):
    precision("float32")
    optimizer = keras.optimizers.Adam(RATE)
    apply = applying(optimizer, new_variables("float32"), fused=True)
    apply(*next(gradients("float32")))
    assert "update_step" not in vars(optimizer)

    rejected = pytest.raises(ValueError, match="Received a list of 1 gradients")
    with rejected, fused_adam(optimizer):
        optimizer.apply([tf.ones(SHAPES["matrix"])])
    assert "update_step" not in vars(optimizer)

    config = optimizer.get_config()
    assert keras.optimizers.Adam.from_config(config).get_config() == config


@pytest.mark.parametrize(
    ("first", "dtype", "bound"),
    mostly_slow(
        [(True, "float32", 1e-5), (True, "float64", 1e-14), (False, "float64", 1e-14)],
        [(True, "float64", 1e-14)],
    ),
)
def test_training_goes_on_from_the_saved_state_with_either(
    precision, first, dtype, bound
):
    """Three updates are fused and three are not, or the other way round."""
    precision(dtype)

    def go_on(variables, optimizer, fused, updates):
        apply = applying(optimizer, variables, fused)
        for update in updates:
            apply(*update)

    updates = list(gradients(dtype, 6))
    before = new_variables(dtype)
    optimizer = STEPS["adamw"]()
    go_on(before, optimizer, fused=first, updates=updates[:3])
    saved = {}
    optimizer.save_own_variables(saved)

    after = new_variables(dtype)
    resumed = STEPS["adamw"]()
    for variable, value in zip(after, before, strict=True):
        variable.assign(value)
    resumed.build(after)
    resumed.load_own_variables(saved)
    go_on(after, resumed, fused=not first, updates=updates[3:])

    uninterrupted = trained(STEPS["adamw"], dtype, fused=False, updates=6)
    values = [variable.numpy() for variable in after]
    assert deviation(values, uninterrupted.values[-1]) < bound


def network():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,), dtype="int32")
    hidden = layers.Embedding(*SHAPES["table"])(inputs)
    hidden = layers.Flatten()(hidden)
    hidden = layers.Dense(256, "relu")(hidden)
    return keras.Model(inputs, layers.Dense(10)(hidden))


def batches():
    """Yield three batches of 24 sequences of tokens, in ten classes."""
    random = np.random.default_rng(2)
    rows_of_table, _ = SHAPES["table"]
    for _ in range(3):
        x = random.integers(0, rows_of_table, (24, 16), np.int32)
        y = random.integers(0, 10, 24)
        yield x, y


def cross_entropy():
    return losses.SparseCategoricalCrossentropy(from_logits=True)


def by_keras(optimizer):
    """Return the weights after plain Keras' updates."""
    model = network()
    loss = cross_entropy()
    for x, y in batches():
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = reference.dense(reference.gradients_of(tape, value, model))
        optimizer.apply(gradients, model.trainable_variables)
    return model.get_weights()


def assert_same(weights, expected_weights):
    for value, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(
            value, expected, rtol=0, atol=1e-12 * np.abs(expected).max()
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"), [("adamw", 2), ("schedule", 1), ("loss scale", 2)]
)
def test_an_update_applies_by_it_on_each_replica(float64, name, devices):
    strategy = strategy_on(devices)
    with strategy.scope():
        model = network()
        optimizer = STEPS[name]()
        optimizer.build(model.trainable_variables)
    update = Update(model, cross_entropy(), optimizer, 5, strategy=strategy)
    step = tf.function(update.__call__)
    for x, y in batches():
        batch = (tf.constant(x), tf.constant(y))
        step(batch)
    large_variables = 2  # the table and the first kernel
    assert fused_count(step, batch) == large_variables * devices

    plain = STEPS[name]()
    plain = getattr(plain, "inner_optimizer", plain)
    assert_same(model.get_weights(), by_keras(plain))
    for variable in model.trainable_variables:
        copies = strategy.experimental_local_results(variable.value)
        assert len(copies) == devices
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.slow
def test_fit_applies_by_it(float64, monkeypatch):
    calls = []
    operation = tf.raw_ops.ResourceApplyAdam

    def noted(**arguments):
        calls.append(operation(**arguments))

    monkeypatch.setattr(tf.raw_ops, "ResourceApplyAdam", noted)
    model = AccumulatingModel(network(), 5)
    model.compile(keras.optimizers.Adam(RATE), cross_entropy(), steps_per_execution=3)
    x = np.concatenate([x for x, _ in batches()])
    y = np.concatenate([y for _, y in batches()])
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    assert len(calls) >= 2  # one for each large variable
    assert_same(model.get_weights(), by_keras(keras.optimizers.Adam(RATE)))
