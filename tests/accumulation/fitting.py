"""The cases of `test_model_fit.py`: models, data, and what `compile` takes.

X are the inputs of a batch, Y its labels, N is the number of its examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses

from tests.accumulation.replicas import strategy_on

# Of float64: some tens of updates of 1e-15 each, at rates that do not amplify.
EXACT = 1e-12


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def labels(*shape):
    return np.random.default_rng(1).integers(0, 3, size=shape)


def cross_entropy(**arguments):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def dense(**arguments):
    hidden = layers.Dense(8, "tanh", **arguments)
    return keras.Sequential([keras.Input((6,)), hidden, layers.Dense(3, **arguments)])


def probabilities():
    return keras.Sequential([dense(), layers.Softmax()])


def masked():
    tokens = keras.Input((5,), dtype="int64")
    hidden = layers.Embedding(7, 4, mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(3)(layers.Dense(8, "tanh")(hidden)))


def two_heads(named=False):
    """Return a model with two outputs, in a list or in a dict."""
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, "tanh")(inputs)
    kind = layers.Dense(3, name="kind")(hidden)
    size = layers.Dense(1, name="size")(hidden)
    if named:
        return keras.Model(inputs, {"kind": kind, "size": size})
    return keras.Model(inputs, [kind, size])


class Penalty(layers.Layer):
    """Adds a loss of the batch and measures it."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.size = keras.metrics.Mean(name="penalty")

    def call(self, x):
        squares = tf.reduce_mean(tf.square(x), -1)
        self.size.update_state(squares)
        self.add_loss(0.1 * tf.reduce_mean(squares))
        return x


class Late(keras.Model):
    """Has no weights before its first call."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, "tanh")
        self.out = layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))


class Measured(Late):
    """Has a metric itself, besides that of a layer."""

    def __init__(self):
        super().__init__()
        self.penalty = Penalty()
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, x):
        self.largest.update_state(tf.reduce_max(x, -1))
        return super().call(self.penalty(x))


def regularized():
    model = dense(kernel_regularizer=keras.regularizers.L2(0.03))
    return keras.Sequential([keras.Input((6,)), *model.layers, Penalty()])


def padded(examples):
    tokens = np.random.default_rng(2).integers(1, 7, size=(examples, 5))
    lengths = np.random.default_rng(3).integers(1, 6, size=(examples, 1))
    tokens[np.arange(5) >= lengths] = 0
    return tokens


N = 33  # by sixteen: 16, 16 and 1, which two devices cannot share
X = random(N, 6)
Y = labels(N)
WEIGHTS = np.linspace(0.2, 3, N)
SIZES = 3 * random(N, 1)  # labels of the second output


class Case(NamedTuple):
    """What is trained.

    Attributes:
        data: `(x, y)` or `(x, y, sample_weight)`.
        compiled: returns what `compile` takes, anew for each model.
    """

    model: Callable[[], keras.Model]
    data: tuple
    compiled: Callable[[], dict[str, Any]]


CASES = {
    "sample_weights": Case(
        dense,
        (X, Y, WEIGHTS),
        lambda: {
            "optimizer": keras.optimizers.Adam(0.01, clipnorm=0.5),
            "loss": cross_entropy(reduction="mean_with_sample_weight"),
            "metrics": ["accuracy"],
            "weighted_metrics": [
                "accuracy",
                keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
            ],
        },
    ),
    "names": Case(
        probabilities,
        (X, np.eye(3)[Y]),
        lambda: {
            "optimizer": "sgd",
            "loss": "crossentropy",
            "metrics": ["acc", "mse", keras.metrics.AUC(name="auc")],
        },
    ),
    "masked": Case(
        masked,
        (padded(N), padded(N) % 3),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.5),
            "loss": cross_entropy(),
            "metrics": ["accuracy"],
        },
    ),
    "regularised": Case(
        regularized,
        (X, Y),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
            "loss": cross_entropy(),
        },
    ),
    "built_late": Case(
        Late,
        (X, Y),
        lambda: {"optimizer": keras.optimizers.Adam(0.01), "loss": cross_entropy()},
    ),
    "own_metric": Case(
        Measured,
        (X, Y),
        lambda: {
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": cross_entropy(),
            "metrics": ["accuracy"],
        },
    ),
    "two_in_a_list": Case(
        two_heads,
        (X, [Y, SIZES]),
        lambda: {
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": [cross_entropy(), "mse"],
            "loss_weights": [0.3, 2.0],
            "metrics": [["accuracy"], ["mae"]],
        },
    ),
    "two_in_a_dict": Case(
        lambda: two_heads(named=True),
        (
            X,
            {"kind": Y, "size": SIZES},
            {"kind": WEIGHTS, "size": WEIGHTS[::-1].copy()},
        ),
        lambda: {
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": {"kind": cross_entropy(), "size": losses.Huber()},
            "metrics": {"size": "mae"},
            "weighted_metrics": {"kind": ["accuracy"], "size": ["mae"]},
        },
    ),
}


def build(make, devices=1):
    """Return a model that begins with the same weights each time."""
    with strategy_on(devices).scope():
        keras.utils.set_random_seed(0)
        return make()


class Fitted(NamedTuple):
    """What a `fit` leaves."""

    history: dict[str, list[float]]
    weights: list[np.ndarray]


def trained(
    model, compiled, data, *, epochs=3, steps_per_execution=1, jit_compile="auto", **fit
):
    """Fit the model in large batches that are not shuffled, of 16 if `fit` has no size.

    Args:
        compiled: returns what `compile` takes.
        data: a dataset of batches, or one batch of arrays that `fit` cuts.
        fit: further arguments of `fit`.
    """
    with model.distribute_strategy.scope():
        model.compile(
            **compiled(),
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
        )
    if not isinstance(data, tf.data.Dataset):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        fit = {"batch_size": 16, "shuffle": False, **fit}
        fit |= {"y": y, "sample_weight": sample_weight}
        data = x
    history = model.fit(data, epochs=epochs, verbose=0, **fit).history
    return Fitted(history, model.get_weights())


def assert_equal(ours, theirs, tolerance=EXACT):
    """Compare histories and weights."""
    assert ours.history.keys() == theirs.history.keys()
    for key, values in theirs.history.items():
        np.testing.assert_allclose(
            ours.history[key], values, rtol=tolerance, err_msg=key
        )
    assert_equal_weights(ours.weights, theirs.weights, tolerance)


def assert_equal_weights(weights, expected_weights, tolerance=EXACT):
    for value, expected in zip(weights, expected_weights, strict=True):
        atol = tolerance * max(1, np.abs(expected).max())
        np.testing.assert_allclose(value, expected, rtol=0, atol=atol)
