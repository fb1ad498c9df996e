"""Several outputs, weights of losses and of classes, and `add_loss`, against Keras.

X are the inputs of a batch, Y the labels of its two outputs, a class and a number.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import Evaluation, Update, accumulate_gradients
from pipeline.accumulation.internals import Objective
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

EXACT = 1e-12  # of float64: some 10 operations of 1e-16 for each of 10 examples
EXAMPLES = 10  # in fours: 4 + 4 + 2


pytestmark = pytest.mark.usefixtures("float64")


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def labels(*shape):
    return np.random.default_rng(1).integers(0, 3, size=shape)


def two_heads(named=False, **arguments):
    """Return a model of six numbers, with a head of classes and one of a number.

    Its outputs are a list, or a dict if they are named.
    """
    inputs = keras.Input((6,))
    hidden = layers.Dense(5, "tanh", **arguments)(inputs)
    kind = layers.Dense(3, name="kind")(hidden)
    size = layers.Dense(1, name="size", **arguments)(hidden)
    if named:
        return keras.Model(inputs, {"kind": kind, "size": size})
    return keras.Model(inputs, [kind, size])


def two_heads_of_tokens(**arguments):
    """Return a model of tokens, with both heads at each token; 0 is padding."""
    inputs = keras.Input((5,), dtype="int64")
    hidden = layers.Embedding(4, 3, **arguments)(inputs)
    kind = layers.Dense(3, name="kind")(hidden)
    size = layers.Dense(1, name="size")(hidden)
    return keras.Model(inputs, [kind, size])


def cross_entropy(**arguments):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def by_keras(model, batch, **compiled):
    """Return results and new weights of one `train_on_batch`, on a copy of the model.

    The results are the loss and the metrics.
    """
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile(keras.optimizers.SGD(0.5), **compiled)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    results = copy.train_on_batch(x, y, sample_weight, return_dict=True)
    return as_floats(results), copy.get_weights()


def by_update(model, batch, devices=1, **options):
    """Return results and new weights of one `Update`, on a copy on several devices."""
    strategy = strategy_on(devices)
    with strategy.scope():
        copy = model
        if devices > 1:
            copy = keras.models.clone_model(model)
            copy.set_weights(model.get_weights())
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(copy.trainable_variables)
    loss = options.pop("loss", None)
    objective = Objective(loss, **options)
    update = Update(copy, objective, optimizer, 4, strategy=strategy)
    results = tf.function(update)(batch)
    return as_floats(results), copy.get_weights()


def as_floats(results):
    return {name: float(value) for name, value in results.items()}


def built(options):
    """Return the options, with what a function makes in place of the function."""
    values = {}
    for name, value in options.items():
        if callable(value):
            value = value()
        values[name] = value
    return values


def assert_equal(model, batch, devices=1, **options):
    """Check that one update is Keras' `train_on_batch` on the whole batch.

    Losses, metrics and weights are compared. Of the options those that are functions
    are called once for each way.
    """
    before = model.get_weights()
    theirs, expected_weights = by_keras(model, batch, **built(options))
    ours, weights = by_update(model, batch, devices, **built(options))
    compared = {name: ours[name] for name in theirs}
    assert compared == pytest.approx(theirs, rel=EXACT)
    assert largest_difference(weights, before) > 1e-3
    for value, expected in zip(weights, expected_weights, strict=True):
        atol = EXACT * max(1, np.abs(expected).max())
        np.testing.assert_allclose(value, expected, rtol=0, atol=atol)
    return ours


def largest_difference(weights, others):
    pairs = zip(weights, others, strict=True)
    return max(np.abs(value - other).max() for value, other in pairs)


X = random(EXAMPLES, 6)
Y = [labels(EXAMPLES), 5 * random(EXAMPLES, 1)]
WEIGHTS = [np.linspace(0.2, 3, EXAMPLES), np.linspace(2, 0.0, EXAMPLES)]
NAMED_Y = {"kind": Y[0], "size": Y[1]}
NAMED_WEIGHTS = {"kind": WEIGHTS[0], "size": WEIGHTS[1]}


def metrics():
    return {
        "kind": [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        "size": [keras.metrics.MeanAbsoluteError(name="error")],
    }


def entropy():
    metric = keras.metrics.SparseCategoricalCrossentropy("entropy", from_logits=True)
    return {"kind": [metric]}


@pytest.mark.parametrize(
    ("wrap", "devices"),
    mostly_slow([(list, 1), (list, 2), (dict, 1)], [(dict, 1)]),
)
def test_everything_by_output(wrap, devices):
    batch = (X, Y, WEIGHTS)
    if wrap is dict:
        batch = (X, NAMED_Y, NAMED_WEIGHTS)
    penalty = keras.regularizers.L2(0.03)
    ours = assert_equal(
        two_heads(named=wrap is dict, kernel_regularizer=penalty),
        batch,
        devices=devices,
        loss=lambda: {
            "kind": cross_entropy(reduction="mean_with_sample_weight"),
            "size": losses.Huber(),
        },
        loss_weights={"kind": 0.3, "size": 2.0},
        metrics=metrics,
        weighted_metrics=entropy,
    )
    losses_of_outputs = {"kind_loss", "size_loss"}
    metrics_of_outputs = {"kind_accuracy", "size_error", "kind_entropy"}
    assert losses_of_outputs | metrics_of_outputs < ours.keys()


def both_losses(**arguments):
    return [cross_entropy(**arguments), losses.MeanSquaredError(**arguments)]


def second_loss():
    return [None, losses.MeanSquaredError()]


def a_sum_and_a_mean():
    return {"kind": cross_entropy(reduction="sum"), "size": losses.MeanSquaredError()}


def sums():
    return {
        "kind": cross_entropy(reduction="sum"),
        "size": losses.Huber(reduction="sum"),
    }


@pytest.mark.parametrize(
    ("loss", "batch"),
    [
        pytest.param(both_losses, (X, Y), marks=pytest.mark.slow),
        pytest.param(second_loss, (X, Y), marks=pytest.mark.slow),
        pytest.param(second_loss, (X, Y[1:]), marks=pytest.mark.slow),
        pytest.param(both_losses, (X, Y, WEIGHTS[0]), marks=pytest.mark.slow),
        pytest.param(a_sum_and_a_mean, (X, Y), marks=pytest.mark.slow),
        pytest.param(sums, (X, Y), marks=pytest.mark.slow),
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
    def loss():
        return [
            cross_entropy(reduction="mean_with_sample_weight"),
            losses.MeanSquaredError(),
        ]

    assert_equal(two_heads(), (X, Y, weights), loss=loss, weighted_metrics=metrics)


def two_numbers():
    inputs = keras.Input((6,))
    kind = layers.Dense(1, name="kind")(inputs)
    size = layers.Dense(1, name="size")(inputs)
    return keras.Model(inputs, {"kind": kind, "size": size})


@pytest.mark.slow
@pytest.mark.parametrize("some", [False, True])
def test_one_loss_for_all_outputs_and_labels_for_some(some):
    y = {"kind": random(EXAMPLES, 1, seed=3), "size": Y[1]}
    if not some:
        assert_equal(two_numbers(), (X, y), loss=losses.MeanSquaredError)
        return

    loss = {"kind": None, "size": losses.MeanSquaredError()}
    with_all_labels = assert_equal(two_numbers(), (X, y), loss=loss)
    y["kind"] = None
    with_labels_for_some, _ = by_update(two_numbers(), (X, y), loss=loss)
    assert with_labels_for_some.keys() == with_all_labels.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean_with_sample_weight"]
)
def test_each_output_has_its_mask_and_its_weights(reduction):
    """Micro-batches have unequal numbers of tokens that are not masked.

    So each loss is divided by another sum.
    """
    tokens = np.random.default_rng(0).integers(0, 4, size=(EXAMPLES, 5))
    tokens[:6, 2:] = 0
    kind = labels(EXAMPLES, 5)
    size = random(EXAMPLES, 5, 1)

    def loss():
        return both_losses(reduction=reduction)

    model = two_heads_of_tokens(mask_zero=True)
    assert_equal(
        model,
        (tokens, [kind, size]),
        loss=loss,
        loss_weights=[0.5, 2.0],
        metrics=metrics,
    )

    # The control: the mean of what two micro-batches would have given is another loss.
    def loss_of(part):
        batch = (tokens[part], [kind[part], size[part]])
        return by_keras(model, batch, loss=loss())[0]["loss"]

    mean_of_means = (loss_of(slice(0, 5)) + loss_of(slice(5, 10))) / 2
    assert abs(mean_of_means / loss_of(slice(None)) - 1) > 1e-3


def test_losses_that_are_known_to_divide_share_one_gradient():
    """Memory is for one sum of gradients with a regularizer and two outputs.

    Where masks divide both, it is for two.
    """
    loss = {"kind": cross_entropy(), "size": losses.MeanSquaredError()}
    penalty = keras.regularizers.L2(0.1)
    totals = accumulate_gradients(
        two_heads(kernel_regularizer=penalty), loss, (X, Y), 4
    )
    assert len(totals.gradient_sums) == 1

    tokens = np.ones((EXAMPLES, 5), int)
    y = [labels(EXAMPLES, 5), random(EXAMPLES, 5, 1)]
    masked = two_heads_of_tokens(mask_zero=True)
    totals = accumulate_gradients(masked, loss, (tokens, y), 4)
    assert len(totals.gradient_sums) == 2


class AddsLoss(layers.Layer):
    """Learns from what it adds, and measures it."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)
        self.error = keras.metrics.Mean(name="reconstruction")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        outputs = self.dense(x)
        error = tf.reduce_mean(tf.square(outputs - x), -1)
        self.error.update_state(error)
        self.add_loss(tf.reduce_sum(error) / tf.cast(tf.shape(x)[0], x.dtype))
        return outputs


@pytest.mark.parametrize("batch", [X, pytest.param((X,), marks=pytest.mark.slow)])
def test_a_model_that_adds_its_loss_needs_no_labels(batch):
    layer = AddsLoss()
    model = keras.Sequential([keras.Input((6,)), layer])
    copy = keras.Sequential([keras.Input((6,)), AddsLoss()])
    copy.set_weights(model.get_weights())
    copy.compile(keras.optimizers.SGD(0.5), loss=None)
    theirs = as_floats(copy.train_on_batch(X, return_dict=True))

    ours, weights = by_update(model, batch, layer_metrics=[layer.error])
    compared = {name: ours[name] for name in theirs}
    assert compared == pytest.approx(theirs, rel=EXACT)
    for value, expected in zip(weights, copy.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=EXACT)


class Flattened(losses.Loss):
    """One value a token, and no axis of examples.

    There are as many as tokens, or those alone that are not 0.
    """

    def __init__(self, drop=False, **arguments):
        super().__init__(**arguments)
        self.drop = drop

    def call(self, y_true, y_pred):
        flat_labels = tf.reshape(y_true, (-1,))
        flat_logits = tf.reshape(y_pred, (-1, 3))
        values = keras.losses.sparse_categorical_crossentropy(
            flat_labels, flat_logits, from_logits=True
        )
        if self.drop:
            return tf.boolean_mask(values, flat_labels > 0)
        return values


@pytest.mark.slow
@pytest.mark.parametrize("drop", [False, True])
def test_a_loss_of_flattened_tokens_beside_others(drop):
    penalty = keras.regularizers.L2(0.1)
    y = [labels(EXAMPLES, 5), random(EXAMPLES, 5, 1)]
    assert_equal(
        two_heads_of_tokens(embeddings_regularizer=penalty),
        (labels(EXAMPLES, 5), y),
        loss=lambda: [Flattened(drop), losses.MeanSquaredError()],
    )


def test_metrics_have_the_labels_of_their_own_output():
    inputs = keras.Input((6,))
    outputs = {name: layers.Dense(1, name=name)(inputs) for name in "abc"}
    loss = {"a": losses.MeanSquaredError(), "b": None, "c": losses.MeanSquaredError()}
    metrics = {
        "c": [keras.metrics.MeanSquaredError(name="mse")],
        "a": [keras.metrics.MeanSquaredError(name="mse")],
    }
    y = (random(EXAMPLES, 1), 100 + random(EXAMPLES, 1))  # of a and c
    results, _ = by_update(
        keras.Model(inputs, outputs), (X, y), loss=loss, metrics=metrics
    )
    assert results["a_mse"] == pytest.approx(results["a_loss"], rel=EXACT)
    assert results["c_mse"] == pytest.approx(results["c_loss"], rel=EXACT)


def test_a_metric_that_builds_its_state_late_is_reset_before_the_second_update():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    objective = Objective(losses.MeanSquaredError(), metrics=[keras.metrics.R2Score()])
    update = tf.function(Update(model, objective, optimizer, 4))
    for seed in range(3):
        x = random(EXAMPLES, 6, seed=seed)
        y = random(EXAMPLES, 1, seed=seed)
        expected = keras.metrics.R2Score()
        expected.update_state(y, model(x))
        score = float(update((x, y))["r2_score"])
        assert score == pytest.approx(float(expected.result()), rel=EXACT)


def test_an_evaluation_is_that_of_keras():
    model = two_heads()
    options = {"loss": both_losses(), "loss_weights": [0.5, 2.0]}
    model.compile(**options, metrics=metrics())
    theirs = model.evaluate(
        X, Y, sample_weight=WEIGHTS, batch_size=EXAMPLES, return_dict=True, verbose=0
    )

    evaluation = Evaluation(model, Objective(**options, metrics=metrics()), 4)
    totals = evaluation((X, Y, WEIGHTS))
    ours = {"loss": totals.mean_loss(), **totals.output_losses()}
    for name, metric in evaluation.measured.items():
        ours[name] = metric.result()
    assert as_floats(ours) == pytest.approx(theirs, rel=EXACT)


def one_metric():
    return [keras.metrics.MeanSquaredError()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"loss": {"kind": losses.MeanSquaredError()}},
            "loss must name every output, with null for one without a loss",
        ),
        (
            {"loss": {"kind": None, "siez": None}},
            "an entry of loss must have the name of an output, one of kind, size. "
            "Received: siez",
        ),
        ({"loss": [None]}, "loss must have 2 entries, one per output. Received: 1"),
        (
            {"loss_weights": 2.0},
            "loss_weights must be given for each of the outputs kind, size",
        ),
        (
            {"batch": (X, Y[0])},
            "labels must be given for each of the outputs kind, size",
        ),
        (
            {"batch": (X, Y, {"kind": np.ones(EXAMPLES)})},
            "there must be sample weights for each output. Missing: size",
        ),
        ({"batch": (X, {"kind": Y[0]})}, "there must be labels for the output size"),
        (
            {"batch": (X, Y, np.ones((EXAMPLES, 3)))},
            "sample weights of shape (None, 3) do not fit values of shape (None,)",
        ),
        (
            {"metrics": one_metric},
            "metrics must be given by output name, one of kind, size",
        ),
        (
            {"metrics": lambda: {"siez": one_metric()}},
            "metrics must belong to an output, one of kind, size",
        ),
    ],
)
def test_what_does_not_fit_the_outputs_is_refused(change, message):
    arguments = {"loss": both_losses(), "batch": (X, Y)}
    arguments |= built(change)
    batch = arguments.pop("batch")
    with pytest.raises(ValueError) as refused:
        by_update(two_heads(), batch, **arguments)
    assert message in str(refused.value)
