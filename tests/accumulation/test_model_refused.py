"""What an `AccumulatingModel` cannot train is rejected with one line.

X are the inputs of a batch, Y its labels.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from pipeline.accumulation import (
    AccumulatingModel,
    AccumulatingOptimizer,
    Evaluation,
    Update,
    accumulate_gradients,
)
from tests.accumulation.replicas import strategy_on
from tests.parameters import mostly_slow

X = np.ones((8, 6), "float32")
Y = np.zeros(8, int)


def dense():
    return keras.Sequential([keras.Input((6,)), layers.Dense(3)])


def cross_entropy(**arguments):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(keras.Sequential):
    def compute_loss(self, **arguments):
        return super().compute_loss(**arguments)


class Reduced(losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return tf.reduce_mean(y_pred)

    def call(self, y_true, y_pred):
        return y_pred


def synchronized():
    return keras.Sequential(
        [keras.Input((6,)), layers.BatchNormalization(synchronized=True)]
    )


def float8():
    model = dense()
    model.quantize("float8")
    return model


def stateful():
    return keras.Sequential(
        [keras.Input(batch_shape=(8, 2, 6)), layers.LSTM(3, stateful=True, name="lstm")]
    )


INTEGER = "micro_batch_size must be a whole number of at least 1. Received: "
NOT_CALLED = "which is never called"


@pytest.mark.parametrize(
    ("inner", "size", "message"),
    [
        (dense, 0, INTEGER + "0"),
        (dense, True, INTEGER + "True"),
        (dense, 2.5, INTEGER + "2.5"),
        (dense, None, "micro_batch_size or micro_batch_tokens must be given"),
        (lambda: layers.Dense(3), 4, "inner must be a keras.Model. Received: Dense"),
        (
            lambda: OwnStep([layers.Dense(3)]),
            4,
            f"inner must not define train_step, {NOT_CALLED}",
        ),
        (
            lambda: OwnLoss([layers.Dense(3)]),
            4,
            f"inner must not define compute_loss, {NOT_CALLED}",
        ),
        (
            lambda: AccumulatingModel(dense(), 4),
            2,
            f"inner must not define train_step, {NOT_CALLED}",
        ),
        (synchronized, 4, "inner must have no BatchNormalization(synchronized=True)"),
        (
            float8,
            4,
            "inner must have no weights that are overwritten with their gradient, "
            "as in float8",
        ),
        (
            stateful,
            4,
            "inner must have no stateful RNN, because its states belong to the "
            "examples of one batch. Received: lstm",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(inner, size, message):
    with pytest.raises(ValueError) as refused:
        AccumulatingModel(inner(), size)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["same_noise", "loss_over", "added_losses"])
def test_a_word_that_is_no_choice_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name} must be .* Received: 'often'"):
        AccumulatingModel(dense(), 2, **{name: "often"})


def test_xla_without_lengths_is_refused_by_compile():
    model = AccumulatingModel(dense(), micro_batch_tokens=8)
    with pytest.raises(ValueError, match=r"jit_compile must be .* Received: True$"):
        model.compile("sgd", cross_entropy(), jit_compile=True)

    with_lengths = AccumulatingModel(dense(), micro_batch_tokens=8, xla_lengths=[8])
    with_lengths.compile("sgd", cross_entropy(), jit_compile=True)


def pooled():
    """Return a model of dense sequences, in which Keras fails with ragged ones."""
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int64"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3),
        ]
    )


@pytest.mark.parametrize(
    "method", mostly_slow(["fit", "evaluate", "predict"], ["predict"])
)
def test_ragged_inputs_need_a_cut_by_tokens(method):
    x = tf.ragged.constant([[1, 2], [3], [4, 5, 6, 7]], dtype=tf.int64)
    data = tf.data.Dataset.from_tensor_slices((x, [0, 1, 2])).batch(3)
    model = AccumulatingModel(pooled(), 2)
    model.compile("sgd", cross_entropy())
    message = r"^micro_batch_tokens must be given, .* Received: sequential"
    with pytest.raises(ValueError, match=message):
        getattr(model, method)(data, verbose=0)

    by_tokens = AccumulatingModel(pooled(), 2, micro_batch_tokens=6)
    by_tokens.compile("sgd", cross_entropy())
    getattr(by_tokens, method)(data, verbose=0)


def test_ragged_inputs_of_the_update_and_the_kernel_too():
    x = tf.ragged.constant([[1, 2], [3], [4, 5, 6, 7]], dtype=tf.int64)
    batch = (x, tf.constant([0, 1, 2]))
    message = "micro_batch_tokens must be given"
    with pytest.raises(ValueError, match=message):
        accumulate_gradients(pooled(), cross_entropy(), batch, 2)
    update = Update(pooled(), cross_entropy(), keras.optimizers.SGD(), 2)
    with pytest.raises(ValueError, match=message):
        tf.function(update)(batch)
    evaluation = Evaluation(pooled(), cross_entropy(), 2)
    with pytest.raises(ValueError, match=message):
        tf.function(evaluation)(batch)


@pytest.mark.parametrize("make", [float8, stateful])
def test_so_do_the_update_and_the_kernel(make):
    with pytest.raises(ValueError, match=r"^model must have no"):
        accumulate_gradients(make(), "mse", (X, Y), 4)


class OwnDropout(layers.Dropout):
    def call(self, inputs, training=False):
        return super().call(inputs, training)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noisy", "name"),
    [
        (lambda: layers.LSTM(3, dropout=0.5, name="noisy"), "noisy"),
        (lambda: layers.RandomFlip("horizontal", name="noisy"), "noisy"),
        (lambda: OwnDropout(0.5, name="noisy"), "noisy"),
    ],
)
def test_noise_that_depends_on_the_cut_is_refused(noisy, name):
    x = np.ones((8, 6, 4), "float32")
    inner = keras.Sequential(
        [keras.Input((6, 4)), noisy(), layers.Flatten(), layers.Dense(3)]
    )
    model = AccumulatingModel(inner, 4, same_noise=True)
    model.compile("sgd", cross_entropy())
    message = f"same_noise must be .* Received: True, {name}"
    with pytest.raises(ValueError, match=message):
        model.fit(x, Y, verbose=0)

    model = AccumulatingModel(inner, 4, same_noise="auto")
    model.compile("sgd", cross_entropy())
    with pytest.warns(UserWarning, match=f"noise of each micro-batch.*: {name}"):
        model.fit(x, Y, verbose=0)


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        (
            lambda: {"run_eagerly": True},
            "run_eagerly must be False, because micro-steps are traced",
        ),
        (
            lambda: {"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2)},
            "the optimizer must not accumulate gradients itself",
        ),
        (
            lambda: {"optimizer": AccumulatingOptimizer(keras.optimizers.SGD(), 2)},
            "the optimizer must not accumulate gradients itself",
        ),
        (dict, "No loss to compute"),
        (
            lambda: {"loss": [cross_entropy(), cross_entropy()]},
            "loss must have only one entry per output",
        ),
        (lambda: {"loss": Reduced()}, "loss must compute one value per example"),
        (
            lambda: {"loss": cross_entropy(reduction="none")},
            "The loss must have a reduction",
        ),
    ],
)
def test_what_compile_cannot_be_given(compiled, message):
    model = AccumulatingModel(dense(), 4)

    def fit():
        model.compile(**compiled())
        model.fit(X, Y, verbose=0)

    with pytest.raises(ValueError) as refused:
        fit()
    assert message in str(refused.value)


def test_a_strategy_that_does_not_fit():
    strategy = strategy_on(2)
    inner = dense()
    message = "inner must be made in the scope of the strategy"
    with strategy.scope(), pytest.raises(ValueError, match=message):
        AccumulatingModel(inner, 4)

    with strategy.scope():
        mirrored = dense()
    model = AccumulatingModel(mirrored, 4)
    model.compile("sgd", cross_entropy())
    message = "fit must be called outside of the strategy's scope"
    with strategy.scope(), pytest.raises(ValueError, match=message):
        model.fit(X, Y, verbose=0)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    distributed = strategy.experimental_distribute_dataset(data)
    with pytest.raises(ValueError, match="the dataset must not be distributed"):
        model.fit(distributed, verbose=0)
