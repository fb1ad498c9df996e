"""Losses of several examples at once, accumulated by gradient caching: equal to Keras on the whole batch."""

from __future__ import annotations

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
    drawn,
    examples_in,
    keys_of,
    noisy_layers,
    slice_specs,
)
from tests.parameters import mostly_slow
from tests.running import ROOT, python

# As in test_same_noise.py: 1e-15 an update, which three updates at these rates hardly amplify.
EXACT = 1e-12
FACTOR = 8
SIZES = (24, 21, 9)  # the last micro-batch is shorter, and some are missing


class InfoNCE(losses.Loss):
    """Cross-entropy of each pair among all pairs of the batch (van den Oord et al., 2018); (batch, 2, width)."""

    def call(self, y_true, y_pred):
        left, right = tf.unstack(tf.math.l2_normalize(y_pred, -1), axis=1)
        logits = tf.matmul(left, right, transpose_b=True) / 0.2
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.range(tf.shape(left)[0]), logits
        )


class Decorrelated(losses.Loss):
    """The off-diagonal of the outputs' second moments, one number for a batch, as in Barlow twins."""

    def call(self, y_true, y_pred):
        moments = tf.matmul(y_pred, y_pred, transpose_a=True) / tf.cast(
            tf.shape(y_pred)[0], y_pred.dtype
        )
        return tf.reduce_sum(tf.square(moments - tf.eye(4, dtype=y_pred.dtype)))


class Neighbours(losses.Loss):
    """For masked steps and for logits on outputs: each step's error against the mean of the batch."""

    def call(self, y_true, y_pred):
        return tf.reduce_mean(
            tf.square(y_pred - tf.reduce_mean(y_pred, 0, keepdims=True)), -1
        )


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
    left, right = keras.Input((6,)), keras.Input((5,))
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
    return keras.Model(
        inputs,
        {
            "classes": layers.Dense(4, "softmax")(hidden),
            "near": layers.UnitNormalization()(tower(hidden)),
        },
    )


def masked():
    tokens = keras.Input((5,), dtype="int64")
    return keras.Model(
        tokens, layers.Dense(4)(layers.Embedding(4, 8, mask_zero=True)(tokens))
    )


def batch_of(size, kind, seed=0):
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(size, 6)), random.integers(0, 4, size)
    weights = random.uniform(0, 2, size)
    by_kind = {
        "two towers": ((x, random.normal(size=(size, 5))), np.zeros(size)),
        "two outputs": (x, {"classes": y, "near": y}),
        "masked": (random.integers(0, 4, (size, 5)), np.zeros((size, 5, 1))),
    }
    return (
        (*by_kind.get(kind, (x, y)), weights)
        if kind == "weighted"
        else by_kind.get(kind, (x, y))
    )


KINDS = {
    "two towers": (two_towers, InfoNCE),
    "circle": (embedding, losses.Circle),
    "weighted": (embedding, losses.Circle),
    "scalar": (one_tower, Decorrelated),
    "masked": (masked, Neighbours),
    # From a softmax Keras' cross-entropy takes the logits that it has left on the output.
    "two outputs": (
        two_outputs,
        lambda: {"classes": "sparse_categorical_crossentropy", "near": losses.Circle()},
    ),
}
ACCUMULATED = {"same_noise": True, "loss_over": "effective_batch"}


def made(kind, loss=None, strategy=None):
    keras.utils.set_random_seed(0)
    with (strategy or tf.distribute.get_strategy()).scope():
        # Keras' Adam moves what has sparse rows in another way than what has dense ones: see test_embeddings.py.
        optimizer = (
            keras.optimizers.SGD(0.1)
            if kind == "masked"
            else keras.optimizers.Adam(0.01)
        )
        model = KINDS[kind][0]()
        model.compile(optimizer, loss or KINDS[kind][1]())
        optimizer.build(model.trainable_variables)
    return model


def specs(kind):
    return slice_specs(tf.nest.map_structure(tf.convert_to_tensor, batch_of(2, kind)))


def by_keras(kind, sizes=SIZES):
    """Losses and weights of the step of `train_on_batch`, on whole batches, with the noise of an update."""
    model = made(kind)
    noisy = noisy_layers(model, batch_of(1, kind)[0])

    def step(*batch):
        with drawn(noisy, keys_of(noisy), 0, examples_in(batch[0])):
            return model.train_step(batch)["loss"]

    traced, found = tf.function(step, input_signature=specs(kind), autograph=False), []
    for size in sizes:
        model.reset_metrics()
        found.append(float(traced(*batch_of(size, kind))))
    return found, model.get_weights()


def accumulated(kind, sizes=SIZES, strategy=None, **changes):
    model = made(kind, strategy=strategy)
    parts = model, KINDS[kind][1](), model.optimizer, -(-max(sizes) // FACTOR)
    update = Update(*parts, strategy=strategy, **(ACCUMULATED | changes))
    traced = tf.function(
        lambda *batch: update(batch)["loss"],
        input_signature=specs(kind),
        autograph=False,
    )
    found = [float(traced(*batch_of(size, kind))) for size in sizes]
    return found, model.get_weights()


def apart(one, other):
    return max(np.abs(a - b).max() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["two towers"]))
def test_an_accumulated_loss_equals_that_of_the_whole_batch(float64, kind):
    (losses_of, weights), (expected, aimed) = accumulated(kind), by_keras(kind)
    assert losses_of == pytest.approx(expected, rel=EXACT)
    assert apart(weights, aimed) < EXACT


def test_a_loss_of_micro_batches_is_another_one(float64):
    _, weights = accumulated("two towers", loss_over="example")
    assert apart(weights, by_keras("two towers")[1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two towers", "weighted"])
def test_replicas_gather_the_outputs(float64, kind):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    sizes = (24, 21, 1)  # the last one leaves a replica idle
    (losses_of, weights), (expected, aimed) = (
        accumulated(kind, sizes, strategy),
        by_keras(kind, sizes),
    )
    assert losses_of == pytest.approx(expected, rel=EXACT)
    assert apart(weights, aimed) < EXACT


def test_metrics_and_what_layers_count_are_those_of_one_pass(float64):
    inputs = keras.Input((6,))
    model, optimizer = (
        keras.Model(inputs, counts := Counts()(inputs)),
        keras.optimizers.SGD(),
    )
    model = keras.Model(inputs, layers.UnitNormalization()(layers.Dense(4)(counts)))
    optimizer.build(model.trainable_variables)
    seen, examples = model.layers[1].seen, keras.metrics.Mean("mean")
    metric = keras.metrics.MeanMetricWrapper(
        lambda y, outputs: tf.cast(y, "float64"), name="label"
    )
    objective = Objective(
        losses.Circle(), metrics=[metric], layer_metrics=[seen, examples]
    )
    x, y = batch_of(21, "circle")
    results = tf.function(
        Update(model, objective, optimizer, 3, **ACCUMULATED), autograph=False
    )((x, y))
    assert float(results["seen"]) == 21
    assert float(results["label"]) == pytest.approx(y.mean(), rel=EXACT)


def test_an_evaluation_is_over_each_whole_batch(float64):
    model = made("circle")
    evaluate = Evaluation(
        model, Objective(losses.Circle(), loss_over="effective_batch"), 4
    )
    x, y = batch_of(21, "circle")
    found = float(tf.function(evaluate, autograph=False)((x, y)).mean_loss())
    assert found == pytest.approx(model.test_on_batch(x, y), rel=EXACT)


@pytest.mark.slow
def test_fit_of_an_accumulating_model_equals_that_of_the_plain_one(float64):
    x, y = batch_of(44, "circle")

    def fitted(wrap):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        inner = keras.Model(inputs, layers.UnitNormalization()(layers.Dense(4)(inputs)))
        model = wrap(inner)
        model.compile(keras.optimizers.Adam(0.01), "circle")
        return model.fit(
            x, y, batch_size=24, epochs=2, shuffle=False, verbose=0
        ).history["loss"], inner.get_weights()

    wrap = lambda inner: AccumulatingModel(inner, 3, loss_over="effective_batch")  # noqa: E731
    (history, weights), (expected, aimed) = fitted(wrap), fitted(lambda inner: inner)
    assert history == pytest.approx(expected, rel=EXACT)
    assert apart(weights, aimed) < EXACT
    assert wrap(two_towers()).get_config()["loss_over"] == "effective_batch"


def test_a_loss_scale_scales_what_goes_through_the_outputs(precision):
    """A gradient of 2⁻²⁶ is none in float16; of the scaled loss it is."""
    precision("mixed_float16")
    inputs = keras.Input((1,))
    model = keras.Model(
        inputs, layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
    )
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=2.0**14
    )
    optimizer.build(model.trainable_variables)

    class Small(losses.Loss):
        def call(self, y_true, y_pred):
            return 2.0**-26 * tf.reduce_sum(y_pred, -1)

    update = Update(model, Small(), optimizer, 2, loss_over="effective_batch")
    results = tf.function(update, autograph=False)((tf.ones((4, 1)), tf.ones((4, 1))))
    assert float(results["gradient_norm"]) == 2.0**-26


def normalised():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(4)(layers.BatchNormalization()(inputs)))


def spectral():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.SpectralNormalization(layers.Dense(4))(inputs))


def frozen():
    model = normalised()
    model.layers[1].trainable = False
    return model


def updated(model, loss=None, batch=None, **given):
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    loss = Decorrelated() if loss is None else loss
    update = Update(
        model, loss, optimizer, 2, **({"loss_over": "effective_batch"} | given)
    )
    return tf.function(update, autograph=False)(batch or batch_of(6, "circle"))


STATE = "loss_over must be example for layers that move a state in training, such as BatchNormalization. Received: "
REFUSED = {
    "normalised": (lambda: updated(normalised()), STATE + "batch_normalization"),
    "spectral": (lambda: updated(spectral()), STATE + "spectral_normalization"),
    "noise": (
        lambda: updated(one_tower()),
        "same_noise must be True, and layers must be able to draw for each example, as both passes need the same noise "
        "where loss_over is effective_batch. Received: dropout",
    ),
    "two modes": (
        lambda: updated(two_outputs(), loss_over={"classes": "example"}),
        "loss_over must be the same for all outputs. Received: {'classes': 'example'}. "
        "Choices: example, effective_batch",
    ),
    "circle of micro-batches": (
        lambda: updated(embedding(), losses.Circle(), loss_over="example"),
        "loss_over must be effective_batch for a loss of several examples at once, circle. Received: 'example'",
    ),
    "marked": (
        lambda: updated(
            one_tower(),
            type("Marked", (Decorrelated,), {"couples_examples": True})(),
            loss_over=None,
        ),
        "loss_over must be effective_batch for a loss of several examples at once",
    ),
    "measured noise": (
        lambda: updated(embedding(), noise_every=2),
        "noise_every must be 0 where loss_over is effective_batch",
    ),
    "weighted scalar": (
        lambda: updated(frozen(), batch=batch_of(6, "weighted")),
        "The loss must give one value per example where there are sample weights, not a scalar. Received: decorrelated",
    ),
    "kernel": (
        lambda: accumulate_gradients(
            frozen(),
            Objective(Decorrelated(), loss_over="effective_batch"),
            batch_of(6, "circle"),
            2,
        ),
        "loss_over must be example without an Update",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_in_two_passes_is_refused(float64, name):
    function, words = REFUSED[name]
    with pytest.raises(ValueError) as refused:
        function()
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)


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
model = keras.Sequential([keras.Input((8,)), layers.Reshape((1, 8)), layers.UpSampling1D(1 << 13)])
for _ in range(16):
    model.add(layers.Dense(8, "tanh"))  # 32 examples give (32, 8192, 8) floats: 8 MiB
model.add(layers.GlobalAveragePooling1D())
optimizer = keras.optimizers.SGD()
optimizer.build(model.trainable_variables)

class Spread(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return -tf.reduce_mean(tf.square(y_pred - tf.reduce_mean(y_pred, 0)), -1)

whole = Update(model, Spread(), optimizer, 32, loss_over="effective_batch")
signature = tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1))
update = tf.function(lambda x, y: whole((x, y)), input_signature=signature)
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
    # Outputs, labels and the loss's own tensors of 2,048 examples of 8 values are 64 KiB each: nothing beside 1.1.
    assert sixty_four < 1.1 * eight
