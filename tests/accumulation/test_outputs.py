"""Several outputs, weights of losses and of classes, and models that add their loss themselves, against Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import Evaluation, Update, accumulate_gradients
from pipeline.accumulation.internals import Objective
from tests.parameters import mostly_slow

EXACT = 1e-12  # of float64: some 10 operations of 1e-16 for each of 10 examples
N = 10  # in fours: 4 + 4 + 2


pytestmark = pytest.mark.usefixtures("float64")


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def labels(*shape):
    return np.random.default_rng(1).integers(0, 3, size=shape)


def two_heads(wrap=list, masked=False, **arguments):
    """One input of six numbers, or tokens of which 0 is padding; a head of classes and one of a number."""
    if masked:
        inputs = keras.Input((5,), dtype="int64")
        hidden = layers.Embedding(4, 3, mask_zero=True)(inputs)
    else:
        inputs = keras.Input((6,))
        hidden = layers.Dense(5, "tanh", **arguments)(inputs)
    heads = [
        layers.Dense(3, name="kind")(hidden),
        layers.Dense(1, name="size", **arguments)(hidden),
    ]
    return keras.Model(
        inputs,
        heads if wrap is list else dict(zip(("kind", "size"), heads, strict=True)),
    )


def cross_entropy(**arguments):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def by_keras(model, batch, **compiled):
    """Loss, metrics and new weights of one `train_on_batch`, on a copy of the model."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile(keras.optimizers.SGD(0.5), **compiled)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    results = copy.train_on_batch(x, y, sample_weight, return_dict=True)
    return {name: float(value) for name, value in results.items()}, copy.get_weights()


def by_update(model, batch, size=4, devices=1, layer_metrics=(), loss=None, **given):
    strategy = (
        tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(devices)])
        if devices > 1
        else None
    )
    with (strategy or tf.distribute.get_strategy()).scope():
        copy = keras.models.clone_model(model) if devices > 1 else model
        copy.set_weights(model.get_weights())
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(copy.trainable_variables)
    objective = Objective(loss, **given, layer_metrics=layer_metrics)
    results = tf.function(Update(copy, objective, optimizer, size, strategy=strategy))(
        batch
    )
    return {name: float(value) for name, value in results.items()}, copy.get_weights()


def assert_equal(model, batch, size=4, devices=1, **given):
    """One update is Keras' `train_on_batch` on the whole batch: losses, metrics and weights."""
    compiled = {
        name: value() if callable(value) else value for name, value in given.items()
    }
    theirs, weights = by_keras(model, batch, **compiled)
    before = model.get_weights()
    ours, new = by_update(
        model,
        batch,
        size,
        devices,
        **{n: v() if callable(v) else v for n, v in given.items()},
    )
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=EXACT)
    assert max(np.abs(a - b).max() for a, b in zip(new, before, strict=True)) > 1e-3
    for a, b in zip(new, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=EXACT * max(1, np.abs(b).max()))
    return ours


X = random(N, 6)
Y = [labels(N), 5 * random(N, 1)]
WEIGHTS = [np.linspace(0.2, 3, N), np.linspace(2, 0.0, N)]
NAMED = dict(zip(("kind", "size"), Y, strict=True))


def metrics(**more):
    return {
        "kind": [
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            *more.get("kind", ()),
        ],
        "size": [keras.metrics.MeanAbsoluteError(name="error")],
    }


@pytest.mark.parametrize(
    ("wrap", "devices"),
    mostly_slow([(list, 1), (list, 2), (dict, 1)], [(list, 2), (dict, 1)]),
)
def test_everything_by_output(wrap, devices):
    batch = (
        (X, NAMED, dict(zip(NAMED, WEIGHTS, strict=True)))
        if wrap is dict
        else (X, Y, WEIGHTS)
    )
    ours = assert_equal(
        two_heads(wrap, kernel_regularizer=keras.regularizers.L2(0.03)),
        batch,
        devices=devices,
        loss=lambda: {
            "kind": cross_entropy(reduction="mean_with_sample_weight"),
            "size": losses.Huber(),
        },
        loss_weights={"kind": 0.3, "size": 2.0},
        metrics=metrics,
        weighted_metrics=lambda: {
            "kind": [
                keras.metrics.SparseCategoricalCrossentropy(
                    name="entropy", from_logits=True
                )
            ]
        },
    )
    assert {
        "kind_loss",
        "size_loss",
        "kind_accuracy",
        "size_error",
        "kind_entropy",
    } < ours.keys()


@pytest.mark.parametrize(
    ("loss", "batch"),
    [
        pytest.param(
            lambda: [cross_entropy(), losses.MeanSquaredError()],
            (X, Y),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: [None, losses.MeanSquaredError()], (X, Y), marks=pytest.mark.slow
        ),
        pytest.param(
            lambda: [None, losses.MeanSquaredError()],
            (X, Y[1:]),
            marks=pytest.mark.slow,
        ),
        (lambda: [cross_entropy(), losses.MeanSquaredError()], (X, Y, WEIGHTS[0])),
        (
            lambda: {
                "kind": cross_entropy(reduction="sum"),
                "size": losses.MeanSquaredError(),
            },
            (X, Y),
        ),
        pytest.param(
            lambda: {
                "kind": cross_entropy(reduction="sum"),
                "size": losses.Huber(reduction="sum"),
            },
            (X, Y),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_as_compile_takes_them(loss, batch):
    assert_equal(two_heads(), batch, loss=loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights",
    [
        (WEIGHTS[0], None),
        [None, WEIGHTS[0]],
        (None, None),
    ],
)
def test_an_output_without_sample_weights(weights):
    loss = lambda: [  # noqa: E731
        cross_entropy(reduction="mean_with_sample_weight"),
        losses.MeanSquaredError(),
    ]
    weighted = {"weighted_metrics": metrics}
    assert_equal(two_heads(), (X, Y, weights), loss=loss, **weighted)


@pytest.mark.parametrize("some", [False, True])
def test_one_loss_for_all_outputs_and_labels_for_some(some):
    loss = {"kind": None, "size": losses.MeanSquaredError()}
    inputs = keras.Input((6,))
    heads = {name: layers.Dense(1, name=name)(inputs) for name in ("kind", "size")}
    y = {"kind": random(N, 1, seed=3), "size": Y[1]}
    if not some:
        assert_equal(keras.Model(inputs, heads), (X, y), loss=losses.MeanSquaredError)
    else:
        whole = assert_equal(keras.Model(inputs, heads), (X, y), loss=lambda: loss)
        alone, _ = by_update(
            keras.Model(inputs, heads), (X, {"kind": None, "size": Y[1]}), loss=loss
        )
        assert alone.keys() == whole.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean_with_sample_weight"]
)
def test_each_output_has_its_mask_and_its_weights(reduction):
    """Unequal numbers of unmasked tokens in the micro-batches, so that each loss is divided by another sum."""
    tokens = np.random.default_rng(0).integers(0, 4, size=(N, 5))
    tokens[:6, 2:] = 0
    y = [labels(N, 5), random(N, 5, 1)]
    loss = lambda: [  # noqa: E731
        cross_entropy(reduction=reduction),
        losses.MeanSquaredError(reduction=reduction),
    ]
    model = two_heads(masked=True)
    assert_equal(
        model, (tokens, y), loss=loss, loss_weights=[0.5, 2.0], metrics=metrics
    )
    # The mean of what the micro-batches would have given is something else.
    parts = [
        by_keras(
            model, (tokens[i : i + 5], [part[i : i + 5] for part in y]), loss=loss()
        )[0]
        for i in (0, 5)
    ]
    whole = by_keras(model, (tokens, y), loss=loss())[0]
    assert abs(sum(part["loss"] for part in parts) / 2 / whole["loss"] - 1) > 1e-3


def test_losses_that_are_known_to_divide_share_one_gradient():
    """The memory: one sum of gradients with a regulariser and two outputs, two where masks divide both."""
    loss = {"kind": cross_entropy(), "size": losses.MeanSquaredError()}
    penalty = {"kernel_regularizer": keras.regularizers.L2(0.1)}
    sums = accumulate_gradients(two_heads(**penalty), loss, (X, Y), 4)
    assert len(sums.gradient_sums) == 1
    tokens, y = np.ones((N, 5), int), [labels(N, 5), random(N, 5, 1)]
    assert (
        len(
            accumulate_gradients(
                two_heads(masked=True), loss, (tokens, y), 4
            ).gradient_sums
        )
        == 2
    )


class AddsLoss(layers.Layer):
    """Learns from what it adds, and measures it."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)
        self.error = keras.metrics.Mean(name="reconstruction")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        made = self.dense(x)
        error = tf.reduce_mean(tf.square(made - x), -1)
        self.error.update_state(error)
        self.add_loss(tf.reduce_sum(error) / tf.cast(tf.shape(x)[0], x.dtype))
        return made


@pytest.mark.parametrize("batch", [X, (X,)])
def test_a_model_that_adds_its_loss_needs_no_labels(batch):
    layer = AddsLoss()
    model = keras.Sequential([keras.Input((6,)), layer])
    copied = AddsLoss()
    copy = keras.Sequential([keras.Input((6,)), copied])
    copy.set_weights(model.get_weights())
    copy.compile(keras.optimizers.SGD(0.5), loss=None)
    theirs = copy.train_on_batch(X, return_dict=True)
    ours, weights = by_update(model, batch, layer_metrics=[layer.error])
    assert {name: ours[name] for name in theirs} == pytest.approx(
        {n: float(v) for n, v in theirs.items()}, rel=EXACT
    )
    for a, b in zip(weights, copy.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=EXACT)


class Flattened(losses.Loss):
    """One value a token, and no axis of examples: as many as tokens, or those alone that are not 0."""

    def __init__(self, drop=False, **arguments):
        super().__init__(**arguments)
        self.drop = drop

    def call(self, y_true, y_pred):
        values = keras.losses.sparse_categorical_crossentropy(
            keras.ops.reshape(y_true, (-1,)),
            keras.ops.reshape(y_pred, (-1, 3)),
            from_logits=True,
        )
        return (
            tf.boolean_mask(values, tf.reshape(y_true, (-1,)) > 0)
            if self.drop
            else values
        )


@pytest.mark.slow
@pytest.mark.parametrize("drop", [False, True])
def test_a_loss_of_flattened_tokens_beside_others(drop):
    inputs = keras.Input((5,), dtype="int64")
    hidden = layers.Embedding(4, 3, embeddings_regularizer=keras.regularizers.L2(0.1))(
        inputs
    )
    model = keras.Model(
        inputs,
        [layers.Dense(3, name="kind")(hidden), layers.Dense(1, name="size")(hidden)],
    )
    y = [labels(N, 5), random(N, 5, 1)]
    assert_equal(
        model,
        (labels(N, 5), y),
        loss=lambda: [Flattened(drop), losses.MeanSquaredError()],
    )


def test_metrics_have_the_labels_of_their_own_output():
    inputs = keras.Input((6,))
    model = keras.Model(
        inputs, {name: layers.Dense(1, name=name)(inputs) for name in "abc"}
    )
    loss = {"a": losses.MeanSquaredError(), "b": None, "c": losses.MeanSquaredError()}
    metrics = {name: [keras.metrics.MeanSquaredError(name="mse")] for name in "ca"}
    results, _ = by_update(
        model, (X, (random(N, 1), 100 + random(N, 1))), loss=loss, metrics=metrics
    )
    assert results["a_mse"] == pytest.approx(results["a_loss"], rel=EXACT)
    assert results["c_mse"] == pytest.approx(results["c_loss"], rel=EXACT)


def test_a_metric_that_builds_its_state_in_its_first_update_is_reset_before_the_second():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    update = tf.function(
        Update(
            model,
            Objective(losses.MeanSquaredError(), metrics=[keras.metrics.R2Score()]),
            optimizer,
            4,
        )
    )
    for seed in range(3):
        x, y = random(N, 6, seed=seed), random(N, 1, seed=seed)
        alone = keras.metrics.R2Score()
        alone.update_state(y, model(x))
        assert float(update((x, y))["r2_score"]) == pytest.approx(
            float(alone.result()), rel=EXACT
        )


def test_an_evaluation_is_that_of_keras():
    model = two_heads()
    given = {
        "loss": [cross_entropy(), losses.MeanSquaredError()],
        "loss_weights": [0.5, 2.0],
    }
    model.compile(**given, metrics=metrics())
    theirs = model.evaluate(
        X, Y, sample_weight=WEIGHTS, batch_size=N, return_dict=True, verbose=0
    )
    evaluation = Evaluation(model, Objective(**given, metrics=metrics()), 4)
    sums = evaluation((X, Y, WEIGHTS))
    ours = {"loss": sums.mean_loss(), **sums.output_losses()}
    ours |= {name: metric.result() for name, metric in evaluation.measured.items()}
    assert {name: float(value) for name, value in ours.items()} == pytest.approx(
        theirs, rel=EXACT
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"loss": {"kind": losses.MeanSquaredError()}},
            "must name every output, with null for one without a loss",
        ),
        (
            {"loss": {"kind": None, "siez": None}},
            "must be named as an output, one of kind, size. Received: siez",
        ),
        ({"loss": [None]}, "must have 2 entries, one an output. Received: 1"),
        ({"loss_weights": 2.0}, "must be given for each of the outputs kind, size"),
        (
            {"batch": (X, Y, {"kind": np.ones(N)})},
            "there must be sample weights for each output. Missing: size",
        ),
        ({"batch": (X, {"kind": Y[0]})}, "there must be labels for the output size"),
        ({"batch": (X, Y, np.ones((N, 3)))}, "do not fit values of shape"),
        (
            {"metrics": lambda: [keras.metrics.MeanSquaredError()]},
            "must be given by the name of an output, one of kind, size",
        ),
        (
            {"metrics": lambda: {"siez": [keras.metrics.MeanSquaredError()]}},
            "must be of an output, one of kind, size",
        ),
    ],
)
def test_what_does_not_fit_the_outputs_is_refused(change, message):
    given = {
        "loss": [cross_entropy(), losses.MeanSquaredError()],
        "batch": (X, Y),
    } | change
    batch = given.pop("batch")
    with pytest.raises(ValueError) as refused:
        by_update(
            two_heads(),
            batch,
            **{
                name: value() if callable(value) else value
                for name, value in given.items()
            },
        )
    assert message in str(refused.value)
