"""What pipeline/accumulation/keras_internals.py uses of Keras and TensorFlow still is what it was read as."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from pipeline.accumulation import keras_internals

WHERE = "see pipeline/accumulation/keras_internals.py"


def test_a_mask_stays_on_the_output():
    masked = layers.Embedding(3, 2, mask_zero=True)(np.array([[1, 0]]))
    assert np.array(keras_internals.mask_of(masked)).tolist() == [[True, False]], WHERE
    assert keras_internals.mask_of(layers.Dense(2)(np.ones((1, 2)))) is None


def test_the_logits_stay_on_the_output():
    inner = layers.Dense(2, use_bias=False, kernel_initializer="ones")
    for activation in ("softmax", "sigmoid"):
        inner.activation = keras.activations.get(activation)
        assert np.array(keras_internals.logits_of(inner(np.ones((1, 3))))).tolist() == [
            [3, 3]
        ], WHERE


def test_layers_inside_of_layers_are_found():
    inside = layers.Dense(2, name="inside")
    model = keras.Sequential(
        [keras.Input((2,)), keras.Sequential([inside, layers.Dense(1)])]
    )
    assert inside in keras_internals.layers_of(model), WHERE
    assert model not in keras_internals.layers_of(model), WHERE


def test_the_global_seed_is_what_draws_without_a_seed_move():
    keras.utils.set_random_seed(0)
    assert keras_internals.global_seed() is None, WHERE
    keras_internals.global_seed(make=True)
    before = keras_internals.global_seed().numpy()
    one = keras.random.normal((2,))
    assert (keras_internals.global_seed().numpy() != before).any(), WHERE
    keras_internals.global_seed().assign(before)
    np.testing.assert_array_equal(keras.random.normal((2,)), one)


def test_a_model_checkpoint_counts_in_these():
    callback = keras.callbacks.ModelCheckpoint(
        "{epoch}.weights.h5", save_weights_only=True, save_freq=2
    )
    callback.on_epoch_begin(3)
    kept = [
        name
        for name in vars(callback)
        if name.startswith("_") and name not in ("_model", "_save_on_batch_end")
    ]
    assert set(keras_internals.MODEL_CHECKPOINT_KEEPS) <= set(kept), WHERE
    assert not callback._should_save_on_batch(0)
    assert callback._should_save_on_batch(1)


def test_what_compile_makes_of_its_arguments():
    def made():
        inputs = keras.Input((2,))
        return keras.Model(
            inputs, [layers.Dense(1, name=name)(inputs) for name in "ab"]
        )

    model = made()
    model.compile(
        loss=["mse", None],
        loss_weights=[0.5, None],
        metrics=[["mae"], []],
        weighted_metrics=[None, ["mse"]],
    )
    assert keras_internals.loss_mean(model) is model.metrics[0], WHERE
    x, y = np.ones((2, 2)), [np.ones((2, 1))] * 2
    model.compute_loss(x, y, model(x))
    model.compute_metrics(x, y, model(x))
    ((path, loss, scale, mean),) = keras_internals.compiled_losses(model)
    assert (path, loss.name, scale, mean) == ((0,), "mse", 0.5, None), WHERE
    metrics, weighted = keras_internals.compiled_metrics(model, ["a", "b"])
    assert [metric.name for metric in metrics["a"]] == ["mae"], WHERE
    assert [metric.name for metric in weighted["b"]] == ["mse"], WHERE
    model = made()
    assert keras_internals.compiled_losses(model) == []
    model.compile(loss="mse")
    model.compute_loss(x, y, model(x))
    assert [mean.name for *_, mean in keras_internals.compiled_losses(model)] == [
        "a_loss",
        "b_loss",
    ], WHERE
    assert keras_internals.compiled_metrics(model, ["a", "b"]) == ({}, {})


def test_adam_keeps_its_moments_by_variable():
    of = [keras.Variable(np.zeros(2)), keras.Variable(np.zeros(3))]
    adam = keras.optimizers.Adam(beta_1=0.5, beta_2=0.75)
    adam.build(of)
    adam.apply([np.full(2, 2.0, "float32"), np.full(3, 4.0, "float32")], of)
    moments = [keras_internals.adam_moments(adam, variable.value) for variable in of]
    assert [[moment.numpy().tolist() for moment in each] for each in moments] == [
        [[1.0] * 2, [1.0] * 2],
        [[2.0] * 3, [4.0] * 3],
    ], WHERE


def test_a_rate_that_is_a_function_is_called_once():
    calls = []
    optimizer = keras.optimizers.SGD(lambda: calls.append(0) or len(calls))
    with keras_internals.constant_rate(optimizer) as rate:
        assert (int(rate), int(optimizer.learning_rate), len(calls)) == (1, 1, 1), WHERE
    assert optimizer.learning_rate == 2, WHERE


def test_tensorflow_tells_of_derivatives_and_takes_a_declared_gradient():
    x = tf.constant(3.0)
    assert not keras_internals.pack_tangents([x]).tangents, WHERE
    with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)):
        assert keras_internals.pack_tangents([x]).tangents, WHERE
    with tf.GradientTape() as tape:
        tape.watch(x)
        with keras_internals.stop_recording():
            y = x * x
        keras_internals.record_operation("Square", [y], [x], lambda dy: (7 * dy,))
    assert float(tape.gradient(y, x)) == 7, WHERE
