"""Adam by one operation takes the step that Keras' own `optimizer.apply` takes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import AccumulatingModel, Update, fused_adam
from tests.parameters import mostly_slow

UPDATES = 8
SHAPES = {
    "matrix": (256, 256),
    "table": (4096, 16),
    "bias": (256,),
}  # the last one is too small to gain
EXACT = {"float32": 1e-6, "float64": 1e-14}  # of how far a variable has moved


def halving():
    return keras.optimizers.schedules.ExponentialDecay(
        0.01, decay_steps=5, decay_rate=0.5
    )


def without_decay_of_the_table():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["table"])
    return optimizer


STEPS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": without_decay_of_the_table,
    "betas": lambda: keras.optimizers.Adam(0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "epsilon": lambda: keras.optimizers.Adam(0.01, epsilon=0.1),
    "no momentum": lambda: keras.optimizers.Adam(0.01, beta_1=0.0),
    "schedule": lambda: keras.optimizers.Adam(halving()),
    "clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.5),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=1.0),
    "weight decay": lambda: keras.optimizers.Adam(0.01, weight_decay=0.1),
    "ema": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=8.0
    ),
}


class HalfStep(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate / 2)


def variables(dtype):
    numbers = np.random.default_rng(0)
    return [
        keras.Variable(1e-3 * numbers.normal(size=s), dtype=dtype, name=name)
        for name, s in SHAPES.items()
    ]


def gradients(dtype, updates=UPDATES):
    """Noise around a mean; of the table a few rows, others in each update."""
    numbers = np.random.default_rng(1)
    for _ in range(updates):
        matrix, bias = (
            tf.constant(0.3 + numbers.normal(size=SHAPES[name]), dtype)
            for name in ("matrix", "bias")
        )
        rows = numbers.choice(SHAPES["table"][0], 64, replace=False)
        values = tf.constant(
            numbers.normal(size=(len(rows), SHAPES["table"][1])), dtype
        )
        yield (
            matrix,
            tf.IndexedSlices(values, tf.constant(rows), tf.constant(SHAPES["table"])),
            bias,
        )


def applying(optimizer, of, fused):
    """Return a traced function that applies gradients."""
    optimizer.build(of)

    @tf.function
    def apply(*found):
        if fused:
            with fused_adam(optimizer):
                optimizer.apply(found, of)
        else:
            optimizer.apply(found, of)

    return apply


def operations(function, *arguments):
    """Return how many variables the function steps by the one operation."""
    graph = function.get_concrete_function(*arguments).graph.as_graph_def()
    nodes = [
        *graph.node,
        *(node for inner in graph.library.function for node in inner.node_def),
    ]
    return sum(node.op == "ResourceApplyAdam" for node in nodes)


def trained(make, dtype, fused, updates=UPDATES):
    """Return the variables after each update, the optimizer, and how many variables one operation stepped."""
    of, optimizer = variables(dtype), make()
    apply = applying(optimizer, of, fused)
    scale = 8.0 if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else 1.0
    after = []
    for found in gradients(dtype, updates):
        found = [
            one * scale if isinstance(one, tf.Tensor) else scaled(one, scale)
            for one in found
        ]
        apply(*found)
        after.append([variable.numpy() for variable in of])
    return after, optimizer, operations(apply, *found)


def scaled(rows, scale):
    return tf.IndexedSlices(rows.values * scale, rows.indices, rows.dense_shape)


def apart(got, expected):
    """How far the variables are from where they should be ÷ how far they should have moved; the largest."""
    before = [variable.numpy() for variable in variables("float64")]
    return max(
        np.linalg.norm(a.astype("float64") - b)
        / np.linalg.norm(b - start.astype(b.dtype))
        for a, b, start in zip(got, expected, before, strict=True)
    )


QUICK = ("adamw", "schedule", "global_clipnorm", "ema", "loss scale")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *mostly_slow(
            ((name, "float64") for name in STEPS), [(name, "float64") for name in QUICK]
        ),
        *mostly_slow(((name, "float32") for name in STEPS), [("adamw", "float32")]),
    ],
)
def test_the_step_is_that_of_keras(precision, name, dtype):
    precision(dtype)
    got, optimizer, count = trained(STEPS[name], dtype, fused=True)
    expected, reference, none = trained(STEPS[name], dtype, fused=False)
    assert (count, none) == (2, 0)
    for update in (0, 1, UPDATES - 1):
        assert apart(got[update], expected[update]) < EXACT[dtype], update
    assert apart(got[1], expected[0]) > 1e-2
    error = 2e-5 if dtype == "float32" else 1e-14  # of v 1.3e-5
    for ours, theirs in zip(optimizer.variables, reference.variables, strict=True):
        assert np.linalg.norm(ours.numpy() - theirs.numpy()) <= error * np.linalg.norm(
            theirs.numpy()
        ), ours.path


def test_in_float32_the_operation_as_it_is_takes_another_step(precision):
    """What `fused_adam` makes up for; and what is left of it where a gradient is the first one after many updates."""
    precision("float32")
    gradient = tf.constant(
        np.random.default_rng(0).normal(size=SHAPES["matrix"]), tf.float32
    )

    def step(updates, fused):
        variable = keras.Variable(np.zeros(SHAPES["matrix"]), dtype="float32")
        optimizer = keras.optimizers.Adam(0.01)
        apply = applying(optimizer, [variable], fused)
        optimizer.iterations.assign(updates)
        apply(gradient)
        return variable.numpy()

    weight, *moments = (tf.Variable(tf.zeros_like(gradient)) for _ in range(3))
    for_keras = {
        "lr": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-7,
        "beta1_power": 0.9,
        "beta2_power": 0.999,
    }
    handles = {"var": weight.handle, "m": moments[0].handle, "v": moments[1].handle}
    tf.raw_ops.ResourceApplyAdam(**handles, grad=gradient, **for_keras)

    def error(got, expected):
        return np.linalg.norm(got - expected) / np.linalg.norm(expected)

    assert error(weight.numpy(), step(0, False)) > 5e-6
    assert error(step(0, True), step(0, False)) < 3e-7
    assert error(step(20_000, True), step(20_000, False)) < 1e-5


@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_scale_skips_an_update_that_is_not_finite(precision, fused):
    precision("float32")
    adam = keras.optimizers.Adam(0.01)
    optimizer, of = (
        keras.optimizers.LossScaleOptimizer(adam, initial_scale=8.0),
        variables("float32"),
    )
    apply = applying(optimizer, of, fused)
    good, bad = gradients("float32", 2)
    for found, iterations, scale in (
        (good, 1, 8.0),
        ((bad[0] * np.inf, *bad[1:]), 1, 4.0),
        (bad, 2, 4.0),
    ):
        before = [variable.numpy() for variable in (*of, *adam.variables)]
        apply(*found)
        after = [variable.numpy() for variable in (*of, *adam.variables)]
        skipped = all(np.array_equal(*both) for both in zip(before, after, strict=True))
        assert skipped == (scale == 4.0 and iterations == 1)
        assert (int(adam.iterations.numpy()), float(optimizer.dynamic_scale)) == (
            iterations,
            scale,
        )


class Counting(keras.optimizers.Adam):
    """Assigns in a way of its own."""

    def assign_sub(self, variable, value):
        super().assign_sub(variable, value * 0.5)


ALL_ELSE = {
    "amsgrad": (lambda: keras.optimizers.Adam(0.01, amsgrad=True), "float32"),
    # Of 1 − β₂ float32 leaves 1.7e-4 too much.
    "beta_2": (lambda: keras.optimizers.Adam(0.01, beta_2=0.9999), "float32"),
    "bfloat16": (lambda: keras.optimizers.Adam(0.01), "bfloat16"),
    "float16": (lambda: keras.optimizers.Adam(0.01), "float16"),
    "nadam": (lambda: keras.optimizers.Nadam(0.01), "float32"),
    "sgd": (lambda: keras.optimizers.SGD(0.01, momentum=0.9), "float32"),
    "own step": (lambda: HalfStep(0.01), "float32"),
    "own assignment": (lambda: Counting(0.01), "float32"),
}


@pytest.mark.parametrize("case", mostly_slow(ALL_ELSE, ["amsgrad", "own step"]))
def test_all_else_applies_as_ever(precision, case):
    make, dtype = ALL_ELSE[case]
    precision("float32")
    got, _, count = trained(make, dtype, fused=True, updates=3)
    expected, _, _ = trained(make, dtype, fused=False, updates=3)
    assert count == 0
    for ours, theirs in zip(got[-1], expected[-1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("rows", [8, 4096], ids=["small", "large"])
def test_rows_that_are_looked_up_twice_are_summed_whatever_the_size(precision, rows):
    """As a tape returns them to a loop of one's own."""
    precision("float32")

    def stepped(gradient):
        table = keras.Variable(np.ones((rows, 16)))
        applying(keras.optimizers.Adam(0.01, epsilon=1.0), [table], fused=True)(
            gradient
        )
        return table.numpy()

    values = np.random.default_rng(0).normal(size=(3, 16))
    slices = tf.IndexedSlices(
        tf.constant(values, tf.float32), tf.constant([2, 5, 2]), tf.constant([rows, 16])
    )
    np.testing.assert_array_equal(
        stepped(slices), stepped(tf.convert_to_tensor(slices))
    )


def test_the_optimizer_is_its_own_again(precision):
    precision("float32")
    optimizer, of = keras.optimizers.Adam(0.01), variables("float32")
    apply = applying(optimizer, of, fused=True)
    apply(*next(gradients("float32")))
    assert "update_step" not in vars(optimizer)
    with (
        pytest.raises(ValueError, match="Received a list of 1 gradients"),
        fused_adam(optimizer),
    ):
        optimizer.apply([tf.ones(SHAPES["matrix"])])
    assert "update_step" not in vars(optimizer)
    assert (
        keras.optimizers.Adam.from_config(optimizer.get_config()).get_config()
        == optimizer.get_config()
    )


@pytest.mark.parametrize(
    ("first", "dtype", "bound"),
    [(True, "float32", 1e-5), (True, "float64", 1e-14), (False, "float64", 1e-14)],
)
def test_training_goes_on_from_the_saved_state_with_either(
    precision, first, dtype, bound
):
    precision(dtype)

    def go_on(of, optimizer, fused, found):
        apply = applying(optimizer, of, fused)
        for each in found:
            apply(*each)

    found, expected = (
        list(gradients(dtype, 6)),
        trained(STEPS["adamw"], dtype, fused=False, updates=6)[0][-1],
    )
    before, optimizer = variables(dtype), STEPS["adamw"]()
    go_on(before, optimizer, first, found[:3])
    saved = {}
    optimizer.save_own_variables(saved)
    after, other = variables(dtype), STEPS["adamw"]()
    for variable, value in zip(after, before, strict=True):
        variable.assign(value)
    other.build(after)
    other.load_own_variables(saved)
    go_on(after, other, not first, found[3:])
    assert apart([variable.numpy() for variable in after], expected) < bound


def network():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,), dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(*SHAPES["table"])(inputs))
    return keras.Model(inputs, layers.Dense(10)(layers.Dense(256, "relu")(hidden)))


def batches():
    numbers = np.random.default_rng(2)
    return [
        (numbers.integers(0, 4096, (24, 16), np.int32), numbers.integers(0, 10, 24))
        for _ in range(3)
    ]


def cross_entropy():
    return losses.SparseCategoricalCrossentropy(from_logits=True)


def by_keras(optimizer):
    """Return the weights after plain Keras' updates."""
    model, loss = network(), cross_entropy()
    for x, y in batches():
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        found = tape.gradient(
            value, [variable.value for variable in model.trainable_variables]
        )
        # Of a row that is looked up twice Keras squares each gradient of its own.
        optimizer.apply(
            [tf.convert_to_tensor(each) for each in found], model.trainable_variables
        )
    return model.get_weights()


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"), [("adamw", 2), ("schedule", 1), ("loss scale", 2)]
)
def test_an_update_applies_by_it_on_each_replica(float64, name, devices):
    strategy = (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        if devices == 2
        else tf.distribute.get_strategy()
    )
    with strategy.scope():
        model, optimizer = network(), STEPS[name]()
        optimizer.build(model.trainable_variables)
    update = tf.function(
        Update(model, cross_entropy(), optimizer, 5, strategy=strategy).__call__
    )
    for batch in batches():
        update(tuple(map(tf.constant, batch)))
    assert (
        operations(update, tuple(map(tf.constant, batches()[0]))) == 2 * devices
    )  # the table and the large kernel
    reference = STEPS[name]()
    same(
        model.get_weights(), by_keras(getattr(reference, "inner_optimizer", reference))
    )
    for variable in model.trainable_variables:
        copies = strategy.experimental_local_results(variable.value)
        assert len(copies) == devices
        assert all(np.array_equal(copy, copies[0]) for copy in copies)


@pytest.mark.slow
def test_fit_applies_by_it(float64, monkeypatch):
    made = []
    operation = tf.raw_ops.ResourceApplyAdam
    monkeypatch.setattr(
        tf.raw_ops, "ResourceApplyAdam", lambda **given: made.append(operation(**given))
    )
    model = AccumulatingModel(network(), 5)
    model.compile(keras.optimizers.Adam(0.01), cross_entropy(), steps_per_execution=3)
    x, y = (np.concatenate(parts) for parts in zip(*batches(), strict=True))
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    assert len(made) >= 2
    same(model.get_weights(), by_keras(keras.optimizers.Adam(0.01)))
