"""One update of `pipeline.accumulation`, again and again, against plain Keras.

Plain Keras is a loop over large batches, which knows no micro-batches.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline import accumulation
from pipeline.accumulation import Evaluation, Update, accumulate_gradients
from pipeline.accumulation.internals import Batches, Objective
from pipeline.training.evaluator import SplitEvaluator
from tests.accumulation import reference
from tests.accumulation.one_weight import Outputs, one_weight
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow
from tests.running import ROOT, python

# One update differs by rounding alone, about 1e-15 (n · 2⁻⁵³ over n = 128 examples,
# cancelling in part); 100 updates add up to 1e-13 where the training does not amplify,
# which these rates see to. Ten times for that.
EXACT = 1e-12

FEATURES = 20
CLASSES = 5
# An epoch of batches of 128: a tail that two devices cannot share, then one that leaves
# one of them idle.
SIZES = (128, 128, 45, 1)
UPDATES = 100


def data(examples):
    x = np.random.default_rng(0).normal(size=(examples, FEATURES))
    x = x.astype(keras.config.floatx())
    y = np.argmax(x[:, :CLASSES] + x[:, CLASSES : 2 * CLASSES] ** 2, axis=1)
    return x, y


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


def traced(function):
    """Return one trace for batches of every size."""
    signature = (
        tf.TensorSpec((None, FEATURES), keras.config.floatx()),
        tf.TensorSpec((None,), tf.int64),
    )
    return tf.function(lambda x, y: function((x, y)), input_signature=signature)


def test_an_update_in_the_scope_of_its_strategy_is_refused():
    strategy = strategy_on(2)
    x, y = data(8)
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.SGD()
        optimizer.build(model.trainable_variables)
        update = Update(model, cross_entropy(), optimizer, 2, strategy=strategy)
        with pytest.raises(
            ValueError, match="must be called outside its strategy's scope"
        ):
            tf.function(update, autograph=False)((x, y))
    assert float(tf.function(update, autograph=False)((x, y))["loss"]) > 0


@pytest.mark.parametrize("value", ["never", 1, None])
@pytest.mark.parametrize("name", ["same_noise", "jit_compile"])
def test_a_mode_of_an_update_is_one_of_its_choices(name, value):
    model = network()
    message = f"^{name} must be True, False or auto. Received: {value!r}"
    with pytest.raises(ValueError, match=message):
        Update(model, "mse", keras.optimizers.SGD(), 2, **{name: value})
    if name == "jit_compile":
        with pytest.raises(ValueError, match=message):
            Evaluation(model, "mse", 2, jit_compile=value)


@pytest.mark.parametrize(
    ("devices", "jit_compile", "message"),
    [
        (2, False, "the strategy must have one replica for Batches. Received: 2"),
        (1, True, "jit_compile must be False or auto for Batches, .* Received: True"),
    ],
)
def test_batches_that_an_update_cannot_cut_are_refused(devices, jit_compile, message):
    strategy = strategy_on(devices)
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.SGD()
        optimizer.build(model.trainable_variables)
    update = Update(
        model,
        cross_entropy(),
        optimizer,
        2,
        strategy=strategy,
        jit_compile=jit_compile,
    )
    batches = Batches(data(8), tf.constant([5, 3]))
    with pytest.raises(ValueError, match=message):
        tf.function(lambda: update(batches), autograph=False)()


class Training(NamedTuple):
    """An optimizer with a schedule or a wrapper, and the options of a hidden layer."""

    optimizer: Callable[[], keras.optimizers.Optimizer]
    layer_options: dict[str, str]


def decaying():
    return keras.optimizers.schedules.ExponentialDecay(
        0.05, decay_steps=40, decay_rate=0.5
    )


# Norms of at most 2, which the first layer's reach.
CONSTRAINED = {"kernel_constraint": "max_norm"}
TRAINED = {
    "momentum": Training(
        lambda: keras.optimizers.SGD(decaying(), momentum=0.9, global_clipnorm=1.0), {}
    ),
    "adamw": Training(
        lambda: keras.optimizers.AdamW(
            decaying(), weight_decay=0.01, global_clipnorm=1.0
        ),
        {},
    ),
    "ema_constraint": Training(
        lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9), CONSTRAINED
    ),
    "loss_scale": Training(
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(decaying())),
        {},
    ),
    "loss_scale_factor": Training(
        lambda: keras.optimizers.SGD(decaying(), momentum=0.9, loss_scale_factor=64.0),
        {},
    ),
}


class Trajectory(NamedTuple):
    """The loss of each update, and the weights after the last one."""

    losses: list[float]
    weights: list[np.ndarray]


@functools.cache
def large_batch_trajectory(name):
    """Return the trajectory of the plain Keras loop."""
    training = TRAINED[name]
    model = network(**training.layer_options)
    loss = cross_entropy()
    # Loss scales are a matter of precision alone: in float64 the loop needs none.
    optimizer = training.optimizer()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    optimizer.loss_scale_factor = None
    optimizer.build(model.trainable_variables)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = reference.gradients_of(tape, value, model)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    step = traced(step)
    values = [float(step(*batch)) for batch in batches(UPDATES)]
    optimizer.finalize_variable_values(model.trainable_variables)
    return Trajectory(values, model.get_weights())


def accumulated_trajectory(name, micro_batch_size, devices):
    training = TRAINED[name]
    strategy = strategy_on(devices)
    with strategy.scope():
        model = network(**training.layer_options)
        optimizer = training.optimizer()
        optimizer.build(model.trainable_variables)
    update = traced(
        Update(model, cross_entropy(), optimizer, micro_batch_size, strategy=strategy)
    )
    values = [float(update(*batch)["loss"]) for batch in batches(UPDATES)]
    optimizer.finalize_variable_values(model.trainable_variables)
    return Trajectory(values, model.get_weights())


def trajectories():
    """Return each of `TRAINED` in micro-batches of 24, on one device and on two.

    Factors, kinds of models and devices are in test_matrix.py.
    """
    parameters = []
    for name in TRAINED:
        parameters.append(pytest.param(name, 24, 1))
        parameters.append(pytest.param(name, 24, 2, marks=pytest.mark.soak))
    return parameters


@pytest.mark.slow
@pytest.mark.parametrize(("name", "micro_batch_size", "devices"), trajectories())
def test_every_cut_trains_the_trajectory_of_the_large_batch(
    float64, name, micro_batch_size, devices
):
    ours = accumulated_trajectory(name, micro_batch_size, devices)
    theirs = large_batch_trajectory(name)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=EXACT)
    for weights, expected in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(
            weights, expected, rtol=0, atol=EXACT * np.abs(expected).max()
        )
    # It did train: every fourth batch is the same one.
    assert np.mean(theirs.losses[-8::4]) < 0.75 * theirs.losses[0]


def after_one_update(name, gradients_of):
    """Return the weights after one update from the same weights.

    `gradients_of(model, x, y)` returns the gradients.
    """
    model = network()
    optimizer = TRAINED[name].optimizer()
    optimizer.build(model.trainable_variables)
    ((x, y),) = batches(1)
    optimizer.apply(gradients_of(model, x, y), model.trainable_variables)
    return model.get_weights()


def large_batch_gradients(model, x, y):
    with tf.GradientTape() as tape:
        value = cross_entropy()(y, model(x, training=True))
    return reference.gradients_of(tape, value, model)


def mean_of_means(model, x, y):
    """Return a wrong gradient: the last micro-batch has 8 of the 128 examples."""
    means = []
    for start in range(0, len(y), 24):
        part = slice(start, start + 24)
        means.append(large_batch_gradients(model, x[part], y[part]))
    return [tf.add_n(parts) / len(means) for parts in zip(*means, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_one_update_in_float32_is_that_of_the_large_batch(precision, name):
    precision("float32")
    expected = after_one_update(name, large_batch_gradients)

    def deviation(weights):
        ratios = []
        for ours, theirs in zip(weights, expected, strict=True):
            ratios.append(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        return max(ratios)

    def gradients_in_pieces(size):
        def gradients_of(model, x, y):
            sums = accumulate_gradients(model, cross_entropy(), (x, y), size)
            return sums.gradients()

        return gradients_of

    bound = 1e-6  # some roundings of 2⁻²⁴ = 6e-8
    for size in (128, 64, 32, 16, 24):
        accumulated = after_one_update(name, gradients_in_pieces(size))
        assert deviation(accumulated) < bound, size
    assert deviation(after_one_update(name, mean_of_means)) > 1000 * bound


def by_hand(model, x, y):
    """Return loss, accuracy and the gradient's norm in NumPy.

    The model is dense, ReLU, dense: of weights w, biases b, weights v, biases c.
    """
    w, b, v, c = model.get_weights()
    hidden = np.maximum(x @ w + b, 0)
    logits = hidden @ v + c
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)

    error = (probabilities - np.eye(CLASSES)[y]) / len(y)
    hidden_error = np.where(hidden > 0, error @ v.T, 0)
    gradients = [
        x.T @ hidden_error,
        hidden_error.sum(0),
        hidden.T @ error,
        error.sum(0),
    ]
    return {
        "loss": -np.log(probabilities[np.arange(len(y)), y]).mean(),
        "accuracy": (probabilities.argmax(1) == y).mean(),
        "gradient_norm": np.sqrt(sum((gradient**2).sum() for gradient in gradients)),
    }


@pytest.mark.parametrize(
    ("scaled", "devices"),
    mostly_slow([(False, 1), (False, 2), (True, 1), (True, 2)], [(False, 1)]),
)
def test_results_are_of_exactly_this_update_and_the_weights_before_it(
    float64, devices, scaled
):
    strategy = strategy_on(devices)
    with strategy.scope():
        model = network()
        # It clips: the norm that is reported is the one before.
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=1e-2)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    objective = Objective(cross_entropy(), metrics=[accuracy])
    update = traced(Update(model, objective, optimizer, 24, strategy=strategy))
    for x, y in batches(6):
        expected = by_hand(model, x, y) | {"learning_rate": 0.5}
        results = {key: float(value) for key, value in update(x, y).items()}
        assert results == pytest.approx(expected, rel=EXACT)
    assert int(optimizer.iterations.numpy()) == 6


@pytest.mark.slow
def test_a_model_is_traced_in_several_threads(precision):
    precision("float32")
    inputs = keras.Input((512,))
    dense = layers.Dense(1024, "relu")
    hidden = layers.BatchNormalization()(dense(layers.Dropout(0.5)(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(512)(hidden)))
    updates = []
    for _ in range(8):
        optimizer = keras.optimizers.SGD(0.0)
        optimizer.build(model.trainable_variables)
        update = Update(
            model, losses.MeanSquaredError(), optimizer, 16, same_noise=True
        )
        updates.append(update)
    signature = [tf.TensorSpec([None, 512]), tf.TensorSpec([None, 1])]

    def operations(update):
        """Trace an update; count its operations, by kind."""
        function = tf.function(
            lambda x, y: update((x, y)), input_signature=signature, autograph=False
        )
        graph = function.get_concrete_function().graph.as_graph_def()
        counts = Counter(node.op for node in graph.node)
        for inner in graph.library.function:
            counts.update(node.op for node in inner.node_def)
        return counts

    with ThreadPoolExecutor(len(updates)) as pool:
        traces = list(pool.map(operations, updates))
    assert all(trace == traces[0] for trace in traces)
    assert not any("call" in vars(layer) for layer in model.layers)


def test_a_loss_scale_keeps_gradients_that_float16_cannot_hold(precision):
    precision("mixed_float16")
    model = one_weight()
    loss = Outputs(2.0**-26)  # float16 ends at 2⁻²⁴
    ones = tf.ones((8, 1))
    (unscaled,) = accumulate_gradients(model, loss, (ones, ones), 4).gradients()
    assert float(unscaled[0, 0]) == 0

    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(2.0**10))
    optimizer.build(model.trainable_variables)
    results = tf.function(Update(model, loss, optimizer, 4).__call__)((ones, ones))
    assert model.get_weights()[0][0, 0] == -(2.0**-16)
    assert float(results["gradient_norm"]) == 2.0**-26


def test_a_loss_scale_holds_for_a_loss_of_many_elements(precision):
    """The loss is scaled by the element, as in `fit`, so that no update is skipped.

    By the example, 2¹⁵ · 128 · 128 would overflow float16.
    """
    precision("mixed_float16")
    model = keras.Sequential([keras.Input((128, 128, 1)), layers.Conv2D(1, 1)])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    update = Update(model, losses.MeanSquaredError(), optimizer, 4)
    images = (8, 128, 128, 1)
    tf.function(update.__call__)((tf.ones(images), tf.zeros(images)))
    assert int(optimizer.iterations.numpy()) == 1


def test_a_loss_scale_skips_a_whole_update_that_is_not_finite(precision):
    precision("float32")
    model = one_weight()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(model.trainable_variables)
    update = tf.function(Update(model, Outputs(), optimizer, 2).__call__)

    def update_and_check(x, weight, iterations):
        update((x, ones))
        assert float(model.get_weights()[0][0, 0]) == weight
        assert int(optimizer.iterations.numpy()) == iterations
        assert float(optimizer.dynamic_scale) == 2.0**14

    ones = tf.ones((5, 1))
    one_bad = tf.concat([ones[:4], [[np.inf]]], 0)  # in the last micro-batch alone
    update_and_check(one_bad, weight=0, iterations=0)
    update_and_check(ones, weight=-1, iterations=1)


@pytest.mark.parametrize(
    ("reduction", "devices"),
    mostly_slow(
        itertools.product(["sum_over_batch_size", "mean_with_sample_weight"], [1, 2]),
        [("sum_over_batch_size", 1), ("mean_with_sample_weight", 2)],
    ),
)
def test_evaluation_is_exact_over_a_ragged_split(float64, devices, reduction):
    strategy = strategy_on(devices)
    with strategy.scope():
        model = network(kernel_regularizer=keras.regularizers.L2(0.1))
        model.add(layers.Dropout(0.5))  # at rest when evaluated
        accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    x, y = data(257)  # 128 + 128 + 1
    sample_weight = np.linspace(0, 3, len(y))
    split = tf.data.Dataset.from_tensor_slices((x, y, sample_weight)).batch(128)
    objective = Objective(loss, metrics=[accuracy])
    evaluation = Evaluation(model, objective, 24, strategy=strategy)
    evaluate = SplitEvaluator(evaluation, split)

    outputs = model(x)
    expected = {
        "loss": float(loss(y, outputs, sample_weight) + sum(model.losses)),
        "accuracy": (np.argmax(outputs, 1) == y).mean(),
    }
    assert evaluate() == pytest.approx(expected, rel=EXACT)
    # Nothing remains of the first time.
    assert evaluate() == pytest.approx(expected, rel=EXACT)


PEAK = """
import ctypes
import keras, tensorflow as tf
from keras import layers
from pipeline.accumulation import Update

# M_MMAP_THRESHOLD: larger buffers go back to the system when they are freed, so what is
# resident is what is used.
ctypes.CDLL(None).mallopt(-3, 1_000_000)
tf.config.set_visible_devices([], "GPU")
model = keras.Sequential(
    [keras.Input((8,)), layers.Reshape((1, 8)), layers.UpSampling1D(1 << 13)]
)
for _ in range(16):
    model.add(layers.Dense(8, "tanh"))  # 32 examples give (32, 8192, 8) floats: 8 MiB
model.add(layers.GlobalAveragePooling1D())
model.add(layers.Dense(1))
optimizer = keras.optimizers.SGD()
optimizer.build(model.trainable_variables)

def updates(micro_batch_size):
    update = Update(model, keras.losses.MeanSquaredError(), optimizer, micro_batch_size)
    signature = tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1))
    step = lambda x, y: update((x, y))
    return tf.function(step, input_signature=signature, autograph=False)

def peak(update, examples):
    update(tf.ones((examples, 8)), tf.ones((examples, 1)))
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(line.split()[1])

# The high-water mark only rises: one process shows what each factor adds.
accumulated = updates(32)
for factor in (1, 8):
    peak(accumulated, 32 * factor)
peak(updates(128), 128)
"""


def test_peak_memory_does_not_grow_with_the_factor():
    process = python("-c", PEAK, cwd=ROOT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    one, eight, large = map(int, out.split())
    # The threads' order decides whether one more buffer of 8 MiB is alive at the peak:
    # 0.9% of 900 MiB.
    assert eight < 1.02 * one
    # What accumulating saves: the activations of four micro-batches at once.
    assert large > 1.3 * one


def test_weights_of_lora_are_trained_in_float32_in_a_model_of_float64(float64):
    """Keras keeps them so; the norm is over weights of both precisions."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    adapted = layers.Dense(3)
    model = keras.Model(inputs, layers.Dense(2)(adapted(inputs)))
    adapted.enable_lora(2, b_initializer="ones")
    assert {variable.dtype for variable in model.trainable_variables} == {
        "float32",
        "float64",
    }
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    random = np.random.default_rng(0)
    x = tf.constant(random.normal(size=(10, 4)))
    y = tf.constant(random.integers(0, 2, 10))
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    weights = [variable.value for variable in model.trainable_variables]
    whole = tape.gradient(value, weights)
    squares = [np.sum(np.square(gradient, dtype="float64")) for gradient in whole]

    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(model.trainable_variables)
    before = [variable.numpy() for variable in model.trainable_variables]
    results = tf.function(Update(model, loss, optimizer, 3).__call__)((x, y))
    # By rounding of float32: 2⁻²⁴ = 6e-8.
    assert float(results["gradient_norm"]) == pytest.approx(
        np.sqrt(np.sum(squares)), rel=1e-6
    )
    trained = [variable.numpy() for variable in model.trainable_variables]
    for start, end, gradient in zip(before, trained, whole, strict=True):
        np.testing.assert_allclose(end, start - 0.5 * gradient.numpy(), atol=1e-6)


def test_dir_lists_what_is_public():
    assert dir(accumulation) == sorted(accumulation.__all__)
    assert "update" in vars(accumulation)  # a module, which is not
