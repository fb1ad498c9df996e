"""The ready models fit any input shape and number of classes.

A model of the user's own is offered both.
"""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from omegaconf import OmegaConf

from pipeline.accumulation.internals import (
    batch_dependent_layers,
    normalizing_layers,
    trace_forward,
)
from pipeline.common.errors import ConfigError
from pipeline.components import added_losses, fitting, model
from pipeline.dataset import Data


def data(shape, classes=10):
    examples = tf.data.Dataset.from_tensors((np.zeros(shape, np.float32), 0))
    return Data(examples, None, classes)


def build(target, shape, classes=10, **arguments):
    return model.build(
        OmegaConf.create({"_target_": target} | arguments), data(shape, classes)
    )


def test_what_a_dataset_does_not_say_is_named_with_the_way_to_give_it():
    with pytest.raises(ConfigError) as error:
        build("pipeline.components.model.mlp", (4,), classes=None)
    assert str(error.value).startswith("model.classes must be given: return pipeline.")
    # Who predicts meets it, too.
    assert "Data(…, …, classes=10)" in str(error.value)
    assert "even for examples without labels" in str(error.value)


@pytest.mark.parametrize(
    ("target", "shape", "classes", "arguments", "parameters"),
    [
        # (64 + 1) · 128 + (128 + 1) · 128 + (128 + 1) · 10
        ("pipeline.components.model.mlp", (8, 8, 1), 10, {}, 26122),
        # (3 + 1) · 4 + (4 + 1) · 2
        ("pipeline.components.model.mlp", (3,), 2, {"hidden": [4]}, 26),
        # 3·3·1·2 + 2, then 4·4·2 → 7 classes: (32 + 1) · 7
        (
            "pipeline.components.model.cnn",
            (8, 8, 1),
            7,
            {"filters": [2], "hidden": []},
            251,
        ),
        # pools 5 → 2 → 1 and then no more: (27·4 + 4) + (36·4 + 4) + 2 · (36·4 + 4),
        # and (4 + 1) · 3
        (
            "pipeline.components.model.cnn",
            (5, 6, 3),
            3,
            {"filters": [4, 4, 4, 4], "hidden": []},
            571,
        ),
    ],
)
def test_the_ready_models_fit_any_image(target, shape, classes, arguments, parameters):
    network = build(target, shape, classes, **arguments)
    assert network.count_params() == parameters
    assert network(np.zeros((3, *shape), np.float32)).shape == (3, classes)


@pytest.mark.parametrize(
    "target", ["pipeline.components.model.mlp", "pipeline.components.model.cnn"]
)
def test_penalty_and_dropout_are_in_the_model(target):
    network = build(target, (8, 8, 1), hidden=[4], l2=0.5, dropout=0.25)
    penalty = 0.0
    for weight in network.trainable_variables:
        if weight.path.endswith("kernel"):
            penalty += 0.5 * np.square(weight.numpy()).sum()
    assert float(sum(network.losses)) == pytest.approx(penalty, rel=1e-5)  # float32
    (dropout,) = layers_of(network, layers.Dropout)
    assert dropout.rate == 0.25


def layers_of(network, kind):
    return [layer for layer in network.layers if isinstance(layer, kind)]


def test_logits_are_in_full_precision_under_a_mixed_policy(precision):
    precision("mixed_bfloat16")
    network = build("pipeline.components.model.mlp", (4,))
    dtypes = [layer.compute_dtype for layer in layers_of(network, layers.Dense)]
    assert dtypes == ["bfloat16", "bfloat16", "float32"]


def own(classes: int, width: int = 3) -> keras.Model:
    """A model such as a user brings.

    It takes the number of classes and leaves the shape of the input to Keras.
    """
    normed = [
        layers.Dense(width),
        layers.BatchNormalization(name="norm"),
        layers.Dropout(0.1),
        layers.Dense(classes),
    ]
    return keras.Sequential([keras.Input((4,)), keras.Sequential(normed)])


def test_a_model_of_the_users_own_is_offered_what_it_asks_for():
    network = build(f"{__name__}.own", (4,), classes=6)
    assert network.output_shape == (None, 6)
    wider = build(f"{__name__}.own", (4,), classes=6, width=5)
    assert wider.count_params() > network.count_params()


class Counting(layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="seen"
        )

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1.0)
        return x


def spectral() -> keras.Model:
    parts = [
        layers.SpectralNormalization(layers.Dense(3), name="spectral"),
        Counting(name="counting"),
    ]
    return keras.Sequential(
        [keras.Input((4,)), *parts, layers.Dropout(0.1), layers.GaussianNoise(0.1)]
    )


def frozen() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), layers.BatchNormalization(trainable=False), layers.Dense(2)]
    )


class OwnNorm(layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask)


def subclassed() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), OwnNorm(name="own"), layers.BatchNormalization(name="norm")]
    )


@pytest.mark.parametrize(
    ("target", "names", "unheld"),
    [
        (f"{__name__}.own", ["norm"], []),
        (f"{__name__}.subclassed", ["norm", "own"], ["own"]),
        (f"{__name__}.spectral", ["counting", "spectral"], ["counting", "spectral"]),
        (f"{__name__}.frozen", [], []),
        ("pipeline.components.model.mlp", [], []),
    ],
)
def test_layers_that_assign_state_depend_on_the_cut(target, names, unheld):
    network = build(target, (4,))
    values_before = [variable.numpy() for variable in network.variables]
    seen = trace_forward(network, np.ones((2, 4), np.float32), same_noise=False)
    assert batch_dependent_layers(network, seen) == names
    # The others move once an update.
    held_back = normalizing_layers(network)
    assert batch_dependent_layers(network, seen, held_back) == unheld
    for variable, before in zip(network.variables, values_before, strict=True):
        np.testing.assert_array_equal(variable, before)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return {}


class OwnMetrics(keras.Sequential):
    def compute_metrics(self, *arguments):
        return {}


class OwnLoss(keras.Sequential):
    def compute_loss(self, *arguments, **options):
        return 0.0


def synchronized() -> keras.Model:
    return keras.Sequential(
        [keras.Input((4,)), layers.BatchNormalization(synchronized=True, name="norm")]
    )


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"_target_": "builtins.dict"},
            "model._target_ must return a keras.Model. Received: 'dict'.",
        ),
        (
            {"_target_": "pipeline.components.model.no_such"},
            "model._target_ must name something that exists",
        ),
        (
            {"_target_": "pipeline.components.model.cnn"},
            "input_shape must be (height, width, channels). Received: (4,)",
        ),
        (
            {"_target_": "pipeline.components.model.mlp", "depth": 3},
            "model.depth must be an argument of pipeline.components.model.mlp",
        ),
        (
            {"_target_": f"{__name__}.OwnStep"},
            "model must not define train_step, which is never called: use add_loss",
        ),
        (
            {"_target_": f"{__name__}.OwnMetrics"},
            "model must not define compute_metrics, which is never called",
        ),
        ({"_target_": f"{__name__}.OwnLoss"}, "model must not define compute_loss"),
        (
            {"_target_": f"{__name__}.synchronized"},
            "model must have no BatchNormalization(synchronized=True), because Tensor",
        ),
    ],
)
def test_what_is_no_model_is_rejected(node, message):
    with pytest.raises(ConfigError) as error:
        model.build(OmegaConf.create(node), data((4,)))
    assert message in str(error.value)


class Adding(layers.Layer):
    """Adds a function of its inputs to the loss."""

    def __init__(self, function, name):
        super().__init__(name=name)
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


def adding_mean(name="mean"):
    return Adding(lambda x: 1e-3 * keras.ops.mean(x), name)


def adding_sum(name="sum"):
    return Adding(lambda x: keras.ops.sum(x * x), name)


def adding_values(name="values"):
    return Adding(lambda x: keras.ops.sum(x, axis=-1), name)


def time_major(name="time"):
    first = layers.Lambda(lambda x: keras.ops.transpose(x[:, None], (1, 0, 2)))
    return keras.Sequential(
        [first, layers.Activation("linear", activity_regularizer="l2", name=name)]
    )


def both_ways(x, *middle, dtype=None):
    """What each rule gives for a model with these layers: lines, or the error."""
    stack = [
        layers.Dense(4, kernel_regularizer="l2"),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        *middle,
    ]
    network = keras.Sequential([keras.Input((3,)), *stack, layers.Dense(1)], name="net")
    policies = [layer.dtype_policy for layer in network.layers]
    answers = []
    for rule in ("mean", "sum"):
        network(x, training=False)
        try:
            answers.append(added_losses.check(network, x, rule))
        except ConfigError as error:
            answers.append(str(error))
    assert [layer.dtype_policy for layer in network.layers] == policies
    return answers


def test_what_layers_add_is_a_mean_or_a_sum_as_it_is_said_to_be():
    x = tf.random.stateless_normal((7, 3), [1, 2])
    assert both_ways(x) == [[], []]
    assert both_ways(x, adding_values()) == [[], []]
    key = "training.added_losses"
    mean = (
        f"{key} must be mean, since net/mean adds a mean over its batch. "
        "Received: 'sum'."
    )
    assert both_ways(x, adding_mean(), adding_values()) == [[], mean]
    for name, adding in (("net/sum", adding_sum()), ("time", time_major())):
        line = (
            f"{key} must be sum, since {name} adds a sum over its batch. "
            "Received: 'mean'."
        )
        assert both_ways(x, adding) == [line, []]

    by_mean, by_sum = both_ways(x, adding_sum(), adding_mean())
    assert (
        "must be sum, since net/sum adds a sum over its batch, while net/mean adds a "
        "mean: one of them has to change"
    ) in by_mean
    assert (
        "must be mean, since net/mean adds a mean over its batch, while net/sum adds a "
        "sum" in by_sum
    )

    root = Adding(lambda x: keras.ops.sqrt(keras.ops.mean(x * x)), "root")
    what = "losses that each micro-batch adds and that are neither a mean nor a sum"
    line = f"{what}: net/root"
    assert both_ways(x, root) == [[line], [line]]
    assert both_ways(x[:1], adding_sum()) == [[], []]  # one example cannot be cut


def test_the_chief_alone_runs_the_callbacks_that_write():
    places = {"filepath", "directory", "filename", "log_dir", "backup_dir", "root"}
    kinds = [kind for kind in vars(keras.callbacks).values() if inspect.isclass(kind)]
    writing = {
        kind.__name__
        for kind in kinds
        if places & inspect.signature(kind).parameters.keys()
    }
    assert writing == fitting.WRITING
