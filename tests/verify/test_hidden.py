"""Models that break equivalence in a hidden way, and models that only look so.

`verify` has to find the first ones, and to name what is at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from pipeline.accumulation import Update
from pipeline.accumulation.internals import Objective
from pipeline.verify import engine
from pipeline.verify.layers import culprit, without_noise
from tests.parameters import mostly_slow

pytestmark = pytest.mark.usefixtures("float64")

EXAMPLES = 12  # of an update
MICRO = 5  # 5 + 5 + 2


class Own(layers.Layer):
    """A layer of one function of its input, and of itself."""

    def __init__(self, function: Callable, start: float | None = None, name="own"):
        super().__init__(name=name)
        self.function = function
        self.start = start

    def build(self, shape):
        if self.start is not None:
            self.kept = self.add_weight(
                shape=(),
                initializer=keras.initializers.Constant(self.start),
                trainable=False,
            )

    def call(self, x):
        if self.function.__code__.co_argcount > 1:
            output = self.function(x, self)
        else:
            output = self.function(x)
        return x if output is None else output


class Gated(layers.Layer):
    """Adds what depends on the batch behind two closed gates: no gradient shows it."""

    def build(self, shape):
        self.gates = [
            self.add_weight(shape=(), initializer="zeros", name=f"gate_{i}")
            for i in range(2)
        ]

    def call(self, x):
        return x + self.gates[0] * self.gates[1] * (x - ops.mean(x, axis=0))


class ClippedWeight(layers.Layer):
    """A kernel whose gradient is clipped to a norm that it exceeds."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")

    def call(self, x):
        clipped = with_gradient(lambda upstream: tf.clip_by_norm(upstream, 1e-3))
        return ops.matmul(x, clipped(tf.identity(self.kernel.value)))


class Noisy(layers.Layer):
    """Draws, with a `rate` that is no amount of noise."""

    def __init__(self):
        super().__init__(name="noisy")
        self.rate = 2.0
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x):
        shape = ops.shape(x)
        noise = keras.random.normal(shape, dtype=x.dtype, seed=self.seed_generator)
        return x + noise / self.rate


class Counting(layers.Layer):
    """A TensorFlow variable of its own, which counts calls or examples."""

    def __init__(self, amount: Callable):
        super().__init__(name="counting")
        self.amount = amount
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False)

    def call(self, x):
        self.count.assign_add(tf.cast(self.amount(x), tf.int64))
        return x


class OwnLoss(keras.losses.Loss):
    def __init__(self, function):
        super().__init__(name="own_loss")
        self.function = function

    def call(self, y_true, y_pred):
        return self.function(y_true, y_pred)


class Last(keras.metrics.Metric):
    """The mean error of the last call alone."""

    def __init__(self):
        super().__init__(name="last")
        self.value = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.mean(ops.abs(y_true - y_pred)))

    def result(self):
        return ops.convert_to_tensor(self.value)


def with_gradient(backward):
    """Return the identity with a backward pass of its own."""
    identity = tf.custom_gradient(lambda x: (tf.identity(x), backward))
    return lambda x: identity(x)


def kept_mean(x, layer):
    layer.kept.assign(0.9 * layer.kept + 0.1 * ops.mean(x))


def scaled_by_state(x, layer):
    layer.kept.assign(layer.kept * 0.5)
    return x * layer.kept


def centred_with_state(x, layer):
    return centred(scaled_by_state(x, layer))


def adds(function):
    def call(x, layer):
        layer.add_loss(function(x))

    return call


def straight_through(function):
    return lambda x: function(x) - ops.stop_gradient(function(x) - x)


def centred(x):
    return x - ops.mean(x, axis=0)


def time_major(x):
    return ops.transpose(x, (1, 0, 2))


STATE = (
    "its output depends on a state that it updates in every forward pass, so once per "
    "micro-batch"
)
OTHERS = "its output for an example depends on the other examples of the micro-batch"
GRADIENT = (
    "its gradient for an example depends on the other examples of the micro-batch"
)
NOISE = "it draws its own noise for every micro-batch"
MEAN = (
    "what it adds to the loss for a batch is not the mean of what it adds for each "
    "example"
)
LOSS = "its loss for an example depends on the other examples"


def own(function, start=None):
    return lambda: Own(function, start)


def by_mean_label(y, outputs):
    return ops.square(outputs[:, 0] - ops.mean(y))


def by_largest_error(y, outputs):
    errors = ops.abs(y - outputs)
    return errors[:, 0] / (1 + ops.max(errors))


def without_optimum(y, outputs):
    return (outputs * ops.sign(y))[:, 0]


# The layer in the middle, or the loss → the fault that is named.
BREAKING = {
    "centred": (own(centred), f"own (Own): {OTHERS}"),
    "batch normalisation": (
        lambda: layers.BatchNormalization(name="normal"),
        "normal (BatchNormalization): it normalizes with",
    ),
    "spectral normalisation": (
        lambda: layers.SpectralNormalization(layers.Dense(4, name="inside")),
        "inside (Dense): its output",
    ),
    "largest of the batch": (
        own(lambda x: x / (1 + ops.max(ops.abs(x)))),
        f"own (Own): {OTHERS}",
    ),
    "softmax over the batch": (
        own(lambda x: ops.softmax(x, axis=0)),
        f"own (Own): {OTHERS}",
    ),
    "sum up to here": (own(lambda x: ops.cumsum(x, axis=0)), f"own (Own): {OTHERS}"),
    "flipped": (
        own(lambda x: x + ops.flip(x, axis=0)[:, ::-1]),
        f"own (Own): {OTHERS}",
    ),
    "rolled": (own(lambda x: ops.roll(x, 1, axis=0)), f"own (Own): {OTHERS}"),
    "sorted": (own(lambda x: ops.sort(x, axis=0)), f"own (Own): {OTHERS}"),
    "attention over examples": (
        own(lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)),
        f"own (Own): {OTHERS}",
    ),
    "by the size of the batch": (
        own(lambda x: x / ops.cast(ops.shape(x)[0], x.dtype)),
        f"own (Own): {OTHERS}",
    ),
    "another branch for few": (
        own(lambda x: ops.where(ops.shape(x)[0] > 8, x, 2 * x)),
        f"own (Own): {OTHERS}",
    ),
    "sign of a sum": (
        own(lambda x: x * ops.sign(ops.sum(x[:1] * x))),
        f"own (Own): {OTHERS}",
    ),
    "noise of its own": (Noisy, f"noisy (Noisy): {NOISE}"),
    "adds a root of a mean": (
        own(adds(lambda x: ops.sqrt(ops.mean(ops.square(x))))),
        f"own: {MEAN}",
    ),
    "adds a variance": (
        own(adds(lambda x: ops.mean(ops.var(x, axis=0)))),
        f"own: {MEAN}",
    ),
    "adds a sum": (own(adds(lambda x: ops.sum(ops.square(x)))), f"own: {MEAN}"),
    "clips its gradient to a norm": (
        own(with_gradient(lambda upstream: tf.clip_by_norm(upstream, 1e-3))),
        f"own (Own): {GRADIENT}",
    ),
    "centres its gradient": (
        own(with_gradient(lambda upstream: upstream - tf.reduce_mean(upstream, 0))),
        f"own (Own): {GRADIENT}",
    ),
    "the mean straight through": (
        own(straight_through(centred)),
        f"own (Own): {GRADIENT}",
    ),
    "clips the gradient of its weights": (
        ClippedWeight,
        f"(ClippedWeight): {GRADIENT}",
    ),
    "behind closed gates": (Gated, f"(Gated): {OTHERS}"),
    "keeps a mean": (own(kept_mean, 0.0), "own/variable"),
    "counts its calls": (partial(Counting, lambda x: 1), "the state "),
    "scales by its state": (own(scaled_by_state, 1.0), f"own (Own): {STATE}"),
    "centred, with a state": (own(centred_with_state, 1.0), f"own (Own): {OTHERS}"),
    "loss by the mean label": (
        OwnLoss(by_mean_label),
        f"own_loss (OwnLoss): {LOSS}",
    ),
    "loss by the largest": (
        OwnLoss(by_largest_error),
        f"own_loss (OwnLoss): {LOSS}",
    ),
    "Dice over examples": (keras.losses.Dice(axis=(0,)), f"dice (Dice): {LOSS}"),
    "metric of the last": (Last, ""),
}

ONLY_LOOKING = {
    "layer normalisation": lambda: layers.LayerNormalization(),
    "group normalisation": lambda: layers.GroupNormalization(2),
    "frozen batch normalisation": lambda: layers.BatchNormalization(trainable=False),
    "centred over features": own(lambda x: x - ops.mean(x, axis=-1, keepdims=True)),
    "pooled over features": own(
        lambda x: x / (1 + ops.max(ops.abs(x), axis=-1, keepdims=True))
    ),
    "time first, and back": own(lambda x: time_major(time_major(x[:, None]))[:, 0]),
    "examples and time merged": own(
        lambda x: ops.reshape(ops.tanh(ops.reshape(x, (-1, 2))), (-1, 4))
    ),
    "straight through": own(straight_through(lambda x: ops.round(x))),
    "scales its gradient": own(with_gradient(lambda upstream: 3 * upstream)),
    "clips its gradient by element": own(
        with_gradient(lambda upstream: tf.clip_by_value(upstream, -1e-3, 1e-3))
    ),
    "dead": lambda: layers.Dense(
        4, "relu", bias_initializer=keras.initializers.Constant(-100.0)
    ),
    "dropout": lambda: layers.Dropout(0.5),
    "adds a mean": own(adds(lambda x: ops.mean(ops.square(x)))),
    "adds a value per example": own(adds(lambda x: ops.sum(ops.square(x), axis=-1))),
    "regularised": lambda: layers.Dense(
        4, kernel_regularizer="l2", activity_regularizer="l1"
    ),
    "counts examples": partial(Counting, lambda x: tf.shape(x)[0]),
    "a sum as the loss": keras.losses.MeanSquaredError(reduction="sum"),
    "Dice over outputs": keras.losses.Dice(axis=(1,)),
    "nothing is left to learn": OwnLoss(without_optimum),
}


def verified(part, added_losses="mean"):
    """Return the findings that differ, and the fault that is named.

    `part` is a loss, `Last`, or a function that makes the layer in the middle.
    """
    loss = keras.losses.MeanSquaredError()
    metrics = []
    middle = layers.Identity()
    if isinstance(part, keras.losses.Loss):
        loss = part
    elif part is Last:
        metrics = [Last()]
    else:
        middle = part()
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, "tanh"), middle, layers.Dense(1, "sigmoid")]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, metrics=metrics)
    optimizer.build(model.trainable_variables)
    objective = Objective(loss, metrics=metrics, added_losses=added_losses)
    update = Update(model, objective, optimizer, MICRO)

    # Each input is there twice, with two labels.
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES // 2, 6))
    y = np.tile([[1.0], [-1.0]], (EXAMPLES // 2, 1)) * 0.4
    batch = (np.repeat(x, 2, 0), y)

    before = [variable.numpy() for variable in model.variables]
    with without_noise(model):
        findings = first_differing(engine.compare(update, [batch], other_weights=True))
        fault = ""
        if findings:
            fault = culprit(model, update.objective, batch, MICRO)
    for variable, value in zip(model.variables, before, strict=True):
        assert np.array_equal(variable.numpy(), value)

    if not fault:
        states = [finding.what for finding in findings if finding.kind == "state"]
        if states:
            fault = f"the state {states[0]}"
    return findings, fault


def first_differing(comparisons):
    """Return the findings that differ of the first comparison that has any."""
    for findings in comparisons:
        differing = [finding for finding in findings if not finding.holds]
        if differing:
            return differing
    return []


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        BREAKING,
        ["the mean straight through"],
        ["keeps a mean", *list(BREAKING)[::3]],
    ),
)
def test_what_breaks_is_found_and_named(name):
    part, expected = BREAKING[name]
    findings, fault = verified(part)
    assert findings
    assert expected in fault


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ONLY_LOOKING, ["nothing is left to learn", *list(ONLY_LOOKING)[::3]], []
    ),
)
def test_what_only_looks_so_is_no_fault(name):
    assert verified(ONLY_LOOKING[name]) == ([], "")


@pytest.mark.slow
def test_a_sum_of_what_layers_add_is_no_fault_where_the_config_says_so():
    assert verified(BREAKING["adds a sum"][0], "sum") == ([], "")


@pytest.mark.slow
def test_a_dead_unit_is_no_difference_in_float32(precision):
    precision("float32")
    keras.utils.set_random_seed(0)
    dead = layers.Dense(4, "relu", bias_initializer=keras.initializers.Constant(-100))
    model = keras.Sequential([keras.Input((6,)), dead, layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    random = np.random.default_rng(0)
    batch = (
        random.normal(size=(8, 6)).astype("float32"),
        random.normal(size=(8, 1)).astype("float32"),
    )
    update = Update(model, keras.losses.MeanSquaredError(), optimizer, 3)
    assert first_differing(engine.compare(update, [batch])) == []
