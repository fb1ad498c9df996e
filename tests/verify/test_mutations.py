"""What everyone who accumulates gets wrong, put into the kernel on purpose: `verify`'s engine finds each."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from pipeline.accumulation import Update, sums, update, weighting
from pipeline.verify import engine
from pipeline.verify.layers import culprit, without_noise

pytestmark = pytest.mark.usefixtures("float64")
TOKENS = np.random.default_rng(0).integers(1, 7, size=(12, 5))
TOKENS[:5, 2:] = 0
BATCH = (TOKENS, TOKENS % 3, np.linspace(0.2, 2, 12)[:, None] * np.ones((12, 5)))
TAIL = tuple(part[:5] for part in BATCH)


def updating(devices=1):
    """A model with a mask, sample weights, a regulariser, a metric and clipping, in fours."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(devices)]) if devices > 1 else None
    with (strategy or tf.distribute.get_strategy()).scope():
        hidden = layers.Embedding(7, 4, mask_zero=True)
        stack = [keras.Input((5,), dtype="int64"), hidden, layers.Dense(3, kernel_regularizer="l2")]
        model = keras.Sequential(stack)
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        optimizer = keras.optimizers.SGD(schedule, global_clipnorm=0.1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
        model.compile(optimizer, loss, metrics=metrics)
        optimizer.build(model.trainable_variables)
    return Update(model, loss, optimizer, 4, metrics=metrics, strategy=strategy)


def differing(made):
    return {found.kind for findings in engine.compare(made, [BATCH, TAIL]) for found in findings if not found.holds}


@pytest.mark.parametrize("devices", [1, 2])
def test_the_kernel_itself_is_exact(devices):
    assert differing(updating(devices)) == set()


def mean_of_means(patch):
    def means(*arguments):
        total, weight, _ = weighting.weighted_sum(*arguments)
        return weighting.WeightedSum(total / weight, tf.ones_like(weight), None)

    patch.setattr(sums, "weighted_sum", means)


def lost_tail(patch):
    whole = update.sum_over_micro_batches

    def without_tail(step, batch, size, *more):
        stop = update.examples_in(batch) // size * size
        return whole(step, tf.nest.map_structure(lambda leaf: leaf[:stop], batch), size, *more)

    patch.setattr(update, "sum_over_micro_batches", without_tail)


def schedule_by_micro_step(patch):
    call = Update.__call__

    def counting(self, batch):
        results = call(self, batch)
        self.optimizer.iterations.assign_add(2)
        return results

    patch.setattr(Update, "__call__", counting)


def clip_before_the_sum(patch):
    gradients = update._gradients

    def clipped(*arguments):
        return tuple(tf.clip_by_norm(g, 0.05) if tf.is_tensor(g) else g for g in gradients(*arguments))

    patch.setattr(update, "_gradients", clipped)


def divide_by_replicas(patch):
    means = sums.means
    patch.setattr(sums, "means", lambda *given: [gradient / 2 for gradient in means(*given)])


def dropped_mask(patch):
    patch.setattr(weighting, "mask_of", lambda nest: None)


def dropped_weights(patch):
    whole = sums.weighted_sum
    patch.setattr(sums, "weighted_sum", lambda loss, y, outputs, weight, known: whole(loss, y, outputs))


def doubled_regulariser(patch):
    whole = update.micro_batch_losses

    class Twice:
        def __init__(self, model):
            self.losses = 2 * model.losses

    patch.setattr(update, "micro_batch_losses", lambda model, *given: whole(Twice(model), *given))


def wrong_labels(patch):
    whole = update.update_metrics
    zeros = lambda y: {name: 0 * labels for name, labels in y.items()}  # noqa: E731
    patch.setattr(update, "update_metrics", lambda metrics, y, *more: whole(metrics, zeros(y), *more))


def stale_metric(patch):
    call = Update.__call__

    def not_reset(self, batch):
        for metric in self.measured.values():
            metric.reset_state = lambda: None
        try:
            return call(self, batch)
        finally:
            for metric in self.measured.values():
                del metric.reset_state

    patch.setattr(Update, "__call__", not_reset)


@pytest.mark.parametrize(
    ("mutation", "kinds"),
    [
        (mean_of_means, {"loss", "gradient"}),
        (lost_tail, {"loss", "gradient"}),
        (schedule_by_micro_step, {"count"}),
        (clip_before_the_sum, {"gradient"}),
        (divide_by_replicas, {"gradient"}),
        (dropped_mask, {"loss", "gradient"}),
        (dropped_weights, {"loss", "gradient"}),
        (doubled_regulariser, {"loss", "gradient"}),
        (stale_metric, {"metric"}),
        (wrong_labels, {"metric"}),
    ],
)
def test_a_mutation_is_found(monkeypatch, mutation, kinds):
    made = updating(2 if mutation is divide_by_replicas else 1)
    mutation(monkeypatch)
    assert kinds <= differing(made)
    x, y, weights = BATCH
    assert culprit(made.model, made.loss, (x, y, weights), 4) == "no layer and no loss, but the update itself"


class Centred(layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class Powered(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sqrt(keras.ops.mean(keras.ops.square(x))))
        return x


class Shared(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.square(y_pred[:, 0] - keras.ops.mean(y_true))


@pytest.mark.parametrize(
    ("layer", "loss", "named"),
    [
        (lambda: Centred(name="centred"), None, "centred (Centred): its output for an example depends on the other"),
        (
            lambda: layers.BatchNormalization(name="normal"),
            None,
            "normal (BatchNormalization): it normalises by",
        ),
        (lambda: Powered(name="powered"), None, "powered: what it adds to the loss is not the mean of what"),
        (lambda: layers.Identity(), Shared, "shared (Shared): its loss of an example depends on the others"),
    ],
)
def test_what_is_at_fault_is_named(layer, loss, named):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layer(), layers.Dense(1)])
    loss = loss() if loss else keras.losses.MeanSquaredError()
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    batch = (random.normal(size=(12, 6)), random.normal(size=(12, 1)))
    assert differing_in(model, loss, optimizer, batch)
    assert culprit(model, loss, batch, 4).startswith(named)


def differing_in(model, loss, optimizer, batch):
    (findings,) = engine.compare(Update(model, loss, optimizer, 4), [batch])
    return [found for found in findings if not found.holds]


def test_what_the_optimizer_scales_and_a_loss_in_float32_are_no_fault():
    """A scaled loss has scaled gradients on both sides; the bound is that of the coarsest precision."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    loss, optimizer = keras.losses.MeanSquaredError(dtype="float32"), keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    assert differing_in(model, loss, optimizer, (random.normal(size=(12, 6)), random.normal(size=(12, 1)))) == []


def test_noise_is_switched_off_and_on_again():
    model = keras.Sequential(
        [
            keras.Input((5, 6)),
            layers.LSTM(4, dropout=0.3),
            layers.Dropout(0.5),
            layers.GaussianNoise(0.1),
            layers.Dense(1),
        ]
    )
    loss, optimizer = keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    random = np.random.default_rng(0)
    batch = (random.normal(size=(12, 5, 6)), random.normal(size=(12, 1)))
    before = model.get_weights()
    with without_noise(model) as quiet:
        assert differing_in(model, loss, optimizer, batch) == []
    assert len(quiet) == 3
    assert differing_in(model, loss, optimizer, batch) != []
    assert culprit(model, loss, batch, 4).endswith("it draws its own noise for every micro-batch")
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
