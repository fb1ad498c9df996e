"""One update of `pipeline.accumulation`, update after update, against a plain Keras loop over large batches."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline import accumulation
from pipeline.accumulation import Evaluation, Update, accumulate_gradients
from pipeline.accumulation.internals import Objective
from pipeline.components import optimizer as optimizers
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from pipeline.training.evaluator import Evaluator
from tests.parameters import mostly_slow
from tests.running import ROOT, python

# One update differs by rounding alone, about 1e-15 (n · 2⁻⁵³ over 128 examples, cancelling in part); 100 updates
# add up to 1e-13 where the training does not amplify, which these rates see to. Ten times for that.
EXACT = 1e-12

FEATURES, CLASSES = 20, 5
SIZES = (
    128,
    128,
    45,
    1,
)  # an epoch of E = 128: a tail that two devices cannot share, then one that leaves one idle
UPDATES = 100


def data(examples):
    x = (
        np.random.default_rng(0)
        .normal(size=(examples, FEATURES))
        .astype(keras.config.floatx())
    )
    return x, np.argmax(x[:, :CLASSES] + x[:, CLASSES : 2 * CLASSES] ** 2, axis=1)


def batches(updates):
    x, y = data(sum(SIZES))
    stops = np.cumsum(SIZES)
    for update in range(updates):
        stop = stops[update % len(SIZES)]
        part = slice(stop - SIZES[update % len(SIZES)], stop)
        yield x[part], y[part]


def network(**arguments):
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(16, "relu", **arguments)
    return keras.Sequential([keras.Input((FEATURES,)), hidden, layers.Dense(CLASSES)])


def cross_entropy():
    return losses.SparseCategoricalCrossentropy(from_logits=True)


def on_devices(count):
    return (
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        if count == 2
        else tf.distribute.get_strategy()
    )


def test_an_update_in_the_scope_of_its_strategy_is_refused():
    strategy = on_devices(2)
    x, y = data(8)
    with strategy.scope():
        model, optimizer = network(), keras.optimizers.SGD()
        optimizer.build(model.trainable_variables)
        update = Update(model, cross_entropy(), optimizer, 2, strategy=strategy)
        with pytest.raises(ValueError, match="must be outside of its strategy's scope"):
            tf.function(update, autograph=False)((x, y))
    assert float(tf.function(update, autograph=False)((x, y))["loss"]) > 0


def traced(function):
    """One trace for batches of every size."""
    signature = (
        tf.TensorSpec((None, FEATURES), keras.config.floatx()),
        tf.TensorSpec((None,), tf.int64),
    )
    return tf.function(lambda x, y: function((x, y)), input_signature=signature)


def decaying():
    return keras.optimizers.schedules.ExponentialDecay(
        0.05, decay_steps=40, decay_rate=0.5
    )


CONSTRAINED = {
    "kernel_constraint": "max_norm"
}  # norms of at most 2, which the first layer's reach
TRAINED = {
    "momentum": (
        lambda: keras.optimizers.SGD(decaying(), momentum=0.9, global_clipnorm=1.0),
        {},
    ),
    "adamw": (
        lambda: keras.optimizers.AdamW(
            decaying(), weight_decay=0.01, global_clipnorm=1.0
        ),
        {},
    ),
    "ema_constraint": (
        lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9),
        CONSTRAINED,
    ),
    "loss_scale": (
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(decaying())),
        {},
    ),
    "loss_scale_factor": (
        lambda: keras.optimizers.SGD(decaying(), momentum=0.9, loss_scale_factor=64.0),
        {},
    ),
}


@functools.cache
def large_batch_trajectory(name):
    """Losses and final weights of the plain Keras loop, which knows nothing of micro-batches."""
    make, arguments = TRAINED[name]
    model, loss, optimizer = network(**arguments), cross_entropy(), make()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    optimizer.loss_scale_factor = None

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(
            value, [variable.value for variable in model.trainable_variables]
        )
        optimizer.apply(gradients, model.trainable_variables)
        return value

    optimizer.build(model.trainable_variables)
    step = traced(step)
    values = [float(step(*batch)) for batch in batches(UPDATES)]
    optimizer.finalize_variable_values(model.trainable_variables)
    return values, model.get_weights()


def accumulated_trajectory(name, micro_batch_size, devices):
    make, arguments = TRAINED[name]
    strategy = on_devices(devices)
    with strategy.scope():
        model, optimizer = network(**arguments), make()
        optimizer.build(model.trainable_variables)
    update = traced(
        Update(model, cross_entropy(), optimizer, micro_batch_size, strategy=strategy)
    )
    values = [float(update(*batch)["loss"]) for batch in batches(UPDATES)]
    optimizer.finalize_variable_values(model.trainable_variables)
    return values, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "micro_batch_size", "devices"),
    # Factors, kinds of models and devices are in test_matrix.py: here are optimizers with a schedule or a wrapper.
    [
        pytest.param(name, 24, devices, marks=[pytest.mark.soak] * (devices > 1))
        for name in TRAINED
        for devices in (1, 2)
    ],
)
def test_every_cut_trains_the_trajectory_of_the_large_batch(
    float64, name, micro_batch_size, devices
):
    values, weights = accumulated_trajectory(name, micro_batch_size, devices)
    expected_values, expected_weights = large_batch_trajectory(name)
    np.testing.assert_allclose(values, expected_values, rtol=EXACT)
    for got, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(
            got, expected, rtol=0, atol=EXACT * np.abs(expected).max()
        )
    assert np.mean(expected_values[-8::4]) < 0.75 * expected_values[0]  # it did train


def after_one_update(name, gradients_of):
    """The weights after one update from the same weights, by what `gradients_of(model, x, y)` gives."""
    model, optimizer = network(), TRAINED[name][0]()
    optimizer.build(model.trainable_variables)
    ((x, y),) = batches(1)
    optimizer.apply(gradients_of(model, x, y), model.trainable_variables)
    return model.get_weights()


def large_batch_gradients(model, x, y):
    with tf.GradientTape() as tape:
        value = cross_entropy()(y, model(x, training=True))
    return tape.gradient(
        value, [variable.value for variable in model.trainable_variables]
    )


def mean_of_means(model, x, y):
    cuts = [
        slice(start, start + 24) for start in range(0, len(y), 24)
    ]  # the last one has 8 of the 128
    means = [large_batch_gradients(model, x[cut], y[cut]) for cut in cuts]
    return [tf.add_n(parts) / len(cuts) for parts in zip(*means, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_one_update_in_float32_is_that_of_the_large_batch(precision, name):
    precision("float32")
    expected = after_one_update(name, large_batch_gradients)

    def deviation(weights):
        return max(
            np.linalg.norm(a - b) / np.linalg.norm(b)
            for a, b in zip(weights, expected, strict=True)
        )

    for size in (128, 64, 32, 16, 24):
        accumulated = after_one_update(
            name,
            lambda model, x, y, n=size: accumulate_gradients(
                model, cross_entropy(), (x, y), n
            ).gradients(),
        )
        assert deviation(accumulated) < 1e-6, size  # some roundings of 2⁻²⁴ = 6e-8
    assert deviation(after_one_update(name, mean_of_means)) > 1000 * 1e-6


def by_hand(model, x, y):
    """Loss, accuracy and the gradient's norm in NumPy, from the weights of dense, ReLU, dense."""
    w, b, v, c = model.get_weights()
    hidden = np.maximum(x @ w + b, 0)
    logits = hidden @ v + c
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    error = (chances - np.eye(CLASSES)[y]) / len(y)
    back = (error @ v.T) * (hidden > 0)
    gradients = [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
    return {
        "loss": -np.log(chances[np.arange(len(y)), y]).mean(),
        "accuracy": (chances.argmax(1) == y).mean(),
        "gradient_norm": np.sqrt(sum((gradient**2).sum() for gradient in gradients)),
    }


@pytest.mark.parametrize(
    ("scaled", "devices"),
    mostly_slow(
        [(False, 1), (False, 2), (True, 1), (True, 2)], [(False, 1), (True, 2)]
    ),
)
def test_results_are_of_exactly_this_update_and_the_weights_before_it(
    float64, devices, scaled
):
    strategy = on_devices(devices)
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.SGD(
            0.5, momentum=0.9, global_clipnorm=1e-2
        )  # clips: the norm is before it
        optimizer = (
            keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
        )
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    update = traced(
        Update(
            model,
            Objective(cross_entropy(), metrics=[accuracy]),
            optimizer,
            24,
            strategy=strategy,
        )
    )
    for x, y in batches(6):
        expected = by_hand(model, x, y) | {"learning_rate": 0.5}
        got = {key: float(value) for key, value in update(x, y).items()}
        assert got == pytest.approx(expected, rel=EXACT)
    assert int(optimizer.iterations.numpy()) == 6


class Outputs(losses.Loss):
    """The outputs, times a factor: the gradient is the mean input times that factor, whatever the weights."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def call(self, y_true, y_pred):
        return self.factor * y_pred[:, 0]


def one_weight():
    return keras.Sequential(
        [keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )


@pytest.mark.parametrize(
    "schedule",
    [
        "cosine",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("constant", "exponential", "inverse_sqrt", "piecewise")
        ),
    ],
)
def test_the_learning_rate_is_the_one_used(precision, schedule):
    precision("float32")
    config = composed([f"schedule={schedule}", "optimizer=sgd"])
    horizon = 120
    model, optimizer = one_weight(), optimizers.build(resolve(config), horizon)[0]
    optimizer.build(model.trainable_variables)
    update = tf.function(Update(model, Outputs(), optimizer, 2).__call__)
    at = optimizers.build_schedule(config.schedule, horizon)
    ones, before = tf.ones((4, 1)), np.float32(0)
    for number in range(1, horizon + 1):
        rate = np.float32(update((ones, ones))["learning_rate"])
        expected = np.float32(at(number - 1) if callable(at) else at)
        # One unit in the last place; see tests/components/test_optimizer.py for the exponential.
        units = (
            2 + 1.5 * abs(np.log(expected / config.optimizer.learning_rate))
            if schedule == "exponential"
            else 1
        )
        assert abs(rate - expected) <= units * np.spacing(expected)
        after = model.get_weights()[0][0, 0]
        assert after == before - rate  # the gradient is 1
        before = after


@pytest.mark.parametrize(
    ("make", "devices"),
    [
        (lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.1), 1),
        (
            lambda rate: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(rate)
            ),
            2,
        ),
    ],
)
def test_a_rate_that_counts_its_calls_is_computed_once_an_update(
    float64, make, devices
):
    strategy = on_devices(devices)
    with strategy.scope():
        calls = tf.Variable(0.0, dtype=tf.float64)
        model, optimizer = one_weight(), make(lambda: 0.5 / calls.assign_add(1.0))
        optimizer.build(model.trainable_variables)
    ones = tf.ones((4, 1), tf.float64)
    update = tf.function(
        Update(model, Outputs(), optimizer, 2, strategy=strategy).__call__
    )
    optimizers.check(
        optimizer, model.trainable_variables
    )  # neither does it move what it cannot set back
    rates = [float(update((ones, ones))["learning_rate"]) for _ in range(3)]
    assert rates == [0.5, 0.25, 0.5 / 3]
    expected, weight = make(0.5), keras.Variable([[0.0]], dtype="float64")
    plain = getattr(expected, "inner_optimizer", expected)
    for rate in rates:
        plain.learning_rate = rate
        plain.apply([tf.ones((1, 1), tf.float64)], [weight])
    np.testing.assert_allclose(
        model.get_weights()[0], weight, rtol=1e-7
    )  # a rate in float32


@pytest.mark.slow
def test_a_model_is_traced_in_several_threads(precision):
    precision("float32")
    inputs = keras.Input((512,))
    hidden = layers.BatchNormalization()(
        layers.Dense(1024, "relu")(layers.Dropout(0.5)(inputs))
    )
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(512)(hidden)))
    batch = tf.ones((32, 512)), tf.ones((32, 1))
    updates = []
    for _ in range(8):
        optimizer = keras.optimizers.SGD(0.0)
        optimizer.build(model.trainable_variables)
        updates.append(
            Update(model, losses.MeanSquaredError(), optimizer, 16, same_noise=True)
        )
    signature = [tf.TensorSpec([None, *part.shape[1:]]) for part in batch]

    def traced(update):
        function = tf.function(
            lambda x, y: update((x, y)), input_signature=signature, autograph=False
        )
        graph = function.get_concrete_function().graph.as_graph_def()
        nodes = [
            *graph.node,
            *(node for inner in graph.library.function for node in inner.node_def),
        ]
        return Counter(node.op for node in nodes)

    with ThreadPoolExecutor(len(updates)) as pool:
        found = list(pool.map(traced, updates))
    assert all(each == found[0] for each in found)
    assert not any("call" in vars(layer) for layer in model.layers)


def test_a_loss_scale_keeps_gradients_that_float16_cannot_hold(precision):
    precision("mixed_float16")
    model, loss = one_weight(), Outputs(2.0**-26)  # float16 ends at 2⁻²⁴
    ones = tf.ones((8, 1))
    assert (
        float(accumulate_gradients(model, loss, (ones, ones), 4).gradients()[0][0, 0])
        == 0
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(2.0**10))
    optimizer.build(model.trainable_variables)
    results = tf.function(Update(model, loss, optimizer, 4).__call__)((ones, ones))
    assert model.get_weights()[0][0, 0] == -(2.0**-16)
    assert float(results["gradient_norm"]) == 2.0**-26


def test_a_loss_scale_holds_for_a_loss_of_many_elements(precision):
    """By the example, 2¹⁵ · 128 · 128 overflows float16; by the element, as `fit` has it, no update is skipped."""
    precision("mixed_float16")
    model = keras.Sequential([keras.Input((128, 128, 1)), layers.Conv2D(1, 1)])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    update = tf.function(
        Update(model, losses.MeanSquaredError(), optimizer, 4).__call__
    )
    update((tf.ones((8, 128, 128, 1)), tf.zeros((8, 128, 128, 1))))
    assert int(optimizer.iterations.numpy()) == 1


def test_a_loss_scale_skips_a_whole_update_that_is_not_finite(precision):
    precision("float32")
    model, optimizer = (
        one_weight(),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)),
    )
    optimizer.build(model.trainable_variables)
    update = tf.function(Update(model, Outputs(), optimizer, 2).__call__)
    ones = tf.ones((5, 1))
    one_bad = tf.concat([ones[:4], [[np.inf]]], 0)  # in the last micro-batch alone
    for x, weight, iterations, scale in (
        (one_bad, 0, 0, 2.0**14),
        (ones, -1, 1, 2.0**14),
    ):
        update((x, ones))
        assert float(model.get_weights()[0][0, 0]) == weight
        assert int(optimizer.iterations.numpy()) == iterations
        assert float(optimizer.dynamic_scale) == scale


@pytest.mark.parametrize(
    ("reduction", "devices"),
    mostly_slow(
        itertools.product(["sum_over_batch_size", "mean_with_sample_weight"], [1, 2]),
        [("sum_over_batch_size", 1), ("mean_with_sample_weight", 2)],
    ),
)
def test_evaluation_is_exact_over_a_ragged_split(float64, devices, reduction):
    strategy = on_devices(devices)
    with strategy.scope():
        model = network(kernel_regularizer=keras.regularizers.L2(0.1))
        model.add(layers.Dropout(0.5))  # at rest when evaluated
        accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    x, y = data(257)  # 128 + 128 + 1
    sample_weight = np.linspace(0, 3, len(y))
    split = tf.data.Dataset.from_tensor_slices((x, y, sample_weight)).batch(128)
    evaluate = Evaluator(
        Evaluation(model, Objective(loss, metrics=[accuracy]), 24, strategy=strategy),
        split,
    )
    outputs = model(x)
    expected = {
        "loss": float(loss(y, outputs, sample_weight) + sum(model.losses)),
        "accuracy": (np.argmax(outputs, 1) == y).mean(),
    }
    assert evaluate() == pytest.approx(expected, rel=EXACT)
    assert evaluate() == pytest.approx(
        expected, rel=EXACT
    )  # nothing is left over from the first time


PEAK = """
import ctypes
import keras, tensorflow as tf
from keras import layers
from pipeline.accumulation import Update

# M_MMAP_THRESHOLD: larger buffers go back to the system when they are freed, so what is resident is what is used.
ctypes.CDLL(None).mallopt(-3, 1_000_000)
tf.config.set_visible_devices([], "GPU")
model = keras.Sequential([keras.Input((8,)), layers.Reshape((1, 8)), layers.UpSampling1D(1 << 13)])
for _ in range(16):
    model.add(layers.Dense(8, "tanh"))  # 32 examples give (32, 8192, 8) floats: 8 MiB
model.add(layers.GlobalAveragePooling1D())
model.add(layers.Dense(1))
optimizer = keras.optimizers.SGD()
optimizer.build(model.trainable_variables)

def updates(micro_batch_size):
    update = Update(model, keras.losses.MeanSquaredError(), optimizer, micro_batch_size)
    signature = tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1))
    return tf.function(lambda x, y: update((x, y)), input_signature=signature)

def peak(update, examples):
    update(tf.ones((examples, 8)), tf.ones((examples, 1)))
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(line.split()[1])

accumulated = updates(32)
for factor in (1, 4, 16):  # the high-water mark only rises: one process shows what each factor adds
    peak(accumulated, 32 * factor)
peak(updates(128), 128)
"""


def test_peak_memory_does_not_grow_with_the_factor():
    process = python("-c", PEAK, cwd=ROOT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    one, four, sixteen, large = map(int, out.split())
    # The threads' order decides whether one more buffer of 8 MiB is alive at the peak: 0.9% of 900 MiB.
    assert four < 1.02 * one
    assert sixteen < 1.02 * one
    assert (
        large > 1.3 * one
    )  # what accumulating saves: the activations of four micro-batches at once


def test_dir_lists_what_is_public():
    assert dir(accumulation) == sorted(accumulation.__all__)
    assert "update" in vars(accumulation)  # a module, which is not
