"""Losses of several examples at once, accumulated by gradient caching.

They equal those of Keras on the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import (
    AccumulatingModel,
    Evaluation,
    Update,
    accumulate_gradients,
)
from pipeline.accumulation.internals import (
    Objective,
    draw_noise_seeds,
    examples_in,
    noise_by_position,
    noisy_layers,
    slice_specs,
)
from tests.accumulation.replicas import strategy_on
from tests.accumulation.tables import table
from tests.parameters import mostly_slow
from tests.running import ROOT, python

# As in test_same_noise.py: 1e-15 an update, which three updates at these rates hardly
# amplify.
EXACT = 1e-12
FACTOR = 8
SIZES = (24, 21, 9)  # the last micro-batch is shorter, and some are missing


class InfoNCE(losses.Loss):
    """Cross-entropy of each pair among all pairs of the batch, of (batch, 2, width).

    From van den Oord et al., 2018.
    """

    def call(self, y_true, y_pred):
        left, right = tf.unstack(tf.math.l2_normalize(y_pred, -1), axis=1)
        logits = tf.matmul(left, right, transpose_b=True) / 0.2
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.range(tf.shape(left)[0]), logits
        )


class Decorrelated(losses.Loss):
    """The off-diagonal of the outputs' second moments, as in Barlow twins.

    It is one number for a batch.
    """

    def call(self, y_true, y_pred):
        examples = tf.cast(tf.shape(y_pred)[0], y_pred.dtype)
        moments = tf.matmul(y_pred, y_pred, transpose_a=True) / examples
        return tf.reduce_sum(tf.square(moments - tf.eye(4, dtype=y_pred.dtype)))


class Marked(Decorrelated):
    """Tells that it is of several examples at once."""

    couples_examples = True


class Neighbors(losses.Loss):
    """Each step's error against the mean of the batch.

    It is for masked steps and for logits on outputs.
    """

    def call(self, y_true, y_pred):
        mean = tf.reduce_mean(y_pred, 0, keepdims=True)
        return tf.reduce_mean(tf.square(y_pred - mean), -1)


class Counts(layers.Layer):
    """Updates a metric in its call."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x):
        self.seen.update_state(keras.ops.ones_like(x[:, 0]))
        return x


def tower(x):
    x = layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(x)
    return layers.Dense(4)(layers.GaussianNoise(0.1)(layers.Dropout(0.3)(x)))


def two_towers():
    left = keras.Input((6,))
    right = keras.Input((5,))
    return keras.Model([left, right], keras.ops.stack([tower(left), tower(right)], 1))


def embedding():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.UnitNormalization()(tower(inputs)))


def one_tower():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.ActivityRegularization(0.1)(tower(inputs)))


def two_outputs():
    inputs = keras.Input((6,))
    hidden = layers.Dropout(0.3)(inputs)
    classes = layers.Dense(4, "softmax")(hidden)
    near = layers.UnitNormalization()(tower(hidden))
    return keras.Model(inputs, {"classes": classes, "near": near})


def masked():
    tokens = keras.Input((5,), dtype="int64")
    hidden = layers.Embedding(4, 8, mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(4)(hidden))


def batch_of(size, kind, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(size, 6))
    y = random.integers(0, 4, size)
    sample_weight = random.uniform(0, 2, size)
    if kind == "weighted":
        return x, y, sample_weight
    if kind == "two towers":
        return (x, random.normal(size=(size, 5))), np.zeros(size)
    if kind == "two outputs":
        return x, {"classes": y, "near": y}
    if kind == "masked":
        return random.integers(0, 4, (size, 5)), np.zeros((size, 5, 1))
    return x, y


class Kind(NamedTuple):
    """A model and its loss."""

    model: Callable[[], keras.Model]
    loss: Callable[[], Any]


def losses_of_two_outputs():
    """Return two losses, one of them of an output that is a softmax.

    From a softmax Keras' cross-entropy takes the logits that it has left on the output.
    """
    return {"classes": "sparse_categorical_crossentropy", "near": losses.Circle()}


KINDS = {
    "two towers": Kind(two_towers, InfoNCE),
    "circle": Kind(embedding, losses.Circle),
    "weighted": Kind(embedding, losses.Circle),
    "scalar": Kind(one_tower, Decorrelated),
    "masked": Kind(masked, Neighbors),
    "two outputs": Kind(two_outputs, losses_of_two_outputs),
}
ACCUMULATED = {"same_noise": True, "loss_over": "effective_batch"}


def compiled(kind, devices=1):
    keras.utils.set_random_seed(0)
    with strategy_on(devices).scope():
        # Keras' Adam moves what has sparse rows in another way than what has dense
        # ones: see test_embeddings.py.
        if kind == "masked":
            optimizer = keras.optimizers.SGD(0.1)
        else:
            optimizer = keras.optimizers.Adam(0.01)
        model = KINDS[kind].model()
        model.compile(optimizer, KINDS[kind].loss())
        optimizer.build(model.trainable_variables)
    return model


def specs(kind):
    return slice_specs(tf.nest.map_structure(tf.convert_to_tensor, batch_of(2, kind)))


class Trained(NamedTuple):
    """The loss of each update, and the weights after the last one."""

    losses: list[float]
    weights: list[np.ndarray]


@functools.cache
def by_keras(kind, sizes=SIZES):
    """Train by the step of `train_on_batch`, with the noise of an update."""
    model = compiled(kind)
    noisy = noisy_layers(model, batch_of(1, kind)[0])

    def step(*batch):
        with noise_by_position(
            noisy, draw_noise_seeds(noisy), 0, examples_in(batch[0])
        ):
            return model.train_step(batch)["loss"]

    traced = tf.function(step, input_signature=specs(kind), autograph=False)
    values = []
    for size in sizes:
        model.reset_metrics()
        values.append(float(traced(*batch_of(size, kind))))
    return Trained(values, model.get_weights())


def accumulated(kind, sizes=SIZES, devices=1, loss_over="effective_batch"):
    """Train by updates in micro-batches."""
    model = compiled(kind, devices)
    update = Update(
        model,
        KINDS[kind].loss(),
        model.optimizer,
        -(-max(sizes) // FACTOR),
        strategy=model.distribute_strategy,
        same_noise=True,
        loss_over=loss_over,
    )

    def step(*batch):
        return update(batch)["loss"]

    traced = tf.function(step, input_signature=specs(kind), autograph=False)
    values = [float(traced(*batch_of(size, kind))) for size in sizes]
    return Trained(values, model.get_weights())


def largest_difference(weights, others):
    pairs = zip(weights, others, strict=True)
    return max(np.abs(value - other).max() for value, other in pairs)


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["two towers"]))
def test_an_accumulated_loss_equals_that_of_the_whole_batch(float64, kind):
    ours = accumulated(kind)
    theirs = by_keras(kind)
    assert ours.losses == pytest.approx(theirs.losses, rel=EXACT)
    assert largest_difference(ours.weights, theirs.weights) < EXACT


def test_a_loss_of_micro_batches_is_another_one(float64):
    ours = accumulated("two towers", loss_over="example")
    theirs = by_keras("two towers")
    assert largest_difference(ours.weights, theirs.weights) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two towers", "weighted"])
def test_replicas_gather_the_outputs(float64, kind):
    sizes = (24, 21, 1)  # the last one leaves a replica idle
    ours = accumulated(kind, sizes, devices=2)
    theirs = by_keras(kind, sizes)
    assert ours.losses == pytest.approx(theirs.losses, rel=EXACT)
    assert largest_difference(ours.weights, theirs.weights) < EXACT


def test_metrics_and_what_layers_count_are_those_of_one_pass(float64):
    counts = Counts()
    inputs = keras.Input((6,))
    hidden = layers.Dense(4)(counts(inputs))
    model = keras.Model(inputs, layers.UnitNormalization()(hidden))
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    label = keras.metrics.MeanMetricWrapper(
        lambda y, outputs: tf.cast(y, "float64"), name="label"
    )
    objective = Objective(
        losses.Circle(),
        metrics=[label],
        layer_metrics=[counts.seen, keras.metrics.Mean("mean")],
    )
    update = Update(model, objective, optimizer, 3, **ACCUMULATED)
    x, y = batch_of(21, "circle")
    results = tf.function(update, autograph=False)((x, y))
    assert float(results["seen"]) == 21
    assert float(results["label"]) == pytest.approx(y.mean(), rel=EXACT)


def test_an_evaluation_is_over_each_whole_batch(float64):
    model = compiled("circle")
    objective = Objective(losses.Circle(), loss_over="effective_batch")
    evaluate = tf.function(Evaluation(model, objective, 4), autograph=False)
    x, y = batch_of(21, "circle")
    value = float(evaluate((x, y)).mean_loss())
    assert value == pytest.approx(model.test_on_batch(x, y), rel=EXACT)


def accumulating(inner):
    return AccumulatingModel(inner, 3, loss_over="effective_batch")


@pytest.mark.slow
def test_fit_of_an_accumulating_model_equals_that_of_the_plain_one(float64):
    x, y = batch_of(44, "circle")

    def inner():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        return keras.Model(inputs, layers.UnitNormalization()(layers.Dense(4)(inputs)))

    def fitted(model):
        model.compile(keras.optimizers.Adam(0.01), "circle")
        options = {"batch_size": 24, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, **options).history
        return Trained(history["loss"], model.get_weights())

    ours = fitted(accumulating(inner()))
    theirs = fitted(inner())
    assert ours.losses == pytest.approx(theirs.losses, rel=EXACT)
    assert largest_difference(ours.weights, theirs.weights) < EXACT
    assert accumulating(two_towers()).get_config()["loss_over"] == "effective_batch"


class Small(losses.Loss):
    """Its gradient is 2⁻²⁶."""

    def call(self, y_true, y_pred):
        return 2.0**-26 * tf.reduce_sum(y_pred, -1)


def test_a_loss_scale_scales_what_goes_through_the_outputs(precision):
    """A gradient of 2⁻²⁶ is none in float16; of the scaled loss it is."""
    precision("mixed_float16")
    output = layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), output])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=2.0**14
    )
    optimizer.build(model.trainable_variables)
    update = Update(model, Small(), optimizer, 2, loss_over="effective_batch")
    results = tf.function(update, autograph=False)((tf.ones((4, 1)), tf.ones((4, 1))))
    assert float(results["gradient_norm"]) == 2.0**-26


def normalized():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(4)(layers.BatchNormalization()(inputs)))


def spectral():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.SpectralNormalization(layers.Dense(4))(inputs))


def frozen():
    model = normalized()
    model.layers[1].trainable = False
    return model


def updated(model, loss=None, batch=None, **options):
    """Return the results of an update over the effective batch."""
    if loss is None:
        loss = Decorrelated()
    if batch is None:
        batch = batch_of(6, "circle")
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    options = {"loss_over": "effective_batch", **options}
    update = Update(model, loss, optimizer, 2, **options)
    return tf.function(update, autograph=False)(batch)


def outside_of_an_update():
    objective = Objective(Decorrelated(), loss_over="effective_batch")
    return accumulate_gradients(frozen(), objective, batch_of(6, "circle"), 2)


class Refused(NamedTuple):
    """What cannot be computed in two passes, and the beginning of its error."""

    compute: Callable[[], Any]
    message: str


STATE = (
    "loss_over must be example for layers that update their state in training, "
    "such as BatchNormalization. Received: "
)
REFUSED = {
    "normalised": Refused(lambda: updated(normalized()), STATE + "batch_normalization"),
    "spectral": Refused(lambda: updated(spectral()), STATE + "spectral_normalization"),
    "noise": Refused(
        lambda: updated(one_tower()),
        "same_noise must be True if loss_over is effective_batch, and layers must be "
        "able to draw noise for each example, because both passes over the batch need "
        "the same noise. Received: dropout",
    ),
    "two modes": Refused(
        lambda: updated(two_outputs(), loss_over={"classes": "example"}),
        "loss_over must be example or effective_batch, the same for all outputs. "
        "Received: {'classes': 'example'}",
    ),
    "misspelt": Refused(
        lambda: updated(embedding(), loss_over="batch"),
        "loss_over must be example or effective_batch. Received: 'batch'",
    ),
    "circle of micro-batches": Refused(
        lambda: updated(embedding(), losses.Circle(), loss_over="example"),
        "loss_over must be effective_batch for circle, a loss that compares examples. "
        "Received: 'example'",
    ),
    "marked": Refused(
        lambda: updated(one_tower(), Marked(), loss_over=None),
        "loss_over must be effective_batch for ",
    ),
    "measured noise": Refused(
        lambda: updated(embedding(), noise_every=2),
        "noise_every must be 0 if loss_over is effective_batch",
    ),
    "weighted scalar": Refused(
        lambda: updated(frozen(), batch=batch_of(6, "weighted")),
        "The loss must give one value per example, not a scalar, if there are sample "
        "weights. Received: decorrelated",
    ),
    "table": Refused(
        lambda: updated(table()),
        "loss_over must be example for outputs that are not dense tensors with the "
        "examples on axis 0. Received: an output of shape (6, 1)",
    ),
    "kernel": Refused(
        outside_of_an_update, "loss_over must be example for accumulate_gradients"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_in_two_passes_is_refused(float64, name):
    with pytest.raises(ValueError) as refused:
        REFUSED[name].compute()
    assert str(refused.value).startswith(REFUSED[name].message)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_frozen_statistics_are_no_state(float64):
    assert np.isfinite(float(updated(frozen())["loss"]))


PEAK = """
import ctypes
import keras, tensorflow as tf
from keras import layers
from pipeline.accumulation import Update

# As in test_update.py.
ctypes.CDLL(None).mallopt(-3, 1_000_000)
tf.config.set_visible_devices([], "GPU")
model = keras.Sequential(
    [keras.Input((8,)), layers.Reshape((1, 8)), layers.UpSampling1D(1 << 13)]
)
for _ in range(16):
    model.add(layers.Dense(8, "tanh"))  # 32 examples give (32, 8192, 8) floats: 8 MiB
model.add(layers.GlobalAveragePooling1D())
optimizer = keras.optimizers.SGD()
optimizer.build(model.trainable_variables)

class Spread(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return -tf.reduce_mean(tf.square(y_pred - tf.reduce_mean(y_pred, 0)), -1)

over_batch = Update(model, Spread(), optimizer, 32, loss_over="effective_batch")
signature = tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1))
update = tf.function(lambda x, y: over_batch((x, y)), input_signature=signature)
for factor in (8, 64):
    update(tf.ones((32 * factor, 8)), tf.ones((32 * factor, 1)))
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(line.split()[1])
"""


@pytest.mark.slow
def test_peak_memory_grows_by_the_outputs_alone():
    process = python("-c", PEAK, cwd=ROOT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    eight, sixty_four = map(int, out.split())
    # Outputs, labels and the loss's own tensors of 2,048 examples of 8 values are
    # 64 KiB each: nothing beside 1.1.
    assert sixty_four < 1.1 * eight
